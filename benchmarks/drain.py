"""Load clients of this process, for benchmarks/clients.py: `python benchmarks/drain.py ours http://127.0.0.1:1 64 640`.

Each keeps so many streams busy until so many requests have ended, and prints as JSON what it saw: tokens by `usage`,
chunks, seconds of the load, and quantiles of the time to the first token and of every single gap.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 256,
}


@dataclass
class Seen:
    """What one client saw, seconds."""

    tokens: int = 0
    chunks: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def add(self, sent_at: float, at: list[float], tokens: int) -> None:
        """One finished request."""
        self.tokens += tokens
        self.chunks += len(at)
        self.first.append(at[0] - sent_at)
        self.gaps += [b - a for a, b in itertools.pairwise(at)]


Load = Callable[[str, int, int, Seen], Awaitable[None]]


# --- the clients: each imports its library inside, so that start-up is its own ---------------------------------------


async def ours(url: str, streams: int, requests: int, seen: Seen) -> None:
    """The client of this project."""
    from orchestrator.client import Answer, Client, Target  # noqa: PLC0415  # measured

    client = Client(Target(url, "m"))
    message = client.post("/v1/chat/completions", BODY)
    connections = [client.connection() for _ in range(streams)]
    await asyncio.gather(*(connection.open() for connection in connections))

    async def stream(index: int) -> None:
        for _ in range(index, requests, streams):
            answer = Answer(stream=True)
            await connections[index].request(message, answer, deadline_s=60)
            timing = answer.timing()
            if timing.error:
                raise RuntimeError(timing.error)
            seen.add(timing.sent_at_s, list(timing.chunk_at_s), timing.completion_tokens or 0)
        connections[index].abort()

    await asyncio.gather(*(stream(index) for index in range(streams)))


async def httpx_lines(url: str, streams: int, requests: int, seen: Seen) -> None:
    """Httpx as its documentation shows it: lines and json."""
    import httpx  # noqa: PLC0415  # measured

    limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as client:

        async def stream(index: int) -> None:
            for _ in range(index, requests, streams):
                at, tokens, sent_at = [], 0, time.monotonic()
                async with client.stream("POST", "/v1/chat/completions", json=BODY) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("data: ") and line != "data: [DONE]":
                            event = json.loads(line[6:])
                            if event["choices"] and event["choices"][0]["delta"].get("content"):
                                at.append(time.monotonic())
                            if event.get("usage"):
                                tokens = event["usage"]["completion_tokens"]
                seen.add(sent_at, at, tokens)

        await asyncio.gather(*(stream(index) for index in range(streams)))


async def aiohttp_orjson(url: str, streams: int, requests: int, seen: Seen) -> None:
    """Aiohttp with orjson, lines by its own reader."""
    import aiohttp  # noqa: PLC0415  # measured
    import orjson  # noqa: PLC0415  # measured

    async with aiohttp.ClientSession(url.rstrip("/") + "/", connector=aiohttp.TCPConnector(limit=streams)) as client:

        async def stream(index: int) -> None:
            for _ in range(index, requests, streams):
                at, tokens, sent_at = [], 0, time.monotonic()
                async with client.post("v1/chat/completions", json=BODY) as response:
                    async for line in response.content:
                        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                            event = orjson.loads(line[6:])
                            if event["choices"] and event["choices"][0]["delta"].get("content"):
                                at.append(time.monotonic())
                            if event.get("usage"):
                                tokens = event["usage"]["completion_tokens"]
                seen.add(sent_at, at, tokens)

        await asyncio.gather(*(stream(index) for index in range(streams)))


# name → (load, on uvloop)
CLIENTS: dict[str, tuple[Load, bool]] = {
    "ours": (ours, True),
    "ours-asyncio": (ours, False),
    "aiohttp-uvloop": (aiohttp_orjson, True),
    "aiohttp": (aiohttp_orjson, False),
    "httpx": (httpx_lines, False),
}


def quantile(values: list[float], q: float) -> float:
    """The value at rank q."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def main() -> None:
    """Load, and say what was seen."""
    name, url, streams, requests = sys.argv[1:]
    load, fast = CLIENTS[name]
    seen = Seen()

    async def timed() -> float:
        began = time.monotonic()
        await load(url, int(streams), int(requests), seen)
        return time.monotonic() - began

    if fast:
        import uvloop  # noqa: PLC0415  # measured

        factory = uvloop.new_event_loop
    else:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        seconds = runner.run(timed())
    said = {"tokens": seen.tokens, "chunks": seen.chunks, "seconds": seconds}
    said |= {"ttft_p50_ms": quantile(seen.first, 0.5) * 1e3, "ttft_p99_ms": quantile(seen.first, 0.99) * 1e3}
    print(json.dumps(said | {"itl_p99_ms": quantile(seen.gaps, 0.99) * 1e3}))


if __name__ == "__main__":
    main()
