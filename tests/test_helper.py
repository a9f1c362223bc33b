"""What the helper on a box accepts and refuses, without a box: drop-ins, variables, commands, names, its texts."""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.box import coldboot_box, helper, unitfile
from orchestrator.box.aside import Aside, directories
from orchestrator.box.coldboot_box import Refused
from orchestrator.box.commands import HELPER
from orchestrator.box.deadman import DeadMan
from orchestrator.box.doors import (
    Granted,
    HelperDoor,
    Places,
    SudoDoor,
    choose,
    clear_problem,
    grant_problem,
    read_granted,
)
from orchestrator.box.engines import ENGINES, Launch, OwnCache
from orchestrator.box.owncaches import OwnCaches, proposed
from orchestrator.box.services import make_service
from orchestrator.box.transports import connect
from orchestrator.box.unit import UnitFacts
from orchestrator.doctor.root import judge_root
from orchestrator.errors import BoxError, UsageError
from orchestrator.matrix import BoxSpec, Variant
from orchestrator.records import CommandResult

UNIT = "vllm.service"
PLACE = f"/run/systemd/system/{UNIT}.d"
CACHES = ("/home/svc/.cache/coldboot", "/var/cache/coldboot")
CLEARS = ("/home/svc/.cache/vllm", "/var/cache/nv")
PROGRAM = ("/v/bin/python", "-m", "vllm.entrypoints.openai.api_server")
COLD = ENGINES["vllm"].cold_env("/home/svc/.cache/coldboot/vllm/b-0123456789")
GRANTED = Granted(coldboot_box.VERSION, "0" * 64, known=True, caches=CACHES)
INSTALL = "install it so"

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


@pytest.fixture
def service():
    door = connect(BoxSpec(name="here", transport="local", service="process"))
    box = BoxSpec(name="g", transport="local", service="systemd", unit="vllm", root="sudo")
    yield make_service(door, box, None)
    door.close()


def launch(*arguments: str, env: dict[str, str] | None = None, unset: tuple[str, ...] = ()) -> Launch:
    return Launch((*PROGRAM, *arguments), COLD | (env or {}), unset, 1, "m")


def files(service, made: Launch) -> tuple[str, str]:
    """Drop-in and variables, as the systemd manager makes them."""
    drop_in = service.drop_in_text(made)
    return drop_in, service._env_text(made, drop_in)


def dead_man(unit: str) -> DeadMan:
    place = f"/run/systemd/system/{unit}.d"
    ours = (f"{place}/zz-coldboot.conf", f"{place}/zz-coldboot.env")
    return DeadMan(
        unit=unit, user=False, base="/run/systemd/system", run=f"/run/coldboot/{unit}", drop_in=ours[0], ours=ours
    )


def helped(granted: Granted = GRANTED, installed: tuple[str, ...] = PROGRAM) -> HelperDoor:
    dead = dead_man(UNIT)
    at = Places(UNIT, "alex", "root", ("systemctl",), PLACE, f"{PLACE}/zz-coldboot.conf", f"{PLACE}/zz-c.env", dead)
    return HelperDoor(at, granted, installed)


# --- the drop-in -----------------------------------------------------------------------------------------------------


def test_the_drop_in_that_the_systemd_manager_writes_is_accepted(service):
    drop_in, variables = files(service, launch("--port", "1", unset=("HTTP_PROXY",)))
    assert coldboot_box.check_drop_in(drop_in, UNIT, CACHES) == PROGRAM[0]
    found = coldboot_box.read_variables(variables)
    coldboot_box.check_variables(found, (), CACHES)
    words = coldboot_box.read_arguments(found["COLDBOOT_ARGS"])
    assert (PROGRAM[0], *words) == launch("--port", "1").argv


def test_a_variant_as_it_is_composed_is_accepted(service):
    installed = (*PROGRAM, "--model", "m", "--default-chat-template-kwargs", '{"enable_thinking": false}')
    made = ENGINES["vllm"].compose(installed, Variant(name="x", set={"spec-tokens": 3}), host="127.0.0.1", port=18080)
    assert isinstance(made, Launch)
    made = replace(made, env=COLD | made.env)
    (action,) = helped(installed=installed).install(*files(service, made), whole=True)
    assert action.argv[-1] == "install"


def test_a_sandbox_may_be_opened_for_the_caches_alone(service):
    service._writable = f"{CACHES[0]}/vllm"
    drop_in, _ = files(service, launch())
    assert coldboot_box.check_drop_in(drop_in, UNIT, CACHES) == PROGRAM[0]
    service._writable = "/etc"
    drop_in, _ = files(service, launch())
    with pytest.raises(Refused, match="ReadWritePaths=-/etc"):
        coldboot_box.check_drop_in(drop_in, UNIT, CACHES)


HOSTILE_LINES = (
    *("ExecStartPre=/bin/sh -c id", "ExecStartPost=+/bin/sh", "ExecStopPost=/bin/true", "ExecStart=/bin/sh"),
    *("ExecReload=/bin/sh", "ExecCondition=/bin/sh", "ExecStop=/bin/sh", "User=root", "User=", "Group=root"),
    *("SupplementaryGroups=root", "DynamicUser=no", "Delegate=yes", "CapabilityBoundingSet=~", "PAMName=su"),
    *(
        "AmbientCapabilities=CAP_SYS_ADMIN",
        "NoNewPrivileges=no",
        "ProtectSystem=no",
        "RootDirectory=/",
        "Restart=always",
    ),
    *("PermissionsStartOnly=true", "WorkingDirectory=/tmp", "EnvironmentFile=/etc/shadow", "EnvironmentFile="),
    *("Environment=LD_PRELOAD=/tmp/x.so", "PassEnvironment=HOME", "StandardOutput=file:/etc/passwd", "Slice=x.slice"),
    *("StandardError=append:/etc/passwd", "StandardInput=file:/etc/shadow", "LoadCredential=x:/etc/shadow"),
    *("BindPaths=/etc", "ReadWritePaths=/", "ReadWritePaths=-/etc", "ReadWritePaths=-/var/cache/coldboot/../../etc"),
    *("ReadWritePaths=-/var/cache/coldboot /etc", 'ReadWritePaths=-"/var/cache/coldboot/a b"', "InaccessiblePaths=/"),
    *("TimeoutStopSec=1 ExecStart=/bin/sh", "TimeoutStopSec=infinity", "TimeoutStopSec=-1", "TimeoutStopSec=%h"),
    *("UnsetEnvironment=A B", "UnsetEnvironment=", "UnsetEnvironment=A=1", "UnsetEnvironment=%n", "KillMode=process"),
    *("[Unit]", "[Install]", "[Service]", "[X-A]", "OnFailure=x.service", "Wants=x.service", "WantedBy=x.target"),
    *(
        "Restart=no\\",
        "# a comment that goes on \\",
        " Restart=no",
        "Restart =no",
        "restart=no",
        "Restart=no ",
        "",
        " ",
    ),
    *(";x", "#x", ".include /etc/x", "Restart=no\r", "Restart=no\x00", "Restart=no\x0bUser=root", "\ufeffRestart=no"),
    *("StartLimitIntervalSec=0", "Type=oneshot", "RemainAfterExit=yes", "SendSIGKILL=no", "Sockets=x.socket"),
)


