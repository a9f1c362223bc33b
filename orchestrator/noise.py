"""The rig's own noise, from two identical variants under two names: spreads within and between boots, false alarms.

`twins` makes the matrix, a campaign measures it, and this reads its ledger. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from orchestrator import stats, verdict
from orchestrator.plan import Plan
from orchestrator.records import AnyRecord, BootEnded, Level, TrialEnded, Verdicts, level_of

Windows = Mapping[str, Mapping[str, Sequence[float]]]  # variant → boot → logs of its windows
MOST_SPLITS = 2000


@dataclass(frozen=True, slots=True)
class LevelNoise:
    """One level over both twins. Spreads are sd of logs; None where there are too few boots or windows.

    `between` is the sd of boots as verdicts see it, pooled over the twins, with its one-sided 95 % bounds `lower` and
    `upper`; `within` the sd of windows inside a boot; `boots_alone` what is left of `between` without the windows'
    part, 0 when nothing is (`clipped`). `p` is Welch's between the twins; `alarms` the share of all ways to deal the
    boots to two names in which it is below 0.05.
    """

    level: Level
    boots: int
    within: float | None
    between: float | None
    lower: float | None
    upper: float | None
    boots_alone: float | None
    clipped: bool
    p: float | None
    alarms: float | None


@dataclass(frozen=True, slots=True)
class Noise:
    """What the twins show. `refuted`: chance that a plan of `boots` boots calls the noisiest level not reproducible."""

    levels: tuple[LevelNoise, ...]
    tolerance: float
    boots: int
    refuted: float | None
    told_apart: bool
    rejected: tuple[str, ...]

    @property
    def floor(self) -> LevelNoise | None:
        """The level with the widest spread between boots."""
        known = [level for level in self.levels if level.between is not None]
        return max(known, key=lambda level: level.between or 0.0, default=None)


def measure(records: Sequence[AnyRecord], plan: Plan) -> Noise:
    """Noise from the ledger of a campaign of twins."""
    judged = verdict.judge(verdict.series_from_records(records, plan=plan))
    windows = _windows(records, plan.input_tokens)
    levels = tuple(_level(level, windows[level]) for level in sorted(windows))
    boots = plan.boots if isinstance(plan.boots, int) else plan.looks.last
    found = Noise(levels, judged.tolerance, boots, None, _told_apart(judged), _rejected(judged))
    floor = found.floor
    if floor is None or floor.between is None:
        return found
    chance = stats.refute_chance(boots, floor.between, judged.tolerance)
    return Noise(levels, judged.tolerance, boots, chance, found.told_apart, found.rejected)


def _windows(records: Sequence[AnyRecord], lengths: Sequence[int]) -> dict[Level, dict[str, dict[str, list[float]]]]:
    """Level → variant → boot → logs of valid windows, of boots that completed."""
    whole = {r.boot for r in records if isinstance(r, BootEnded) and r.boot_outcome == "completed"}
    found: dict[Level, dict[str, dict[str, list[float]]]] = {}
    for record in records:
        if isinstance(record, TrialEnded) and record.boot in whole and record.valid and not record.failed:
            level = level_of(record.concurrency, record.input_tokens, lengths)
            boots = found.setdefault(level, {}).setdefault(record.variant, {})
            if record.tokens_per_s is not None and record.tokens_per_s > 0:
                boots.setdefault(record.boot, []).append(math.log(record.tokens_per_s))
    return found


def _level(level: Level, windows: Windows) -> LevelNoise:
    sides = [[_mean(logs) for logs in boots.values()] for boots in windows.values()]
    groups = [logs for boots in windows.values() for logs in boots.values()]
    within = _pooled(groups)
    between = _pooled(sides)
    free = sum(len(side) - 1 for side in sides if len(side) > 1)
    low, high = stats.spread_factors(free + 1) if free else (0.0, 0.0)
    alone, clipped = None, False
    if within is not None and between is not None:
        # Windows of a boot enter its mean with their variance over their number: the harmonic mean of the numbers.
        share = sum(1 / len(logs) for logs in groups) / len(groups)
        rest = between**2 - within**2 * share
        alone, clipped = math.sqrt(max(0.0, rest)), rest < 0
    difference = stats.welch(sides[0], sides[1]) if len(sides) == 2 else None
    return LevelNoise(
        level=level,
        boots=sum(map(len, sides)),
        within=within,
        between=between,
        lower=None if between is None else between * low,
        upper=None if between is None else between * high,
        boots_alone=alone,
        clipped=clipped,
        p=None if difference is None else difference.p,
        alarms=_alarms(sides),
    )


def _mean(logs: Sequence[float]) -> float:
    return stats.mean(logs) or 0.0


def _pooled(groups: Sequence[Sequence[float]]) -> float | None:
    """Sd inside groups, pooled over them; None where no group has two values."""
    free = sum(len(group) - 1 for group in groups if len(group) > 1)
    squares = math.fsum((len(group) - 1) * (stats.sd(group) or 0.0) ** 2 for group in groups if len(group) > 1)
    return math.sqrt(squares / free) if free else None


def _alarms(sides: Sequence[Sequence[float]]) -> float | None:
    """Share of all ways to deal the boots to two names in which Welch's test tells them apart at 0.05."""
    if len(sides) != 2 or min(map(len, sides)) < 2:
        return None
    pooled, first = [x for side in sides for x in side], len(sides[0])
    if math.comb(len(pooled), first) > MOST_SPLITS:
        return None
    called = 0
    splits = list(combinations(range(len(pooled)), first))
    for split in splits:
        one = [pooled[i] for i in split]
        other = [pooled[i] for i in range(len(pooled)) if i not in split]
        difference = stats.welch(one, other)
        called += difference is not None and difference.p < stats.ALPHA
    return called / len(splits)


