"""Two variants side by side: the ratio at each level with its interval, the reasons, and one sentence. Pure.

Within one experiment or between two. Ratios are of boots against boots (Welch on logs, 95 %); a number that does not
reproduce supports no ratio, and neither does a single boot an interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from orchestrator import stats, verdict
from orchestrator.errors import UsageError
from orchestrator.records import (
    AnyRecord,
    CacheState,
    CampaignStarted,
    CellVerdict,
    Level,
    Series,
    VariantVerdict,
    Verdicts,
)
from orchestrator.report import words
from orchestrator.verdict.claims import same_load
from orchestrator.verdict.wording import listed, plural, streams, times

THROUGHPUT = "tok/s"


@dataclass(frozen=True)
class Experiment:
    """One experiment as far as a comparison needs it. `facts`: what must be equal before numbers are compared."""

    name: str
    verdicts: Verdicts
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """One variant of one experiment, and how it is called."""

    label: str
    experiment: Experiment
    variant: VariantVerdict


@dataclass(frozen=True)
class Ratio:
    """A against B: `value` and its 95 % interval as logs, and the boots of each side; None with the reason `why`."""

    value: float | None
    interval: tuple[float, float] | None
    boots: tuple[int, int]
    why: str = ""

    @property
    def apart(self) -> bool:
        """Whether the interval excludes equality."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True)
class Row:
    """One level in one cache state."""

    cache: CacheState
    level: Level
    a: CellVerdict | None
    b: CellVerdict | None
    ratio: Ratio


@dataclass(frozen=True)
class Comparison:
    """Two variants side by side; `whole` is over the geometric mean of `levels`, those that both have in `cache`."""

    a: Side
    b: Side
    rows: tuple[Row, ...]
    cache: CacheState | None
    levels: tuple[Level, ...]
    whole: Ratio
    notes: tuple[str, ...]


# --- who is compared -------------------------------------------------------------------------------------------------


def experiment(name: str, series: Series, records: Iterable[AnyRecord]) -> Experiment:
    """An experiment from its series and its ledger."""
    facts: dict[str, str] = {}
    for record in records:
        if isinstance(record, CampaignStarted):
            facts |= {key: value for key, value in record.fingerprint.items() if value is not None}
            facts |= {f"load.{key}": str(value) for key, value in record.load.items()}
    return Experiment(name, verdict.judge(series), facts)


def pairs(text: str, current: Experiment, other: Callable[[str], Experiment | None]) -> tuple[tuple[Side, Side], ...]:
    """Who is meant by `A,B`.

    A word is a variant of the current experiment, else another experiment's name, or `EXPERIMENT:VARIANT`. An
    experiment stands for all of its variants that the other side has as well.

    Args:
        text: The two words.
        current: The experiment that is reported.
        other: An experiment by its name; None when there is none.

    Raises:
        UsageError: not two words, an unknown one, or nothing in common.
    """
    named = [word.strip() for word in text.split(",") if word.strip()]
    if len(named) != 2:
        there = ", ".join(one.name for one in current.verdicts.variants)
        raise UsageError(
            f"--compare: {text!r} names {len(named) or 'nothing'}; accepted: two names with a comma between, "
            "of variants or of experiments, as spec-1,no-spec or gwen,gwen.2",
            hint=f"variants of {current.name}: {there}",
        )
    if named[0] == named[1]:
        raise UsageError(f"--compare: {named[0]} with itself")
    first, second = (_meant(word, current, other) for word in named)
    if isinstance(first, Side) and isinstance(second, Side):
        return ((first, second),)
    ours, theirs = ([each] if isinstance(each, Side) else _sides(each) for each in (first, second))
    found = tuple((a, b) for a in ours for b in theirs if a.variant.name == b.variant.name)
    if not found:
        raise UsageError(f"--compare: {named[0]} and {named[1]} have no variant in common")
    return found


