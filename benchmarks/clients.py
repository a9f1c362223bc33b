"""What our client costs and how true it is, beside its peers: `python benchmarks/clients.py --vllm VENV …`.

A stub server (benchmarks/stub.py) has one core, the client's whole process tree the other (no other core is used, so
the figures are those of one core). 256 tokens a request, one token a chunk of 275 bytes. Runs, each with a client of
its own that begins anew:

- `burst8`, `burst64`: answers that are all there at once, 8 and 64 streams: how many tokens a second one core drains,
  by the client's own duration; and per CPU second of the tree, between the first request and the last answer (of which
  up to one a stream is then still unread: 10 % too much at most).
- `arrival`: 64 streams, a chunk every 5 ms each, spread: CPU of the tree per chunk, from the first request to the last
  answer, the figure that counts (goal ≤ 16 µs); and how many of the 12,800 chunks/s offered arrive.
- `paced`: 64 connections opened at once, 100 ms to the first token, 20 ms a chunk: by how much the client's TTFT is
  above what the stub really took (goal p50 < 1 ms, p99 < 5 ms).
- `stall`: 8 streams, a stall of 200 ms every 50 tokens: the true p99 of the gaps is 220 ms.

Start-up is the tree's CPU until the first request reaches the stub (goal < 0.5 s). A wrong number of tokens is said in
the table. Load generators that no option names, or that fail, are said and not made up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from drain import CLIENTS
from peers import PEERS, Job, Place, Said

HERE = Path(__file__).parent
TOKENS = 256
# run → (streams, requests)
RUNS = {"burst8": (8, 320), "burst64": (64, 640), "arrival": (64, 256), "paced": (64, 64), "stall": (8, 16)}
LIMIT_S = 600
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Run:
    """One run of one client: what it says, and what is true of it. CPU seconds are of its whole process tree."""

    said: Said
    waited_s: list[float]
    answered: int
    start_cpu_s: float
    load_cpu_s: float
    load_s: float


@dataclass
class Marks:
    """The tree's CPU and the time when the stub says `first` and `ended`."""

    at: dict[str, tuple[float, float]] = field(default_factory=dict)
    pid: int | None = None

    def listen(self, lines: Iterator[str]) -> None:
        """Until the stub ends."""
        for line in lines:
            if self.pid is not None:
                self.at[line.strip()] = (tree_cpu_s(self.pid), time.monotonic())


def tree_cpu_s(pid: int) -> float:
    """User and system time of a process, of all below it, and of those of them that have ended."""
    total = 0.0
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total = sum(map(int, fields[11:15])) / TICKS
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(tree_cpu_s, map(int, (task / "children").read_text().split())))
    return total


@contextlib.contextmanager
def stub(run: str, cpu: int | None, marks: Marks) -> Iterator[str]:
    """The stub in a process of its own."""
    pinned = [] if cpu is None else ["--cpu", str(cpu)]
    command = [sys.executable, str(HERE / "stub.py"), run, str(RUNS[run][1]), *pinned]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        listener = threading.Thread(target=marks.listen, args=(process.stdout,), daemon=True)
        listener.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stdin.close()
            process.wait(10)
            listener.join(10)


def measured(run: str, client: Client, cores: tuple[int | None, int | None]) -> Run:
    """One run of one client."""
    client_cpu, stub_cpu = cores
    streams, requests = RUNS[run]
    marks = Marks()
    pin = () if client_cpu is None else ("taskset", "-c", str(client_cpu))
    with tempfile.TemporaryDirectory() as name, stub(run, stub_cpu, marks) as url:
        folder = Path(name)
        argv = (*pin, *client.argv(Job(url, streams, requests, folder)))
        with (folder / "said").open("wb") as out, (folder / "log").open("wb") as log:
            process = subprocess.Popen(argv, cwd=folder, stdout=out, stderr=log)
            marks.pid = process.pid
            try:
                status = process.wait(LIMIT_S)
            finally:
                process.kill()
                process.wait()
        if status != 0:
            raise RuntimeError(f"ended with {status}: {(folder / 'log').read_text(errors='replace').strip()[-300:]}")
        with urllib.request.urlopen(url + "/truth", timeout=10) as answer:  # noqa: S310  # our own stub on loopback
            truth = json.load(answer)
        said = client.read(folder)
    first, ended = marks.at["first"], marks.at["ended"]
    return Run(said, truth["waited_s"], truth["answered"], first[0], ended[0] - first[0], ended[1] - first[1])


@dataclass(frozen=True)
class Client:
    """How a load generator is started, and where it says what it saw."""

    argv: Callable[[Job], list[str]]
    read: Callable[[Path], Said]


