"""Before a box is changed: what shall be done (`Design`), what stands there (`Site`), and both in words.

Nothing here changes anything, on either side. Every problem of the input is found here, before consent is asked.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from orchestrator import scrape
from orchestrator.box import caches, checkpoint, facts, unitfile
from orchestrator.box.engines import ENGINES, Engine, Launch, OwnCache, Problem, is_rehearsal
from orchestrator.box.owncaches import precious_of, stores_of
from orchestrator.box.services import Service, UnitFacts, make_service, own_caches
from orchestrator.box.transports import Transport
from orchestrator.errors import ColdbootError, ExperimentChanged, MatrixError, UsageError
from orchestrator.forecast import Forecast, best_history, forecast, history_of
from orchestrator.ledger import read, write_private
from orchestrator.matrix import BoxSpec, Matrix, Variant, differences, load_matrix, select
from orchestrator.plan import (
    PLAN_FILE,
    Plan,
    PlanName,
    PlannedBoot,
    experiment_folder,
    extend,
    make_plan,
    read_plan,
    remaining,
)
from orchestrator.progress import hours
from orchestrator.records import AnyRecord, BootEnded, CacheState, CampaignEnded, CampaignStarted, ProductionState
from orchestrator.redact import redact_argv

DEFAULT_BOOTS = 3
PROMPTS = "prompts"
ISOLATED_PORTS = range(18080, 18980)
_INSTEAD = "cold, which boots from empty caches of its own; warm, as-is"


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

    @property
    def longest_s(self) -> float:
        """How long the longest boot of earlier sessions took; 0 where there is none."""
        return max((each.seconds or 0.0 for each in self.records if isinstance(each, BootEnded)), default=0.0)


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
    checkpoint_gib: dict[str, float] = field(default_factory=dict)
    clears: tuple[OwnCache, ...] = ()

    def clear(self, cache_root: str | None) -> tuple[str, ...]:
        """Empties the unit's own cache directories before a boot of `cache: clear`; says which.

        Raises:
            BoxError: they could not be set aside.
        """
        door = own_caches(self.service)
        if door is None:
            raise UsageError(f"{self.unit.name} is no unit whose caches could be set aside")
        return door.empty(self.unit, self.clears, _precious(self.unit, self.launches), cache_root)

    def room(self) -> tuple[tuple[int, str], ...]:
        """Free MiB on the disks of the caches that boots of `cache: clear` write, each with a directory on it.

        Raises:
            BoxError: the box could not be asked.
        """
        door = own_caches(self.service)
        return () if door is None else door.free_mib(self.unit, self.clears)

    @property
    def production_variant(self) -> str | None:
        """The variant that changes nothing."""
        return next((name for name, count in self.changes.items() if count == 0), None)


def prepare(options: Options) -> Design:
    """Matrix, folder and plan of the experiment; refuses to go on with what was begun otherwise.

    Raises:
        MatrixError: matrix.yaml is not usable.
        ExperimentChanged: the experiment began with something else.
    """
    matrix = select(
        load_matrix(options.matrix, box=options.box, unit_check=unit_problems),
        box=options.box,
        cache=options.cache or None,
        experiment=options.experiment,
        seed=options.seed,
    )
    if "clear" in matrix.cache and matrix.target.service == "process":
        what = (
            f"clear sets a unit's own caches aside, and on box {matrix.box} (`service: process`) there is no unit, and "
            "nothing that would put them back after a reboot"
        )
        raise MatrixError([matrix.problem("cache", what=what, accepted=_INSTEAD)])
    only = tuple(variant.name for variant in select(matrix, options.only or None).variants)
    folder = experiment_folder(options.out, matrix, new=options.new)
    if not (folder / PLAN_FILE).exists():
        default = None if options.plan or matrix.boots is not None else DEFAULT_BOOTS
        plan = make_plan(matrix, options.boots or default, plan_name=options.plan)
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
    kept = (folder / "matrix.yaml").read_text(encoding="utf-8")
    changed = list(differences(kept, matrix, old_prompts=_kept_prompts(folder)))
    if options.seed is not None and options.seed != plan.seed:
        changed.append(f"seed: {plan.seed} → {options.seed}")
    if changed:
        raise ExperimentChanged(
            f"{folder} began with another matrix: " + "; ".join(changed),
            hint="--new starts afresh beside it; or take the change back to go on",
        )


def keep_prompts(folder: Path, matrix: Matrix) -> None:
    """Keeps the user's own prompts beside the matrix, byte for byte."""
    own = matrix.own_prompts()
    if own is not None:
        write_private(folder / f"{PROMPTS}{own.path.suffix or '.txt'}", own.raw)


