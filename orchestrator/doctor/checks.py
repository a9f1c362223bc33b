"""The checks as data: what is asked of the box, and what its answer means. Pure.

A `Check` is a command and a judge of what it said, so that a text tests it. Checks that share a command share its run,
and all of them are one round trip. What cannot be asked by one command (the clock, /metrics, sudo) is in `probes`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.box.engines import Launch, Problem
from orchestrator.box.unit import UnitFacts
from orchestrator.box.unitfile import parse
from orchestrator.doctor.findings import Finding, Level
from orchestrator.matrix import BoxSpec
from orchestrator.progress import hours

MANY_RESTARTS = 3
KIB, MIB = 1024, 1024**2
# Cold caches of a 27B model are about 2 GiB a boot; the rehearsal's are some KiB.
DISK_FAIL_GIB, DISK_WARN_GIB = 2.0, 10.0
REHEARSAL_DISK_FAIL_GIB, REHEARSAL_DISK_WARN_GIB = 0.05, 0.5
# systemd 240 knows LogRateLimitIntervalSec=, by which our drop-in lifts the limit for the unit.
LIFTS_RATE_LIMIT = 240
TOOLS = ("sh", "flock", "timeout", "head", "pgrep", "ps", "find", "getent", "grep", "tail")
SYSTEMD_TOOLS = (*TOOLS, "systemctl", "journalctl", "tee", "install", "rm", "rmdir", "mkdir")


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a box when the checks are judged.

    `unit` and `own` (production's own command) are None where they could not be read. `pids` are all processes of the
    unit. `leftovers` are paths on the box that only a campaign makes. `holder` is who holds the box's lock. `clears`:
    the matrix asks for `cache: clear`.
    """

    box: BoxSpec
    login: str
    is_root: bool
    rehearsal: bool
    ready_s: float
    name: str
    unit: UnitFacts | None = None
    own: Launch | tuple[Problem, ...] | None = None
    pids: tuple[int, ...] = ()
    leftovers: tuple[str, ...] = ()
    holder: str | None = None
    cache_place: str | None = None
    clears: bool = False

    @property
    def systemd(self) -> bool:
        """Whether systemd runs it, the system's or the user's own."""
        return self.box.service != "process"

    @property
    def ctl(self) -> str:
        """`systemctl` as a person types it on the box."""
        return "systemctl --user" if self.box.service == "systemd-user" else "sudo systemctl"

    @property
    def ask_journal(self) -> str:
        """What a person types here to learn what ended the unit."""
        way = f"ssh {self.box.host or self.box.name} " if self.box.transport == "ssh" else ""
        user = "--user " if self.box.service == "systemd-user" else ""
        return f"{way}journalctl {user}-u {self.name} -o json | invoke classify --journal -"

    @property
    def port(self) -> int | None:
        """Where production listens."""
        return self.own.port if isinstance(self.own, Launch) else self.box.port


@dataclass(frozen=True, slots=True)
class Said:
    """What a command answered."""

    status: int
    text: str


@dataclass(frozen=True, slots=True)
class Check:
    """One question. `argv` is None where it does not arise on this box; `needs` names what must be known to ask it."""

    name: str
    argv: Callable[[Known], tuple[str, ...] | None]
    judge: Callable[[Said, Known], Finding]
    needs: str | None = None


def script(text: str, *arguments: str) -> tuple[str, ...]:
    """The argv of a small shell script."""
    return ("sh", "-c", text, "coldboot", *arguments)


def properties(text: str) -> dict[str, str]:
    """The lines `Key=value` of `systemctl show`."""
    return dict(line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Za-z]\w*=", line))


# --- the unit --------------------------------------------------------------------------------------------------------

_SHOWN = (
    *("ActiveState", "SubState", "MainPID", "NRestarts", "Result", "ExecMainStatus", "UnitFileState", "Restart"),
    *("WantedBy", "RequiredBy", "UpheldBy", "TriggeredBy", "NeedDaemonReload", "ActiveEnterTimestampMonotonic"),
)
_SHOW = """
unit=$1; shift
"$@" show --no-pager -p PROPERTIES -- "$unit" || exit 1
read -r up _ </proc/uptime && echo "Uptime=$up"
""".replace("PROPERTIES", " -p ".join(_SHOWN))


