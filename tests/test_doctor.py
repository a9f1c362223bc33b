"""Doctor's judges on texts, and doctor on the rehearsal box, where no systemd is."""

from __future__ import annotations

import io
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from invoke.context import Context
from rich.console import Console

from orchestrator import commands, doctor
from orchestrator.box.engines import Launch, Problem
from orchestrator.box.facts import Gpu, GpuProcess, GpuState
from orchestrator.box.unit import UnitFacts
from orchestrator.doctor import ORDER, probes
from orchestrator.doctor.checks import CHECKS, Known, Said, batch, cache_paths, judge_exec, listeners, unbatch
from orchestrator.doctor.findings import Diagnosis, Finding
from orchestrator.errors import CommandTimeout, Unreachable
from orchestrator.matrix import BoxSpec
from orchestrator.survey import Options

ROOT = Path(__file__).parent.parent
UNIT = UnitFacts("vllm.service", True, ("/v/bin/vllm", "serve", "m"), {}, "alex", "/home/alex", True, True)  # noqa: FBT003
OWN = Launch(("/v/bin/vllm", "serve", "m", "--port", "8080"), {}, (), 8080, "m")
BOX = BoxSpec(name="gwen", transport="ssh", service="systemd", unit="vllm.service")
KNOWN = Known(BOX, "alex", False, False, 900.0, "vllm.service", UNIT, OWN, (77,), cache_place="/home/alex/.cache/c")  # noqa: FBT003


def judge(name: str, text: str, *, status: int = 0, **changes) -> Finding:
    check = next(check for check in CHECKS if check.name == name)
    return check.judge(Said(status, text), replace(KNOWN, **changes))


# --- the unit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "level", "word"),
    [
        ("UnitFileState=enabled\nWantedBy=multi-user.target\n", "ok", "multi-user.target"),
        ("UnitFileState=static\nWantedBy=models.target\n", "ok", "models.target"),
        ("UnitFileState=disabled\n", "warn", "nothing starts it"),
        ("UnitFileState=enabled\nWantedBy=multi-user.target\nTriggeredBy=vllm.timer\n", "warn", "vllm.timer"),
    ],
)
def test_who_starts_it(text, level, word):
    found = judge("starts", text)
    assert (found.level, word in found.said) == (level, True)


@pytest.mark.parametrize(
    ("text", "level", "number"),
    [
        ("ActiveState=active\nMainPID=77\nActiveEnterTimestampMonotonic=1000000\nUptime=61.0\n", "ok", 60.0),
        ("ActiveState=active\nMainPID=77\nNRestarts=4\n", "warn", 4),
        ("ActiveState=activating\nSubState=auto-restart\nNRestarts=12\nResult=exit-code\n", "fail", 12),
        ("ActiveState=failed\nResult=signal\nExecMainStatus=9\n", "fail", 0),
        ("ActiveState=inactive\nSubState=dead\n", "warn", None),
    ],
)
def test_whether_it_runs(text, level, number):
    found = judge("active", text)
    assert (found.level, found.number) == (level, number)
    assert (found.mend is None) is (level == "ok")


def test_the_mend_of_a_dead_unit_is_a_command_that_runs_here():
    found = judge("active", "ActiveState=failed\nResult=signal\n")
    assert found.mend.startswith("ssh gwen journalctl -u vllm.service -o json | invoke classify --journal -")
    own = BOX.model_copy(update={"service": "systemd-user", "transport": "local"})
    assert judge("active", "ActiveState=failed\n", box=own).mend.startswith("journalctl --user -u vllm.service")


def test_a_command_that_is_no_engines_is_told_with_the_problem():
    shell = (Problem((), "ExecStart runs a shell (/bin/sh)"),)
    assert judge_exec(Said(0, ""), replace(KNOWN, own=shell)).level == "fail"
    assert judge_exec(Said(0, ""), KNOWN).number == 1


# --- who listens -----------------------------------------------------------------------------------------------------

# 8080 is 1F90; user 1000 listens on every address, user 33 on the loopback.
TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: {address}:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  {uid}        0 21 1 0000 100 0 0 10 0
   1: 0100007F:1F90 0100007F:9999 01 00000000:00000000 00:00000000 00000000  33        0 21 1 0000 100 0 0 10 0
