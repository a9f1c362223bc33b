"""The live table of a terminal: a row a variant, a column a block of boots, what happens now, and the time left.

It changes in place, twice a second, and never is wider or higher than the terminal: columns that do not fit become
shorter, then the oldest go; rows that do not fit are those far from the boot that runs. Other lines have shorter
wordings, which leave out what matters least: how many boots have ended, the time left and the key stay. Only Ctrl-C is
a key.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.ledger import to_line
from orchestrator.progress import Display, JsonLines, PlainListener, QuietListener, hours, row_of, warning_lines
from orchestrator.records import (
    STEPS,
    AnyRecord,
    BootEnded,
    BootRecord,
    BootStarted,
    CampaignEnded,
    CampaignStarted,
    JournalAnswered,
    StepEnded,
    TrialEnded,
)

_STYLE = {"completed": "green", "crashed": "red", "not_ready": "red", "disturbed": "yellow", "aborted": "yellow"}
_MARK = {"completed": "✔", "crashed": "✘", "not_ready": "✘", "disturbed": "↻", "aborted": "–"}
_ASCII = str.maketrans("✔✘↻–▶·…", "vx~->. ")
_NEXT = dict(zip(STEPS, (*STEPS[1:], "restore"), strict=True))
_GAP = 2
_WARNING_LINES = 5
_KEYS = (
    "Ctrl-C ends this boot and restores; the same command goes on later",
    "Ctrl-C ends and restores; the same command goes on",
    "Ctrl-C ends this boot and restores",
)
_MARKS = ("✔ completed  ✘ died, failed  ↻ repeated  ? not valid", "✔ done ✘ died ↻ again ? not valid")
_COUNTED = ("✔", "✘")


@dataclass(frozen=True, slots=True)
class _Cell:
    """One boot in the table: its mark and each level's value, or why there is none."""

    mark: str
    style: str
    levels: tuple[str, ...] = ()
    why: str = ""

    def text(self, widths: Sequence[int] | None) -> str:
        """The words of the cell: each level as wide as `widths` says; None: only the first and the last."""
        levels = self.levels
        if widths is not None:
            levels = tuple(level.rjust(width) for level, width in zip(levels, widths, strict=False))
        elif len(levels) > 2:
            levels = (f"{levels[0]}…{levels[-1]}",)
        return " ".join((self.mark, *(levels or ((self.why,) if self.why else ()))))


