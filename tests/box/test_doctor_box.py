"""Doctor on the real box, in a good state and in one broken state after the other; each finding names its mend."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_campaign_box import MATRIX, PORT, ROOT, UNIT, UNIT_TEXT, await_true, serves

from orchestrator import doctor
from orchestrator.box import lock
from orchestrator.box.services import make_service
from orchestrator.matrix import load_matrix
from orchestrator.survey import Options

ABSENT = Path(f"/absent-{secrets.token_hex(8)}")
CAMPAIGN_FILES = "/run/systemd/system/vllm-qwen.service.d/zz-coldboot.conf"


@pytest.fixture(scope="module")
def production(box):
    box.write_unit(UNIT, UNIT_TEXT + "\n[Install]\nWantedBy=multi-user.target\n")
    box.sh(("systemctl", "enable", "--now", UNIT))
    await_true(serves, 60)
    yield box
    box.remove_unit(UNIT)


@pytest.fixture
def sick(production, ssh, install_sudoers, tmp_path):
    """The box with all that a campaign needs, and a way to ask doctor about it."""

    class Sick:
        box = production
        matrix = tmp_path / "matrix.yaml"

        def write(self, **changes) -> None:
            values = {"alias": production.alias, "ssh_config": production.ssh_config, "unit": UNIT, "dead_man_s": 60}
            self.matrix.write_text(MATRIX.format(**(values | changes)))

        def examine(self) -> doctor.Diagnosis:
            return doctor.examine(Options(matrix=self.matrix, out=tmp_path / "out"))

        def finding(self, name: str) -> doctor.Finding:
            found = [one for one in self.examine().findings if one.check == name]
            assert len(found) == 1, f"{name} stands {len(found)} times"
            return found[0]

    made = Sick()
    made.write()
    service = make_service(ssh, load_matrix(made.matrix).target, tmp_path / "state")
    service.describe()
    made.service = service
    install_sudoers(service.sudo_lines())
    await_true(serves, 60)
    yield made
    production.sh(("systemctl", "start", UNIT), check=False)


def command(sick, *words) -> subprocess.CompletedProcess[str]:
    argv = (sys.executable, "-m", "invoke", "doctor", "--matrix", str(sick.matrix), "--out", str(ABSENT), *words)
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_box_in_good_order_has_nothing_to_mend(sick):
    done = command(sick, "--json")
    found = json.loads(done.stdout)
    failing = [one for one in found["checks"] if one["level"] == "fail"]
    assert (done.returncode, failing) == (0, []), done.stderr
    by_name = {one["check"]: one for one in found["checks"]}
    assert set(by_name) >= {
        *("ssh", "known_host", "login", "tools", "sudo", "unit", "starts", "active", "exec", "variants", "engine"),
        *("port", "metrics", "gpu", "caches", "disk", "journal", "journald", "clock", "leftovers"),
    }
    assert by_name["sudo"]["number"] == 0
    assert "enabled" in by_name["starts"]["said"]
    assert str(PORT) in by_name["port"]["said"]
    assert by_name["metrics"]["number"] >= 0
    assert by_name["engine"]["said"].startswith("coldboot")
    assert abs(by_name["clock"]["number"]) < 1
    assert all(one["mend"] for one in found["checks"] if one["level"] != "ok")
    assert not ABSENT.exists()


def test_missing_sudo_lines_stand_there_ready_to_paste_and_mend_it(sick, install_sudoers):
    lines = sick.service.sudo_lines()
    install_sudoers(lines[2:])
    found = sick.finding("sudo")
    assert (found.level, found.number) == ("fail", 2)
    pasted = [line for line in found.mend.splitlines() if line.startswith("alex ")]
    assert set(pasted) == set(lines[:2])
    install_sudoers((*lines[2:], *pasted))
    assert sick.finding("sudo").level == "ok"


def test_without_any_right_every_line_is_missing_and_sudo_is_asked_once(sick, install_sudoers):
    install_sudoers(())
    found = sick.finding("sudo")
    assert (found.level, found.number) == ("fail", len(sick.service.sudo_lines()))
    done = command(sick)
    assert done.returncode == 3
    assert "NOPASSWD" in done.stdout
    assert "Traceback" not in done.stderr


def test_rights_that_ask_for_a_password_are_no_rights(sick, install_sudoers):
    install_sudoers(("alex ALL=(ALL:ALL) ALL", "alex ALL=(root) NOPASSWD: /usr/bin/id"))
    assert sick.finding("sudo").number == len(sick.service.sudo_lines())


def test_a_unit_that_is_not_there_is_named_and_what_needs_it_is_not_asked(sick):
    sick.write(unit="nothing.service")
    found = sick.examine()
    (unit,) = (one for one in found.findings if one.check == "unit")
    assert unit.level == "fail"
    assert "nothing.service" in unit.said
    assert "list-unit-files" in unit.mend
    assert {"sudo", "active", "exec", "metrics", "port"} <= set(found.not_asked)
    assert found.exit_code == 3


def test_a_stopped_unit_is_noted_and_a_stranger_on_its_port_fails(sick):
    sick.box.sh(("systemctl", "stop", UNIT))
    assert sick.finding("active").level == "warn"
    assert sick.finding("port").level == "ok"
    with socket.create_server(("127.0.0.1", PORT)):
        found = sick.finding("port")
        assert found.level == "fail"
        assert str(PORT) in found.mend


def test_a_failed_unit_fails_and_says_how_it_ended(sick):
    pid = sick.box.sh(("systemctl", "show", "-P", "MainPID", UNIT)).stdout.strip()
    sick.box.write_unit(UNIT, UNIT_TEXT.replace("Restart=on-failure", "Restart=no"))
    sick.box.kill(int(pid))
    await_true(lambda: sick.box.sh(("systemctl", "is-failed", UNIT), check=False).returncode == 0, 20)
    try:
        found = sick.finding("active")
        assert found.level == "fail"
        assert "signal" in found.said
        assert "invoke classify" in found.mend
    finally:
        sick.box.write_unit(UNIT, UNIT_TEXT + "\n[Install]\nWantedBy=multi-user.target\n")
        sick.box.sh(("systemctl", "reset-failed", UNIT))
        sick.box.sh(("systemctl", "start", UNIT))
        await_true(serves, 60)


def test_a_login_that_cannot_read_the_journal_is_told_which_group_it_needs(sick):
    sick.box.sh(("gpasswd", "-d", "alex", "systemd-journal"))
    try:
        found = sick.examine()
        (journal,) = (one for one in found.findings if one.check == "journal")
        assert journal.level == "fail"
        assert "usermod -aG systemd-journal alex" in journal.mend
        # The rest is asked all the same.
        assert {"active", "metrics", "sudo"} <= {one.check for one in found.findings}
    finally:
        sick.box.sh(("usermod", "-aG", "systemd-journal", "alex"))


@pytest.mark.parametrize(("ahead_s", "level"), [(5, "warn"), (-120, "fail")])
def test_a_clock_that_is_off_is_told_with_its_seconds(sick, ahead_s, level):
    path = sick.box.root / "usr/local/bin/date"
    path.write_text(f'#!/bin/sh\nexec /usr/bin/date -d "{ahead_s} seconds" "$@"\n')
    path.chmod(0o755)
    try:
        found = sick.finding("clock")
        assert found.level == level
        assert found.number == pytest.approx(ahead_s, abs=1)
        assert "set-ntp" in found.mend
    finally:
        path.unlink()


def test_a_shell_as_the_units_command_fails(sick):
    sick.box.write_unit(UNIT, f"[Service]\nUser=alex\nExecStart=/bin/sh -c 'exec {sys.executable} -m http.server'\n")
    try:
        found = sick.examine()
        (finding,) = (one for one in found.findings if one.check == "exec")
        assert finding.level == "fail"
        assert "shell" in finding.said
        assert "unit_file:" in finding.mend
        assert "metrics" in found.not_asked
    finally:
        sick.box.write_unit(UNIT, UNIT_TEXT + "\n[Install]\nWantedBy=multi-user.target\n")


def test_what_a_killed_campaign_left_fails_with_the_command_that_ends_it(sick):
    drop_in = sick.box.root / CAMPAIGN_FILES.lstrip("/")
    sick.box.sh(("mkdir", "-p", str(Path(CAMPAIGN_FILES).parent)))
    sick.box.sh(("sh", "-c", f"printf '[Service]\\nNice=1\\n' >{CAMPAIGN_FILES}"))
    try:
        found = sick.finding("leftovers")
        assert found.level == "fail"
        assert "zz-coldboot.conf" in found.said
        assert found.mend == "invoke restore --box real"
    finally:
        sick.box.sh(("rm", "-rf", str(Path(CAMPAIGN_FILES).parent)))
        sick.box.sh(("systemctl", "daemon-reload"))
    assert not drop_in.exists()


def test_an_engine_that_outlived_its_unit_is_told_by_its_process(sick):
    sick.box.sh(("systemd-run", "--unit=orphan", "--uid=alex", "--setenv=COLDBOOT_ARGS=--model m", "sleep", "1000"))
    try:
        pid = sick.box.sh(("systemctl", "show", "-P", "MainPID", "orphan")).stdout.strip()
        found = sick.finding("leftovers")
        assert (found.level, found.number) == ("fail", 1)
        assert f"process {pid}" in found.said
    finally:
        sick.box.sh(("systemctl", "stop", "orphan"))


def test_a_campaign_that_runs_is_told_by_its_holder(sick, ssh):
    with lock.hold(ssh, UNIT, "ann@laptop pid 41"):
        found = sick.finding("leftovers")
    assert found.level == "warn"
    assert "ann@laptop pid 41" in found.said


def test_a_host_key_that_is_not_known_is_the_step_that_fails(sick, tmp_path):
    config = sick.box.ssh_config.read_text().replace(str(sick.box.known_hosts), str(tmp_path / "empty"))
    (tmp_path / "empty").touch()
    (tmp_path / "ssh_config").write_text(config)
    sick.write(ssh_config=tmp_path / "ssh_config")
    found = sick.examine()
    assert [(one.check, one.level) for one in found.findings] == [("ssh", "ok"), ("known_host", "fail")]
    assert "ssh-keyscan" in found.findings[1].mend
    assert found.not_asked["sudo"] == "as there is no way in"
    assert found.exit_code == 3


def test_a_volatile_journal_is_noted(sick):
    here = sick.box.sh(("sh", "-c", "ls -d /var/log/journal/*/system.journal"), check=False).returncode == 0
    found = sick.finding("journald")
    assert found.level == ("ok" if here else "warn")
    assert "10000 entries in 30s" in found.said


def test_init_writes_a_matrix_of_the_running_box_that_doctor_finds_in_order(sick, tmp_path):
    path = tmp_path / "fresh.yaml"
    words = ("--box-host", sick.box.alias, "--unit", "vllm-qwen", "--ssh-config", str(sick.box.ssh_config))
    argv = (sys.executable, "-m", "invoke", "init", *words, "--matrix", str(path))
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    matrix = load_matrix(path)
    assert (matrix.box, matrix.target.unit, matrix.target.port) == ("gwen", UNIT, PORT)
    assert [variant.name for variant in matrix.variants] == ["no-spec", "spec-1", "spec-2"]
    found = doctor.examine(Options(matrix=path, out=tmp_path / "out"))
    assert [one for one in found.findings if one.level == "fail"] == []
    assert next(one for one in found.findings if one.check == "variants").number == 3
    missing = (*argv[:-1], str(tmp_path / "none.yaml"))
    gone = subprocess.run(
        [word.replace("vllm-qwen", "nothing") for word in missing],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert gone.returncode == 3
    assert "nothing.service" in gone.stderr


def test_a_plan_of_the_real_box_prints_the_commands_of_each_step_and_changes_nothing(sick, tmp_path):
    words = ("plan", "--boots", "2", "--budget", "1h", "--matrix", str(sick.matrix), "--out", str(tmp_path / "out"))
    argv = (sys.executable, "-m", "invoke", *words)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "sudo systemctl start --no-block vllm-qwen.service" in done.stdout
    assert "sudo tee /run/systemd/system/vllm-qwen.service.d/zz-coldboot.conf" in done.stdout
    assert "clean slate:" in done.stdout
    assert serves()
    assert not (sick.box.root / CAMPAIGN_FILES.lstrip("/")).exists()


def test_a_unit_of_the_logins_own_manager_needs_lingering_and_no_sudo(sick, ssh):
    folder = sick.box.root / "home/alex/.config/systemd/user"
    ssh.run(("mkdir", "-p", "/home/alex/.config/systemd/user"), timeout_s=10)
    (folder / "own.service").write_text(f"[Service]\nExecStart={sys.executable} -m orchestrator.rehearsal --model m\n")
    text = MATRIX.replace("service: systemd", "service: systemd-user")
    values = {"alias": sick.box.alias, "ssh_config": sick.box.ssh_config, "unit": "own.service", "dead_man_s": 60}
    sick.matrix.write_text(text.format(**values))
    sick.box.sh(("loginctl", "disable-linger", "alex"), check=False)
    assert sick.finding("linger").level == "fail"
    sick.box.sh(("loginctl", "enable-linger", "alex"))
    try:
        found = sick.examine()
        checks = {one.check: one for one in found.findings}
        assert checks["linger"].level == "ok"
        assert checks["active"].level == "warn"
        assert "sudo" not in checks
        assert checks["active"].mend.startswith("systemctl --user start own.service")
        assert [one for one in found.findings if one.level == "fail"] == []
    finally:
        sick.box.sh(("loginctl", "disable-linger", "alex"))
