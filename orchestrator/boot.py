"""The cold-boot cycle of one planned boot, as a generator of records.

The steps stand in `_Boot.run` in their order. Each has a deadline and is a record; whatever happens in one of them, the
last step (stop) is done and the boot has an outcome:

completed    every level was tried (levels may have failed: the engine answered errors and lived on)
crashed      the engine died, at whatever step
not_ready    the engine lives but was not ready, or stopped answering, by the deadline
disturbed    the rig's fault: no clean slate, not cold, the box's commands failed; the boot is repeated
aborted      we were asked to stop
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx

from orchestrator import load
from orchestrator.box import caches, facts, way
from orchestrator.box.engines import Launch
from orchestrator.box.unit import COMMAND_S
from orchestrator.errors import BoxError, ColdbootError, ProblemsError
from orchestrator.exercise import Exercise
from orchestrator.failpoints import reached
from orchestrator.hangs import LATE
from orchestrator.journal import Classifier
from orchestrator.ledger import write_private
from orchestrator.life import Done, Ending, Life, Planned, Rig, Work
from orchestrator.records import AnyRecord, BootEnded, BootStarted, JournalAnswered, StepEnded, StepName
from orchestrator.redact import redact_argv, redact_env, redact_text
from orchestrator.watch import Watch

HEALTH_EVERY_S = 0.02
SETTLING_BOOTS = 2
SETTLED = ".coldboot-settled"
GPU_IDLE_SLACK_MIB = 64
FULL_DISK_MIB = 16
# An engine may even hang while it writes to such a journal; a slow one has not written anything yet.
SILENCE_S = 10.0
SILENT = "the journal is silent: not one entry since the start"
# By the journal's answer: what somebody else did, and the variant has no part in.
SOMEBODY = {
    "stopped_from_outside": "stopped the unit",
    "benign_shutdown": "stopped the unit",
    "benign_shutdown_slow": "stopped the unit",
    "port_in_use": "took the engine's port",
}


def cycle(planned: Planned, launch: Launch, rig: Rig) -> Iterator[AnyRecord]:
    """Boots once, measures, stops; yields each record when it is true.

    Raises:
        BoxError: the box was lost, after the boot's end is recorded as disturbed.
        ProblemsError: the user's own prompts do not fit this engine, after the boot's end is recorded as aborted.
    """
    yield from _Boot(planned, launch, rig).run()


class _Boot:
    def __init__(self, planned: Planned, launch: Launch, rig: Rig) -> None:
        self.life = Life(planned, launch, rig)
        self.exercise = Exercise(self.life)
        self.begun = time.monotonic()
        self.total_engine_s = 0.0
        self.roots: caches.ColdRoots | None = None
        self.proof: str | None = None
        self.settling = False

    # --- the cycle -------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[AnyRecord]:
        yield BootStarted(
            **self.life.key, command=redact_argv(self.life.launch.argv), env=redact_env(self.life.launch.env)
        )
        end = Ending("completed", "every level was tried")
        last: StepName | None = None
        lost: ColdbootError | None = None
        steps: tuple[tuple[StepName, Callable[[], Work]], ...] = (
            ("clean_slate", self.clean_slate),
            ("cold", self.cold),
            *((("settle", self.settle),) if self.life.planned.cache == "warm" else ()),
            ("render", self.render),
            ("start", self.start),
            ("ready", self.ready),
            ("first_request", self.exercise.first_request),
            ("headroom", self.exercise.headroom),
            ("sanity", self.exercise.sanity),
            ("trials", self.exercise.trials),
        )
        for name, work in steps:
            last = name
            try:
                yield from self.step(name, work)
            except Ending as ending:
                end = ending
                break
            except ProblemsError as error:
                # Not the variant's fault and not to be repeated: the campaign ends, when this engine has.
                end, lost = Ending("aborted", error.problems[0]), error
                break
        try:
            yield from self.step("stop", lambda: self.stop(polite=end.outcome == "completed"))
        except Ending as ending:
            end = end if end.outcome != "completed" else ending
        except BoxError as error:
            lost = lost or error
        if end.outcome == "completed" and self.exercise.failed_at:
            end = Ending("completed", f"{end.why}; failed at {', '.join(map(str, self.exercise.failed_at))}")
        yield from self.finish(end, last)
        if lost is not None:
            raise lost

    def step(self, name: StepName, work: Callable[[], Work]) -> Iterator[AnyRecord]:
        """Runs one stage and yields its record; a box that fails disturbs the boot, except while stopping."""
        begun = time.monotonic()
        self.life.engine_s = 0.0
        reached(name)

        def record(outcome: str, detail: str | None, found: dict[str, Any]) -> StepEnded:
            seconds = time.monotonic() - begun
            engine_s = min(self.life.engine_s, seconds)
            self.total_engine_s += engine_s
            return StepEnded(
                **self.life.key,
                name=name,
                seconds=round(seconds, 6),
                engine_s=round(engine_s, 6),
                outcome=outcome,
                detail=detail,
                facts=found,
            )

        try:
            done = yield from work()
        except Ending as told:
            ending = self.blamed(told)
            yield record("disturbed" if ending.outcome == "disturbed" else "failed", ending.why, ending.found)
            raise ending from told
        except ProblemsError as error:
            yield record("failed", error.problems[0], {"problems": list(error.problems)})
            raise
        except BoxError as error:
            # A failed command is shown with its arguments, which may hold a key.
            yield record("disturbed", redact_text(str(error)), {})
            if name == "stop":
                raise
            raise Ending("disturbed", redact_text(f"{name}: {error.what}")) from error
        yield record("skipped" if done.skipped else "ok", done.detail, done.facts)

    def blamed(self, ending: Ending) -> Ending:
        """The ending, but that the boot is disturbed when a death or a hang is somebody else's doing."""
        if ending.outcome not in ("crashed", "not_ready") or self.life.watch is None:
            return ending
        why = self.excuse(self.life.watch)
        return ending if why is None else Ending("disturbed", redact_text(why), died=ending.died)

    def excuse(self, watch: Watch) -> str | None:
        """Why what happened says nothing about the variant; None when it does."""
        try:
            self.life.rig.service.beat()
        except BoxError as error:
            return error.what
        if not watch.seen and time.monotonic() - self.begun > SILENCE_S:
            return SILENT
        cause = watch.answer().cause
        if cause in SOMEBODY:
            return f"somebody else {SOMEBODY[cause]} ({cause})"
        with suppress(BoxError):
            if suspended := facts.suspended(self.life.rig.transport, self.life.rig.service.pids()):
                return f"somebody suspended its processes: {suspended}"
            if cause == "disk_full":
                rig = self.life.rig
                cold = caches.free_mib(rig.transport, rig.unit, root=rig.cache_root)
                free = min([*(mib for mib, _ in rig.room()), *([] if cold is None else [cold])], default=None)
                if free is not None and free < FULL_DISK_MIB:
                    return f"the disk of the caches is full: {free} MiB free"
        return None

    def finish(self, end: Ending, last: StepName | None) -> Iterator[AnyRecord]:
        """The journal's answer and the boot's end."""
        if self.life.watch is not None:
            yield JournalAnswered(**self.life.key, answer=self.life.watch.answer())
        seconds = time.monotonic() - self.begun
        yield BootEnded(
            **self.life.key,
            boot_outcome=end.outcome,
            why=end.why,
            step=None if end.outcome == "completed" else last,
            died=end.died,
            seconds=round(seconds, 6),
            ours_s=round(max(0.0, seconds - self.total_engine_s), 6),
            cache_proof=self.proof,
        )

    # --- the steps -------------------------------------------------------------------------------------------------

    def clean_slate(self) -> Work:
        """Nothing of the engine is left: no process, no GPU memory, no listener."""
        yield from ()
        service = self.life.rig.service
        if service.pids() or service.state().active_state not in ("inactive", "failed"):
            with self.life.engine_time():
                # What a killed or lost boot left is ours and serves nobody; production is stopped politely.
                service.stop(kill=service.ours(), deadline_s=self.life.rig.deadlines.stop_s)
        left: list[str] = []

        def clean() -> bool:
            left[:] = self.leftovers()
            return not left

        late = Ending(LATE["clean_slate"], "no clean slate")
        try:
            self.life.wait_for(clean, deadline_s=self.life.rig.deadlines.clean_slate_s, every_s=0.2, late=late)
        except Ending as ending:
            if ending is late:
                raise Ending(late.outcome, f"no clean slate: {'; '.join(left)}") from None
            raise
        return Done(facts={} if self.life.gpus is None else _gpu_facts(self.life.gpus))

    def leftovers(self) -> list[str]:
        """What still stands in the way of a clean start, in words."""
        left = []
        pids = self.life.rig.service.pids()
        if pids:
            left.append(f"processes of the unit still run: {', '.join(map(str, pids))}")
        if self.life.launch.port in facts.listening_ports(self.life.rig.transport):
            left.append(f"port {self.life.launch.port} is taken")
        left.extend(self.gpu_leftovers())
        left.extend(self.too_hot())
        return left

    def too_hot(self) -> list[str]:
        """GPUs that are hotter than a boot may begin with."""
        limit = self.life.rig.temperature_c
        if limit is None or self.life.gpus is None:
            return []
        heat = [gpu.temperature_c for gpu in self.life.gpus.gpus]
        return [f"GPU {n} has {t} °C, limit {limit}" for n, t in enumerate(heat) if t is not None and t > limit]

    def gpu_leftovers(self) -> list[str]:
        gpus = self.life.gpus = facts.gpu_state(self.life.rig.transport)
        if gpus is None:
            return []
        left = [f"process {pid} holds GPU memory" for pid in gpus.compute_pids]
        idle = self.life.rig.idle
        if idle.used_mib is None or len(idle.used_mib) != len(gpus.used_mib):
            if not left:
                idle.used_mib = gpus.used_mib
            return left
        for index, (used, floor) in enumerate(zip(gpus.used_mib, idle.used_mib, strict=True)):
            if used > floor + GPU_IDLE_SLACK_MIB:
                left.append(f"GPU {index} still has {used} MiB in use, {floor} MiB when idle")
        idle.used_mib = tuple(min(pair) for pair in zip(gpus.used_mib, idle.used_mib, strict=True))
        return left

    def cold(self) -> Work:
        """Empty cache directories of this boot's own, or the state that the plan asks for."""
        yield from ()
        self.roots = caches.prepare(
            self.life.rig.transport,
            self.life.rig.unit,
            self.life.rig.engine,
            experiment=self.life.rig.experiment,
            boot=self.life.planned.boot,
            variant=self.life.planned.variant,
            state=self.life.planned.cache,
            root=self.life.rig.cache_root,
            clear=self.life.rig.clear,
        )
        self.life.launch = replace(self.life.launch, env={**self.life.launch.env, **self.roots.env})
        return Done(self.roots.root, {"empty": self.roots.empty})

    def render(self) -> Work:
        """Our own drop-in, and nothing of the user's; a copy of it, without secrets, stands beside the ledger."""
        yield from ()
        actions = self.life.rig.service.install_actions(self.life.launch)
        given = [redact_text(action.text) for action in actions if action.input]
        if given:
            write_private(self.life.folder / "drop-in.txt", "\n".join(given).encode())
        self.life.rig.service.install(self.life.launch)
        return Done()

    def settle(self) -> Work:
        """Two unmeasured boots that fill this variant's own caches: cold, second and settled are three states.

        The second boot still compiles kernels that the first one left elsewhere; from the third on nothing is
        compiled. A variant that dies here cannot be warm, and that is its answer.
        """
        assert self.roots is not None
        mark = f"{self.roots.root}/{SETTLED}"
        user = self.life.rig.unit.user
        if (
            self.life.rig.transport.run(("test", "-e", mark), timeout_s=COMMAND_S, check=False, as_user=user).status
            == 0
        ):
            return Done("settled by an earlier boot", skipped=True)
        seconds = []
        self.settling = True
        for number in range(1, SETTLING_BOOTS + 1):
            begun = time.monotonic()
            self.life.rig.service.install(self.life.launch)
            yield from self.start(f"journal-settle-{number}.jsonl")
            for work in (self.ready, self.exercise.first_request, self.exercise.headroom):
                yield from work()
            self.halt(polite=True)
            seconds.append(round(time.monotonic() - begun, 3))
        self.settling = False
        self.life.rig.transport.run(("touch", mark), timeout_s=COMMAND_S, as_user=user)
        return Done(facts={"settling_boots_s": seconds})

    def start(self, journal: str = "journal.jsonl") -> Work:
        """The journal's place is taken before the unit starts, so that no line is missed."""
        yield from ()
        service = self.life.rig.service
        stream = service.follow(service.cursor())
        self.life.watch = Watch(
            stream,
            Classifier(self.life.rig.rules, unit=self.life.rig.unit.name),
            self.life.folder / journal,
            self.life.rig.engine.logger_tokens_per_s,
        )
        self.life.watch.begin()
        service.start()
        self.life.identity = service.state()
        return Done(
            facts={"invocation_id": self.life.identity.invocation_id, "main_pid": self.life.identity.main_pid},
        )

    def ready(self) -> Work:
        """/health answers 200 from what we asked for, raced against death and the deadline."""
        yield from ()
        assert self.life.watch is not None
        host, port = self.life.rig.transport.reach(self.life.launch.port)
        base_url = f"http://{host}:{port}"
        with self.life.engine_time(), httpx.Client(base_url=base_url, timeout=2.0, trust_env=False) as client:
            late = Ending(LATE["ready"], f"not ready after {self.life.rig.deadlines.ready_s:g} s")
            self.life.wait_for(
                lambda: _healthy(client, self.life.rig.engine.health_path),
                deadline_s=self.life.rig.deadlines.ready_s,
                every_s=HEALTH_EVERY_S,
                late=late,
            )
        noticed_at_s = time.time()
        self.life.watch.mark("ready")
        self.life.target = load.Target(
            base_url=base_url, model=self.life.launch.model, api_key=self.life.launch.api_key or self.life.rig.api_key
        )
        self.life.identity = self.life.check_unit()
        self.check_listener()
        self.check_command()
        if not self.life.watch.seen:
            raise Ending("disturbed", SILENT)
        timeline = self.life.watch.timeline()
        self.proof = self.life.rig.engine.cache_proof(timeline, self.life.launch)
        if self.life.planned.cache in ("cold", "clear") and self.proof in ("loaded", "mixed"):
            raise Ending("disturbed", f"not cold: the engine's log says {self.proof} instead of compiled")
        if self.life.planned.cache == "warm" and not self.settling and self.proof in ("compiled", "mixed"):
            raise Ending("disturbed", f"not warm: the engine's log says {self.proof} instead of loaded")
        return Done(
            facts={
                "noticed_at_s": round(noticed_at_s, 4),
                "cache_proof": self.proof,
                "timeline": timeline.model_dump(mode="json", exclude_none=True),
                **self.way_facts(),
            }
        )

    def way_facts(self) -> dict[str, Any]:
        """What the way to the box adds to a request, once a session, as soon as something answers there."""
        if self.life.rig.way.asked:
            return {}
        self.life.rig.way.asked = True
        added_ms = way.added_ms(
            self.life.rig.transport, self.life.launch.argv, self.life.launch.port, self.life.rig.engine.health_path
        )
        return {} if added_ms is None else {"forward_ms": round(added_ms, 3)}

    def check_listener(self) -> None:
        """What answers is the engine that we started: a stranger on its port would be measured in its place."""
        rig, port = self.life.rig, self.life.launch.port
        if facts.listens(rig.transport, port, rig.service.pids()) is False:
            raise Ending("disturbed", f"another program than the engine answers on port {port}")

    def check_command(self) -> None:
        """What really runs is what the matrix asked for."""
        argv = self.life.rig.service.command()
        if argv and argv != self.life.launch.argv:
            runs, asked = redact_argv(argv), redact_argv(self.life.launch.argv)
            extra = [word for word in runs if word not in asked]
            missing = [word for word in asked if word not in runs]
            raise Ending("disturbed", f"another command runs: missing {missing}, not asked for {extra}")

    def stop(self, *, polite: bool) -> Work:
        """Stops the unit, notes how the memory drains, and takes this boot's caches away."""
        yield from ()
        found = self.halt(polite=polite)
        if self.roots is not None:
            self.roots.remove()
        return Done(facts=found)

    def halt(self, *, polite: bool) -> dict[str, Any]:
        """Ends the engine: politely when it serves, by killing its cgroup when the boot is over or it still boots."""
        found: dict[str, Any] = {"polite": polite}
        watch = self.life.watch
        if watch is not None:
            watch.mark("stop_requested")
        try:
            if watch is not None or self.life.identity is not None:
                with self.life.engine_time():
                    begun = time.monotonic()
                    self.life.rig.service.stop(kill=not polite, deadline_s=self.life.rig.deadlines.stop_s)
                    found["exit_s"] = round(time.monotonic() - begun, 4)
                    found |= self.memory_drain()
        finally:
            if watch is not None:
                watch.settle(quiet_s=0.05, deadline_s=0.5)
                watch.close()
            self.life.identity = self.exercise.scale = None
        return found

    def memory_drain(self) -> dict[str, Any]:
        """Seconds until the GPUs are back at the idle level; empty without GPUs."""
        if self.life.rig.idle.used_mib is None:
            return {}
        begun = time.monotonic()
        end = begun + self.life.rig.deadlines.clean_slate_s
        while self.gpu_leftovers() and time.monotonic() < end:
            self.life.rig.interrupts.wait(0.1)
        return {"gpu_drained_s": round(time.monotonic() - begun, 4)}


def _gpu_facts(state: facts.GpuState) -> dict[str, Any]:
    """What a boot begins with, to hold beside its speed: memory, clocks and temperature of each GPU."""
    temperatures = [gpu.temperature_c for gpu in state.gpus if gpu.temperature_c is not None]
    return {
        "free_mib": list(state.free_mib),
        "gpu_idle_mib": list(state.used_mib),
        "sm_clock_mhz": [gpu.sm_clock_mhz for gpu in state.gpus],
        "throttle": sorted({reason for gpu in state.gpus for reason in gpu.throttle or ()}),
        **({"start_temperature_c": max(temperatures)} if temperatures else {}),
    }


def _healthy(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