class LiveListener(Display):
    """See the module. Lines that are said scroll by above the table; the last warning stands below it."""

    def __init__(self, console: Console | None = None, *, moving: bool = True) -> None:
        super().__init__(console or Console(stderr=True, highlight=False))
        self._moving = moving
        self._rows: tuple[str, ...] = ()
        self._blocks = 0
        self._cells: dict[tuple[str, int], _Cell] = {}
        self._about: CampaignStarted | None = None
        self._boot: BootRecord | None = None
        self._now = ""
        self._cause: str | None = None
        self._warning = ""
        self._warnings = 0
        self._outcome: str | None = None
        self._begun = self._step_begun = self._boot_begun = time.monotonic()
        self._ended: float | None = None
        self._closed = False
        self._counting = False
        self._live: Live | None = None

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._closed = True
            self._live.stop()
            self._live = None
            if self._warning:
                # Below the frame, which is cut to the terminal: nothing comes any more that it must leave room for.
                self.warn_as(self._label, self._warning)

    # --- being told ------------------------------------------------------------------------------------------------

    def warn(self, text: str) -> None:
        """See `Listener`. The warning before it scrolls up, so that each stands on the screen once."""
        if self._live is None:
            super().warn(text)
            return
        if self._warning:
            super().warn(self._warning)
        self._warning = text
        self._warnings += 1

    def planned(self, rows: Sequence[str], blocks: int, earlier: Iterable[AnyRecord] = ()) -> None:
        """See `Listener`."""
        earlier = tuple(earlier)
        super().planned(rows, blocks, earlier)
        self._rows, self._blocks = tuple(rows), blocks
        for record in earlier:
            self._take(record)
        self._boot = None
        self._outcome, self._ended, self._closed = None, None, False
        self._begun = self._step_begun = time.monotonic()
        if self._moving:
            self._live = Live(self, console=self.console, refresh_per_second=2, transient=False)
            self._live.start()

    def left(self, rows: Sequence[str]) -> None:
        """See `Listener`."""
        super().left(rows)
        self._counting = True

    def record(self, record: AnyRecord) -> None:
        """See `Listener`."""
        super().record(record)
        self._step_begun = time.monotonic()
        self._take(record)

    def _take(self, record: AnyRecord) -> None:
        match record:
            case CampaignStarted():
                self._about = record
            case BootStarted():
                self._begin(record)
            case StepEnded():
                self._now = _following(record)
            case TrialEnded():
                value = "✘" if record.failed else "?" if record.tokens_per_s is None else f"{record.tokens_per_s:.0f}"
                cell = self._cells[self._place(record)]
                self._cells[self._place(record)] = replace(cell, levels=(*cell.levels, value))
            case JournalAnswered():
                self._cause = None if record.answer.outcome == "benign" else record.answer.cause
            case BootEnded():
                self._end(record)
            case CampaignEnded():
                self._outcome, self._ended = record.outcome, time.monotonic()
            case _:
                pass

    def _place(self, record: BootRecord) -> tuple[str, int]:
        place = row_of(record.variant, record.cache), record.block
        self._cells.setdefault(place, _Cell("▶", "bold cyan"))
        return place

    def _begin(self, record: BootStarted) -> None:
        self._boot, self._now, self._cause = record, "clean slate", None
        self._boot_begun = time.monotonic()
        # An adaptive plan adds blocks, and a repeat takes the place of the boot that was disturbed.
        self._blocks = max(self._blocks, record.block)
        row, block = row_of(record.variant, record.cache), record.block
        if row not in self._rows:
            self._rows = (*self._rows, row)
        self._cells[row, block] = _Cell("▶", "bold cyan")

    def _end(self, record: BootEnded) -> None:
        place = self._place(record)
        why = record.boot_outcome if record.boot_outcome != "crashed" else self._cause or "crashed"
        levels = self._cells[place].levels
        self._cells[place] = _Cell(_MARK[record.boot_outcome], _STYLE[record.boot_outcome], levels, why)
        self._boot, self._now = None, ""
        if self._cells[place].mark in _COUNTED:
            self.pace.todo = self.pace.todo[1:]  # it was the first of them, and the next `left` may be a while

    # --- the frame -------------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table as it stands now, for a terminal of this size."""
        width = options.max_width
        # At the end it is drawn once more, whole.
        height = 10_000 if self._closed else options.size.height
        below = [_line((text,), width, style) for text, style in (*self._now_line(width), *self._warning_lines(width))]
        # The cursor stands behind the last line: `^C` that a terminal echoes there must not begin a line of its own.
        below += [_line(choices, width - len("^C") - 1, "dim") for choices in self._legend()]
        room = max(1, height - len(below) - 6)
        lines: list[RenderableType] = [_line(self._headlines(), width, "bold"), self._table(width, room)]
        for line in (*lines, *below):
            if options.ascii_only or options.encoding.lower() not in ("utf-8", "utf8"):
                yield from _in_ascii(line, console, options)
            else:
                yield line

    def _headlines(self) -> Iterator[str]:
        """The first line, ever shorter."""
        about = self._about
        stamp = " (REHEARSAL)" if about is not None and about.rehearsal else ""
        long, short = (
            ("", "") if about is None else (f"{about.experiment} on {about.box}{stamp}", f"{about.experiment}{stamp}")
        )
        spent = hours((self._ended or time.monotonic()) - self._begun)
        if self._outcome is not None:
            told = self._outcome.replace("_", " ")
            yield from (f"{long}: {told} after {spent}", f"{short}: {told} after {spent}", f"{short}: {told}")
            return
        boots, left = self._boots(), self._left_s()
        if not self._counting:
            yield from (f"{long}, {spent}", short)
        elif left is None:
            yield from (f"{long}, {spent}: {boots}", f"{long}: {boots}")
        else:
            until = f", until {datetime.now().astimezone() + timedelta(seconds=left):%H:%M}"
            about_left, bare_left = f"{boots}, about {hours(left)} left", f"{boots}, {hours(left)} left"
            yield from (f"{long}, {spent}: {about_left}{until}", f"{long}, {spent}: {bare_left}{until}")
            yield from (f"{long}: {bare_left}{until}", f"{long}: {bare_left}", f"{short}: {bare_left}", bare_left)
        yield from (f"{short}: {boots}", boots)

    def _boots(self) -> str:
        """`4 of 15 boots`: those that count, of them and those to go."""
        done = sum(cell.mark in _COUNTED for cell in self._cells.values())
        every = done + len(self.pace.todo)
        return f"{done} of {every} boot{'' if every == 1 else 's'}"

    def _left_s(self) -> float | None:
        left = self.pace.left_s
        if left is None or not self.pace.todo:
            return None
        return max(0.0, left - (0.0 if self._boot is None else time.monotonic() - self._boot_begun))

    def _table(self, width: int, room: int) -> RenderableType:
        if not self._rows:
            return Text("")
        rows = self._rows_shown(room)
        widths, first = self._columns(width - _width(self._rows) - _GAP)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP, 0, 0))
        table.add_column("variant", no_wrap=True, overflow="ellipsis")
        shown = range(first, (self._blocks if first == 1 else self._running_block()) + 1)
        for block in shown:
            title = f"boot {block}" if block > first or first == 1 else f"… boot {block}"
            table.add_column(title, no_wrap=True, overflow="ellipsis")
        for row in rows:
            cells = (self._cells.get((row, block)) for block in shown)
            table.add_row(row, *(_shown(cell, widths) for cell in cells))
        if len(rows) < len(self._rows):
            table.add_row(Text(f"… and {len(self._rows) - len(rows)} more", style="dim"))
        return table

    def _rows_shown(self, room: int) -> tuple[str, ...]:
        """Those around the boot that runs, when not all fit."""
        if len(self._rows) <= room:
            return self._rows
        running = 0 if self._boot is None else self._rows.index(row_of(self._boot.variant, self._boot.cache))
        first = min(max(0, running - room // 2), len(self._rows) - room)
        return self._rows[first : first + room]

    def _columns(self, width: int) -> tuple[tuple[int, ...] | None, int]:
        """How wide each level is (None: cells are shortened), and the first block that is shown."""
        cells = tuple(self._cells.values())
        longest = max((len(cell.levels) for cell in cells), default=0)
        widths = tuple(_width("".join(cell.levels[at : at + 1]) for cell in cells) for at in range(longest))
        for choice in (widths, None):
            if sum(self._column_width(block, choice) for block in range(1, self._blocks + 1)) <= width:
                return choice, 1
        first = self._running_block()
        spent = self._column_width(first, None) + len("… ")
        while first > 1 and spent + self._column_width(first - 1, None) <= width:
            first -= 1
            spent += self._column_width(first, None)
        return None, first

    def _running_block(self) -> int:
        """The last block that has begun; later ones are only shown where all fit."""
        return max((block for _, block in self._cells), default=1)

    def _column_width(self, block: int, widths: Sequence[int] | None) -> int:
        cells = (self._cells.get((row, block)) for row in self._rows)
        return _GAP + _width((f"boot {block}", *(cell.text(widths) for cell in cells if cell is not None)))

    def _now_line(self, width: int) -> Iterator[tuple[str, str]]:
        boot = self._boot
        if boot is None or self._outcome is not None:
            yield "", ""
            return
        step, where = self._now, ""
        if step == "trials" and self._about is not None:
            done = len(self._cells[self._place(boot)].levels)
            levels = self._about.levels
            step, where = "after the trials", ""
            if done < len(levels):
                step, where = f"trial at {levels[done]}", f", {done + 1} of {len(levels)}"
        spent = hours(time.monotonic() - self._step_begun)
        yield _fitting((f"▶ {boot.boot}: {step}{where}, {spent}", f"▶ {boot.boot}: {step}, {spent}"), width), "cyan"

    @property
    def _label(self) -> str:
        return "WARNING" if self._warnings == 1 else f"WARNING ({self._warnings} so far)"

    def _warning_lines(self, width: int) -> Iterator[tuple[str, str]]:
        if not self._warning or self._closed:
            return
        lines = warning_lines(self._warning, width, self._label)
        if len(lines) > _WARNING_LINES:
            # What happened stands first and where its journal is last: what is left out was between.
            last = lines[_WARNING_LINES - 2]
            if cell_len(last) > width - 2:
                last = last.rpartition(" ")[0]
            lines = [*lines[: _WARNING_LINES - 2], f"{last} …", lines[-1]]
        for line in lines:
            yield line, "yellow"

    def _legend(self) -> Iterator[tuple[str, ...]]:
        """What the marks mean and the key, each ever shorter."""
        if self._outcome is None and not self._closed:
            levels = "" if self._about is None else " at " + ", ".join(map(str, self._about.levels))
            heads = (f"tok/s{levels} · ", "tok/s · ", "")
            yield tuple(f"{head}{marks}" for head, marks in itertools.product(heads, _MARKS))
            yield _KEYS


def _fitting(choices: Iterable[str], width: int) -> str:
    """The first that fits, else the last, which is the shortest."""
    text = ""
    for text in choices:
        if cell_len(text) <= width:
            break
    return text


def _line(choices: Iterable[str], width: int, style: str) -> Text:
    line = Text(_fitting(choices, width), style=style, no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line


def _following(step: StepEnded) -> str:
    """What runs once a step has ended; a boot settles only before its caches count as warm."""
    if step.outcome not in ("ok", "skipped"):
        return "stop"
    following = _NEXT[step.name]
    return ("render" if following == "settle" and step.cache != "warm" else following).replace("_", " ")


def _shown(cell: _Cell | None, widths: Sequence[int] | None) -> Text:
    return Text("·", style="dim") if cell is None else Text(cell.text(widths), style=cell.style)


def _width(texts: Iterable[str]) -> int:
    return max((cell_len(text) for text in texts), default=0)


def _in_ascii(renderable: RenderableType, console: Console, options: ConsoleOptions) -> RenderResult:
    for segment in console.render(renderable, options):
        yield segment._replace(text=segment.text.translate(_ASCII).encode("ascii", "replace").decode())


def make_listener(*, quiet: bool = False, json_lines: bool = False) -> Display | JsonLines:
    """The live table where stderr is a terminal that can move, plain lines elsewhere; `quiet`: warnings alone."""
    moving = sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal
    # Records and a table that moves would tear each other apart on one screen.
    moving = moving and not (json_lines and sys.stdout.isatty())
    display: Display = QuietListener() if quiet else LiveListener() if moving else PlainListener()
    return JsonLines(display, to_line, sys.stdout.buffer) if json_lines else display
