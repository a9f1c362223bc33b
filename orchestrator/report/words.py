"""Text for every format: foreign text made harmless, numbers made readable, sentences that several formats say.

Journal lines, error answers and names come from outside. `clean` takes away what could act on a reader's terminal,
parser or eye (escape sequences, control characters, text-direction overrides, lone surrogates); escaping for one
format (HTML, Markdown, XML) is that format's own work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from orchestrator.records import CellVerdict, Level, Reproducibility, VariantAnswer, VariantVerdict
from orchestrator.verdict.values import printed
from orchestrator.verdict.wording import streams

ABSENT = "–"
REHEARSAL = "REHEARSAL"
REHEARSAL_SENTENCE = (
    "Made on the rehearsal engine, a program that imitates a server: no GPU and no model was measured. "
    "Nothing here says anything about real hardware."
)

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?")
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff\ufff9-\uffff]"
)
_RANK: dict[VariantAnswer, int] = {"WINNER": 0, "CONTENDER": 1, "DOMINATED": 2, "UNDECIDED": 3, "REJECTED": 4}

REASONS: dict[str, str] = {
    "cold_boot_fatal": "the engine died, or was not ready by the deadline, in a cold boot before the trials",
    "errors_under_load": "requests failed in a trial: a 5xx, a cut stream or an engine death",
    "collapses_with_concurrency": "more streams gave less throughput in total, in every boot that measured it",
    "does_not_reproduce": "the boots of one cell differ by more than the tolerance, even by the kindest reading",
}
REPRODUCIBILITY: dict[Reproducibility, str] = {
    "REPRODUCES": "reproduces",
    "DOES_NOT_REPRODUCE": "does not reproduce",
    "UNDECIDED": "not yet vouched for",
}
# What a mark beside a value means; `=` and `≠` are told where they stand.
ONE_BY_ONE = 12
OPEN = "not yet vouched for: it takes six boots at least, and a spread surely within the tolerance"


def clean(text: str, limit: int | None = None) -> str:
    """One line of harmless text: no escapes, no control characters; cut with an ellipsis at `limit` characters."""
    if text.isascii() and text.isprintable():
        return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"
    # A progress bar overwrites its line with \r: what a terminal would show at the end is what is said.
    shown = (line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    flat = _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", _ESCAPE.sub("", " ".join(shown).replace("\t", "    ")))
    return flat if limit is None or len(flat) <= limit else flat[: limit - 1] + "…"


def number(value: float | None, digits: int = 1) -> str:
    """`66.9`; four digits and more without decimals, from 1e9 three figures; `–` for what does not exist."""
    if value is None:
        return ABSENT
    if abs(value) >= 1e9:
        return f"{value:.3g}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def one_by_one(values: Sequence[float]) -> tuple[str, ...]:
    """The values of boots of which no mean speaks; of very many the first, and how many more there are."""
    shown = tuple(printed(value) for value in values[:ONE_BY_ONE])
    return shown if len(values) <= ONE_BY_ONE else (*shown, f"and {len(values) - ONE_BY_ONE} more")


def percent(fraction: float | None, digits: int = 0) -> str:
    """`63 %` of a fraction."""
    return ABSENT if fraction is None else f"{fraction * 100:.{digits}f} %"


def seconds(value: float | None) -> str:
    """`0.013 s`, `1.25 s`, `97.6 s`, `236 s`: milliseconds below one second, three figures above."""
    if value is None:
        return ABSENT
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f} s"


def interval(bounds: tuple[float, float] | None) -> str:
    """`65.0 to 68.9`, `–` without one."""
    return ABSENT if bounds is None else f"{number(bounds[0])} to {number(bounds[1])}"


def level_column(levels: Iterable[Level]) -> str:
    """The head of a column of levels."""
    return "level" if any(level.input_tokens is not None for level in levels) else "concurrency"


def level_note(levels: Sequence[Level]) -> str:
    """What a level's spelling means, `8@8000 is 8 streams with prompts of 8000 tokens`; nothing where all is plain."""
    named = [level for level in levels if level.input_tokens is not None]
    return f"{named[-1]} is {streams(named[-1:])}" if named else ""


def listing(items: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    words = list(items)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def plural(count: int, noun: str) -> str:
    """`1 boot`, `3 boots`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def by_rank(variants: Sequence[VariantVerdict]) -> tuple[VariantVerdict, ...]:
    """The winner first, the rejected last; within one answer by objective, else in the order of the file."""
    return tuple(sorted(variants, key=lambda v: (_RANK[v.verdict], -(v.objective or 0.0))))


def answer(variant: VariantVerdict) -> str:
    """A variant's verdict as it is shown: one of which no boot has ended is not `UNDECIDED` but not booted yet."""
    return "not booted yet" if variant.verdict == "UNDECIDED" and variant.boots == 0 else variant.verdict


def why(variant: VariantVerdict) -> str:
    """A variant's sentence beside its name and verdict, harmless."""
    return ABSENT if answer(variant) != variant.verdict else clean(variant.why)


def beside(variant: VariantVerdict) -> str:
    """`why` where the answer stands on top with all that is known of the winner: of that one only what is not there."""
    if variant.verdict != "WINNER":
        return why(variant)
    return clean(f"{'; '.join(('wins, as said above', *variant.remarks))}.")


def agreement(cell: CellVerdict) -> str | None:
    """What the agreement of a cell's boots is worth; None where nothing agrees (statistics: 1 − 0.05^(1/n))."""
    values = sum(value is not None for value in cell.by_boot)
    if cell.reproducibility == "DOES_NOT_REPRODUCE" or values == 0 or cell.hidden_mode_rate is None:
        return None
    unseen = f"a slow mode in up to {percent(cell.hidden_mode_rate)} of boots would still be unseen"
    return f"one boot agrees with itself: {unseen}" if values == 1 else f"{values} of {values} agree: {unseen}"


def settles(cell: CellVerdict) -> str:
    """How many more boots would settle an undecided cell."""
    if cell.reproducibility != "UNDECIDED":
        return ""
    if cell.more_boots is None:
        return "no number of boots is known to settle it"
    return f"about {plural(cell.more_boots, 'more boot')} would settle it" if cell.more_boots else ""


def spread(cell: CellVerdict) -> str:
    """`spread 69 % (35 % to 1106 %)`: sd of logs between boots with its one-sided 95 % bounds."""
    if cell.spread is None:
        return "spread unknown"
    bounds = f" ({percent(cell.spread_lower, 1)} to {percent(cell.spread_upper, 1)})"
    return f"spread {percent(cell.spread, 1)}{bounds if cell.spread_lower is not None else ''}"
