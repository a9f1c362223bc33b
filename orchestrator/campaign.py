"""Walk the plan: look at everything, ask, take the box, boot by boot append each record, and give the box back.

Nothing on the box is changed before all input was checked and consent was given. From the first change on, production
comes back whatever happens: by `_restored` on every way out of `run`, and by the timer on the box when we die.
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

from orchestrator import __version__, load, scrape
from orchestrator.boot import Rig, cycle
from orchestrator.box import facts, lock
from orchestrator.box.engines import ENGINES, Engine, Launch, Problem, is_rehearsal
from orchestrator.box.services import Service, UnitFacts, make_service
from orchestrator.box.transports import Transport, connect
from orchestrator.errors import (
    OK,
    BoxBusy,
    BoxError,
    ColdbootError,
    ExperimentChanged,
    Interrupted,
    MatrixError,
    RestoreFailed,
    UsageError,
)
from orchestrator.interrupts import Interrupts
from orchestrator.ledger import Ledger, private_folder, read, write_private
from orchestrator.matrix import BoxSpec, Matrix, Variant, differences, load_matrix, select
from orchestrator.plan import (
    PLAN_FILE,
    Plan,
    PlanName,
    PlannedBoot,
    add_block,
    experiment_folder,
    extend,
    make_plan,
    read_plan,
    remaining,
    write_plan,
)
from orchestrator.progress import Listener, hours
from orchestrator.records import (
    AnyRecord,
    BootEnded,
    BootRecord,
    BootStarted,
    CacheState,
    CampaignEnded,
    CampaignStarted,
    ProductionState,
)
from orchestrator.redact import redact_argv

DEFAULT_BOOTS = 3
API_KEY = "COLDBOOT_API_KEY"
DISTURBED_IN_A_ROW = 4

NextBoots = Callable[[Iterable[AnyRecord], Plan], tuple[str, ...]]
ISOLATED_PORTS = range(18080, 18980)


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of `invoke matrix`; None where the matrix decides."""

    matrix: Path
    out: Path
    boots: int | Literal["auto"] | None = None
    plan: PlanName | None = None
    box: str | None = None
    only: tuple[str, ...] = ()
    cache: tuple[CacheState, ...] = ()
    seed: int | None = None
    experiment: str | None = None
    budget_s: float | None = None
    drain_s: float | None = None
    yes: bool = False
    new: bool = False


@dataclass(frozen=True, slots=True)
class Design:
    """What shall be done, before any box is touched."""

    matrix: Matrix
    box: BoxSpec
    folder: Path
    plan: Plan
    records: tuple[AnyRecord, ...]
    only: tuple[str, ...]

    def todo(self, records: tuple[AnyRecord, ...] | None = None) -> tuple[PlannedBoot, ...]:
        """The boots that are still wanted."""
        return remaining(self.plan, self.records if records is None else records, variants=self.only or None)