def _show(known: Known) -> tuple[str, ...] | None:
    if not known.systemd:
        return None
    user = known.box.service == "systemd-user"
    ctl = 'XDG_RUNTIME_DIR="/run/user/$(id -u)"; export XDG_RUNTIME_DIR\n' if user else ""
    return script(ctl + _SHOW, known.name, *(("systemctl", "--user") if user else ("systemctl",)))


def judge_starts(said: Said, known: Known) -> Finding:
    """Who starts it: after a reboot, and in mid-campaign."""
    shown = properties(said.text)
    state = shown.get("UnitFileState", "")
    wants = " ".join(shown.get(key, "") for key in ("WantedBy", "RequiredBy", "UpheldBy")).split()
    if triggers := shown.get("TriggeredBy", "").split():
        return Finding(
            "starts",
            "warn",
            f"{' and '.join(triggers)} can start it while a variant is measured",
            mend=f"{known.ctl} stop {' '.join(triggers)}   # on the box, for the time of the campaign",
        )
    if state.startswith("enabled") or wants:
        by = f", by {' and '.join(wants)}" if wants else ""
        return Finding("starts", "ok", f"{state or 'wanted'}: it starts with the box{by}")
    return Finding(
        "starts",
        "warn",
        f"{state or 'no install section'}: nothing starts it after a reboot",
        mend=f"{known.ctl} enable {known.name}   # on the box, if it shall",
    )


def judge_active(said: Said, known: Known) -> Finding:
    """Whether it runs, and for how long."""
    shown = properties(said.text)
    state, sub = shown.get("ActiveState", "unknown"), shown.get("SubState", "unknown")
    restarts = int(shown.get("NRestarts") or 0)
    log = f"{known.ask_journal}   # what ended it"
    result = f"result {shown.get('Result')}, status {shown.get('ExecMainStatus')}"
    if sub == "auto-restart" or (state == "activating" and restarts):
        said_ = f"in a restart loop: {restarts} restarts, {result}"
        return Finding("active", "fail", said_, restarts, "restarts", f"{log}\n{known.ctl} stop {known.name}")
    if state == "failed":
        return Finding("active", "fail", f"failed: {result}", restarts, "restarts", log)
    if state == "active" and restarts > MANY_RESTARTS:
        said_ = f"running, but systemd restarted it {restarts} times"
        return Finding("active", "warn", said_, restarts, "restarts", log)
    if state == "active":
        age = active_s(shown)
        since = "" if age is None else f" for {hours(age)}"
        return Finding("active", "ok", f"running{since}, process {shown.get('MainPID')}", age, "s")
    if state in ("activating", "reloading"):
        return Finding("active", "warn", f"{state} ({sub})", mend="wait until it serves")
    return Finding(
        "active",
        "warn",
        f"not running ({state}): a campaign leaves it so, and nothing can be asked of it now",
        mend=f"{known.ctl} start {known.name}   # on the box",
    )


def active_s(shown: Mapping[str, str]) -> float | None:
    """Seconds since the unit became active, by the box's own uptime."""
    try:
        entered, up = int(shown["ActiveEnterTimestampMonotonic"]) / 1e6, float(shown["Uptime"])
    except (KeyError, ValueError):
        return None
    return None if entered <= 0 else max(0.0, up - entered)


def judge_exec(said: Said, known: Known) -> Finding:
    """Whether the unit's command is the engine's own, so that single flags can be changed."""
    del said
    if isinstance(known.own, Launch):
        flags = sum(word.startswith("--") for word in known.own.argv)
        return Finding(
            "exec", "ok", f"runs the engine itself: {known.own.model}, {flags} flags, port {known.port}", flags, "flags"
        )
    problems = "; ".join(problem.what for problem in known.own or ())
    return Finding(
        "exec",
        "fail",
        problems or "production's command could not be read",
        mend="let ExecStart= run the engine itself, or give the box `unit_file:` with such a command",
    )


# --- who listens -----------------------------------------------------------------------------------------------------

