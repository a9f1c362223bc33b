"""Whether a variant holds the matrix's constraints: three answers each, by bounds and never by a mean. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator import stats
from orchestrator.goals import UNITS, Constraint, parse_constraint
from orchestrator.records import BootResult, ConstraintVerdict, ThreeAnswers
from orchestrator.verdict.values import CACHES, logs_of, printed, throughput, values_of


def check(text: str, boots: Sequence[BootResult], alpha: float = stats.ALPHA) -> ConstraintVerdict:
    """A constraint against the boots of one variant, in the first cache state that has values.

    At each level the boots' geometric mean has one-sided 95 % bounds: FAIL where the kinder one is beyond the limit at
    any level, PASS where the unkinder one is within it at all (an intersection of tests needs no split), else
    UNDECIDED, as with fewer than two boots. An adaptive plan looks often, so missing one takes the α of its looks.
    """
    limit = parse_constraint(text)
    found = ((cache, _levels(limit, boots, cache)) for cache in CACHES)
    cache, levels = next(((cache, levels) for cache, levels in found if levels), ("cold", ()))
    if not levels:
        return ConstraintVerdict(constraint=limit.text, answer="UNDECIDED", sentence=f"{limit.text}: not measured")
    parts = [_at(limit, level, logs_of(boots, cache, level, limit.metric), alpha) for level in levels]
    answers = {answer for answer, _ in parts}
    answer: ThreeAnswers = "FAIL" if "FAIL" in answers else "UNDECIDED" if "UNDECIDED" in answers else "PASS"
    told = "; ".join(sentence for part, sentence in parts if part == answer)
    word = {"PASS": "held", "FAIL": "missed", "UNDECIDED": "undecided"}[answer]
    return ConstraintVerdict(constraint=limit.text, answer=answer, sentence=f"{limit.text}: {word}, {told}")


def _levels(limit: Constraint, boots: Sequence[BootResult], cache: str) -> tuple[int, ...]:
    """The levels to look at: those named as soon as one was measured, else all that were."""
    measured = {level for boot in boots if boot.cache == cache for level in values_of(boot, limit.metric)}
    if limit.levels:
        return limit.levels if measured & set(limit.levels) else ()
    return tuple(sorted(measured))


def _at(limit: Constraint, level: int, logs: Sequence[float], alpha: float) -> tuple[ThreeAnswers, str]:
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
