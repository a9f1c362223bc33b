"""The checks that are no single command: the way in, the clock, sudo, the engine's versions, /metrics and the GPUs.

Each asks and hands what it heard to a pure judge.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence

from orchestrator import scrape
from orchestrator.box import commands, facts
from orchestrator.box.engines import Launch
from orchestrator.box.transports import Transport
from orchestrator.doctor.checks import Known, script, size_text
from orchestrator.doctor.findings import Finding, Level
from orchestrator.errors import BoxError, Unreachable
from orchestrator.matrix import BoxSpec

ASK_S = 30.0
METRICS_S = 5.0
# The logger's lines are put to our windows by time: a window of 30 s is off by 3 % with a second.
SKEW_WARN_S, SKEW_FAIL_S = 1.0, 30.0
SLOW_WAY_MS = 200.0
_HARMLESS = frozenset({"gpu_idle", "applications_clocks_setting", "display_clock_setting"})
_VERSIONS = ("engine_version", "engine_python", "torch")
_GPU_FACTS = ("gpus", "driver", "persistence", "power_limit_w", "sm_clock_max_mhz")


# --- the way in ------------------------------------------------------------------------------------------------------

# What `Unreachable` says, by the step of the way that it speaks of; the last fits all.
_STEPS: tuple[tuple[str, str], ...] = (
    ("known_host", r"host key"),
    ("login", r"refused to let us in|locked by a passphrase|takes no keys|a key is not enough|not run; the login"),
    ("ssh", r""),
)


def judge_unreachable(error: BoxError) -> tuple[Finding, ...]:
    """A way in that is not there: how far we came, and where it ended."""
    failed = next(check for check, pattern in _STEPS if re.search(pattern, error.what))
    came = {"known_host": ("ssh",), "login": ("ssh", "known_host"), "ssh": ()}[failed]
    passed = {"ssh": "sshd answers", "known_host": "its host key is the one that we know"}
    mend = error.hint or "see `ssh -v` to it by hand"
    return (*(Finding(one, "ok", passed[one]) for one in came), Finding(failed, "fail", error.what, mend=mend))


def judge_way(box: BoxSpec, login: str, *, is_root: bool, round_trip_s: float) -> tuple[Finding, ...]:
    """A way in that is there."""
    ms = round(round_trip_s * 1000, 1)
    who = f"{login}, who is root" if is_root else f"{login}, without root"
    if box.transport != "ssh":
        return (
            Finding("reach", "ok", f"the box is this machine, {ms:g} ms a command", ms, "ms"),
            Finding("login", "ok", who),
        )
    level: Level = "ok" if ms <= SLOW_WAY_MS else "warn"
    slow = "the load runs here: its own cost is measured, but run it nearer to the box if you can"
    return (
        Finding("ssh", level, f"connected, {ms:g} ms a command", ms, "ms", None if level == "ok" else slow),
        Finding("known_host", "ok", "its host key is the one that we know"),
        Finding("login", "ok", who),
    )


# --- the clock -------------------------------------------------------------------------------------------------------


def clock(transport: Transport) -> tuple[float, float] | None:
    """How far the box's clock is ahead of ours and by how much that may be wrong, seconds; the best of five looks.

    None: the box has no `date` that tells fractions.
    """
    looks: list[tuple[float, float]] = []
    for _ in range(5):
        begun = time.time()
        said = transport.run(("date", "+%s.%N"), timeout_s=ASK_S, check=False).stdout.strip()
        ended = time.time()
        if re.fullmatch(r"\d+\.\d+", said):
            looks.append(((ended - begun) / 2, float(said) - (begun + ended) / 2))
    if not looks:
        return None
    half, ahead = min(looks)
    return ahead, half


def judge_clock(found: tuple[float, float] | None) -> Finding:
    """Whether the box's clock agrees with ours."""
    mend = "sudo timedatectl set-ntp true   # on the box, and the same here"
    if found is None:
        return Finding("clock", "warn", "the box's `date` tells no fractions of a second", mend=mend)
    ahead, half = found
    off = max(0.0, abs(ahead) - half)
    level: Level = "fail" if off > SKEW_FAIL_S else "warn" if off > SKEW_WARN_S else "ok"
    way = "ahead of" if ahead > 0 else "behind"
    said = f"the box's clock is {abs(ahead):.3f} s {way} ours (± {half:.3f} s)"
    return Finding("clock", level, said, round(ahead, 3), "s", None if level == "ok" else mend)