@dataclass(frozen=True, slots=True)
class Site:
    """What stands on the box, read without changing anything."""

    transport: Transport
    service: Service
    engine: Engine
    unit: UnitFacts
    launches: dict[str, Launch]
    changes: dict[str, int]
    production: ProductionState
    fingerprint: dict[str, str | None]
    rehearsal: bool
    has_production: bool
    own: Launch | None

    @property
    def production_variant(self) -> str | None:
        """The variant that changes nothing."""
        return next((name for name, count in self.changes.items() if count == 0), None)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a campaign ended."""

    outcome: Literal["complete", "interrupted", "terminated", "budget_spent", "was_complete"]
    folder: Path
    exit_code: int = OK
    boots_left: int = 0


# --- before the first boot -------------------------------------------------------------------------------------------


def prepare(options: Options) -> Design:
    """Matrix, folder and plan of the experiment; refuses to go on with what was begun otherwise.

    Raises:
        MatrixError: matrix.yaml is not usable.
        ExperimentChanged: the experiment began with something else.
    """
    matrix = select(
        load_matrix(options.matrix),
        box=options.box,
        cache=options.cache or None,
        experiment=options.experiment,
        seed=options.seed,
    )
    only = tuple(variant.name for variant in select(matrix, options.only or None).variants)
    folder = experiment_folder(options.out, matrix, new=options.new)
    if not (folder / PLAN_FILE).exists():
        boots = options.boots or matrix.boots or (None if options.plan else DEFAULT_BOOTS)
        plan = make_plan(matrix, boots, plan_name=options.plan)
        return Design(matrix, matrix.target, folder, plan, (), only)
    plan = read_plan(folder / PLAN_FILE)
    _refuse_changes(options, matrix, folder, plan)
    wanted = matrix.boots if options.boots is None else options.boots
    if isinstance(wanted, int) and isinstance(plan.boots, int) and wanted > plan.boots:
        plan = extend(plan, wanted)
    if any(state not in plan.cache for state in matrix.cache):
        plan = extend(plan, max(1, plan.boots if isinstance(plan.boots, int) else 1), cache=matrix.cache)
    return Design(matrix, matrix.target, folder, plan, read(folder), only)


def _refuse_changes(options: Options, matrix: Matrix, folder: Path, plan: Plan) -> None:
    changed = list(differences((folder / "matrix.yaml").read_text(encoding="utf-8"), matrix))
    if options.seed is not None and options.seed != plan.seed:
        changed.append(f"seed: {plan.seed} → {options.seed}")
    if changed:
        raise ExperimentChanged(
            f"{folder} began with another matrix: " + "; ".join(changed),
            hint="--new starts afresh beside it; or take the change back to go on",
        )


def survey(design: Design, transport: Transport) -> Site:
    """Reads what is on the box and composes every variant; changes nothing.

    Raises:
        MatrixError: variants that cannot be composed, all at once.
        BoxError: no such unit, no access.
    """
    matrix, box = design.matrix, design.box
    state = design.folder.absolute() / "box"
    service = make_service(transport, box, state)
    engine = ENGINES[box.engine]
    unit = service.describe()
    port = isolated_port(transport, box)
    launches: dict[str, Launch] = {}
    problems: list[str] = []
    for variant in matrix.all_variants:
        composed = engine.compose(
            unit.argv,
            variant,
            host="127.0.0.1" if box.isolate else None,
            port=port if box.isolate else None,
            program=box.program,
        )
        if isinstance(composed, Launch):
            env = engine.own_env(state=str(state / "engine"), time_scale=box.time_scale) | box.env | composed.env
            launches[variant.name] = replace(composed, env=env)
        else:
            problems += [_problem(matrix, variant, problem) for problem in composed]
    if problems:
        raise MatrixError(problems)
    rehearsal = engine.rehearsal or any(is_rehearsal(launch.argv) for launch in launches.values())
    return Site(
        transport=transport,
        service=service,
        engine=engine,
        unit=unit,
        launches=launches,
        changes={name: engine.changes(unit.argv, launch) for name, launch in launches.items()},
        production=_production_before(design.records) or service.production(),
        fingerprint=facts.fingerprint(transport, program=next(iter(launches.values())).argv),
        rehearsal=rehearsal,
        has_production=box.service != "process",
        own=_own(engine, unit, box),
    )


def _own(engine: Engine, unit: UnitFacts, box: BoxSpec) -> Launch | None:
    """Production's own command, where it listens and under which name; None when its command cannot be read."""
    composed = engine.compose(unit.argv, Variant(name="production"), host=None, port=None)
    if not isinstance(composed, Launch):
        return None
    return composed if box.port is None else replace(composed, port=box.port)


def isolated_port(transport: Transport, box: BoxSpec) -> int:
    """A port of the campaign's own, so that production's clients cannot reach a variant."""
    if not box.isolate and box.port is not None:
        return box.port
    if box.isolate_port is not None:
        return box.isolate_port
    taken = facts.listening_ports(transport)
    # Two rehearsals on one machine begin their search apart, so that they do not meet between look and bind.
    start = (os.getpid() * 7) % len(ISOLATED_PORTS)
    ports = (*ISOLATED_PORTS[start:], *ISOLATED_PORTS[:start])
    return next(port for port in ports if port not in taken)


def _problem(matrix: Matrix, variant: Variant, problem: Problem) -> str:
    keys = problem.key[1:] if problem.key[:1] == ("set",) else problem.key
    return matrix.problem("variants", variant.name, *keys, what=problem.what)


def _production_before(records: tuple[AnyRecord, ...]) -> ProductionState | None:
    """What an interrupted campaign found before its first change; None when the last one restored it."""
    found: ProductionState | None = None
    for record in records:
        if isinstance(record, CampaignStarted):
            found = found or record.production
        elif isinstance(record, CampaignEnded) and record.restored:
            found = None
    return found


def check_fingerprint(records: tuple[AnyRecord, ...], fingerprint: dict[str, str | None]) -> None:
    """Refuses to add boots of another machine, driver or engine to an experiment.

    Raises:
        ExperimentChanged: names each fact that differs.
    """
    begun = next((record for record in records if isinstance(record, CampaignStarted)), None)
    if begun is None:
        return
    names = sorted(set(begun.fingerprint) | set(fingerprint))
    changed = [
        f"{name}: {begun.fingerprint.get(name)} → {fingerprint.get(name)}"
        for name in names
        if begun.fingerprint.get(name) != fingerprint.get(name)
    ]
    if changed:
        raise ExperimentChanged(
            "the box is not what the experiment began with: " + "; ".join(changed),
            hint="boots of both must not be pooled; --new starts afresh beside it",
        )