def _meant(word: str, current: Experiment, other: Callable[[str], Experiment | None]) -> Side | Experiment:
    if any(one.name == word for one in current.verdicts.variants):
        return _side(current, word, word)
    if (whole := other(word)) is not None:
        return whole
    name, colon, variant = word.partition(":")
    there = other(name) if colon else None
    return _side(current, word, word) if there is None else _side(there, variant, word)


def _side(there: Experiment, variant: str, label: str) -> Side:
    for one in there.verdicts.variants:
        if one.name == variant:
            return Side(label, there, one)
    names = ", ".join(one.name for one in there.verdicts.variants)
    raise UsageError(
        f"--compare: {variant!r} is no variant of {there.name} and no experiment",
        hint=f"one of: {names}; or an experiment's name; or EXPERIMENT:VARIANT",
    )


def _sides(there: Experiment) -> list[Side]:
    return [Side(f"{there.name}:{one.name}", there, one) for one in there.verdicts.variants]


# --- the comparison --------------------------------------------------------------------------------------------------


def compare(a: Side, b: Side) -> Comparison:
    """Two variants side by side.

    Raises:
        UsageError: a rehearsal against a real box.
    """
    if a.experiment.verdicts.rehearsal != b.experiment.verdicts.rehearsal:
        raise UsageError(f"--compare: of {a.label} and {b.label} one is a rehearsal: these numbers cannot be compared")
    rows = tuple(
        Row(one.cache, _level(mine, theirs), mine, theirs, _ratio(a, b, [(mine, theirs)]))
        for mine, theirs in _matched(_cells(a), _cells(b))
        if (one := mine or theirs) is not None
    )
    usable = [row for row in rows if row.ratio.value is not None]
    cache = usable[0].cache if usable else None
    ours = sorted((row for row in usable if row.cache == cache), key=lambda row: row.level)
    whole = (
        _ratio(a, b, [(row.a, row.b) for row in ours])
        if cache is not None
        else Ratio(
            None, None, (0, 0), "; ".join(dict.fromkeys(row.ratio.why for row in rows)) or "no level was measured"
        )
    )
    return Comparison(a, b, rows, cache, tuple(row.level for row in ours), whole, _notes(a, b))


def _cells(side: Side) -> list[CellVerdict]:
    return [cell for cell in side.variant.cells if cell.unit == THROUGHPUT]


def _matched(
    ours: Sequence[CellVerdict], theirs: Sequence[CellVerdict]
) -> list[tuple[CellVerdict | None, CellVerdict | None]]:
    """Cells of one cache state and one load, beside each other; then those that only one side has."""
    found = [(one, next((other for other in theirs if same_load(one, other)), None)) for one in ours]
    alone = [other for other in theirs if not any(same_load(one, other) for one in ours)]
    return [*found, *((None, other) for other in alone)]


def _level(one: CellVerdict | None, other: CellVerdict | None) -> Level:
    """What both call it; where one of them has several prompt lengths, the name with its length."""
    names = [cell.level for cell in (one, other) if cell is not None]
    return max(names, key=lambda level: level.input_tokens or 0)


def _ratio(a: Side, b: Side, cells: Sequence[tuple[CellVerdict | None, CellVerdict | None]]) -> Ratio:
    """Of the geometric mean over these cells, over the boots that have all of them."""
    sides = []
    for side, own in ((a, [pair[0] for pair in cells]), (b, [pair[1] for pair in cells])):
        there = [cell for cell in own if cell is not None]
        if len(there) < len(own) or any(all(value is None for value in cell.by_boot) for cell in there):
            return Ratio(None, None, (0, 0), f"{side.label} has no value")
        if any(cell.reproducibility == "DOES_NOT_REPRODUCE" for cell in there):
            return Ratio(None, None, (0, 0), f"{side.label} does not reproduce")
        sides.append(_logs(there))
    ours, theirs = sides
    boots = (len(ours), len(theirs))
    middle, other = stats.mean(ours), stats.mean(theirs)
    if middle is None or other is None:
        return Ratio(None, None, boots, "no boot has all of these levels")
    difference = stats.welch(ours, theirs)
    if difference is None:
        return Ratio(middle - other, None, boots, "an interval needs two boots on each side")
    return Ratio(difference.value, difference.interval, boots)


