"""A systemd unit on the real box, over ssh, as a login without root that sudo allows exactly what we say we need."""

from __future__ import annotations

import json
import re
import threading
import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from orchestrator.box import caches
from orchestrator.box.engines import ENGINES, Launch
from orchestrator.box.services import make_service
from orchestrator.box.ssh import SshTransport
from orchestrator.box.sshconfig import hop
from orchestrator.box.systemd import SystemdService
from orchestrator.errors import BoxError, CommandFailed
from orchestrator.matrix import BoxSpec

PYTHON = "/usr/bin/python3"
# Says what it was given, then serves until it is told to stop. `--mode` says how it takes a stop, or how it ends.
SHOW = r"""
import json, os, signal, subprocess, sys, time
mode = sys.argv[sys.argv.index("--mode") + 1] if "--mode" in sys.argv else "calm"
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(json.dumps(sys.argv[1:]), flush=True)
print(json.dumps(dict(os.environ)), flush=True)
print("serving\x1b[0m with a control character", flush=True)
if mode == "exit-0":
    sys.exit(0)
if mode == "exit-1":
    sys.exit("last words")
time.sleep(1000)
"""
UNIT = """\
[Unit]
Description=A server of the test
[Service]
User=alex
Environment=PRODUCTION=1
ExecStart=/usr/bin/python3 /opt/show.py --model m \\
  # a comment inside
  --kwargs '{"enable_thinking": false}' --port 8080
Restart=always
RestartSec=100ms
[Install]
WantedBy=multi-user.target
"""
NAME = "shown.service"


@pytest.fixture
def unit(box):
    (box.root / "opt").mkdir(exist_ok=True)
    (box.root / "opt/show.py").write_text(SHOW)
    box.write_unit(NAME, UNIT)
    yield box
    box.sh(("systemctl", "stop", "coldboot-restore-shown.timer"), check=False)
    box.sh(("rm", "-rf", "/run/coldboot"))
    box.sh(("sh", "-c", "rm -f /run/systemd/system/coldboot-*"))
    box.remove_unit(NAME)


@pytest.fixture
def service(unit, ssh, install_sudoers):
    made = serve(ssh)
    made.describe()
    install_sudoers(made.sudo_lines())
    return made


def serve(transport, **changes) -> SystemdService:
    fields = {"name": "gwen", "transport": "ssh", "service": "systemd", "unit": NAME}
    return make_service(transport, BoxSpec(**(fields | changes)), None)


def launch(*arguments: str, env: dict[str, str] | None = None, unset: tuple[str, ...] = ()) -> Launch:
    return Launch((PYTHON, "/opt/show.py", *arguments), env or {}, unset, 1, "m")


class Heard:
    """The entries of one start, collected by a thread."""

    def __init__(self, service) -> None:
        self.stream = service.follow(service.cursor())
        self.entries = []
        self.broken = None
        self.came = threading.Condition()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        try:
            for entry in self.stream:
                with self.came:
                    self.entries.append(entry)
                    self.came.notify_all()
        except BoxError as error:
            self.broken = error

    def until(self, text: str, deadline_s: float = 10.0):
        with self.came:
            assert self.came.wait_for(lambda: any(text in e.message for e in self.entries), deadline_s), self.entries
            return next(e for e in self.entries if text in e.message)

    def close(self) -> None:
        self.stream.close()
        self.thread.join(5)
        assert not self.thread.is_alive()
        assert self.broken is None


def begin(service, made: Launch) -> Heard:
    service.install(made)
    heard = Heard(service)
    service.start()
    return heard


def until(condition, deadline_s: float = 15.0):
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, "the deadline passed"
        threading.Event().wait(0.02)
    return found


def property_of(box, name: str, unit: str = NAME) -> str:
    return box.sh(("systemctl", "show", "-P", name, unit)).stdout.strip()


def started(box) -> str:
    """Production, serving; its main process id."""
    box.sh(("systemctl", "start", NAME))
    return property_of(box, "MainPID")


# --- what is there ---------------------------------------------------------------------------------------------------