@pytest.mark.parametrize("line", HOSTILE_LINES)
def test_a_line_that_is_not_ours_is_refused_wherever_it_stands(service, line):
    drop_in, _ = files(service, launch())
    lines = drop_in.splitlines()
    begin = lines.index("[Service]")
    for at in range(begin + 1, len(lines) + 1):
        hostile = "\n".join((*lines[:at], line, *lines[at:])) + "\n"
        with pytest.raises(Refused):
            coldboot_box.check_drop_in(hostile, UNIT, CACHES)


@pytest.mark.parametrize(
    "command",
    [
        *("/v/bin/python", "/v/bin/python  $COLDBOOT_ARGS", "/v/bin/python $COLDBOOT_ARGS ; /bin/sh", "+/v/bin/python"),
        *("-/v/bin/python $COLDBOOT_ARGS", "@/v/bin/python $COLDBOOT_ARGS", ":/v/bin/python $COLDBOOT_ARGS", ""),
        *(
            "!!/v/bin/python $COLDBOOT_ARGS",
            "+/v/bin/python $COLDBOOT_ARGS",
            "%h/python $COLDBOOT_ARGS",
            " $COLDBOOT_ARGS",
        ),
        *(
            "/v/bin/python $COLDBOOT_ARGS\\",
            "/v/bin/python ${COLDBOOT_ARGS}",
            "/v/bin/python $OTHER",
            '"/v/b" $COLDBOOT_ARGS',
        ),
        *("/v/bin/python\t$COLDBOOT_ARGS", "/v/bin/$HOME $COLDBOOT_ARGS", "/v/bin/python $COLDBOOT_ARGS -c x"),
    ],
)
def test_another_way_to_write_the_command_is_refused(service, command):
    drop_in, _ = files(service, launch())
    ours = f"ExecStart={PROGRAM[0]} $COLDBOOT_ARGS"
    assert ours in drop_in
    with pytest.raises(Refused):
        coldboot_box.check_drop_in(drop_in.replace(ours, f"ExecStart={command}"), UNIT, CACHES)


@given(st.lists(st.sampled_from(HOSTILE_LINES) | TEXT, min_size=1, max_size=6))
def test_what_is_accepted_sets_nothing_but_what_we_set_as_systemd_reads_it(lines):
    text = (
        "[Unit]\nStartLimitIntervalSec=0\n[Service]\nExecStart=\n"
        f"ExecStart={PROGRAM[0]} $COLDBOOT_ARGS\n" + "\n".join(lines) + "\n"
    )
    try:
        coldboot_box.check_drop_in(text, UNIT, CACHES)
    except Refused:
        return
    read = {(each.section, each.key) for each in unitfile.parse(text).assignments}
    assert read <= {
        ("Unit", "StartLimitIntervalSec"),
        *(("Service", key) for key in ("ExecStart", "Restart", "KillMode", "SendSIGKILL", "TimeoutStartSec")),
        *(("Service", key) for key in ("TimeoutStopSec", "StandardOutput", "StandardError", "LogRateLimitIntervalSec")),
        *(("Service", key) for key in ("EnvironmentFile", "UnsetEnvironment", "ReadWritePaths")),
    }
    assert unitfile.parse(text).values("Service", "ExecStart") == (f"{PROGRAM[0]} $COLDBOOT_ARGS",)


# --- variables and arguments -----------------------------------------------------------------------------------------


@given(st.dictionaries(st.from_regex(r"V_[A-Z0-9_]{0,8}", fullmatch=True), TEXT, max_size=5))
def test_variables_are_read_as_systemd_reads_them_or_refused(values):
    writable = {name: value for name, value in values.items() if unitfile.is_env_value(value)}
    text = "".join(f"{unitfile.quote_env_file(name, value)}\n" for name, value in writable.items())
    assert coldboot_box.read_variables(text) == writable == unitfile.parse_environment_file(text)


@given(TEXT)
def test_a_file_of_variables_that_is_accepted_means_to_systemd_what_it_means_to_us(text):
    try:
        found = coldboot_box.read_variables(text)
    except Refused:
        return
    assert unitfile.parse_environment_file(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *(
            "A=b\n",
            "A='b'\n",
            'A="b',
            'A="b"',
            '#A="b"\n',
            'A="b"\n\n',
            ' A="b"\n',
            'A ="b"\n',
            'A="b" \n',
            'A="b"B="c"\n',
        ),
        *(
            'A="$B"\n',
            'A="`id`"\n',
            'A="\\x"\n',
            'A="b\\"\n',
            '1A="b"\n',
            'Ä="b"\n',
            'A="\x01"\n',
            'A="\r"\n',
            'A="b"\\\n',
        ),
        *('export A="b"\n', 'A="b";B="c"\n', 'A=""c"\n', "%%\n"),
    ],
)
def test_variables_in_another_spelling_are_refused(text):
    with pytest.raises(Refused):
        coldboot_box.read_variables(text)


@given(st.lists(TEXT, max_size=6))
def test_arguments_are_split_as_systemd_splits_them(words):
    text = unitfile.quote_words(words)
    assert coldboot_box.read_arguments(text) == tuple(words) == unitfile.split_variable(text)


