"""The View to files in every format: one module a format says how it looks. A new format is a row of `FORMATS`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from orchestrator.errors import LedgerError
from orchestrator.report import csv, figures, html, junit, markdown, verdicts_json
from orchestrator.report.model import View

FIGURES = "figures"
FORMATS: Mapping[str, Callable[[View], str]] = {
    "verdicts.json": verdicts_json.render,
    "report.md": markdown.render,
    "report.html": html.render,
    "junit.xml": junit.render,
    "cells.csv": csv.render,
    "boots.csv": csv.render_boots,
}


def write(view: View, folder: Path) -> tuple[Path, ...]:
    """Writes every format and every figure into `folder`; each file is whole or as it was before.

    Returns:
        The files, in the order of `FORMATS`, then the figures.

    Raises:
        LedgerError: the folder cannot be written.
    """
    pictures = folder / FIGURES
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        written = [_replace(folder / name, render(view).encode("utf-8")) for name, render in FORMATS.items()]
        drawn = [_replace(pictures / f"{chart.name}.png", chart.png()) for chart in figures.charts(view)]
        # A picture of an earlier report that this one has no data for would tell of what is not there.
        for name in figures.FIGURES:
            if pictures / f"{name}.png" not in drawn:
                (pictures / f"{name}.png").unlink(missing_ok=True)
    except OSError as error:
        raise LedgerError(f"{folder}: the report cannot be written: {error.strerror}") from error
    return (*written, *drawn)


def _replace(path: Path, data: bytes) -> Path:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp makes private files; a report is for whoever may read its folder.
        partial.chmod(0o644)
        return partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