# --- sudo ------------------------------------------------------------------------------------------------------------

_SUDO = r"""
all=$(sudo -n -l 2>&1); status=$?
printf '%s\036%s' "$status" "$all"
"""


def sudo(transport: Transport, needs: Sequence[tuple[str, tuple[str, ...]]], known: Known) -> Finding:
    """Every command that we run as somebody else, asked of sudo by `sudo -n -l`, and none of them run."""
    if not needs:
        who = "root needs none" if known.is_root else "none is needed"
        return Finding("sudo", "ok", who, 0, "missing")
    status, _, listed = transport.run(script(_SUDO), timeout_s=ASK_S).stdout.partition("\x1e")
    allowed = [False] * len(needs)
    paths: dict[str, str] = {}
    asks = [
        f"sudo -n -l {'' if user == 'root' else f'-u {shlex.quote(user)} '}-- {shlex.join(argv)} >/dev/null 2>&1; "
        "printf '%s ' $?"
        for user, argv in needs
    ]
    programs = sorted({argv[0] for _, argv in needs if "/" not in argv[0]})
    finds = [f"printf '\\036%s=' {name}; sh -c {shlex.quote(commands.FIND)} sh {name}" for name in programs]
    # Where sudo lets this login do nothing, each further question would be one more line in root's mail.
    if status != "0":
        asks = []
    said = transport.run(script("\n".join((*asks, *finds))), timeout_s=ASK_S, check=False).stdout
    answers, *found = said.split("\x1e")
    for index, word in enumerate(answers.split()):
        allowed[index] = word == "0" and without_password(listed, needs[index][1])
    paths = dict(entry.strip().partition("=")[::2] for entry in found)
    return judge_sudo(needs, allowed, paths, known)


def without_password(listed: str, argv: Sequence[str]) -> bool:
    """Whether the listing of `sudo -l` allows a command without a password.

    `sudo -n -l COMMAND` also says yes to what would ask for one. Where every rule is NOPASSWD that cannot be; else the
    command has to stand behind that word, or `ALL`.
    """
    rules = [line.strip() for line in listed.splitlines() if re.match(r"\s+\(", line)]
    free = [rule.partition("NOPASSWD:")[2] for rule in rules if "NOPASSWD:" in rule]
    if rules and len(free) == len(rules):
        return True
    wanted = _bare(" ".join(argv))
    return any(_bare(one).strip() == "ALL" or wanted in _bare(one) for one in free)


def _bare(text: str) -> str:
    return text.replace("\\", "")


def judge_sudo(
    needs: Sequence[tuple[str, tuple[str, ...]]], allowed: Sequence[bool], paths: Mapping[str, str], known: Known
) -> Finding:
    """Which lines of sudoers are missing, ready to paste."""
    missing = [
        commands.sudoers_line(known.login, user, argv, path=paths.get(argv[0]) or None)
        for (user, argv), yes in zip(needs, allowed, strict=True)
        if not yes
    ]
    if not missing:
        return Finding("sudo", "ok", f"{known.login} may run all {len(needs)} commands", 0, "missing")
    return Finding(
        "sudo",
        "fail",
        f"{known.login} may not run {len(missing)} of {len(needs)} commands without a password",
        len(missing),
        "missing",
        "\n".join(("sudo visudo -f /etc/sudoers.d/coldboot   # on the box; add these lines:", *missing)),
    )