@given(TEXT)
def test_arguments_that_are_accepted_mean_to_systemd_what_they_mean_to_us(text):
    try:
        found = coldboot_box.read_arguments(text)
    except Refused:
        return
    assert unitfile.split_variable(text) == found


LOADERS = (
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "PYTHONBREAKPOINT"),
    *("VLLM_PLUGINS", "VLLM_NCCL_SO_PATH", "PATH", "BASH_ENV", "ENV", "CUDA_HOME", "CC", "CXX", "TRITON_PTXAS_PATH"),
    *("NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "CUDA_INJECTION64_PATH", "GLIBC_TUNABLES", "HF_HOME", "HF_MODULES_CACHE"),
    *("PERL5LIB", "NODE_OPTIONS", "GCONV_PATH", "OMP_TOOL_LIBRARIES", "XDG_CONFIG_HOME", "HOME", "SHELL", "GIT_SSH"),
    *("MODPROBE_OPTIONS", "GCC_EXEC_PREFIX", "COMPILER_PATH", "CPATH", "LIBRARY_PATH", "HOSTCXX", "CUDAHOSTCXX"),
    *("DG_JIT_NVCC_COMPILER", "FLASHINFER_NVCC", "CUPY_NVCC", "TRITON_CACHE_MANAGER", "CUTE_DSL_LIBS"),
    *("NCCL_CONF_FILE", "UCX_MODULE_DIR", "FI_PROVIDER_PATH", "OCL_ICD_VENDORS", "MPLBACKEND"),
    *("VLLM_LOGGING_CONFIG_PATH", "RAY_RUNTIME_ENV_HOOK", "RAY_USER_SETUP_FUNCTION", "C_INCLUDE_PATH"),
)
HARMLESS = (
    *("PYTHONUNBUFFERED", "NO_COLOR", "DG_JIT_USE_NVRTC", "NCCL_DEBUG", "UCX_TLS"),
    *("VLLM_ATTENTION_BACKEND", "VLLM_USE_FLASHINFER_SAMPLER", "CUDA_VISIBLE_DEVICES", "NCCL_P2P_DISABLE", "A"),
    *(
        "PYTORCH_CUDA_ALLOC_CONF",
        "OMP_NUM_THREADS",
        "VLLM_LOGGING_LEVEL",
        "DG_JIT_USE_NVRTC",
        "HF_HUB_OFFLINE",
        "VLLM_CPU_KVCACHE_SPACE",
    ),
    *(
        "TRITON_CACHE_AUTOTUNING",
        "VLLM_ENABLE_STARTUP_PLAN",
        "HF_TOKEN",
        "VLLM_API_KEY",
        "COLDBOOT_REHEARSAL_TIME_SCALE",
    ),
)


@pytest.mark.parametrize("name", LOADERS)
def test_a_variable_that_can_load_code_is_refused_unless_it_is_allowed_by_name(name):
    with pytest.raises(Refused, match=name):
        coldboot_box.check_variables({name: "/tmp/x"}, (), CACHES)
    coldboot_box.check_variables({name: "/tmp/x"}, (name,), CACHES)


def test_other_variables_are_nobodys_business():
    coldboot_box.check_variables(dict.fromkeys(HARMLESS, "x"), (), CACHES)


@pytest.mark.parametrize(
    "value", ["/tmp/x", "/home/svc/.cache/coldboot/../x", "relative", "/home/svc/.cache/coldboot2", ""]
)
@pytest.mark.parametrize("name", sorted(COLD))
def test_a_cache_lies_where_caches_may_lie(name, value):
    coldboot_box.check_variables({name: COLD[name]}, (), CACHES)
    with pytest.raises(Refused, match=name):
        coldboot_box.check_variables({name: value}, (), CACHES)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("ExecStart=/v/bin/python -m vllm.x --model m --json '{\"a\": 1}'", ("/v/bin/python", "-m", "vllm.x")),
        ("ExecStart=-/v/bin/vllm serve /models/a --port 1", ("/v/bin/vllm", "serve")),
        ("ExecStart=/v/bin/vllm serve '/models/a b' --port 1", ("/v/bin/vllm", "serve")),
        ("ExecStart=/bin/python3 /opt/show.py --model m \\\n  # a comment\n  --x", ("/bin/python3", "/opt/show.py")),
        ("ExecStart=/bin/numactl --all /v/python -m a.b -c", ("/bin/numactl", "--all", "/v/python", "-m", "a.b")),
        ("ExecStart=/v/bin/python3.11 -u -X dev -m a.b --c", ("/v/bin/python3.11", "-u", "-X", "dev", "-m", "a.b")),
        ("ExecStart=/opt/show.py --model m", ("/opt/show.py",)),
        (
            "ExecStart=/bin/nice -n -5 /bin/taskset -c 0-7 /v/vllm serve m",
            ("/bin/nice", "-n", "-5", "/bin/taskset", "-c", "0-7", "/v/vllm", "serve"),
        ),
        ("ExecStart=/bin/env -i A=/x/vllm /v/vllm serve", ("/bin/env", "-i", "A=/x/vllm", "/v/vllm", "serve")),
        ("ExecStart=/opt/server --flag", ()),
        ("ExecStart=/a/python -m b\nExecStart=\nExecStart=/c/python -m d", ("/c/python", "-m", "d")),
        ("ExecStart=/v/bin/python -m '{x}'", ()),
        ("ExecStart=/opt/server $ARGS", ()),
        ("ExecStart=%h/bin/python -m x", ()),
        ("ExecStart=@/opt/a b", ()),
        ("[Unit]\nExecStart=/x -m y", ()),
    ],
)  # fmt: skip
def test_the_head_of_the_installed_command(lines, expected):
    assert coldboot_box.installed_head((f"[Service]\n{lines}\n",)) == expected


def test_a_later_drop_in_sets_the_command_and_an_empty_one_clears_it():
    texts = (
        "[Service]\nExecStart=/a.py b\n",
        "[Service]\nNice=1\n",
        "[Service]\nExecStart=\nExecStart=/c.py -m d --e\n",
    )
    assert coldboot_box.installed_head(texts) == ("/c.py",)


