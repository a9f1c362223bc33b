"""What a person sees while a campaign runs: a live table on a terminal, plain lines with times elsewhere.

Everything here goes to stderr; results go to stdout. `NO_COLOR` is honoured by rich.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.prompt import Confirm
from rich.table import Table
from rich.text import Text

from orchestrator.records import (
    AnyRecord,
    BootEnded,
    BootStarted,
    CampaignEnded,
    JournalAnswered,
    StepEnded,
    TrialEnded,
)

_STYLE = {"completed": "green", "crashed": "red", "not_ready": "red", "disturbed": "yellow", "aborted": "yellow"}
_MARK = {"completed": "✔", "crashed": "✘", "not_ready": "✘", "disturbed": "↻", "aborted": "–"}


class Boots(Protocol):
    """What the display needs of a plan."""

    @property
    def variants(self) -> tuple[str, ...]:
        """In file order."""

    @property
    def blocks(self) -> int:
        """How many blocks are planned."""


class Listener(Protocol):
    """Who is told what a campaign does."""

    def say(self, text: str) -> None:
        """One line that a person should see."""

    def warn(self, text: str) -> None:
        """One line that a person must see."""

    def confirm(self, question: str) -> bool | None:
        """Asks yes or no; None when nobody can be asked."""

    def planned(self, variants: Sequence[str], blocks: int, left: int) -> None:
        """The campaign begins: these variants in this many blocks, `left` boots to go."""

    def record(self, record: AnyRecord) -> None:
        """A record was written."""


def hours(seconds: float) -> str:
    """A duration as a person reads it: `48 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass(slots=True)
class _Pace:
    """How long boots take, for the time that is left: known from the second boot on."""

    left: int = 0
    took: list[float] = field(default_factory=list)

    def ended(self, seconds: float | None, *, counts: bool) -> None:
        if seconds is not None:
            self.took.append(seconds)
        if counts:
            self.left = max(0, self.left - 1)

    @property
    def left_s(self) -> float | None:
        if len(self.took) < 2:
            return None
        return self.left * sum(self.took) / len(self.took)


class _Shared:
    """What both displays do alike."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.pace = _Pace()

    def say(self, text: str) -> None:
        """See `Listener`."""
        self.console.print(Text(text))

    def warn(self, text: str) -> None:
        """See `Listener`."""
        self.console.print(Text(f"WARNING {text}", style="yellow"))

    def planned(self, variants: Sequence[str], blocks: int, left: int) -> None:
        """See `Listener`."""
        del variants, blocks
        self.pace.left = left


def describe(record: AnyRecord) -> str | None:  # noqa: PLR0911 - one line for each kind of record
    """A record as one line; None when it is not worth one."""
    match record:
        case BootStarted():
            return f"{record.boot}: starting ({record.cache})"
        case StepEnded(outcome="ok") if record.name in ("ready", "first_request"):
            return f"{record.boot}: {record.name.replace('_', ' ')} after {record.seconds:.1f} s"
        case StepEnded(outcome="failed") | StepEnded(outcome="disturbed"):
            return f"{record.boot}: {record.name} {record.outcome}: {record.detail}"
        case TrialEnded():
            return f"{record.boot}: {trial_text(record)}"
        case JournalAnswered() if record.answer.outcome != "benign":
            return f"{record.boot}: journal: {record.answer.outcome}, {record.answer.phase}, {record.answer.cause}"
        case BootEnded():
            return f"{record.boot}: {record.boot_outcome}: {record.why}"
        case CampaignEnded():
            return f"campaign {record.outcome}" + (f": {record.why}" if record.why else "")
        case _:
            return None


def trial_text(trial: TrialEnded) -> str:
    """One trial in a few words."""
    if trial.failed:
        errors = ", ".join(f"{count} x {kind}" for kind, count in trial.errors.items())
        return f"at {trial.concurrency}: failed ({errors})"
    if trial.tokens_per_s is None:
        return f"at {trial.concurrency}: not valid ({'; '.join(trial.invalid_reasons)})"
    return f"at {trial.concurrency}: {trial.tokens_per_s:.1f} tok/s"


class PlainListener(_Shared):
    """Lines with times, nothing that moves: for logs, CI and pipes."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console or Console(stderr=True, highlight=False, soft_wrap=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to put away."""

    def say(self, text: str) -> None:
        """See `Listener`."""
        for line in text.splitlines():
            super().say(f"{datetime.now().astimezone():%H:%M:%S} {line}")

    def confirm(self, question: str) -> bool | None:
        """See `Listener`."""
        del question
        return None

    def record(self, record: AnyRecord) -> None:
        """See `Listener`."""
        line = describe(record)
        if isinstance(record, BootEnded):
            self.pace.ended(record.seconds, counts=record.boot_outcome not in ("disturbed", "aborted"))
            left = self.pace.left_s
            line = f"{line} ({self.pace.left} boots left" + ("" if left is None else f", about {hours(left)}") + ")"
        if line is not None:
            self.say(line)


class LiveListener(_Shared):
    """A table of variant × boot that changes in place, with what happens now, elapsed and left."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console or Console(stderr=True, highlight=False))
        self.variants: tuple[str, ...] = ()
        self.blocks = 0
        self.cells: dict[tuple[str, int], Text] = {}
        self.levels: dict[tuple[str, int], list[str]] = {}
        self.current: BootStarted | None = None
        self.now = ""
        self.warning = ""
        self.begun = time.monotonic()
        self.step_begun = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def warn(self, text: str) -> None:
        """See `Listener`."""
        self.warning = text
        super().warn(text)

    def confirm(self, question: str) -> bool | None:
        """See `Listener`."""
        return Confirm.ask(question, console=self.console, default=False)

    def planned(self, variants: Sequence[str], blocks: int, left: int) -> None:
        """See `Listener`."""
        super().planned(variants, blocks, left)
        self.variants, self.blocks = tuple(variants), blocks
        self.begun = time.monotonic()
        self._live = Live(self, console=self.console, refresh_per_second=4)
        self._live.start()

    def record(self, record: AnyRecord) -> None:
        """See `Listener`."""
        self.step_begun = time.monotonic()
        match record:
            case BootStarted():
                self.current, self.now = record, "clean slate"
                self.levels[record.variant, record.block] = []
            case StepEnded():
                self.now = f"after {record.name.replace('_', ' ')}"
            case TrialEnded():
                value = "✘" if record.failed else "?" if record.tokens_per_s is None else f"{record.tokens_per_s:.0f}"
                self.levels.setdefault((record.variant, record.block), []).append(value)
            case BootEnded():
                levels = " ".join(self.levels.get((record.variant, record.block), []))
                mark = f"{_MARK[record.boot_outcome]} {levels or record.why.split(':')[0]}"
                self.cells[record.variant, record.block] = Text(mark, style=_STYLE[record.boot_outcome])
                self.pace.ended(record.seconds, counts=record.boot_outcome not in ("disturbed", "aborted"))
                self.current = None
            case _:
                pass

    def __rich__(self) -> Table:
        """The table as it stands now."""
        table = Table(title=self._headline(), title_justify="left", caption=self._caption(), caption_justify="left")
        table.add_column("variant", no_wrap=True)
        for block in range(1, self.blocks + 1):
            table.add_column(f"boot {block}", no_wrap=True)
        for variant in self.variants:
            table.add_row(variant, *(self._cell(variant, block) for block in range(1, self.blocks + 1)))
        return table

    def _cell(self, variant: str, block: int) -> Text:
        current = self.current
        if current is not None and (current.variant, current.block) == (variant, block):
            levels = " ".join(self.levels.get((variant, block), []))
            return Text(f"▶ {levels} {self.now} {time.monotonic() - self.step_begun:.0f} s", style="bold cyan")
        return self.cells.get((variant, block), Text("·", style="dim"))

    def _headline(self) -> str:
        elapsed = hours(time.monotonic() - self.begun)
        left = self.pace.left_s
        if left is None:
            return f"{elapsed} elapsed, {self.pace.left} boots left"
        end = datetime.now().astimezone() + timedelta(seconds=left)
        return f"{elapsed} elapsed, {self.pace.left} boots left, about {hours(left)} (until {end:%H:%M})"

    def _caption(self) -> str:
        return f"tok/s by level · Ctrl-C stops and restores{' · ' + self.warning if self.warning else ''}"


def make_listener() -> PlainListener | LiveListener:
    """The live table where stderr is a terminal, plain lines elsewhere."""
    return LiveListener() if sys.stderr.isatty() else PlainListener()
