import socket
import sys

from nspawn import CHECKOUT


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
