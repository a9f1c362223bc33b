"""Trials as the report shows them: rulers side by side, latency, what moved (A·S), and what was left out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from statistics import median
from typing import Literal

from orchestrator.records import CacheState, Level, Quantiles, Rulers, TrialEnded
from orchestrator.report import words
from orchestrator.report.model import MOST_ROWS, BootView, CellView, RulerRatio, Section, Table, Trials, VariantView

Ruler = Literal["usage", "chunks", "words", "logger"]
RULERS: dict[Ruler, str] = {
    "usage": "the client's own count of tokens",
    "chunks": "counting SSE chunks",
    "words": "counting words",
    "logger": "the engine's log line",
}
# Below this a ruler agrees with the counter as far as anyone would act on it.
AGREES = 0.02
# Ruler ÷ counter of single trials: variant, level → ruler → ratios; those of `counter` itself are 1.
Ratios = dict[tuple[str, Level], dict[str, list[float]]]
_COUNTER = attrgetter("counter")
_UNKNOWN = "no reason was recorded"


def good(boots: Sequence[BootView]) -> Trials:
    """The trials that were valid, did not fail and belong to boots that count."""
    found: dict[tuple[str, CacheState, Level], list[TrialEnded]] = {}
    for boot in boots:
        for trial in boot.trials if boot.counted else ():
            if trial.valid and not trial.failed:
                found.setdefault((boot.variant, boot.cache, boot.level(trial)), []).append(trial)
    return found


def of_level(boot: BootView, level: Level) -> TrialEnded | None:
    """The trial of one boot at one level that counts: the valid one, else the last (a disturbed one is repeated)."""
    found = [trial for trial in boot.trials if boot.level(trial) == level]
    return next((trial for trial in found if trial.valid), found[-1] if found else None)


# --- rulers ---------------------------------------------------------------------------------------------------------


def ruler_ratios(good: Trials) -> Ratios:
    """Ruler ÷ counter of every trial that has both, by variant and level."""
    found: Ratios = {}
    for (variant, _, level), trials in sorted(good.items(), key=lambda item: item[0]):
        counted = [trial.rulers for trial in trials if trial.rulers.counter]
        if counted:
            cell = found.setdefault((variant, level), {ruler: [] for ruler in ("counter", *RULERS)})
            for ruler, ratios in cell.items():
                values = zip(map(attrgetter(ruler), counted), map(_COUNTER, counted), strict=True)
                ratios += [value / counter for value, counter in values if value is not None]
    return found


def ruler_medians(ratios: Ratios) -> tuple[RulerRatio, ...]:
    """Median ratio of each ruler to the counter, per variant and level."""
    return tuple(
        RulerRatio(
            variant=variant,
            level=level,
            trials=len(cell["counter"]),
            **{ruler: median(cell[ruler]) if cell[ruler] else None for ruler in RULERS},
        )
        for (variant, level), cell in ratios.items()
    )


def rulers_section(good: Trials, ratios: Ratios) -> Section | None:
    """The rulers beside the counter: which would have misled, by how much, and where about the order."""
    if not ratios:
        return None
    sentences = [
        "Only the increase of the server's token counter is the measurement; each other ruler stands beside it."
    ]
    for ruler, name in RULERS.items():
        found = [ratio for cell in ratios.values() for ratio in cell[ruler]]
        if found:
            sentences.append(_ruler_sentence(name, found))
    sentences.extend(_drafted_and_accepted(good))
    sentences.extend(_misrankings(good))
    rows = tuple(
        (one.variant, str(one.level), str(one.trials), *(_times(getattr(one, ruler)) for ruler in RULERS))
        for one in ruler_medians(ratios)
    )
    table = Table(
        "Ruler ÷ counter, median over trials",
        ("variant", words.level_column(level for _, level in ratios), "trials", *RULERS),
        rows,
        numeric=frozenset(range(1, 3 + len(RULERS))),
    )
    return Section("rulers", "Rulers side by side", tuple(sentences), (table,), figure="rulers")


def _times(ratio: float | None) -> str:
    return words.ABSENT if ratio is None else f"× {ratio:.3f}"


def _ruler_sentence(name: str, ratios: Sequence[float]) -> str:
    middle = median(ratios)
    subject, over = name[0].upper() + name[1:], words.plural(len(ratios), "trial")
    if all(abs(ratio - 1) <= AGREES for ratio in ratios):
        worst = max(abs(ratio - 1) for ratio in ratios)
        return f"{subject} agrees with the counter within {worst * 100:.2f} % in {over}."
    if abs(middle - 1) <= AGREES:
        span = f"{min(ratios) - 1:+.0%} to {max(ratios) - 1:+.0%}".replace("%", " %")
        return f"{subject} agrees with the counter in the median; single trials are off by {span} ({over})."
    direction = "less" if middle < 1 else "more"
    # A ruler that saw next to nothing: 99.8 % less is not 100, and × 0.002 is not 0.
    percents, times = (1, 3) if middle < 0.01 else (0, 2)
    span = f"× {min(ratios):.{times}f} to × {max(ratios):.{times}f}"
    off = f"{abs(middle - 1) * 100:.{percents}f} %"
    return f"{subject} would have said {off} {direction} than the counter ({span}, {over})."


def _drafted_and_accepted(good: Trials) -> Iterator[str]:
    """The sum that the engine's other log line invites to; docs/why.md, "What the log line counts"."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for (variant, _, _), trials in good.items():
        for deltas in (trial.deltas for trial in trials):
            if deltas is not None and deltas.spec_draft_tokens and deltas.generation_tokens:
                both = deltas.spec_draft_tokens + (deltas.spec_accepted_tokens or 0.0)
                ratios[variant].append(both / deltas.generation_tokens)
    if ratios:
        said = words.listing([f"× {median(many):.2f} ({words.clean(name)})" for name, many in sorted(ratios.items())])
        yield (
            f"Drafted plus accepted tokens would have said {said} of the counter: they are what was emitted only "
            "where every step has exactly one draft token."
        )


