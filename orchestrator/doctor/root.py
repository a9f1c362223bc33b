"""Who does on a box what only root may: the finding, and the script that installs the helper."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.box import caches, coldboot_box, helper
from orchestrator.box.coldboot_box import VERSION, Refused, check_unit
from orchestrator.box.doors import Granted, clear_problem, grant_problem
from orchestrator.box.engines import ENGINES, Launch, OwnCache
from orchestrator.box.owncaches import OwnCaches, outermost, precious_of, proposed, stores_of
from orchestrator.box.services import make_service
from orchestrator.box.transports import connect
from orchestrator.box.unit import UnitFacts
from orchestrator.doctor.findings import Finding, Level
from orchestrator.errors import UsageError
from orchestrator.matrix import BoxSpec, Matrix, load_matrix, select
from orchestrator.plan import experiment_folder
from orchestrator.survey import Options, compose

_AMOUNTS = f"whoever may do that is root on the box, as a drop-in in {coldboot_box.UNITS} can say anything"


def helper_script(options: Options) -> str:
    """The script that installs coldboot-box on a box, for its unit and our login; the box is only read.

    Raises:
        UsageError: there is nothing on this box that would need it, or its unit has a name that it refuses.
        BoxError: the box or its unit cannot be read.
    """
    matrix = select(load_matrix(options.matrix, box=options.box), box=options.box, experiment=options.experiment)
    box = matrix.target
    if box.service != "systemd":
        raise UsageError(f"box {box.name} has no system unit: nothing on it needs root, and so no helper")
    transport = connect(box)
    try:
        service = make_service(transport, box, experiment_folder(options.out, matrix).resolve() / "box")
        unit = service.look()
        if transport.is_root:
            raise UsageError(f"the login {transport.user} is root: a helper would take nothing from it")
        check_unit(unit.name)
        roots = (caches.cache_place(unit, box.cache_root),)
        clears = proposed(unit, own_caches(matrix, unit), box.cache_root)
        return helper.install_script(unit.name, transport.user, roots, clears)
    except Refused as why:
        raise UsageError(f"coldboot-box cannot be used: {why}", hint="the plain way by sudo can") from why
    finally:
        transport.close()


def own_caches(matrix: Matrix, unit: UnitFacts) -> tuple[OwnCache, ...]:
    """The unit's own caches, with those that a variant names; a variant that cannot be composed names none."""
    box = matrix.target
    environments = [box.env | each.env for each in _launches(matrix, unit)]
    return stores_of(ENGINES[box.engine], unit, environments)


def _launches(matrix: Matrix, unit: UnitFacts) -> tuple[Launch, ...]:
    made = (compose(matrix.target, unit.argv, variant, 1) for variant in matrix.all_variants)
    return tuple(each for each in made if isinstance(each, Launch))


def judge_clear(matrix: Matrix, unit: UnitFacts, door: OwnCaches) -> tuple[Finding, ...]:
    """One finding for each of the unit's own caches that `cache: clear` must leave alone; changes nothing.

    Args:
        matrix: with `cache: clear`.
        unit: whose caches they are.
        door: how they would be set aside.

    Raises:
        BoxError: the box could not be asked.
    """
    words = [*unit.argv, *(word for each in _launches(matrix, unit) for word in each.argv)]
    problems = door.resolve(unit, own_caches(matrix, unit), precious_of(words), matrix.target.cache_root)[1]
    mend = "mend that, or take `cache: cold`, which needs nothing of the unit's own directories"
    return tuple(Finding("caches", "fail", f"`cache: clear` is refused: {what}", mend=mend) for what in problems)


def judge_root(
    box: BoxSpec,
    login: str,
    granted: Granted | None,
    unit: UnitFacts,
    matrix: str,
    *,
    clears: Sequence[OwnCache] = (),
) -> Finding:
    """Which way is in use, and what would mend it.

    Args:
        box: of the matrix.
        login: who reaches it.
        granted: what the helper says; None: it cannot be used.
        unit: the unit.
        matrix: path of the matrix.
        clears: the unit's own caches, where the matrix sets them aside.
    """
    install = helper.install_command(box, matrix)
    if box.root == "sudo":
        return Finding("root", "ok", f"by sudo, as the box says: {_AMOUNTS}")
    if granted is None or not granted.known:
        there = "coldboot-box is not there, or not for this login" if granted is None else f"it knows no {unit.name}"
        level: Level = "fail" if box.root == "helper" else "warn"
        said = f"{there}; the plain way is sudo for systemctl, and {_AMOUNTS}"
        return Finding("root", level, said, mend=f"{install}\n(or `root: sudo` of the box, if it shall be so)")
    if granted.version != VERSION:
        age = "older" if granted.version < VERSION else "newer"
        said = f"coldboot-box on the box is version {granted.version}, {age} than ours, {VERSION}"
        return Finding("root", "fail", said, granted.version, "version", install)
    wrong = grant_problem(granted, unit, caches.cache_place(unit, box.cache_root)) or clear_problem(
        granted.clears, unit.name, [one.path for one in outermost(clears)]
    )
    if wrong is not None:
        return Finding("root", "fail", wrong[0], granted.version, "version", wrong[1])
    if granted.digest != helper.digest():
        said = f"coldboot-box {VERSION} is not the file that we would install (SHA-256 {granted.digest[:12]}…)"
        return Finding("root", "warn", said, granted.version, "version", install)
    said = f"by coldboot-box {VERSION}: {login} may have it run {unit.name} as {unit.user}, and nothing else"
    return Finding("root", "ok", said, granted.version, "version")