_LISTENERS = """
uid=$(id -u -- "$1" 2>/dev/null); echo "uid=$uid"
cat /proc/net/tcp /proc/net/tcp6 2>/dev/null
echo
command -v ss >/dev/null && ss -Hltnp "sport = :$2" 2>/dev/null
exit 0
"""


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening socket: the address as /proc tells it, and the number of the user whose it is."""

    anywhere: bool
    uid: int


def listeners(text: str, port: int) -> tuple[Listener, ...]:
    """Who listens on a port, of /proc/net/tcp and tcp6."""
    found = []
    for line in text.splitlines():
        row = line.split()
        if len(row) > 7 and row[3] == "0A" and row[1].rpartition(":")[2] == f"{port:04X}":
            found.append(Listener(set(row[1].rpartition(":")[0]) == {"0"}, int(row[7])))
    return tuple(found)


def judge_port(said: Said, known: Known) -> Finding:
    """Whether the unit's own process listens, and nobody else."""
    assert known.unit is not None
    port = known.port or 0
    there = listeners(said.text, port)
    wanted = properties(said.text).get("uid", "")
    pids = {int(pid) for pid in re.findall(r"pid=(\d+)", said.text)}
    who = f"process {', '.join(map(str, sorted(pids)))}" if pids else "somebody"
    if known.unit.active and not there:
        return Finding(
            "port",
            "warn",
            f"the unit is active and nothing listens on {port}: it still boots, or hangs",
            port,
            "port",
            f"{known.ask_journal}   # ready by {hours(known.ready_s)} after its start, or never",
        )
    if not there:
        return Finding("port", "ok", f"{port} is free, as the unit does not run", port, "port")
    foreign = not known.unit.active or (pids and not pids & set(known.pids))
    strangers = {one.uid for one in there} - ({int(wanted)} if wanted.isdigit() else {one.uid for one in there})
    if foreign or strangers:
        whose = f" (user number {', '.join(map(str, sorted({one.uid for one in there})))})"
        return Finding(
            "port",
            "fail",
            f"{who}{whose} listens on {port}, and it is not {known.name}",
            port,
            "port",
            f"sudo ss -ltnp 'sport = :{port}'   # on the box, says who; or mend `port:` in matrix.yaml",
        )
    where = "every address" if any(one.anywhere for one in there) else "the loopback or one address"
    return Finding("port", "ok", f"{known.unit.user} listens on {port}, on {where}", port, "port")


# --- caches and disk -------------------------------------------------------------------------------------------------

# What names a cache, below what it lies without that, and what is appended to a named one.
CACHES: tuple[tuple[str, str, str, str], ...] = (
    ("vllm", "VLLM_CACHE_ROOT", "{xdg}/vllm", ""),
    ("inductor", "TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_{user}", ""),  # noqa: S108 - PyTorch's own place
    ("triton", "TRITON_CACHE_DIR", "{home}/.triton/cache", ""),
    ("flashinfer", "FLASHINFER_WORKSPACE_BASE", "{home}/.cache/flashinfer", "/.cache/flashinfer"),
    ("deep_gemm", "DG_JIT_CACHE_DIR", "{home}/.deep_gemm", ""),
    ("tilelang", "TILELANG_CACHE_DIR", "{home}/.tilelang/cache", ""),
    ("cuda", "CUDA_CACHE_PATH", "{home}/.nv/ComputeCache", ""),
)
_LEFT_ALONE = "a campaign leaves them alone"
_SIZES = r"""
for each; do
  name=${each%%=*} path=${each#*=}
  parent=$path
  while [ ! -e "$parent" ]; do next=${parent%/*}; [ "$next" != "$parent" ] || break; parent=${next:-/}; done
  if [ ! -x "$parent" ]; then echo "denied $name $path"; continue; fi
  [ -d "$path" ] || continue
  size=$(timeout 15 du -sk -- "$path" 2>/dev/null | cut -f1)
  if [ -n "$size" ]; then echo "$size $name $path"; else echo "denied $name $path"; fi
done
exit 0
"""


def cache_paths(unit: UnitFacts) -> dict[str, str]:
    """Production's own compile caches, by name."""
    xdg = unit.env.get("XDG_CACHE_HOME") or f"{unit.home}/.cache"
    found = {}
    for name, variable, default, below in CACHES:
        given = unit.env.get(variable)
        found[name] = f"{given}{below}" if given else default.format(xdg=xdg, home=unit.home, user=unit.user)
    return found


