"""coldboot-box on the real box: its own files installed as a user would, one line of sudoers, and no other right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_campaign_box import ROOT, UNIT_TEXT, Campaign, await_true, effective, ours_on, serves
from test_campaign_box import UNIT as PRODUCTION
from test_services_systemd import NAME, PYTHON, SHOW, TEXT, UNIT, Heard, is_env, launch, until

from orchestrator.box import caches, coldboot_box, helper
from orchestrator.box.commands import HELPER
from orchestrator.box.engines import ENGINES, Launch
from orchestrator.box.services import make_service
from orchestrator.errors import BoxError, CommandFailed, UsageError
from orchestrator.matrix import BoxSpec

CONF = f"/etc/coldboot-box/{NAME}.conf"
CACHE = "/home/svc/.cache/coldboot/shown"
PLACE = f"/run/systemd/system/{NAME}.d"


@pytest.fixture(scope="module")
def installed(box):
    """A unit of another user than the login, and the helper for it, by the script that a user runs."""
    (box.root / "opt").mkdir(exist_ok=True)
    (box.root / "opt/show.py").write_text(SHOW)
    box.sh(("sh", "-c", "id svc 2>/dev/null || useradd -m svc"))
    box.write_unit(NAME, UNIT.replace("User=alex", "User=svc"))
    box.sh(("sh", "-s"), feed=helper.install_script(NAME, box.login, (CACHE,)))
    yield box
    box.sh(("sh", "-c", f"rm -rf {HELPER} {coldboot_box.CONFIG} /etc/sudoers.d/coldboot-box-alex /run/coldboot"))
    box.remove_unit(NAME)


@pytest.fixture
def box_with_helper(installed):
    """The same with nothing of an earlier test."""
    conf = installed.root / CONF.lstrip("/")
    kept = conf.read_text()
    yield installed
    conf.unlink(missing_ok=True)
    conf.write_text(kept)
    installed.sh(("systemctl", "stop", "coldboot-restore-shown.timer"), check=False)
    installed.sh(("sh", "-c", f"rm -rf /run/coldboot {PLACE} {CACHE}; rm -f /run/systemd/system/coldboot-*"))
    installed.write_unit(NAME, UNIT.replace("User=alex", "User=svc"))
    installed.sh(("systemctl", "kill", "-s", "KILL", NAME), check=False)
    installed.sh(("systemctl", "stop", NAME))


@pytest.fixture
def service(box_with_helper, ssh):
    made = make_service(ssh, spec(), None)
    made.describe()
    return made


def spec(**changes) -> BoxSpec:
    return BoxSpec(name="gwen", transport="ssh", service="systemd", unit=NAME, **changes)


def call(box, *words: str, feed: str = "", uid: int = 1000, **variables: str) -> subprocess.CompletedProcess[str]:
    """The helper as sudo starts it for the login, without the second that ssh takes."""
    told = {"SUDO_UID": str(uid), "SUDO_USER": "alex", **variables}
    return box.sh(("env", *(f"{k}={v}" for k, v in told.items()), HELPER, *words), check=False, feed=feed)


def drop_in(service, made: Launch) -> tuple[str, str]:
    text = service.drop_in_text(made)
    return text, service._env_text(made, text)


def whole(service, made: Launch) -> str:
    return coldboot_box.CUT.join(drop_in(service, made))


def left_on(box) -> str:
    """What of ours is there, and what systemd knows of us; empty: nothing."""
    files = box.sh(("sh", "-c", f"find {PLACE} /run/coldboot /run/coldboot-evil -mindepth 1 2>/dev/null"), check=False)
    return files.stdout + box.sh(("systemctl", "show", "-P", "DropInPaths", NAME)).stdout.strip()


# --- as it is installed ----------------------------------------------------------------------------------------------


def test_the_script_installs_three_files_of_roots_and_may_be_run_again(box_with_helper):
    box = box_with_helper
    (box.root / CONF.lstrip("/")).write_text(f"login alex\ncache {CACHE}\nenv PYTHONPATH\n")
    before = box.sh(("sh", "-c", f"cat {CONF} /etc/sudoers.d/coldboot-box-alex; sha256sum {HELPER}")).stdout
    done = box.sh(("sh", "-s"), feed=helper.install_script(NAME, box.login, (CACHE,)))
    assert f"{CONF} is kept as it is" in done.stdout
    assert f"coldboot-box {coldboot_box.VERSION}\nsha256 {helper.digest()}\n" in done.stdout
    assert box.sh(("sh", "-c", f"cat {CONF} /etc/sudoers.d/coldboot-box-alex; sha256sum {HELPER}")).stdout == before
    modes = box.sh(("stat", "-c", "%U %a %n", HELPER, coldboot_box.CONFIG, CONF, "/etc/sudoers.d/coldboot-box-alex"))
    assert modes.stdout.splitlines() == [
        f"root 755 {HELPER}",
        f"root 755 {coldboot_box.CONFIG}",
        f"root 644 {CONF}",
        "root 440 /etc/sudoers.d/coldboot-box-alex",
    ]
    assert box.sh(("sh", "-c", f"ls -A /usr/local/sbin {coldboot_box.CONFIG}")).stdout.count("coldboot-box.") == 0


def test_sudo_allows_the_login_the_helper_and_nothing_else(box_with_helper, ssh):
    listed = ssh.run(("sudo", "-n", "-l"), timeout_s=20).stdout
    assert re.findall(r"^\s+\((.*)$", listed, re.MULTILINE) == [f"root) NOPASSWD: {HELPER}"]
    for argv in (("systemctl", "daemon-reload"), ("tee", f"{PLACE}/x"), ("sh", "-c", "id"), ("python3", HELPER)):
        with pytest.raises(CommandFailed, match="sudo"):
            ssh.run(argv, timeout_s=20, as_user="root")
    with pytest.raises(CommandFailed, match="sudo"):
        ssh.run((HELPER, "version"), timeout_s=20, as_user="svc")
    for how in (f"PYTHONPATH=/x sudo -n --preserve-env=PYTHONPATH {HELPER} version", f"sudo -n A=b {HELPER} version"):
        said = ssh.run(("sh", "-c", how), timeout_s=20, check=False)
        assert (said.status, "not allowed to set" in said.stderr) == (1, True)


# --- one life --------------------------------------------------------------------------------------------------------


def test_a_life_of_a_service_of_another_user_by_the_helper_alone(service, box_with_helper, ssh):
    box = box_with_helper
    box.sh(("systemctl", "start", NAME))
    facts = service.describe()
    assert (facts.helper, facts.user, service.sudo_lines()) == (True, "svc", (f"alex ALL=(root) NOPASSWD: {HELPER}",))
    was = service.production()
    assert was.active
    service.arm(was, 60)
    service.stop(kill=False, deadline_s=20)
    engine = ENGINES["vllm"]
    roots = caches.prepare(ssh, facts, engine, experiment="e", boot="b01-x", variant="x", state="cold")
    assert box.sh(("stat", "-c", "%U %a", roots.root)).stdout.split() == ["svc", "700"]
    assert caches.free_mib(ssh, facts) > 1
    made = launch("--model", "m", "100% $HOME \"q\" 'x' ä😀\nb", env=roots.env | {"VARIANT": "spec 1"})
    service.install(made)
    owner = box.sh(("stat", "-c", "%U %a", f"{PLACE}/zz-coldboot.env")).stdout.split()
    assert owner == ["root", "600"]
    heard = Heard(service)
    service.start()
    heard.until("serving")
    argv, env = service.effective()
    assert argv == made.argv
    assert (env["VARIANT"], env["TRITON_CACHE_DIR"]) == ("spec 1", f"{roots.root}/triton")
    assert len(service.pids()) == 2
    again = launch("second", env=roots.env)
    (action,) = service.install_actions(again)
    assert action.argv == (HELPER, NAME, "arguments")
    service.stop(kill=True, deadline_s=5)
    service.install(again)
    service.start()
    assert until(lambda: service.effective()[0]) == again.argv
    heard.close()
    service.beat()
    service.restore(was)
    assert until(lambda: service.effective()[0]) == was.command
    service.restore(was)
    service.disarm()
    service.disarm()
    roots.remove()
    caches.sweep(ssh, facts)
    assert left_on(box) == ""
    assert box.sh(("ls", CACHE), check=False).returncode != 0
    box.sh(("systemctl", "stop", NAME))


def test_a_dead_campaign_gives_production_back_as_the_helper_armed_it(service, box_with_helper):
    box = box_with_helper
    box.sh(("systemctl", "start", NAME))
    was = service.production()
    service.arm(was, 2)
    service.install(launch("variant"))
    service.stop(kill=True, deadline_s=5)
    service.start()
    until(lambda: not left_on(box), 20)
    assert until(lambda: service.effective()[0] == was.command)
    with pytest.raises(BoxError, match=r"has restored shown\.service by itself"):
        service.beat()


def test_the_heartbeat_is_the_logins_and_what_it_writes_there_is_no_code(service, box_with_helper, ssh):
    service.arm(service.production(), 1)
    for text in ("x[$(touch /run/coldboot-evil)]", "$(touch /run/coldboot-evil)", "0; touch /run/coldboot-evil"):
        ssh.run(("tee", f"/run/coldboot/{NAME}/heart"), input=text, timeout_s=10)
        box_with_helper.sh(("bash", f"/run/coldboot/{NAME}/restore"))
    assert box_with_helper.sh(("ls", "/run/coldboot-evil"), check=False).returncode != 0
    for path in ("restore", "x"):
        with pytest.raises(CommandFailed, match="Permission denied"):
            ssh.run(("tee", f"/run/coldboot/{NAME}/{path}"), input="x", timeout_s=10)
    service.disarm()


@settings(
    max_examples=6,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(TEXT.filter(is_env), min_size=8, max_size=24), st.lists(TEXT.filter(is_env), min_size=4, max_size=8))
def test_every_argument_and_variable_passes_through_helper_and_systemd(service, arguments, values):
    made = launch("--mode", "calm", *arguments, env={f"V{number}": value for number, value in enumerate(values)})
    service.install(made)
    service.start()
    argv, env = until(lambda: (found := service.effective())[0][:1] == (PYTHON,) and found)
    service.stop(kill=True, deadline_s=10)
    assert argv == made.argv
    assert {name: env.get(name) for name in made.env} == made.env


# --- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "unit",
    [
        *("sshd.service", "../shown.service", "shown.service/../../x", "-.service", "--help", "shown", "shown.timer"),
        *(
            "shown.service\nsshd.service",
            "*.service",
            "%n.service",
            "",
            "shown.service.d",
            "a..b.service",
            "ssh.service",
        ),
    ],
)
def test_a_unit_that_root_has_not_named_is_none_of_ours(box_with_helper, unit):
    for verb in ("stop", "start", "kill", "restore", "disarm", "install"):
        assert call(box_with_helper, unit, verb).returncode in (3, 4)
    assert box_with_helper.sh(("systemctl", "is-active", "ssh")).stdout.strip() == "active"


def test_a_login_that_is_not_named_may_nothing_although_sudo_lets_it(box_with_helper, service):
    box = box_with_helper
    for verb, given_ in (("stop", ""), ("install", whole(service, launch())), ("disarm", "")):
        done = call(box, NAME, verb, feed=given_, uid=33)
        assert (done.returncode, done.stderr) == (
            3,
            f"coldboot-box: refused: www-data may not: `login www-data` is not in {CONF}\n",
        )
    assert "unit " not in call(box, "version", uid=33).stdout
    assert left_on(box) == ""


@pytest.mark.parametrize(
    "words",
    [
        *((), ("--help",), ("version", "x"), (NAME,), (NAME, "sh"), (NAME, "main"), (NAME, "user"), (NAME, "conf")),
        *(
            (NAME, "__init__"),
            (NAME, "start", "x"),
            (NAME, "stop", "--force"),
            (NAME, "restore", "stop"),
            (NAME, "arm"),
        ),
        *(
            (NAME, "arm", "1"),
            (NAME, "arm", "1e9", "active"),
            (NAME, "arm", "-1", "active"),
            (NAME, "arm", "1", "dead"),
        ),
        *((NAME, "arm", "1; id", "active"), (NAME, "caches"), (NAME, "caches", "restore"), (NAME, "caches", "../x")),
        *((NAME, "caches", "cold", "x"), (NAME, "clear"), (NAME, "clear", "sweep"), (NAME, "clear", "back", "x")),
        *(
            (NAME, "clear", "unit"),
            (NAME, "clear", "guard|"),
            (NAME, "guard_text"),
            (NAME, "guard"),
            (NAME, "refuse_links"),
        ),
    ],
)
def test_words_that_are_no_verb_do_nothing(box_with_helper, words):
    done = call(box_with_helper, *words)
    assert done.returncode in (3, 4), done
    assert done.stderr.startswith("coldboot-box: ")
    assert "Traceback" not in done.stderr
    assert left_on(box_with_helper) == ""


HOSTILE = st.sampled_from(
    [
        *(
            "User=root",
            "Group=root",
            "ExecStartPre=/bin/sh -c 'touch /run/coldboot-evil'",
            "ExecStart=+/bin/sh",
            "Type=oneshot",
        ),
        *(
            "Environment=LD_PRELOAD=/x",
            "EnvironmentFile=/etc/shadow",
            "AmbientCapabilities=~",
            "Delegate=yes",
            "[Install]",
        ),
        *(
            "NoNewPrivileges=no\\",
            "# x \\",
            "ReadWritePaths=/",
            "WorkingDirectory=/",
            "KillMode=none",
            "Restart=always",
            "\\",
        ),
        *(
            "StandardOutput=file:/run/coldboot-evil",
            "UnsetEnvironment=A\tB",
            "TimeoutStopSec=1\x0bUser=root",
            "%h",
            "User=root\r",
        ),
    ]
)


@settings(
    max_examples=25,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(HOSTILE | TEXT, min_size=1, max_size=3), st.integers(0, 16), st.booleans())
def test_a_hostile_drop_in_leaves_nothing_behind(service, box_with_helper, lines, at, in_variables):
    text, variables = drop_in(service, launch())
    if in_variables:
        feed = text + coldboot_box.CUT + variables + "\n".join(lines) + "\n"
    else:
        kept = text.splitlines()
        feed = "\n".join((*kept[:at], *lines, *kept[at:])) + "\n" + coldboot_box.CUT + variables
    # Comments are all that may be there besides.
    if all(line.startswith("# ") and not line.endswith("\\") for each in lines for line in each.split("\n")):
        return
    done = call(box_with_helper, NAME, "install", feed=feed)
    assert done.returncode == 3, (feed, done)
    assert left_on(box_with_helper) == ""


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (launch(env={"LD_PRELOAD": "/tmp/x.so"}), "LD_PRELOAD can load code"),
        (launch(env={"PYTHONSTARTUP": "/tmp/x.py"}), "PYTHONSTARTUP can load code"),
        (launch(env={"VLLM_PLUGINS": "x"}), "VLLM_PLUGINS can load code"),
        (launch(env={"VLLM_CACHE_ROOT": "/tmp/alex"}), "below no `cache`"),
        (Launch(("/bin/sh", "-c", "id"), {}, (), 1, "m"), "not the unit's program"),
        (Launch((PYTHON, "-c", "import os"), {}, (), 1, "m"), "not the unit's program"),
        (Launch((PYTHON, "/home/alex/show.py"), {}, (), 1, "m"), "not the unit's program"),
    ],
)
def test_another_program_or_a_variable_that_loads_code_is_refused_here_and_there(service, box_with_helper, made, what):
    done = call(box_with_helper, NAME, "install", feed=whole(service, made))
    assert (done.returncode, what in done.stderr) == (3, True), done.stderr
    assert left_on(box_with_helper) == ""
    with pytest.raises(UsageError, match=re.escape(what)):
        service.install(made)
    conf = box_with_helper.root / CONF.lstrip("/")
    conf.write_text(
        conf.read_text()
        + f"env LD_PRELOAD\nenv PYTHONSTARTUP\nenv VLLM_PLUGINS\ncache /tmp/alex\nprogram {' '.join(made.argv[:2])}\n"
    )
    assert call(box_with_helper, NAME, "install", feed=whole(service, made)).returncode == 0


def test_the_variables_of_the_next_start_are_held_to_the_same(service, box_with_helper):
    assert call(box_with_helper, NAME, "install", feed=whole(service, launch("one"))).returncode == 0
    before = box_with_helper.sh(("cat", f"{PLACE}/zz-coldboot.env")).stdout
    for made in (launch(env={"LD_PRELOAD": "/x"}), Launch((PYTHON, "-c", "x"), {}, (), 1, "m")):
        assert call(box_with_helper, NAME, "arguments", feed=drop_in(service, made)[1]).returncode == 3
    assert call(box_with_helper, NAME, "arguments", feed='A="b"\n').returncode == 3
    assert box_with_helper.sh(("cat", f"{PLACE}/zz-coldboot.env")).stdout == before
    assert call(box_with_helper, NAME, "arguments", feed=drop_in(service, launch("two"))[1]).returncode == 0


def test_standard_input_has_a_limit_and_is_text(service, box_with_helper):
    huge = whole(service, launch(env={"A": "x" * (coldboot_box.LIMIT + 1)}))
    done = call(box_with_helper, NAME, "install", feed=huge)
    assert (done.returncode, "more than 1048576 bytes" in done.stderr) == (3, True)
    raw = box_with_helper.sh(
        ("sh", "-c", f"printf 'A=\"\\377\"\\n' | SUDO_UID=1000 {HELPER} {NAME} install"), check=False
    )
    assert (raw.returncode, "no UTF-8" in raw.stderr) == (3, True)
    assert left_on(box_with_helper) == ""


def test_a_unit_that_runs_as_root_is_refused_unless_root_allows_it(service, box_with_helper, ssh):
    box = box_with_helper
    box.write_unit(NAME, UNIT.replace("User=alex\n", ""))
    given_ = whole(service, launch())
    done = call(box, NAME, "install", feed=given_)
    assert (done.returncode, "runs as root: who sets its flags is root" in done.stderr) == (3, True)
    assert call(box, NAME, "caches", "cold", feed=f"root={CACHE}\ntag=b-0123456789\nnames=a\n").returncode == 3
    assert left_on(box) == ""
    with pytest.raises(BoxError, match="runs as root") as refused:
        make_service(ssh, spec(), None).describe()
    assert "root yes" in str(refused.value)
    conf = box.root / CONF.lstrip("/")
    conf.write_text(conf.read_text() + "root yes\n")
    assert call(box, NAME, "install", feed=given_).returncode == 0


def test_a_unit_with_a_command_of_roots_is_refused_and_its_own_variables_are_not_the_callers(
    service, box_with_helper, ssh
):
    box = box_with_helper
    plain = UNIT.replace("User=alex", "User=svc\nEnvironment=MODEL_DIR=/tmp")
    roots = plain.replace("[Service]\n", "[Service]\nExecStartPre=+/bin/sh -c '[ -d $MODEL_DIR ] || $MODEL_DIR'\n")
    users = plain.replace("[Service]\n", "[Service]\nExecStartPre=/bin/test -d ${MODEL_DIR}\n")
    harmless, hostile = whole(service, launch()), whole(service, launch(env={"MODEL_DIR": "/bin/sh"}))
    assert plain not in (roots, users)
    box.write_unit(NAME, roots)
    for given_ in (harmless, hostile):
        done = call(box, NAME, "install", feed=given_)
        assert (done.returncode, "more rights than its user" in done.stderr) == (3, True), done
    with pytest.raises(BoxError, match="more rights than its user") as refused:
        make_service(ssh, spec(), None).describe()
    assert "ExecStartPre=+/bin/sh" in str(refused.value)
    assert left_on(box) == ""
    # The file is mended, and systemd has not read it yet, as the unit runs: what it would start is what counts.
    box.sh(("systemctl", "start", NAME))
    (box.root / f"etc/systemd/system/{NAME}").write_text(users)
    done = call(box, NAME, "install", feed=harmless)
    assert (done.returncode, "variables: 'ExecStartPre';" in done.stderr) == (3, True), done
    box.sh(("systemctl", "stop", NAME))
    box.write_unit(NAME, users)
    done = call(box, NAME, "install", feed=hostile)
    assert (done.returncode, "MODEL_DIR is named by the unit's own commands" in done.stderr) == (3, True), done
    assert left_on(box) == ""
    assert call(box, NAME, "install", feed=harmless).returncode == 0
    box.write_unit(NAME, roots)
    assert call(box, NAME, "arguments", feed=drop_in(service, launch())[1]).returncode == 3
    conf = box.root / CONF.lstrip("/")
    conf.write_text(conf.read_text() + "root yes\nenv MODEL_DIR\n")
    assert call(box, NAME, "install", feed=hostile).returncode == 0


def test_links_lead_nowhere(service, box_with_helper):
    box = box_with_helper
    words = "tag=b-0123456789\nnames=a b/c\n"
    box.sh(("runuser", "-u", "svc", "--", "sh", "-c", f"mkdir -p {Path(CACHE).parent} && ln -s /etc {CACHE}"))
    done = call(box, NAME, "caches", "cold", feed=f"root={CACHE}\n{words}")
    assert (done.returncode, "or a link" in done.stderr) == (3, True), done.stderr
    box.sh(("rm", CACHE))
    box.sh(("runuser", "-u", "svc", "--", "sh", "-c", "cd && mv .cache real && ln -s real .cache"))
    assert call(box, NAME, "caches", "cold", feed=f"root={CACHE}\n{words}").returncode == 3
    box.sh(("runuser", "-u", "svc", "--", "sh", "-c", "cd && rm .cache && mv real .cache"))
    box.sh(("ln", "-s", "/etc", PLACE))
    done = call(box, NAME, "install", feed=whole(service, launch()))
    assert done.returncode == 1
    assert box.sh(("sh", "-c", "ls /etc/zz-coldboot*"), check=False).returncode != 0
    box.sh(("rm", PLACE))


@pytest.mark.parametrize(
    "root", ["/etc", "/", "/home/svc", f"{CACHE}/../../..", f"{CACHE}x", "relative", f"{CACHE}/%h"]
)
def test_caches_lie_where_root_allows_them_and_nowhere_else(box_with_helper, root):
    for what in ("cold", "warm", "remove", "sweep", "free"):
        done = call(box_with_helper, NAME, "caches", what, feed=f"root={root}\ntag=b-0123456789\nnames=a\n")
        assert (done.returncode, "root" in done.stderr) == (3, True), done


def test_the_scripts_of_the_caches_run_as_the_services_user_and_read_no_words_as_code(box_with_helper):
    box = box_with_helper
    odd = "/tmp/$(touch /tmp/evil)`touch /tmp/evil`'\";touch /tmp/evil;"
    box.sh(("install", "-d", "-o", "svc", odd))
    box.sh(("runuser", "-u", "svc", "--", "touch", f"{odd}/kept"))
    box.sh(("install", "-m", "0600", "/dev/null", "/tmp/secret-of-root"))
    words = f"root={CACHE}\ntag=b-0123456789\nnames=a\ncopy={odd}\tb-0123456789/m\ncopy=/etc/ssh\tb-0123456789/k\n"
    assert call(box, NAME, "caches", "cold", feed=words).returncode in (0, 1)
    assert box.sh(("ls", f"{CACHE}/b-0123456789/m")).stdout == "kept\n"
    assert box.sh(("ls", "/tmp/evil"), check=False).returncode != 0
    assert "ssh_host_ed25519_key\n" not in box.sh(("ls", f"{CACHE}/b-0123456789/k"), check=False).stdout
    owners = box.sh(("find", CACHE, "-printf", "%u\n")).stdout.split()
    assert set(owners) == {"svc"}


def test_a_configuration_that_others_could_have_written_counts_for_nothing(box_with_helper, service):
    box = box_with_helper
    for change, undo in (
        (("chmod", "0666", CONF), ("chmod", "0644", CONF)),
        (("chown", "alex", CONF), ("chown", "root", CONF)),
        (("chmod", "0777", coldboot_box.CONFIG), ("chmod", "0755", coldboot_box.CONFIG)),
    ):
        box.sh(change)
        done = call(box, NAME, "install", feed=whole(service, launch()))
        assert (done.returncode, "written by others than root" in done.stderr) == (3, True)
        box.sh(undo)
    box.sh(("sh", "-c", f"cp {CONF} /tmp/conf && ln -sf /tmp/conf {CONF}"))
    assert call(box, NAME, "stop").returncode != 0
    assert left_on(box) == ""


def test_what_production_was_given_in_secret_is_not_told(service, box_with_helper):
    box = box_with_helper
    (box.root / "etc/secret.env").write_text("HF_TOKEN=hf_productions_own\nAPI=x\n")
    (box.root / "etc/secret.env").chmod(0o600)
    box.write_unit(NAME, UNIT.replace("User=alex", "User=svc\nEnvironmentFile=/etc/secret.env"))
    box.sh(("systemctl", "start", NAME))
    assert (
        call(box, NAME, "install", feed=whole(service, launch(env={"HF_TOKEN": "guess", "API": "x"}))).returncode == 0
    )
    assert call(box, NAME, "environment").stdout == "API=x\0"


def test_the_callers_environment_is_nothing_to_it(box_with_helper):
    trap = {
        "PATH": "/tmp/evil",
        "PYTHONPATH": "/tmp/evil",
        "PYTHONSTARTUP": "/tmp/evil/os.py",
        "LD_LIBRARY_PATH": "/tmp/evil",
    }
    box_with_helper.sh(("sh", "-c", "mkdir -p /tmp/evil && echo 'raise SystemExit(99)' >/tmp/evil/os.py"))
    trap |= {"SYSTEMD_PAGER": "sh", "SYSTEMCTL_FORCE_BUS": "1", "BASH_ENV": "/tmp/evil/x", "SYSTEMD_LOG_LEVEL": "debug"}
    done = box_with_helper.sh(("env", *(f"{k}={v}" for k, v in trap.items()), "SUDO_UID=1000", HELPER, "version"))
    assert done.stdout.startswith("coldboot-box ")


# --- the whole -------------------------------------------------------------------------------------------------------


@pytest.fixture
def campaign(installed, ssh, tmp_path):
    """Production as another user than the login, the helper for it as `invoke box-helper` prints it."""
    box = installed
    box.write_unit(PRODUCTION, UNIT_TEXT.replace("User=alex\nGroup=alex", "User=svc"))
    box.sh(("systemctl", "start", PRODUCTION))
    made = Campaign(box, tmp_path)
    box.sh(("sh", "-s"), feed=printed(made, "box-helper").stdout)
    await_true(serves, 60)
    yield made
    box.sh(("rm", "-f", f"{coldboot_box.CONFIG}/{PRODUCTION}.conf"))
    box.remove_unit(PRODUCTION)


def printed(campaign: Campaign, task: str, *words: str) -> subprocess.CompletedProcess[str]:
    argv = (sys.executable, "-m", "invoke", task, "--matrix", str(campaign.folder / "matrix.yaml"), *words)
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_whole_campaign_with_one_line_of_sudoers(campaign, ssh):
    before = effective(campaign.box)
    # The box's journal also has what other tests did by sudo.
    told = ("journalctl", "-q", "-o", "cat", "-t", "sudo")
    earlier = len(campaign.box.sh(told).stdout)
    planned = printed(campaign, "plan", "--out", str(campaign.out))
    for call_ in ("install", "start", "stop", "kill", "caches cold", "caches remove"):
        assert f"sudo {HELPER} {PRODUCTION} {call_}" in planned.stdout
    assert "sudo systemctl" not in planned.stdout
    assert "sudo tee" not in planned.stdout
    done = campaign.run("--boots", "1", "--yes")
    assert done.returncode == 0, done.stderr[-4000:]
    ended = {r["variant"]: r for r in campaign.records() if r["kind"] == "boot_ended"}
    assert (ended["spec-1"]["boot_outcome"], ended["spec-1"]["cache_proof"]) == ("completed", "compiled")
    assert ended["spec-3"]["boot_outcome"] == "crashed"
    assert serves()
    assert effective(campaign.box) == before
    assert ours_on(campaign.box) == []
    log = campaign.box.sh(told).stdout[earlier:]
    ran = set(re.findall(r"alex : .*COMMAND=(.*)", log))
    assert all(command.startswith(HELPER) for command in ran if PRODUCTION in command)


def test_a_link_on_the_way_to_cold_caches_is_told_before_anything_is_done_and_by_doctor(campaign):
    box = campaign.box
    box.sh(("runuser", "-u", "svc", "--", "sh", "-c", "cd && mv .cache real && ln -s real .cache"))
    said = "coldboot-box follows no link to the caches of a boot: /home/svc/.cache/coldboot/vllm-qwen: "
    try:
        done = campaign.run("--boots", "1", "--yes")
        assert (done.returncode, said in done.stderr, "'.cache' on the way" in done.stderr) == (3, True, True), (
            done.stderr
        )
        assert f"`cache_root:` of the box, and as `cache` in {coldboot_box.CONFIG}/{PRODUCTION}.conf" in done.stderr
        assert not campaign.out.exists()
        assert said in printed(campaign, "doctor", "--json").stdout
    finally:
        box.sh(("runuser", "-u", "svc", "--", "sh", "-c", "cd && rm .cache && mv real .cache"))


def test_doctor_says_which_way_is_in_use_and_what_mends_it(campaign):
    def found(name: str) -> dict[str, object]:
        import json  # noqa: PLC0415

        said = json.loads(printed(campaign, "doctor", "--json").stdout)
        return next(one for one in said["checks"] if one["check"] == name)

    assert (found("root")["level"], found("sudo")["level"]) == ("ok", "ok")
    assert f"coldboot-box {coldboot_box.VERSION}: alex may have it run" in found("root")["said"]
    box = campaign.box
    text = (box.root / HELPER.lstrip("/")).read_text()
    (box.root / HELPER.lstrip("/")).write_text(text.replace(f"\nVERSION = {coldboot_box.VERSION}\n", "\nVERSION = 0\n"))
    old = found("root")
    assert (old["level"], "version 0, older than ours" in old["said"]) == ("fail", True)
    assert "invoke box-helper --box real" in old["mend"]
    done = campaign.run("--boots", "1", "--yes")
    assert (done.returncode, "older than ours" in done.stderr) == (3, True)
    (box.root / HELPER.lstrip("/")).write_text(text + "# mine\n")
    assert found("root")["level"] == "warn"
    box.sh(("rm", HELPER))
    gone = found("root")
    assert (gone["level"], "is root on the box" in gone["said"]) == ("warn", True)
    assert found("sudo")["level"] == "fail"
    box.sh(("sh", "-s"), feed=helper.install_script(NAME, box.login, (CACHE,)))
