"""The lock of a box, on this machine: one holder, named, dead with its process."""

import contextlib
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from orchestrator.box import lock
from orchestrator.box.transports import LocalTransport
from orchestrator.errors import BoxBusy, BoxError, CommandFailed


@pytest.fixture
def here():
    transport = LocalTransport()
    yield transport
    transport.close()


@pytest.fixture
def name():
    """A lock of this test's own."""
    made = f"test {uuid4().hex[:8]}@x.service"
    yield made
    # The last one to hold it has taken it away; where it was never held, nobody has.
    with contextlib.suppress(FileNotFoundError):
        Path(lock._folder(made)).rmdir()


def until_free(transport, name, within_s=5.0):
    deadline = time.monotonic() + within_s
    while True:
        try:
            return lock.hold(transport, name, "next")
        except BoxBusy:
            assert time.monotonic() < deadline, "never free"
            select.select((), (), (), 0.02)


def loss(held, within_s=5.0):
    """The error by which a holder learns that its lock is lost."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            held.check()
        except BoxError as error:
            return error.what
        assert time.monotonic() < deadline, "never lost"
        select.select((), (), (), 0.02)


def test_the_second_is_told_who_holds_the_box_and_since_when(here, name):
    with lock.hold(here, name, "ann@laptop pid 41 experiment spec"):
        with pytest.raises(BoxBusy) as caught:
            lock.hold(LocalTransport(), name, "bob@desk pid 7")
        assert f"the box is taken ({name}): ann@laptop pid 41 experiment spec since 20" in caught.value.what
        assert caught.value.exit_code == 3


def test_another_lock_is_free_and_the_same_one_is_free_again_after_its_release(here, name):
    with lock.hold(here, name, "ann"):
        other = f"{name}2"
        lock.hold(here, other, "bob").release()
    for _ in range(10):
        lock.hold(here, name, "ann").release()


def test_a_held_lock_is_checked_and_a_released_one_is_no_longer_held(here, name):
    held = lock.hold(here, name, "ann")
    held.check()
    held.release()
    held.release()
    with pytest.raises(BoxError, match="has been released"):
        held.check()


def test_a_released_lock_leaves_nothing_and_neither_does_the_next_one_after_a_killed_holder(here, name):
    folder = Path(lock._folder(name))
    with lock.hold(here, name, "ann"):
        assert folder.is_dir()
    assert not folder.exists()
    folder.mkdir()
    until_free(here, name).release()
    assert not folder.exists()


def test_whoever_locks_a_directory_that_is_just_being_removed_begins_again(here, name):
    inside, most, held = threading.Lock(), [], []

    def contend() -> None:
        while len(held) < 24:
            try:
                taken = lock.hold(here, name, "one of four")
            except BoxBusy:
                continue
            most.append(inside.acquire(blocking=False))
            held.append(taken)
            threading.Event().wait(0.01)
            if most[-1]:
                inside.release()
            taken.release()

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(contend) for _ in range(4)]:
            each.result(60)
    assert len(held) >= 24
    assert all(most), "two held the lock at once"
    assert not Path(lock._folder(name)).exists()


def test_a_name_of_any_kind_is_one_folder_in_tmp():
    assert (
        lock._folder("gwen/../../etc:vllm@1.service")
        == "/tmp/coldboot-lock-gwen%2f%2e%2e%2f%2e%2e%2fetc%3avllm%401%2eservice"
    )


def test_holders_with_odd_words_stay_words(here, name):
    said = r"ann \$\(touch /tmp/x\) 'quoted' second line since"
    with lock.hold(here, name, "ann $(touch /tmp/x) 'quoted'\nsecond line"), pytest.raises(BoxBusy, match=said):
        lock.hold(here, name, "bob")


HOLDER = """
import sys
from orchestrator.box import lock
from orchestrator.box.transports import LocalTransport
held = lock.hold(LocalTransport(), sys.argv[1], "killed one")
print("locked", flush=True)
sys.stdin.read()
"""


def test_the_lock_dies_with_its_killed_holder(here, name):
    command = (sys.executable, "-c", HOLDER, name)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(BoxBusy, match="killed one"):
            lock.hold(here, name, "next")
        holder.kill()
    until_free(here, name).release()


def test_a_broken_lock_goes_to_who_broke_it_and_the_other_learns_it(here, name):
    first = lock.hold(here, name, "ann")
    second = lock.hold(LocalTransport(), name, "bob", break_lock=True)
    assert loss(first) == f"the lock {name} is lost: its holder on the box has ended"
    second.check()
    second.release()


def test_breaking_a_free_lock_takes_it(here, name):
    lock.hold(here, name, "bob", break_lock=True).release()


def test_a_lock_whose_heartbeat_stops_is_free_after_its_time(here, name, monkeypatch):
    monkeypatch.setattr(lock, "EXPIRES_S", 1)
    silent = lock.hold(here, name, "ann")
    started = time.monotonic()
    until_free(LocalTransport(), name).release()
    assert 0.5 < time.monotonic() - started < 4
    assert "is lost" in loss(silent)


def test_a_lock_whose_heart_beats_does_not_expire(here, name, monkeypatch):
    monkeypatch.setattr(lock, "EXPIRES_S", 1)
    monkeypatch.setattr(lock, "BEAT_S", 0.2)
    with lock.hold(here, name, "ann") as held:
        select.select((), (), (), 2)
        held.check()
        with pytest.raises(BoxBusy):
            lock.hold(here, name, "bob")


def test_a_box_without_flock_says_what_is_needed(here, name, tmp_path, monkeypatch):
    for tool in ("sh", "mkdir"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(lock, "_HOLD", f"PATH={tmp_path}\n{lock._HOLD}")
    with pytest.raises(CommandFailed, match="flock") as caught:
        lock.hold(here, name, "ann")
    assert caught.value.status == 127
    assert "util-linux" in caught.value.hint


def test_whoever_asks_is_told_the_holder_and_takes_nothing(here, name):
    assert lock.holder(here, name) is None
    with lock.hold(here, name, "ann@laptop pid 41"):
        assert lock.holder(here, name).startswith("ann@laptop pid 41 since 20")
    assert lock.holder(here, name) is None
    with lock.hold(here, name, "next"):
        pass


def test_a_holder_whose_connection_was_lost_takes_its_own_lock_again_and_nobody_elses(here, name):
    lost = lock.hold(here, name, "ann@laptop pid 41 experiment spec")
    with pytest.raises(BoxBusy, match="ann@laptop pid 41"):
        lock.hold(here, name, "ann@laptop pid 4 experiment spec", again=True)
    assert not lost.lost
    with lock.hold(here, name, "ann@laptop pid 41 experiment spec", again=True) as taken:
        assert "ended" in loss(lost)
        assert lost.lost
        taken.check()
    lost.release()