def _sizes(known: Known) -> tuple[str, ...] | None:
    if known.unit is None:
        return None
    return script(_SIZES, *(f"{name}={path}" for name, path in cache_paths(known.unit).items()))


def judge_caches(said: Said, known: Known) -> Finding:
    """Production's compile caches with their sizes, and what a campaign does with them."""
    rows = [line.split(" ", 2) for line in said.text.splitlines() if line.count(" ") >= 2]
    sizes = {name: int(size) for size, name, _ in rows if size.isdigit()}
    denied = [path for size, _, path in rows if size == "denied"]
    total = round(sum(sizes.values()) * KIB / MIB, 1)
    shown = ", ".join(f"{name} {size_text(size * KIB)}" for name, size in sizes.items())
    fate = "`cache: clear` sets them aside for each boot, and puts them back" if known.clears else _LEFT_ALONE
    if denied:
        user = known.unit.user if known.unit else "the unit"
        return Finding(
            "caches",
            "warn",
            f"{known.login} may not look into the caches of {user} ({denied[0]})" + (f"; {shown}" if shown else ""),
            total,
            "MiB",
            f"nothing must be done: {fate}. To see sizes: `sudo du -sh {denied[0]}`",
        )
    if not sizes:
        return Finding("caches", "ok", "production has no compile caches yet", 0.0, "MiB")
    return Finding("caches", "ok", f"{shown}; {fate}", total, "MiB")


def size_text(size: float) -> str:
    """Bytes as a person reads them: `340 KiB`, `12 MiB`, `2.1 GiB`."""
    if size < MIB:
        return f"{size / KIB:.0f} KiB"
    return f"{size / MIB:.0f} MiB" if size < 1024 * MIB else f"{size / MIB / 1024:.1f} GiB"


_DISK = r"""
at=$1
while [ ! -d "$at" ]; do at=${at%/*}; at=${at:-/}; done
df -Pk -- "$at" | tail -n 1
"""


def judge_disk(said: Said, known: Known) -> Finding:
    """Room for cold caches where they will lie."""
    place = known.cache_place or ""
    columns = said.text.split()
    if said.status != 0 or len(columns) < 6 or not columns[3].isdigit():
        return Finding(
            "disk", "warn", f"the free space below {place} is not known", mend=f"df -h {place}   # on the box"
        )
    free = int(columns[3]) * KIB / 1024**3
    fail, warn = (
        (REHEARSAL_DISK_FAIL_GIB, REHEARSAL_DISK_WARN_GIB) if known.rehearsal else (DISK_FAIL_GIB, DISK_WARN_GIB)
    )
    level: Level = "fail" if free < fail else "warn" if free < warn else "ok"
    return Finding(
        "disk",
        level,
        f"{size_text(free * 1024**3)} free on {columns[5]} for the caches of a cold boot ({place})",
        round(free, 3),
        "GiB",
        None if level == "ok" else f"make room up to {warn:g} GiB, or give the box a `cache_root:` on another disk",
    )


# --- journald --------------------------------------------------------------------------------------------------------

_READABLE = """
for file in /var/log/journal/*/system.journal /run/log/journal/*/system.journal; do
  [ -e "$file" ] && echo there
  [ -r "$file" ] && echo readable
done
journalctl -q -n 0 --show-cursor 2>&1 | grep -q '^-- cursor: ' && echo cursor
exit 0
"""
_JOURNALD = """
for file in /var/log/journal/*/system.journal; do [ -e "$file" ] && echo persistent; done
systemctl --version | head -n 1
systemd-analyze cat-config systemd/journald.conf 2>/dev/null || cat /etc/systemd/journald.conf 2>/dev/null
exit 0
"""


def judge_journal(said: Said, known: Known) -> Finding:
    """Whether the login can read the system's journal: without it nobody knows what killed a boot."""
    words = said.text.split()
    if "readable" in words and "cursor" in words:
        return Finding("journal", "ok", f"{known.login} can read it")
    if "there" not in words:
        return Finding(
            "journal",
            "fail",
            "there is no journal of the system",
            mend="systemctl status systemd-journald   # on the box; Storage= must not be none",
        )
    level: Level = "warn" if known.box.service == "systemd-user" else "fail"
    return Finding(
        "journal",
        level,
        f"{known.login} cannot read the system's journal",
        mend=f"sudo usermod -aG systemd-journal {known.login}   # on the box, then log in anew",
    )


