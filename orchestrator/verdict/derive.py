"""A series to everything that its verdicts follow from: cells, reasons, ranking, drift. Pure.

The package's front states the results, `wording` puts them into sentences; the rules stand here. Cache states are never
pooled: a cell is variant × cache state × concurrency, and the ranking looks at one cache state alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestrator import stats
from orchestrator.records import BootResult, CacheState, CellVerdict, Level, Series, VariantAnswer

COLD: tuple[CacheState, ...] = ("cold", "clear")  # both start without a compiled graph
CACHES: tuple[CacheState, ...] = ("cold", "clear", "as-is", "warm")  # which one is ranked, where several are there
COLLAPSE_RATIO = 2.0  # some lower level's aggregate is more than so many times this level's, in every boot
COLLAPSE_DROP = math.log(0.9)  # or lower by more than 10 % and significantly so
COLLAPSE_BOOTS = 3


@dataclass(frozen=True)
class Cell:
    """One cell's values: `logs` are those of the boots that have one, in boot order."""

    verdict: CellVerdict
    logs: tuple[float, ...]


@dataclass(frozen=True)
class Drop:
    """Level `high` against a lower one, within boots: the paired difference of logs and its p after Holm."""

    cache: CacheState
    low: int
    high: int
    boots: int
    difference: stats.Difference
    p_holm: float

    @property
    def significant(self) -> bool:
        """Lower by more than 10 %, and significantly lower."""
        return self.difference.value < COLLAPSE_DROP and self.p_holm < stats.ALPHA


@dataclass(frozen=True)
class Collapse:
    """One level that collapses.

    By the first rule `worst` has (boot, best lower level, its value, this level's value) for each boot that measured
    it, else it is empty. By the second rule `drop` is the deepest significant drop.
    """

    cache: CacheState
    concurrency: int
    worst: tuple[tuple[str, int, float, float], ...] = ()
    drop: Drop | None = None


@dataclass(frozen=True)
class Comparison:
    """A variant's objective against the winner's, over the boots that have every level of the objective."""

    difference: stats.Difference | None
    p_holm: float | None
    family: int

    @property
    def slower(self) -> bool:
        """Significantly slower than the winner."""
        return (
            self.difference is not None
            and self.p_holm is not None
            and self.p_holm < stats.ALPHA
            and self.difference.value < 0
        )


@dataclass(frozen=True)
class Case:
    """One variant: its boots in boot order, its cells, and what speaks against it."""

    name: str
    boots: tuple[BootResult, ...]
    cells: tuple[Cell, ...]
    drops: tuple[Drop, ...]
    collapses: tuple[Collapse, ...]

    @cached_property
    def fatal(self) -> tuple[BootResult, ...]:
        """Cold boots in which the engine died, or was not ready by the deadline, before the trials."""
        return tuple(boot for boot in self.boots if boot.cache in COLD and boot.died_before_trials)

    @cached_property
    def errors(self) -> tuple[tuple[BootResult, tuple[int, ...]], ...]:
        """Boots with an error under load and the levels at which; none where the engine died and no level tells."""
        found = ((boot, tuple(x.concurrency for x in boot.levels if x.measured and x.failed)) for boot in self.boots)
        return tuple((boot, levels) for boot, levels in found if levels or boot.died_under_load)

    @cached_property
    def wide(self) -> tuple[Cell, ...]:
        """Cells that do not reproduce."""
        return tuple(cell for cell in self.cells if cell.verdict.reproducibility == "DOES_NOT_REPRODUCE")

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Every reason to reject that holds, in alphabetical order."""
        holds = {
            "cold_boot_fatal": self.fatal,
            "collapses_with_concurrency": self.collapses,
            "does_not_reproduce": self.wide,
            "errors_under_load": self.errors,
        }
        return tuple(sorted(reason for reason, evidence in holds.items() if evidence))

    @property
    def has_value(self) -> bool:
        """Whether any cell has a valid value."""
        return any(cell.logs for cell in self.cells)

    def levels(self, cache: CacheState) -> tuple[int, ...]:
        """Levels with a valid value in this cache state."""
        return tuple(c.verdict.concurrency for c in self.cells if c.verdict.cache == cache and c.logs)

    def objective(self, cache: CacheState, levels: Iterable[int]) -> float:
        """Mean over levels of the mean log: the log of the geometric mean of the cells' estimates."""
        means = [
            stats.mean(cell.logs)
            for cell in self.cells
            if cell.verdict.cache == cache and cell.verdict.concurrency in set(levels)
        ]
        return math.fsum(m for m in means if m is not None) / len(means)

    def objective_logs(self, cache: CacheState, levels: Sequence[int]) -> tuple[float, ...]:
        """The objective's log of each boot that has every level."""
        tables = (values_of(boot) for boot in self.boots if boot.cache == cache)
        return tuple(
            math.fsum(math.log(table[level]) for level in levels) / len(levels)
            for table in tables
            if all(level in table for level in levels)
        )