@pytest.mark.parametrize(
    "words",
    [
        *((PROGRAM[0], "-c", "import os"), (PROGRAM[0],), ("/bin/sh", *PROGRAM[1:]), PROGRAM[:2], ()),
        *((PROGRAM[0], "-m", "pip"), (PROGRAM[0], "-I", *PROGRAM[1:]), (*PROGRAM[:2], PROGRAM[2] + "x")),
    ],
)
def test_a_command_that_begins_otherwise_is_refused_unless_it_is_allowed(words):
    with pytest.raises(Refused, match="not the unit's program"):
        coldboot_box.check_command(words, (PROGRAM,))
    if words:
        coldboot_box.check_command(words, (PROGRAM, words))


def test_a_command_that_begins_as_the_installed_one_is_accepted():
    coldboot_box.check_command((*PROGRAM, "--trust-remote-code"), (PROGRAM,))
    for none in ((), ((),)):
        with pytest.raises(Refused, match=r"cannot be told from its command.*`program`"):
            coldboot_box.check_command(PROGRAM, none)


@pytest.mark.parametrize(
    ("installed", "other"),
    [
        ("/bin/numactl --cpunodebind=0 /opt/server --port 1", "/bin/numactl /bin/sh"),
        ("/bin/numactl -m 0 /opt/server --port 1", "/bin/numactl -m 0 /bin/sh -c id"),
        ("/bin/taskset --cpu-list 0 /opt/server --port 1", "/bin/taskset 1 /bin/sh"),
        ("/bin/docker run --gpus all image --model m", "/bin/docker run -v /:/x image"),
        ("/v/torchrun --nproc-per-node 2 /opt/serve.py --model m", "/v/torchrun /tmp/evil.py"),
        ("/bin/env --chdir=/x /v/vllm serve m", "/bin/env /bin/sh"),
        ("/bin/env --chdir /v/vllm serve x.py", "/bin/env --chdir /v/vllm serve /tmp/evil.py"),
        ("/bin/bash --login -c /opt/x.sh --model m", "/bin/bash -c id"),
        ("/bin/bash -c /opt/serve.py --model m", "/bin/bash -c id"),
        ("/bin/sudo --preserve-env /v/vllm serve m", "/bin/sudo /bin/sh"),
        ("/v/python --check-hash-based-pycs always /opt/x.py --model m", "/v/python /tmp/evil.py"),
        ("/v/python -c import --m -m vllm", "/v/python -c import"),
        ("/opt/server --model m -m vllm", "/opt/server --model m"),
        ("/v/vllm --version serve", "/v/vllm bench"),
        ("/bin/numactl --all", "/bin/numactl --all /bin/sh"),
        ("/v/python -m", "/v/python -m pip"),
    ],
)
def test_where_no_program_is_recognised_nothing_is_guessed_and_root_says_it(installed, other):
    words = tuple(installed.split())
    own = coldboot_box.head(words)
    assert own == coldboot_box.installed_head((f"[Service]\nExecStart={installed}\n",)) == ()
    for each in (words, tuple(other.split())):
        with pytest.raises(Refused, match="cannot be told"):
            coldboot_box.check_command(each, (own,))
    coldboot_box.check_command(words, (own, words[:4]))


@pytest.mark.parametrize(
    "changed",
    [
        *("/bin/numactl --cpunodebind=1 /v/python -m a.b", "/bin/numactl /v/python -m a.b", "/v/python -m a.b"),
        *("/bin/numactl --cpunodebind=0 /bin/sh -m a.b", "/bin/numactl --cpunodebind=0 /v/python -m b"),
        *("/bin/numactl --cpunodebind=0 -- /v/python -m a.b", "/bin/numactl --cpunodebind=0 /v/python -I -m a.b"),
    ],
)
def test_a_launcher_and_its_program_are_the_same_word_by_word(changed):
    words = ("/bin/numactl", "--cpunodebind=0", "/v/python", "-m", "a.b")
    own = coldboot_box.head((*words, "--port", "1"))
    assert own == words
    coldboot_box.check_command((*words, "--port", "2"), (own,))
    with pytest.raises(Refused, match="not the unit's program"):
        coldboot_box.check_command(tuple(changed.split()), (own,))


# --- the unit's own commands -----------------------------------------------------------------------------------------

PLAIN = "[Service]\nUser=svc\nExecStart=/v/vllm serve m --port 1\n"


@pytest.mark.parametrize(
    "lines",
    [
        *("ExecStartPre=+/opt/pull.sh", "ExecStartPre=!/opt/x", "ExecStartPost=!!/opt/x", "ExecStopPost=-+/opt/x"),
        *(
            "ExecStop=@:!/opt/x y",
            "ExecCondition = +/opt/x",
            "ExecReload=+/bin/kill -HUP $MAINPID",
            "ExecStart=+/opt/x",
        ),
        *("ExecStartPre=/bin/true ; +/opt/x", 'ExecStartPre="+/opt/x"', "ExecStartPre=\\\n  # y\n  +/opt/x"),
        *("ExecStartPre=\\x2b/opt/x", "ExecReloadPost=|+/opt/x", "ExecStartPre=/bin/true\nExecStartPre=+/opt/x"),
        *("PermissionsStartOnly=yes\nExecStartPre=/opt/x", "ExecStopPost=/opt/x\nPermissionsStartOnly=1"),
        *("# a comment \\\nExecStartPre=+/opt/x", "ExecStartPre=/a \\\\\nExecStartPost=+/opt/x"),
    ],
)
def test_a_command_with_more_rights_than_the_units_user_is_seen_in_the_unit_and_in_a_drop_in(lines):
    assert coldboot_box.privileged_lines((f"{PLAIN}{lines}\n",))
    assert coldboot_box.privileged_lines((PLAIN, "[Service]\nNice=1\n", f"[Service]\n{lines}\n"))


