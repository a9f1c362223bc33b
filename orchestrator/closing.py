"""What is said at a campaign's end: where the report is, and what to do next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from orchestrator.records import Verdicts

ENOUGH_TO_VOUCH = 6


def program() -> str:
    """The word before a task's name, as this process was called: `invoke` in a checkout, `coldboot` elsewhere."""
    return "coldboot" if Path(sys.argv[0]).stem == "coldboot" else "invoke"


def next_steps(verdicts: Verdicts, folder: Path, options: str = "", *, boots_left: int = 0) -> Iterator[str]:
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
    rejected = [one.name for one in verdicts.variants if one.verdict == "REJECTED"]
    if rejected:
        explain = f"{tool} report --experiment {folder.name}{options} --explain {rejected[0]}"
        yield f"why {rejected[0]} is rejected: {explain}"
    if boots_left:
        yield f"{boots_left} boots are left: the same command goes on"
        return
    open_ = ("WINNER", "CONTENDER", "UNDECIDED")
    booted = [one for one in verdicts.variants if one.verdict in open_ and one.boots > 0]
    if booted and min(one.boots for one in booted) < ENOUGH_TO_VOUCH and verdicts.plan == "fixed":
        why = f"{verdicts.winner} is provisional" if verdicts.winner else "nothing is decided"
        wanted = max(one.boots + (cell.more_boots or 0) for one in booted for cell in one.cells)
        yield f"{why}: the same command with --boots {max(wanted, ENOUGH_TO_VOUCH)} adds the boots that vouching needs"
