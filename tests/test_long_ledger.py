"""What a long ledger costs has a shape: it is read once a command, and what no report shows is not made."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from invoke.context import Context

from orchestrator import commands, ledger
from orchestrator.records import BootStarted, TrialEnded

EVIDENCE = Path(__file__).parent.parent / "docs" / "evidence" / "h200"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An artefacts folder with the H200 experiment."""
    folder = tmp_path / "h200"
    folder.mkdir()
    for name in ("records.jsonl", "plan.json", "matrix.yaml"):
        shutil.copy(EVIDENCE / name, folder / name)
    return tmp_path


@pytest.mark.parametrize("name", ["report_", "gate"])
def test_a_command_reads_the_ledger_once(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    parse = ledger._parse  # the one place where lines become records

    def counted(file: BinaryIO, path: str, *more: Any) -> ledger.Contents:
        read.append(path)
        return parse(file, path, *more)

    monkeypatch.setattr(ledger, "_parse", counted)
    with suppress(SystemExit):  # the gate's answer
        getattr(commands, name).body(Context(), experiment="h200", out=str(out))
    assert read == [str(out / "h200" / "records.jsonl")]


def test_what_is_left_out_is_as_never_written_and_all_else_is_the_same(out: Path) -> None:
    whole, lean = ledger.contents(out / "h200"), ledger.contents(out / "h200", without=("whole",))
    assert (len(lean.records), lean.whole_bytes, lean.torn) == (len(whole.records), whole.whole_bytes, b"")
    trials = [record for record in whole.records if isinstance(record, TrialEnded)]
    assert any(trial.whole is not None for trial in trials)
    for record, less in zip(whole.records, lean.records, strict=True):
        assert less == (record.model_copy(update={"whole": None}) if isinstance(record, TrialEnded) else record)


def test_a_line_that_is_no_object_is_a_torn_tail_there_too(out: Path) -> None:
    path = out / "h200" / "records.jsonl"
    with path.open("ab") as file:
        file.write(b"[1, 2]\n\0\0")
    found = ledger.contents(out / "h200", without=("whole",))
    assert found.torn == b"[1, 2]\n\0\0"
    assert found.whole_bytes == path.stat().st_size - 9
    assert any(isinstance(record, BootStarted) for record in found.records)
