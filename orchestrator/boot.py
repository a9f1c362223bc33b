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

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import httpx
import orjson

from orchestrator import load
from orchestrator.box import caches, facts, gpuwatch, way
from orchestrator.box.engines import Engine, Launch
from orchestrator.box.services import Service, UnitFacts, UnitState
from orchestrator.box.transports import Transport
from orchestrator.box.unit import COMMAND_S
from orchestrator.errors import BoxError, ColdbootError, ProblemsError
from orchestrator.failpoints import reached
from orchestrator.hangs import ALIVE_S, LATE
from orchestrator.interrupts import Interrupts
from orchestrator.journal import DEFAULT, Classifier, RuleSet
from orchestrator.ledger import write_private
from orchestrator.matrix import Deadlines, LoadSpec
from orchestrator.promptfile import PromptFile
from orchestrator.records import (
    AnyRecord,
    BootEnded,
    BootOutcome,
    BootStarted,
    CacheState,
    Evidence,
    JournalAnswered,
    Level,
    RequestTiming,
    StepEnded,
    StepName,
    TrialEnded,
    levels_of,
)
from orchestrator.redact import redact_argv, redact_env, redact_text
from orchestrator.watch import Watch

HEALTH_EVERY_S = 0.02
STATE_EVERY_S = 1.0
DISTURBED_TRIALS = 3
SETTLING_BOOTS = 2
SETTLED = ".coldboot-settled"
GPU_IDLE_SLACK_MIB = 64
FULL_DISK_MIB = 16
STALLED_S = 1.5
# An engine may even hang while it writes to such a journal; a slow one has not written anything yet.
SILENCE_S = 10.0
SILENT = "the journal is silent: not one entry since the start"
STOPPED = ("stopped_from_outside", "benign_shutdown", "benign_shutdown_slow")


class Planned(Protocol):
    """What this room needs of a planned boot (`plan.PlannedBoot` has it)."""

    @property
    def boot(self) -> str:
        """Its name, unique in the experiment."""

    @property
    def variant(self) -> str:
        """The engine configuration."""

    @property
    def cache(self) -> CacheState:
        """The cache state to start from."""

    @property
    def block(self) -> int:
        """The block, from 1."""

    @property
    def position(self) -> int:
        """The place in the plan, from 1."""

    @property
    def attempt(self) -> int:
        """1, or more for a repeat."""


@dataclass(slots=True)
class GpuIdle:
    """The box's idle level: the least memory used on each GPU, seen while nothing of ours ran."""

    used_mib: tuple[int, ...] | None = None


@dataclass(slots=True)
class Way:
    """Whether this session has asked already what the way to the box adds to a request."""

    asked: bool = False


@dataclass(frozen=True, slots=True)
class Rig:
    """Everything that is the same for all boots of one campaign."""

    transport: Transport
    service: Service
    engine: Engine
    unit: UnitFacts
    experiment: str
    load: LoadSpec
    deadlines: Deadlines
    concurrency: tuple[int, ...]
    headroom: bool
    seed: int
    boot_folder: Callable[[str], Path]
    interrupts: Interrupts
    cache_root: str | None = None
    clear: Callable[[], tuple[str, ...]] | None = None
    api_key: str | None = None
    temperature_c: int | None = None
    idle: GpuIdle = field(default_factory=GpuIdle)
    way: Way = field(default_factory=Way)
    rules: RuleSet = DEFAULT
    prompts: PromptFile | None = None

    @property
    def levels(self) -> tuple[Level, ...]:
        """What each boot measures, in order: lengths ascending, concurrencies ascending within a length."""
        return levels_of(self.concurrency, self.load.lengths)


class _Ending(Exception):
    """The boot ends here, with this outcome."""

    def __init__(
        self, outcome: BootOutcome, why: str, *, died: bool = False, found: dict[str, Any] | None = None
    ) -> None:
        super().__init__(why)
        self.outcome: BootOutcome = outcome
        self.why = why
        self.died = died
        self.found = found or {}


@dataclass(slots=True)
class _Done:
    """What a step found out."""

    detail: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    skipped: bool = False


_Work = Generator[AnyRecord, None, _Done]