def test_the_unit_is_read_with_the_users_drop_ins_and_without_ours(unit, ssh, install_sudoers):
    folder = unit.root / "etc/systemd/system" / f"{NAME}.d"
    folder.mkdir()
    (folder / "override.conf").write_text(
        "# /etc/systemd/system/shown.service.d/zz.conf\n[Service]\nExecStart=\n"
        "ExecStart=/usr/bin/python3 /opt/show.py --model m --host %H --name ${PRODUCTION}\n"
    )
    unit.sh(("systemctl", "daemon-reload"))
    service = serve(ssh, unit="shown")
    found = service.describe()
    assert found.argv == (PYTHON, "/opt/show.py", "--model", "m", "--host", "gwen", "--name", "1")
    assert (found.user, found.home, found.env) == ("alex", "/home/alex", {"PRODUCTION": "1"})
    assert (found.name, found.active, found.enabled, found.main_pid) == (NAME, False, False, None)
    assert found.drop_ins == (f"/etc/systemd/system/{NAME}.d/override.conf",)
    install_sudoers(service.sudo_lines())
    service.install(launch("ours"))
    again = serve(ssh).describe()
    assert again.argv == found.argv
    assert again.drop_ins == found.drop_ins
    assert again.our_drop_in
    service.start()
    assert until(lambda: service.effective()[0]) == (PYTHON, "/opt/show.py", "ours")


def test_what_cannot_be_measured_is_refused_with_what_to_run(unit, ssh):
    with pytest.raises(BoxError, match=r"no unit nope\.service on the box") as refused:
        serve(ssh, unit="nope").describe()
    assert "list-unit-files" in str(refused.value)
    unit.write_unit("once.service", "[Service]\nType=oneshot\nExecStart=/bin/true\n")
    with pytest.raises(BoxError, match="Type=oneshot"):
        serve(ssh, unit="once").describe()
    unit.sh(("systemd-run", "--unit=passing", "sleep", "100"))
    with pytest.raises(BoxError, match="transient"):
        serve(ssh, unit="passing").describe()
    unit.sh(("systemctl", "stop", "passing"))
    folder = unit.root / "etc/systemd/system" / f"{NAME}.d"
    folder.mkdir()
    (folder / "zzz.conf").write_text("[Service]\nNice=1\n")
    unit.sh(("systemctl", "daemon-reload"))
    with pytest.raises(BoxError, match=r"zzz\.conf is read after our drop-in"):
        serve(ssh).describe()


def test_a_login_that_cannot_read_the_journal_is_told_which_group(unit, box):
    unit.sh(("gpasswd", "-d", "alex", "systemd-journal"))
    transport = SshTransport(hop(box.alias, config=box.ssh_config))
    try:
        with pytest.raises(BoxError, match="cannot read the journal") as refused:
            serve(transport).describe()
        assert "usermod -aG systemd-journal alex" in str(refused.value)
    finally:
        transport.close()
        unit.sh(("gpasswd", "-a", "alex", "systemd-journal"))


# --- one life --------------------------------------------------------------------------------------------------------