@pytest.mark.parametrize(
    "texts",
    [
        *((PLAIN,), (f"{PLAIN}ExecStartPre=-/opt/x + !\nExecReload=:/bin/kill $MAINPID\n",)),
        (f"{PLAIN}ExecStartPre=+/opt/x\n", "[Service]\nExecStartPre=\nExecStartPre=/opt/x\n"),
        (f"{PLAIN}PermissionsStartOnly=yes\n",),
        (f"{PLAIN}PermissionsStartOnly=yes\nExecStopPost=/x\n", "[Service]\nPermissionsStartOnly=no\n"),
        (f"{PLAIN}#ExecStartPre=+/opt/x\n[X-A]\nExecStartPre=+/opt/x\n",),
        (f"{PLAIN}ExecSearchPath=+/opt\n",),
    ],
)
def test_a_unit_whose_commands_are_its_users_has_none(texts):
    assert coldboot_box.privileged_lines(texts) == ()


def test_a_unit_with_such_a_command_is_refused_by_the_helper_unless_root_says_yes_and_told_before():
    text = f"{PLAIN}ExecStartPre=+/opt/pull.sh\n"
    for conf, texts, loaded in (
        ("", (text,), {}),
        # The files say nothing, and systemd has loaded it: they were changed since.
        ("", (PLAIN,), {"ExecStartPreEx": "{ path=/x ; argv[]=/x ; flags=ignore-failure privileged ; pid=0 }"}),
        (
            "",
            (PLAIN,),
            {"ExecStopPostEx": "{ path=/x ; argv[]=/x ; flags= }\n{ path=/x ; argv[]=/x ; flags=no-setuid }"},
        ),
        ("root yes\n", (text,), {}),
        ("", (PLAIN,), {"ExecStartPreEx": "{ path=/x ; argv[]=/x ; flags=ignore-failure ; pid=0 }"}),
    ):
        made = coldboot_box.Unit(coldboot_box.Conf(UNIT, f"login alex\n{conf}"), 1000)
        made._texts, made._shown = texts, {"LoadState": "loaded", **loaded}
        if conf or (texts == (PLAIN,) and not re.search("privileged|no-setuid", str(loaded))):
            made.refuse_privileged()
            continue
        with pytest.raises(Refused, match=r"more rights than its user.*run it as the unit's user.*`root yes`"):
            made.refuse_privileged()
    unit = replace(facts(), privileged=coldboot_box.privileged_lines((text,)))
    wrong = grant_problem(GRANTED, unit, CACHES[0])
    assert wrong is not None
    assert "'ExecStartPre=+/opt/pull.sh'" in wrong[0]
    assert grant_problem(replace(GRANTED, root=True), unit, CACHES[0]) is None
    assert grant_problem(GRANTED, facts(), CACHES[0]) is None


def test_a_variable_that_the_units_own_commands_name_is_refused_unless_it_is_allowed_by_name(service):
    texts = (
        f"{PLAIN}ExecStartPre=/bin/test -d ${{MODEL_DIR}}/x $HOOK\nExecStopPost=/bin/sh -c 'exec $$AFTER'\n",
        "[Service]\nExecStart=/v/vllm serve $MODEL\nExecStartPost=/x $OLD\nExecStartPost=\n# $NO\nNice=$NO\n",
    )
    own = coldboot_box.mentioned(texts)
    assert own == ("AFTER", "HOOK", "MODEL", "MODEL_DIR")
    for name in own:
        with pytest.raises(Refused, match=f"^{name} is named by the unit's own commands; `env {name}`"):
            coldboot_box.check_variables({name: "/x"}, (), CACHES, own)
        coldboot_box.check_variables({name: "/x"}, (name,), CACHES, own)
    coldboot_box.check_variables({"MODEL_DIR2": "/x", "COLDBOOT_ARGS": "x"}, (), CACHES, own)
    with pytest.raises(Refused, match="COLDBOOT_ARGS is named"):
        coldboot_box.check_variables({"COLDBOOT_ARGS": "x"}, (), CACHES, ("COLDBOOT_ARGS",))
    made = files(service, launch(env={"MODEL_DIR": "/x"}))
    helped().install(*made, whole=True)
    with pytest.raises(UsageError, match="MODEL_DIR is named by the unit's own commands"):
        replace(helped(), mentioned=own).install(*made, whole=True)


# --- names, paths, configuration -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("../vllm.service", "a/b.service", "/etc/x.service", "-x.service", "--all.service", ".service", "..service"),
        *("vllm", "vllm.socket", "vllm.service.d", "vllm.service\n", "a b.service", "*.service", "%n.service", ""),
        *(
            "a..b.service",
            "vllm.service/../x.service",
            "ä.service",
            "a" * 300 + ".service",
            "\\x2d.service",
            "x;y.service",
        ),
    ],
)
def test_a_name_that_is_no_plain_unit_is_refused(name):
    with pytest.raises(Refused):
        coldboot_box.check_unit(name)


@pytest.mark.parametrize("name", ["vllm.service", "vllm-qwen@a:1.service", "a.b_c.service"])
def test_a_plain_unit_is_accepted(name):
    assert coldboot_box.check_unit(name) == name


@given(TEXT | st.from_regex(r"(/[a-z.]{1,3}){1,4}/?", fullmatch=True))
def test_a_path_below_a_root_stays_there_however_it_is_written(path):
    for root in CACHES:
        if coldboot_box.below(f"{root}/{path}", CACHES):
            assert str(Path(f"{root}/{path}").resolve()).startswith(root)
            assert ".." not in path


def test_a_configuration_says_who_and_with_what():
    conf = coldboot_box.Conf(
        UNIT,
        "# x\nlogin alex\nlogin bo\ncache /var/cache/c/\nclear /home/svc/.nv/\nprogram /a -m b\nenv LD_PRELOAD\n\n",
    )
    assert conf.clears == ("/home/svc/.nv",)
    assert (conf.logins, conf.caches, conf.programs) == (("alex", "bo"), ("/var/cache/c",), (("/a", "-m", "b"),))
    assert (conf.env, conf.root) == (("LD_PRELOAD",), False)
    assert coldboot_box.Conf(UNIT, "root yes\n").root


