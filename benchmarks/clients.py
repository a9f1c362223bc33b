"""What our client costs and how true it is, beside its peers: `python benchmarks/clients.py [--clients ours,httpx]`.

The stub (benchmarks/stub.py) has one core, the client's whole process the other. 256 tokens a request, one token a
chunk of 275 bytes. Runs:

- `burst`: everything at once: how many tokens a second of CPU can drain.
- `arrival`: 64 streams, a chunk every 5 ms each, spread: CPU per chunk, the figure that counts (goal ≤ 16 µs), and how
  many of the 12,800 chunks/s arrive.
- `paced`: 64 connections opened at once, 100 ms to the first token, 20 ms a chunk: by how much the client saw first
  tokens later than the stub sent them (goal p50 < 1 ms, p99 < 5 ms).
- `stall`: 8 streams, a stall of 200 ms every 50 tokens: the true p99 of the gaps is 220 ms.

Start-up is apart: CPU seconds from the process' start to the end of a first request. A wrong token count ends it all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
# run → (streams, requests a stream)
RUNS = {"burst": (64, 10), "arrival": (64, 4), "paced": (64, 1), "stall": (8, 2)}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 256}


@dataclass
class Seen:
    """What one client saw, seconds."""

    tokens: int = 0
    chunks: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def add(self, at: list[float], tokens: int) -> None:
        """One finished request."""
        self.tokens += tokens
        self.chunks += len(at)
        self.first.append(at[0])
        self.gaps += [b - a for a, b in itertools.pairwise(at)]


Load = Callable[[str, int, int, Seen], Awaitable[None]]


# --- the clients: each imports its library inside, so that start-up is its own ----------------------------------------


async def ours(url: str, streams: int, requests: int, seen: Seen) -> None:
    """The client of this project."""
    from orchestrator.client import Answer, Client, Target  # noqa: PLC0415  # measured

    client = Client(Target(url, "m"))
    message = client.post("/v1/chat/completions", BODY)

    async def stream() -> None:
        connection = client.connection()
        await connection.open()
        for _ in range(requests):
            answer = Answer(stream=True)
            await connection.request(message, answer, deadline_s=60)
            timing = answer.timing()
            if timing.error:
                raise RuntimeError(timing.error)
            seen.add(list(timing.chunk_at_s), timing.completion_tokens or 0)
        connection.abort()

    await asyncio.gather(*(stream() for _ in range(streams)))


async def httpx_lines(url: str, streams: int, requests: int, seen: Seen) -> None:
    """Httpx as its documentation shows it: lines and json."""
    import httpx  # noqa: PLC0415  # measured

    limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as client:

        async def stream() -> None:
            for _ in range(requests):
                at, tokens = [], 0
                async with client.stream("POST", "/v1/chat/completions", json=BODY) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("data: ") and line != "data: [DONE]":
                            event = json.loads(line[6:])
                            if event["choices"] and event["choices"][0]["delta"].get("content"):
                                at.append(time.monotonic())
                            if event.get("usage"):
                                tokens = event["usage"]["completion_tokens"]
                seen.add(at, tokens)

        await asyncio.gather(*(stream() for _ in range(streams)))


async def aiohttp_orjson(url: str, streams: int, requests: int, seen: Seen) -> None:
    """Aiohttp with orjson, lines by its own reader."""
    import aiohttp  # noqa: PLC0415  # measured
    import orjson  # noqa: PLC0415  # measured

    async with aiohttp.ClientSession(url.rstrip("/") + "/", connector=aiohttp.TCPConnector(limit=streams)) as client:

        async def stream() -> None:
            for _ in range(requests):
                at, tokens = [], 0
                async with client.post("v1/chat/completions", json=BODY) as response:
                    async for line in response.content:
                        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                            event = orjson.loads(line[6:])
                            if event["choices"] and event["choices"][0]["delta"].get("content"):
                                at.append(time.monotonic())
                            if event.get("usage"):
                                tokens = event["usage"]["completion_tokens"]
                seen.add(at, tokens)

        await asyncio.gather(*(stream() for _ in range(streams)))


# name → (load, on uvloop)
CLIENTS: dict[str, tuple[Load, bool]] = {
    "ours": (ours, True),
    "ours, asyncio's loop": (ours, False),
    "aiohttp + orjson, uvloop": (aiohttp_orjson, True),
    "aiohttp + orjson": (aiohttp_orjson, False),
    "httpx, lines + json": (httpx_lines, False),
}


def truth(url: str) -> list[float]:
    """When the stub sent each first token since it was last asked."""
    with urllib.request.urlopen(url + "/truth", timeout=10) as answer:  # noqa: S310  # our own stub on loopback
        return json.load(answer)


def child(name: str, url: str, run: str, streams: int, requests: int) -> None:
    """One client's process: prints what it saw and what it cost."""
    load, fast = CLIENTS[name]
    seen = Seen()

    async def main() -> tuple[float, float, float]:
        await load(url + "/burst", 1, 1, Seen())  # imports, and the first request
        truth(url)
        ready_cpu, began = time.process_time(), time.monotonic()
        await load(f"{url}/{run}", streams, requests, seen)
        return ready_cpu, time.process_time() - ready_cpu, time.monotonic() - began

    if fast:
        import uvloop  # noqa: PLC0415  # measured

        factory = uvloop.new_event_loop
    else:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        ready_cpu, cpu, wall = runner.run(main())
    late = [ours - theirs for ours, theirs in zip(sorted(seen.first), sorted(truth(url)), strict=True)]
    print(json.dumps({"late": late, "ready_cpu": ready_cpu, "cpu": cpu, "wall": wall, **asdict(seen)}))