def own(name: str) -> Client:
    """A client of benchmarks/drain.py."""

    def read(folder: Path) -> Said:
        found = json.loads((folder / "said").read_bytes())
        return Said(*(found[key] for key in ("tokens", "seconds", "ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms")))

    def argv(job: Job) -> list[str]:
        return [sys.executable, str(HERE / "drain.py"), name, job.url, str(job.streams), str(job.requests)]

    return Client(argv, read)


def peer(name: str, at: Place) -> Client:
    """A load generator of benchmarks/peers.py."""
    kind = PEERS[name]
    return Client(lambda job: kind.argv(at, job), kind.read)


# --- the table -------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("client", "burst 8, k tok/s", "burst 64, k tok/s", "k tok/CPU-s", "arrival, µs/chunk", "chunks/s"),
    ("TTFT p50 error, ms", "p99", "ITL p99, true 220", "start, CPU-s", "token error"),
)


def quantile(values: list[float], q: float) -> float:
    """The value at rank q."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def row(name: str, client: Client, cores: tuple[int | None, int | None], rounds: int) -> tuple[str, list[str]]:
    """One line of the table, medians over the rounds, and which runs failed."""
    found: dict[str, list[Run]] = {run: [] for run in RUNS}
    failures = []
    for _ in range(rounds):
        for run, many in found.items():
            try:
                many.append(measured(run, client, cores))
            except (OSError, RuntimeError, KeyError, ValueError, subprocess.SubprocessError) as error:
                failures.append(f"{name}, {run}: {type(error).__name__}: {' '.join(str(error).split())[-200:]}")

    def middle(form: str, run: str, read: Callable[[Run], float]) -> str:
        values = [read(one) for one in found[run]]
        return format(quantile(values, 0.5), form) if values else "–"

    wrong = sum(abs(one.said.tokens - TOKENS * RUNS[run][1]) for run, many in found.items() for one in many)
    starts = [one.start_cpu_s for many in found.values() for one in many]
    gaps = [one.said.gap_p99_ms for one in found["stall"] if one.said.gap_p99_ms is not None]
    cells = (
        middle(".1f", "burst8", lambda one: one.said.tokens / one.said.seconds / 1e3),
        middle(".1f", "burst64", lambda one: one.said.tokens / one.said.seconds / 1e3),
        middle(".1f", "burst64", lambda one: one.answered * TOKENS / one.load_cpu_s / 1e3),
        middle(".1f", "arrival", lambda one: one.load_cpu_s / (one.answered * TOKENS) * 1e6),
        middle(".0f", "arrival", lambda one: one.answered * TOKENS / one.load_s),
        middle("+.2f", "paced", lambda one: one.said.ttft_p50_ms - quantile(one.waited_s, 0.5) * 1e3),
        middle("+.2f", "paced", lambda one: one.said.ttft_p99_ms - quantile(one.waited_s, 0.99) * 1e3),
        middle(".1f", "stall", lambda one: one.said.itl_p99_ms) + (f" ({quantile(gaps, 0.5):.1f})" if gaps else ""),
        f"{quantile(starts, 0.5):.2f}" if starts else "–",
        f"{wrong:.0f}" if starts else "–",
    )
    return f"| {name} | " + " | ".join(cells) + f" | {os.getloadavg()[0]:.1f} |", failures


def main() -> None:
    """Run all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", default=",".join(CLIENTS), help="clients of drain.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer, for the peers")
    for name in PEERS:
        parser.add_argument(f"--{name}", type=Path, metavar="VENV", help=f"the virtual environment that has {name}")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    pinned = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    if pinned[1] is not None:
        os.sched_setaffinity(0, {pinned[1]})
    clients = {name: own(name) for name in filter(None, options.own.split(","))}
    for name, kind in PEERS.items():
        venv = getattr(options, name)
        if venv is None or options.tokenizer is None:
            print(f"- not run: {name} (no --{name}, or no --tokenizer)")
        else:
            clients[f"{name} {kind.version(venv)}"] = peer(name, Place(venv.absolute(), options.tokenizer.absolute()))
    libraries = ("httptools", "orjson", "uvloop", "aiohttp", "httpx")
    print(f"- Python {sys.version.split()[0]}, " + ", ".join(f"{name} {version(name)}" for name in libraries))
    print(f"- {options.rounds} rounds, load average at the beginning {os.getloadavg()[0]:.1f}\n")
    columns = [column for half in COLUMNS for column in half]
    print("| " + " | ".join((*columns, "load average")) + " |")
    print("|---" * (len(columns) + 1) + "|")
    failures = []
    for name, client in clients.items():
        line, failed = row(name, client, pinned, options.rounds)
        failures += failed
        print(line, flush=True)
    if failures:
        print("\n" + "\n".join(f"- failed: {failure}" for failure in failures))


if __name__ == "__main__":
    main()
