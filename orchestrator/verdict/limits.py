"""Whether a variant holds the matrix's constraints: three answers each, by bounds and never by a mean. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from orchestrator import stats
from orchestrator.goals import UNITS, Constraint, parse_constraint
from orchestrator.records import BootResult, CacheState, ConstraintVerdict, Level, Series, ThreeAnswers
from orchestrator.verdict.values import CACHES, logs_of, meant, printed, throughput, values_of


def check(
    text: str, series: Series, boots: Sequence[BootResult], there: Mapping[CacheState, Iterable[Level]]
) -> ConstraintVerdict:
    """A constraint against the boots of one variant, in the first cache state that has values.

    At each level the boots' geometric mean has one-sided 95 % bounds: FAIL where the kinder one is beyond the limit at
    any level, PASS where the unkinder one is within it at all (an intersection of tests needs no split), else
    UNDECIDED, as with fewer than two boots. An adaptive plan looks often, so missing one takes the α of its looks.

    Args:
        text: The constraint.
        series: Where the boots come from.
        boots: The variant's.
        there: The levels of the variant's cells in each cache state.
    """
    limit = parse_constraint(text)
    named = [series.named(level) for level in limit.levels]
    measured = {
        cache: {level for boot in boots if boot.cache == cache for level in values_of(boot, limit.metric)}
        for cache in CACHES
    }
    found = ((cache, _levels(named, measured[cache], there.get(cache, ()))) for cache in CACHES)
    cache, levels = next(((cache, levels) for cache, levels in found if levels), ("cold", ()))
    if not levels:
        return ConstraintVerdict(constraint=limit.text, answer="UNDECIDED", sentence=f"{limit.text}: not measured")
    parts = [_at(limit, level, logs_of(boots, cache, level, limit.metric), series.refute_alpha) for level in levels]
    answers = {answer for answer, _ in parts}
    answer: ThreeAnswers = "FAIL" if "FAIL" in answers else "UNDECIDED" if "UNDECIDED" in answers else "PASS"
    told = "; ".join(sentence for part, sentence in parts if part == answer)
    word = {"PASS": "held", "FAIL": "missed", "UNDECIDED": "undecided"}[answer]
    return ConstraintVerdict(constraint=limit.text, answer=answer, sentence=f"{limit.text}: {word}, {told}")


def _levels(named: Sequence[Level], measured: set[Level], there: Iterable[Level]) -> tuple[Level, ...]:
    """The levels to look at: those named as soon as one was measured, else all that were."""
    if named:
        wanted = meant(named, there)
        return wanted if measured & set(wanted) else ()
    return tuple(sorted(measured))


def _at(limit: Constraint, level: Level, logs: Sequence[float], alpha: float) -> tuple[ThreeAnswers, str]:
    unit = UNITS[limit.metric]
    where = f"at {level}"
    middle, bounds = stats.mean(logs), stats.mean_interval(logs, 2 * stats.ALPHA)
    if middle is None:
        return "UNDECIDED", f"{where} not measured"
    number = f"{where} {printed(throughput(middle))} {unit}"
    if bounds is None:
        return "UNDECIDED", f"{number} in one boot, and a bound needs two"
    low, high = bounds
    said = f"{number} (90 % {printed(throughput(low))} to {printed(throughput(high))}, {len(logs)} boots)"
    border = math.log(limit.value)
    far = stats.mean_interval(logs, 2 * alpha) or bounds
    within, beyond = (high <= border, far[0] > border) if limit.at_most else (low >= border, far[1] < border)
    return "PASS" if within else "FAIL" if beyond else "UNDECIDED", said
