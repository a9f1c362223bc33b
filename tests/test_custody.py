"""The box in our hands, with a made-up box: lost, taken again, refused, given up, given back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import custody as room
from orchestrator.box.engines import Launch
from orchestrator.box.unit import UnitFacts, UnitState
from orchestrator.custody import Custody, prove_back
from orchestrator.errors import BoxBusy, BoxError, ExperimentChanged, RestoreFailed, Unreachable, UsageError
from orchestrator.interrupts import Interrupts
from orchestrator.matrix import Deadlines
from orchestrator.records import ProductionState
from orchestrator.survey import Site

COMMAND = ("vllm", "serve")
UNIT = UnitFacts("v.service", exists=True, argv=COMMAND, env={}, user="me", home="/h", active=True, enabled=True)
LAUNCH = Launch((*COMMAND, "--x"), {}, (), 18080, "m")


def test_the_api_key_comes_from_the_environment_or_from_a_private_file(tmp_path, monkeypatch):
    monkeypatch.delenv("COLDBOOT_API_KEY", raising=False)
    monkeypatch.delenv("COLDBOOT_API_KEY_FILE", raising=False)
    assert room.api_key() is None
    file = tmp_path / "key"
    file.write_text("sk-from-file\n")
    file.chmod(0o644)
    monkeypatch.setenv("COLDBOOT_API_KEY_FILE", str(file))
    with pytest.raises(UsageError, match="can be read by others") as refused:
        room.api_key()
    assert "sk-from-file" not in str(refused.value)
    file.chmod(0o600)
    assert room.api_key() == "sk-from-file"
    monkeypatch.setenv("COLDBOOT_API_KEY", "sk-from-env")
    assert room.api_key() == "sk-from-env"
    monkeypatch.delenv("COLDBOOT_API_KEY")
    file.write_text(" \n")
    with pytest.raises(UsageError, match="is empty"):
        room.api_key()
    monkeypatch.setenv("COLDBOOT_API_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="cannot be read"):
        room.api_key()


@dataclass
class World:
    """What the made-up box does, and what was done to it."""

    beats: list[BoxError | None] = field(default_factory=list)
    connects: list[BoxError | None] = field(default_factory=list)
    locks: list[BoxError | None] = field(default_factory=list)
    unit: UnitFacts = UNIT
    done: list[str] = field(default_factory=list)

    def act(self, name: str, plan: list[BoxError | None]) -> None:
        self.done.append(name)
        error = plan.pop(0) if plan else None
        if error is not None:
            raise error

    def connect(self, _box: Any) -> Any:
        self.act("connect", self.connects)
        return SimpleNamespace(close=lambda: self.done.append("close"))

    def service(self, *_: Any) -> Any:
        return SimpleNamespace(
            lock_name="v",
            describe=lambda: self.unit,
            beat=lambda: self.act("beat", self.beats),
            arm=lambda _was, _s: self.done.append("arm"),
            disarm=lambda: self.done.append("disarm"),
            restore=lambda _was: self.done.append("restore"),
        )

    def hold(self, *_: Any, again: bool = False) -> Any:
        self.act("again" if again else "lock", self.locks)
        return SimpleNamespace(check=lambda: None, release=lambda: self.done.append("release"), lost=False)


@pytest.fixture
def world(monkeypatch):
    made = World()
    monkeypatch.setattr(room, "connect", made.connect)
    monkeypatch.setattr(room, "make_service", made.service)
    monkeypatch.setattr(room.lock, "hold", made.hold)
    monkeypatch.setattr(room, "engine_fingerprint", lambda *_args, **_more: {"kernel": "6"})
    monkeypatch.setattr(room.caches, "sweep", lambda *_args, **_more: made.done.append("sweep"))
    monkeypatch.setattr(room, "AGAIN_EVERY_S", 0.001)
    return made


def held(world: World, *, reconnect_s: float = 30.0) -> Custody:
    box = SimpleNamespace(name="gwen", dead_man_s=900.0, reconnect_s=reconnect_s, cache_root=None)
    design: Any = SimpleNamespace(box=box, folder=Path("/nowhere"), matrix=SimpleNamespace(experiment="e"))
    site: Any = SimpleNamespace(
        transport=SimpleNamespace(close=lambda: world.done.append("close")),
        service=world.service(),
        unit=UNIT,
        launches={"a": LAUNCH},
        production=ProductionState(unit="v.service", active=False, command=COMMAND),
        fingerprint={"kernel": "6"},
        has_production=False,
        own=None,
    )
    listener: Any = SimpleNamespace(say=lambda _text: None, warn=lambda _text: None)
    made = Custody(design, Site(**vars(site), engine=None, changes={}, rehearsal=True), listener, Interrupts())
    return made.__enter__()


def test_a_box_that_is_ours_is_only_asked(world):
    held(world).sure()
    assert world.done == ["lock", "beat"]


def test_a_lost_box_is_tried_until_it_is_there_then_locked_and_armed_again(world):
    custody = held(world)
    before = custody.site
    world.beats = [Unreachable("gone")]
    world.connects = [Unreachable("refused"), Unreachable("refused"), None]
    custody.sure()
    assert world.done == ["lock", "beat", "release", "close", "connect", "connect", "connect", "again", "arm"]
    assert custody.site.service is not before.service
    assert custody.site.launches is before.launches
    assert custody.site.production is before.production
    custody.__exit__(None, None, None)


def test_a_box_that_restored_by_itself_is_armed_again(world):
    custody = held(world)
    world.beats = [BoxError("the box has restored v.service by itself")]
    custody.sure()
    assert world.done[-2:] == ["again", "arm"]
    custody.__exit__(None, None, None)


def test_a_box_that_somebody_else_has_taken_meanwhile_is_not_fought_for(world):
    custody = held(world)
    world.beats, world.locks = [Unreachable("gone")], [BoxBusy("bob has it")]
    with pytest.raises(BoxBusy, match="bob"):
        custody.sure()
    assert "arm" not in world.done


def test_a_box_whose_production_serves_somebody_meanwhile_is_left_to_it(world, monkeypatch):
    custody = held(world)
    custody.site = replace(custody.site, has_production=True)
    monkeypatch.setattr(room, "running_requests", lambda _site: 2.0)
    world.beats = [BoxError("the box has restored v.service by itself")]
    with pytest.raises(BoxBusy, match=r"2 requests are running in v\.service") as told:
        custody.sure()
    assert "--drain" in str(told.value.hint)
    assert "arm" not in world.done


def test_a_box_with_another_command_in_its_unit_is_refused(world):
    custody = held(world)
    world.beats, world.unit = [Unreachable("gone")], replace(UNIT, argv=("vllm", "serve", "--new"))
    with pytest.raises(ExperimentChanged, match=r"with \['--new'\]"):
        custody.sure()
    assert "arm" not in world.done


def test_a_box_that_is_gone_for_good_is_given_up_after_its_time_and_the_person_told_what_to_run(world):
    custody = held(world, reconnect_s=0.05)
    world.beats = [Unreachable("gone")]
    world.connects = [Unreachable("no route")] * 1000
    with pytest.raises(Unreachable, match=r"the box is gone.*no route"):
        custody.sure()
    tried = world.done.count("connect")
    assert tried > 3
    # Giving back tries once more, and not for the whole time again.
    custody._lock.check = lambda: (_ for _ in ()).throw(BoxError("lost"))
    custody._lock.lost = True
    with pytest.raises(RestoreFailed, match="may not be as it was") as told:
        custody.restore()
    assert world.done.count("connect") == tried + 1
    assert "invoke restore --box gwen" in told.value.hint


def test_a_connection_that_is_lost_while_restoring_is_taken_again_for_that(world, monkeypatch):
    custody = held(world)
    gone = iter([Unreachable("gone"), None])

    def restore(_was: Any) -> None:
        world.act("restore", [next(gone)])

    monkeypatch.setattr(custody.site.service, "restore", restore)
    custody.restore()
    assert world.done == ["lock", "restore", "release", "close", "connect", "again", "restore", "disarm", "sweep"]


def test_production_under_another_command_is_not_back(monkeypatch):
    monkeypatch.setattr(room, "_generates", lambda *_args: True)
    service: Any = SimpleNamespace(
        name="v.service",
        state=lambda: UnitState("active", "running", 1, "i", 0, None, None),
        command=lambda: ("vllm", "serve", "--api-key", "sesame"),
    )
    was = ProductionState(unit="v.service", active=True, command=COMMAND)
    with pytest.raises(RestoreFailed, match="another command runs") as told:
        prove_back(service, was, None, SimpleNamespace(), Deadlines(ready_s=0.3))
    assert "sesame" not in told.value.what