def cycle(planned: Planned, launch: Launch, rig: Rig) -> Iterator[AnyRecord]:
    """Boots once, measures, stops; yields each record when it is true.

    Raises:
        BoxError: the box was lost, after the boot's end is recorded as disturbed.
        ProblemsError: the user's own prompts do not fit this engine, after the boot's end is recorded as aborted.
    """
    yield from _Boot(planned, launch, rig).run()


class _Boot:
    def __init__(self, planned: Planned, launch: Launch, rig: Rig) -> None:
        self.planned = planned
        self.launch = launch
        self.rig = rig
        self.folder = rig.boot_folder(planned.boot)
        self.key: dict[str, Any] = {
            "boot": planned.boot,
            "variant": planned.variant,
            "cache": planned.cache,
            "block": planned.block,
            "position": planned.position,
            "attempt": planned.attempt,
        }
        self.begun = time.monotonic()
        self.engine_s = 0.0
        self.total_engine_s = 0.0
        self.roots: caches.ColdRoots | None = None
        self.watch: Watch | None = None
        self.identity: UnitState | None = None
        self.proof: str | None = None
        self.settling = False
        self.failed_at: dict[Level, None] = {}
        self.target: load.Target | None = None
        self.scale: load.Scale | None = None
        own, repeat = rig.prompts, rig.load.repeat_prompts
        self.own = None if own is None else load.OwnPrompts(own.prompts, str(rig.seed), repeat=repeat)
        self.gpus: facts.GpuState | None = None

    # --- the cycle -------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[AnyRecord]:
        yield BootStarted(**self.key, command=redact_argv(self.launch.argv), env=redact_env(self.launch.env))
        end = _Ending("completed", "every level was tried")
        last: StepName | None = None
        lost: ColdbootError | None = None
        steps: tuple[tuple[StepName, Callable[[], _Work]], ...] = (
            ("clean_slate", self.clean_slate),
            ("cold", self.cold),
            *((("settle", self.settle),) if self.planned.cache == "warm" else ()),
            ("render", self.render),
            ("start", self.start),
            ("ready", self.ready),
            ("first_request", self.first_request),
            ("headroom", self.headroom),
            ("sanity", self.sanity),
            ("trials", self.trials),
        )
        for name, work in steps:
            last = name
            try:
                yield from self.step(name, work)
            except _Ending as ending:
                end = ending
                break
            except ProblemsError as error:
                # Not the variant's fault and not to be repeated: the campaign ends, when this engine has.
                end, lost = _Ending("aborted", error.problems[0]), error
                break
        try:
            yield from self.step("stop", lambda: self.stop(polite=end.outcome == "completed"))
        except _Ending as ending:
            end = end if end.outcome != "completed" else ending
        except BoxError as error:
            lost = lost or error
        if end.outcome == "completed" and self.failed_at:
            end = _Ending("completed", f"{end.why}; failed at {', '.join(map(str, self.failed_at))}")
        yield from self.finish(end, last)
        if lost is not None:
            raise lost

    def step(self, name: StepName, work: Callable[[], _Work]) -> Iterator[AnyRecord]:
        """Runs one stage and yields its record; a box that fails disturbs the boot, except while stopping."""
        begun = time.monotonic()
        self.engine_s = 0.0
        reached(name)

        def record(outcome: str, detail: str | None, found: dict[str, Any]) -> StepEnded:
            seconds = time.monotonic() - begun
            engine_s = min(self.engine_s, seconds)
            self.total_engine_s += engine_s
            return StepEnded(
                **self.key,
                name=name,
                seconds=round(seconds, 6),
                engine_s=round(engine_s, 6),
                outcome=outcome,
                detail=detail,
                facts=found,
            )

        try:
            done = yield from work()
        except _Ending as told:
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
            raise _Ending("disturbed", redact_text(f"{name}: {error.what}")) from error
        yield record("skipped" if done.skipped else "ok", done.detail, done.facts)

    def blamed(self, ending: _Ending) -> _Ending:
        """The ending, but that the boot is disturbed when a death or a hang is somebody else's doing."""
        if ending.outcome not in ("crashed", "not_ready") or self.watch is None:
            return ending
        why = self.excuse(self.watch)
        return ending if why is None else _Ending("disturbed", redact_text(why), died=ending.died)

    def excuse(self, watch: Watch) -> str | None:
        """Why what happened says nothing about the variant; None when it does."""
        try:
            self.rig.service.beat()
        except BoxError as error:
            return error.what
        if not watch.seen and time.monotonic() - self.begun > SILENCE_S:
            return SILENT
        cause = watch.answer().cause
        if cause in STOPPED:
            return f"somebody else stopped the unit ({cause})"
        with suppress(BoxError):
            if suspended := facts.suspended(self.rig.transport, self.rig.service.pids()):
                return f"somebody suspended its processes: {suspended}"
            if cause == "disk_full":
                free_mib = caches.free_mib(self.rig.transport, self.rig.unit, root=self.rig.cache_root)
                if free_mib is not None and free_mib < FULL_DISK_MIB:
                    return f"the disk of the caches is full: {free_mib} MiB free"
        return None

    def finish(self, end: _Ending, last: StepName | None) -> Iterator[AnyRecord]:
        """The journal's answer and the boot's end."""
        if self.watch is not None:
            yield JournalAnswered(**self.key, answer=self.watch.answer())
        seconds = time.monotonic() - self.begun
        yield BootEnded(
            **self.key,
            boot_outcome=end.outcome,
            why=end.why,
            step=None if end.outcome == "completed" else last,
            died=end.died,
            seconds=round(seconds, 6),
            ours_s=round(max(0.0, seconds - self.total_engine_s), 6),
            cache_proof=self.proof,
        )

    # --- waiting ---------------------------------------------------------------------------------------------------

    @contextmanager
    def engine_time(self) -> Iterator[None]:
        """What passes inside belongs to the engine: it starts, works, dies, or is under load."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.engine_s += time.monotonic() - begun

    def cancelled(self) -> str | None:
        """Why waiting and load must end now: an interruption or the engine's death."""
        reason = self.rig.interrupts.reason
        if reason is not None:
            return reason
        alarm = None if self.watch is None else self.watch.alarm
        return None if alarm is None else f"the journal says {alarm.rule}"

    def check(self) -> None:
        """Raises the boot's ending when there is one: interrupted, dead, or the journal was lost."""
        reason = self.rig.interrupts.reason
        if reason is not None:
            raise _Ending("aborted", reason)
        if self.watch is None:
            return
        alarm = self.watch.alarm
        if alarm is not None:
            raise self.death(alarm)
        if self.watch.broken is not None:
            raise _Ending("disturbed", f"the journal could not be followed: {self.watch.broken.what}")

    def death(self, alarm: Evidence) -> _Ending:
        """The ending by a fatal entry; the journal is given a moment to finish its sentence."""
        assert self.watch is not None
        self.watch.settle(quiet_s=0.05, deadline_s=0.5)
        answer = self.watch.answer()
        # The alarm is the first entry that says the engine is dead; the answer's first evidence says what killed it.
        root = answer.evidence[0] if answer.evidence else alarm
        found: dict[str, Any] = {}
        if alarm.at_us is not None and self.watch.alarm_seen_at_s is not None:
            # Both clocks are the box's and ours; over ssh their difference is in this number too.
            found["noticed_after_s"] = round(self.watch.alarm_seen_at_s - alarm.at_us / 1e6, 4)
        why = f"{answer.cause} in {answer.phase}: {redact_text(root.text)[:300]}"
        return _Ending("crashed", why, died=True, found=found)

    def check_unit(self) -> UnitState:
        """The unit's state; raises when it is no longer the one that we started."""
        state = self.rig.service.state()
        if state.active_state in ("failed", "inactive") or (state.main_pid or 0) == 0:
            if self.watch is not None:
                self.watch.wait(1.0)
                self.check()
            raise _Ending(
                "crashed",
                f"the unit is {state.active_state} (result {state.result}, status {state.exit_status}) "
                "and the journal names no cause",
                died=True,
            )
        return state

    def wait_for(self, ready: Callable[[], bool], *, deadline_s: float, every_s: float, late: _Ending) -> None:
        """Waits until `ready`, racing it against death, interruption, the unit's exit and the deadline."""
        end = time.monotonic() + deadline_s
        look_at_unit = time.monotonic() + STATE_EVERY_S
        while not ready():
            self.check()
            now = time.monotonic()
            if now >= end:
                raise late
            if self.identity is not None and now >= look_at_unit:
                self.check_unit()
                look_at_unit = time.monotonic() + STATE_EVERY_S
            if self.watch is None:
                self.rig.interrupts.wait(every_s)
            else:
                self.watch.wait(every_s)

    # --- the steps -------------------------------------------------------------------------------------------------

    def clean_slate(self) -> _Work:
        """Nothing of the engine is left: no process, no GPU memory, no listener."""
        yield from ()
        service = self.rig.service
        if service.pids() or service.state().active_state not in ("inactive", "failed"):
            with self.engine_time():
                # What a killed or lost boot left is ours and serves nobody; production is stopped politely.
                service.stop(kill=service.ours(), deadline_s=self.rig.deadlines.stop_s)
        left: list[str] = []

        def clean() -> bool:
            left[:] = self.leftovers()
            return not left

        late = _Ending(LATE["clean_slate"], "no clean slate")
        try:
            self.wait_for(clean, deadline_s=self.rig.deadlines.clean_slate_s, every_s=0.2, late=late)
        except _Ending as ending:
            if ending is late:
                raise _Ending(late.outcome, f"no clean slate: {'; '.join(left)}") from None
            raise
        return _Done(facts={} if self.gpus is None else _gpu_facts(self.gpus))

    def leftovers(self) -> list[str]:
        """What still stands in the way of a clean start, in words."""
        left = []
        pids = self.rig.service.pids()
        if pids:
            left.append(f"processes of the unit still run: {', '.join(map(str, pids))}")
        if self.launch.port in facts.listening_ports(self.rig.transport):
            left.append(f"port {self.launch.port} is taken")
        left.extend(self.gpu_leftovers())
        left.extend(self.too_hot())
        return left

    def too_hot(self) -> list[str]:
        """GPUs that are hotter than a boot may begin with."""
        limit = self.rig.temperature_c
        if limit is None or self.gpus is None:
            return []
        heat = [gpu.temperature_c for gpu in self.gpus.gpus]
        return [f"GPU {n} has {t} °C, limit {limit}" for n, t in enumerate(heat) if t is not None and t > limit]

    def gpu_leftovers(self) -> list[str]:
        gpus = self.gpus = facts.gpu_state(self.rig.transport)
        if gpus is None:
            return []
        left = [f"process {pid} holds GPU memory" for pid in gpus.compute_pids]
        idle = self.rig.idle
        if idle.used_mib is None or len(idle.used_mib) != len(gpus.used_mib):
            if not left:
                idle.used_mib = gpus.used_mib
            return left
        for index, (used, floor) in enumerate(zip(gpus.used_mib, idle.used_mib, strict=True)):
            if used > floor + GPU_IDLE_SLACK_MIB:
                left.append(f"GPU {index} still has {used} MiB in use, {floor} MiB when idle")
        idle.used_mib = tuple(min(pair) for pair in zip(gpus.used_mib, idle.used_mib, strict=True))
        return left

    def cold(self) -> _Work:
        """Empty cache directories of this boot's own, or the state that the plan asks for."""
        yield from ()
        self.roots = caches.prepare(
            self.rig.transport,
            self.rig.unit,
            self.rig.engine,
            experiment=self.rig.experiment,
            boot=self.planned.boot,
            variant=self.planned.variant,
            state=self.planned.cache,
            root=self.rig.cache_root,
            clear=self.rig.clear,
        )
        self.launch = replace(self.launch, env={**self.launch.env, **self.roots.env})
        return _Done(self.roots.root, {"empty": self.roots.empty})

    def render(self) -> _Work:
        """Our own drop-in, and nothing of the user's; a copy of it, without secrets, stands beside the ledger."""
        yield from ()
        actions = self.rig.service.install_actions(self.launch)
        given = [redact_text(action.text) for action in actions if action.input]
        if given:
            write_private(self.folder / "drop-in.txt", "\n".join(given).encode())
        self.rig.service.install(self.launch)
        return _Done()

    def settle(self) -> _Work:
        """Two unmeasured boots that fill this variant's own caches: cold, second and settled are three states.

        The second boot still compiles kernels that the first one left elsewhere; from the third on nothing is
        compiled. A variant that dies here cannot be warm, and that is its answer.
        """
        assert self.roots is not None
        mark = f"{self.roots.root}/{SETTLED}"
        user = self.rig.unit.user
        if self.rig.transport.run(("test", "-e", mark), timeout_s=COMMAND_S, check=False, as_user=user).status == 0:
            return _Done("settled by an earlier boot", skipped=True)
        seconds = []
        self.settling = True
        for number in range(1, SETTLING_BOOTS + 1):
            begun = time.monotonic()
            self.rig.service.install(self.launch)
            yield from self.start(f"journal-settle-{number}.jsonl")
            for work in (self.ready, self.first_request, self.headroom):
                yield from work()
            self.halt(polite=True)
            seconds.append(round(time.monotonic() - begun, 3))
        self.settling = False
        self.rig.transport.run(("touch", mark), timeout_s=COMMAND_S, as_user=user)
        return _Done(facts={"settling_boots_s": seconds})

    def start(self, journal: str = "journal.jsonl") -> _Work:
        """The journal's place is taken before the unit starts, so that no line is missed."""
        yield from ()
        service = self.rig.service
        stream = service.follow(service.cursor())
        self.watch = Watch(
            stream,
            Classifier(self.rig.rules, unit=self.rig.unit.name),
            self.folder / journal,
            self.rig.engine.logger_tokens_per_s,
        )
        self.watch.begin()
        service.start()
        self.identity = service.state()
        return _Done(
            facts={"invocation_id": self.identity.invocation_id, "main_pid": self.identity.main_pid},
        )

    def ready(self) -> _Work:
        """/health answers 200 from what we asked for, raced against death and the deadline."""
        yield from ()
        assert self.watch is not None
        host, port = self.rig.transport.reach(self.launch.port)
        base_url = f"http://{host}:{port}"
        with self.engine_time(), httpx.Client(base_url=base_url, timeout=2.0, trust_env=False) as client:
            late = _Ending(LATE["ready"], f"not ready after {self.rig.deadlines.ready_s:g} s")
            self.wait_for(
                lambda: _healthy(client, self.rig.engine.health_path),
                deadline_s=self.rig.deadlines.ready_s,
                every_s=HEALTH_EVERY_S,
                late=late,
            )
        noticed_at_s = time.time()
        self.watch.mark("ready")
        self.target = load.Target(
            base_url=base_url, model=self.launch.model, api_key=self.launch.api_key or self.rig.api_key
        )
        self.identity = self.check_unit()
        self.check_command()
        if not self.watch.seen:
            raise _Ending("disturbed", SILENT)
        timeline = self.watch.timeline()
        self.proof = self.rig.engine.cache_proof(timeline, self.launch)
        if self.planned.cache in ("cold", "clear") and self.proof in ("loaded", "mixed"):
            raise _Ending("disturbed", f"not cold: the engine's log says {self.proof} instead of compiled")
        if self.planned.cache == "warm" and not self.settling and self.proof in ("compiled", "mixed"):
            raise _Ending("disturbed", f"not warm: the engine's log says {self.proof} instead of loaded")
        return _Done(
            facts={
                "noticed_at_s": round(noticed_at_s, 4),
                "cache_proof": self.proof,
                "timeline": timeline.model_dump(mode="json", exclude_none=True),
                **self.way_facts(),
            }
        )

    def way_facts(self) -> dict[str, Any]:
        """What the way to the box adds to a request, once a session, as soon as something answers there."""
        if self.rig.way.asked:
            return {}
        self.rig.way.asked = True
        added_ms = way.added_ms(self.rig.transport, self.launch.argv, self.launch.port, self.rig.engine.health_path)
        return {} if added_ms is None else {"forward_ms": round(added_ms, 3)}

    def check_command(self) -> None:
        """What really runs is what the matrix asked for."""
        argv, _env = self.rig.service.effective()
        if argv and argv != self.launch.argv:
            runs, asked = redact_argv(argv), redact_argv(self.launch.argv)
            extra = [word for word in runs if word not in asked]
            missing = [word for word in asked if word not in runs]
            raise _Ending("disturbed", f"another command runs: missing {missing}, not asked for {extra}")

    def first_request(self) -> _Work:
        """The first generated tokens, one short request of each sampling kind."""
        yield from ()
        assert self.watch is not None
        seconds: dict[str, float] = {}
        errors: list[str] = []
        with self.engine_time():
            for kind, sampling in (("greedy", {"temperature": 0.0}), ("sampled", {"temperature": 0.7, "top_p": 0.9})):
                timings = self.probe(1, 16, sampling=sampling, deadline_s=self.rig.deadlines.first_request_s)
                seconds[f"{kind}_s"] = round(timings[0].ended_at_s - timings[0].sent_at_s, 4)
                errors += [timing.error for timing in timings if timing.error is not None]
        if not errors:
            self.watch.mark("served")
        found = {"seconds": seconds, "prompts": self.calibrate()}
        self.refuse_long_prompts()
        return _Done("; ".join(dict.fromkeys(errors)) or None, found)

    def calibrate(self) -> dict[str, Any]:
        """How long text is for this engine: asked once, used by all that follows; what it found, for the record."""
        assert self.target is not None
        with self.engine_time():
            scale = load.calibrate(self.target, endpoint=self.rig.load.endpoint, cancelled=self.cancelled)
        self.check()
        self.scale = scale
        return {
            "lengths": "exact" if scale.exact else "mean" if scale.measured else "guessed",
            "tokens_per_word": round(scale.tokens_per_word, 3),
            "overhead_tokens": round(scale.overhead_tokens, 1),
            "max_model_len": scale.max_model_len,
        }

    def refuse_long_prompts(self) -> None:
        """Prompts of the user's file that this engine cannot take are told now, and not by a 400 in a window.

        Raises:
            ProblemsError: names each with its line.
        """
        own, scale, spec = self.rig.prompts, self.scale, self.rig.load
        if own is None or scale is None or self.target is None:
            return
        with self.engine_time():
            found = load.too_long(
                self.target,
                own.prompts,
                scale,
                endpoint=spec.endpoint,
                output_tokens=spec.output_tokens,
                deadline_s=self.rig.deadlines.first_request_s,
                cancelled=self.cancelled,
            )
        self.check()
        limit = scale.max_model_len
        if found and limit is not None:
            room = limit - spec.output_tokens
            said = f"too long: at most {room} fit {self.planned.variant}'s {limit} (max_model_len) with their answers"
            hint = "take them out, or raise max-model-len of every variant, or lower load.output_tokens; then --new"
            raise ProblemsError([f"{own.where(place)}: {n} tokens, {said}" for place, n in found.items()], hint=hint)

    def headroom(self) -> _Work:
        """One prompt that fills a whole prefill batch, then as many at once as the highest concurrency.

        With several prompt lengths it is as long as the longest, if that is more.
        """
        yield from ()
        if not self.rig.headroom:
            return _Done("switched off in matrix.yaml", skipped=True)
        assert self.watch is not None
        length = self.rig.engine.headroom_tokens(
            self.launch,
            self.watch.timeline(),
            output_tokens=self.rig.load.headroom_tokens,
            at_least=max(self.rig.load.lengths) if len(self.rig.load.lengths) > 1 else 0,
        )
        found: dict[str, Any] = {"prompt_tokens": length}
        errors: list[str] = []
        with self.engine_time():
            for count in sorted({1, max(self.rig.concurrency)}):
                timings = self.probe(count, length, deadline_s=self.rig.deadlines.headroom_s)
                failed = [timing.error for timing in timings if timing.error is not None]
                found[f"at_{count}"] = {"answered": len(timings) - len(failed), "failed": len(failed)}
                errors += failed
        return _Done("; ".join(dict.fromkeys(errors)) or None, found)

    def probe(
        self, count: int, prompt_tokens: int, *, deadline_s: float, sampling: dict[str, float] | None = None
    ) -> tuple[RequestTiming, ...]:
        """Requests whose failure is looked into at once: did the engine die, or does it live on?"""
        assert self.target is not None
        timings = load.probe(
            self.target,
            endpoint=self.rig.load.endpoint,
            prompt_tokens=prompt_tokens,
            output_tokens=self.rig.load.headroom_tokens,
            n=count,
            seed=f"{self.rig.seed}/{self.planned.boot}/{prompt_tokens}/{count}/{sampling}",
            deadline_s=deadline_s,
            sampling=sampling,
            scale=self.scale or load.Scale(),
            cancelled=self.cancelled,
        )
        self.check()
        errors = [timing.error for timing in timings if timing.error is not None]
        refused = next((error for error in errors if error.startswith(load.REFUSALS)), None)
        if refused is not None:
            raise _Ending("disturbed", f"our request was refused: {redact_text(refused)}")
        if errors:
            self.lives()
        return timings

    def lives(self) -> None:
        """After an error answer: returns when the engine serves again, raises when it died or stopped answering."""
        assert self.target is not None
        target = self.target

        def serves() -> bool:
            timing = load.probe(
                target,
                endpoint=self.rig.load.endpoint,
                prompt_tokens=16,
                output_tokens=1,
                n=1,
                seed=f"{self.planned.boot}/alive/{time.monotonic_ns()}",
                deadline_s=ALIVE_S,
                sampling=None,
                scale=load.Scale(),
                cancelled=self.cancelled,
            )[0]
            return timing.error is None

        self.check_unit()
        late = _Ending(LATE["first_request"], f"the engine answers no request any more ({ALIVE_S:g} s after an error)")
        self.wait_for(serves, deadline_s=ALIVE_S, every_s=0.25, late=late)

    def sanity(self) -> _Work:
        """Three fixed greedy prompts: what a fast variant says is part of the record."""
        yield from ()
        assert self.target is not None
        with self.engine_time():
            said = load.greedy(
                self.target,
                endpoint=self.rig.load.endpoint,
                output_tokens=self.rig.load.sanity_tokens,
                deadline_s=self.rig.deadlines.sanity_s,
                cancelled=self.cancelled,
            )
        self.check()
        return _Done(facts=said.to_facts())

    def trials(self) -> _Work:
        """Levels ascending; a window that was disturbed is measured again, at most three times."""
        for level in self.rig.levels:
            if (why := self.too_long(level)) is not None:
                yield self.unmeasured(level, why)
                continue
            taken = itertools.count(1)
            for _ in range(self.rig.load.windows):
                yield from self.window(level, taken)
        return _Done()

    def length(self, level: Level) -> int | None:
        """How long the prompts of a level are, tokens; None where they are the user's own."""
        return level.input_tokens or next(iter(self.rig.load.lengths), None)

    def too_long(self, level: Level) -> str | None:
        """Why a level cannot be measured: with the engine's own word on its context, where no flag stated it.

        The only length of an experiment is cut to what fits, with a warning; one of several would be another level.
        """
        room = None if self.scale is None else self.scale.max_model_len
        asked, answer = level.input_tokens, self.rig.load.output_tokens
        if room is None or asked is None or asked + answer <= room:
            return None
        return f"too_long: {asked} tokens in and {answer} out do not fit into the engine's context of {room}"

    def unmeasured(self, level: Level, why: str) -> TrialEnded:
        """A level that nobody can measure, for the books."""
        return TrialEnded(
            **self.key,
            concurrency=level.concurrency,
            input_tokens=self.length(level),
            window_s=None,
            tokens=None,
            tokens_per_s=None,
            valid=False,
            invalid_reasons=(why,),
        )

    def window(self, level: Level, taken: Iterator[int]) -> Iterator[TrialEnded]:
        """One window at one level, with its repeats; `taken` numbers all trials of the level."""
        for _ in range(DISTURBED_TRIALS + 1):
            trial = self.trial(level, next(taken))
            yield trial
            self.check()
            if trial.failed:
                self.failed_at[level] = None
                with self.engine_time():
                    self.lives()
            if trial.valid or trial.failed:
                break

    def trial(self, level: Level, attempt: int) -> TrialEnded:
        """One load at one level."""
        assert self.target is not None
        assert self.watch is not None
        before = self.identity
        length = self.length(level)
        begun = time.monotonic()
        gpus = None if self.gpus is None else gpuwatch.GpuWatch(self.rig.transport)
        with gpus or nullcontext(), self.engine_time():
            result = load.run_trial(
                self.target,
                self.rig.load.at(length),
                concurrency=level.concurrency,
                seed=f"{self.rig.seed}/{self.planned.boot}/{level}/{attempt}",
                cancelled=self.cancelled,
                deadline_s=self.rig.deadlines.trial_s,
                scale=self.scale,
                prompts=self.own,
            )
        found = load.to_record_fields(result, self.watch.logger_samples())
        reasons = list(found.pop("invalid_reasons"))
        if self.watch.alarm is None and self.rig.interrupts.reason is None:
            self.identity = self.rig.service.state()
            reasons += _identity_changes(before, self.identity)
        stalled_s = self.rig.transport.stalled_s(begun)
        if stalled_s > STALLED_S:
            # What failed or was slow meanwhile may be the network's fault: the level is measured again.
            reasons.append(f"the way to the box stalled for {stalled_s:.1f} s")
            found["failed"] = False
        if gpus is not None:
            reasons += _add_gpus(found, gpus, result)
        self.keep_raw(level, attempt, result, gpus)
        valid = bool(found.pop("valid")) and not reasons
        if not valid:
            found["tokens_per_s"] = None
        told = length if self.own is None else None
        return TrialEnded(**self.key, **found, input_tokens=told, valid=valid, invalid_reasons=tuple(reasons))

    def keep_raw(self, level: Level, attempt: int, result: load.TrialResult, gpus: gpuwatch.GpuWatch | None) -> None:
        """Each request's timing, each counter read and each look at the GPUs, beside the ledger."""
        name = f"c{level}" + ("" if attempt == 1 else f".r{attempt - 1}")
        for kind, rows in (("requests", result.timings), ("metrics", result.snapshots)):
            lines = [orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE, default=str) for row in rows]
            write_private(self.folder / f"{kind}-{name}.jsonl", b"".join(lines))
        if gpus is not None:
            write_private(self.folder / f"gpus-{name}.csv", gpus.raw().encode())

    def stop(self, *, polite: bool) -> _Work:
        """Stops the unit, notes how the memory drains, and takes this boot's caches away."""
        yield from ()
        found = self.halt(polite=polite)
        if self.roots is not None:
            self.roots.remove()
        return _Done(facts=found)

    def halt(self, *, polite: bool) -> dict[str, Any]:
        """Ends the engine: politely when it serves, by killing its cgroup when the boot is over or it still boots."""
        found: dict[str, Any] = {"polite": polite}
        watch = self.watch
        if watch is not None:
            watch.mark("stop_requested")
        try:
            if watch is not None or self.identity is not None:
                with self.engine_time():
                    begun = time.monotonic()
                    self.rig.service.stop(kill=not polite, deadline_s=self.rig.deadlines.stop_s)
                    found["exit_s"] = round(time.monotonic() - begun, 4)
                    found |= self.memory_drain()
        finally:
            if watch is not None:
                watch.settle(quiet_s=0.05, deadline_s=0.5)
                watch.close()
            self.identity = self.scale = None
        return found

    def memory_drain(self) -> dict[str, Any]:
        """Seconds until the GPUs are back at the idle level; empty without GPUs."""
        if self.rig.idle.used_mib is None:
            return {}
        begun = time.monotonic()
        end = begun + self.rig.deadlines.clean_slate_s
        while self.gpu_leftovers() and time.monotonic() < end:
            self.rig.interrupts.wait(0.1)
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


def _add_gpus(found: dict[str, Any], gpus: gpuwatch.GpuWatch, result: load.TrialResult) -> tuple[str, ...]:
    """Adds the GPUs in the window, and what to say of them, to a trial's fields; why it is disturbed, if it is."""
    if result.window is None:
        return ()
    use, problem = gpus.use(result.window.start_s, result.window.end_s)
    found["gpu"] = use
    found["warnings"] = (*found["warnings"], *gpuwatch.remarks(use or ()), *([] if problem is None else [problem]))
    return gpuwatch.disturbances(use or ())


def _healthy(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _identity_changes(before: UnitState | None, after: UnitState) -> list[str]:
    """Why a window does not speak of one engine process."""
    if before is None:
        return ["the unit's identity is not known"]
    return [
        f"{name} changed during the window: {was} → {now}"
        for name, was, now in (
            ("InvocationID", before.invocation_id, after.invocation_id),
            ("MainPID", before.main_pid, after.main_pid),
            ("NRestarts", before.n_restarts, after.n_restarts),
        )
        if was != now
    ]
