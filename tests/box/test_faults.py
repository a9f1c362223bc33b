"""Production comes back and nothing is lost, whatever breaks at whatever place of a campaign; see faults.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import faults
import pytest
from faults import FAULTS, PLACES, Fault, World

from orchestrator.box.services import make_service
from orchestrator.box.ssh import SshTransport
from orchestrator.box.sshconfig import hop
from orchestrator.matrix import load_matrix

QUICK = {
    ("cold", "kill -9, dead man", "clean_slate"),
    ("cold", "kill -9, torn ledger", "trials"),
    ("cold", "ssh lost for 1 s", "trials"),
    ("cold", "power cut of the box", "first_request"),
    ("cold", "our disk is full", "sanity"),
    ("cold", "stopped by somebody", "headroom"),
    ("cold", "SIGSTOP of the engine", "first_request"),
    ("clear", "power cut of the box", "trials"),
}
CELLS = [
    pytest.param(
        caches,
        place,
        fault,
        id=f"{caches}-{place}-{fault.name}",
        marks=() if (caches, fault.name, place) in QUICK else pytest.mark.faults,
    )
    for caches in ("cold", "clear")
    for fault in FAULTS
    for place in PLACES
    if place in fault.walked(caches)
]


@pytest.fixture(scope="module")
def stage(box, tmp_path_factory) -> Iterator[World]:
    """The box with production and a way to it."""
    folder = tmp_path_factory.mktemp("stage")
    wire = faults.Wire(box.port)
    with faults.own_disk(box), faults.production(box):
        world = World(box, wire, folder, folder, ())
        # From its third start on an engine writes nothing any more.
        for _ in range(3):
            box.sh(("systemctl", "restart", faults.UNIT))
            faults.await_true(world.serves, 60, "production")
        world.before = world.effective()
        world.write()
        transport = SshTransport(hop(box.alias, config=box.ssh_config))
        service = make_service(transport, load_matrix(folder / "matrix.yaml").target, folder / "state")
        service.describe()
        box.write_sudoers(service.sudo_lines())
        transport.close()
        yield world
    box.write_sudoers(())
    wire.close()


@pytest.fixture(scope="module")
def bake(stage: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    """An experiment whose first boot is finished, for a kind of caches; made once."""

    @cache
    def made(caches: str) -> World:
        folder = tmp_path_factory.mktemp("baked")
        world = replace(stage, folder=folder, disk=folder, cache=caches)
        world.write()
        world.start(1)
        assert world.wait() == 0, world.tail()
        return world

    return made


@pytest.fixture
def world(bake: Callable[[str], World], caches: str, tmp_path: Path) -> Iterator[World]:
    baked = bake(caches)
    with faults.small_disk(tmp_path / "disk") as disk:
        made = replace(baked, folder=tmp_path, disk=disk, process=None)
        faults.copy_experiment(baked.out, made.out)
        yield made
        # What a failed cell left must not spoil the next one.
        if made.process is not None and made.process.poll() is None:
            made.process.kill()
            made.process.wait(10)
        made.wire.mend()
        _clean(made)


def _clean(world: World) -> None:
    box = world.box
    box.sh(("rm", "-f", f"{faults.CACHES}/filler", f"{faults.OWN}/filler"), check=False)
    if world.left():
        box.reboot(cut=True)
        faults.await_true(world.serves, 60, "production")


def note(world: World, place: str, fault: Fault, outcome: str) -> None:
    path = os.environ.get("COLDBOOT_FAULTS")
    if path:
        row = {"cache": world.cache, "place": place, "fault": fault.name, "outcome": outcome}
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("caches", "place", "fault"), CELLS)
def test_whatever_breaks_production_comes_back_and_nothing_is_lost(world, place, fault):
    try:
        outcome = faults.run_cell(world, place, fault)
    except AssertionError as error:
        note(world, place, fault, "FAILED: " + str(error).splitlines()[0][:120])
        raise
    note(world, place, fault, outcome)