def judge_journald(said: Said, known: Known) -> Finding:
    """Whether the journal survives a reboot, and whether a chatty engine is cut short."""
    del known
    first, _, config = said.text.partition("systemd ")
    release = re.match(r"\d+", config)
    body = config.partition("\n")[2]
    conf = parse(_only_journal(body))
    burst = conf.last("Journal", "RateLimitBurst") or "10000"
    interval = conf.last("Journal", "RateLimitIntervalSec") or "30s"
    storage = conf.last("Journal", "Storage") or "auto"
    level_store = conf.last("Journal", "MaxLevelStore")
    limit = "no rate limit" if interval == "0" or burst == "0" else f"at most {burst} entries in {interval}"
    if level_store is not None and level_store not in ("debug", "info", "7", "6"):
        return Finding(
            "journald",
            "fail",
            f"MaxLevelStore={level_store} drops what the engine says",
            mend="take MaxLevelStore= out of journald.conf, then `sudo systemctl restart systemd-journald`",
        )
    old = release is not None and int(release[0]) < LIFTS_RATE_LIMIT and limit != "no rate limit"
    number = float(burst) if burst.isdigit() else None
    if old:
        return Finding(
            "journald",
            "warn",
            f"{limit}, and systemd {release[0] if release else ''} cannot lift that for one unit",
            number,
            "entries",
            "RateLimitIntervalSec=0 in journald.conf, then `sudo systemctl restart systemd-journald`",
        )
    if "persistent" not in first.split():
        return Finding(
            "journald",
            "warn",
            f"volatile (Storage={storage}): after a reboot nobody knows what happened before; {limit}",
            number,
            "entries",
            "sudo mkdir -p /var/log/journal && sudo systemctl restart systemd-journald   # on the box",
        )
    lifted = "" if limit == "no rate limit" else ", lifted for the unit during a boot"
    return Finding("journald", "ok", f"persistent; {limit}{lifted}", number, "entries")


def _only_journal(text: str) -> str:
    """The lines of journald.conf that unit syntax knows: comments of `cat-config` begin with # as well."""
    kept = (line for line in text.splitlines() if re.match(r"\s*(?:\[\w+\]|\w+\s*=)", line))
    return "\n".join(kept)


def judge_linger(said: Said, known: Known) -> Finding:
    """Whether the login's own units outlive its last session."""
    if said.text.strip() == "yes":
        return Finding("linger", "ok", f"units of {known.login} outlive its sessions")
    return Finding(
        "linger",
        "fail",
        f"units of {known.login} end with its last session",
        mend=f"sudo loginctl enable-linger {known.login}   # on the box",
    )


# --- tools and leftovers ---------------------------------------------------------------------------------------------

_TOOLS = 'for tool; do command -v "$tool" >/dev/null || echo "$tool"; done; exit 0'


def judge_tools(said: Said, known: Known) -> Finding:
    """The programs on the box that we run there."""
    missing = said.text.split()
    wanted = len(SYSTEMD_TOOLS if known.systemd else TOOLS)
    if not missing:
        return Finding("tools", "ok", f"all {wanted} programs that we run are there", wanted, "programs")
    return Finding(
        "tools",
        "fail",
        f"missing on the box: {', '.join(missing)}",
        len(missing),
        "programs",
        "sudo apt-get install util-linux coreutils procps findutils   # on the box, or their like",
    )


_LEFT = r"""
place=$1 mark=$2; shift 2
for path; do [ -e "$path" ] && echo "file $path"; done
[ -d "$place" ] && for old in "$place"/b-* "$place"/w-*; do [ -d "$old" ] && echo "cache $old"; done
grep -l -s -z "^$mark=" /proc/[0-9]*/environ | while IFS=/ read -r _ _ pid _; do
  echo "process $pid"
done
exit 0
"""