@dataclass(frozen=True)
class Ranking:
    """Who is compared, on what, and with which result. `order` is by objective, highest first."""

    cache: CacheState | None
    levels: tuple[int, ...]
    objectives: Mapping[str, float]
    tied: tuple[str, ...]
    winner: str | None
    comparisons: Mapping[str, Comparison]


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
    cases = tuple(_case(series, name) for name in variant_names(series))
    return Derivation(series, cases, _rank(series, cases), series.confounded or _drift(series, cases))


def variant_names(series: Series) -> tuple[str, ...]:
    """The variants in the order of the file; those of the boots alone follow in order of appearance."""
    return tuple(dict.fromkeys((*series.variants, *(boot.variant for boot in series.boots))))


def values_of(boot: BootResult) -> dict[int, float]:
    """Concurrency to the valid values of one boot, tok/s."""
    return {level.concurrency: level.value for level in boot.levels if level.value is not None and is_value(level)}


def is_value(level: Level) -> bool:
    """Whether a level holds a measurement: a positive number, valid, of a trial that did not fail."""
    return level.measured and level.valid and not level.failed and level.value is not None and level.value > 0


def exp(log: float) -> float | None:
    """The number whose logarithm this is; None where it would not be finite."""
    return math.exp(log) if log < 709 else None


def exp_interval(logs: stats.Interval | None) -> stats.Interval | None:
    """An interval of logs as one of ratios; None where an end would not be a finite number."""
    if logs is None:
        return None
    low, high = exp(logs[0]), exp(logs[1])
    return None if low is None or high is None else (low, high)


def printed(value: float) -> str:
    """A throughput as every report prints it: equal objectives, to these digits, are a tie."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 1 else f"{value:.3g}"


# --- one variant ---------------------------------------------------------------------------------------------------


def _case(series: Series, name: str) -> Case:
    boots = tuple(boot for boot in series.boots if boot.variant == name)
    cells: list[Cell] = []
    drops: list[Drop] = []
    collapses: list[Collapse] = []
    for cache in _caches(series, boots):
        levels = _levels(series, boots, cache)
        cells += [_cell(series, boots, cache, level) for level in levels]
        tables = [(boot.boot, values_of(boot)) for boot in boots if boot.cache == cache]
        found = _drops(cache, levels, tables)
        drops += found
        collapses += _collapses(cache, levels, tables, found)
    return Case(name, boots, tuple(cells), tuple(drops), tuple(collapses))


def _caches(series: Series, boots: Iterable[BootResult]) -> tuple[CacheState, ...]:
    there = {*series.caches, *(boot.cache for boot in boots)}
    return tuple(cache for cache in CACHES if cache in there)


def _levels(series: Series, boots: Iterable[BootResult], cache: CacheState) -> tuple[int, ...]:
    mentioned = {level.concurrency for boot in boots if boot.cache == cache for level in boot.levels}
    planned = series.concurrency if cache in series.caches else ()
    return tuple(sorted({*planned, *mentioned}))


def _cell(series: Series, boots: Iterable[BootResult], cache: CacheState, concurrency: int) -> Cell:
    by_boot = tuple(values_of(boot).get(concurrency) if boot.cache == cache else None for boot in boots)
    logs = tuple(math.log(value) for value in by_boot if value is not None)
    spread = stats.spread_bounds(logs)
    alphas = {"refute_alpha": series.refute_alpha, "vouch_alpha": series.vouch_alpha}
    sd = None if spread is None else spread.sd
    answer = stats.reproducibility(len(logs), sd, series.tolerance, **alphas)
    middle = None if answer == "DOES_NOT_REPRODUCE" else stats.mean(logs)
    only = next((value for value in by_boot if value is not None), None)
    verdict = CellVerdict(
        concurrency=concurrency,
        cache=cache,
        by_boot=by_boot,
        # One value is its own estimate, to the last bit.
        estimate=None if middle is None else only if len(logs) == 1 else exp(middle),
        interval=None if middle is None else exp_interval(stats.mean_interval(logs)),
        reproducibility=answer,
        spread=sd,
        spread_lower=None if spread is None else spread.lower,
        spread_upper=None if spread is None else spread.upper,
        more_boots=stats.more_boots(len(logs), sd, series.tolerance, **alphas),
        hidden_mode_rate=None if answer == "DOES_NOT_REPRODUCE" else stats.hidden_mode_rate(len(logs)),
    )
    return Cell(verdict, logs)


Tables = Sequence[tuple[str, Mapping[int, float]]]


def _drops(cache: CacheState, levels: Sequence[int], tables: Tables) -> list[Drop]:
    """Every pair of levels that at least three boots measured both of, tested within boots; Holm over the pairs."""
    tests: list[tuple[int, int, int, stats.Difference]] = []
    for high in levels:
        for low in (level for level in levels if level < high):
            pairs = [math.log(t[high]) - math.log(t[low]) for _, t in tables if high in t and low in t]
            difference = stats.paired(pairs)
            if difference is not None and len(pairs) >= COLLAPSE_BOOTS:
                tests.append((low, high, len(pairs), difference))
    adjusted = stats.holm([difference.p_less for *_, difference in tests])
    return [
        Drop(cache, low, high, boots, difference, p)
        for (low, high, boots, difference), p in zip(tests, adjusted, strict=True)
    ]


def _collapses(cache: CacheState, levels: Sequence[int], tables: Tables, drops: Sequence[Drop]) -> list[Collapse]:
    found: list[Collapse] = []
    for level in levels:
        worst = _worst(level, tables)
        drop = max(
            (d for d in drops if d.high == level and d.significant), key=lambda d: -d.difference.value, default=None
        )
        if worst or drop is not None:
            found.append(Collapse(cache, level, worst, drop))
    return found


def _worst(level: int, tables: Tables) -> tuple[tuple[str, int, float, float], ...]:
    """For each boot that measured `level` the best lower level, where it is over twice this level's in all of them."""
    found: list[tuple[str, int, float, float]] = []
    for boot, table in tables:
        if level not in table:
            continue
        lower = {value: low for low, value in sorted(table.items(), reverse=True) if low < level}
        best = max(lower, default=0.0)
        if best / COLLAPSE_RATIO <= table[level]:
            return ()
        found.append((boot, lower[best], best, table[level]))
    return tuple(found)


