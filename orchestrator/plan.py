"""Which boots, in which order: Matrix + seed → `Plan`; `Plan` − ledger → what remains.

**Blocks.** One block boots every variant × cache state once, in random order, so that drift of the box hits all
variants alike. A block is a group in time: boots added later stand in new blocks, never in an old one.

**Order.** Within a block, boots stand in ascending order of
`SHA-256("coldboot:{seed}:{block}:{variant}:{cache}")`. That is a uniformly random order for each seed, the same on
every platform and with every version of Python (`random.shuffle` promises neither), and a block's order depends on
nothing but its own boots: adding blocks cannot change the earlier ones.

**Names.** `b02-spec-8`; another cache state than cold `b02-spec-8@warm`; a repeat `b02-spec-8.r1`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field, ValidationError

from orchestrator.errors import LedgerError, UsageError
from orchestrator.matrix import Matrix
from orchestrator.records import AnyRecord, BootEnded, BootRecord, CacheState, Frozen

PlanName: TypeAlias = Literal["fixed", "nightly", "pull-request", "smoke"]

MAX_DISTURBED_REPEATS = 3
ALPHA = 0.05
PLAN_FILE = "plan.json"
_COUNTS = frozenset({"completed", "crashed", "not_ready"})


class Looks(Frozen):
    """After how many boots of a variant its cells may be judged, declared before the first boot.

    `refute` and `vouch` count boots; each look of a kind is taken at its kind's α (the total split over its looks).
    A cell may be refuted at `refute` looks alone, and vouched for at `vouch` looks alone.
    """

    refute: tuple[int, ...]
    refute_alpha: float
    vouch: tuple[int, ...]
    vouch_alpha: float

    @property
    def last(self) -> int:
        """The most boots that a variant gets."""
        return max((*self.refute, *self.vouch))


# Looking after every boot inflates the errors, so looks are declared and α is split over them.
LOOKS: Mapping[str, Looks] = {
    "nightly": Looks(refute=(2, 3, 4, 6, 8, 10), refute_alpha=ALPHA / 6, vouch=(6, 8, 10), vouch_alpha=ALPHA / 3),
    "pull-request": Looks(refute=(2, 3, 5), refute_alpha=ALPHA / 3, vouch=(), vouch_alpha=ALPHA),
    "smoke": Looks(refute=(3,), refute_alpha=ALPHA, vouch=(), vouch_alpha=ALPHA),
}


class PlannedBoot(Frozen):
    """One boot to make. `block`, `position` (over the whole plan) and `attempt` count from 1."""

    boot: str
    variant: str
    cache: CacheState
    block: int
    position: int
    attempt: int = 1


class Plan(Frozen):
    """All boots of one experiment on one box, in run order. Written to plan.json.

    `boots` is what was asked for; `blocks` holds the boots. Each boot measures every `concurrency` at every prompt
    length of `input_tokens` (empty in a plan that is older than several lengths). `extended_from`: numbers of boots
    that the plan had before it was extended; results may have been looked at then, which the declared looks do not
    know.
    """

    v: Literal[1] = 1
    experiment: str
    box: str
    plan_name: PlanName = "fixed"
    seed: int
    boots: int | Literal["auto"]
    looks: Looks
    alpha: float = ALPHA
    extended_from: tuple[int, ...] = ()
    variants: tuple[str, ...]
    cache: tuple[CacheState, ...]
    concurrency: tuple[int, ...]
    input_tokens: tuple[int, ...] = ()
    matrix_digest: str
    boots_planned: tuple[PlannedBoot, ...] = Field(default=())

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return self.boots_planned[-1].block if self.boots_planned else 0


# --- planning ------------------------------------------------------------------------------------------------------


def make_plan(
    matrix: Matrix,
    boots: int | Literal["auto"] | None = None,
    seed: int | None = None,
    *,
    plan_name: PlanName | None = None,
) -> Plan:
    """The plan of a new experiment.

    Args:
        matrix: With the variants, box and cache states that shall boot (see `matrix.select`).
        boots: How often each variant × cache boots, or "auto"; default: the matrix's.
        seed: Of the order; default: the matrix's.
        plan_name: An adaptive plan; default: "fixed" for a number, "nightly" for "auto".

    Returns:
        A plan with one look, at its end (fixed, smoke), holds all its boots. One with several holds its first block;
        after each block `verdict.next_boots` says which variants are worth another, and `add_block` adds it.

    Raises:
        UsageError: a number that is none, or a plan that does not fit it.
    """
    if boots is None and plan_name in (None, "fixed"):
        boots = matrix.boots
    if boots is None and plan_name in (None, "fixed"):
        raise UsageError(
            "how often shall each variant boot? accepted: --boots N, --boots auto, or `boots:` in the file"
        )
    name: PlanName = plan_name or ("nightly" if boots == "auto" else "fixed")
    if name == "fixed":
        looks = _fixed_looks(boots)
    elif isinstance(boots, int):
        hint = f"leave --boots out: {name} boots up to {LOOKS[name].last} times"
        raise UsageError(f"--boots {boots} and --plan {name} exclude each other", hint=hint)
    else:
        looks = LOOKS[name]
    plan = Plan(
        experiment=matrix.experiment,
        box=matrix.box,
        plan_name=name,
        seed=matrix.seed if seed is None else seed,
        boots=boots if name == "fixed" and boots is not None else "auto",
        looks=looks,
        variants=tuple(variant.name for variant in matrix.variants),
        cache=matrix.cache,
        concurrency=matrix.concurrency,
        input_tokens=matrix.effective_load().lengths,
        matrix_digest=matrix.digest(),
    )
    # With several looks a variant may be rejected after its first boot, so only one block is planned ahead.
    for _ in range(looks.last if looks.refute[0] == looks.last else 1):
        plan = add_block(plan)
    return plan


def extend(
    plan: Plan, boots: int, *, variants: Iterable[str] | None = None, cache: Iterable[CacheState] | None = None
) -> Plan:
    """A fixed plan with at least `boots` boots of each of the variants × cache states; earlier blocks stay as they are.

    Args:
        plan: The plan so far.
        boots: How many there shall be in all.
        variants: Default: those of the plan. Others are added to it.
        cache: Default: those of the plan. Others are added to it.

    Returns:
        The same plan when there are as many already.

    Raises:
        UsageError: the plan is adaptive (it adds boots by itself), or the number is none.
    """
    if plan.plan_name != "fixed":
        raise UsageError(f"a {plan.plan_name} plan adds boots by itself; accepted: --boots auto, or --new")
    looks = _fixed_looks(boots)
    wanted = [
        (variant, state)
        for variant in (plan.variants if variants is None else tuple(variants))
        for state in (plan.cache if cache is None else tuple(cache))
    ]
    extended = plan
    while missing := [cell for cell in wanted if _count(extended, cell) < boots]:
        extended = _append(extended, missing)
    if extended is plan:
        return plan
    before, asked = plan.boots, max(boots, plan.boots) if isinstance(plan.boots, int) else boots
    changed = {
        "boots": asked,
        "looks": looks if asked == boots else plan.looks,
        "extended_from": (*plan.extended_from, *([before] if isinstance(before, int) and before < boots else [])),
    }
    return extended.model_copy(update=changed)


def add_block(plan: Plan, variants: Iterable[str] | None = None) -> Plan:
    """The plan with one more block, of these variants (default: all) in each cache state of the plan."""
    chosen = plan.variants if variants is None else tuple(dict.fromkeys(variants))
    return _append(plan, [(variant, state) for variant in chosen for state in plan.cache])


def _fixed_looks(boots: int | str | None) -> Looks:
    if not isinstance(boots, int) or isinstance(boots, bool) or not 1 <= boots <= 1000:
        raise UsageError(f"--boots: `{boots}` is not accepted for a fixed plan; accepted: a whole number, 1 to 1000")
    return Looks(refute=(boots,), refute_alpha=ALPHA, vouch=(boots,), vouch_alpha=ALPHA)


def _append(plan: Plan, cells: list[tuple[str, CacheState]]) -> Plan:
    block, position = plan.blocks + 1, len(plan.boots_planned)
    ordered = sorted(cells, key=lambda cell: _order(plan.seed, block, *cell))
    added = tuple(
        PlannedBoot(
            boot=boot_name(block, variant, state), variant=variant, cache=state, block=block, position=position + place
        )
        for place, (variant, state) in enumerate(ordered, start=1)
    )
    return plan.model_copy(
        update={
            "boots_planned": plan.boots_planned + added,
            "variants": tuple(dict.fromkeys((*plan.variants, *(variant for variant, _ in cells)))),
            "cache": tuple(dict.fromkeys((*plan.cache, *(state for _, state in cells)))),
        }
    )


def _order(seed: int, block: int, variant: str, cache: str) -> bytes:
    return hashlib.sha256(f"coldboot:{seed}:{block}:{variant}:{cache}".encode()).digest()


def _count(plan: Plan, cell: tuple[str, CacheState]) -> int:
    return sum((boot.variant, boot.cache) == cell for boot in plan.boots_planned)


def boot_name(block: int, variant: str, cache: CacheState, attempt: int = 1) -> str:
    """`b02-spec-8`, `b02-spec-8@warm`, `b02-spec-8.r1` (the second attempt)."""
    state = "" if cache == "cold" else f"@{cache}"
    repeat = "" if attempt == 1 else f".r{attempt - 1}"
    return f"b{block:02d}-{variant}{state}{repeat}"


# --- what the ledger leaves ----------------------------------------------------------------------------------------


@dataclass
class _History:
    """What the ledger knows of one planned boot, over all its attempts."""

    attempts: set[int] = field(default_factory=set)
    counted: bool = False
    disturbed: int = 0


def remaining(
    plan: Plan, records: Iterable[AnyRecord], *, variants: Collection[str] | None = None
) -> tuple[PlannedBoot, ...]:
    """What is still to be booted, in run order.

    A boot that ended completed, crashed or not_ready is done. One that was disturbed (at most three times), aborted,
    or begun without an end is repeated as its next attempt, in its old place.

    Args:
        plan: The plan.
        records: The ledger's records, in any order; those of boots that the plan does not know are ignored.
        variants: Only these; default: all.
    """
    histories = _histories(records)
    left = []
    for boot in plan.boots_planned:
        history = histories.get((boot.block, boot.variant, boot.cache), _History())
        if history.counted or history.disturbed > MAX_DISTURBED_REPEATS:
            continue
        if variants is None or boot.variant in variants:
            left.append(_attempt(boot, 1 + max(history.attempts, default=0)))
    return tuple(left)


def given_up(plan: Plan, records: Iterable[AnyRecord]) -> tuple[PlannedBoot, ...]:
    """Planned boots that were disturbed in their first attempt and in each of three repeats: they have no answer."""
    histories = _histories(records)
    return tuple(
        boot
        for boot in plan.boots_planned
        if (history := histories.get((boot.block, boot.variant, boot.cache))) is not None
        and not history.counted
        and history.disturbed > MAX_DISTURBED_REPEATS
    )


def _histories(records: Iterable[AnyRecord]) -> dict[tuple[int, str, str], _History]:
    histories: dict[tuple[int, str, str], _History] = {}
    ended: set[tuple[str, int]] = set()
    for record in records:
        if not isinstance(record, BootRecord):
            continue
        history = histories.setdefault((record.block, record.variant, record.cache), _History())
        history.attempts.add(record.attempt)
        if isinstance(record, BootEnded) and (record.boot, record.attempt) not in ended:
            ended.add((record.boot, record.attempt))
            history.counted |= record.boot_outcome in _COUNTS
            history.disturbed += record.boot_outcome == "disturbed"
    return histories


def _attempt(boot: PlannedBoot, attempt: int) -> PlannedBoot:
    if attempt == boot.attempt:
        return boot
    name = boot_name(boot.block, boot.variant, boot.cache, attempt)
    return boot.model_copy(update={"boot": name, "attempt": attempt})


# --- plan.json and the folders -------------------------------------------------------------------------------------


def write_plan(path: Path, plan: Plan) -> None:
    """Write plan.json whole: a reader sees the old plan or the new one, also after a power cut.

    Raises:
        LedgerError: it cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(plan.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        raise LedgerError(f"{path}: cannot be written: {error.strerror or error}") from error


def read_plan(path: Path) -> Plan:
    """Read plan.json.

    Raises:
        LedgerError: it is not there, damaged, or of another version.
    """
    data = _read_json(path)
    if data.get("v") != 1:
        raise LedgerError(f"{path}: a plan of version {data.get('v')!r}; this Coldboot reads version 1")
    try:
        return Plan.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise LedgerError(f"{path}: damaged: {where}: {first['msg']}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise LedgerError(f"{path}: there is no such file") from error
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise LedgerError(f"{path}: damaged: {error}") from error
    if not isinstance(data, dict):
        raise LedgerError(f"{path}: damaged: no JSON object")
    return data


def experiment_folder(out: Path, matrix: Matrix, *, new: bool = False) -> Path:
    """Where the results of this matrix on its chosen box belong.

    `<out>/<experiment>` is the file's own box's, or whose plan.json stands there; any other box has
    `<out>/<experiment>.<box>`. `--new` makes `.2`, `.3` … of either; without it, the newest of them whose matrix is
    this one, else the newest.

    Args:
        out: The root, as given by `--out`; default artifacts/.
        matrix: The matrix, with the box that was chosen.
        new: The first free name after those that are there.

    Raises:
        LedgerError: a plan.json on the way is damaged.
    """
    base = out / matrix.experiment
    other = out / f"{matrix.experiment}.{matrix.box}"
    owner = _owner(base)
    if owner is not None:
        chosen = base if owner == matrix.box else other
    elif _owner(other) is not None:
        chosen = other
    else:
        chosen = base if matrix.box == (matrix.own_box or matrix.box) else other
    generations = _generations(chosen)
    if new:
        return chosen if not chosen.exists() else _numbered(chosen, 1 + max(generations, default=1))
    digest = matrix.digest()
    for number in sorted(generations, reverse=True):
        folder = _numbered(chosen, number)
        if (folder / PLAN_FILE).exists() and _read_json(folder / PLAN_FILE).get("matrix_digest") == digest:
            return folder
    return _numbered(chosen, max(generations, default=1))


def _owner(folder: Path) -> str | None:
    """The box to whom an experiment's folder belongs; None while no plan stands there."""
    path = folder / PLAN_FILE
    return str(_read_json(path).get("box")) if path.exists() else None


def experiments_on(out: Path, box: str, experiment: str | None = None) -> tuple[Path, ...]:
    """Folders of experiments on a box, all of their generations; a damaged plan.json is passed over.

    Args:
        out: The root.
        box: The box's name.
        experiment: Only those of this experiment.
    """
    found = []
    for path in sorted(out.glob(f"*/{PLAN_FILE}")):
        with contextlib.suppress(LedgerError):
            told = _read_json(path)
            if told.get("box") == box and experiment in (None, told.get("experiment")):
                found.append(path.parent)
    return tuple(found)


def _generations(folder: Path) -> list[int]:
    """The numbers of an experiment's folders that are there: 1 is the one without a number."""
    numbered = re.compile(re.escape(folder.name) + r"\.([2-9]|[1-9][0-9]+)")
    names = [path.name for path in folder.parent.glob("*") if path.is_dir()]
    found = [int(match[1]) for name in names if (match := numbered.fullmatch(name)) is not None]
    return [1, *found] if folder.exists() else found


def _numbered(folder: Path, number: int) -> Path:
    return folder if number == 1 else folder.with_name(f"{folder.name}.{number}")
