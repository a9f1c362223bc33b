"""One trial: warm-up, window, drain, books. Driven by `load.run_trial`.

    idle? → connect → warm-up → read ══ window ══ read → drain → idle again → the books are compared

First requests are of staggered length (1/c, 2/c … of the full one) and not measured, so that the streams run out of
step, as they do in service. The window begins and ends when a request of the last stream ends, so that it holds whole
periods of every stream: a window of one second is not off by a part of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from orchestrator import rulers as measure
from orchestrator import scrape
from orchestrator.client import (
    PATHS,
    Answer,
    Cancelled,
    Client,
    Connection,
    Endpoint,
    Page,
    Target,
    completion_body,
)
from orchestrator.errors import BoxError
from orchestrator.prompts import OwnPrompts, Prompts, Scale, writer_of
from orchestrator.records import Deltas, Quantiles, RequestTiming, Rulers
from orchestrator.rulers import Health, Window
from orchestrator.scrape import Snapshot

_POLL_S = 0.02  # how often we ask whether to stop
_TICK_S = 0.01  # how often the event loop's lateness is sampled
_IDLE_WAIT_S = 2.0  # the previous trial's last request may still be leaving the server
_SETTLE_S = 1.0  # the server writes its counters a moment after the last answer
_SCRAPE_S = 5.0
_FAILED_DRAIN_S = 1.0  # a failed trial has no books to close: its running requests are given up
_LOOK_S = 0.002  # how soon a token is noticed while we wait for one
_UNSURE = 0.01  # of the window, by the duration of its two reads: above it is a warning
_BACKOFF_S = (0.05, 1.0)  # first and longest pause of a stream after an error
_AFTER_FAILURE_S = 5.0  # a failed trial goes on for at most so long, to see whether all or some requests fail

# Not the variant's fault: somebody else answers, or we asked for the wrong thing.
_RIG_KINDS = ("http_4", "redirect", "not_sse", "bad_http", "tls", "connect_failed")


NO_COUNTER = "no_counter: the server exports no vllm:generation_tokens_total (is it run with --disable-log-stats?)"


class LoadLike(Protocol):
    """What a trial needs to know; the matrix' `load:` block is one."""

    @property
    def endpoint(self) -> Endpoint:
        """`chat` or `completions`."""

    @property
    def stream(self) -> bool:
        """Whether answers are streamed."""

    @property
    def input_tokens(self) -> int:
        """Prompt length."""

    @property
    def output_tokens(self) -> int:
        """Answer length, exactly."""

    @property
    def window_s(self) -> float:
        """Length of the measured window."""

    @property
    def window_requests(self) -> int | None:
        """How many requests end in the window, instead of its length."""

    @property
    def warmup_s(self) -> float:
        """Shortest warm-up."""

    @property
    def max_warmup_s(self) -> float:
        """Longest warm-up: then the window begins although not every stream has finished a request."""

    @property
    def temperature(self) -> float:
        """Sampling temperature."""

    @property
    def request_timeout_s(self) -> float:
        """After so long one request has failed."""


