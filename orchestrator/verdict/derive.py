"""A series to everything that its verdicts follow from: cases, ranking, drift. Pure.

The package's front states the results, `wording` puts them into sentences; the rules stand here and in `case`. The
ranking looks at one cache state alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator import stats
from orchestrator.goals import LOWER_IS_BETTER
from orchestrator.records import CacheState, Level, Objective, Series, VariantAnswer
from orchestrator.verdict.case import Case, make_case
from orchestrator.verdict.values import CACHES, meant, printed, throughput, values_of

LEAST_BLOCKS = 3  # with fewer, pairing costs more freedom than it can win
BLOCKS_ALPHA = 0.01  # a test chosen by a look at the data errs more often: so by a third of a point at most


@dataclass(frozen=True)
class Comparison:
    """A variant's objective against the winner's, over the boots that have every level of the objective."""

    difference: stats.Difference | None
    p_holm: float | None
    family: int
    sign: int = 1
    method: Literal["welch", "paired"] = "welch"

    @property
    def slower(self) -> bool:
        """Significantly worse than the winner."""
        return (
            self.difference is not None
            and self.p_holm is not None
            and self.p_holm < stats.ALPHA
            and self.sign * self.difference.value < 0
        )


@dataclass(frozen=True)
class Ranking:
    """Who is compared, on what, and with which result. `objectives` are logs of the goal's metric."""

    cache: CacheState | None
    levels: tuple[Level, ...]
    objectives: Mapping[str, float]
    tied: tuple[str, ...]
    winner: str | None
    comparisons: Mapping[str, Comparison]
    goal: Objective


@dataclass(frozen=True)
class Derivation:
    """A series with all that follows from it."""

    series: Series
    cases: tuple[Case, ...]
    ranking: Ranking
    confounded: str | None

    def case(self, name: str) -> Case | None:
        """The case of one variant."""
        return next((case for case in self.cases if case.name == name), None)

    def answer(self, case: Case) -> VariantAnswer:
        """REJECTED, WINNER, DOMINATED, CONTENDER, or UNDECIDED where there is nothing to rank."""
        if case.reasons:
            return "REJECTED"
        if case.name == self.ranking.winner:
            return "WINNER"
        if case.name not in self.ranking.comparisons:
            return "UNDECIDED"
        return "DOMINATED" if self.ranking.comparisons[case.name].slower else "CONTENDER"


def derive(series: Series) -> Derivation:
    """Everything that the verdicts on a series follow from."""
    cases = tuple(make_case(series, name) for name in variant_names(series))
    return Derivation(series, cases, _rank(series, cases), series.confounded or _drift(series, cases))


def variant_names(series: Series) -> tuple[str, ...]:
    """The variants in the order of the file; those of the boots alone follow in order of appearance."""
    return tuple(dict.fromkeys((*series.variants, *(boot.variant for boot in series.boots))))


# --- between variants ----------------------------------------------------------------------------------------------


def _rank(series: Series, cases: Sequence[Case]) -> Ranking:
    goal = _goal(series)
    standing = [case for case in cases if not case.reasons]
    cache = next((cache for cache in CACHES if any(case.levels(cache, goal.metric) for case in standing)), None)
    if cache is None:
        return Ranking(None, (), {}, (), None, {}, goal)
    ranked = [case for case in standing if case.levels(cache, goal.metric)]
    common = set.intersection(*(set(case.levels(cache, goal.metric)) for case in ranked))
    levels = tuple(sorted(common & set(meant(goal.levels, common)) if goal.levels else common))
    if not levels:
        return Ranking(cache, (), {}, (), None, {}, goal)
    objectives = {case.name: case.objective(cache, levels, goal) for case in ranked}
    best = min(objectives.values()) if goal.metric in LOWER_IS_BETTER else max(objectives.values())
    top = printed(throughput(best))
    tied = [name for name, value in objectives.items() if printed(throughput(value)) == top]
    winner = min(tied, key=lambda name: (changes(series, name) is None, changes(series, name) or 0))
    return Ranking(
        cache,
        levels,
        objectives,
        tuple(tied) if len(tied) > 1 else (),
        winner,
        _compare(
            winner, {c.name: c.objective_by_block(cache, levels, goal) for c in ranked}, goal, blocked=series.blocked
        ),
        goal,
    )


