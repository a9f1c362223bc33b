"""Break the world at a named place of a campaign: the places, the faults, and what must be true afterwards.

A cell is one place × one fault. It takes an experiment with one finished boot, asks for a second one, makes the
campaign stand still at the place (`orchestrator.failpoints`), breaks something, lets go, and looks: the exit code,
production, its own caches, what is left on the box, and the ledger once the same command has gone on to the end. Every
place is walked with `cache: cold`, and again with `cache: clear` for the faults that can hurt what is set aside.

As a program it turns the results of a run (JSON lines) into the table of docs/faults.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from nspawn import Box, free_port

ROOT = Path(__file__).parent.parent.parent
UNIT = "vllm-faults.service"
PORT = free_port()
CACHES = "/var/cache/coldboot-faults"
OWN = "/var/cache/own-faults"
"""The small disk with production's own caches; it is held out here, so that a power cut leaves what is on it."""
PLACES = (
    "armed",
    "clean_slate",
    "cold",
    "render",
    "start",
    "ready",
    "first_request",
    "headroom",
    "sanity",
    "trials",
    "stop",
    "between",
    "restoring",
    "restored",
)
RUNS_PRODUCTION = ("armed", "clean_slate")
RUNS_ENGINE = ("ready", "first_request", "headroom", "sanity", "trials", "stop")
BOOTS_DONE = ("between", "restoring", "restored")

UNIT_TEXT = f"""[Unit]
Description=production
After=network.target

[Service]
Type=simple
User=alex
Group=alex
Environment=COLDBOOT_REHEARSAL_TIME_SCALE=0.01 VLLM_CACHE_ROOT={OWN}/vllm CUDA_CACHE_PATH={OWN}/nv
ExecStart={sys.executable} -m orchestrator.rehearsal \\
  --model /models/qwen --served-model-name qwen3-27b --tensor-parallel-size 2 \\
  --gpu-memory-utilization 0.97 --max-model-len 98304 --max-num-seqs 128 \\
  --spec-method qwen3_5_mtp --spec-model /models/qwen --spec-tokens 1 --host 127.0.0.1 --port {PORT}
Restart=on-failure
WorkingDirectory={ROOT}

[Install]
WantedBy=multi-user.target
"""
MATRIX = """experiment: boxed
boxes:
  real:
    transport: ssh
    host: gwen
    ssh_config: {ssh_config}
    service: systemd
    unit: {unit}
    cache_root: {caches}
    dead_man_s: {dead_man_s}
    reconnect_s: {reconnect_s}
    load: {{window_s: 0.4, warmup_s: 0.1, max_warmup_s: 0.3, input_tokens: 32, output_tokens: 8, sanity_tokens: 4,
            headroom_tokens: 4, request_timeout_s: 5}}
    deadlines: {{clean_slate_s: 15, ready_s: 20, first_request_s: 10, headroom_s: 10, sanity_s: 10, trial_s: 15,
                 stop_s: 5}}
limits: {{free_disk_mib: 1}}
cache: {cache}
concurrency: [1, 2]
variants:
  spec-1: {{}}
"""
# What no engine would think of: a link, two names of one file, an odd mode, an old time, an empty directory.
ODD = f"""
mkdir -p {OWN}/nv/empty && cd {OWN}/nv && echo kernel >index && ln index again && ln -s ../vllm link
chmod 0604 index && touch -d '2020-02-02 02:02:02.123456789' index && chmod 2750 .
"""
# Everything that a cache is. Production itself writes its Triton kernels anew at each start, with the same contents.
STATE = rf"""
cd / && {{
  find {OWN[1:]} home/alex/.cache -mindepth 1 -printf '%p %y %U:%G %m %n %T@ %s %l\n'
  find {OWN[1:]} home/alex/.triton -type f -exec sha256sum {{}} +
  find home/alex/.triton -printf '%p %y %U:%G %m\n'
}} 2>/dev/null | grep -v -e home/alex/.cache/coldboot -e /filler | sort
"""


