"""The report room: verdicts, records and boots' folders to a View, and the View to files in every format.

`view` says what is said. `formats` writes it; it stands apart, since drawing takes a second to load, and most commands
draw nothing.
"""

from __future__ import annotations

from orchestrator.report.model import View
from orchestrator.report.steps import next_steps
from orchestrator.report.text import plain, reasons, table
from orchestrator.report.view import build_view, lost_words

__all__ = ["View", "build_view", "lost_words", "next_steps", "plain", "reasons", "table"]
