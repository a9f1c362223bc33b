"""One variant of a series: its cells, and every reason to reject it. Pure.

Neither cache states nor prompt lengths are ever pooled: a cell is variant × cache state × level.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestrator import stats
from orchestrator.records import (
    THROUGHPUT,
    BootResult,
    CacheState,
    CellVerdict,
    ConstraintVerdict,
    Level,
    Objective,
    Reproducibility,
    Series,
)
from orchestrator.verdict import limits
from orchestrator.verdict.values import CACHES, exp_interval, logs_of, throughput, values_of

COLD: tuple[CacheState, ...] = ("cold", "clear")  # both start without a compiled graph
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
    low: Level
    high: Level
    boots: int
    difference: stats.Difference
    p_holm: float

    @property
    def significant(self) -> bool:
        """Lower by more than 10 %, and significantly lower."""
        return self.difference.value < COLLAPSE_DROP and self.p_holm < stats.ALPHA


@dataclass(frozen=True)
class Collapse:
    """One level that collapses, against fewer streams with prompts of the same length.

    By the first rule `worst` has (boot, best lower level, its value, this level's value) for each boot that measured
    it, else it is empty. By the second rule `drop` is the deepest significant drop.
    """

    cache: CacheState
    level: Level
    worst: tuple[tuple[str, Level, float, float], ...] = ()
    drop: Drop | None = None


@dataclass(frozen=True)
class Case:
    """One variant: its boots in boot order, its cells, and what speaks against it."""

    name: str
    boots: tuple[BootResult, ...]
    cells: tuple[Cell, ...]
    drops: tuple[Drop, ...]
    collapses: tuple[Collapse, ...]
    constraints: tuple[ConstraintVerdict, ...] = ()

    @cached_property
    def missed(self) -> tuple[ConstraintVerdict, ...]:
        """Constraints that this variant surely misses."""
        return tuple(one for one in self.constraints if one.answer == "FAIL")

    @cached_property
    def fatal(self) -> tuple[BootResult, ...]:
        """Cold boots in which the engine died, or was not ready by the deadline, before the trials."""
        return tuple(boot for boot in self.boots if boot.cache in COLD and boot.died_before_trials)

    @cached_property
    def errors(self) -> tuple[tuple[BootResult, tuple[Level, ...]], ...]:
        """Boots with an error under load and the levels at which; none where the engine died and no level tells."""
        found = ((boot, tuple(x.level for x in boot.levels if x.measured and x.failed)) for boot in self.boots)
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
            "misses_constraint": self.missed,
        }
        return tuple(sorted(reason for reason, evidence in holds.items() if evidence))

    @property
    def has_value(self) -> bool:
        """Whether any cell has a valid value."""
        return any(cell.logs for cell in self.cells)

    def levels(self, cache: CacheState, metric: str = THROUGHPUT) -> tuple[Level, ...]:
        """Levels with a valid value in this cache state."""
        tables = [values_of(boot, metric) for boot in self.boots if boot.cache == cache]
        return tuple(sorted({level for table in tables for level in table}))

    def objective(self, cache: CacheState, levels: Sequence[Level], goal: Objective) -> float:
        """Log of the weighted geometric mean over levels of the boots' geometric means."""
        means = [stats.mean(logs_of(self.boots, cache, level, goal.metric)) for level in levels]
        pairs = [(goal.weight(level), m) for level, m in zip(levels, means, strict=True) if m is not None]
        return math.fsum(weight * m for weight, m in pairs) / math.fsum(weight for weight, _ in pairs)

    def objective_logs(self, cache: CacheState, levels: Sequence[Level], goal: Objective) -> tuple[float, ...]:
        """The objective's log of each boot that has every level."""
        return tuple(log for _, log in self.objective_by_block(cache, levels, goal))

    def objective_by_block(
        self, cache: CacheState, levels: Sequence[Level], goal: Objective
    ) -> tuple[tuple[int, float], ...]:
        """Block and objective's log of each boot that has every level."""
        weights = {level: goal.weight(level) for level in levels}
        whole = math.fsum(weights.values())
        tables = ((boot.block, values_of(boot, goal.metric)) for boot in self.boots if boot.cache == cache)
        return tuple(
            (block, math.fsum(weight * math.log(table[level]) for level, weight in weights.items()) / whole)
            for block, table in tables
            if weights.keys() <= table.keys()
        )


# --- from the boots ------------------------------------------------------------------------------------------------


def make_case(series: Series, name: str) -> Case:
    """One variant's case, from the boots of the series that are its own."""
    boots = tuple(boot for boot in series.boots if boot.variant == name)
    cells: list[Cell] = []
    drops: list[Drop] = []
    collapses: list[Collapse] = []
    there: dict[CacheState, tuple[Level, ...]] = {}
    for cache in _caches(series, boots):
        levels = there[cache] = _levels(series, boots, cache)
        cells += [_cell(series, boots, cache, level) for level in levels]
        tables = [(boot.boot, values_of(boot)) for boot in boots if boot.cache == cache]
        found = _drops(cache, levels, tables)
        drops += found
        collapses += _collapses(cache, levels, tables, found)
    held = tuple(limits.check(one, series, boots, there) for one in series.constraints)
    return Case(name, boots, tuple(cells), tuple(drops), tuple(collapses), held)


def _caches(series: Series, boots: Iterable[BootResult]) -> tuple[CacheState, ...]:
    there = {*series.caches, *(boot.cache for boot in boots)}
    return tuple(cache for cache in CACHES if cache in there)


def _levels(series: Series, boots: Iterable[BootResult], cache: CacheState) -> tuple[Level, ...]:
    mentioned = {level.level for boot in boots if boot.cache == cache for level in boot.levels}
    planned = series.levels if cache in series.caches else ()
    return tuple(sorted({*planned, *mentioned}))


def _cell(series: Series, boots: Sequence[BootResult], cache: CacheState, level: Level) -> Cell:
    by_boot = tuple(values_of(boot).get(level) if boot.cache == cache else None for boot in boots)
    own = [value for value, boot in zip(by_boot, boots, strict=True) if boot.cache == cache]
    logs = tuple(math.log(value) for value in own if value is not None)
    spread = stats.spread_bounds(logs)
    answer, decided_at = _answer(series, own)
    middle = None if answer == "DOES_NOT_REPRODUCE" else stats.mean(logs)
    only = next((value for value in own if value is not None), None)
    verdict = CellVerdict(
        level=level,
        concurrency=level.concurrency,
        input_tokens=series.length(level),
        cache=cache,
        by_boot=by_boot,
        # One value is its own estimate, to the last bit.
        estimate=None if middle is None else only if len(logs) == 1 else throughput(middle),
        interval=None if middle is None else exp_interval(stats.mean_interval(logs)),
        reproducibility=answer,
        spread=None if spread is None else spread.sd,
        spread_lower=None if spread is None else spread.lower,
        spread_upper=None if spread is None else spread.upper,
        more_boots=0 if answer != "UNDECIDED" else _more_boots(series, len(own), spread),
        hidden_mode_rate=None if answer == "DOES_NOT_REPRODUCE" else stats.hidden_mode_rate(len(logs)),
        decided_at=decided_at,
        agrees_below_six=_agrees_below_six(series, len(own), spread),
    )
    return Cell(verdict, logs)


def _answer(series: Series, own: Sequence[float | None]) -> tuple[Reproducibility, int | None]:
    """The answer of the first look that settles it, and the number of boots then; looks are those of the plan."""
    for boots in _looks(series) or (len(own),):
        if boots > len(own):
            break
        logs = [math.log(value) for value in own[:boots] if value is not None]
        refute_alpha, vouch_alpha = _alphas(series, boots)
        answer = stats.reproducibility(
            len(logs), stats.sd(logs), series.tolerance, refute_alpha=refute_alpha, vouch_alpha=vouch_alpha
        )
        if answer != "UNDECIDED":
            return answer, boots
    return "UNDECIDED", None


def _looks(series: Series) -> list[int]:
    return sorted({*series.refute_looks, *series.vouch_looks})


def _alphas(series: Series, boots: int) -> tuple[float, float]:
    """α for refuting and for vouching at a look after so many boots; 0 where none is set aside."""
    if not _looks(series):
        return series.refute_alpha, series.vouch_alpha
    return (
        series.refute_alpha if boots in series.refute_looks else 0.0,
        series.vouch_alpha if boots in series.vouch_looks else 0.0,
    )


def _more_boots(series: Series, boots: int, spread: stats.Spread | None) -> int | None:
    """Boots to the first number, or the first look of the plan, that settles if the spread stays as it is."""
    if spread is None:
        return None
    if not _looks(series):
        alphas = {"refute_alpha": series.refute_alpha, "vouch_alpha": series.vouch_alpha}
        return stats.more_boots(spread.n, spread.sd, series.tolerance, **alphas)
    for look in _looks(series):
        n, (refute_alpha, vouch_alpha) = spread.n + look - boots, _alphas(series, look)
        settled = look > boots and stats.reproducibility(
            n, spread.sd, series.tolerance, refute_alpha=refute_alpha, vouch_alpha=vouch_alpha
        )
        if settled and settled != "UNDECIDED":
            return look - boots
    return None


def _agrees_below_six(series: Series, boots: int, spread: stats.Spread | None) -> bool:
    """A pull-request plan's last look: within the tolerance, by fewer boots than it takes to vouch."""
    if series.plan != "pull-request" or spread is None or boots < max(_looks(series), default=0):
        return False
    upper = spread.sd * stats.spread_factors(spread.n, stats.ALPHA, series.vouch_alpha)[1]
    return upper <= series.tolerance and spread.n < stats.MIN_VOUCH


Tables = Sequence[tuple[str, Mapping[Level, float]]]


def _below(level: Level, levels: Iterable[Level]) -> tuple[Level, ...]:
    """Fewer streams with prompts of the same length: longer prompts are slower, and that is no collapse."""
    return tuple(one for one in levels if one.input_tokens == level.input_tokens and one < level)


def _drops(cache: CacheState, levels: Sequence[Level], tables: Tables) -> list[Drop]:
    """Every pair of levels of one length that at least three boots measured both of, tested within boots.

    Holm over all pairs, whatever their length: they are one question, whether the variant collapses anywhere.
    """
    tests: list[tuple[Level, Level, int, stats.Difference]] = []
    for high in levels:
        for low in _below(high, levels):
            pairs = [math.log(t[high]) - math.log(t[low]) for _, t in tables if high in t and low in t]
            difference = stats.paired(pairs)
            if difference is not None and len(pairs) >= COLLAPSE_BOOTS:
                tests.append((low, high, len(pairs), difference))
    adjusted = stats.holm([difference.p_less for *_, difference in tests])
    return [
        Drop(cache, low, high, boots, difference, p)
        for (low, high, boots, difference), p in zip(tests, adjusted, strict=True)
    ]


def _collapses(cache: CacheState, levels: Sequence[Level], tables: Tables, drops: Sequence[Drop]) -> list[Collapse]:
    found: list[Collapse] = []
    for level in levels:
        worst = _worst(level, tables)
        drop = max(
            (d for d in drops if d.high == level and d.significant), key=lambda d: -d.difference.value, default=None
        )
        if worst or drop is not None:
            found.append(Collapse(cache, level, worst, drop))
    return found


def _worst(level: Level, tables: Tables) -> tuple[tuple[str, Level, float, float], ...]:
    """For each boot that measured `level` the best lower level, where it is over twice this level's in all of them."""
    found: list[tuple[str, Level, float, float]] = []
    for boot, table in tables:
        if level not in table:
            continue
        lower = {table[low]: low for low in sorted(_below(level, table), reverse=True)}
        best = max(lower, default=0.0)
        if best / COLLAPSE_RATIO <= table[level]:
            return ()
        found.append((boot, lower[best], best, table[level]))
    return tuple(found)