class Wire:
    """A TCP way to the box's sshd that can be cut, refused and stalled."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0), reuse_port=True)
        self.port: int = self._listener.getsockname()[1]
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._flows = threading.Event()
        self._flows.set()
        self._refuses = False
        self._closed = False
        threading.Thread(target=self._accept, name="wire", daemon=True).start()

    def cut(self) -> None:
        """Every connection breaks, and new ones are closed at once."""
        self._refuses = True
        for pair in tuple(self._pairs):
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def stall(self) -> None:
        """Nothing flows any more, and nothing is closed."""
        self._flows.clear()

    def mend(self) -> None:
        """Everything goes again."""
        self._refuses = False
        self._flows.set()

    def close(self) -> None:
        self._closed = True
        self.cut()
        self._flows.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._refuses:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._to), timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            pair = (near, far)
            self._pairs.add(pair)
            threading.Thread(target=self._carry, args=(pair,), name="wire-pair", daemon=True).start()

    def _carry(self, pair: tuple[socket.socket, socket.socket]) -> None:
        near, far = pair
        try:
            while True:
                ready, _, _ = select.select(pair, (), (), 1.0)
                self._flows.wait()
                for end in ready:
                    data = end.recv(65536)
                    if not data:
                        return
                    (far if end is near else near).sendall(data)
        except (OSError, ValueError):
            return
        finally:
            self._pairs.discard(pair)
            for end in pair:
                end.close()


def await_true(what: Callable[[], bool], seconds: float, word: str = "it") -> None:
    end = time.monotonic() + seconds
    pause = threading.Event()
    while not what():
        assert time.monotonic() < end, f"{word} did not come within {seconds:g} s"
        pause.wait(0.05)


@dataclass
class World:
    """The box with its production, the way to it, and one experiment of which the first boot is finished."""

    box: Box
    wire: Wire
    folder: Path
    disk: Path
    before: tuple[str, ...]
    cache: str = "cold"
    process: subprocess.Popen[bytes] | None = None
    said: list[str] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.disk / "artifacts"

    def write(self, *, dead_man_s: float = 60, reconnect_s: float = 90) -> None:
        known = self.box.known_hosts.read_text().replace(f"]:{self.box.port} ", f"]:{self.wire.port} ")
        (self.folder / "known_hosts").write_text(known)
        config = self.box.ssh_config.read_text().replace(str(self.box.known_hosts), str(self.folder / "known_hosts"))
        config = config.replace(f"Port {self.box.port}", f"Port {self.wire.port}")
        (self.folder / "ssh_config").write_text(config)
        values = {"ssh_config": self.folder / "ssh_config", "unit": UNIT, "caches": CACHES, "cache": self.cache}
        text = MATRIX.format(**values, dead_man_s=dead_man_s, reconnect_s=reconnect_s)
        (self.folder / "matrix.yaml").write_text(text)

    def start(self, boots: int, failpoint: str | None = None) -> subprocess.Popen[bytes]:
        argv = (sys.executable, "-m", "invoke", "matrix", "--matrix", str(self.folder / "matrix.yaml"))
        more = {} if failpoint is None else {"COLDBOOT_FAILPOINT": f"{failpoint}:{self.folder}"}
        with (self.folder / "said").open("ab") as said:
            self.process = subprocess.Popen(
                (*argv, "--out", str(self.out), "--boots", str(boots), "--yes"),
                cwd=ROOT,
                env={**os.environ, **more},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        return self.process

    def wait(self, seconds: float = 150) -> int:
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise AssertionError(f"the campaign did not end within {seconds:g} s:\n{self.tail()}") from None

    def tail(self) -> str:
        path = self.folder / "said"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def let_go(self) -> None:
        (self.folder / "go").touch()

    # what must be true

    def serves(self) -> bool:
        try:
            health = httpx.get(f"http://127.0.0.1:{PORT}/health", timeout=2, trust_env=False)
        except httpx.HTTPError:
            return False
        return health.status_code == 200

    def effective(self) -> tuple[str, ...]:
        pid = self.box.sh(("systemctl", "show", "-p", "MainPID", "--value", UNIT)).stdout.strip()
        shown = self.box.sh(("cat", f"/proc/{pid}/cmdline"), check=False).stdout
        return tuple(shown.rstrip("\0").split("\0"))

    def caches(self) -> list[str]:
        """Production's own caches: names, contents, owners, modes, times."""
        return self.box.sh(("sh", "-c", STATE), check=False).stdout.splitlines()

    def production_is_back(self, seconds: float) -> None:
        await_true(lambda: self.serves() and self.effective() == self.before, seconds, "production")

    def left(self) -> list[str]:
        """What of us is on the box: files below /run, timers, cold caches, what is set aside, processes of the tool."""
        script = (
            f"find /etc/systemd /home/alex {OWN} -name 'coldboot-caches-*' -o -name '*.coldboot-*' 2>/dev/null;"
            "find /run -name '*coldboot*' ! -path '/run/systemd/units/*' 2>/dev/null;"
            " systemctl list-timers --all --no-legend '*coldboot*';"
            f" find {CACHES} -mindepth 2 2>/dev/null"
        )
        files = [line for line in self.box.sh(("sh", "-c", script), check=False).stdout.splitlines() if line]
        own = [
            " ".join(process.argv)[:200]
            for process in self.box.processes()
            if "journalctl" in process.argv[0] or "coldboot" in " ".join(process.argv[:4])
        ]
        return [line for line in files if line != "/run/coldboot"] + own

    def records(self) -> list[dict[str, object]]:
        lines = (self.out / "boxed" / "records.jsonl").read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines]

    def ledger_is_right(self) -> str:
        """Each planned boot counted once, the finished one still there, each boot ended once; how it went, in words."""
        records = self.records()
        ended = [(r["boot"], r["boot_outcome"]) for r in records if r["kind"] == "boot_ended"]
        names = [name for name, _ in ended]
        assert len(names) == len(set(names)), f"a boot ended twice: {ended}"
        begun = [r["boot"] for r in records if r["kind"] == "boot_started"]
        assert sorted(begun) == sorted(names), f"began {begun}, ended {names}"
        counted = [name for name, outcome in ended if outcome in ("completed", "crashed", "not_ready")]
        planned = [f"b{number:02}-spec-1{'@clear' if self.cache == 'clear' else ''}" for number in (1, 2)]
        assert ended[0] == (planned[0], "completed")
        assert [str(name).partition(".")[0] for name in counted] == planned, f"counted {counted}"
        assert all(outcome == "completed" for name, outcome in ended if name in counted), f"blamed: {ended}"
        assert records[-1]["kind"] == "campaign_ended"
        assert records[-1]["restored"] is True
        return ", ".join(str(outcome) for _, outcome in ended[1:])


