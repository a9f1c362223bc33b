"""The View: what a report says, without how it looks. Frozen, clean text (`words.clean`), no format's escaping.

A format walks `View.sections` in order, so that what is added here is said in every format. Numbers stay numbers where
a figure or the CSV needs them (`points`, `boots`, `trials`); tables are text, ready to be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from orchestrator.records import (
    Answer,
    BootEnded,
    BootOutcome,
    BootResult,
    BootStarted,
    CacheState,
    CellVerdict,
    Level,
    StepEnded,
    TrialEnded,
    VariantVerdict,
    Verdicts,
    level_of,
)

Status = Literal["value", "failed", "invalid", "died", "not_measured"]
SectionKey = Literal[
    "verdicts",
    "goals",
    "boots",
    "throughput",
    "latency",
    "attribution",
    "wall",
    "rulers",
    "evidence",
    "answers",
    "boot_table",
    "memory",
    "gpus",
    "order",
    "excluded",
    "provenance",
]
FigureName = Literal["boots", "throughput", "latency", "wall", "timeline", "memory", "rulers", "order"]


MOST_ROWS = 500
MOST_POINTS = 150  # of one series in a figure: more lie upon each other anyway


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. `numeric` columns are set right; `code` columns are set in a fixed-width face.

    `left_out` counts the rows that a report of thousands of boots has no room for.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    code: frozenset[int] = frozenset()
    folded: bool = False
    left_out: int = 0

    @property
    def all_rows(self) -> int:
        """How many there would be."""
        return len(self.rows) + self.left_out

    def shortened(self) -> Table:
        """With the rows that there is room for."""
        more = max(0, len(self.rows) - MOST_ROWS)
        return replace(self, rows=self.rows[:MOST_ROWS], left_out=self.left_out + more) if more else self


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the report. `sentences` say in words what `figure` and `tables` show."""

    key: SectionKey
    title: str
    sentences: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figure: FigureName | None = None


@dataclass(frozen=True, slots=True)
class NextStep:
    """Something to do next: the reason, and the command where there is one."""

    text: str
    command: str | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One boot in one cell. `value` in the cell's unit, None unless `status` is `value`; `why` says what happened."""

    boot: str
    value: float | None
    status: Status
    why: str = ""


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell: the verdict, its boots one by one, and the words for them."""

    variant: str
    verdict: CellVerdict
    points: tuple[Point, ...]
    short: str
    long: str
    agreement: str | None


@dataclass(frozen=True, slots=True)
class Line:
    """One journal line of an excerpt; `entry` counts from 0, `rule` is set where the line is telling."""

    entry: int
    text: str
    rule: str | None = None


@dataclass(frozen=True, slots=True)
class EvidenceView:
    """What the journal of one boot says: an excerpt with the telling lines marked. Gaps are where `entry` jumps."""

    boot: str
    title: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    source: str | None = None


@dataclass(frozen=True, slots=True)
class VariantView:
    """One variant: its verdict, what is special about it, and the evidence when it is rejected.

    `index` is its place in the file: it picks colour and marker, so that they stay when the ranking changes.
    """

    index: int
    verdict: VariantVerdict
    production: bool
    cells: tuple[CellView, ...]
    differs: tuple[str, ...] = ()
    evidence: tuple[EvidenceView, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def valued(self) -> bool:
        """Whether any boot of it gave a value, so that it has a mark in the figures."""
        return any(point.value is not None for cell in self.cells for point in cell.points)


@dataclass(frozen=True, slots=True)
class BootView:
    """One boot: the analysis's result (None where it does not count) and, where a ledger has them, its records.

    `lengths` are the prompt lengths of the experiment, in tokens.
    """

    name: str
    variant: str
    cache: CacheState
    position: int
    outcome: BootOutcome
    why: str = ""
    result: BootResult | None = None
    started: BootStarted | None = None
    steps: tuple[StepEnded, ...] = ()
    answer: Answer | None = None
    trials: tuple[TrialEnded, ...] = ()
    ended: BootEnded | None = None
    lengths: tuple[int, ...] = ()

    def level(self, trial: TrialEnded) -> Level:
        """Where one of its trials was measured, by the name of its cell."""
        return level_of(trial.concurrency, trial.input_tokens, self.lengths)

    @property
    def counted(self) -> bool:
        """Whether the boot is in the verdicts: completed, crashed or not ready."""
        return self.result is not None


# Trials of each cell (variant, cache state, level), in the order of its boots.
Trials = Mapping[tuple[str, CacheState, Level], Sequence[TrialEnded]]


@dataclass(frozen=True, slots=True)
class RulerRatio:
    """Median over trials of ruler ÷ counter for one variant at one level; None without that ruler."""

    variant: str
    level: Level
    trials: int
    usage: float | None
    chunks: float | None
    words: float | None
    logger: float | None


@dataclass(frozen=True, slots=True)
class View:
    """Everything a report says: the answer in one sentence, how sure it is, what to do now, and all behind it.

    `good` are the trials that were valid, did not fail and belong to boots that count.
    """

    verdicts: Verdicts
    headline: str
    sureness: tuple[str, ...]
    variants: tuple[VariantView, ...]
    boots: tuple[BootView, ...]
    rulers: tuple[RulerRatio, ...]
    sections: tuple[Section, ...]
    good: Trials = field(default_factory=dict)
    steps: tuple[NextStep, ...] = ()
    walls: Mapping[tuple[str, CacheState, Level], float] = field(default_factory=dict)

    @property
    def rehearsal(self) -> bool:
        """Whether everything must be stamped REHEARSAL."""
        return self.verdicts.rehearsal

    @property
    def concurrency(self) -> tuple[int, ...]:
        """All concurrencies of all variants, ascending."""
        return tuple(sorted({cell.verdict.concurrency for variant in self.variants for cell in variant.cells}))

    @property
    def levels(self) -> tuple[Level, ...]:
        """All levels of all variants, ascending."""
        return tuple(sorted({cell.verdict.level for variant in self.variants for cell in variant.cells}))

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """The prompt lengths that levels name, ascending; a single None where prompt length is no factor."""
        return tuple(dict.fromkeys(level.input_tokens for level in self.levels))

    @property
    def caches(self) -> tuple[CacheState, ...]:
        """All cache states of all variants."""
        return tuple(dict.fromkeys(cell.verdict.cache for variant in self.variants for cell in variant.cells))

    def section(self, key: SectionKey) -> Section | None:
        """The section of that key, None where there was nothing to say."""
        return next((section for section in self.sections if section.key == key), None)