# --- between variants ----------------------------------------------------------------------------------------------


def _rank(series: Series, cases: Sequence[Case]) -> Ranking:
    standing = [case for case in cases if not case.reasons]
    cache = next((cache for cache in CACHES if any(case.levels(cache) for case in standing)), None)
    if cache is None:
        return Ranking(None, (), {}, (), None, {})
    ranked = [case for case in standing if case.levels(cache)]
    levels = tuple(sorted(set.intersection(*(set(case.levels(cache)) for case in ranked))))
    if not levels:
        return Ranking(cache, (), {}, (), None, {})
    objectives = {case.name: case.objective(cache, levels) for case in ranked}
    top = printed(math.exp(max(objectives.values())))
    tied = [name for name, value in objectives.items() if printed(math.exp(value)) == top]
    winner = min(tied, key=lambda name: (changes(series, name) is None, changes(series, name) or 0))
    return Ranking(
        cache,
        levels,
        objectives,
        tuple(tied) if len(tied) > 1 else (),
        winner,
        _compare(winner, {case.name: case.objective_logs(cache, levels) for case in ranked}),
    )


def changes(series: Series, name: str) -> int | None:
    """Flags in which a variant differs from production; None where nobody said."""
    return series.changes.get(name, 0 if name == series.production else None)


def _compare(winner: str, logs: Mapping[str, Sequence[float]]) -> dict[str, Comparison]:
    """Welch against the winner for everyone else, Holm over those that can be tested."""
    differences = {name: stats.welch(own, logs[winner]) for name, own in logs.items() if name != winner}
    tested = {name: difference for name, difference in differences.items() if difference is not None}
    adjusted = dict(zip(tested, stats.holm([d.p for d in tested.values()]), strict=True))
    return {name: Comparison(d, adjusted.get(name), len(tested)) for name, d in differences.items()}


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
            return f"throughput drifts with {factor}: {math.expm1(amount):+.1%} from its lowest to its highest value"
    return None


def _points(case: Case, cache: CacheState, factor: str) -> list[tuple[float, float]]:
    """(factor, residual) of each boot: the mean over levels of its log minus the cell's mean."""
    middles = {
        cell.verdict.concurrency: stats.mean(cell.logs)
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
