"""What a boot says, as numbers, and numbers as every report prints them. Pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from orchestrator import stats
from orchestrator.records import THROUGHPUT, BootResult, CacheState, Level, LevelResult

CACHES: tuple[CacheState, ...] = ("cold", "clear", "as-is", "warm")  # which one is ranked, where several are there
_LARGEST = math.log(sys.float_info.max)


def values_of(boot: BootResult, metric: str = THROUGHPUT) -> dict[Level, float]:
    """Level to the valid value of one boot, by default tok/s."""
    if metric == THROUGHPUT:
        return {x.level: x.value for x in boot.levels if x.value is not None and is_value(x)}
    return {x.level: x.metrics[metric] for x in boot.levels if is_value(x) and x.metrics.get(metric, 0.0) > 0}


def meant(named: Iterable[Level], there: Iterable[Level]) -> tuple[Level, ...]:
    """The levels that a person means who names some: at every prompt length, where no length is named.

    A named level that is not there stands for itself, so that it can be missed.
    """
    known = sorted(set(there))
    found = ((level, [one for one in known if level.covers(one)]) for level in named)
    return tuple(sorted({one for level, own in found for one in own or [level]}))


def logs_of(boots: Iterable[BootResult], cache: CacheState, level: Level, metric: str) -> tuple[float, ...]:
    """Logs of one metric at one level, of the boots in one cache state that have it, in boot order."""
    tables = (values_of(boot, metric) for boot in boots if boot.cache == cache)
    return tuple(math.log(table[level]) for table in tables if level in table)


def is_value(level: LevelResult) -> bool:
    """Whether a level holds a measurement: a positive number, valid, of a trial that did not fail."""
    return level.measured and level.valid and not level.failed and level.value is not None and level.value > 0


def exp(log: float) -> float | None:
    """The number whose logarithm this is; None where it would not be finite."""
    return math.exp(log) if log <= _LARGEST else None


def throughput(log_tok_s: float) -> float:
    """Tok/s from a log that lies among those of measured values, so that only rounding can lead beyond a float."""
    return math.exp(min(log_tok_s, _LARGEST))


def exp_interval(logs: stats.Interval | None) -> stats.Interval | None:
    """An interval of logs as one of ratios; None where an end would not be a finite number."""
    if logs is None:
        return None
    low, high = exp(logs[0]), exp(logs[1])
    return None if low is None or high is None else (low, high)


def printed(value: float) -> str:
    """A throughput as every report prints it: equal objectives, to these digits, are a tie."""
    if not 1 <= value < 1e9:
        return f"{value:.3g}"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"