@dataclass(frozen=True)
class Fault:
    """What is broken while the campaign stands still, when it is whole again, and what must come of it.

    codes       exit codes that are right at a place
    after       what happens once the campaign was let go, before its end is awaited
    heal        what happens after its end
    alone       production comes back by itself within so many seconds although the campaign could not restore it
    goes_on     whether the same command is needed to finish the plan
    """

    name: str
    inject: Callable[[World], None]
    codes: Callable[[str], tuple[int, ...]]
    after: Callable[[World], None] = lambda _world: None
    heal: Callable[[World], None] = lambda _world: None
    places: tuple[str, ...] = PLACES
    dead_man_s: float = 60
    reconnect_s: float = 90
    alone_s: float | None = None
    at_once: bool = False
    """The same command follows at once, before anything had time to restore."""
    clear: bool = False
    """It is walked with `cache: clear` too."""

    def walked(self, cache: str) -> tuple[str, ...]:
        """The places at which it is injected."""
        return self.places if cache == "cold" or self.clear else ()


def _always(*codes: int) -> Callable[[str], tuple[int, ...]]:
    return lambda _place: codes


def _signal(number: int) -> Callable[[World], None]:
    def send(world: World) -> None:
        assert world.process is not None
        world.process.send_signal(number)

    return send