def _misrankings(good: Trials) -> Iterator[str]:
    """Where a ruler would have named another variant the fastest than the counter does."""
    by_level: dict[Level, dict[str, list[Rulers]]] = defaultdict(lambda: defaultdict(list))
    for (variant, _, level), trials in good.items():
        by_level[level][variant] += [trial.rulers for trial in trials]

    def best(level: dict[str, list[Rulers]], ruler: Ruler | Literal["counter"]) -> str | None:
        read = attrgetter(ruler)
        middles = {
            variant: median(values)
            for variant, many in level.items()
            if (values := [value for value in map(read, many) if value is not None])
        }
        return max(middles, key=lambda variant: middles[variant]) if len(middles) == len(level) > 1 else None

    truths = {at: best(measured, "counter") for at, measured in by_level.items()}
    for ruler, name in RULERS.items():
        wrong = []
        for at, measured in sorted(by_level.items(), key=lambda item: item[0]):
            truth, other = truths[at], best(measured, ruler)
            if truth is not None and other is not None and other != truth:
                wrong.append(f"{words.clean(other)} instead of {words.clean(truth)} at {at}")
        if wrong:
            subject = name[0].upper() + name[1:]
            yield f"{subject} would have put another variant on top (by the median boot): {words.listing(wrong)}."


# --- latency --------------------------------------------------------------------------------------------------------


def latency_section(variants: Sequence[VariantView], good: Trials) -> Section | None:
    """Time to the first token, between tokens and end to end; the median over boots, or boot by boot where they differ.

    No mean or median describes boots that disagree, in latency as little as in throughput.
    """
    refuted = {
        (one.verdict.name, cell.verdict.cache, cell.verdict.level)
        for one in variants
        for cell in one.cells
        if cell.verdict.reproducibility == "DOES_NOT_REPRODUCE"
    }
    several = len({cache for _, cache, _ in good}) > 1
    rows = tuple(
        (
            words.clean(variant) + (f" ({cache})" if several else ""),
            str(level),
            str(len(trials)),
            *_quantile_cells(trials, by_boot=(variant, cache, level) in refuted),
        )
        for (variant, cache, level), trials in sorted(good.items(), key=lambda item: item[0])
    )
    if not rows or all(cell == words.ABSENT for row in rows for cell in row[3:]):
        return None
    at = words.level_column(level for _, _, level in good)
    columns = ("variant", at, "boots", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "end to end p50", "p99")
    table = Table("Latency in ms", columns, rows, numeric=frozenset(range(1, len(columns))), folded=True)
    sentences = (
        "Each mark is one boot's median request; a line joins the median boots where boots agree in throughput.",
        "Latency is not judged by itself: where the marks of one level lie apart, so do its boots.",
        "Under speculation several tokens arrive in one chunk: the time between tokens is that between chunks.",
    )
    return Section("latency", "Latency against concurrency", sentences, (table,), figure="latency")


