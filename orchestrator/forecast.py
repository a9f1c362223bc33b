"""How long boots will take, from what earlier ones took, and what a budget buys. Pure but for reading old ledgers.

A boot is expected to take what boots of its variant and cache state took on average, else what all boots took that were
completed, else a guess from the load and the deadlines: that another variant died early says nothing about it. The
budget is spent by the campaign's own rule: no boot begins that would end after it, if it took as long as the longest so
far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator import stats
from orchestrator.errors import LedgerError
from orchestrator.ledger import RECORDS, read
from orchestrator.matrix import LoadSpec
from orchestrator.plan import PlannedBoot
from orchestrator.records import (
    STEPS,
    AnyRecord,
    BootEnded,
    CampaignStarted,
    StepEnded,
    StepName,
    VariantVerdict,
    Verdicts,
)

COUNTED = ("completed", "crashed", "not_ready")
LOOKED_AT = 8
# A cold boot of a 27B model, seconds, where nothing is known: imports, weights, compilation, graphs, first requests.
GUESS: Mapping[StepName, float] = {
    "clean_slate": 8.0,
    "cold": 1.0,
    "render": 1.0,
    "start": 1.0,
    "ready": 120.0,
    "first_request": 8.0,
    "headroom": 15.0,
    "sanity": 8.0,
    "stop": 8.0,
}
GUESS_TRIAL_S = 10.0
GUESS_TOKENS_PER_S = 50.0


@dataclass(frozen=True, slots=True)
class Past:
    """One boot that has ended: seconds of each step."""

    variant: str
    cache: str
    steps: Mapping[StepName, float]
    completed: bool = True


@dataclass(frozen=True, slots=True)
class History:
    """What earlier boots took. `source` says which; `load_s` is the load that each of their boots had planned."""

    source: str
    boots: tuple[Past, ...]
    load_s: float | None = None

    def worth(self, variants: Collection[str]) -> tuple[int, bool]:
        """How many of these variants it has completed boots of, and whether of any."""
        completed = {past.variant for past in self.boots if past.completed}
        return len(completed & set(variants)), bool(completed)


@dataclass(frozen=True, slots=True)
class Expected:
    """One boot to come."""

    boot: PlannedBoot
    steps: Mapping[StepName, float]

    @property
    def seconds(self) -> float:
        """All of its steps."""
        return sum(self.steps.values())


@dataclass(frozen=True, slots=True)
class Forecast:
    """All boots to come, in order."""

    source: str
    boots: tuple[Expected, ...]

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(each.seconds for each in self.boots)

    @property
    def steps(self) -> dict[StepName, float]:
        """Seconds by step over all boots, in the order of a boot."""
        names = [name for name in STEPS if any(name in each.steps for each in self.boots)]
        return {name: sum(each.steps.get(name, 0.0) for each in self.boots) for name in names}


@dataclass(frozen=True, slots=True)
class Bought:
    """What a budget buys: the boots in order, those that are left, and how long the former take."""

    boots: tuple[PlannedBoot, ...]
    left: tuple[PlannedBoot, ...]
    seconds: float
    whole_blocks: int


# --- what earlier boots took -----------------------------------------------------------------------------------------


def load_s(load: Mapping[str, object], levels: int) -> float | None:
    """The seconds of load that one boot has planned: its windows and warm-ups; None where requests are counted."""
    window, warmup = load.get("window_s"), load.get("warmup_s")
    if (
        load.get("window_requests") is not None
        or not isinstance(window, int | float)
        or not isinstance(warmup, int | float)
    ):
        return None
    return float(levels * (window + warmup))


def history_of(records: Iterable[AnyRecord], source: str) -> History | None:
    """What the boots of a ledger took that count; None without any."""
    steps: dict[str, dict[StepName, float]] = {}
    ended: list[BootEnded] = []
    planned: float | None = None
    for record in records:
        if isinstance(record, CampaignStarted):
            planned = load_s(record.load, len(record.levels))
        elif isinstance(record, StepEnded):
            own = steps.setdefault(record.boot, {})
            own[record.name] = own.get(record.name, 0.0) + record.seconds
        elif isinstance(record, BootEnded) and record.boot_outcome in COUNTED:
            ended.append(record)
    boots = tuple(
        Past(one.variant, one.cache, steps[one.boot], one.boot_outcome == "completed")
        for one in ended
        if one.boot in steps
    )
    said = f"as {'one boot' if len(boots) == 1 else f'{len(boots)} boots'} of {source} took"
    return History(said, boots, planned) if boots else None


def best_history(out: Path, box: str, *, besides: Path, variants: Collection[str]) -> History | None:
    """The same of another experiment on this box: of those written last the one that completed most of these variants.

    None without any that can be read; of equal ones the newest.
    """
    found: list[History] = []
    try:
        written = sorted(out.glob(f"*/{RECORDS}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    except OSError:
        return None
    for path in written[:LOOKED_AT]:
        if path.parent == besides:
            continue
        try:
            records = read(path.parent)
        except LedgerError:
            # Somebody else's experiment is damaged: that is its own trouble, and no reason not to plan this one.
            continue
        begun = next((record for record in records if isinstance(record, CampaignStarted)), None)
        if begun is not None and begun.box == box:
            history = history_of(records, path.parent.name)
            found += [] if history is None else [history]
    return max(found, key=lambda one: one.worth(variants), default=None)


# --- what is to come -------------------------------------------------------------------------------------------------


def forecast(
    todo: Sequence[PlannedBoot],
    history: History | None,
    load: LoadSpec,
    levels: int,
    *,
    time_scale: float | None = None,
    headroom: bool = True,
) -> Forecast:
    """How long each boot to come will take, step by step.

    Args:
        todo: The boots, in order.
        history: Earlier boots; without them a guess.
        load: What each level of each boot will be loaded with.
        levels: How many levels.
        time_scale: By how much a rehearsal shortens the phases of a boot.
        headroom: Whether that step is done.
    """
    guess = _guess(load, levels, time_scale, headroom=headroom)
    if history is None:
        return Forecast("a guess: no boot on this box is known yet", tuple(Expected(boot, guess) for boot in todo))
    planned = load_s(load.model_dump(), levels)
    scale = planned / history.load_s if planned and history.load_s else 1.0
    found = [(boot, _mean(history, boot, scale)) for boot in todo]
    source = history.source if all(steps for _, steps in found) else f"{history.source}; of other variants a guess"
    return Forecast(source, tuple(Expected(boot, steps or guess) for boot, steps in found))


def _guess(load: LoadSpec, levels: int, time_scale: float | None, *, headroom: bool) -> dict[StepName, float]:
    """Without any experience; a rehearsal's phases are scaled, and take half a second at least for what is ours."""
    steps = {name: seconds * (time_scale or 1.0) for name, seconds in GUESS.items() if headroom or name != "headroom"}
    if time_scale is not None:
        steps["ready"] = max(steps["ready"], 0.5)
    window_s = load.window_s
    if load.window_requests is not None:
        window_s = load.window_requests * load.output_tokens / GUESS_TOKENS_PER_S
    slack = GUESS_TRIAL_S if time_scale is None else min(GUESS_TRIAL_S, window_s)
    steps["trials"] = levels * (window_s + load.warmup_s + slack)
    return {name: steps[name] for name in STEPS if name in steps}