# --- the engine ------------------------------------------------------------------------------------------------------


def engine(transport: Transport, known: Known) -> Finding:
    """The engine's Python and version, from its packages' metadata."""
    assert isinstance(known.own, Launch)
    wanted = [fact for fact in facts.FACTS if fact.name in _VERSIONS]
    places = None if known.unit is None else known.unit.env.get("PYTHONPATH")
    found = facts.fingerprint(transport, program=known.own.argv, python_path=places, facts=wanted)
    return judge_engine(found, known.own.argv[0], known)


def judge_engine(found: Mapping[str, str | None], program: str, known: Known) -> Finding:
    """Whether the fingerprint will tell one version of the engine from another."""
    name = "coldboot (the rehearsal engine)" if known.rehearsal else "vLLM"
    version, python = found.get("engine_version"), found.get("engine_python")
    if python is None:
        return Finding(
            "engine",
            "warn",
            f"{program} cannot be asked for its version by {known.login}: boots before and after an upgrade would be "
            "pooled",
            mend=f"{shlex.join((program, '-c', 'import sys; print(sys.version)'))}   # as {known.login}, shows why",
        )
    torch = f", torch {found['torch']}" if found.get("torch") else ""
    if version is None:
        return Finding(
            "engine",
            "fail",
            f"Python {python} has no vLLM: {program}",
            mend=f"{shlex.join((program, '-m', 'pip', 'show', 'vllm'))}   # on the box; is it the unit's own Python?",
        )
    return Finding("engine", "ok", f"{name} {version}, Python {python}{torch}")


# --- /metrics --------------------------------------------------------------------------------------------------------


def metrics(transport: Transport, known: Known) -> Finding:
    """Whether production's counter can be read the way that trials read it; asked while it runs."""
    assert isinstance(known.own, Launch)
    if any(word.startswith("--ssl-") for word in known.own.argv):
        return Finding("metrics", "ok", "production speaks TLS and is not asked; trials are plain, on the loopback")
    host, port = transport.reach(known.own.port)
    try:
        found = scrape.fetch(f"http://{host}:{port}", METRICS_S, api_key=known.own.api_key)
    except Unreachable as error:
        return Finding(
            "metrics",
            "fail",
            f"production does not answer: {error.what}",
            mend=f"{known.ask_journal}   # does it still boot, or hang?",
        )
    except BoxError as error:
        return Finding(
            "metrics", "fail", error.what, mend="`port:` in matrix.yaml must be vLLM's own port, not a proxy's"
        )
    return judge_metrics(found.generation_tokens, found.busy)


def judge_metrics(tokens: float | None, busy: float | None) -> Finding:
    """Whether the counter that is the measurement is there."""
    if tokens is None:
        return Finding(
            "metrics",
            "fail",
            "/metrics has no vllm:generation_tokens_total, which is what we measure",
            mend="take --disable-log-stats out of the unit's ExecStart",
        )
    now = "" if busy is None else f"; {busy:g} requests are in it now"
    return Finding("metrics", "ok", f"answers, {tokens:.0f} tokens counted so far{now}", tokens, "tokens")


# --- the GPUs --------------------------------------------------------------------------------------------------------


def gpus(transport: Transport, known: Known) -> tuple[Finding, ...]:
    """The GPUs: their idle level, who else computes on them, their clocks."""
    try:
        state = facts.gpu_state(transport)
    except BoxError as error:
        return (Finding("gpu", "fail", error.what, mend=error.hint or "nvidia-smi; sudo dmesg | grep -i xid"),)
    if state is None:
        return (judge_no_gpu(known),)
    wanted = [fact for fact in facts.FACTS if fact.name in _GPU_FACTS]
    found = facts.fingerprint(transport, facts=wanted)
    return (judge_memory(state, found, known), judge_foreign(state, known), judge_clocks(state, found))


