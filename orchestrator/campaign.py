"""Walk the plan: ask, take the box, boot by boot append each record, and give the box back.

Nothing on the box is changed before all input was checked (`survey`) and consent was given. From the first change on,
production comes back whatever happens: by `_restored` on every way out of `run`, and by the timer on the box when we
die.
"""

from __future__ import annotations

import getpass
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from orchestrator import __version__, load
from orchestrator.boot import Rig, cycle
from orchestrator.box import caches, lock
from orchestrator.box.engines import Launch
from orchestrator.box.services import Service, make_service
from orchestrator.box.transports import Transport, connect
from orchestrator.errors import (
    OK,
    BoxBusy,
    BoxError,
    ColdbootError,
    Interrupted,
    RestoreFailed,
    UsageError,
)
from orchestrator.interrupts import Interrupts
from orchestrator.ledger import Ledger, private_folder, read, write_private
from orchestrator.matrix import Deadlines, load_matrix, select
from orchestrator.plan import PLAN_FILE, Plan, PlannedBoot, add_block, experiment_folder, write_plan
from orchestrator.progress import Listener, hours
from orchestrator.records import (
    AnyRecord,
    BootEnded,
    BootRecord,
    BootStarted,
    CampaignEnded,
    CampaignStarted,
    ProductionState,
)
from orchestrator.redact import redact_argv
from orchestrator.survey import (
    Design,
    Options,
    Site,
    announcement,
    check_fingerprint,
    own_launch,
    prepare,
    running_requests,
    survey,
)

DISTURBED_IN_A_ROW = 4
API_KEY = "COLDBOOT_API_KEY"

