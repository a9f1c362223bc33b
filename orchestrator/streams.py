"""The load's streams: a closed loop of as many requests at once as there are streams, and what came of each.

First requests are of staggered length (1/c, 2/c … of the full one) and not measured, so that the streams run out of
step, as they do in service.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable

from orchestrator.client import PATHS, Answer, Client, Connection, completion_body
from orchestrator.prompts import OwnPrompts, Prompts, Scale, writer_of
from orchestrator.records import RequestTiming
from orchestrator.trialspec import LoadLike

_FAILED_DRAIN_S = 1.0  # a failed trial has no books to close: its running requests are given up
_LOOK_S = 0.002  # how soon a token is noticed while we wait for one
_BACKOFF_S = (0.05, 1.0)  # first and longest pause of a stream after an error
_AFTER_FAILURE_S = 5.0  # a failed trial goes on for at most so long, to see whether all or some requests fail


class Over(Exception):  # not an error: the trial has nothing left to measure
    """The trial ends here; what was seen is in the books already."""


class Streams:
    """The streams of one trial, on the running event loop.

    `timings` are the requests that have ended, `errors` those that failed, by kind, with the first detail of each in
    `examples`. `finished` counts by stream. `turnarounds` are (when a request was sent, how long after its stream's
    previous one had ended). `period_s` is how long a full request of the last stream took.
    """

    def __init__(
        self,
        client: Client,
        spec: LoadLike,
        concurrency: int,
        *,
        seed: str,
        scale: Scale,
        own: OwnPrompts | None = None,
    ) -> None:
        self._client, self._spec, self._concurrency, self._own = client, spec, concurrency, own
        room = scale.longest(spec.output_tokens)
        self.input_tokens = spec.input_tokens if room is None else min(spec.input_tokens, room)
        writer = writer_of(scale)
        self._prompts = [
            Prompts(f"{seed}/c{concurrency}/i{spec.input_tokens}/s{stream}", self.input_tokens, writer)
            for stream in range(concurrency)
        ]
        self._connections: list[Connection] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()  # a request ended
        self._draining = asyncio.Event()
        self._running: dict[int, Answer] = {}
        self._unwritten: dict[int, int] = {}  # stream → number of the message that it needs next
        self._coming: dict[int, tuple[bytes, int]] = {}
        self._failures_in_row = 0
        self._failed_at: float | None = None
        self.timings: list[RequestTiming] = []
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.finished = [0] * concurrency
        self.other_length = 0
        self.turnarounds: list[tuple[float, float]] = []
        self.period_s: float | None = None
        self.last_ended: int | None = None

    # -- from the first request to the last ---------------------------------------------------------------------------

    async def begin(self) -> None:
        """Connections opened and the first messages written before any request; a refusal is counted when one sends."""
        self._connections = [self._client.connection() for _ in range(self._concurrency)]
        first = [self._message(stream, 0) for stream in range(self._concurrency)]
        await asyncio.gather(*(connection.try_open() for connection in self._connections))
        self._tasks = [
            asyncio.ensure_future(self._stream(stream, connection, first[stream]))
            for stream, connection in enumerate(self._connections)
        ]

    async def drain(self) -> None:
        """No new requests; those that run end by themselves, but a failed trial does not wait for them for long."""
        self._draining.set()
        self._unwritten.clear()
        if not self._tasks:
            return
        limit_s = None if self._failed_at is None else _FAILED_DRAIN_S
        if "stall" in self.errors:
            limit_s = 0.0
        _, running = await asyncio.wait(self._tasks, timeout=limit_s)
        for stream in running:
            stream.cancel()
        if running:
            await asyncio.wait(running)

    async def close(self) -> None:
        """Whatever still runs is given up."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for connection in self._connections:
            connection.abort()

    # -- one stream ---------------------------------------------------------------------------------------------------

    async def _stream(self, stream: int, connection: Connection, message: tuple[bytes, int]) -> None:
        """One stream: a request, and the next at once when it ends; after an error a pause that grows."""
        pause_s, ended_s = _BACKOFF_S[0], None
        for number in itertools.count(1):
            body, asked = message
            answer = self._running[stream] = Answer(stream=self._spec.stream)
            self._write_later(stream, number)
            try:
                await connection.request(body, answer, deadline_s=self._spec.request_timeout_s)
            finally:
                self._note(stream, answer, asked, ended_s, full=asked == self._spec.output_tokens)
            ended_s = answer.ended_at if answer.ok else None
            if self._draining.is_set():
                return
            message = self._written(stream)
            if answer.ok:
                pause_s = _BACKOFF_S[0]
                continue
            if await happens(self._draining, pause_s):
                return
            pause_s = min(2 * pause_s, _BACKOFF_S[1])

    def _write_later(self, stream: int, number: int) -> None:
        """The next message is written while this request runs, so that nothing stands between two requests.

        One at a time, with a look at the sockets in between: where all streams send at once, as they do when a server
        answers them in step, what comes in would else be stamped late by the time that all their prompts take.
        """
        self._unwritten[stream] = number
        if len(self._unwritten) == 1:
            asyncio.get_running_loop().call_soon(self._write_one)

    def _write_one(self) -> None:
        stream = next(iter(self._unwritten), None)
        if stream is not None:
            self._coming[stream] = self._message(stream, self._unwritten.pop(stream))
        if self._unwritten:
            asyncio.get_running_loop().call_soon(self._write_one)

    def _written(self, stream: int) -> tuple[bytes, int]:
        """The stream's next message; written now, if its turn has not come yet."""
        number = self._unwritten.pop(stream, None)
        return self._coming.pop(stream) if number is None else self._message(stream, number)

    def _message(self, stream: int, number: int) -> tuple[bytes, int]:
        """The stream's request of that number, and how many tokens it asks for."""
        spec = self._spec
        asked = spec.output_tokens
        if number == 0:
            asked = math.ceil(asked * (stream + 1) / self._concurrency)
        body = completion_body(
            self._client.target.model,
            self._prompts[stream][number] if self._own is None else self._own.take(),
            endpoint=spec.endpoint,
            stream=spec.stream,
            output_tokens=asked,
            sampling={"temperature": spec.temperature},
        )
        return self._client.post(PATHS[spec.endpoint], body), asked

    def _note(self, stream: int, answer: Answer, asked: int, ended_s: float | None, *, full: bool) -> None:
        """Write an ended request into the books."""
        del self._running[stream]
        if answer.sent_at == 0.0:  # given up before it was sent
            return
        self.timings.append(answer.timing())
        if ended_s is not None:
            self.turnarounds.append((answer.sent_at, answer.sent_at - ended_s))
        if answer.kind is None:
            self.finished[stream] += 1
            self.last_ended = stream
            self._failures_in_row = 0
            self.other_length += answer.completion_tokens not in (None, asked)
            if full and stream == self._concurrency - 1:
                self.period_s = answer.ended_at - answer.sent_at
        elif answer.kind != "cancelled":
            self._failures_in_row += 1
            self.count(answer.kind, answer.detail)
        self._changed.set()

    def count(self, kind: str, detail: str) -> None:
        """Something of the variant failed; `kind` as in `client.KINDS`, or a word of the trial's own."""
        self.errors[kind] += 1
        self.examples.setdefault(kind, detail)
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _over_at(self) -> float:
        """When a trial that failed already ends."""
        if self._failed_at is None:
            return math.inf
        return self._failed_at + min(self.nominal_s(), _AFTER_FAILURE_S)

    def nominal_s(self) -> float:
        """How long the window lasts, about; where it is given in requests, by the length of the last stream's."""
        wanted = self._spec.window_requests
        if wanted is None or self.period_s is None:
            return self._spec.window_s
        return self.period_s * wanted / self._concurrency

    def check(self) -> None:
        """Go on only while there is something to measure.

        Raises:
            Over: requests only fail, or the trial failed a while ago.
        """
        for task in self._tasks:
            if task.done() and not self._draining.is_set():
                task.result()  # raises what went wrong in our own code
        if self._failures_in_row >= max(3, 2 * self._concurrency) or time.monotonic() >= self._over_at():
            raise Over

    async def until(self, done: Callable[[], bool], until_s: float) -> bool:
        """Wait for `done`, asked whenever a request ends; False when `until_s` (monotonic) came first."""
        while True:
            self.check()
            if done():
                return True
            left_s = min(until_s, self._over_at()) - time.monotonic()
            if left_s <= 0:
                self.check()
                return False
            self._changed.clear()
            await happens(self._changed, None if left_s == math.inf else left_s)

    @property
    def began(self) -> bool:
        """Whether any answer that runs has begun to come."""
        return any(answer.chunk_at for answer in self._running.values())

    def lead_due_s(self) -> float | None:
        """When the last stream's request will have ended, if it takes as long as the one before; monotonic seconds."""
        lead = self._running.get(self._concurrency - 1)
        return None if lead is None or self.period_s is None else lead.sent_at + self.period_s

    def lead_ends(self) -> Callable[[], bool]:
        """Whether the last stream has ended another request since now."""
        seen = self.finished[-1]
        return lambda: self.finished[-1] > seen

    async def token_comes(self, until_s: float) -> None:
        """Wait for the next chunk of any stream.

        Where no request ends in the window, both reads follow a token: a window that holds a dozen slow tokens would
        be off by one of them otherwise.
        """
        before = self._chunks()
        while self._spec.stream and self._chunks() == before and time.monotonic() < until_s:
            self.check()
            await asyncio.sleep(_LOOK_S)

    def _chunks(self) -> tuple[int, int]:
        return sum(self.finished), sum(len(answer.chunk_at) for answer in self._running.values())


async def happens(event: asyncio.Event, within_s: float | None) -> bool:
    """Wait for the event, at most so long (None: the trial's deadline ends it)."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
