"""verdicts.json: the verdicts as the analysis made them, the very text that `judge --json` prints."""

from __future__ import annotations

from orchestrator import verdict
from orchestrator.report.model import View


def render(view: View) -> str:
    """The whole file, by the analysis's own writer: one format, one place."""
    return verdict.to_json(view.verdicts)
