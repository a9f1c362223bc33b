"""The View to files in every format: one module a format says how it looks. A new format is a row of `FORMATS`."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from orchestrator.errors import LedgerError
from orchestrator.report import csv, figures, html, junit, markdown, verdicts_json
from orchestrator.report.model import View

FIGURES = "figures"
LIMIT_S = 120.0
# Written by who draws the pictures: so both cores have about as much to do.
_WITH_PICTURES = {"cells.csv", "boots.csv"}
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
        beside = Beside(lambda: _draw(view, folder))
        _texts(view, folder, FORMATS.keys() - _WITH_PICTURES)
        beside.finish()
    except OSError as error:
        raise LedgerError(f"{folder}: the report cannot be written: {error.strerror}") from error
    drawn = (pictures / f"{name}.png" for name in figures.FIGURES)
    return (*(folder / name for name in FORMATS), *(path for path in drawn if path.exists()))


def _texts(view: View, folder: Path, names: Iterable[str]) -> None:
    for name in names:
        _replace(folder / name, FORMATS[name](view).encode("utf-8"))


def _draw(view: View, folder: Path) -> None:
    """The figures, and none of an earlier report that this one has no data for: it would tell of what is not there."""
    _texts(view, folder, FORMATS.keys() & _WITH_PICTURES)
    pictures, charts = folder / FIGURES, figures.charts(view)
    for chart in charts:
        _replace(pictures / f"{chart.name}.png", chart.png())
    for name in set(figures.FIGURES) - {chart.name for chart in charts}:
        (pictures / f"{name}.png").unlink(missing_ok=True)


class Beside:
    """Work in a process of its own, on another core. What it does must be as good when it is done twice.

    Only by fork, and only where that is safe: what the work needs is too much to be sent.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._process: BaseProcess | None = None
        if sys.platform == "linux":
            self._process = get_context("fork").Process(target=self._alone, daemon=True)
            self._process.start()

    def _alone(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ours are of the process that waits for us
            signal.signal(number, signal.SIG_DFL)
        try:
            self._work()
        except OSError:
            os._exit(1)  # it is told by whom it is done again

    def finish(self) -> None:
        """Waits for it; what it could not do is done here, or says here why not."""
        if self._process is not None:
            self._process.join(LIMIT_S)
            if self._process.exitcode is None:
                self._process.kill()
                self._process.join()
        if self._process is None or self._process.exitcode != 0:
            self._work()


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