@pytest.mark.parametrize(
    "line",
    [
        *(
            "cache /",
            "cache relative",
            "cache /home",
            "cache /a/../b",
            "cache /a b",
            "program +/bin/sh",
            "program",
            "x y",
        ),
        *("env A=B", "login", "program $X", "cache /a/%h"),
        *(
            "clear /",
            "clear /home",
            "clear relative",
            "clear /a/../b",
            "clear /a/./b",
            "clear /a b/c",
            "clear",
            "clear //a/b",
        ),
        *("clear /a/%h", "clear /a/$HOME", "clear ~/x", "clear /a/*", "clear /a/b\tx", 'clear "/a/b"', "clear /a/b\\"),
    ],
)
def test_a_configuration_with_a_wrong_word_allows_nothing(line):
    with pytest.raises(Refused):
        coldboot_box.Conf(UNIT, f"login alex\n{line}\n")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("root", "/etc"),
            ("root", "/var/cache/coldboot/../x"),
            ("root", "."),
            ("tag", "b-0123456789/.."),
            ("tag", "x"),
        ),
        *(("names", "../a"), ("names", "/a b/../c"), ("names", "a;b"), ("names", ""), ("copies", "/a\t../b\n")),
        *(
            ("copies", "/a\n"),
            ("copies", "../a\tb\n"),
            ("copies", "/a\tb\tc\n"),
            ("home", "/"),
            ("PATH", "/tmp"),
            ("", ""),
        ),
    ],
)
def test_words_for_the_caches_that_are_not_ours_are_refused(name, value):
    fine = {
        "root": f"{CACHES[0]}/vllm",
        "tag": "b-0123456789",
        "names": "a b/c",
        "copies": "/a b\tx/y\ncarried/m\tx/m\n",
    }
    coldboot_box.check_caches(fine, CACHES)
    with pytest.raises(Refused):
        coldboot_box.check_caches(fine | {name: value}, CACHES)
    with pytest.raises(Refused, match="root"):
        coldboot_box.check_caches({"tag": "b-0123456789"}, CACHES)


# --- the unit's own caches -------------------------------------------------------------------------------------------

OWN = f"own={CLEARS[0]}\tmodelinfos\tx/y\nown={CLEARS[1]}\nprecious=/models/a b\n"


def conf() -> coldboot_box.Conf:
    return coldboot_box.Conf(UNIT, "login alex\n" + "".join(f"clear {path}\n" for path in CLEARS))


def test_caches_that_root_has_named_may_be_set_aside_and_what_they_may_not_hold_is_told():
    own, precious = coldboot_box.read_clear(OWN, conf())
    assert own == (f"{CLEARS[0]}\tmodelinfos\tx/y", CLEARS[1])
    assert precious == ("/models/a b",)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        *(
            (f"own={CLEARS[0]}{more}", "is not named by `clear`")
            for more in ("/", "/x", "x", "/../x", "/.", "/..", " ")
        ),
        ("own", "is not named"),
        *((f"own={path}", "is not named") for path in ("/home/svc/.cache", "/home/svc", "/etc", "/", "", "relative")),
        *((f"own={path}", "is not named") for path in (f"/x/..{CLEARS[0]}", f"/{CLEARS[0]}", f"{CLEARS[0]}\r", "%h/x")),
        *((f"own={CLEARS[0]}\t{name}", "no plain name") for name in ("../x", "a/../../x", "/x", "", "a b", "$x", "*")),
        *(
            (f"{word}=/tmp", "`own` and `precious`")
            for word in ("root", "roots", "guard", "link", "pattern", "PATH", "")
        ),
        *((line, "`own` and `precious`") for line in ("precious ", " own=/tmp", "OWN=/tmp", "precious=/a\0", "\tx")),
    ],
)
def test_a_cache_that_root_has_not_named_and_words_that_are_not_ours_are_refused(line, what):
    with pytest.raises(Refused, match=re.escape(what)):
        coldboot_box.read_clear(f"{OWN}{line}\n", conf())


def test_where_no_cache_is_named_nothing_is_done():
    with pytest.raises(Refused, match="no directory is named"):
        coldboot_box.read_clear("precious=/a\n", conf())
    with pytest.raises(Refused, match="is not named by `clear` in vllm"):
        coldboot_box.read_clear(OWN, coldboot_box.Conf(UNIT, "login alex\n"))


def test_a_link_anywhere_on_the_way_is_refused(tmp_path):
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "real" / "end").symlink_to("deep")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").write_text("")
    for fine in ("real/deep", "real/missing", "missing/deeper/still"):
        coldboot_box.refuse_links(f"{tmp_path}/{fine}")
    for wrong in ("link/deep", "link/missing", "link", "real/end", "real/end/x", "file", "file/x"):
        with pytest.raises(Refused, match="or a link"):
            coldboot_box.refuse_links(f"{tmp_path}/{wrong}")


@given(
    st.sampled_from([UNIT, "vllm-qwen@a:1.service", "a.b_c.service"]),
    st.lists(st.from_regex(r"(/[A-Za-z0-9_.@+=,:~-]{1,6}){2,4}", fullmatch=True), min_size=1, max_size=4),
)
def test_the_helper_and_the_plain_way_put_back_by_the_same_unit(unit, paths):
    ours = Aside(unit, "svc", "/etc/systemd/system", f"/run/systemd/system/{unit}.d/zz-coldboot.conf")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(coldboot_box, "TEMPLATES", helper.templates())
        made = coldboot_box.Unit(coldboot_box.Conf(unit, "login alex\n"), 1000)
        text = made.guard_text(tuple(paths), "svc")
    assert text == ours.text(paths)
    assert made.guard == ours.name
    assert coldboot_box.listed_in(text) == tuple(paths) == directories(text)


@pytest.mark.parametrize("text", ["", "[Service]\n", "ExecStart=\n", "x\nExecStart=/bin/sh -c x coldboot u.service\n"])
def test_a_text_that_names_no_directories_lists_none(text):
    assert coldboot_box.listed_in(text) == ()


class NoBox:
    """A login of its own, and a box that must not be asked."""

    user = "alex"

    def run(self, *_: object, **__: object) -> object:
        raise AssertionError("the box was asked")


def own_caches(granted: tuple[str, ...] | None) -> OwnCaches:
    aside = Aside(UNIT, "svc", "/etc/systemd/system", f"{PLACE}/zz-coldboot.conf")
    return OwnCaches(NoBox(), aside, "root", ("systemctl",), granted)


