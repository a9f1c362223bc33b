"""The verdict for CI: three answers with their exit codes."""

from __future__ import annotations

from orchestrator.errors import FAIL, OK, UNDECIDED
from orchestrator.records import Verdicts


def judge_production(verdicts: Verdicts) -> tuple[int, str]:
    """Exit code and sentence on the production setting.

    5 when it is REJECTED or DOMINATED; 0 when it is WINNER or CONTENDER and all its cells are REPRODUCES; else 2.
    """
    stamp = "REHEARSAL: " if verdicts.rehearsal else ""
    name = verdicts.production
    found = next((variant for variant in verdicts.variants if variant.name == name), None)
    if found is None:
        return UNDECIDED, f"{stamp}UNDECIDED: no variant is production's own setting, so there is nothing to judge"
    if found.verdict in ("REJECTED", "DOMINATED"):
        return FAIL, f"{stamp}FAIL: production ({name}) is {found.verdict}: {found.sentence}"
    vouched = bool(found.cells) and all(cell.reproducibility == "REPRODUCES" for cell in found.cells)
    if found.verdict in ("WINNER", "CONTENDER") and vouched:
        return OK, f"{stamp}PASS: production ({name}) is {found.verdict}: {found.sentence}"
    return UNDECIDED, f"{stamp}UNDECIDED: production ({name}) is {found.verdict}: {found.sentence}"