def _kept_prompts(folder: Path) -> str | None:
    """Their digest; None where none are kept."""
    found = [path for path in folder.glob(f"{PROMPTS}.*") if path.suffix != ".partial"]
    return hashlib.sha256(found[0].read_bytes()).hexdigest() if found else None


def compose(box: BoxSpec, argv: Sequence[str], variant: Variant, port: int) -> Launch | tuple[Problem, ...]:
    """A variant on a box's own command; isolated unless the box says otherwise."""
    host = "127.0.0.1" if box.isolate else None
    return ENGINES[box.engine].compose(
        argv, variant, host=host, port=port if box.isolate else None, program=variant.program or box.program
    )


def unit_problems(box: BoxSpec, variant: Variant) -> list[tuple[tuple[str, ...], str]]:
    """What a box's unit file says about a variant: keys below it, and what is wrong; nothing without such a file."""
    if box.unit_file is None:
        return []
    try:
        unit = unitfile.parse(box.unit_file.read_text(encoding="utf-8"))
        argv = unitfile.exec_argv(unit, unitfile.unit_specifiers(box.unit_file.name, user="", uid=0, home=""))
    except (OSError, UnicodeDecodeError, ColdbootError):
        # The file's own trouble is told once, by the check of the matrix or by the service.
        return []
    composed = compose(box, argv, variant, port=1)
    return [] if isinstance(composed, Launch) else [(_below(problem), problem.what) for problem in composed]


def _below(problem: Problem) -> tuple[str, ...]:
    return problem.key[1:] if problem.key[:1] == ("set",) else problem.key


def survey(design: Design, transport: Transport) -> Site:
    """Reads what is on the box and composes every variant; changes nothing.

    Raises:
        MatrixError: variants that cannot be composed, prompts that are too long for a variant, all at once.
        BoxError: no such unit, no access.
    """
    matrix, box = design.matrix, design.box
    state = design.folder.resolve() / "box"
    service = make_service(transport, box, state)
    engine = ENGINES[box.engine]
    unit = service.describe()
    port = isolated_port(transport, box)
    launches: dict[str, Launch] = {}
    problems: list[str] = []
    for variant in matrix.all_variants:
        composed = compose(box, unit.argv, variant, port)
        if isinstance(composed, Launch):
            env = engine.own_env(state=str(state / "engine"), time_scale=box.time_scale) | box.env | composed.env
            launches[variant.name] = replace(composed, env=env)
        else:
            problems += [_problem(matrix, variant, problem) for problem in composed]
    problems += too_long(matrix, {name: engine.limits(launch.argv).max_model_len for name, launch in launches.items()})
    if problems:
        raise MatrixError(problems)
    production = _production(design.records, service)
    rehearsal = engine.rehearsal or any(is_rehearsal(launch.argv) for launch in launches.values())
    if unit.helper:
        caches.refuse_linked(transport, unit, root=box.cache_root)
    return Site(
        transport=transport,
        service=service,
        engine=engine,
        unit=unit,
        launches=launches,
        changes={one.name: _changes(engine, unit, one, launches[one.name]) for one in matrix.all_variants},
        production=production,
        fingerprint=engine_fingerprint(transport, unit, launches),
        rehearsal=rehearsal,
        has_production=box.service != "process" or production.active,
        own=own_launch(box, unit),
        checkpoint_gib=checkpoint.per_card_gib(transport, {name: one.argv for name, one in launches.items()}),
        clears=_clears(design, service, unit, launches),
    )


