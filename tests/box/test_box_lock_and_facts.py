"""The lock and the facts on the real box, by ssh."""

import select
import subprocess
import time

import pytest

from orchestrator.box import facts, lock
from orchestrator.box.ssh import SshTransport
from orchestrator.box.sshconfig import hop
from orchestrator.errors import BoxBusy, BoxError, Unreachable

NAME = "vllm-qwen.service"


def until_free(transport, within_s=10.0):
    deadline = time.monotonic() + within_s
    while True:
        try:
            return lock.hold(transport, NAME, "next")
        except BoxBusy:
            assert time.monotonic() < deadline, "never free"
            select.select((), (), (), 0.02)


def test_a_login_without_root_and_root_exclude_each_other(ssh, root_ssh):
    for first, second in ((ssh, root_ssh), (root_ssh, ssh)):
        with until_free(first), pytest.raises(BoxBusy, match=r"next since 20.* holds it, by process \d+ on the box"):
            lock.hold(second, NAME, "bob@desk pid 7")


def lost(held):
    """Whether a holder has learned that its lock is lost."""
    try:
        held.check()
    except BoxError as error:
        return "is lost" in error.what
    return False


HOLDER = """
import sys
from pathlib import Path
from orchestrator.box import lock
from orchestrator.box.ssh import SshTransport
from orchestrator.box.sshconfig import hop
held = lock.hold(SshTransport(hop("gwen", config=Path(sys.argv[1]))), "vllm-qwen.service", "ann@laptop pid 41")
print("locked", flush=True)
sys.stdin.read()
"""


def test_the_lock_dies_with_its_killed_holder_within_two_seconds(box, ssh):
    command = (box.python, "-c", HOLDER, str(box.ssh_config))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(BoxBusy, match="ann@laptop pid 41 since"):
            lock.hold(ssh, NAME, "bob")
        holder.kill()
    until_free(ssh, within_s=2).release()


def test_the_lock_dies_with_its_connection_and_its_holder_learns_it(box, ssh):
    before = set(box.pids("sshd: alex"))
    doomed = SshTransport(hop(box.alias, config=box.ssh_config))
    serving = [pid for pid in box.pids("sshd: alex") if pid not in before]
    held = lock.hold(doomed, NAME, "ann")
    for pid in serving:
        box.kill(pid)
    until_free(ssh).release()
    assert lost(held)
    with pytest.raises(Unreachable):
        lock.hold(doomed, NAME, "ann")
    doomed.close()


def test_who_may_not_end_the_holder_is_told_what_root_would_run(ssh, root_ssh):
    with until_free(root_ssh), pytest.raises(BoxBusy, match=r"sudo kill -KILL \d+"):
        lock.hold(ssh, NAME, "alex", break_lock=True)


def test_root_breaks_the_lock_of_another_login(ssh, root_ssh):
    first = until_free(ssh)
    with lock.hold(root_ssh, NAME, "root", break_lock=True) as second:
        second.check()
        deadline = time.monotonic() + 5
        while not lost(first):
            assert time.monotonic() < deadline
            select.select((), (), (), 0.02)


def test_a_released_lock_is_free_when_release_returns(ssh, root_ssh):
    until_free(ssh).release()
    for transport in (ssh, root_ssh) * 5:
        lock.hold(transport, NAME, "next").release()


def test_nothing_of_a_released_lock_is_left_on_the_box(box, ssh):
    until_free(ssh).release()
    deadline = time.monotonic() + 5
    while box.pids("coldboot-lock"):
        assert time.monotonic() < deadline
        select.select((), (), (), 0.02)
    assert box.sh(("sh", "-c", "ls -d /tmp/coldboot-lock-*"), check=False).stdout == ""


def test_the_facts_of_the_box_are_read_by_a_login_without_root(box, ssh):
    found = facts.fingerprint(ssh, program=(box.python, "-m", "orchestrator.rehearsal"))
    assert found["os"].startswith("Debian GNU/Linux")
    assert found["systemd"].startswith("25")
    assert found["kernel"] == box.sh(("uname", "-r")).stdout.strip()
    assert (
        found["engine_python"]
        == box.sh((box.python, "-c", "import platform; print(platform.python_version())")).stdout.strip()
    )
    assert found["engine_version"] is not None
    assert int(found["memory_mib"]) > 256
    assert len(found["machine"]) == 16
    assert (box.root / "etc/machine-id").read_text().strip()[:8] not in found["machine"]
    assert found["gpus"] is None
    assert facts.gpu_state(ssh) is None


def test_the_ports_of_the_box_are_seen(box, ssh):
    assert box.port in facts.listening_ports(ssh)
