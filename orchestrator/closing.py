"""What is said at a campaign's end: where the report is, and what to do next."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from orchestrator.records import Verdicts
from orchestrator.report.steps import next_steps

_OURS = re.compile(r"\binvoke (?=[a-z][a-z-]+\b)")


def program() -> str:
    """The word before a task's name, as this process was called: `invoke` in a checkout, `coldboot` elsewhere."""
    return "coldboot" if Path(sys.argv[0]).stem == "coldboot" else "invoke"


def spoken(text: str) -> str:
    """Commands of ours in a text as this process was called: advice is written with `invoke`."""
    return text if program() == "invoke" else _OURS.sub(f"{program()} ", text)


def campaign_end(verdicts: Verdicts, folder: Path, options: str = "", *, boots_left: int = 0) -> Iterator[str]:
    """Lines for the end of a campaign.

    Args:
        verdicts: What the boots so far say.
        folder: The experiment's folder.
        options: What the same command needs again, such as ` --out DIR`, with its leading blank.
        boots_left: Planned boots that are still to go.
    """
    tool = program()
    yield f"ledger: {folder}/records.jsonl; the report goes to {folder}/report/report.html"
    yield f"next: {tool} report --experiment {folder.name}{options}"
    for step in next_steps(verdicts, folder.name, tool=tool, options=options, boots_left=boots_left):
        yield f"{step.text}: {step.command}" if step.command else step.text
