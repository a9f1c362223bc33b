"""Engines of killed campaigns in other folders: real processes on this machine, known by their folders alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from orchestrator.box import lock
from orchestrator.box.engines import Launch
from orchestrator.box.process import ProcessService
from orchestrator.box.services import make_service
from orchestrator.box.transports import connect
from orchestrator.matrix import BoxSpec
from orchestrator.orphans import end_orphans
from orchestrator.plan import experiments_on

BOX = BoxSpec(name="here", transport="local", service="process", engine="rehearsal", program=(sys.executable,))
ENGINE = Launch((sys.executable, "-c", "import time; time.sleep(60)"), {}, (), 1, "m")


@pytest.fixture
def transport():
    door = connect(BOX)
    yield door
    door.close()


@pytest.fixture
def engine(transport, tmp_path):
    """Starts an engine as a campaign of a folder would, and ends it for sure."""
    begun = []

    def begin(name: str, box: str = "here", experiment: str = "e") -> ProcessService:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps({"box": box, "experiment": experiment}))
        service = make_service(transport, BOX, folder.resolve() / "box")
        begun.append(service)
        service.install(ENGINE)
        service.start()
        assert service.pids()
        return service

    yield begin
    for service in begun:
        service.stop(kill=True, deadline_s=5)


def ended(transport, tmp_path: Path, experiment: str | None = None) -> tuple[str, ...]:
    own = make_service(transport, BOX, tmp_path / "e.3" / "box")
    folders = experiments_on(tmp_path, "here", experiment)
    return end_orphans(transport, BOX, folders, own, holder="me", stop_s=5)


def test_every_generation_of_the_experiment_and_every_other_one_of_the_box_is_ended(transport, engine, tmp_path):
    left = [engine("e"), engine("e.2"), engine("other", experiment="other")]
    elsewhere = engine("far", box="far")
    assert ended(transport, tmp_path) == ("e", "e.2", "other")
    assert [service.pids() for service in left] == [(), (), ()]
    assert elsewhere.pids()
    assert ended(transport, tmp_path) == ()


def test_a_restore_ends_those_of_its_experiment_alone(transport, engine, tmp_path):
    ours, theirs = engine("e.2"), engine("other", experiment="other")
    assert ended(transport, tmp_path, "e") == ("e.2",)
    assert ours.pids() == ()
    assert theirs.pids()


def test_one_whose_campaign_lives_is_left_alone(transport, engine, tmp_path):
    living = engine("e")
    with lock.hold(transport, living.lock_name, "its campaign"):
        assert ended(transport, tmp_path) == ()
        assert living.pids()
    assert ended(transport, tmp_path) == ("e",)


def test_a_damaged_plan_and_a_folder_without_an_engine_are_passed_over(transport, tmp_path):
    for name, text in (("bad", "{"), ("idle", '{"box": "here", "experiment": "e"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(text)
    assert experiments_on(tmp_path, "here") == (tmp_path / "idle",)
    assert ended(transport, tmp_path) == ()