def judge_no_gpu(known: Known) -> Finding:
    """A box without any."""
    if known.rehearsal:
        return Finding("gpu", "ok", "there is none, and a rehearsal needs none", 0, "GPUs")
    return Finding(
        "gpu",
        "warn",
        "nvidia-smi shows no GPU: memory, other processes and clocks cannot be watched",
        0,
        "GPUs",
        "nvidia-smi   # on the box, as the login; fine if the engine runs on the CPU",
    )


def judge_memory(state: facts.GpuState, found: Mapping[str, str | None], known: Known) -> Finding:
    """How much of each GPU is used now: the idle level, when nothing computes."""
    parts = [f"GPU {gpu.index} {gpu.used_mib} of {gpu.total_mib} MiB" for gpu in state.gpus if gpu.used_mib is not None]
    when = "with the unit's processes" if set(state.compute_pids) & set(known.pids) else "idle"
    if state.compute_pids and when == "idle":
        when = "with other processes"
    used = max(state.used_mib, default=None)
    memory = f"{', '.join(parts)} used, {when}" if parts else "they do not tell their memory"
    return Finding("gpu", "ok", f"{found.get('gpus')}, driver {found.get('driver')}; {memory}", used, "MiB")


def judge_foreign(state: facts.GpuState, known: Known) -> Finding:
    """Whether somebody else computes on the GPUs: no boot would find a clean slate."""
    foreign = [process for process in state.processes if process.pid not in known.pids]
    if not foreign:
        return Finding("gpu_processes", "ok", "nobody but the unit computes on the GPUs", 0, "processes")
    shown = ", ".join(
        f"{one.pid} ({one.name}{'' if one.used_mib is None else ', ' + size_text(one.used_mib * 2**20)})"
        for one in foreign
    )
    return Finding(
        "gpu_processes",
        "fail",
        f"others compute on the GPUs: {shown}",
        len(foreign),
        "processes",
        f"ps -o pid,user,unit,args -p {','.join(str(one.pid) for one in foreign)}   # on the box; end them, or stop "
        "their unit",
    )


def judge_clocks(state: facts.GpuState, found: Mapping[str, str | None]) -> Finding:
    """Persistence mode, and whether anything holds the clocks down now."""
    slowed = sorted({reason for gpu in state.gpus for reason in gpu.throttle or () if reason not in _HARMLESS})
    hot = max((gpu.temperature_c for gpu in state.gpus if gpu.temperature_c is not None), default=None)
    at = f"up to {found.get('sm_clock_max_mhz')} MHz, {found.get('power_limit_w')} W" + (
        "" if hot is None else f", {hot} °C now"
    )
    if slowed:
        return Finding(
            "gpu_clocks",
            "warn",
            f"the clocks are held down now ({', '.join(slowed)}); {at}",
            hot,
            "°C",
            "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER   # on the box; cool it, or lower the power limit for all",
        )
    if "Enabled" not in (found.get("persistence") or "Enabled") or "Disabled" in (found.get("persistence") or ""):
        return Finding(
            "gpu_clocks",
            "warn",
            f"persistence mode is off: the driver is loaded anew for each boot; {at}",
            hot,
            "°C",
            "sudo nvidia-smi -pm 1   # on the box",
        )
    return Finding("gpu_clocks", "ok", f"persistence mode {found.get('persistence') or 'not told'}; {at}", hot, "°C")


# --- the variants ----------------------------------------------------------------------------------------------------


def judge_variants(composed: Mapping[str, Sequence[str]], file: str) -> Finding:
    """Whether every variant can be made of production's command; name → what is wrong with it."""
    wrong = {name: problems for name, problems in composed.items() if problems}
    if not wrong:
        return Finding("variants", "ok", f"all {len(composed)} can be made of the unit's command", len(composed), "")
    said = "; ".join(f"{name}: {', '.join(problems)}" for name, problems in wrong.items())
    return Finding("variants", "fail", said, len(wrong), "variants", f"mend them in {file}")
