"""What is said at a campaign's end: where the report is, and what to do next."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.progress import wrapped
from orchestrator.records import AnyRecord, Verdicts
from orchestrator.report.steps import Again, next_steps

_OURS = re.compile(r"\binvoke (?=[a-z][a-z-]+\b)")


def program() -> str:
    """The word before a task's name, as this process was called: `invoke` in a checkout, `coldboot` elsewhere."""
    return "coldboot" if Path(sys.argv[0]).stem == "coldboot" else "invoke"


def spoken(text: str) -> str:
    """Commands of ours in a text as this process was called: advice is written with `invoke`."""
    return text if program() == "invoke" else _OURS.sub(f"{program()} ", text)


def given(**options: str | bool | None) -> str:
    """Options as they were given, with a leading blank; nothing of those that were not."""
    said = ((name, "" if value is True else f" {shlex.quote(str(value))}") for name, value in options.items() if value)
    return "".join(f" --{name}{value}" for name, value in said)


def again(options: str = "", campaign: str = "", same: str = "") -> Again:
    """How this process was called, and what further commands need again; see `Again`."""
    return Again(program(), options, campaign, same)


def campaign_end(
    verdicts: Verdicts,
    folder: Path,
    how: Again,
    *,
    records: Sequence[AnyRecord] = (),
    boots_left: int = 0,
    width: int | None = None,
) -> Iterator[str]:
    """Lines for the end of a campaign. Paths and commands stand on lines of their own, whole, to be copied.

    Args:
        verdicts: What the boots so far say.
        folder: The experiment's folder.
        how: How this process was called.
        records: The ledger's, for how long boots take.
        boots_left: Planned boots that are still to go.
        width: Columns of the terminal, at which reasons are wrapped; None: nothing is.
    """
    told = [
        ("the ledger", f"{folder}/records.jsonl"),
        ("the report goes to", f"{folder}/report/report.html"),
        ("next", f"{how.tool} report --experiment {folder.name}{how.options}"),
    ]
    steps = next_steps(verdicts, folder.name, how, records=records, boots_left=boots_left)
    for text, command in (*told, *((step.text, step.command) for step in steps)):
        yield from wrapped(f"{text}:" if command else text, width)
        if command:
            yield f"  {command}"