"""


def test_only_listening_sockets_of_the_port_count():
    found = listeners(TCP.format(address="00000000", uid=1000), 8080)
    assert [(one.anywhere, one.uid) for one in found] == [(True, 1000)]
    assert listeners(TCP.format(address="0100007F", uid=1000), 8081) == ()


@pytest.mark.parametrize(
    ("uid", "pid", "active", "level"),
    [
        (1000, 77, True, "ok"),
        (1000, None, True, "ok"),
        (33, None, True, "fail"),
        (1000, 99, True, "fail"),
        (1000, 99, False, "fail"),
    ],
)
def test_the_unit_itself_must_be_the_one_that_listens(uid, pid, active, level):
    users = "" if pid is None else f'LISTEN 0 5 *:8080 *:* users:(("python",pid={pid},fd=3))\n'
    text = "uid=1000\n" + TCP.format(address="00000000", uid=uid) + "\n" + users
    assert judge("port", text, unit=replace(UNIT, active=active)).level == level


def test_a_port_on_which_nobody_listens():
    assert judge("port", "uid=1000\n").level == "warn"
    assert judge("port", "uid=1000\n", unit=replace(UNIT, active=False)).level == "ok"


# --- caches, disk, journald ------------------------------------------------------------------------------------------


def test_caches_are_where_the_units_environment_says_and_are_summed():
    unit = replace(UNIT, env={"VLLM_CACHE_ROOT": "/big/vllm"})
    assert cache_paths(unit)["vllm"] == "/big/vllm"
    assert cache_paths(unit)["triton"] == "/home/alex/.triton/cache"
    found = judge("caches", "2097152 vllm /big/vllm\n1024 cuda /home/alex/.nv/ComputeCache\n")
    assert (found.level, found.number) == ("ok", 2049.0)
    assert "vllm 2.0 GiB, cuda 1 MiB" in found.said
    assert judge("caches", "denied vllm /home/alex/.cache/vllm\n").level == "warn"


def test_what_becomes_of_productions_caches_is_what_the_matrix_says():
    for text in ("2097152 vllm /big/vllm\n", "denied vllm /home/alex/.cache/vllm\n"):
        left, cleared = judge("caches", text), judge("caches", text, clears=True)
        assert "a campaign leaves them alone" in left.said + str(left.mend)
        assert "leaves them alone" not in cleared.said + str(cleared.mend)
        assert "`cache: clear` sets them aside for each boot, and puts them back" in cleared.said + str(cleared.mend)


@pytest.mark.parametrize(("free_gib", "level"), [(80, "ok"), (5, "warn"), (1, "fail")])
def test_the_disk_has_room_for_cold_caches(free_gib, level):
    found = judge("disk", f"/dev/sda1 99999999 1 {free_gib * 1024**2} 10% /home\n")
    assert (found.level, found.number) == (level, free_gib)
    rehearsed = judge("disk", f"/dev/sda1 99999999 1 {free_gib * 1024**2} 10% /home\n", rehearsal=True)
    assert rehearsed.level == "ok"


CONFIG = "# /etc/systemd/journald.conf\n[Journal]\n#Storage=auto\n{line}\n"


@pytest.mark.parametrize(
    ("first", "version", "line", "level", "word"),
    [
        ("persistent\n", 252, "", "ok", "10000 entries in 30s"),
        ("", 252, "", "warn", "volatile"),
        ("persistent\n", 252, "RateLimitBurst=0", "ok", "no rate limit"),
        ("persistent\n", 239, "RateLimitBurst=500", "warn", "500 entries"),
        ("persistent\n", 252, "MaxLevelStore=warning", "fail", "MaxLevelStore"),
    ],
)
def test_what_journald_keeps(first, version, line, level, word):
    found = judge("journald", f"{first}systemd {version} ({version}.1)\n{CONFIG.format(line=line)}")
    assert (found.level, word in found.said) == (level, True)


def test_a_journal_that_cannot_be_read_is_a_failure_for_a_system_unit_and_a_note_for_a_users_own():
    assert judge("journal", "there\nreadable\ncursor\n").level == "ok"
    assert judge("journal", "there\n").level == "fail"
    assert judge("journal", "there\n", box=BOX.model_copy(update={"service": "systemd-user"})).level == "warn"
    assert judge("journal", "").level == "fail"


# --- leftovers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "changes", "level"),
    [
        ("", {}, "ok"),
        ("file /run/x/zz-coldboot.conf\n", {}, "fail"),
        ("file /run/x/zz-coldboot.conf\n", {"holder": "ann@laptop pid 41"}, "warn"),
        ("process 99\n", {}, "fail"),
        ("process 77\n", {}, "ok"),
        ("cache /c/b-1\ncache /c/b-2\n", {}, "warn"),
    ],
)
def test_what_an_earlier_campaign_left(text, changes, level):
    found = judge("leftovers", text, **changes)
    assert found.level == level
    assert (found.mend is None) is (level == "ok")


# --- probes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "half", "level"), [(0.2, 0.01, "ok"), (-1.5, 0.6, "ok"), (-1.5, 0.1, "warn"), (40.0, 0.1, "fail")]
)
def test_only_what_the_round_trip_does_not_explain_is_the_clocks_fault(ahead, half, level):
    assert probes.judge_clock((ahead, half)).level == level


@pytest.mark.parametrize(
    ("what", "checks"),
    [
        ("gwen: the host key of gwen is not known", ["ssh", "known_host"]),
        ("gwen: logging in: the server refused to let us in (no)", ["ssh", "known_host", "login"]),
        ("gwen: connecting: nothing listens there", ["ssh"]),
    ],
)
def test_a_way_in_that_ends_says_how_far_it_came(what, checks):
    found = probes.judge_unreachable(Unreachable(what, hint="do this"))
    assert [one.check for one in found] == checks
    assert [one.level for one in found] == [*["ok"] * (len(checks) - 1), "fail"]
    assert found[-1].mend == "do this"


LISTED = """User alex may run the following commands on gwen:
    (ALL : ALL) ALL
    (root) NOPASSWD: /usr/bin/systemctl start --no-block vllm.service, /usr/bin/tee /run/a\\=b