@dataclass(frozen=True, slots=True)
class Load:
    """A `LoadLike` of this module's own."""

    endpoint: Endpoint = "chat"
    stream: bool = True
    input_tokens: int = 512
    output_tokens: int = 256
    window_s: float = 30.0
    window_requests: int | None = None
    warmup_s: float = 2.0
    max_warmup_s: float = 60.0
    temperature: float = 0.0
    request_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One trial; the fields of `records.TrialEnded`, and what they were made from.

    `cancelled` is the reason for which it was stopped from outside. `snapshots` are the reads: before, at the window's
    ends, after. `error_examples` has the first detail seen of each kind of error.
    """

    concurrency: int
    window_s: float | None
    tokens: float | None
    tokens_per_s: float | None
    valid: bool
    invalid_reasons: tuple[str, ...]
    failed: bool
    errors: Mapping[str, int]
    requests_sent: int
    requests_ok: int
    rulers: Rulers
    deltas: Deltas | None
    whole: Deltas | None
    client_tokens: int | None
    ttft_ms: Quantiles
    itl_ms: Quantiles
    e2e_ms: Quantiles
    window_started_at: str | None
    warnings: tuple[str, ...]
    error_examples: Mapping[str, str] = field(default_factory=dict)
    window: Window | None = None
    health: Health | None = None
    timings: tuple[RequestTiming, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    cancelled: str | None = None
    seconds: float = 0.0


_RECORD_FIELDS = (
    "concurrency",
    "window_s",
    "tokens",
    "tokens_per_s",
    "valid",
    "invalid_reasons",
    "failed",
    "errors",
    "requests_sent",
    "requests_ok",
    "rulers",
    "deltas",
    "whole",
    "client_tokens",
    "ttft_ms",
    "itl_ms",
    "e2e_ms",
    "window_started_at",
    "warnings",
)


def to_record_fields(result: TrialResult, logger_samples: Iterable[tuple[float, float]] = ()) -> dict[str, Any]:
    """The fields of `records.TrialEnded` that a trial knows; the boot's own are the caller's.

    `logger_samples` are the engine's lines, (epoch seconds, tok/s), for the `logger` ruler (see `with_logger`).
    """
    fields = {name: getattr(result, name) for name in _RECORD_FIELDS} | {"errors": dict(result.errors)}
    if result.window is not None:
        fields["rulers"] = measure.with_logger(result.rulers, logger_samples, result.window)
    return fields


# --- the trial -------------------------------------------------------------------------------------------------------


class _Over(Exception):  # not an error: the trial has nothing left to measure
    """The trial ends here; what was seen is in the books already."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A counter page as it came; `at_s` is the midpoint of its request, monotonic seconds."""

    page: Page
    at_s: float
    half_s: float