def too_long(matrix: Matrix, contexts: Mapping[str, int | None]) -> list[str]:
    """Prompt lengths of the chosen box that do not fit into a variant's context together with the answer.

    Args:
        matrix: With the load.
        contexts: The context of each variant's model, tokens; None where its command does not state it.
    """
    load, own = matrix.effective_load(), matrix.target.load
    mine = own is not None and bool(own.model_fields_set & {"input_tokens", "output_tokens"})
    place = ("boxes", matrix.box, "load", "input_tokens") if mine else ("load", "input_tokens")
    problems = []
    for length in load.lengths:
        short = {name: room for name, room in contexts.items() if room and 0 < room < length + load.output_tokens}
        if short:
            room = min(short.values())
            names = ", ".join(short)
            what = f"{length} tokens in and {load.output_tokens} out do not fit into --max-model-len {room} ({names})"
            fits = room - load.output_tokens
            accepted = f"at most {fits} tokens in" if fits > 0 else "a shorter answer, or a longer --max-model-len"
            problems.append(matrix.problem(*place, what=what, accepted=accepted))
    return problems


def _clears(design: Design, service: Service, unit: UnitFacts, launches: dict[str, Launch]) -> tuple[OwnCache, ...]:
    """The directories that boots of `cache: clear` set aside.

    Raises:
        MatrixError: some of them must be left alone; says why of each.
    """
    door = own_caches(service)
    if "clear" not in design.plan.cache or door is None:
        return ()
    box, engine = design.box, ENGINES[design.box.engine]
    stores = stores_of(engine, unit, [launch.env for launch in launches.values()])
    found, problems = door.resolve(unit, stores, _precious(unit, launches), box.cache_root)
    if problems:
        said = (design.matrix.problem("cache", what=f"clear: {what}", accepted=_INSTEAD) for what in problems)
        raise MatrixError(list(said))
    return found


def _precious(unit: UnitFacts, launches: dict[str, Launch]) -> tuple[str, ...]:
    """Paths that lie in no compile cache: production's and the variants' programs and weights."""
    return precious_of([*unit.argv, *(word for launch in launches.values() for word in launch.argv)])


def engine_fingerprint(transport: Transport, unit: UnitFacts, launches: dict[str, Launch]) -> dict[str, str | None]:
    """The box's facts, with the versions that each program of the variants has under the unit's own PYTHONPATH."""
    env = unit.env | next(iter(launches.values())).env
    commands = (launch.argv for launch in launches.values())
    return facts.fingerprint_of_all(transport, commands, python_path=env.get("PYTHONPATH"))


def _changes(engine: Engine, unit: UnitFacts, variant: Variant, launch: Launch) -> int:
    """In how many flags, environment variables and programs a variant differs from production."""
    return engine.changes(unit.argv, launch) + len(variant.env) + (variant.program is not None)


def own_launch(box: BoxSpec, unit: UnitFacts) -> Launch | None:
    """Production's own command, where it listens and under which name; None when its command cannot be read."""
    composed = ENGINES[box.engine].compose(unit.argv, Variant(name="production"), host=None, port=None)
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
    ports: tuple[int, ...] = (*ISOLATED_PORTS[start:], *ISOLATED_PORTS[:start])
    return next(port for port in ports if port not in taken)


def _problem(matrix: Matrix, variant: Variant, problem: Problem) -> str:
    return matrix.problem("variants", variant.name, *_below(problem), what=problem.what)