"""


def test_a_command_that_sudo_would_ask_a_password_for_is_not_allowed():
    start = ("systemctl", "start", "--no-block", "vllm.service")
    assert probes.without_password(LISTED, start)
    assert probes.without_password(LISTED, ("tee", "/run/a=b"))
    assert not probes.without_password(LISTED, ("systemctl", "stop", "vllm.service"))
    assert probes.without_password(LISTED.replace("(ALL : ALL) ALL", "(ALL) NOPASSWD: ALL"), ("anything",))


def test_missing_lines_name_the_program_where_it_stands_on_the_box():
    needs = (("root", ("tee", "/run/a")), ("root", ("systemctl", "daemon-reload")))
    found = probes.judge_sudo(needs, (True, False), {"systemctl": "/bin/systemctl"}, KNOWN)
    assert (found.level, found.number) == ("fail", 1)
    assert found.mend.splitlines()[1:] == ["alex ALL=(root) NOPASSWD: /bin/systemctl daemon-reload"]


def gpu(**changes) -> Gpu:
    given = {"index": 0, "uuid": "u", "total_mib": 24576, "used_mib": 12, "free_mib": 24564, "sm_clock_mhz": 210}
    given |= {"temperature_c": 41, "utilisation_percent": 0, "power_w": 20.0, "throttle": ("gpu_idle",)}
    return Gpu(**(given | changes))


def test_the_gpus_idle_level_and_who_else_is_there():
    idle = GpuState((gpu(),), ())
    assert "12 of 24576 MiB used, idle" in probes.judge_memory(idle, {}, KNOWN).said
    own = GpuState((gpu(used_mib=23000),), (GpuProcess(77, "u", 22900, "python"),))
    assert probes.judge_foreign(own, KNOWN).level == "ok"
    other = GpuState((gpu(),), (GpuProcess(99, "u", 300, "Xorg"),))
    found = probes.judge_foreign(other, KNOWN)
    assert (found.level, found.number) == ("fail", 1)
    assert "99 (Xorg, 300 MiB)" in found.said


def test_persistence_mode_and_held_clocks_are_noted():
    told = {"persistence": "Enabled", "sm_clock_max_mhz": "2100", "power_limit_w": "350.00"}
    assert probes.judge_clocks(GpuState((gpu(),), ()), told).level == "ok"
    assert probes.judge_clocks(GpuState((gpu(),), ()), told | {"persistence": "Disabled"}).level == "warn"
    hot = GpuState((gpu(throttle=("sw_thermal_slowdown",)),), ())
    assert "sw_thermal_slowdown" in probes.judge_clocks(hot, told).said


def test_an_engine_whose_version_nobody_knows_would_be_pooled_with_its_successor():
    told = {"engine_version": "0.26.0", "engine_python": "3.12.3", "torch": "2.9"}
    assert probes.judge_engine(told, "/v/python", KNOWN).said == "vLLM 0.26.0, Python 3.12.3, torch 2.9"
    assert probes.judge_engine({}, "/v/python", KNOWN).level == "warn"
    assert probes.judge_engine(told | {"engine_version": None}, "/v/python", KNOWN).level == "fail"


def test_a_server_without_its_counter_cannot_be_measured():
    assert probes.judge_metrics(1234.0, 0.0).number == 1234.0
    assert "--disable-log-stats" in probes.judge_metrics(None, None).mend


# --- all together ----------------------------------------------------------------------------------------------------


def test_answers_come_back_by_their_commands_whatever_they_printed():
    argvs = [("printf", "a\nb"), ("false",), ("sh", "-c", "exit 3")]
    done = subprocess.run(
        batch(argvs, lambda argv: " ".join(f"'{word}'" for word in argv)), capture_output=True, text=True, check=True
    )
    found = unbatch(argvs, done.stdout)
    assert [(found[argv].status, found[argv].text) for argv in argvs] == [(0, "a\nb"), (1, ""), (3, "")]


def test_every_check_has_its_place_in_the_table():
    assert {check.name for check in CHECKS} <= set(ORDER)


def test_a_table_never_cuts_what_shall_be_pasted():
    long = "alex ALL=(root) NOPASSWD: /usr/bin/tee " + "x" * 200
    diagnosis = Diagnosis(
        "gwen", (Finding("sudo", "fail", "no [red]markup", 1, "missing", f"do:\n{long}"),), {"gpu": "y"}
    )
    written = io.StringIO()
    Console(file=written, width=80).print(doctor.table(diagnosis))
    assert long in doctor.mends(diagnosis)
    assert "no [red]markup" in written.getvalue()
    assert long in doctor.plain(diagnosis)
    assert (diagnosis.worst, diagnosis.exit_code) == ("fail", 3)


def test_the_rehearsal_box_is_asked_what_concerns_it_and_nothing_is_made(tmp_path):
    found = doctor.examine(Options(matrix=ROOT / "matrix.yaml", out=tmp_path / "out"))
    checks = {one.check: one for one in found.findings}
    assert {"reach", "login", "tools", "unit", "exec", "variants", "engine", "disk", "clock", "leftovers"} <= set(
        checks
    )
    assert not {"sudo", "journal", "active", "linger"} & set(checks)
    assert checks["variants"].number == 5
    assert (found.exit_code, found.not_asked) == (0, {})
    assert not (tmp_path / "out").exists()


def test_a_command_that_is_a_shell_ends_what_needs_it(tmp_path):
    (tmp_path / "unit.service").write_text("[Service]\nExecStart=/bin/sh -c 'vllm serve m'\n")
    (tmp_path / "matrix.yaml").write_text(
        "boxes:\n  here: {transport: local, service: process, unit_file: unit.service}\nvariants:\n  a: {}\n"
    )
    found = doctor.examine(Options(matrix=tmp_path / "matrix.yaml", out=tmp_path))
    assert [one.check for one in found.findings if one.level == "fail"] == ["exec"]
    assert set(found.not_asked) == {"variants", "engine", "metrics"}
    assert found.exit_code == 3


def test_the_command_prints_plain_lines_where_no_terminal_is_and_json_when_asked(tmp_path, capsysbinary):
    words = {"out": str(tmp_path), "matrix": str(ROOT / "matrix.yaml")}
    commands.doctor_(Context(), **words)
    plain = capsysbinary.readouterr().out.decode()
    assert plain.startswith("ok   reach: ")
    assert "a rehearsal can run here\nthe box `gwen` was not looked at: the same command with --box gwen" in plain
    commands.doctor_(Context(), json=True, **words)
    found = json.loads(capsysbinary.readouterr().out)
    assert (found["v"], found["box"]) == (1, "rehearsal")
    assert {one["level"] for one in found["checks"]} <= {"ok", "warn", "fail"}


def test_what_could_not_be_asked_is_one_line_a_reason():
    missing = dict.fromkeys(("login", "tools", "sudo"), "as there is no way in") | {"metrics": "as it does not run"}
    found = Diagnosis("gwen", (Finding("reach", "fail", "no route", mend="mend it"),), missing)
    assert doctor.plain(found).splitlines()[2:4] == [
        "     not asked, as there is no way in: login, tools, sudo",
        "     not asked, as it does not run: metrics",
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(doctor.table(found))
    assert "3 more   –     not asked, as there is no way in: login, tools, sudo" in console.export_text()


def test_a_question_that_hangs_is_a_finding_and_the_rest_is_asked_all_the_same(tmp_path, monkeypatch):
    def hang(*_):
        raise CommandTimeout("`nvidia-smi` did not end within 30 s", hint="reboot")

    monkeypatch.setattr(probes, "gpus", hang)
    found = doctor.examine(Options(matrix=ROOT / "matrix.yaml", out=tmp_path / "out"))
    assert [(one.check, one.mend) for one in found.findings if one.level == "fail"] == [("gpu", "reboot")]
    assert {"engine", "disk", "leftovers"} <= {one.check for one in found.findings}
