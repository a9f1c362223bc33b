"""report.html: one self-contained page, without scripts and without anything fetched.

The template escapes everything; only the SVGs, which come from `figures`, are put in as they are.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from orchestrator.records import VariantAnswer
from orchestrator.report import canvas, figures, words
from orchestrator.report.model import View

TEMPLATE = "report.html.j2"
MARKS = {"REPRODUCES": "=", "UNDECIDED": "?", "DOES_NOT_REPRODUCE": "≠"}
ICONS: dict[VariantAnswer, str] = {
    "WINNER": "★",
    "CONTENDER": "≈",
    "DOMINATED": "▽",
    "UNDECIDED": "?",
    "REJECTED": "✕",
}


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(marks=MARKS, icons=ICONS, words=words, light=canvas.LIGHT, dark=canvas.DARK)
    return environment


def render(view: View) -> str:
    """The whole page."""
    # `_inline` escapes the one foreign attribute that it writes, and matplotlib escapes the text that it draws.
    charts = {chart.name: [Markup(svg) for svg in chart.svgs()] for chart in figures.charts(view)}  # noqa: S704
    return _environment().get_template(TEMPLATE).render(view=view, charts=charts) + "\n"