# --- the table -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stub(cpu: int | None) -> Iterator[str]:
    """The stub in a process of its own."""
    pinned = [] if cpu is None else ["--cpu", str(cpu)]
    command = [sys.executable, str(HERE / "stub.py"), *pinned]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.communicate(timeout=10)


def quantile(values: list[float], q: float) -> float:
    """The value at rank q."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def measured(name: str, url: str, run: str, cpu: int | None) -> dict:
    """One run of one client."""
    streams, requests = RUNS[run]
    command = [sys.executable, __file__, "--child", name, url, run, str(streams), str(requests)]
    prepare = None if cpu is None else lambda: os.sched_setaffinity(0, {cpu})
    done = subprocess.run(command, check=True, capture_output=True, text=True, preexec_fn=prepare, timeout=300)
    found = json.loads(done.stdout)
    if found["tokens"] != streams * requests * 256:
        raise SystemExit(f"{name} counted {found['tokens']} tokens, {streams * requests * 256} were sent")
    return found


def row(name: str, url: str, cpu: int | None, rounds: int) -> str:
    """One line of the table: medians over the rounds."""

    def median(values: list[float]) -> float:
        return quantile(values, 0.5)

    burst = [measured(name, url, "burst", cpu) for _ in range(rounds)]
    arrival = [measured(name, url, "arrival", cpu) for _ in range(rounds)]
    paced = [measured(name, url, "paced", cpu) for _ in range(rounds)]
    stall = measured(name, url, "stall", cpu)
    p50 = median([quantile(found["late"], 0.5) for found in paced])
    p99 = median([quantile(found["late"], 0.99) for found in paced])
    return (
        f"| {name} | {median([found['tokens'] / found['cpu'] for found in burst]) / 1e3:.0f} "
        f"| {median([found['cpu'] / found['chunks'] for found in arrival]) * 1e6:.1f} "
        f"| {median([found['chunks'] / found['wall'] for found in arrival]):.0f} "
        f"| {p50 * 1e3:.2f} | {p99 * 1e3:.2f} | {quantile(stall['gaps'], 0.99) * 1e3:.1f} "
        f"| {median([found['ready_cpu'] for found in burst]):.2f} |"
    )


def main() -> None:
    """Run all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default=",,".join(CLIENTS), help="names, two commas between them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, url, run, streams, requests = options.child
        child(name, url, run, int(streams), int(requests))
        return
    cores = sorted(os.sched_getaffinity(0))
    client_cpu, stub_cpu = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    libraries = ("httptools", "orjson", "uvloop", "aiohttp", "httpx")
    print(f"Python {sys.version.split()[0]}, " + ", ".join(f"{name} {version(name)}" for name in libraries))
    print("| client | burst, k tokens/CPU-s | µs/chunk | chunks/s | first token late, ms | its p99 | ITL p99 | start |")
    print("|---|---|---|---|---|---|---|---|")
    with stub(stub_cpu) as url:
        for name in options.clients.split(",,"):
            print(row(name, url, client_cpu, options.rounds), flush=True)


if __name__ == "__main__":
    main()