def downtime_s(design: Design) -> float:
    """How long production will be away, from what earlier boots took, else from a rough guess per boot."""
    took = [record.seconds for record in design.records if isinstance(record, BootEnded) and record.seconds]
    spec = design.matrix.effective_load()
    guess = 180.0 + len(design.matrix.concurrency) * (spec.window_s + spec.warmup_s + 10)
    return len(design.todo()) * (sum(took) / len(took) if took else guess)


def announcement(design: Design, site: Site) -> str:
    """What a campaign will do to a production service, said before it is done."""
    state = "running" if site.production.active else "not running"
    running = running_requests(site)
    lines = [
        f"{site.unit.name} on {site.transport.name} is {state}"
        + (f", {running:g} requests are in it now" if running else "")
        + ". This campaign takes it down:",
        f"  {len(design.todo())} boots of {len(site.launches)} variants, about {hours(downtime_s(design))} of downtime;"
        f" the engine listens on 127.0.0.1:{next(iter(site.launches.values())).port} meanwhile.",
        *(f"  {action.text}" for action in site.service.install_actions(next(iter(site.launches.values())))),
        f"  Afterwards, and {hours(design.box.dead_man_s)} after this program's death, the service is as it is now.",
    ]
    return "\n".join(lines)


def running_requests(site: Site) -> float | None:
    """Requests that production serves at this moment; None when it cannot be asked."""
    if site.own is None or not site.unit.active or site.unit.our_drop_in:
        return None
    host, port = site.transport.reach(site.own.port)
    try:
        return scrape.fetch(f"http://{host}:{port}", timeout_s=5).busy
    except ColdbootError:
        return None


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
    holder = f"{getpass.getuser()}@{socket.gethostname()} pid {os.getpid()} experiment {design.matrix.experiment}"
    with (
        Interrupts(lambda reason: listener.say(f"{reason}: ending this boot, then restoring")) as interrupts,
        Ledger(design.folder) as ledger,
        lock.hold(site.transport, site.service.lock_name, holder),
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
            prove_back(walk)
        site.service.disarm()
    except BoxError as error:
        raise RestoreFailed(
            f"{site.unit.name} may not be as it was: {error.what}",
            hint=f"`invoke restore --box {walk.design.box.name}`; the timer on the box does it by itself "
            f"{hours(walk.design.box.dead_man_s)} after our last sign of life",
        ) from error


def prove_back(walk: _Walk) -> None:
    """The same effective command as before, and one generated token.

    Raises:
        RestoreFailed: not by the deadline.
    """
    site = walk.site
    end = time.monotonic() + walk.design.matrix.effective_deadlines().ready_s
    pause = threading.Event()
    missing = "it is not active"
    while time.monotonic() < end:
        state = site.service.state()
        argv = site.service.effective()[0] if state.active_state == "active" else ()
        if argv:
            same = not site.production.command or argv == site.production.command
            missing = "it does not serve yet" if same else f"another command runs: {' '.join(redact_argv(argv))}"
            if same and (site.own is None or _generates(site, site.own)):
                return
        pause.wait(0.5)
    raise RestoreFailed(
        f"{site.unit.name} was started but {missing}",
        hint=f"`systemctl status {site.unit.name}` on the box; our drop-in is gone",
    )


def _generates(site: Site, own: Launch) -> bool:
    host, local = site.transport.reach(own.port)
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


def dry_run(options: Options) -> str:
    """The plan with its commands, from a look at the box that changes nothing."""
    design = prepare(options)
    transport = connect(design.box)
    try:
        site = survey(design, transport)
        return _dry_text(design, site)
    finally:
        transport.close()


def _dry_text(design: Design, site: Site) -> str:
    lines = [
        f"experiment {design.matrix.experiment} on box {design.box.name} ({site.transport.name})"
        + (", REHEARSAL" if site.rehearsal else ""),
        f"{len(design.todo())} boots left of {len(design.plan.boots_planned)}, seed {design.plan.seed}, "
        f"about {hours(downtime_s(design))}",
        "",
        "boots, in order:",
    ]
    block = 0
    for boot in design.todo():
        if boot.block != block:
            block = boot.block
            lines.append(f"  block {block}")
        lines.append(f"    {boot.boot}")
    for name, launch in site.launches.items():
        lines += [
            "",
            f"{name}: {site.changes[name]} flags differ from production",
            f"  {' '.join(redact_argv(launch.argv))}",
        ]
        lines += [f"  {action.text}" for action in site.service.boot_actions(launch)]
    return "\n".join(lines)