def judge_leftovers(said: Said, known: Known) -> Finding:
    """What a campaign that runs, or one that was killed, has on the box."""
    rows = [line.split(" ", 1) for line in said.text.splitlines() if " " in line]
    files = [path for kind, path in rows if kind == "file"]
    folders = [path for kind, path in rows if kind == "cache"]
    processes = [pid for kind, pid in rows if kind == "process" and _ours(int(pid), known, bool(files))]
    number = len(files) + len(folders) + len(processes)
    if known.holder is not None:
        return Finding(
            "leftovers",
            "warn",
            f"a campaign holds the box: {known.holder}",
            number,
            "things",
            "wait for it to end; if it is nobody's any more, `invoke restore --box "
            f"{known.box.name} --break-lock` ends it",
        )
    left = [*files, *(f"process {pid}" for pid in processes)]
    if left:
        return Finding(
            "leftovers",
            "fail",
            f"a campaign that was killed left {', '.join(left)}",
            number,
            "things",
            f"invoke restore --box {known.box.name}",
        )
    if folders:
        return Finding(
            "leftovers",
            "warn",
            f"a campaign that was killed left {len(folders)} cache folders in {known.cache_place}",
            number,
            "folders",
            f"the next campaign removes them; or `rm -r {' '.join(folders[:3])}` on the box, as the unit's user",
        )
    return Finding("leftovers", "ok", "nothing of an earlier campaign is left", 0, "things")


def _ours(pid: int, known: Known, our_drop_in: bool) -> bool:  # noqa: FBT001 - one call, beside what it means
    """Whether a process with our variables is an orphan: not production's own, and not another rehearsal's."""
    if known.systemd:
        return our_drop_in or pid not in known.pids
    return pid in known.pids


# --- the table -------------------------------------------------------------------------------------------------------


def _systemd(*argv: str) -> Callable[[Known], tuple[str, ...] | None]:
    return lambda known: argv if known.systemd else None


def _linger(known: Known) -> tuple[str, ...] | None:
    asked = script('[ -e "/var/lib/systemd/linger/$(id -un)" ] && echo yes; exit 0')
    return asked if known.box.service == "systemd-user" else None


def _port(known: Known) -> tuple[str, ...] | None:
    if not known.systemd or known.unit is None or known.port is None:
        return None
    return script(_LISTENERS, known.unit.user, str(known.port))


def _tools(known: Known) -> tuple[str, ...]:
    return script(_TOOLS, *(SYSTEMD_TOOLS if known.systemd else TOOLS))


def _left(known: Known) -> tuple[str, ...]:
    mark = "COLDBOOT_ARGS" if known.systemd else "COLDBOOT_INVOCATION"
    return script(_LEFT, known.cache_place or "/nowhere", mark, *known.leftovers)


CHECKS: tuple[Check, ...] = (
    Check("tools", _tools, judge_tools),
    Check("starts", _show, judge_starts, needs="unit"),
    Check("active", _show, judge_active, needs="unit"),
    Check("exec", lambda _known: ("true",), judge_exec, needs="unit"),
    Check("port", _port, judge_port, needs="exec"),
    Check("caches", _sizes, judge_caches, needs="unit"),
    Check("disk", lambda known: script(_DISK, known.cache_place or "/"), judge_disk, needs="unit"),
    Check("journal", _systemd(*script(_READABLE)), judge_journal),
    Check("journald", _systemd(*script(_JOURNALD)), judge_journald),
    Check("linger", _linger, judge_linger),
    Check("leftovers", _left, judge_leftovers),
)


def missing(check: Check, known: Known) -> str | None:
    """Why a check cannot be asked: what it needs is not there."""
    if check.needs is not None and known.unit is None:
        return "as the unit could not be read"
    if check.needs == "exec" and not isinstance(known.own, Launch):
        return "as production's command could not be read"
    return None


def batch(argvs: Sequence[tuple[str, ...]], join: Callable[[tuple[str, ...]], str]) -> tuple[str, ...]:
    r"""All commands as one script; \\x1e parts their answers: no output of ours holds it."""
    lines = (f"( {join(argv)} ) 2>/dev/null </dev/null\nprintf '\\036%d\\036' $?\n" for argv in argvs)
    return ("sh", "-c", "".join(lines))


def unbatch(argvs: Sequence[tuple[str, ...]], text: str) -> dict[tuple[str, ...], Said]:
    """The answers of `batch`, by their commands."""
    parts = text.split("\x1e")
    answers = zip(argvs, parts[0::2], parts[1::2], strict=False)
    return {argv: Said(int(status), said) for argv, said, status in answers}