NextBoots = Callable[[Iterable[AnyRecord], Plan], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a campaign ended."""

    outcome: Literal["complete", "interrupted", "terminated", "budget_spent", "was_complete"]
    folder: Path
    exit_code: int = OK
    boots_left: int = 0


def consent(design: Design, site: Site, listener: Listener, *, yes: bool) -> None:
    """Asks before a production service is taken down; the rehearsal box has none, and is not asked about."""
    if site.rehearsal and not site.has_production:
        return
    listener.say(announcement(design, site))
    if yes:
        return
    answer = listener.confirm("Take it down and go on?")
    if answer is None:
        raise UsageError("nobody can be asked here", hint="--yes says that the service may be taken down")
    if not answer:
        raise UsageError("not confirmed; nothing was changed")


def drain(site: Site, interrupts: Interrupts, drain_s: float | None) -> None:
    """Waits until production serves nobody; refuses at once without `--drain`.

    Raises:
        BoxBusy: requests are (still) running.
    """
    end = time.monotonic() + (drain_s or 0.0)
    while running := running_requests(site):
        if time.monotonic() >= end:
            raise BoxBusy(
                f"{running:g} requests are running in {site.unit.name}",
                hint="--drain 5min waits for them; nothing was changed",
            )
        if interrupts.wait(0.5):
            raise Interrupted(f"{interrupts.reason}; nothing was changed", exit_code=interrupts.exit_code)


# --- the walk --------------------------------------------------------------------------------------------------------


class _Heart:
    """Touches the heartbeat of the restore timer while we live."""

    def __init__(self, service: Service, every_s: float) -> None:
        self._service = service
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)

    def _beat(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._service.beat()
            except BoxError:
                # The boot that runs now notices a lost box itself; the timer on the box is what this is about.
                continue

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=60)


@dataclass(slots=True)
class _Walk:
    """One campaign while it runs."""

    design: Design
    site: Site
    ledger: Ledger
    listener: Listener
    interrupts: Interrupts
    budget_s: float | None
    next_boots: NextBoots
    begun: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0

    def boots(self) -> Literal["complete", "interrupted", "budget_spent"]:
        """Boot after boot, until nothing is left, the budget is spent, or we are asked to stop."""
        disturbed: list[str] = []
        while todo := self.todo():
            if self.interrupts.reason is not None:
                return "interrupted"
            spent = time.monotonic() - self.begun
            if self.budget_s is not None and spent + self.longest_s > self.budget_s:
                return "budget_spent"
            end = self.boot(todo[0])
            disturbed = [*disturbed, end.why] if end.boot_outcome == "disturbed" else []
            if len(disturbed) >= DISTURBED_IN_A_ROW:
                raise BoxError(
                    f"{len(disturbed)} boots in a row were disturbed; the last: {disturbed[-1]}",
                    hint="the variants are not to blame: mend the box, then run the same command again",
                )
        return "complete"

    def todo(self) -> tuple[PlannedBoot, ...]:
        """What is still wanted; an adaptive plan is asked for its next block when the last one is done."""
        todo = self.design.todo(self.ledger.outline)
        if todo or self.design.plan.plan_name == "fixed":
            return todo
        wanted = self.next_boots(read(self.ledger.folder), self.design.plan)
        if wanted:
            self.design = replace(self.design, plan=add_block(self.design.plan, wanted))
            write_plan(self.ledger.folder / PLAN_FILE, self.design.plan)
        return self.design.todo(self.ledger.outline)

    def boot(self, planned: PlannedBoot) -> BootEnded:
        """One boot; each record is in the ledger before the next step begins."""
        end: BootEnded | None = None
        for record in cycle(planned, self.site.launches[planned.variant], self.rig()):
            self.ledger.append(record)
            self.listener.record(record)
            if isinstance(record, BootEnded):
                end = record
        assert end is not None
        self.longest_s = max(self.longest_s, end.seconds or 0.0)
        self.warn_of(end)
        return end

    def warn_of(self, end: BootEnded) -> None:
        if end.boot_outcome in ("crashed", "not_ready", "disturbed"):
            journal = self.ledger.folder / "boots" / end.boot / "journal.jsonl"
            self.listener.warn(f"{end.boot} {end.boot_outcome} at {end.step}: {end.why}\n        journal: {journal}")

    def rig(self) -> Rig:
        matrix, box, site = self.design.matrix, self.design.box, self.site
        return Rig(
            transport=site.transport,
            service=site.service,
            engine=site.engine,
            unit=site.unit,
            experiment=matrix.experiment,
            load=matrix.effective_load(),
            deadlines=matrix.effective_deadlines(),
            concurrency=matrix.concurrency,
            headroom=matrix.headroom,
            seed=self.design.plan.seed,
            boot_folder=self.ledger.boot_folder,
            interrupts=self.interrupts,
            cache_root=box.cache_root,
            api_key=os.environ.get(API_KEY),
        )


def run(options: Options, listener: Listener, next_boots: NextBoots) -> Ended:
    """The whole of `invoke matrix`. `next_boots` is what an adaptive plan asks which variants deserve another block.

    Raises:
        ColdbootError: bad input (4), a box that cannot be used or was lost (3).
    """
    design = prepare(options)
    for note in design.matrix.notes:
        listener.warn(note)
    if not design.todo() and not _more(design, next_boots):
        return Ended("was_complete", design.folder)
    transport = connect(design.box)
    try:
        site = survey(design, transport)
        check_fingerprint(design.records, site.fingerprint)
        consent(design, site, listener, yes=options.yes)
        return _campaign(design, site, listener, options, next_boots)
    finally:
        transport.close()


def _more(design: Design, next_boots: NextBoots) -> bool:
    return design.plan.plan_name != "fixed" and bool(next_boots(design.records, design.plan))


def _campaign(design: Design, site: Site, listener: Listener, options: Options, next_boots: NextBoots) -> Ended:
    private_folder(design.folder)
    with (
        Interrupts(lambda reason: listener.say(f"{reason}: ending this boot, then restoring")) as interrupts,
        Ledger(design.folder) as ledger,
        lock.hold(site.transport, site.service.lock_name, _holder(f"experiment {design.matrix.experiment}")),
    ):
        if ledger.set_aside is not None:
            listener.warn(f"the ledger's last line was torn; it is kept in {ledger.set_aside}")
        if site.has_production:
            drain(site, interrupts, options.drain_s)
        write_private(design.folder / "matrix.yaml", design.matrix.text.encode())
        write_plan(design.folder / "plan.json", design.plan)
        for record in _cut_off(design.records):
            ledger.append(record)
        ledger.append(_started(design, site))
        walk = _Walk(design, site, ledger, listener, interrupts, options.budget_s, next_boots)
        with _restored(walk) as ended:
            listener.planned(design.plan.variants, design.plan.blocks, len(design.todo(ledger.outline)))
            ended.outcome = walk.boots()
        left = len(walk.design.todo(ledger.outline))
    if ended.outcome == "interrupted":
        reason = interrupts.reason or "interrupted"
        raise Interrupted(
            f"{reason}; {'production is restored' if site.has_production else 'nothing of ours runs any more'}, "
            f"{left} boots are left",
            exit_code=interrupts.exit_code,
            hint="the same command goes on",
        )
    return Ended(ended.outcome, design.folder, boots_left=left)


def _holder(what: str) -> str:
    return f"{getpass.getuser()}@{socket.gethostname()} pid {os.getpid()} {what}"


@dataclass(slots=True)
class _Outcome:
    outcome: Literal["complete", "interrupted", "budget_spent", "failed"] = "failed"


@contextmanager
def _restored(walk: _Walk) -> Iterator[_Outcome]:
    """Arms the restore on the box, and restores and disarms it on every way out."""
    site, box = walk.site, walk.design.box
    ended = _Outcome()
    why: str | None = None
    site.service.arm(site.production, box.dead_man_s)
    try:
        with _Heart(site.service, max(0.5, box.dead_man_s / 6)):
            yield ended
    except ColdbootError as error:
        why = error.what
        raise
    finally:
        restored = False
        try:
            restore(walk)
            restored = True
        finally:
            outcome: Any = ended.outcome
            if outcome == "interrupted":
                outcome = "interrupted" if walk.interrupts.exit_code == 130 else "terminated"
            elif outcome == "failed":
                outcome = "box_lost" if not restored else "failed"
            record = CampaignEnded(outcome=outcome, restored=restored, why=why)
            walk.ledger.append(record)
            walk.listener.record(record)


def restore(walk: _Walk) -> None:
    """Production as it was, proven by its command and a generated token; then the timer on the box is taken away.

    Raises:
        RestoreFailed: it did not come back; says what is left and what to run.
    """
    site = walk.site
    try:
        site.service.restore(site.production)
        if site.has_production and site.production.active:
            walk.listener.say(f"restoring {site.unit.name}: waiting until it serves again")
            deadlines = walk.design.matrix.effective_deadlines()
            prove_back(site.service, site.production, site.own, site.transport, deadlines)
        site.service.disarm()
        caches.sweep(site.transport, site.unit, root=walk.design.box.cache_root)
    except BoxError as error:
        raise RestoreFailed(
            f"{site.unit.name} may not be as it was: {error.what}",
            hint=f"`invoke restore --box {walk.design.box.name}`; the timer on the box does it by itself "
            f"{hours(walk.design.box.dead_man_s)} after our last sign of life",
        ) from error


def bring_back(options: Options, listener: Listener, *, break_lock: bool = False) -> str:
    """`invoke restore`: production as it was before a campaign that could not restore it; says what stands there now.

    From any machine: what was there before is read from the box itself. A second call changes nothing.

    Raises:
        BoxBusy: a campaign is alive on the box.
        RestoreFailed: production did not come back.
    """
    matrix = select(load_matrix(options.matrix, box=options.box), box=options.box, experiment=options.experiment)
    box = matrix.target
    transport = connect(box)
    try:
        service = make_service(transport, box, experiment_folder(options.out, matrix).absolute() / "box")
        with lock.hold(transport, service.lock_name, _holder("restore"), break_lock=break_lock):
            was = service.production()
            if box.service == "process":
                service.stop(kill=True, deadline_s=matrix.effective_deadlines().stop_s)
            service.restore(was)
            if was.active and box.service != "process":
                listener.say(f"waiting until {service.name} serves again")
                prove_back(service, was, own_launch(box, service.describe()), transport, matrix.effective_deadlines())
            service.disarm()
    finally:
        transport.close()
    if box.service == "process":
        return f"{box.name}: nothing of ours runs any more"
    return f"{service.name} on {box.name} is {'serving' if was.active else 'stopped'}, as it was before"


def prove_back(
    service: Service, was: ProductionState, own: Launch | None, transport: Transport, deadlines: Deadlines
) -> None:
    """The same effective command as before, and one generated token.

    Raises:
        RestoreFailed: not by the deadline.
    """
    end = time.monotonic() + deadlines.ready_s
    pause = threading.Event()
    missing = "it is not active"
    while time.monotonic() < end:
        argv = service.effective()[0] if service.state().active_state == "active" else ()
        if argv:
            same = not was.command or argv == was.command
            missing = "it does not serve yet" if same else f"another command runs: {' '.join(redact_argv(argv))}"
            if same and (own is None or _generates(transport, own)):
                return
        pause.wait(0.2)
    raise RestoreFailed(
        f"{service.name} was started but {missing}",
        hint=f"`systemctl status {service.name}` on the box; our drop-in is gone",
    )


def _generates(transport: Transport, own: Launch) -> bool:
    host, local = transport.reach(own.port)
    base_url = f"http://{host}:{local}"
    try:
        with httpx.Client(base_url=base_url, timeout=10, trust_env=False) as client:
            if client.get("/health").status_code != httpx.codes.OK:
                return False
    except httpx.HTTPError:
        return False
    target = load.Target(base_url=base_url, model=own.model, api_key=own.api_key or os.environ.get(API_KEY))
    seed = f"back/{time.monotonic_ns()}"
    return load.probe(target, prompt_tokens=8, output_tokens=1, seed=seed, deadline_s=60)[0].error is None


def _cut_off(records: tuple[AnyRecord, ...]) -> tuple[BootEnded, ...]:
    """The ends of boots that a killed campaign left without one."""
    begun = {record.boot: record for record in records if isinstance(record, BootStarted)}
    for record in records:
        if isinstance(record, BootEnded):
            begun.pop(record.boot, None)
    return tuple(
        BootEnded(
            **record.model_dump(include=set(BootRecord.model_fields) - {"v", "at"}),
            boot_outcome="aborted",
            why="the campaign was killed during this boot",
        )
        for record in begun.values()
    )


def _started(design: Design, site: Site) -> CampaignStarted:
    matrix = design.matrix
    return CampaignStarted(
        experiment=matrix.experiment,
        box=design.box.name,
        rehearsal=site.rehearsal,
        seed=design.plan.seed,
        boots_planned=design.plan.boots if isinstance(design.plan.boots, int) else None,
        fingerprint=site.fingerprint,
        versions={"coldboot": __version__},
        production=site.production,
        resumed=any(isinstance(record, CampaignStarted) for record in design.records),
        variants=design.plan.variants,
        concurrency=matrix.concurrency,
        tolerance=matrix.tolerance,
        production_variant=site.production_variant,
        changes=site.changes,
        commands={name: redact_argv(launch.argv) for name, launch in site.launches.items()},
        base_command=redact_argv(site.unit.argv),
        load=matrix.effective_load().model_dump(mode="json"),
        headroom=matrix.headroom,
    )
