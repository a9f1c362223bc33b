"""Claims about variants and comparisons with a baseline: sets of boots against sets of boots, three answers. Pure.

Every bound is one-sided at α = 0.05, so that an interval of both is 90 %. A number that does not reproduce supports no
claim, and supports no comparison either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from orchestrator import stats
from orchestrator.errors import UsageError
from orchestrator.goals import CLAIM_HELP, Claim, GoalError, parse_claim
from orchestrator.records import CacheState, CellVerdict, Level, Objective, Series, ThreeAnswers
from orchestrator.verdict.case import Case, Cell
from orchestrator.verdict.derive import Derivation, derive
from orchestrator.verdict.values import CACHES, meant, printed, throughput
from orchestrator.verdict.wording import FAR, listed, plural, streams, times

Answer: TypeAlias = ThreeAnswers
MARGIN = 0.05


@dataclass(frozen=True)
class Finding:
    """One answer with its sentence; `parts` are the answers that it was made of."""

    answer: Answer
    sentence: str
    parts: tuple[Finding, ...] = ()


# --- claims --------------------------------------------------------------------------------------------------------


def check_claim(series: Series, text: str) -> Finding:
    """Whether a claim holds: PASS when its one-sided 95 % bound is on the claimed side, FAIL when on the other.

    `A >= K x B at L` compares objectives (the geometric mean over the levels named, else over all levels that both
    have) of boots that have all these levels; `A >= V tok/s at L` compares with a number. `<=` is the mirror image; `>`
    means `>=` and `<` means `<=`. The side that is claimed about fails where it does not reproduce.

    Raises:
        UsageError: no claim, a variant or level that is not there, a factor or value of 0.
    """
    derived = derive(series)
    claim = _parse(derived, text)
    # A claim of the matrix may be about another box's lengths; one that is asked here and now is a slip of the pen.
    _refuse_unplanned(series, claim.text, tuple(series.named(level) for level in claim.levels))
    return weigh_claim(derived, text)


def weigh_claim(derived: Derivation, text: str) -> Finding:
    """The same on what was derived already."""
    claim = _parse(derived, text)
    cases = [_case(derived, name) for name in (claim.one, claim.other) if name is not None]
    cache = next((cache for cache in CACHES if all(case.levels(cache) for case in cases)), None)
    common = set.intersection(*(set(case.levels(cache)) for case in cases)) if cache else set()
    there = {cell.verdict.level for case in cases for cell in case.cells}
    named = tuple(derived.series.named(level) for level in claim.levels)
    levels = meant(named, there) if named else tuple(sorted(common))
    if cache is None or not levels or not set(levels) <= common:
        missing = f" at {streams(levels)}" if named else ""
        return Finding("UNDECIDED", f"{claim.text}: not measured{missing} by {listed(case.name for case in cases)}")
    sides: tuple[Answer, Answer] = ("FAIL", "UNDECIDED")
    for case, answer in zip(cases, sides, strict=False):
        wide = next((cell for cell in _cells(case, cache, levels) if cell in case.wide), None)
        if wide is not None:
            at = streams((wide.verdict.level,))
            return Finding(answer, f"{claim.text}: {case.name} does not reproduce at {at}")
    return _weigh(claim, [case.objective_logs(cache, levels, Objective()) for case in cases])


def _refuse_unplanned(series: Series, text: str, named: Sequence[Level]) -> None:
    planned = series.levels
    strange = [level for level in named if planned and not any(level.covers(one) for one in planned)]
    if strange:
        there = ", ".join(map(str, planned))
        raise UsageError(f"{text!r}: level {strange[0]} is not in {series.experiment}", hint=f"one of: {there}")


def _parse(derived: Derivation, text: str) -> Claim:
    try:
        return parse_claim(text, frozenset(case.name for case in derived.cases))
    except GoalError as error:
        raise UsageError(str(error), hint=CLAIM_HELP) from error


def _case(derived: Derivation, name: str) -> Case:
    case = derived.case(name)
    if case is None:
        names = ", ".join(case.name for case in derived.cases)
        raise UsageError(f"no variant {name!r} in {derived.series.experiment}", hint=f"one of: {names}; {CLAIM_HELP}")
    return case


def _cells(case: Case, cache: CacheState, levels: Sequence[Level]) -> list[Cell]:
    return [cell for cell in case.cells if cell.verdict.cache == cache and cell.verdict.level in levels]


def _weigh(claim: Claim, logs: Sequence[Sequence[float]]) -> Finding:
    """Bounds on the log ratio (or the log value) against the claimed one."""
    if claim.value is not None:
        bounds, middle = stats.mean_interval(logs[0], 2 * stats.ALPHA), stats.mean(logs[0])
        limit = math.log(claim.value)
    else:
        difference = stats.welch(logs[0], logs[1], 2 * stats.ALPHA)
        bounds, middle = (None, None) if difference is None else (difference.interval, difference.value)
        limit = math.log(claim.factor)
    if bounds is None or middle is None:
        return Finding("UNDECIDED", f"{claim.text}: a bound needs two boots a side with all levels, not {_boots(logs)}")
    low, high = bounds
    holds, fails = (low >= limit, high < limit) if claim.at_least else (high <= limit, low > limit)
    said = f"{_told(claim, middle)} (90 % {_told(claim, low)} to {_told(claim, high)}, {_boots(logs)})"
    if holds or fails:
        return Finding("PASS" if holds else "FAIL", f"{claim.text}: {'holds' if holds else 'does not hold'}, {said}")
    return Finding("UNDECIDED", f"{claim.text}: undecided, {said}{_advice(middle - limit, logs)}")


def _told(claim: Claim, log: float) -> str:
    return times(log) if claim.value is None else f"{printed(throughput(log))} tok/s"


def _boots(logs: Sequence[Sequence[float]]) -> str:
    return " against ".join(plural(len(own), "boot") for own in logs)


def _advice(distance: float, logs: Sequence[Sequence[float]]) -> str:
    """About how many boots an arm would decide, if distance and spread stay as they are."""
    spreads = [spread for own in logs if (spread := stats.sd(own)) is not None]
    if len(logs) < 2:
        return ""
    pooled = math.sqrt(math.fsum(spread**2 for spread in spreads) / len(spreads))
    needed = stats.boots_per_arm(distance, pooled, alpha=2 * stats.ALPHA)
    return f"; about {needed} boots each would decide" if needed is not None and needed <= FAR else ""


# --- baseline ------------------------------------------------------------------------------------------------------


def compare_baseline(
    now: Series, baseline: Series, *, margin: float = MARGIN, variants: Sequence[str] | None = None
) -> Finding:
    """No regression against a baseline's boots, cell by cell: a TOST with a margin, as difference of logs.

    A variant fails with a reason to reject that the baseline did not have, or with a cell that is lower by more than
    the margin (α split over its cells); it passes when every cell that the baseline has is not lower by the margin (an
    intersection of tests needs no split); else it is undecided. The whole fails with one variant and passes with all.

    Args:
        now: The boots to judge.
        baseline: The boots that were good.
        margin: Sd-of-logs scale; 0.05 allows 5 % less.
        variants: Default: production where both have it, else every variant that both have.

    Raises:
        UsageError: nothing to compare, another box, or a rehearsal against real boots; a margin that is not positive.
    """
    if margin <= 0:
        raise UsageError(f"--margin {margin}: accepted: a number above 0, such as 0.05")
    for what, one, other in (("box", now.box, baseline.box), ("rehearsal", now.rehearsal, baseline.rehearsal)):
        if one is not None and other is not None and one != other:
            raise UsageError(f"{what} is {one} here and {other} in the baseline: these boots cannot be compared")
    after, before = derive(now), derive(baseline)
    names = tuple(variants) if variants is not None else _shared(after, before)
    if not names:
        raise UsageError("the baseline has none of these variants", hint=f"it has {', '.join(baseline.variants)}")
    parts = tuple(_regression(_case(after, name), _case(before, name), margin) for name in names)
    answer = _worst_of(part.answer for part in parts)
    return Finding(answer, " ".join(f"{part.sentence}." for part in parts), parts)


def _shared(after: Derivation, before: Derivation) -> tuple[str, ...]:
    production = after.series.production
    if production is not None and after.case(production) and before.case(production):
        return (production,)
    return tuple(case.name for case in after.cases if before.case(case.name))


def _regression(after: Case, before: Case, margin: float) -> Finding:
    new = [reason for reason in after.reasons if reason not in before.reasons]
    if new:
        return Finding("FAIL", f"{after.name} is rejected where the baseline was not ({', '.join(new)})")
    cells = [cell for cell in before.cells if cell.logs and cell not in before.wide]
    if not cells:
        return Finding("UNDECIDED", f"{after.name}: the baseline has no value that reproduces")
    parts = tuple(_cell_regression(cell, _again(cell.verdict, after.cells), margin, len(cells)) for cell in cells)
    answer = _worst_of(part.answer for part in parts)
    telling = [part.sentence for part in parts if part.answer == answer]
    said = {"PASS": "no regression", "FAIL": "a regression", "UNDECIDED": "undecided"}[answer]
    return Finding(answer, f"{after.name}: {said} beyond {times(-margin)}: {'; '.join(telling)}", parts)


def _again(before: CellVerdict, cells: Iterable[Cell]) -> Cell | None:
    """The cell that measured the same, also where only one of both experiments has several prompt lengths."""
    return next((cell for cell in cells if same_load(before, cell.verdict)), None)


def same_load(one: CellVerdict, other: CellVerdict) -> bool:
    """Whether two cells, of two experiments perhaps, are of one cache state and one load."""
    if one.cache != other.cache or one.concurrency != other.concurrency:
        return False
    return one.level == other.level or one.input_tokens == other.input_tokens is not None


def _cell_regression(before: Cell, after: Cell | None, margin: float, family: int) -> Finding:
    cache, at = before.verdict.cache, streams((before.verdict.level,))
    where = at if cache == "cold" else f"{at} ({cache} cache)"
    if after is None or not after.logs:
        return Finding("UNDECIDED", f"{where} was not measured again")
    if after.verdict.reproducibility == "DOES_NOT_REPRODUCE":
        return Finding("UNDECIDED", f"{where} does not reproduce")
    test = stats.tost(after.logs, before.logs, margin)
    strict = stats.tost(after.logs, before.logs, margin, stats.ALPHA / family)
    boots = f"{plural(len(after.logs), 'boot')} against {len(before.logs)}"
    if test is None or strict is None:
        return Finding("UNDECIDED", f"{where}: {boots}, where a bound needs two on each side")
    said = f"{where} {times(test.difference)} (90 % {times(test.interval[0])} to {times(test.interval[1])}, {boots})"
    return Finding("PASS" if test.not_lower else "FAIL" if strict.lower else "UNDECIDED", said)


def _worst_of(answers: Iterable[Answer]) -> Answer:
    found = set(answers)
    return "FAIL" if "FAIL" in found else "UNDECIDED" if "UNDECIDED" in found else "PASS"