def _mean(history: History, boot: PlannedBoot, scale: float) -> dict[StepName, float]:
    """What the like of it took on average; the trials as long as this load is longer than that one.

    Nothing where no boot is like it: none of its variant, and none that was completed.
    """
    alike = [past for past in history.boots if (past.variant, past.cache) == (boot.variant, boot.cache)]
    completed = [past for past in history.boots if past.completed]
    alike = alike or [past for past in completed if past.cache == boot.cache] or completed
    names = [name for name in STEPS if any(name in past.steps for past in alike)]
    mean = {name: sum(past.steps.get(name, 0.0) for past in alike) / len(alike) for name in names}
    return {name: seconds * (scale if name == "trials" else 1.0) for name, seconds in mean.items()}


# --- the budget ------------------------------------------------------------------------------------------------------


def buys(found: Forecast, budget_s: float, *, longest_s: float = 0.0) -> Bought:
    """What a budget buys, by the campaign's own rule; `longest_s` is the longest boot of earlier sessions."""
    spent, longest = 0.0, longest_s
    bought: list[PlannedBoot] = []
    for each in found.boots:
        if spent + longest > budget_s:
            break
        bought.append(each.boot)
        spent += each.seconds
        longest = max(longest, each.seconds)
    left = tuple(each.boot for each in found.boots[len(bought) :])
    begun = {boot.block for boot in bought}
    return Bought(tuple(bought), left, spent, len(begun - {boot.block for boot in left}))


def undecided(
    variants: Sequence[str], boots: Sequence[PlannedBoot], records: Iterable[AnyRecord], verdicts: Verdicts | None
) -> tuple[str, ...]:
    """Which variants these boots, with those that have ended, would leave undecided, and why; each reason once.

    Args:
        variants: Those of the plan.
        boots: Those to come.
        records: Those that have ended.
        verdicts: What the latter say; a rejected variant is decided.
    """
    ended = Counter(r.variant for r in records if isinstance(r, BootEnded) and r.boot_outcome in COUNTED)
    coming = Counter(boot.variant for boot in boots)
    judged = {} if verdicts is None else {one.name: one for one in verdicts.variants}
    told: dict[str, list[str]] = {}
    for name in variants:
        why = _undecided(judged.get(name), ended[name] + coming[name], coming[name])
        if why is not None:
            told.setdefault(why, []).append(name)
    return tuple(f"{', '.join(names)}: {why}" for why, names in told.items())


def _undecided(own: VariantVerdict | None, boots: int, coming: int) -> str | None:
    """Why a variant is undecided after so many boots, of which some are to come; None where it is decided."""
    if own is not None and own.verdict == "REJECTED":
        return None
    if boots < 2:
        return f"{'no boot' if boots == 0 else 'one boot'} decides nothing"
    if boots < stats.MIN_VOUCH:
        return f"{boots} boots can refute it, {stats.MIN_VOUCH} are needed to vouch for it"
    more = [] if own is None else [cell.more_boots for cell in own.cells if cell.reproducibility == "UNDECIDED"]
    if any(each is None for each in more):
        return "some of its cells no known number of boots would settle"
    most = max((each for each in more if each is not None), default=0)
    return f"it would take {most} more boots, if its spread stays" if most > coming else None
