"""The wall: what was recorded stays, whatever happens to the last line."""

from __future__ import annotations

import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import kept
from orchestrator import ledger as ledger_room
from orchestrator.errors import LedgerError
from orchestrator.ledger import Ledger, parse, read, to_line
from orchestrator.records import BootEnded, BootStarted, StepEnded


def started(boot: str = "b01-spec-1") -> BootStarted:
    return BootStarted(boot=boot, variant="spec-1", cache="cold", block=1, position=1)


def ended(boot: str = "b01-spec-1") -> BootEnded:
    return BootEnded(
        boot=boot, variant="spec-1", cache="cold", block=1, position=1, boot_outcome="completed", why="all levels ran"
    )


def test_a_record_is_one_line_with_version_kind_and_time(tmp_path):
    with Ledger(tmp_path / "gwen") as ledger:
        ledger.append(started())
    lines = (tmp_path / "gwen" / "records.jsonl").read_bytes().splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0]) | {"v": 1, "kind": "boot_started", "boot": "b01-spec-1"} == json.loads(lines[0])


def test_what_is_appended_is_read_back_equal(tmp_path):
    with Ledger(tmp_path) as ledger:
        ledger.append(started())
        ledger.append(ended())
    assert read(tmp_path) == (started().model_copy(update={"at": read(tmp_path)[0].at}), read(tmp_path)[1])
    assert [record.kind for record in read(tmp_path)] == ["boot_started", "boot_ended"]


@given(cut=st.integers(min_value=1, max_value=10_000))
def test_a_torn_tail_of_any_length_is_set_aside_and_the_next_record_stands_alone(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("torn")
    whole = to_line(started())
    torn = to_line(ended())
    torn = torn[: max(1, cut % len(torn))]
    (folder / "records.jsonl").write_bytes(whole + torn)
    with Ledger(folder) as ledger:
        assert ledger.set_aside is not None
        assert ledger.set_aside.read_bytes() == torn
        ledger.append(ended("b01-spec-3"))
    assert [record.boot for record in read(folder)] == ["b01-spec-1", "b01-spec-3"]


def test_zeros_after_a_power_cut_are_a_torn_tail(tmp_path):
    (tmp_path / "records.jsonl").write_bytes(to_line(started()) + b"\x00" * 512 + b"\n" + b"\x00" * 9)
    with Ledger(tmp_path) as ledger:
        assert len(ledger.outline) == 1
        assert ledger.set_aside is not None


def test_a_damaged_line_with_records_after_it_is_refused_by_its_number():
    with pytest.raises(LedgerError, match=r"records.jsonl:2: not a record"):
        parse(to_line(started()) + b"{broken}\n" + to_line(ended()))


def test_two_campaigns_cannot_write_to_one_experiment(tmp_path):
    with Ledger(tmp_path), pytest.raises(LedgerError, match="another campaign is writing"):
        Ledger(tmp_path)
    with Ledger(tmp_path):
        pass


def test_a_full_disk_takes_the_half_record_back_and_says_so(tmp_path, monkeypatch):
    with Ledger(tmp_path) as ledger:
        ledger.append(started())
        before = ledger.path.read_bytes()
        real = os.write
        monkeypatch.setattr(ledger_room.os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
        with pytest.raises(LedgerError, match="not kept"):
            ledger.append(ended())
        monkeypatch.undo()
        assert ledger.path.read_bytes() == before
        ledger.append(ended())
    assert len(read(tmp_path)) == 2


def test_steps_are_on_the_disk_but_not_kept_in_memory(tmp_path):
    with Ledger(tmp_path) as ledger:
        ledger.append(started())
        ledger.append(
            StepEnded(
                boot="b01-spec-1",
                variant="spec-1",
                cache="cold",
                block=1,
                position=1,
                name="ready",
                seconds=1.5,
                outcome="ok",
            )
        )
        assert [record.kind for record in ledger.outline] == ["boot_started"]
    assert [record.kind for record in read(tmp_path)] == ["boot_started", "step"]


def test_artefacts_are_private(tmp_path):
    with Ledger(tmp_path / "gwen") as ledger:
        ledger.append(started())
        folder = ledger.boot_folder("b01-spec-1")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "gwen" / "records.jsonl").stat().st_mode) == 0o600


def test_the_outline_keeps_boots_without_their_commands_and_reads_them_so_again(tmp_path):
    begun = started("b01-a").model_copy(update={"command": ("vllm", "serve"), "env": {"A": "1"}})
    with Ledger(tmp_path) as ledger:
        ledger.append(begun)
        assert [(record.boot, record.command, record.env) for record in ledger.outline] == [("b01-a", (), {})]
    with Ledger(tmp_path) as ledger:
        assert [(record.boot, record.command, record.env) for record in ledger.outline] == [("b01-a", (), {})]
    assert read(tmp_path)[0].command == ("vllm", "serve")


def test_a_torn_last_line_is_said_before_anything_is_made_of_the_rest(tmp_path, capsys):
    (tmp_path / "records.jsonl").write_bytes(to_line(started()) + b'{"v":1')
    with pytest.raises(LedgerError, match="no campaign_started"):
        kept.records_of(tmp_path)
    said = " ".join(capsys.readouterr().err.split())
    assert "WARNING" in said
    assert "the last line is no whole record of this version (6 bytes) and is in no number" in said