def _goal(series: Series) -> Objective:
    """The objective, its levels called as they are here."""
    goal = series.objective
    weights = {series.named(level): weight for level, weight in goal.weights.items()}
    levels = tuple(series.named(level) for level in goal.levels)
    return goal.model_copy(update={"levels": levels, "weights": weights})


def changes(series: Series, name: str) -> int | None:
    """Flags in which a variant differs from production; None where nobody said."""
    return series.changes.get(name, 0 if name == series.production else None)


def _compare(
    winner: str, tables: Mapping[str, Sequence[tuple[int, float]]], goal: Objective, *, blocked: bool
) -> dict[str, Comparison]:
    """Everyone else against the winner, Holm over those that can be tested.

    Welch on the boots; or, where blocks differ from each other by more than the boots within them do, Student's test on
    the differences within blocks, of those that have both.
    """
    p_blocks = _p_blocks([dict(table) for table in tables.values()]) if blocked else None
    paired = p_blocks is not None and p_blocks < BLOCKS_ALPHA
    own = dict(tables[winner])
    differences: dict[str, tuple[stats.Difference | None, Literal["welch", "paired"]]] = {}
    for name, table in tables.items():
        pairs = [log - own[block] for block, log in table if block in own]
        if name == winner:
            continue
        if paired and len(pairs) >= LEAST_BLOCKS:
            differences[name] = stats.paired(pairs), "paired"
        else:
            differences[name] = stats.welch([log for _, log in table], [log for _, log in tables[winner]]), "welch"
    tested = {name: difference.p for name, (difference, _) in differences.items() if difference is not None}
    adjusted = dict(zip(tested, stats.holm(list(tested.values())), strict=True))
    sign = -1 if goal.metric in LOWER_IS_BETTER else 1
    return {
        name: Comparison(difference, adjusted.get(name), len(tested), sign, method)
        for name, (difference, method) in differences.items()
    }


def _p_blocks(tables: Sequence[Mapping[int, float]]) -> float | None:
    """Whether blocks are real: the F test of blocks in a two-way layout, of the blocks that have every variant."""
    common = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return stats.block_p([[table[block] for table in tables] for block in common])


# --- order and drift -----------------------------------------------------------------------------------------------


def _drift(series: Series, cases: Sequence[Case]) -> str | None:
    """Names the factor along which the boots' residuals trend, by more over the campaign than the tolerance."""
    named = {name for boot in series.boots for name in boot.covariates}
    for factor in ("boot order", *sorted(named)):
        strata = [points for case in cases for cache in CACHES if (points := _points(case, cache, factor))]
        trend = stats.theil_sen(strata)
        if trend is None or not trend.found:
            continue
        places = [x for stratum in strata for x, _ in stratum]
        amount = trend.slope * (max(places) - min(places))
        if abs(amount) > series.tolerance:
            drift = f"{100 * math.expm1(amount):+.1f} %"
            return f"throughput drifts with {factor}: {drift} from its lowest to its highest value"
    return None


def _points(case: Case, cache: CacheState, factor: str) -> list[tuple[float, float]]:
    """(factor, residual) of each boot: the mean over levels of its log minus the cell's mean."""
    middles = {
        cell.verdict.level: stats.mean(cell.logs)
        for cell in case.cells
        if cell.verdict.cache == cache and len(cell.logs) > 1 and cell not in case.wide
    }
    points: list[tuple[float, float]] = []
    for boot in case.boots:
        place = float(boot.position) if factor == "boot order" else boot.covariates.get(factor)
        rests = [
            math.log(value) - middle
            for level, value in values_of(boot).items()
            if (middle := middles.get(level)) is not None
        ]
        if boot.cache == cache and place is not None and rests:
            points.append((place, math.fsum(rests) / len(rests)))
    return points
