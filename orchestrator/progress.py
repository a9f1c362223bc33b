"""What a person sees while a campaign runs, and what a program reads: plain lines, warnings alone, or JSON lines.

The live table of a terminal is in `live`. Progress goes to stderr; `--json-lines` puts each record on stdout, which
holds nothing else then. `NO_COLOR` is honoured by rich.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from types import TracebackType
from typing import IO, Protocol, Self

from rich.cells import cell_len
from rich.console import Console
from rich.prompt import Confirm
from rich.text import Text

from orchestrator.records import (
    AnyRecord,
    BootEnded,
    BootRecord,
    BootStarted,
    CampaignEnded,
    CampaignStarted,
    JournalAnswered,
    StepEnded,
    TrialEnded,
    level_of,
)

_WHOLE = re.compile(r"`[^`]+`|\d %")
_UNBROKEN = "\N{NO-BREAK SPACE}"


class Listener(Protocol):
    """Who is told what a campaign does."""

    def say(self, text: str) -> None:
        """Something that a person should see."""

    def warn(self, text: str) -> None:
        """Something that a person must see: number, limit, next step."""

    def confirm(self, question: str) -> bool | None:
        """Asks yes or no; None when nobody can be asked."""

    def planned(self, rows: Sequence[str], blocks: int, earlier: Iterable[AnyRecord] = ()) -> None:
        """The campaign begins: `rows` (see `row_of`) in so many blocks; `earlier` is what earlier sessions recorded."""

    def left(self, rows: Sequence[str]) -> None:
        """Which boots are still to go, in order; told before each boot, and empty at the end."""

    def record(self, record: AnyRecord) -> None:
        """A record was written."""


def row_of(variant: str, cache: str) -> str:
    """A variant in one cache state, as boots are named: `spec-8`, `spec-8@warm`."""
    return variant if cache == "cold" else f"{variant}@{cache}"


def hours(seconds: float) -> str:
    """A duration as a person reads it: `48 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass(slots=True)
class Pace:
    """How long boots take, each row by itself: a variant that dies at its first request is done sooner.

    took  of each row the number of boots and their seconds together: a campaign of a day has thousands
    """

    todo: tuple[str, ...] = ()
    took: dict[str, tuple[int, float]] = field(default_factory=dict)

    def ended(self, end: BootEnded) -> None:
        """A boot ended."""
        if end.seconds is not None:
            row = row_of(end.variant, end.cache)
            boots, seconds = self.took.get(row, (0, 0.0))
            self.took[row] = boots + 1, seconds + end.seconds

    @property
    def left_s(self) -> float | None:
        """Seconds that the boots to go will take; None before the first one has ended."""
        if not self.took:
            return None
        mean = sum(seconds for _, seconds in self.took.values()) / sum(boots for boots, _ in self.took.values())
        means = {row: seconds / boots for row, (boots, seconds) in self.took.items()}
        return sum(means.get(row, mean) for row in self.todo)

    def say(self) -> str:
        """`9 boots left, about 12 min`."""
        boots = f"{len(self.todo)} boot{'' if len(self.todo) == 1 else 's'} left"
        left = self.left_s
        return boots if left is None or not self.todo else f"{boots}, about {hours(left)}"


# --- records in words ----------------------------------------------------------------------------------------------


def describe(record: AnyRecord, lengths: Sequence[int] = ()) -> str | None:  # noqa: PLR0911 - one line for each kind
    """A record as one line; None when it is not worth one. `lengths`: the experiment's prompt lengths."""
    match record:
        case CampaignStarted():
            stamp = ", REHEARSAL" if record.rehearsal else ""
            again = "goes on" if record.resumed else "begins"
            return f"{record.experiment} on {record.box} {again}: seed {record.seed}{stamp}"
        case BootStarted():
            return f"{record.boot}: starting ({record.cache})"
        case StepEnded(outcome="ok") if record.name in ("ready", "first_request"):
            return f"{record.boot}: {record.name.replace('_', ' ')} after {record.seconds:.1f} s"
        case StepEnded(outcome="failed") | StepEnded(outcome="disturbed"):
            return f"{record.boot}: {record.name} {record.outcome}: {record.detail}"
        case TrialEnded():
            return f"{record.boot}: {trial_text(record, lengths)}"
        case JournalAnswered() if record.answer.outcome != "benign":
            return f"{record.boot}: journal: {record.answer.outcome}, {record.answer.phase}, {record.answer.cause}"
        case BootEnded():
            return f"{record.boot}: {record.boot_outcome}: {record.why}"
        case CampaignEnded():
            return f"campaign {record.outcome}" + (f": {record.why}" if record.why else "")
        case _:
            return None


def trial_text(trial: TrialEnded, lengths: Sequence[int] = ()) -> str:
    """One trial in a few words; `lengths`: the experiment's prompt lengths."""
    at = f"at {level_of(trial.concurrency, trial.input_tokens, lengths)}"
    if trial.failed:
        errors = ", ".join(f"{count} x {kind}" for kind, count in trial.errors.items())
        return f"{at}: failed ({errors})"
    if trial.tokens_per_s is None:
        return f"{at}: not valid ({'; '.join(trial.invalid_reasons)})"
    return f"{at}: {trial.tokens_per_s:.1f} tok/s"


def wrapped(text: str, width: int | None, first: str = "", rest: str = "") -> list[str]:
    """One line of text as lines of a terminal, broken between words, `first` before the first and `rest` before others.

    Paths, and commands between backticks, are copied from there: they are never cut, however narrow it is. Of no
    `width`, as for a log, it stays one line.
    """
    if width is None or cell_len(first + text) <= width:
        return [first + text]
    whole = _WHOLE.sub(lambda found: found[0].replace(" ", _UNBROKEN), text)
    lines = textwrap.wrap(
        whole,
        max(20, width),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_UNBROKEN, " ") for line in lines]


def folded(text: str, width: int | None) -> str:
    """Text of several lines, each `wrapped` below its own beginning."""
    lines: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip(" "))]
        lines += wrapped(line[len(indent) :], width, indent, f"{indent}  ")
    return "\n".join(lines)


def warning_lines(text: str, width: int | None, label: str = "WARNING") -> list[str]:
    """A warning as lines of a terminal: the label, and everything else set below its first word."""
    indent = " " * len("WARNING ")
    lines: list[str] = []
    for number, part in enumerate(text.splitlines()):
        lines += wrapped(" ".join(part.split()), width, f"{label} " if number == 0 else indent, indent)
    return lines


# --- displays ------------------------------------------------------------------------------------------------------


class Display:
    """What all displays on stderr do alike."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.pace = Pace()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to put away."""

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None for a log and a pipe, which get whole lines."""
        return self.console.width if self.console.is_terminal else None

    def say(self, text: str) -> None:
        """See `Listener`."""
        self.console.print(Text(folded(text, self.width)), soft_wrap=True)

    def warn(self, text: str) -> None:
        """See `Listener`."""
        self.warn_as("WARNING", text)

    def warn_as(self, label: str, text: str) -> None:
        """A warning with this before it."""
        for line in warning_lines(text, self.width, label):
            self.console.print(Text(line, style="yellow"), soft_wrap=True)

    def confirm(self, question: str) -> bool | None:
        """See `Listener`. Only a terminal can be asked; the answer comes from standard input."""
        if not (self.console.is_terminal and sys.stdin.isatty()):
            return None
        return Confirm.ask(question, console=self.console, default=False)

    def planned(self, rows: Sequence[str], blocks: int, earlier: Iterable[AnyRecord] = ()) -> None:
        """See `Listener`."""
        del rows, blocks
        for record in earlier:
            if isinstance(record, BootEnded):
                self.pace.ended(record)

    def left(self, rows: Sequence[str]) -> None:
        """See `Listener`."""
        self.pace.todo = tuple(rows)

    def record(self, record: AnyRecord) -> None:
        """See `Listener`."""
        if isinstance(record, BootEnded):
            self.pace.ended(record)


class PlainListener(Display):
    """Lines with times, nothing that moves: for logs, CI and pipes."""

    def __init__(self, console: Console | None = None, *, clock: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(console or Console(stderr=True, highlight=False, soft_wrap=True))
        self._clock = clock
        self._day: date | None = None
        self._lengths: tuple[int, ...] = ()

    def _timed(self, text: str, style: str = "") -> None:
        for line in text.splitlines():
            now = self._clock().astimezone()
            if now.date() != self._day:
                self._day = now.date()
                self.console.print(Text(f"{now:%Y-%m-%d, times are %Z}"), soft_wrap=True)
            self.console.print(Text(f"{now:%H:%M:%S} {line}", style=style), soft_wrap=True)

    def say(self, text: str) -> None:
        """See `Listener`."""
        self._timed(text)

    def warn(self, text: str) -> None:
        """See `Listener`."""
        self._timed(f"WARNING {text}", style="yellow")

    def left(self, rows: Sequence[str]) -> None:
        """See `Listener`."""
        super().left(rows)
        if rows:
            self.say(self.pace.say())

    def record(self, record: AnyRecord) -> None:
        """See `Listener`."""
        super().record(record)
        if isinstance(record, CampaignStarted):
            self._lengths = record.input_tokens
        line = describe(record, self._lengths)
        if line is not None:
            self.say(line)


class QuietListener(Display):
    """Warnings alone. What was said comes out only before a question, which could not be answered without it."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console or Console(stderr=True, highlight=False, soft_wrap=True))
        self._said: list[str] = []

    def say(self, text: str) -> None:
        """See `Listener`."""
        self._said.append(text)
        del self._said[:-20]

    def confirm(self, question: str) -> bool | None:
        """See `Listener`."""
        for text in self._said:
            self.console.print(Text(folded(text, self.width)))
        return super().confirm(question)


class JsonLines:
    """Each record as one JSON line on `out`, as it stands in the ledger; the rest is another listener's."""

    def __init__(self, inner: Display, to_line: Callable[[AnyRecord], bytes], out: IO[bytes]) -> None:
        self.inner = inner
        self._to_line = to_line
        self._out: IO[bytes] | None = out

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inner.__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        """See `Listener`."""
        self.inner.say(text)

    def warn(self, text: str) -> None:
        """See `Listener`."""
        self.inner.warn(text)

    def confirm(self, question: str) -> bool | None:
        """See `Listener`."""
        return self.inner.confirm(question)

    def planned(self, rows: Sequence[str], blocks: int, earlier: Iterable[AnyRecord] = ()) -> None:
        """See `Listener`."""
        self.inner.planned(rows, blocks, earlier)

    def left(self, rows: Sequence[str]) -> None:
        """See `Listener`."""
        self.inner.left(rows)

    def record(self, record: AnyRecord) -> None:
        """See `Listener`. A reader that went away does not end the campaign; the ledger has every record."""
        self.inner.record(record)
        if self._out is None:
            return
        try:
            self._out.write(self._to_line(record))
            self._out.flush()
        except BrokenPipeError:
            # What is still in the buffer must not fail again when Python closes standard output.
            with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a file descriptor is what is wanted
                os.dup2(nowhere.fileno(), self._out.fileno())
            self._out = None
            self.inner.warn(f"nobody reads the JSON lines any more, after {_name(record)}; the ledger has them all")


def _name(record: AnyRecord) -> str:
    return f"{record.boot}'s {record.kind}" if isinstance(record, BootRecord) else record.kind