def _torn(world: World) -> None:
    _signal(signal.SIGKILL)(world)
    world.wait(10)
    with (world.out / "boxed" / "records.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","v":1,"boot":"b02-spec-1","va')


def _mend_after(seconds: float) -> Callable[[World], None]:
    def later(world: World) -> None:
        threading.Event().wait(seconds)
        world.wire.mend()

    return later


def _fill_ours(world: World) -> None:
    with contextlib.suppress(OSError), (world.disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _fill_box(world: World) -> None:
    world.box.sh(("sh", "-c", f"cat /dev/zero >{_filler(world)}"), check=False)


def _filler(world: World) -> str:
    return f"{OWN if world.cache == 'clear' else CACHES}/filler"


def _units_processes(world: World) -> list[int]:
    shown = world.box.sh(("systemctl", "show", "-p", "ControlGroup", "--value", UNIT)).stdout.strip()
    script = f"cat /sys/fs/cgroup{shown}/cgroup.procs /sys/fs/cgroup/systemd{shown}/cgroup.procs 2>/dev/null; exit 0"
    return [int(word) for word in world.box.sh(("sh", "-c", script)).stdout.split()]


def _freeze(world: World) -> None:
    pids = _units_processes(world)
    assert pids, "nothing runs that could be stopped"
    for pid in pids:
        world.box.kill(pid, signal.SIGSTOP)


def _suspend_us(world: World) -> None:
    _signal(signal.SIGSTOP)(world)
    world.production_is_back(60)
    await_true(lambda: not any("/run/coldboot" in line for line in world.left()), 20, "the dead man's end")
    _signal(signal.SIGCONT)(world)


def _reboot(*, cut: bool) -> Callable[[World], None]:
    return lambda world: world.box.reboot(cut=cut)


FAULTS = (
    Fault("kill -9", _signal(signal.SIGKILL), _always(-9), at_once=True),
    Fault("kill -9, dead man", _signal(signal.SIGKILL), _always(-9), dead_man_s=3, alone_s=45, clear=True),
    Fault("kill -9, torn ledger", _torn, _always(-9), at_once=True),
    # While the last boot is stopped everything is measured: what is left to do is done, and the plan is complete.
    Fault(
        "SIGTERM",
        _signal(signal.SIGTERM),
        lambda place: (0,) if place in (*BOOTS_DONE, "stop") else (143,),
        clear=True,
    ),
    Fault("ssh lost for 1 s", lambda world: world.wire.cut(), _always(0), after=_mend_after(1)),
    Fault("ssh lost for 30 s", lambda world: world.wire.cut(), _always(0), after=_mend_after(30)),
    Fault("ssh stalls for 40 s", lambda world: world.wire.stall(), _always(0), after=_mend_after(40)),
    Fault(
        "ssh gone for good",
        lambda world: world.wire.cut(),
        lambda place: (0,) if place == "restored" else (3,),
        heal=lambda world: world.wire.mend(),
        dead_man_s=5,
        reconnect_s=3,
        alone_s=60,
        clear=True,
    ),
    Fault("power cut of the box", _reboot(cut=True), _always(0), clear=True),
    Fault("reboot of the box", _reboot(cut=False), _always(0), clear=True),
    Fault(
        "our disk is full",
        _fill_ours,
        # The campaign's last few records may still fit into what its file has of its last page.
        lambda place: (0, 4) if place in (*BOOTS_DONE, "stop") else (4,),
        heal=lambda world: (world.disk / "filler").unlink(),
        clear=True,
    ),
    Fault(
        "the box's disk is full",
        _fill_box,
        _always(0, 3),
        heal=lambda world: world.box.sh(("rm", "-f", _filler(world))) and None,
        clear=True,
    ),
    Fault(
        "stopped by somebody",
        lambda world: world.box.sh(("systemctl", "stop", "--no-block", UNIT)) and None,
        _always(0),
        places=RUNS_PRODUCTION + RUNS_ENGINE,
    ),
    Fault("coldboot suspended", _suspend_us, _always(0), dead_man_s=3, places=PLACES[:-1]),
    Fault("SIGSTOP of the engine", _freeze, _always(0), places=RUNS_PRODUCTION + RUNS_ENGINE),
)


def run_cell(world: World, place: str, fault: Fault) -> str:
    """One cell; returns how it went, raises AssertionError for what must not be."""
    world.write(dead_man_s=fault.dead_man_s, reconnect_s=fault.reconnect_s)
    own = world.caches()
    world.start(2, failpoint=place)
    reached = world.folder / "reached"
    await_true(lambda: reached.exists() or world.process.poll() is not None, 90, f"the place {place}")
    assert world.process.poll() is None, f"it ended before {place}:\n{world.tail()}"
    fault.inject(world)
    world.let_go()
    fault.after(world)
    code = world.wait()
    assert code in fault.codes(place), f"exit code {code}, not {fault.codes(place)}:\n{world.tail()}"
    if fault.alone_s is not None:
        world.production_is_back(fault.alone_s)
        await_true(lambda: not any("/run/" in line for line in world.left()), 20, "our end on the box")
    elif not fault.at_once:
        world.production_is_back(1 if code == 0 else 30)
    if not fault.at_once:
        _caches_are(world, own)
    fault.heal(world)
    world.start(2)
    again = world.wait()
    assert again == 0, f"the same command ended with {again}:\n{world.tail()}"
    world.production_is_back(1)
    left = world.left()
    assert left == [], f"left on the box: {left}"
    _caches_are(world, own)
    assert world.process.poll() == 0
    return f"{_word(code)}; boots: {world.ledger_is_right()}"


def _caches_are(world: World, own: list[str]) -> None:
    now = world.caches()
    assert now == own, f"production's own caches: {sorted(set(own) ^ set(now))[:6]}"


def _word(code: int) -> str:
    return "killed" if code == -9 else f"exit {code}"


@contextlib.contextmanager
def own_disk(box: Box) -> Iterator[None]:
    """The disk with production's own caches; the box sees it from its next start on."""
    folder = box.root / OWN[1:]
    folder.mkdir(parents=True, exist_ok=True)
    options = "size=8m,mode=0755,uid=1000,gid=1000"
    subprocess.run(("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)), check=True)
    try:
        box.reboot()
        yield
    finally:
        subprocess.run(("umount", "--lazy", str(folder)), check=True)
        box.reboot()


@contextlib.contextmanager
def production(box: Box) -> Iterator[None]:
    """The unit with filled caches, and a small disk for cold ones, put there anew after each reboot."""
    unit = box.root / "etc/systemd/system"
    # The caches' disk is a unit of the box, so that it is there again after a reboot.
    mount = CACHES.strip("/").replace("-", "\\x2d").replace("/", "-") + ".mount"
    (unit / mount).write_text(
        f"[Mount]\nWhat=tmpfs\nWhere={CACHES}\nType=tmpfs\nOptions=size=24m,mode=0755,uid=1000,gid=1000\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
    box.write_unit(UNIT, UNIT_TEXT)
    box.sh(("runuser", "-u", "alex", "--", "sh", "-ec", ODD))
    box.sh(("systemctl", "enable", "--now", UNIT, mount))
    yield
    box.sh(("rm", "-rf", "/home/alex/.triton"), check=False)
    box.sh(("systemctl", "disable", "--now", mount), check=False)
    box.sh(("systemctl", "disable", UNIT), check=False)
    box.remove_unit(UNIT)


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "3m") -> Iterator[Path]:
    """A disk of our own side that can be filled."""
    folder.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)), check=True)
    try:
        yield folder
    finally:
        subprocess.run(("umount", "--lazy", str(folder)), check=True)


def copy_experiment(baked: Path, out: Path) -> None:
    shutil.copytree(baked, out, dirs_exist_ok=True)


# --- the table -------------------------------------------------------------------------------------------------------

PAGE = """# Faults

What happens when the world breaks at each place of a campaign. Each cell is a test on a real systemd box
(`invoke test-faults`): a campaign with one finished boot stands still at the place, something is broken there, and
afterwards production serves again under the same effective command, the same `invoke matrix` goes on to the end, the
finished boot is counted once, the boot that was hit is repeated or had ended, nothing of ours is left on the box, and
the exit code is the one of the table. `–`: nothing runs there that could be hit.
"""
CLEAR = """## `cache: clear`

The same places with production's own caches set aside before each boot. Besides all of the above, after each cell
production's own caches are back byte for byte: names, contents, owners, modes, links and times (of its Triton kernels,
which it writes anew at each start, all but the times). Where the same command does not follow at once they are so
already before it. Nothing set aside is left, and neither is the unit that puts back. The box's disk that is full is the
one with these caches.
"""
Key = tuple[str, str, str]
"""How the caches are, the place, and the fault."""


def page(results: dict[Key, str]) -> str:
    """The results as Markdown."""
    return "\n".join((PAGE, *table(results, "cold"), CLEAR, *table(results, "clear")))


def table(results: dict[Key, str], cache: str) -> list[str]:
    """The lines of one table, and how many cells are right."""
    faults = [fault for fault in FAULTS if fault.walked(cache)]
    lines = ["| fault | " + " | ".join(PLACES) + " |", "|---" * (len(PLACES) + 1) + "|"]
    for fault in faults:
        walked = fault.walked(cache)
        cells = [results.get((cache, place, fault.name), "not run" if place in walked else "–") for place in PLACES]
        lines.append(f"| {fault.name} | " + " | ".join(cells) + " |")
    keys = [(cache, place, fault.name) for fault in faults for place in fault.walked(cache)]
    ran = [results[key] for key in keys if key in results]
    bad = [outcome for outcome in ran if outcome.startswith("FAILED")]
    return [*lines, "", f"{len(ran)} of {len(keys)} cells were run, {len(ran) - len(bad)} of them are right.", ""]


def read_results(path: Path) -> dict[Key, str]:
    """The last result of each cell."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(row["cache"], row["place"], row["fault"]): row["outcome"] for row in rows}


if __name__ == "__main__":
    sys.stdout.write(page(read_results(Path(sys.argv[1]))))
