"""The box of the tests is a real one, and ends for sure."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from nspawn import CHECKOUT, mirror_of, sweep


def test_the_box_is_a_debian_whose_systemd_has_started_without_failed_units(box):
    assert box.sh(("systemctl", "is-system-running")).stdout.strip() == "running"
    assert box.sh(("cat", "/proc/1/comm")).stdout.strip() == "systemd"


def test_the_projects_python_runs_inside_for_the_login_without_root(box):
    python = [sys.executable, "-c", "import orchestrator, os; print(os.getuid(), orchestrator.__file__)"]
    shown = box.sh(("runuser", "-u", box.login, "--", *python)).stdout.split()
    assert shown == ["1000", str(CHECKOUT / "orchestrator" / "__init__.py")]


def test_a_reboot_keeps_the_disk_and_empties_run(box):
    box.sh(("touch", "/run/kept", "/var/kept"))
    machine_boot = box.sh(("cat", "/proc/1/stat")).stdout
    box.reboot()
    assert box.sh(("ls", "/run/kept"), check=False).returncode != 0
    assert box.sh(("ls", "/var/kept")).stdout == "/var/kept\n"
    assert box.sh(("cat", "/proc/1/stat")).stdout != machine_boot


def test_after_a_power_cut_the_box_comes_back_on_the_same_port(box):
    port = box.port
    box.reboot(cut=True)
    assert box.port == port
    with socket.create_connection(("127.0.0.1", port), timeout=5) as greeted:
        assert greeted.recv(64).startswith(b"SSH-2.0")


def test_a_process_is_killed_by_the_number_that_the_box_itself_gives_it(box):
    box.sh(("systemd-run", "--unit=sleeper", "sleep", "1000"))
    pid = int(box.sh(("systemctl", "show", "-P", "MainPID", "sleeper")).stdout)
    assert box.pids("sleep 1000") == (pid,)
    box.kill(pid)
    box.sh(("systemctl", "reset-failed", "sleeper"), check=False)
    assert box.pids("sleep 1000") == ()


OWNER = """
import sys
sys.path.insert(0, sys.argv[1])
from nspawn import Box, base_tree
box = Box(base_tree()).__enter__()
print(box.port, box.root.parent, box._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_second_box_lives_beside_the_first_and_is_swept_up_when_its_session_was_killed(box):
    folder = str(CHECKOUT / "tests" / "box")
    command = (sys.executable, "-c", OWNER, folder)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        port, session, nspawn = owner.stdout.readline().split()
        assert int(port) != box.port
        assert box.sh(("systemctl", "is-system-running")).stdout.strip() == "running"
        assert Path(f"/proc/{nspawn}/root").exists()
        owner.kill()
    sweep(Path(session).parent)
    assert not Path(session).exists()
    assert not Path(f"/proc/{nspawn}/root").exists()
    assert box.sh(("systemctl", "is-system-running")).stdout.strip() == "running"


@pytest.mark.parametrize(
    ("listed", "mirror"),
    [
        ({"sources.list": "deb http://m.example/debian bookworm main contrib\n"}, ("http://m.example/debian",)),
        ({"sources.list": "deb [arch=amd64] http://m.example/d bookworm main\n"}, ("http://m.example/d",)),
        (
            {"sources.list.d/x.list": "deb http://x.example sid main\ndeb http://y.example/ bookworm main\n"},
            ("http://y.example/",),
        ),
        (
            {
                "sources.list.d/a.sources": "Types: deb\nURIs: http://s.example/sec\nSuites: bookworm-security\n"
                "Components: main\n\nTypes: deb\nURIs: http://m.example/debian\nSuites: bookworm bookworm-updates\n"
                "Components: main\n"
            },
            ("http://m.example/debian",),
        ),
        ({}, ()),
    ],
)
def test_the_mirror_is_the_one_that_apt_uses(tmp_path, listed, mirror):
    (tmp_path / "sources.list.d").mkdir()
    for name, text in listed.items():
        (tmp_path / name).write_text(text)
    assert mirror_of("bookworm", tmp_path) == mirror
