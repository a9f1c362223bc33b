"""Verdicts for a terminal: the table of numbers at a campaign's end, and the reasons where a report was made."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.records import CacheState, CellVerdict, VariantAnswer, VariantVerdict, Verdicts
from orchestrator.report import words

_STYLES: dict[VariantAnswer, str] = {
    "WINNER": "bold green",
    "CONTENDER": "cyan",
    "DOMINATED": "",
    "UNDECIDED": "yellow",
    "REJECTED": "red",
}


Lost = Mapping[tuple[str, CacheState, int], str]
"""What stands where a cell has no value, as `died`: variant, cache state, concurrency → word."""


def table(verdicts: Verdicts, lost: Lost | None = None) -> RenderableType:
    """The verdicts as something that rich prints: one row a variant, the reasons, and the answer in a sentence.

    Fits into 80 columns with four levels: boots that do not reproduce stand below each other, reasons below the table.
    """
    lost = lost or {}
    levels = sorted({cell.concurrency for variant in verdicts.variants for cell in variant.cells})
    several = len({cell.cache for variant in verdicts.variants for cell in variant.cells}) > 1
    ranked = words.by_rank(verdicts.variants)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("variant", overflow="fold")
    grid.add_column("verdict", no_wrap=True)
    for level in levels:
        grid.add_column(f"at {level}", justify="right")
    grid.add_column("boots", justify="right", no_wrap=True)
    for variant in ranked:
        # Names come from files: Text, because a plain string would be read as markup.
        cells = (_cells(_at(variant, level, lost), several=several) for level in levels)
        died = f", {variant.boots_failed} died" if variant.boots_failed else ""
        answer = Text(variant.verdict, style=_STYLES[variant.verdict])
        if variant.verdict == "WINNER" and verdicts.provisional:
            answer.append("\nprovisional", style="dim")
        grid.add_row(Text(words.clean(variant.name)), answer, *cells, Text(f"{variant.boots}{died}"))
    stamp = [Text(f"{words.REHEARSAL}: {words.REHEARSAL_SENTENCE}", style="bold yellow")] if verdicts.rehearsal else []
    unit = Text("tok/s against concurrency; boots that do not reproduce stand one by one", style="dim")
    reasons = [
        Text(words.clean(f"{variant.name}: {', '.join(variant.reasons)}"), style=_STYLES[variant.verdict])
        for variant in ranked
        if variant.reasons
    ]
    notes = [Text(words.clean(f"Note: {note}."), style="yellow") for note in verdicts.notes]
    return Group(*stamp, grid, unit, Text(""), *reasons, Text(""), Text(words.clean(verdicts.sentence)), *notes)


def _at(variant: VariantVerdict, level: int, lost: Lost) -> list[tuple[CellVerdict, str | None]]:
    """The cells of one level with the words for those that have no value."""
    cells = (cell for cell in variant.cells if cell.concurrency == level)
    return [(cell, lost.get((variant.name, cell.cache, level))) for cell in cells]


def _cells(cells: list[tuple[CellVerdict, str | None]], *, several: bool) -> Text:
    said = Text(justify="right")
    for cell, lost in cells:
        if len(said):
            said.append("\n")
        values = [words.number(value) for value in cell.by_boot if value is not None]
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
        answer = Text(variant.verdict, style=_STYLES[variant.verdict])
        if variant.verdict == "WINNER" and verdicts.provisional:
            answer.append("\nprovisional", style="dim")
        why = words.clean(variant.sentence).removeprefix(f"{words.clean(variant.name)} ")
        why = why.removeprefix(f"is {variant.verdict.lower()}: ")
        grid.add_row(Text(words.clean(variant.name)), answer, Text(why))
    stamp = [Text(f"{words.REHEARSAL}: {words.REHEARSAL_SENTENCE}", style="bold yellow")] if verdicts.rehearsal else []
    notes = [Text(words.clean(f"Note: {note}."), style="yellow") for note in verdicts.notes]
    return Group(*stamp, grid, *notes)


def plain(verdicts: Verdicts, width: int = 120, lost: Lost | None = None) -> str:
    """The table without colour, for a log."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(table(verdicts, lost))
    return capture.get()