def _quantile_cells(trials: Sequence[TrialEnded], *, by_boot: bool) -> tuple[str, ...]:
    def middle(read: Callable[[TrialEnded], Quantiles], name: Literal["p50", "p99"]) -> str:
        found = [value for trial in trials if (value := getattr(read(trial), name)) is not None]
        if by_boot and found:
            return " · ".join(words.one_by_one(found))
        return words.number(median(found) if found else None)

    return tuple(
        middle(read, name)
        for read in (lambda t: t.ttft_ms, lambda t: t.itl_ms, lambda t: t.e2e_ms)
        for name in ("p50", "p99")
    )


# --- why it moved ---------------------------------------------------------------------------------------------------


def tokens_per_step(trial: TrialEnded) -> float | None:
    """A = 1 + Δaccepted ÷ Δdrafts, tokens per step of one sequence; 1 without speculation."""
    deltas = trial.deltas
    if deltas is None:
        return None
    if not deltas.spec_drafts:
        return 1.0
    return None if deltas.spec_accepted_tokens is None else 1 + deltas.spec_accepted_tokens / deltas.spec_drafts


def attribution_section(variants: Sequence[VariantView], good: Trials) -> Section | None:
    """Δln(tok/s) = Δln A + Δln S between the fastest and the slowest boot of a cell that does not reproduce."""
    rows, moved = [], []
    for variant in variants:
        for cell in variant.cells:
            if cell.verdict.reproducibility != "DOES_NOT_REPRODUCE":
                continue
            key = (variant.verdict.name, cell.verdict.cache, cell.verdict.level)
            row = _moved(variant.verdict.name, cell, {trial.boot: trial for trial in good.get(key, ())})
            if row is not None:
                rows.append(row[0])
                moved.append(row[1])
    if not rows:
        return None
    steps, tokens = moved.count("S"), moved.count("A")
    sentences = (
        "tok/s = A · S: A is tokens per step (1 + accepted ÷ drafts), S is steps per second of a stream.",
        (
            f"Between fastest and slowest boot S moved more in {steps} and A in {tokens} of "
            f"{words.plural(len(moved), 'cell')}. S is the engine (memory, graphs, clocks); A is the content."
        ),
    )
    at = words.level_column(cell.verdict.level for variant in variants for cell in variant.cells)
    columns: tuple[str, ...] = ("variant", at, "fastest", "slowest", "tok/s", "A", "S, steps/s", "moved", "SM MHz")
    if all(row[-1] == words.ABSENT for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    table = Table("Fastest against slowest boot", columns, tuple(rows), numeric=frozenset({1, 4, 5, 6, 8}))
    return Section("attribution", "Why it moved", sentences, (table,))


def _moved(
    variant: str, cell: CellView, trials: Mapping[str, TrialEnded]
) -> tuple[tuple[str, ...], Literal["A", "S"]] | None:
    """`trials`: by boot, those of the cell."""
    level = cell.verdict.level
    valued = [point for point in cell.points if point.value is not None]
    fast, slow = (pick(valued, key=lambda point: point.value or 0.0) for pick in (max, min))
    a = [tokens_per_step(trial) if (trial := trials.get(point.boot)) else None for point in (fast, slow)]
    if a[0] is None or a[1] is None or not fast.value or not slow.value:
        return None
    whole, part_a = math.log(fast.value / slow.value), math.log(a[0] / a[1])
    part_s = whole - part_a
    by = "A" if abs(part_a) > abs(part_s) else "S"
    share = max(abs(part_a), abs(part_s)) / (abs(part_a) + abs(part_s)) if whole else 0.0
    of = ((fast, a[0]), (slow, a[1]))
    s = [point.value / tokens / level.concurrency for point, tokens in of if point.value is not None]
    row = (
        words.clean(variant),
        str(level),
        f"{fast.boot}: {words.number(fast.value)}",
        f"{slow.boot}: {words.number(slow.value)}",
        f"× {math.exp(whole):.2f}",
        f"{a[0]:.2f} / {a[1]:.2f}",
        f"{s[0]:.1f} / {s[1]:.1f}",
        f"{by} ({share * 100:.0f} %)",
        _clocks([trials[point.boot] for point in (fast, slow)]),
    )
    return row, "A" if by == "A" else "S"


def _clocks(pair: Sequence[TrialEnded]) -> str:
    """The mean SM clock of the slowest GPU in each of the two windows: a clock that was held down moves S."""
    told = [
        min((gpu.sm_clock_mean_mhz for gpu in trial.gpu or () if gpu.sm_clock_mean_mhz is not None), default=None)
        for trial in pair
    ]
    return words.ABSENT if None in told else " / ".join(words.number(clock, 0) for clock in told)


# --- what was left out ----------------------------------------------------------------------------------------------


def excluded_section(boots: Sequence[BootView]) -> Section:
    """Everything that no estimate contains: invalid trials, disturbed and aborted boots. Never dropped in silence."""
    lost = [one for boot in boots for one in _lost(boot)]
    remarks = _remarks(boots)
    sentences = () if remarks is None else (f"{words.plural(remarks.all_rows, 'remark')} of trials disturbed nothing.",)
    more = () if remarks is None else (remarks,)
    if not lost:
        none = "Nothing: every trial was valid, and every boot counts."
        return Section("excluded", "What was left out", (none, *sentences), more)
    whole = sum(boot.result is None for boot, _, _ in lost)
    said = f"{words.plural(len(lost) - whole, 'trial')} and {words.plural(whole, 'boot')} are in no number above."
    rows = tuple(
        (boot.name, words.clean(boot.variant), "whole boot", boot.outcome, boot.why or _UNKNOWN)
        if level is None
        else (boot.name, words.clean(boot.variant), f"trial at {level}", "invalid", _reasons(trial))
        for boot, level, trial in lost[:MOST_ROWS]
    )
    columns = ("boot", "variant", "what", "as", "why")
    table = Table("Left out", columns, rows, code=frozenset({0}), left_out=len(lost) - len(rows))
    return Section("excluded", "What was left out", (said, *sentences), (table, *more))


def _lost(boot: BootView) -> Iterator[tuple[BootView, Level | None, TrialEnded | None]]:
    """What of one boot is in no number: the whole of it (no level), or levels, with the trial where there is one."""
    if boot.result is None:
        yield boot, None, None
    elif boot.trials:
        for trial in boot.trials:
            if not trial.valid and not trial.failed:
                yield boot, boot.level(trial), trial
    else:
        yield from ((boot, level.level, None) for level in boot.result.levels if not level.valid)


def _remarks(boots: Sequence[BootView]) -> Table | None:
    """What trials warned of: a power limit that was reached, a window that is a little uncertain and the like."""
    count = sum(len(trial.warnings) for boot in boots for trial in boot.trials)
    told = ((boot, trial, text) for boot in boots for trial in boot.trials for text in trial.warnings)
    rows = tuple(
        (boot.name, words.clean(boot.variant), f"trial at {boot.level(trial)}", words.clean(text, 240))
        for boot, trial, text in islice(told, MOST_ROWS)
    )
    columns = ("boot", "variant", "what", "remark")
    more = count - len(rows)
    table = Table("Remarks of trials", columns, rows, code=frozenset({0}), folded=True, left_out=more)
    return table if rows else None


def _reasons(trial: TrialEnded | None) -> str:
    if trial is None:
        return words.ABSENT
    return words.clean("; ".join(trial.invalid_reasons) or _UNKNOWN, 240)