def test_by_the_helper_it_is_called_for_each_part_and_nothing_else_is():
    door = own_caches(CLEARS)
    (guard,), back = door.guard_actions(CLEARS), door.put_back_action
    assert (guard.argv, guard.as_user) == ((HELPER, UNIT, "clear", "guard"), "root")
    assert guard.input == f"own={CLEARS[0]}\nown={CLEARS[1]}\n"
    assert (back.argv, back.as_user, back.input, back.may_fail) == ((HELPER, UNIT, "clear", "back"), "root", None, True)
    assert door.call(facts(), "empty") == ((HELPER, UNIT, "clear", "empty"), "root")
    assert door.call(replace(facts(), user="alex"), "empty") == (("sh", "-s"), None)
    assert own_caches(None).call(facts(), "empty") == (("sh", "-s"), "svc")
    assert [action.argv[0] for action in own_caches(None).guard_actions(CLEARS)] == ["tee", "mv", "systemctl"]


def facts() -> UnitFacts:
    return UnitFacts(
        UNIT, exists=True, argv=PROGRAM, env={}, user="svc", home="/home/svc", active=True, enabled=True, helper=True
    )


def test_caches_that_the_helper_does_not_allow_are_told_before_the_box_is_asked_with_the_line_that_allows_them():
    own = [OwnCache(path) for path in (*CLEARS, "/home/svc/.triton/cache", f"{CLEARS[0]}/inner", "/tmp/ti_svc")]
    found, problems = own_caches(CLEARS).resolve(facts(), own, (), None)
    assert found == ()
    assert problems == (
        (
            "coldboot-box does not allow vllm.service's own caches: /home/svc/.triton/cache /tmp/ti_svc; on the box: "
            "printf 'clear %s\\n' /home/svc/.triton/cache /tmp/ti_svc | sudo tee -a /etc/coldboot-box/vllm.service.conf"
        ),
    )
    (odd,) = own_caches(()).resolve(facts(), [OwnCache("/home/svc/a b")], (), None)[1]
    assert odd.startswith("coldboot-box sets no directory aside that is called '/home/svc/a b'")
    assert "`root: sudo`" in odd


class Saying:
    """A box that answers every question alike."""

    user = "alex"

    def __init__(self, text: str) -> None:
        self.text = text

    def run(self, argv: tuple[str, ...], **_: object) -> CommandResult:
        return CommandResult(argv, 0, self.text, "", 0.0)


def test_a_cache_behind_a_link_is_told_with_the_link_and_what_root_writes_and_is_taken_where_root_has_named_it():
    own, real = [OwnCache(CLEARS[0], ("modelinfos",))], "/data/vllm"
    for text, link in (
        (f"at {real}\t/home/svc/.cache\n", "/home/svc/.cache is a link"),
        (f"at {real}\n", "a link lead"),
    ):
        door = replace(own_caches(CLEARS), transport=Saying(text))
        (said,) = door.resolve(facts(), own, (), None)[1]
        assert said.startswith(f"{CLEARS[0]} is {real}, as {link}")
        assert said.endswith(
            f"root names {real} too: printf 'clear %s\\n' {real} | sudo tee -a /etc/coldboot-box/vllm.service.conf"
        )
        named = replace(door, granted=(*CLEARS, real))
        assert named.resolve(facts(), own, (), None) == ((OwnCache(real, ("modelinfos",)),), ())


def test_the_line_that_allows_them_is_one_that_the_helper_reads(tmp_path):
    mend = clear_problem((), UNIT, CLEARS)[1].replace("sudo tee -a /etc/coldboot-box", f"tee -a {tmp_path}")
    subprocess.run(("sh", "-c", mend), check=True, stdout=subprocess.DEVNULL)
    assert coldboot_box.Conf(UNIT, (tmp_path / f"{UNIT}.conf").read_text()).clears == CLEARS


def test_the_installer_allows_the_units_own_caches_in_usual_places():
    own = [
        OwnCache(path)
        for path in (*CLEARS, "/home/svc", "/home/svc/.cache", "/srv/x/y", "/tmp/t", "/tmp/a b", f"{CLEARS[0]}/inner")
    ]
    assert proposed(facts(), own, None) == (*CLEARS, "/tmp/t")
    assert proposed(facts(), own, "/srv/x") == (*CLEARS, "/srv/x/y", "/tmp/t")
    text = helper.install_script(UNIT, "alex", CACHES, CLEARS)
    assert f"login alex\ncache {CACHES[0]}\ncache {CACHES[1]}\nclear {CLEARS[0]}\nclear {CLEARS[1]}\n" in text


def test_doctor_names_the_caches_that_the_helper_does_not_allow_where_the_matrix_sets_them_aside():
    box = BoxSpec(name="g", transport="ssh", service="systemd", unit="vllm", host="g")
    granted = replace(GRANTED, caches=("/home/svc/.cache/coldboot",), digest=helper.digest(), clears=CLEARS[:1])
    own = [OwnCache(path) for path in CLEARS]
    assert judge_root(box, "alex", granted, facts(), "matrix.yaml").level == "ok"
    wrong = judge_root(box, "alex", granted, facts(), "matrix.yaml", clears=own)
    assert (wrong.level, CLEARS[1] in wrong.said, CLEARS[0] in wrong.said) == ("fail", True, False)
    assert wrong.mend == f"printf 'clear %s\\n' {CLEARS[1]} | sudo tee -a /etc/coldboot-box/vllm.service.conf"
    assert judge_root(box, "alex", replace(granted, clears=CLEARS), facts(), "m", clears=own).level == "ok"


# --- its texts -------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(monkeypatch):
    monkeypatch.setattr(coldboot_box, "TEMPLATES", helper.templates())


@pytest.mark.parametrize("unit", [UNIT, "vllm-qwen@a:1.service"])
@pytest.mark.parametrize(("active", "limit_s"), [(True, 900.0), (False, 2.0), (True, 61.5)])
def test_the_helper_and_the_plain_way_arm_the_same_restore(filled, unit, active, limit_s):
    aside = Aside(unit, "alex", "/etc/systemd/system", "")
    dead = replace(dead_man(unit), put_back=(aside.name, aside.path))
    made = coldboot_box.Unit(coldboot_box.Conf(unit, "login alex\n"), 1000)
    assert made.dead_man(limit_s, active=active) == {
        "restore": dead.script_text(active=active, dead_man_s=limit_s),
        "service": dead.service_text(),
        "timer": dead.timer_text(limit_s),
    }
    assert dead.stem == made.stem