def test_a_life_by_exactly_the_commands_that_sudoers_allows(service, unit):
    pid = started(unit)
    was = service.production()
    assert (was.active, was.enabled, was.command[:2]) == (True, False, (PYTHON, "/opt/show.py"))
    service.arm(was, 60)
    service.stop(kill=False, deadline_s=20)
    assert service.pids() == ()
    assert service.state().active_state == "inactive"

    made = launch("--model", "m", env={"VARIANT": "spec 1", "PRODUCTION": "0"})
    heard = begin(service, made)
    entry = heard.until("serving")
    # It may hold keys: root's alone, also after it was written anew.
    for _twice in range(2):
        shown = unit.sh(("stat", "-c", "%U %a", f"/run/systemd/system/{NAME}.d/zz-coldboot.env")).stdout.split()
        assert shown == ["root", "600"]
        service.install(made)
    state = service.state()
    assert (state.active_state, state.n_restarts, state.exit_status) == ("active", 0, None)
    assert (entry.invocation_id, entry.unit, entry.transport) == (state.invocation_id, NAME, "stdout")
    assert entry.message == "serving\x1b[0m with a control character"
    assert entry.pid == state.main_pid
    assert len(service.pids()) == 2
    assert state.main_pid in service.pids()
    argv, env = service.effective()
    assert argv == made.argv
    assert (env["VARIANT"], env["PRODUCTION"]) == ("spec 1", "0")
    begun = heard.until("Started ")
    assert (begun.identifier, begun.unit, begun.invocation_id) == ("systemd", NAME, state.invocation_id)

    service.stop(kill=False, deadline_s=20)
    heard.until("Deactivated successfully")
    assert service.state().active_state == "inactive"
    heard.close()
    service.beat()
    service.restore(was)
    assert until(lambda: property_of(unit, "MainPID")) not in ("0", pid)
    assert until(lambda: service.effective()[0]) == was.command
    assert service.effective()[1]["PRODUCTION"] == "1"
    after = service.state().invocation_id
    service.restore(was)
    assert service.state().invocation_id == after
    service.disarm()
    service.disarm()
    left = unit.sh(("sh", "-c", f"ls -d /run/coldboot/* /run/systemd/system/*coldboot* {service.drop_in}"), check=False)
    assert left.stdout == ""
    assert unit.sh(("systemctl", "list-units", "--all", "--plain", "--no-legend", "coldboot*")).stdout == ""


def test_without_the_lines_of_sudoers_the_error_says_which_are_missing(unit, ssh, install_sudoers):
    service = serve(ssh)
    service.describe()
    install_sudoers(())
    with pytest.raises(CommandFailed, match=r"mkdir -p /run/systemd/system/shown\.service\.d") as refused:
        service.install(launch("x"))
    for line in service.sudo_lines()[:3]:
        assert line in str(refused.value)


@pytest.mark.parametrize(
    ("mode", "said", "result", "status"),
    [
        # systemd forgets an inactive unit that nothing refers to, and its status with it: the journal has to tell.
        ("exit-0", "Deactivated successfully", "success", None),
        ("exit-1", "Main process exited", "exit-code", 1),
    ],
)
def test_a_crash_stays_a_crash(service, mode, said, result, status):
    heard = begin(service, launch("--mode", mode))
    heard.until(said)
    state = until(lambda: (found := service.state()).active_state != "deactivating" and found)
    assert (state.n_restarts, state.result, state.exit_status, state.main_pid) == (0, result, status, None)
    assert service.pids() == ()
    heard.close()


def test_a_killed_main_process_takes_its_children_along(service, unit):
    heard = begin(service, launch())
    heard.until("serving")
    unit.kill(service.state().main_pid)
    heard.until("code=killed, status=9/KILL")
    until(lambda: service.state().active_state == "failed")
    assert service.state().exit_status == 137
    assert until(lambda: service.pids() == ())
    heard.close()


def test_a_stubborn_one_is_killed_at_once_or_at_the_deadline(service):
    for kill, least, most in ((True, 0.0, 2.0), (False, 1.0, 5.0)):
        heard = begin(service, launch("--mode", "stubborn"))
        heard.until("serving")
        before = time.monotonic()
        service.stop(kill=kill, deadline_s=1.0)
        assert least <= time.monotonic() - before < most
        assert service.pids() == ()
        heard.close()


def test_many_boots_in_a_row_meet_no_start_limit(service):
    service.install(launch("--mode", "exit-1"))
    for _ in range(8):
        before = service.state().invocation_id
        service.start()
        until(lambda before=before: (now := service.state()).invocation_id != before and now.result == "exit-code")
    assert service.state().result == "exit-code"


def test_the_second_boot_needs_no_reload_and_runs_its_own_command(service, unit):
    for number in (1, 2):
        made = launch("--spec-tokens", str(number), "a b", env={"N": str(number)})
        reloads = [action.argv for action in service.install_actions(made) if "daemon-reload" in action.argv]
        assert len(reloads) == (1 if number == 1 else 0)
        service.install(made)
        service.start()
        argv, env = until(lambda: (found := service.effective())[0][:1] == (PYTHON,) and found)
        assert (argv, env["N"]) == (made.argv, str(number))
        service.stop(kill=True, deadline_s=5)
    other = launch("--spec-tokens", "3", unset=("PRODUCTION",))
    service.install(other)
    service.start()
    assert "PRODUCTION" not in until(lambda: (found := service.effective())[0] and found[1])
    service.stop(kill=True, deadline_s=5)