def _logs(cells: Sequence[CellVerdict]) -> list[float]:
    """The mean log over the cells of each boot that has them all; boots stand in the same order in each cell."""
    return [
        math.fsum(math.log(value) for value in values if value is not None) / len(cells)
        for values in zip(*(cell.by_boot for cell in cells), strict=True)
        if all(value is not None for value in values)
    ]


def _notes(a: Side, b: Side) -> tuple[str, ...]:
    """What makes two experiments unlike each other, and what confounds either."""
    one, two = a.experiment, b.experiment
    notes = []
    if one.name != two.name:
        boxes = one.verdicts.box, two.verdicts.box
        if boxes[0] != boxes[1]:
            notes.append(f"the boxes differ: {boxes[0]} and {boxes[1]}")
        differing = [key for key in one.facts if key in two.facts and one.facts[key] != two.facts[key]]
        notes += [f"{key} differs: {one.facts[key]} and {two.facts[key]}" for key in differing]
    confounded = {each.name: each.verdicts.confounded for each in (one, two) if each.verdicts.confounded}
    notes += [f"{name} is confounded: {why}" for name, why in confounded.items()]
    return tuple(notes)


# --- in words --------------------------------------------------------------------------------------------------------


def sentence(found: Comparison) -> str:
    """The comparison in one sentence."""
    a, b, whole = found.a.label, found.b.label, found.whole
    if whole.value is None:
        return f"{a} and {b} cannot be compared: {whole.why}."
    at = streams(found.levels) + ("" if found.cache in (None, "cold") else f", {found.cache} cache")
    said = f"{a} gives {times(whole.value)} the throughput of {b} at {at}"
    if whole.interval is None:
        return f"{said}; {whole.why}, not {whole.boots[0]} and {whole.boots[1]}."
    ends = f"95 % {times(whole.interval[0])} to {times(whole.interval[1])}"
    boots = f"{plural(whole.boots[0], 'boot')} against {whole.boots[1]}"
    answer = "they are told apart" if whole.apart else "they are not told apart"
    return f"{said} ({ends}, {boots}): {answer}."


def render(found: Comparison) -> str:
    """The whole as text for a terminal, a log or a comment."""
    a, b = found.a, found.b
    rows = [("", a.label, b.label, "ratio", "its 95 %")]
    rows += [
        (
            f"at {row.level}" + ("" if row.cache == "cold" else f" {row.cache}"),
            _cell(row.a),
            _cell(row.b),
            "–" if row.ratio.value is None else times(row.ratio.value),
            _interval(row.ratio),
        )
        for row in found.rows
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines = [
        *([f"{words.REHEARSAL}: {words.REHEARSAL_SENTENCE}"] if a.experiment.verdicts.rehearsal else []),
        *table,
        f"tok/s, geometric mean over boots; ratio: {a.label} / {b.label}; each interval is 95 % by itself",
        "",
        *(f"{side.label}, {side.variant.verdict}{_reasons(side)}: {side.variant.why}" for side in (a, b)),
        *(f"NOTE {note}" for note in found.notes),
        "",
        sentence(found),
    ]
    return "\n".join(words.clean(line, 2000) for line in lines)


def _reasons(side: Side) -> str:
    return f" ({listed(side.variant.reasons)})" if side.variant.reasons else ""


def _interval(ratio: Ratio) -> str:
    if ratio.interval is None:
        return ratio.why if ratio.value is None else "too few boots"
    return f"{times(ratio.interval[0])} to {times(ratio.interval[1])}"


def _cell(cell: CellVerdict | None) -> str:
    if cell is None:
        return words.ABSENT
    values = [value for value in cell.by_boot if value is not None]
    if cell.reproducibility == "DOES_NOT_REPRODUCE":
        return f"{words.number(min(values))} … {words.number(max(values))}"
    if cell.estimate is None:
        return words.ABSENT
    ends = "" if cell.interval is None else f" ({words.number(cell.interval[0])} – {words.number(cell.interval[1])})"
    return words.number(cell.estimate) + ends