class _Lag:
    """Samples by how much the event loop is late."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.late_s: list[float] = []
        self._start()

    def _start(self) -> None:
        self._due = time.monotonic() + _TICK_S
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        # libuv's timers count whole milliseconds: up to one is the timer's, not the loop's.
        self.late_s.append(max(0.0, time.monotonic() - self._due - 0.001))
        self._start()

    def stop(self) -> None:
        self._timer.cancel()


class Trial:
    """One trial on the running event loop. Use once."""

    def __init__(
        self,
        target: Target,
        spec: LoadLike,
        concurrency: int,
        *,
        seed: str,
        scale: Scale,
        own: OwnPrompts | None = None,
    ) -> None:
        self._target, self._spec, self._concurrency, self._scale = target, spec, concurrency, scale
        self._own = own
        self._again = 0 if own is None else own.again
        room = scale.longest(spec.output_tokens)
        self._input_tokens = spec.input_tokens if room is None else min(spec.input_tokens, room)
        writer = writer_of(scale)
        self._prompts = [
            Prompts(f"{seed}/c{concurrency}/i{spec.input_tokens}/s{stream}", self._input_tokens, writer)
            for stream in range(concurrency)
        ]
        self._client = Client(target)
        self._scraper = self._client.connection()
        self._streams: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()  # a request ended
        self._draining = asyncio.Event()
        # What came in.
        self._timings: list[RequestTiming] = []
        self._errors: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._invalid: list[str] = []
        self._warnings: list[str] = []
        self._other_length = 0
        self._finished = [0] * concurrency
        self._running: dict[int, Answer] = {}
        self._unwritten: dict[int, int] = {}  # stream → number of the message that it needs next
        self._coming: dict[int, tuple[bytes, int]] = {}
        self._turnarounds: list[tuple[float, float]] = []
        self._failures_in_row = 0
        self._failed_at: float | None = None
        self._period_s: float | None = None
        self._last_ended: int | None = None
        self._ended_before: int | None = None  # when the window was opened
        # The reads.
        self._before: Snapshot | None = None
        self._after: Snapshot | None = None
        self._opened: _Read | None = None
        self._closed: _Read | None = None
        self._cpu_s = 0.0
        self._late_s: list[float] = []

    async def run(self, cancelled: Cancelled, deadline_s: float, *, began: float) -> TrialResult:
        """The whole trial, over within `deadline_s` of `began` (monotonic seconds)."""
        body = asyncio.ensure_future(self._body())
        reason: str | None = None
        try:
            while not body.done():
                await asyncio.wait({body}, timeout=_POLL_S)
                if not body.done():
                    reason = cancelled()
                    if reason is not None or time.monotonic() - began > deadline_s:
                        break
        finally:
            late = not body.done()
            body.cancel()
            await asyncio.wait({body})
        if not body.cancelled():
            body.result()  # a mistake of ours is raised here, not swallowed
        if reason is not None:
            self._invalid.append(f"cancelled: {reason}")
        elif late:
            wanted = self._spec.window_requests
            inside = "" if wanted is None else f"; {self._ended_inside()} of {wanted} requests had ended in the window"
            self._count("deadline", f"the trial did not end within {deadline_s:g} s{inside}")
        return self._result(reason, time.monotonic() - began)

    async def _body(self) -> None:
        connections = [self._client.connection() for _ in range(self._concurrency)]
        try:
            self._fits()
            await self._idle()
            # Opened, and the first messages written, before any request; a refusal is counted when its stream sends.
            first = [self._message(stream, 0) for stream in range(self._concurrency)]
            await asyncio.gather(*(connection.try_open() for connection in connections))
            self._streams = [asyncio.ensure_future(self._stream(i, c, first[i])) for i, c in enumerate(connections)]
            await self._warm_up()
            await self._window()
            await self._drain()
            await self._settle()
        except _Over:
            await self._drain()
            if self._timings:
                await self._last_look()
        finally:
            for stream in self._streams:
                stream.cancel()
            if self._streams:
                await asyncio.wait(self._streams)
            for connection in (*connections, self._scraper):
                connection.abort()

    def _fits(self) -> None:
        """Prompts are cut to what the model takes beside its answer; said once, and not by a 400 in the window.

        Raises:
            _Over: there is no room for a prompt at all.
        """
        spec, limit = self._spec, self._scale.max_model_len
        if self._input_tokens < 1:
            self._invalid.append(f"too_long: answers of {spec.output_tokens} tokens leave no room in {limit}")
            raise _Over
        if self._own is None and self._input_tokens < spec.input_tokens:
            self._warnings.append(
                f"prompts have {self._input_tokens} tokens, not {spec.input_tokens}: with answers of "
                f"{spec.output_tokens} more do not fit into the model's {limit} (max_model_len)"
            )

    # -- streams ------------------------------------------------------------------------------------------------------

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
            if await _happens(self._draining, pause_s):
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
            self._target.model,
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
        self._timings.append(answer.timing())
        if ended_s is not None:
            self._turnarounds.append((answer.sent_at, answer.sent_at - ended_s))
        if answer.kind is None:
            self._finished[stream] += 1
            self._last_ended = stream
            self._failures_in_row = 0
            self._other_length += answer.completion_tokens not in (None, asked)
            if full and stream == self._concurrency - 1:
                self._period_s = answer.ended_at - answer.sent_at
        elif answer.kind != "cancelled":
            self._failures_in_row += 1
            self._count(answer.kind, answer.detail)
        self._changed.set()

    def _count(self, kind: str, detail: str) -> None:
        self._errors[kind] += 1
        self._examples.setdefault(kind, detail)
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _over_at(self) -> float:
        """When a trial that failed already ends."""
        if self._failed_at is None:
            return math.inf
        return self._failed_at + min(self._nominal_s(), _AFTER_FAILURE_S)

    def _nominal_s(self) -> float:
        """How long the window lasts, about; where it is given in requests, by the length of the last stream's."""
        wanted = self._spec.window_requests
        if wanted is None or self._period_s is None:
            return self._spec.window_s
        return self._period_s * wanted / self._concurrency

    def _ended_inside(self) -> int:
        """Requests that have ended since the window was opened."""
        return 0 if self._ended_before is None else sum(self._finished) - self._ended_before

    def _check(self) -> None:
        """Go on only while there is something to measure.

        Raises:
            _Over: requests only fail, or the trial failed a while ago.
        """
        for task in self._streams:
            if task.done() and not self._draining.is_set():
                task.result()  # raises what went wrong in our own code
        if self._failures_in_row >= max(3, 2 * self._concurrency) or time.monotonic() >= self._over_at():
            raise _Over

    async def _until(self, done: Callable[[], bool], until_s: float) -> bool:
        """Wait for `done`, asked whenever a request ends; False when `until_s` (monotonic) came first."""
        while True:
            self._check()
            if done():
                return True
            left_s = min(until_s, self._over_at()) - time.monotonic()
            if left_s <= 0:
                self._check()
                return False
            self._changed.clear()
            await _happens(self._changed, None if left_s == math.inf else left_s)

    def _lead_ends(self) -> Callable[[], bool]:
        """Whether the last stream has ended another request since now."""
        seen = self._finished[-1]
        return lambda: self._finished[-1] > seen

    # -- phases -------------------------------------------------------------------------------------------------------

    async def _idle(self) -> None:
        """Read the counters while nothing runs; whoever else uses the box is found here."""
        until_s = time.monotonic() + _IDLE_WAIT_S
        async for now in self._snapshots(until_s):
            self._before = now
            if now.generation_tokens is None:
                self._invalid.append(NO_COUNTER)
                raise _Over
            if now.busy in (None, 0):
                return
        assert self._before is not None
        self._invalid.append(f"foreign_traffic: {self._before.busy:.0f} requests ran before our first request")
        raise _Over

    async def _warm_up(self) -> None:
        """Until every stream has finished a request and `warmup_s` has passed, at the latest `max_warmup_s`."""
        spec, began = self._spec, time.monotonic()
        steady = await self._until(lambda: min(self._finished) > 0, began + max(spec.max_warmup_s, spec.warmup_s))
        if not steady:
            if not any(self._finished) and spec.stream and not any(a.chunk_at for a in self._running.values()):
                self._count("stall", f"not one token within the warm-up of {spec.max_warmup_s:g} s")
                raise _Over
            slow = sum(not count for count in self._finished)
            self._warnings.append(
                f"{slow} of {self._concurrency} streams had not finished a request after the warm-up of "
                f"{spec.max_warmup_s:g} s: raise max_warmup_s or lower output_tokens"
            )
        enough = began + spec.warmup_s
        aligned = steady and time.monotonic() >= enough and self._last_ended == self._concurrency - 1
        await self._until(lambda: False, enough)
        nominal_s = self._nominal_s()
        if not aligned and self._period_s is not None and self._period_s <= nominal_s / 2:
            await self._until(self._lead_ends(), time.monotonic() + 1.5 * self._period_s)
        elif not aligned:
            await self._token_comes(time.monotonic() + nominal_s / 4)

    async def _window(self) -> None:
        """First read, window, second read."""
        self._opened = await self._read()
        self._ended_before = sum(self._finished)
        cpu_s, lag = time.thread_time(), _Lag()
        try:
            if self._spec.window_requests is None:
                await self._window_end(self._opened.at_s)
            else:
                await self._requests_end(self._spec.window_requests)
            self._closed = await self._read()
        finally:
            lag.stop()
            self._cpu_s = time.thread_time() - cpu_s
            self._late_s = lag.late_s

    async def _window_end(self, opened_s: float) -> None:
        """At the first end of a request of the last stream after 90 % of `window_s`, if one comes by 150 %.

        Else at a token. The window then holds whole periods of every stream. Cut anywhere, it would hold one prefill
        too many or too few, which is 10 % of a short window.
        """
        nominal_s = self._spec.window_s
        due_s, latest_s = opened_s + nominal_s, opened_s + 1.5 * nominal_s
        await self._until(lambda: False, due_s - 0.1 * nominal_s)
        ends = self._lead_ends()
        if await self._until(ends, due_s):
            return
        lead = self._running.get(self._concurrency - 1)
        if lead is not None and self._period_s is not None and lead.sent_at + self._period_s < latest_s:
            await self._until(ends, latest_s)
        else:
            await self._token_comes(opened_s + 1.25 * nominal_s)

    async def _requests_end(self, wanted: int) -> None:
        """Until so many requests have ended in the window, and then one of the last stream: whole periods of all.

        No limit of its own: each request has one, and the trial its deadline.
        """
        await self._until(lambda: self._ended_inside() >= wanted, math.inf)
        if self._last_ended != self._concurrency - 1:
            await self._until(self._lead_ends(), time.monotonic() + self._spec.request_timeout_s)

    async def _token_comes(self, until_s: float) -> None:
        """Wait for the next chunk of any stream.

        Where no request ends in the window, both reads follow a token: a window that holds a dozen slow tokens would
        be off by one of them otherwise.
        """
        before = self._chunks()
        while self._spec.stream and self._chunks() == before and time.monotonic() < until_s:
            self._check()
            await asyncio.sleep(_LOOK_S)

    def _chunks(self) -> tuple[int, int]:
        return sum(self._finished), sum(len(answer.chunk_at) for answer in self._running.values())

    async def _drain(self) -> None:
        """No new requests; those that run end by themselves, but a failed trial does not wait for them for long."""
        self._draining.set()
        self._unwritten.clear()
        if not self._streams:
            return
        limit_s = None if self._failed_at is None else _FAILED_DRAIN_S
        if "stall" in self._errors:
            limit_s = 0.0
        _, running = await asyncio.wait(self._streams, timeout=limit_s)
        for stream in running:
            stream.cancel()
        if running:
            await asyncio.wait(running)

    async def _settle(self) -> None:
        """Read until the server's books have caught up with ours: they are written a moment after the last answer."""
        assert self._before is not None
        ours = measure.books(self._timings, self._spec.output_tokens)
        async for now in self._snapshots(time.monotonic() + _SETTLE_S):
            self._after = now
            if measure.settled(self._before, now, ours) or scrape.was_reset(self._before, now):
                return

    async def _last_look(self) -> None:
        """One read of a server that may be dead."""
        read = await self._get()
        if read.page.kind is None and read.page.status == 200:
            with contextlib.suppress(_Over):  # it is over; why is in the books
                self._after = self._parse(read)

    # -- reads --------------------------------------------------------------------------------------------------------

    async def _get(self) -> _Read:
        page = Page()
        await self._scraper.request(self._client.get("/metrics"), page, deadline_s=_SCRAPE_S)
        half_s = (page.ended_at - page.sent_at) / 2
        return _Read(page, page.sent_at + half_s, half_s)

    async def _read(self) -> _Read:
        """One read, kept as it came: parsing would delay the streams.

        Raises:
            _Over: there is no counter to read; why is in the books.
        """
        read = await self._get()
        if read.page.kind in ("connection_refused", "connection_lost", "cut_stream", "timeout"):
            self._count(read.page.kind, f"/metrics: {read.page.detail}")
            raise _Over
        if read.page.kind is not None:
            self._invalid.append(f"no_counter: /metrics: {read.page.error}")
            raise _Over
        return read

    def _parse(self, read: _Read) -> Snapshot:
        """The snapshot of a read.

        Raises:
            _Over: what answered was no metrics page; why is in the books.
        """
        page, url = read.page, f"{self._target.base_url}/metrics"
        kind = page.headers.get(b"content-type", b"").decode("latin-1")
        try:
            text = scrape.read_page(url, page.status or 0, kind, bytes(page.body))
        except BoxError as error:
            self._invalid.append(f"no_counter: {error.what}")
            raise _Over from error
        offset = time.time() - time.monotonic()
        return scrape.read(text, read.at_s, half_s=read.half_s, at_s=read.at_s + offset)

    async def _snapshots(self, until_s: float) -> AsyncIterator[Snapshot]:
        """Snapshots until `until_s`, one at least, ever more slowly."""
        pause_s = 0.005
        while True:
            yield self._parse(await self._read())
            if time.monotonic() + pause_s > until_s:
                return
            await asyncio.wait({asyncio.ensure_future(_happens(asyncio.Event(), pause_s))})
            pause_s = min(2 * pause_s, 0.1)

    # -- the result ---------------------------------------------------------------------------------------------------

    def _result(self, reason: str | None, seconds: float) -> TrialResult:
        """Everything that was seen, judged."""
        spec, timings = self._spec, tuple(self._timings)
        opened, closed = self._parsed(self._opened), self._parsed(self._closed)
        deltas = window = state = None
        ruled, ttft, itl, e2e = Rulers(), Quantiles(), Quantiles(), Quantiles()
        if opened is not None and closed is not None:
            deltas, window, state = scrape.delta(opened, closed), _window(opened, closed), self._health(opened, closed)
            ruled = measure.rulers(timings, window, deltas)
            ttft, itl, e2e = measure.latencies(timings, window)
            self._judge_window(deltas, state, (opened, closed))
        ours = measure.books(timings, spec.output_tokens)
        whole = None
        if self._before is not None and self._after is not None:
            whole = scrape.delta(self._before, self._after)
            self._judge_whole(whole, ours)
        rig = {kind: count for kind, count in self._errors.items() if kind.startswith(_RIG_KINDS)}
        self._invalid += [f"{kind}: {count} requests: {self._examples[kind]}" for kind, count in rig.items()]
        failed = len(rig) < len(self._errors)
        self._warn_lengths(timings)
        tokens = None if deltas is None else deltas.generation_tokens
        if not failed and not self._invalid and (tokens is None or window is None):
            self._invalid.append("no_window: the counters were not read at both ends of a window")
        valid = not self._invalid
        measured = valid and not failed and tokens is not None and window is not None
        return TrialResult(
            concurrency=self._concurrency,
            window_s=None if window is None else window.seconds,
            tokens=tokens,
            tokens_per_s=tokens / window.seconds if measured and tokens is not None and window is not None else None,
            valid=valid,
            invalid_reasons=tuple(dict.fromkeys(self._invalid)),
            failed=failed,
            errors=dict(self._errors),
            requests_sent=len(timings),
            requests_ok=ours.requests,
            rulers=ruled,
            deltas=deltas,
            whole=whole,
            client_tokens=ours.tokens,
            ttft_ms=ttft,
            itl_ms=itl,
            e2e_ms=e2e,
            window_started_at=None if window is None else _iso(window.started_at),
            warnings=tuple(dict.fromkeys(self._warnings)),
            error_examples=self._examples,
            window=window,
            health=state,
            timings=timings,
            snapshots=tuple(s for s in (self._before, opened, closed, self._after) if s is not None),
            cancelled=reason,
            seconds=seconds,
        )

    def _parsed(self, read: _Read | None) -> Snapshot | None:
        try:
            return None if read is None else self._parse(read)
        except _Over:
            return None

    def _health(self, opened: Snapshot, closed: Snapshot) -> Health:
        inside = [gap for at, gap in self._turnarounds if opened.t_s <= at <= closed.t_s]
        return measure.health(
            seconds=closed.t_s - opened.t_s,
            cpu_s=self._cpu_s,
            lags_s=self._late_s,
            requests=len(inside),
            turnaround_s=sum(inside),
            concurrency=self._concurrency,
            stamped=self._client.wires is not None,
        )

    def _judge_window(self, deltas: Deltas, state: Health, ends: tuple[Snapshot, Snapshot]) -> None:
        if deltas.counter_reset:
            self._invalid.append("counter_reset: the server's counters began anew in the window")
        elif deltas.generation_tokens is None:
            self._invalid.append(NO_COUNTER)
        elif deltas.generation_tokens == 0 and not any(
            t.ended_at_s > ends[0].t_s for t in self._timings if not t.error
        ):
            self._count("stall", "no token in the window")
        for end in ends:
            if end.busy is not None and end.busy > self._concurrency:
                self._invalid.append(
                    f"foreign_traffic: {end.busy:.0f} requests ran while ours were {self._concurrency}"
                )
        unsure = (ends[0].half_s + ends[1].half_s) / deltas.seconds
        if unsure > _UNSURE:
            self._warnings.append(f"the counter reads took so long that the window is uncertain by {unsure:.1%}")
        invalid, warned = state.problems()
        self._invalid += invalid
        self._warnings += warned

    def _judge_whole(self, whole: Deltas, ours: measure.Books) -> None:
        assert self._before is not None
        assert self._after is not None
        for invalid, warned in (
            measure.audit(whole, self._before, self._after, ours),
            measure.prefix_hits(
                whole,
                ours.requests + ours.open_requests,
                self._scale.template_tokens,
                own=None if self._own is None else "repeated" if self._own.repeat else "once",
            ),
        ):
            self._invalid += invalid
            self._warnings += warned

    def _warn_lengths(self, timings: Sequence[RequestTiming]) -> None:
        if self._other_length:
            self._warnings.append(f"{self._other_length} answers were not of the length that was asked for")
        if self._own is not None:
            again = self._own.again - self._again
            if again:
                how = "as it is" if self._own.repeat else "behind a serial of its own"
                many = f"{again} requests sent a prompt of the file again, {how}: the file has {len(self._own)}"
                self._warnings.append(many)
            return
        told = [timing.prompt_tokens for timing in timings if timing.prompt_tokens is not None]
        asked = self._input_tokens
        if told and max(abs(count - asked) for count in told) > max(2, 0.01 * asked):
            seen = f"{min(told)}" if min(told) == max(told) else f"{min(told)} to {max(told)}"
            self._warnings.append(f"prompts had {seen} tokens, {asked} were asked for")


async def _happens(event: asyncio.Event, within_s: float | None) -> bool:
    """Wait for the event, at most so long (None: the trial's deadline ends it)."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _window(opened: Snapshot, closed: Snapshot) -> Window:
    assert opened.at_s is not None
    return Window(opened.t_s, closed.t_s, opened.at_s, opened.at_s + closed.t_s - opened.t_s)


def _iso(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