def test_when_our_drop_in_is_gone_production_is_not_started_by_mistake(service, unit):
    service.install(launch("one"))
    unit.sh(("rm", service.drop_in))
    unit.sh(("systemctl", "daemon-reload"))
    with pytest.raises(
        BoxError, match=r"our drop-in for shown\.service is gone, and without it production would start"
    ):
        service.start()
    assert property_of(unit, "ActiveState") == "inactive"
    service.install(launch("two"))
    service.start()
    assert until(lambda: service.effective()[0]) == (PYTHON, "/opt/show.py", "two")


# --- quoting ---------------------------------------------------------------------------------------------------------

TRICKY = st.sampled_from(
    [
        "%",
        "%h",
        "$",
        "$HOME",
        "${HOME}",
        "$$",
        '"',
        "'",
        "\\",
        "\\n",
        "\n",
        "\r",
        "\t",
        " ",
        ";",
        "#",
        '{"a": "b"}',
        "ä😀",
        "\x01",
    ]
)
TEXT = st.lists(st.one_of(TRICKY, st.characters(exclude_characters="\0", exclude_categories=("Cs",)))).map("".join)


def is_env(text: str) -> bool:
    return not any(
        (c < " " and c not in "\n\t") or c == "\x7f" or ord(c) & 0xFFFE == 0xFFFE or 0xFDD0 <= ord(c) <= 0xFDEF
        for c in text
    )


@settings(
    max_examples=8,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(TEXT, min_size=8, max_size=24), st.lists(TEXT.filter(is_env), min_size=4, max_size=12))
def test_every_argument_and_variable_passes_through_the_real_systemd(service, arguments, values):
    made = launch("--mode", "calm", *arguments, env={f"V{number}": value for number, value in enumerate(values)})
    service.install(made)
    service.start()
    argv, env = until(lambda: (found := service.effective())[0][:1] == (PYTHON,) and found)
    service.stop(kill=True, deadline_s=10)
    assert argv == made.argv
    assert {name: env.get(name) for name in made.env} == made.env


def test_json_as_in_the_seed_arrives_in_the_process_itself(service):
    arguments = (
        "--default-chat-template-kwargs",
        '{"enable_thinking": false}',
        "",
        "100%",
        "$HOME",
        "${X}",
        "a\\nb\nc",
        "😀",
    )
    heard = begin(service, launch(*arguments, env={"J": '{"a": "b c", "d": "$e%f"}'}))
    heard.until("serving")
    assert heard.until(json.dumps(list(arguments)))
    env = json.loads(next(e.message for e in heard.entries if e.message.startswith('{"')))
    assert env["J"] == '{"a": "b c", "d": "$e%f"}'
    heard.close()


def test_our_environment_prevails_over_productions_environment_file(unit, ssh, install_sudoers):
    (unit.root / "etc/shown.env").write_text("VLLM_CACHE_ROOT=/production\nKEPT=1\nGONE=1\n")
    unit.write_unit(NAME, UNIT.replace("Environment=", "EnvironmentFile=/etc/shown.env\nEnvironment="))
    service = serve(ssh)
    found = service.describe()
    assert found.env == {"PRODUCTION": "1", "VLLM_CACHE_ROOT": "/production", "KEPT": "1", "GONE": "1"}
    install_sudoers(service.sudo_lines())
    service.install(launch(env={"VLLM_CACHE_ROOT": "/cold $x %h 'q' \"d\" \\"}, unset=("GONE",)))
    service.start()
    _, env = until(lambda: (found := service.effective())[0] and found)
    assert (env["VLLM_CACHE_ROOT"], env["KEPT"]) == ("/cold $x %h 'q' \"d\" \\", "1")
    assert "GONE" not in env
    service.restore(service.production())
    assert unit.sh(("ls", "/run/systemd/system/shown.service.d"), check=False).stdout == ""