def _production(records: tuple[AnyRecord, ...], service: Service) -> ProductionState:
    """What must be there afterwards: what the box says now, except that a campaign of ours may have stopped it.

    After a killed campaign the box itself knows whether the service ran, unless it was rebooted; then the ledger does.
    """
    now, before = service.production(), _production_before(records)
    return now.model_copy(update={"active": now.active or (before is not None and before.active)})


def owes_production(records: tuple[AnyRecord, ...]) -> bool:
    """Whether a campaign of this experiment has not given the box back: it was killed, or could not."""
    return _production_before(records) is not None


def _production_before(records: tuple[AnyRecord, ...]) -> ProductionState | None:
    """What an interrupted campaign found before its first change; None when the last one restored it."""
    found: ProductionState | None = None
    for record in records:
        if isinstance(record, CampaignStarted):
            found = found or record.production
        elif isinstance(record, CampaignEnded) and record.restored:
            found = None
    return found


def check_fingerprint(records: tuple[AnyRecord, ...], site: Site) -> None:
    """Refuses to add boots of another machine, driver, engine or unit to an experiment.

    Raises:
        ExperimentChanged: names each fact that differs.
    """
    begun = next((record for record in records if isinstance(record, CampaignStarted)), None)
    if begun is not None:
        refuse_changed(begun.fingerprint, site.fingerprint, begun.base_command, redact_argv(site.unit.argv))


def refuse_changed(
    before: dict[str, str | None], now: dict[str, str | None], command_before: Sequence[str], command: Sequence[str]
) -> None:
    """Compares fingerprints, and production's own command, to which every variant is a difference.

    Raises:
        ExperimentChanged: names each fact that differs.
    """
    names = sorted(set(before) | set(now))
    changed = [f"{name}: {before.get(name)} → {now.get(name)}" for name in names if before.get(name) != now.get(name)]
    if command_before and tuple(command_before) != tuple(command):
        gone = [word for word in command_before if word not in command]
        new = [word for word in command if word not in command_before]
        changed.append(f"the unit's command: without {gone}, with {new}, in another order if both are empty")
    if changed:
        raise ExperimentChanged(
            "the box is not what the experiment began with: " + "; ".join(changed),
            hint="boots of both must not be pooled; --new starts afresh beside it",
        )


def expected(design: Design) -> Forecast:
    """How long the boots to come will take, from what earlier ones on this box took, else by a rough guess."""
    box, matrix = design.box, design.matrix
    todo = design.todo()
    wanted = {boot.variant for boot in todo}
    history = history_of(design.records, design.folder.name) or best_history(
        design.folder.parent, box.name, besides=design.folder, variants=wanted
    )
    return forecast(
        todo,
        history,
        matrix.effective_load(),
        len(matrix.levels),
        time_scale=box.time_scale,
        headroom=matrix.headroom,
    )


def announcement(design: Design, site: Site) -> str:
    """What a campaign will do to a production service, said before it is done."""
    launch = next(iter(site.launches.values()))
    boots, away = len(design.todo()), hours(expected(design).seconds)
    variants = len(site.launches)
    planned = (
        f"  {boots} boot{'' if boots == 1 else 's'} of {variants} variant{'' if variants == 1 else 's'}, about {away}"
    )
    listens = f"the engine listens on 127.0.0.1:{launch.port} meanwhile."
    actions = (f"  {action.text}" for action in site.service.install_actions(launch))
    if not site.has_production:
        first = f"{design.box.name} has no service that is taken down: the engine runs as a plain process."
        return "\n".join((first, f"{planned}; {listens}", *actions))
    state = "running" if site.production.active else "not running"
    aside = [one.path for one in site.clears]
    running = running_requests(site)
    lines = [
        f"{site.unit.name} on {design.box.name} is {state}"
        + (f", {running:g} requests are in it now" if running else "")
        + ". This campaign takes it down:",
        f"{planned} of downtime; {listens}",
        *actions,
        *([f"  Its own caches are set aside before each boot: {' '.join(aside)}"] if aside else []),
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