def test_the_program_is_one_file_of_the_standard_library_for_python_3_9(tmp_path):
    tree = ast.parse(helper.program(), feature_version=(3, 9))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
    }
    assert imported <= {"__future__", "hashlib", "os", "pwd", "re", "stat", "sys"}
    (tmp_path / "x").write_text(helper.program())
    done = subprocess.run(("/bin/sh", "-n"), input=helper.install_script(UNIT, "alex", CACHES), text=True, check=False)
    assert done.returncode == 0
    if hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest() != helper.digest():
        pytest.fail("the digest is not the file's")


def test_a_changed_program_has_a_new_version():
    """When this fails: raise VERSION if a campaign of ours needs the change, and write the new digest here."""
    assert (coldboot_box.VERSION, helper.digest()[:12]) == (3, "bf95c6e08bad")


def test_run_by_somebody_else_than_root_it_does_nothing(tmp_path):
    path = tmp_path / "coldboot-box"
    path.write_text(helper.program())
    path.chmod(0o755)
    tmp_path.chmod(0o755)
    words = ("setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-I", "-S", "-", UNIT, "start")
    done = subprocess.run(words, input=helper.program(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "coldboot-box: sudo runs this\n")


# --- which way is used -----------------------------------------------------------------------------------------------


def said(**changes: object) -> str:
    version = changes.get("version", coldboot_box.VERSION)
    return (
        f"coldboot-box {version}\nsha256 {'0' * 64}\nunit other.service\ncache /x/y\n"
        f"unit {UNIT}\ncache {CACHES[0]}\ncache {CACHES[1]}\nclear {CLEARS[0]}\n"
        f"clear {CLEARS[1]}\nenv PYTHONPATH\nprogram /a -m b\n"
    )


def test_what_the_helper_says_of_itself_is_read_for_our_unit():
    found = read_granted(said(), UNIT)
    assert found == replace(GRANTED, clears=CLEARS, env=("PYTHONPATH",), programs=(("/a", "-m", "b"),))
    assert not read_granted(said(), "third.service").known
    assert read_granted("", UNIT) is None
    assert read_granted("sudo: a password is required\n", UNIT) is None


def test_the_helper_is_used_where_it_is_there_and_sudo_else():
    at = helped().at
    assert isinstance(choose(at, None, GRANTED, PROGRAM, INSTALL), HelperDoor)
    assert isinstance(choose(at, "helper", GRANTED, PROGRAM, INSTALL), HelperDoor)
    assert isinstance(choose(at, "sudo", GRANTED, PROGRAM, INSTALL), SudoDoor)
    assert isinstance(choose(at, None, None, PROGRAM, INSTALL), SudoDoor)
    assert isinstance(choose(at, None, read_granted(said(), "third.service"), PROGRAM, INSTALL), SudoDoor)


@pytest.mark.parametrize(
    ("granted", "what"),
    [
        (None, "not installed, or sudo does not allow it"),
        (read_granted(said(), "third.service"), "does not know"),
        (read_granted(said(version=0), UNIT), "version 0, older than ours"),
    ],
)
def test_a_helper_that_is_asked_for_and_cannot_be_used_is_said_with_the_command_that_mends_it(granted, what):
    with pytest.raises(BoxError, match=what) as refused:
        choose(helped().at, "helper", granted, PROGRAM, INSTALL)
    assert INSTALL in str(refused.value)


def test_an_older_helper_is_told_and_not_passed_over_in_silence():
    with pytest.raises(BoxError, match="older"):
        choose(helped().at, None, read_granted(said(version=0), UNIT), PROGRAM, INSTALL)


def test_the_calls_of_a_boot(service):
    door, (drop_in, variables) = helped(), files(service, launch("--port", "1"))
    actions = (
        *door.install(drop_in, variables, whole=True),
        *door.install(drop_in, variables, whole=False),
        *(door.start(), door.stop(), *door.kill(), *door.restore(active=True), *door.restore(active=False)),
        *(*door.arm(active=True, dead_man_s=900.0), *door.disarm()),
    )
    assert {action.argv[:2] for action in actions} == {(HELPER, UNIT)}
    assert [" ".join(action.argv[2:]) for action in actions] == [
        *("install", "arguments", "start", "stop", "kill", "restore start", "restore", "arm 900.000 active", "disarm"),
    ]
    given_ = actions[0].input
    assert given_.partition(coldboot_box.CUT)[::2] == (drop_in, variables)
    assert all(action.as_user == "root" for action in actions)


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (launch(env={"LD_PRELOAD": "/x"}), "LD_PRELOAD can load code"),
        (Launch(("/other", "--x"), COLD, (), 1, "m"), "not the unit's program"),
        (launch("bell\x07"), "ExecStart"),
        (launch(env={"TMPDIR": "/tmp"}), "TMPDIR names '/tmp'"),
    ],
)
def test_what_the_helper_would_refuse_is_refused_here_before_anything_is_taken_down(service, made, what):
    with pytest.raises(UsageError, match=re.escape(what)) as refused:
        helped().install(*files(service, made), whole=True)
    assert "/etc/coldboot-box/vllm.service.conf" in str(refused.value)


def test_the_line_of_sudoers_allows_the_helper_alone():
    assert helper.sudoers("alex").splitlines()[-1] == f"alex ALL=(root) NOPASSWD: {HELPER}"
    assert HELPER == coldboot_box.HERE


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        (
            {"transport": "ssh", "host": "gpu1"},
            "invoke box-helper --box g | ssh gpu1 'cat >coldboot-box.sh' && ssh -t gpu1 sudo sh coldboot-box.sh",
        ),
        ({"transport": "local"}, "invoke box-helper --box g | sudo sh"),
        (
            {"transport": "ssh", "ssh_config": "/a b", "user": "bo"},
            (
                "invoke box-helper --box g | ssh -F '/a b' -l bo g 'cat >coldboot-box.sh' && "
                "ssh -F '/a b' -l bo -t g sudo sh coldboot-box.sh"
            ),
        ),
    ],
)
def test_the_one_command_that_installs_it(changes, command):
    assert helper.install_command(BoxSpec(name="g", service="systemd", unit="v", **changes)) == command