def _told_apart(judged: Verdicts) -> bool:
    return any(variant.verdict == "DOMINATED" for variant in judged.variants)


def _rejected(judged: Verdicts) -> tuple[str, ...]:
    return tuple(variant.sentence for variant in judged.variants if variant.verdict == "REJECTED")


# --- in words ------------------------------------------------------------------------------------------------------


def report(noise: Noise) -> str:
    """The noise as a table and sentences, warnings last."""
    header = ("at", "boots", "within boots", "between boots", "95 % bounds", "boots alone", "p of the twins", "alarms")
    rows = [header, *(_row(level) for level in noise.levels)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, "", *_sentences(noise), *(f"WARNING: {warning}" for warning in warnings(noise))])


def _row(level: LevelNoise) -> tuple[str, ...]:
    bounds = "–" if level.lower is None or level.upper is None else f"{level.lower:.4f} to {level.upper:.4f}"
    return (
        str(level.level),
        str(level.boots),
        _number(level.within),
        _number(level.between),
        bounds,
        _number(level.boots_alone) + (" (clipped at 0)" if level.clipped else ""),
        "–" if level.p is None else f"{level.p:.2f}",
        "–" if level.alarms is None else f"{100 * level.alarms:.0f} %",
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _sentences(noise: Noise) -> Iterator[str]:
    floor = noise.floor
    yield "Spreads are sd of logs: 0.01 is about 1 %. The twins are one configuration, so all of it is the rig's noise."
    if floor is None or floor.between is None:
        yield "Too few boots for a noise floor: it takes two of a twin."
        return
    smallest = floor.between * stats.spread_factors(stats.MIN_VOUCH)[1]
    yield (
        f"Noise floor: {floor.between:.4f}, at {floor.level}. With such a spread six boots vouch for a tolerance "
        f"of {smallest:.3f} or more; the tolerance is {noise.tolerance:g}."
    )
    if noise.refuted is not None:
        yield (
            f"False alarms: {_percent(noise.refuted)} of variants with this spread would be called not reproducible "
            f"after {noise.boots} boots."
        )
    apart = "told apart, which is a false alarm" if noise.told_apart else "not told apart, as it should be"
    yield f"The twins were {apart}."


def warnings(noise: Noise) -> tuple[str, ...]:
    """What the rig cannot do as it is."""
    found = list(noise.rejected)
    floor = noise.floor
    if floor is not None and floor.between is not None and floor.lower is not None:
        if floor.lower > noise.tolerance:
            found.append(f"the tolerance of {noise.tolerance:g} is below the rig's noise: no variant can reproduce")
        elif floor.between > noise.tolerance:
            found.append(
                f"the tolerance of {noise.tolerance:g} is probably below the rig's noise; more boots would tell"
            )
    if noise.told_apart:
        found.append("identical variants were told apart; look for drift, or for another load on the box")
    return tuple(found)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "under 1 %"
