"""What is said at a campaign's end: where the report is, and what to do next."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.records import AnyRecord, Verdicts
from orchestrator.report.steps import Again, next_steps

_OURS = re.compile(r"\binvoke (?=[a-z][a-z-]+\b)")


def program() -> str:
    """The word before a task's name, as this process was called: `invoke` in a checkout, `coldboot` elsewhere."""
    return "coldboot" if Path(sys.argv[0]).stem == "coldboot" else "invoke"


def spoken(text: str) -> str:
    """Commands of ours in a text as this process was called: advice is written with `invoke`."""
    return text if program() == "invoke" else _OURS.sub(f"{program()} ", text)


def again(options: str = "", campaign: str = "") -> Again:
    """How this process was called, and what the same commands need again: of every command, and of `matrix` besides."""
    return Again(program(), options, campaign)


def campaign_end(
    verdicts: Verdicts, folder: Path, how: Again, *, records: Sequence[AnyRecord] = (), boots_left: int = 0
) -> Iterator[str]:
    """Lines for the end of a campaign.

    Args:
        verdicts: What the boots so far say.
        folder: The experiment's folder.
        how: How this process was called.
        records: The ledger's, for how long boots take.
        boots_left: Planned boots that are still to go.
    """
    yield f"ledger: {folder}/records.jsonl; the report goes to {folder}/report/report.html"
    yield f"next: {how.tool} report --experiment {folder.name}{how.options}"
    for step in next_steps(verdicts, folder.name, how, records=records, boots_left=boots_left):
        yield f"{step.text}: {step.command}" if step.command else step.text
