"""Verdicts for a terminal: the table of numbers at a campaign's end, and the reasons where a report was made."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.records import CacheState, CellVerdict, Level, VariantAnswer, VariantVerdict, Verdicts
from orchestrator.report import words

_STYLES: dict[VariantAnswer, str] = {
    "WINNER": "bold green",
    "CONTENDER": "cyan",
    "DOMINATED": "",
    "UNDECIDED": "yellow",
    "REJECTED": "red",
}


Lost = Mapping[tuple[str, CacheState, Level], str]
"""What stands where a cell has no value, as `died`: variant, cache state, level → word."""


def table(verdicts: Verdicts, lost: Lost | None = None) -> RenderableType:
    """The verdicts as something that rich prints: one row a variant, the reasons, and the answer in a sentence.

    Fits into 80 columns with four levels: boots that do not reproduce stand below each other, reasons below the table.
    With several prompt lengths a variant has a row for each.
    """
    lost = lost or {}
    levels = sorted({cell.level for variant in verdicts.variants for cell in variant.cells})
    lengths = list(dict.fromkeys(level.input_tokens for level in levels)) or [None]
    prompts = lengths != [None]
    several = len({cell.cache for variant in verdicts.variants for cell in variant.cells}) > 1
    ranked = words.by_rank(verdicts.variants)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("variant", overflow="fold")
    grid.add_column("verdict")  # the first to be wrapped where it is narrow, at its words
    if prompts:
        grid.add_column("prompt", justify="right", no_wrap=True)
    streams = sorted({level.concurrency for level in levels})
    for count in streams:
        grid.add_column(f"tok/s\nat {count}", justify="right")
    grid.add_column("boots", justify="right", no_wrap=True)
    for variant in ranked:
        # Names come from files: Text, because a plain string would be read as markup.
        rows = [
            [_cells(_at(variant, Level(count, length), lost), several=several) for count in streams]
            for length in lengths
        ]
        died = f", {variant.boots_failed} died" if variant.boots_failed else ""
        answer = Text(words.answer(variant), style=_STYLES[variant.verdict])
        if variant.verdict == "WINNER" and verdicts.provisional:
            answer.append("\nprovisional", style="dim")
        told = [[Text("–" if length is None else f"{length}")] if prompts else [] for length in lengths]
        ends = [Text(f"{variant.boots}{died}"), *(Text("") for _ in rows[1:])]
        heads = [(Text(words.clean(variant.name)), answer), *((Text(""), Text("")) for _ in rows[1:])]
        for head, prompt, cells, end in zip(heads, told, rows, ends, strict=True):
            grid.add_row(*head, *prompt, *cells, end)
    stamp = [Text(f"{words.REHEARSAL}: {words.REHEARSAL_SENTENCE}", style="bold yellow")] if verdicts.rehearsal else []
    against = "concurrency and prompt tokens" if prompts else "concurrency"
    unit = Text(f"tok/s against {against}; boots that do not reproduce stand one by one", style="dim")
    reasons = [
        Text(words.clean(f"{variant.name}: {', '.join(variant.reasons)}"), style=_STYLES[variant.verdict])
        for variant in ranked
        if variant.reasons
    ]
    notes = [Text(words.clean(f"Note: {note}."), style="yellow") for note in verdicts.notes]
    return Group(*stamp, grid, unit, Text(""), *reasons, Text(""), Text(words.clean(verdicts.sentence)), *notes)


def _at(variant: VariantVerdict, level: Level, lost: Lost) -> list[tuple[CellVerdict, str | None]]:
    """The cells of one level with the words for those that have no value."""
    cells = (cell for cell in variant.cells if cell.level == level)
    return [(cell, lost.get((variant.name, cell.cache, level))) for cell in cells]


def _cells(cells: list[tuple[CellVerdict, str | None]], *, several: bool) -> Text:
    said = Text(justify="right")
    for cell, lost in cells:
        if len(said):
            said.append("\n")
        values = words.one_by_one([value for value in cell.by_boot if value is not None])
        if cell.reproducibility == "DOES_NOT_REPRODUCE":
            said.append("\n".join(values), style="red")
        elif cell.estimate is None and lost is not None:
            said.append(lost, style="red")
        else:
            said.append(words.number(cell.estimate))
        # What was measured warm must never look like a cold boot's number.
        if several and cell.cache != "cold" and values:
            said.append(f" {cell.cache}", style="dim")
    return said if len(said) else Text(words.ABSENT)


def reasons(verdicts: Verdicts) -> RenderableType:
    """One row a variant: its verdict and why, in a sentence. The numbers are in `table`."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("variant", overflow="fold")
    grid.add_column("verdict", no_wrap=True)
    grid.add_column("why", overflow="fold")
    for variant in words.by_rank(verdicts.variants):
        answer = Text(words.answer(variant), style=_STYLES[variant.verdict])
        if variant.verdict == "WINNER" and verdicts.provisional:
            answer.append("\nprovisional", style="dim")
        grid.add_row(Text(words.clean(variant.name)), answer, Text(words.why(variant)))
    stamp = [Text(f"{words.REHEARSAL}: {words.REHEARSAL_SENTENCE}", style="bold yellow")] if verdicts.rehearsal else []
    notes = [Text(words.clean(f"Note: {note}."), style="yellow") for note in verdicts.notes]
    return Group(*stamp, grid, *notes)


def plain(verdicts: Verdicts, width: int = 120, lost: Lost | None = None) -> str:
    """The table without colour, for a log."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(table(verdicts, lost))
    return capture.get()
