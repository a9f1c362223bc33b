"""Production comes back and nothing is lost, whatever breaks at whatever place of a campaign; see faults.py."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import faults
import pytest
from faults import FAULTS, PLACES, Fault, World

from orchestrator.box.services import make_service
from orchestrator.box.ssh import SshTransport
from orchestrator.box.sshconfig import hop
from orchestrator.matrix import load_matrix

QUICK = {
    ("kill -9, dead man", "clean_slate"),
    ("kill -9, torn ledger", "trials"),
    ("ssh lost for 1 s", "trials"),
    ("power cut of the box", "first_request"),
    ("our disk is full", "sanity"),
    ("stopped by somebody", "headroom"),
    ("SIGSTOP of the engine", "first_request"),
}
CELLS = [
    pytest.param(
        place,
        fault,
        id=f"{place}-{fault.name}",
        marks=() if (fault.name, place) in QUICK else pytest.mark.faults,
    )
    for fault in FAULTS
    for place in PLACES
    if place in fault.places
]


@pytest.fixture(scope="module")
def stage(box, tmp_path_factory) -> Iterator[World]:
    """The box with production and a way to it, and an experiment whose first boot is finished."""
    folder = tmp_path_factory.mktemp("stage")
    wire = faults.Wire(box.port)
    with faults.production(box):
        world = World(box, wire, folder, folder, ())
        faults.await_true(world.serves, 60, "production")
        world.before = world.effective()
        world.write()
        transport = SshTransport(hop(box.alias, config=box.ssh_config))
        service = make_service(transport, load_matrix(folder / "matrix.yaml").target, folder / "state")
        service.describe()
        box.write_sudoers(service.sudo_lines())
        transport.close()
        world.start(1)
        assert world.wait() == 0, world.tail()
        yield world
    box.write_sudoers(())
    wire.close()


@pytest.fixture
def world(stage: World, tmp_path: Path) -> Iterator[World]:
    with faults.small_disk(tmp_path / "disk") as disk:
        made = World(stage.box, stage.wire, tmp_path, disk, stage.before)
        faults.copy_experiment(stage.out, made.out)
        yield made
        # What a failed cell left must not spoil the next one.
        if made.process is not None and made.process.poll() is None:
            made.process.kill()
            made.process.wait(10)
        stage.wire.mend()
        _clean(stage)


def _clean(stage: World) -> None:
    box = stage.box
    box.sh(("rm", "-f", f"{faults.CACHES}/filler"), check=False)
    if stage.left():
        box.reboot(cut=True)
        faults.await_true(stage.serves, 60, "production")


def note(place: str, fault: Fault, outcome: str) -> None:
    path = os.environ.get("COLDBOOT_FAULTS")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps({"place": place, "fault": fault.name, "outcome": outcome}) + "\n")


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("place", "fault"), CELLS)
def test_whatever_breaks_production_comes_back_and_nothing_is_lost(world, place, fault):
    try:
        outcome = faults.run_cell(world, place, fault)
    except AssertionError as error:
        note(place, fault, "FAILED: " + str(error).splitlines()[0][:120])
        raise
    note(place, fault, outcome)
