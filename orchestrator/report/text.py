"""The verdict table for a terminal, at the end of `invoke matrix` and `invoke report`."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.records import CellVerdict, VariantAnswer, Verdicts
from orchestrator.report import words

_STYLES: dict[VariantAnswer, str] = {
    "WINNER": "bold green",
    "CONTENDER": "cyan",
    "DOMINATED": "",
    "UNDECIDED": "yellow",
    "REJECTED": "red",
}


def table(verdicts: Verdicts) -> RenderableType:
    """The verdicts as something that rich prints: one row a variant, the reasons, and the answer in a sentence.

    Fits into 80 columns with four levels: boots that do not reproduce stand below each other, reasons below the table.
    """
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
        cells = (
            _cells([one for one in variant.cells if one.concurrency == level], several=several) for level in levels
        )
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


def _cells(cells: list[CellVerdict], *, several: bool) -> Text:
    said = Text(justify="right")
    for cell in cells:
        if len(said):
            said.append("\n")
        values = [words.number(value) for value in cell.by_boot if value is not None]
        if cell.reproducibility == "DOES_NOT_REPRODUCE":
            said.append("\n".join(values), style="red")
        else:
            said.append(words.number(cell.estimate))
        # What was measured warm must never look like a cold boot's number.
        if several and cell.cache != "cold" and values:
            said.append(f" {cell.cache}", style="dim")
    return said if len(said) else Text(words.ABSENT)


def plain(verdicts: Verdicts, width: int = 120) -> str:
    """The same without colour, for a log."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(table(verdicts))
    return capture.get()