# --- production comes back -------------------------------------------------------------------------------------------


def test_a_dead_campaign_gives_production_back_by_itself_and_leaves_nothing(service, unit):
    started(unit)
    was = service.production()
    service.arm(was, 2)
    heard = begin(service, launch("variant"))
    heard.until("serving")
    heard.close()
    begun = time.monotonic()
    until(lambda: not unit.sh(("ls", service.drop_in), check=False).stdout)
    assert time.monotonic() - begun < 6
    until(lambda: service.effective()[0] == was.command)
    until(lambda: unit.sh(("ls", "/run/coldboot/shown.service"), check=False).returncode != 0)
    assert until(lambda: not unit.sh(("sh", "-c", "ls /run/systemd/system/coldboot*"), check=False).stdout)
    until(lambda: property_of(unit, "ActiveState", "coldboot-restore-shown.timer") == "inactive")
    with pytest.raises(BoxError, match=r"has restored shown\.service by itself"):
        service.beat()
    said = unit.sh(("journalctl", "-q", "-u", "coldboot-restore-shown.service", "-o", "cat")).stdout
    assert re.search(r"no sign of life of the campaign for [2-5] s: restoring shown\.service", said)


def test_a_living_campaign_keeps_the_timer_quiet(service, unit):
    started(unit)
    was = service.production()
    service.arm(was, 2)
    service.install(launch("variant"))
    end = time.monotonic() + 4
    while time.monotonic() < end:
        service.beat()
        threading.Event().wait(0.3)
    assert unit.sh(("ls", service.drop_in)).stdout
    service.restore(was)
    service.disarm()


def test_what_was_stopped_stays_stopped(service, unit):
    was = service.production()
    assert not was.active
    service.arm(was, 2)
    begin(service, launch("variant")).close()
    until(lambda: not unit.sh(("ls", service.drop_in), check=False).stdout)
    until(lambda: service.state().active_state == "inactive")
    with pytest.raises(BoxError, match=r"has restored shown\.service by itself"):
        until(lambda: service.install(launch("variant")))
    service.disarm()
    begin(service, launch("variant")).close()
    service.restore(was)
    assert service.state().active_state == "inactive"
    service.restore(was)
    assert service.state().active_state == "inactive"


def test_the_next_campaign_still_knows_what_a_killed_one_found(service, unit, ssh):
    started(unit)
    service.arm(service.production(), 60)
    service.stop(kill=True, deadline_s=5)
    service.install(launch("variant"))
    later = serve(ssh).production()
    assert later.active
    assert later.command[-2:] == ("--port", "8080")


def test_a_reboot_takes_everything_of_ours_away(service, unit, box):
    unit.sh(("systemctl", "enable", NAME))
    started(unit)
    service.arm(service.production(), 60)
    service.install(launch("variant"))
    box.reboot(cut=True)
    assert property_of(unit, "DropInPaths") == ""
    assert until(lambda: property_of(unit, "MainPID") != "0")
    pid = int(property_of(unit, "MainPID"))
    argv = next(process.argv for process in box.processes() if process.pid == pid)
    assert argv[-2:] == ("--port", "8080")


# --- other units and users -------------------------------------------------------------------------------------------


def test_caches_of_a_service_that_runs_as_somebody_else(unit, ssh, install_sudoers):
    unit.sh(("sh", "-c", "id svc 2>/dev/null || useradd -m svc"))
    unit.write_unit(NAME, UNIT.replace("User=alex", "User=svc"))
    service = serve(ssh)
    facts = service.describe()
    assert (facts.user, facts.home) == ("svc", "/home/svc")
    lines = service.sudo_lines()
    assert lines[-1] == "alex ALL=(svc) NOPASSWD: /usr/bin/sh -s"
    install_sudoers(lines)
    roots = caches.prepare(
        ssh, facts, ENGINES["vllm"], experiment="e", boot="b01-x", variant="x", state="cold", root=None
    )
    owner = unit.sh(("stat", "-c", "%U %a", roots.root)).stdout.split()
    assert owner == ["svc", "700"]
    service.install(launch(env=roots.env))
    service.start()
    argv, env = until(lambda: (found := service.effective())[0] and found)
    assert argv == launch().argv
    assert env["VLLM_CACHE_ROOT"] == f"{roots.root}/vllm"
    service.stop(kill=True, deadline_s=5)
    roots.remove()
    assert unit.sh(("ls", roots.root), check=False).returncode != 0
    caches.sweep(ssh, facts)


