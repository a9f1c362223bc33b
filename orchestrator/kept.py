"""Experiments as they lie in `artifacts/`: read for a command, and told apart."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from orchestrator import verdict
from orchestrator.errors import LedgerError, UsageError
from orchestrator.ledger import RECORDS, contents
from orchestrator.options import DEFAULT_MATRIX, DEFAULT_OUT
from orchestrator.outermost import say
from orchestrator.plan import PLAN_FILE, read_plan
from orchestrator.progress import hours
from orchestrator.records import AnyRecord, CampaignStarted, Series, Verdicts
from orchestrator.report import compare as side_by_side

# Counters over a whole trial, warm-up and all: for who looks into the ledger himself, in no verdict and no report.
_UNREAD = ("whole",)


def series_of(folder: Path) -> Series:
    """The series of an experiment; see `records_of`."""
    return records_of(folder)[1]


def records_of(folder: Path) -> tuple[tuple[AnyRecord, ...], Series]:
    """The records of an experiment, and the series that they make.

    Raises:
        LedgerError: they cannot be read, or their beginning is lost.
    """
    plan = read_plan(folder / PLAN_FILE) if (folder / PLAN_FILE).exists() else None
    kept = contents(folder, without=_UNREAD)
    records = kept.records
    if kept.torn:
        say(
            f"WARNING {folder / RECORDS}: the last line is no whole record of this version ({len(kept.torn)} bytes) "
            "and is in no number; the next `matrix` sets it aside"
        )
    if not any(isinstance(record, CampaignStarted) for record in records):
        # Without it nobody knows which box this was, and whether it was a rehearsal.
        raise LedgerError(
            f"{folder / RECORDS}: no campaign_started in it: it is empty, or its beginning is lost",
            hint="the same `matrix` command goes on or begins again; a copy of the file brings it back",
        )
    return records, verdict.series_from_records(records, plan=plan)


def tell_which(folder: Path, series: Series, *, named: bool) -> None:
    """Says on standard error which experiment is read, its box and its age; the newest may be a surprise."""
    age = max(0.0, time.time() - (folder / RECORDS).stat().st_mtime)
    others = len(list(folder.parent.glob(f"*/{RECORDS}")))
    newest = "" if named or others < 2 else f"; the newest of {others} in {folder.parent}, --experiment takes another"
    stamp = ", REHEARSAL" if series.rehearsal else ""
    say(f"experiment {folder.name} on box {series.box}{stamp}, last written {hours(age)} ago{newest}")


def judged(folder: Path) -> Verdicts | None:
    """The verdicts of an experiment as it stands; None before its first record."""
    return verdict.judge(series_of(folder)) if (folder / RECORDS).exists() else None


def experiment(folder: Path, *, tell: bool | None = None) -> side_by_side.Experiment:
    """For a comparison; told where `tell` says whether it was named."""
    records, series = records_of(folder)
    if tell is not None:
        tell_which(folder, series, named=tell)
    return side_by_side.experiment(folder.name, series, records)


def other(out: Path, name: str) -> side_by_side.Experiment | None:
    """The experiment of that name, for a comparison; None where there is none."""
    return experiment(out / name) if (out / name / RECORDS).exists() else None


def ledger_folder(folder: Path) -> Path:
    """The folder, if it holds an experiment.

    Raises:
        UsageError: it does not.
    """
    if not (folder / RECORDS).exists():
        raise UsageError(f"--baseline: there is no {RECORDS} in {folder}", hint="a folder such as artifacts/gwen")
    return folder


def out_again(out: str) -> str:
    """What a further command on the same experiments needs."""
    return "" if out == DEFAULT_OUT else f" --out {shlex.quote(out)}"


def matrix_again(folder: Path) -> str:
    """Nothing where the default file is the one that the experiment keeps; else the reader has to name his."""
    kept, here = folder / "matrix.yaml", Path(DEFAULT_MATRIX)
    same = not kept.exists() or (here.exists() and here.read_bytes() == kept.read_bytes())
    return "" if same else " --matrix FILE"
