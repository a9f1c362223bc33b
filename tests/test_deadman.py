"""The script by which a box restores production by itself, run by a real shell with a systemctl that only notes."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.box.deadman import BEAT, FIRED, DeadMan, was_active

SYSTEMCTL = '#!/bin/sh\necho "$*" >>"{log}"\n[ "$1" != "{fails}" ]\n'


class Stage:
    """A box in a directory."""

    def __init__(self, tmp_path: Path, *, unit: str = "v x.service", user: bool = False) -> None:
        self.folder = tmp_path / "drop in.d"
        self.log = tmp_path / "log"
        self.bin = tmp_path / "bin"
        self.bin.mkdir()
        (tmp_path / "run").mkdir()
        self.folder.mkdir()
        ours = (str(self.folder / "zz.conf"), str(self.folder / "zz.env"))
        self.dead = DeadMan(unit, user, str(tmp_path), str(tmp_path / "run"), ours[0], ours)
        for path in (*ours, *self.dead.unit_paths):
            Path(path).write_text("")
        self.systemctl()

    def systemctl(self, fails: str = "never") -> None:
        (self.bin / "systemctl").write_text(SYSTEMCTL.format(log=self.log, fails=fails))
        (self.bin / "systemctl").chmod(0o755)

    def run(self, *, age_s: float | None, active: bool = True, limit_s: float = 60, sweep: str = ":") -> int:
        Path(self.dead.script).write_text(self.dead.script_text(active=active, dead_man_s=limit_s, sweep=sweep))
        if age_s is not None:
            now = float(Path("/proc/uptime").read_text().split()[0])
            Path(self.dead.heart).write_text(f"{now - age_s:.2f}\n")
        self.log.write_text("")
        path = {"PATH": f"{self.bin}:/usr/bin:/bin"}
        return subprocess.run(
            ("sh", self.dead.script), env=path, check=False, timeout=20, capture_output=True
        ).returncode

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()

    def left(self) -> list[str]:
        paths = (*self.dead.ours, *self.dead.unit_paths, self.dead.run, str(self.folder))
        return [path for path in paths if Path(path).exists()]


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_while_the_campaign_lives_nothing_is_done(stage):
    assert stage.run(age_s=50) == 0
    assert stage.calls() == []
    assert len(stage.left()) == 6


def test_after_its_death_the_order_is_kill_stop_drop_in_reload_start_and_away_with_itself(stage):
    assert stage.run(age_s=61) == 0
    assert stage.calls() == [
        "kill -s KILL -- v x.service",
        "stop -- v x.service",
        "daemon-reload",
        "reset-failed -- v x.service",
        "start --no-block -- v x.service",
        "daemon-reload",
        "stop --no-block -- coldboot-restore-v_x.timer",
    ]
    assert stage.left() == []


def test_what_did_not_run_is_not_started(stage):
    stage.run(age_s=61, active=False)
    assert not any(call.startswith("start") for call in stage.calls())
    assert stage.left() == []


def test_without_our_drop_in_production_is_not_stopped_but_started_if_it_ran(stage):
    Path(stage.dead.drop_in).unlink()
    stage.run(age_s=61)
    assert stage.calls()[0] == "start --no-block -- v x.service"


@pytest.mark.parametrize("fails", ["never", "start -- caches.service"])
def test_caches_that_were_set_aside_are_put_back_before_production_starts_whatever_comes_of_it(tmp_path, stage, fails):
    (tmp_path / "caches.service").write_text("")
    stage.dead = replace(stage.dead, put_back=("caches.service", str(tmp_path / "caches.service")))
    (stage.bin / "systemctl").write_text(SYSTEMCTL.replace('"$1"', '"$*"').format(log=stage.log, fails=fails))
    assert stage.run(age_s=61) == 0
    calls = stage.calls()
    assert calls.index("daemon-reload") < calls.index("start -- caches.service")
    assert calls.index("start -- caches.service") < calls.index("start --no-block -- v x.service")
    assert stage.left() == []


def test_our_cold_caches_are_taken_away_once_production_starts(stage, tmp_path):
    stage.run(age_s=50, sweep=f"touch {tmp_path}/swept")
    assert not (tmp_path / "swept").exists()
    stage.run(age_s=61, sweep=f"wc -l <{stage.log} >{tmp_path}/swept")
    assert (tmp_path / "swept").read_text().strip() == "5"
    assert stage.calls()[4].startswith("start --no-block")


def test_a_start_that_fails_is_tried_again_by_the_next_tick(stage):
    stage.systemctl(fails="start")
    assert stage.run(age_s=61) == 1
    assert Path(stage.dead.script).exists()
    stage.systemctl()
    assert stage.run(age_s=70) == 0
    assert stage.left() == []


def test_an_empty_or_missing_heartbeat_is_no_death(stage):
    Path(stage.dead.heart).write_text("")
    assert stage.run(age_s=None) == 0
    Path(stage.dead.heart).unlink()
    assert stage.run(age_s=None) == 0
    assert stage.calls() == []


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_heartbeat_that_is_no_number_is_no_code_for_roots_shell(stage, tmp_path, shell):
    mark = tmp_path / "ran"
    Path(stage.dead.script).write_text(stage.dead.script_text(active=True, dead_man_s=1))
    for text in (f"x[$(touch {mark})]", f"$(touch {mark})", f"`touch {mark}`", "1;touch", "-9999999", "0x1", "a b"):
        Path(stage.dead.heart).write_text(f"{text}\n")
        ended = subprocess.run((shell, stage.dead.script), check=False, timeout=20, capture_output=True).returncode
        assert (ended, mark.exists()) == (0, False), text


def test_a_unit_of_a_users_manager_is_spoken_to_there(tmp_path):
    stage = Stage(tmp_path, user=True)
    stage.run(age_s=61)
    assert all(call.startswith("--user ") for call in stage.calls())


def test_a_beat_writes_the_uptime_and_says_when_the_box_has_restored(stage):
    heart = Path(stage.dead.heart)
    heart.write_text("1\n")
    beat = ("sh", "-c", BEAT, "coldboot", str(heart))
    before = float(Path("/proc/uptime").read_text().split()[0])
    assert subprocess.run(beat, check=False, timeout=5).returncode == 0
    assert before <= float(heart.read_text()) < before + 5
    heart.unlink()
    assert subprocess.run(beat, check=False, timeout=5).returncode == FIRED
    assert not heart.exists()


@pytest.mark.parametrize(("dead_man_s", "every"), [(2, "1s"), (60, "10s"), (900, "30s")])
def test_the_timer_looks_often_enough_and_is_punctual(stage, dead_man_s, every):
    text = stage.dead.timer_text(dead_man_s)
    assert f"OnUnitInactiveSec={every}\n" in text
    assert "AccuracySec=100ms\n" in text


def test_the_script_remembers_whether_production_ran(stage):
    assert was_active(stage.dead.script_text(active=True, dead_man_s=1)) is True
    assert was_active(stage.dead.script_text(active=False, dead_man_s=1)) is False
    assert was_active("") is None