def test_a_sandbox_lets_the_cold_caches_through(unit, ssh, install_sudoers):
    unit.write_unit(NAME, UNIT.replace("User=alex", "User=alex\nProtectSystem=strict\nProtectHome=read-only"))
    service = serve(ssh)
    facts = service.describe()
    install_sudoers(service.sudo_lines())
    roots = caches.prepare(
        ssh, facts, ENGINES["vllm"], experiment="e", boot="b01-x", variant="x", state="cold", root=None
    )
    code = "import os, pathlib, time\npathlib.Path(os.environ['TRITON_CACHE_DIR'], 'k').write_text('x')\n"
    code += (
        "try: pathlib.Path('/home/alex/k').write_text('x')\nexcept OSError as e: print(e, flush=True)\ntime.sleep(100)"
    )
    heard = begin(service, Launch((PYTHON, "-c", code), roots.env, (), 1, "m"))
    heard.until("Read-only file system: '/home/alex/k'")
    assert unit.sh(("cat", f"{roots.root}/triton/k")).stdout == "x"
    service.stop(kill=True, deadline_s=5)
    heard.close()
    caches.sweep(ssh, facts)


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ("ProtectHome=yes", r"ProtectHome=yes: it could not see"),
        ("DynamicUser=yes", r"DynamicUser=yes: there is no user"),
    ],
)
def test_a_sandbox_that_hides_the_caches_is_refused_with_what_to_do(unit, ssh, lines, what):
    unit.write_unit(NAME, UNIT.replace("User=alex", f"User=alex\n{lines}"))
    with pytest.raises(BoxError, match=what) as refused:
        serve(ssh).describe()
    assert refused.value.hint
    if "ProtectHome" in lines:
        assert serve(ssh, cache_root="/var/cache/coldboot").describe().exists


def test_a_unit_of_the_users_own_manager_needs_no_root(box, ssh):
    service = serve(ssh, unit="mine", service="systemd-user")
    folder = box.root / "home/alex/.config/systemd/user"
    box.sh(("runuser", "-u", "alex", "--", "mkdir", "-p", "/home/alex/.config/systemd/user"))
    (box.root / "opt").mkdir(exist_ok=True)
    (box.root / "opt/show.py").write_text(SHOW)
    (folder / "mine.service").write_text(UNIT.replace("User=alex\n", ""))
    box.sh(("loginctl", "enable-linger", "alex"))
    try:
        ssh.run(("env", "XDG_RUNTIME_DIR=/run/user/1000", "systemctl", "--user", "daemon-reload"), timeout_s=10)
        facts = service.describe()
        assert (facts.user, facts.home, service.sudo_lines()) == ("alex", "/home/alex", ())
        was = service.production()
        service.arm(was, 60)
        heard = begin(service, launch("variant", env={"A": "b c"}))
        entry = heard.until("serving")
        assert entry.invocation_id == service.state().invocation_id
        assert heard.until("Started ").identifier == "systemd"
        assert service.effective()[0] == launch("variant").argv
        assert service.effective()[1]["A"] == "b c"
        shown = box.sh(("stat", "-c", "%U %a", "/run/user/1000/systemd/user/mine.service.d/zz-coldboot.env")).stdout
        assert shown.split() == ["alex", "600"]
        assert len(service.pids()) == 2
        service.beat()
        service.stop(kill=True, deadline_s=5)
        heard.close()
        service.restore(was)
        service.disarm()
        assert box.sh(
            ("sh", "-c", "ls /run/user/1000/systemd/user /run/user/1000/coldboot"), check=False
        ).stdout.split() == [
            "/run/user/1000/coldboot:",
            "/run/user/1000/systemd/user:",
        ]
    finally:
        box.sh(("loginctl", "disable-linger", "alex"))
