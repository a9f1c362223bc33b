"""One trial: warm-up, window, drain, books. Driven by `load.run_trial`.

    idle? → connect → warm-up → read ══ window ══ read → drain → idle again → the books are compared

The first requests, of staggered length, are not measured (`streams`). The window begins and ends when a request of the
last stream ends, so that it holds whole periods of every stream: a window of one second is not off by a part of a
request.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from orchestrator import rulers as measure
from orchestrator import scrape
from orchestrator.client import Cancelled, Client, Page, Target
from orchestrator.errors import BoxError
from orchestrator.prompts import OwnPrompts, Scale
from orchestrator.records import Deltas, Quantiles, RequestTiming, Rulers
from orchestrator.rulers import Health, Window
from orchestrator.scrape import Snapshot
from orchestrator.streams import Over, Streams, happens
from orchestrator.trialspec import LoadLike, TrialResult

_POLL_S = 0.02  # how often we ask whether to stop
_TICK_S = 0.01  # how often the event loop's lateness is sampled
_IDLE_WAIT_S = 2.0  # the previous trial's last request may still be leaving the server
_SETTLE_S = 1.0  # the server writes its counters a moment after the last answer
_SCRAPE_S = 5.0
_UNSURE = 0.01  # of the window, by the duration of its two reads: above it is a warning

# Not the variant's fault: somebody else answers, or we asked for the wrong thing.
_RIG_KINDS = ("http_4", "redirect", "not_sse", "bad_http", "tls", "connect_failed")
NO_COUNTER = "no_counter: the server exports no vllm:generation_tokens_total (is it run with --disable-log-stats?)"


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
        self._client = Client(target)
        self._scraper = self._client.connection()
        self._streams = Streams(self._client, spec, concurrency, seed=seed, scale=scale, own=own)
        self._invalid: list[str] = []
        self._warnings: list[str] = []
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
            self._streams.count("deadline", f"the trial did not end within {deadline_s:g} s{inside}")
        return self._result(reason, time.monotonic() - began)

    async def _body(self) -> None:
        try:
            self._fits()
            await self._idle()
            await self._streams.begin()
            await self._warm_up()
            await self._window()
            await self._streams.drain()
            await self._settle()
        except Over:
            await self._streams.drain()
            if self._streams.timings:
                await self._last_look()
        finally:
            await self._streams.close()
            self._scraper.abort()

    def _fits(self) -> None:
        """Prompts are cut to what the model takes beside its answer; said once, and not by a 400 in the window.

        Raises:
            Over: there is no room for a prompt at all.
        """
        spec, limit = self._spec, self._scale.max_model_len
        if self._streams.input_tokens < 1:
            self._invalid.append(f"too_long: answers of {spec.output_tokens} tokens leave no room in {limit}")
            raise Over
        if self._own is None and self._streams.input_tokens < spec.input_tokens:
            self._warnings.append(
                f"prompts have {self._streams.input_tokens} tokens, not {spec.input_tokens}: with answers of "
                f"{spec.output_tokens} more do not fit into the model's {limit} (max_model_len)"
            )

    # -- phases -------------------------------------------------------------------------------------------------------

    async def _idle(self) -> None:
        """Read the counters while nothing runs; whoever else uses the box is found here."""
        until_s = time.monotonic() + _IDLE_WAIT_S
        async for now in self._snapshots(until_s):
            self._before = now
            if now.generation_tokens is None:
                self._invalid.append(NO_COUNTER)
                raise Over
            if now.busy in (None, 0):
                return
        assert self._before is not None
        self._invalid.append(f"foreign_traffic: {self._before.busy:.0f} requests ran before our first request")
        raise Over

    async def _warm_up(self) -> None:
        """Until every stream has finished a request and `warmup_s` has passed, at the latest `max_warmup_s`."""
        spec, streams, began = self._spec, self._streams, time.monotonic()
        steady = await streams.until(lambda: min(streams.finished) > 0, began + max(spec.max_warmup_s, spec.warmup_s))
        if not steady:
            if not any(streams.finished) and spec.stream and not streams.began:
                streams.count("stall", f"not one token within the warm-up of {spec.max_warmup_s:g} s")
                raise Over
            slow = sum(not count for count in streams.finished)
            self._warnings.append(
                f"{slow} of {self._concurrency} streams had not finished a request after the warm-up of "
                f"{spec.max_warmup_s:g} s: raise max_warmup_s or lower output_tokens"
            )
        enough = began + spec.warmup_s
        aligned = steady and time.monotonic() >= enough and streams.last_ended == self._concurrency - 1
        await streams.until(lambda: False, enough)
        nominal_s = streams.nominal_s()
        if not aligned and streams.period_s is not None and streams.period_s <= nominal_s / 2:
            await streams.until(streams.lead_ends(), time.monotonic() + 1.5 * streams.period_s)
        elif not aligned:
            await streams.token_comes(time.monotonic() + nominal_s / 4)

    async def _window(self) -> None:
        """First read, window, second read."""
        self._opened = await self._read()
        self._ended_before = sum(self._streams.finished)
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
        await self._streams.until(lambda: False, due_s - 0.1 * nominal_s)
        ends = self._streams.lead_ends()
        if await self._streams.until(ends, due_s):
            return
        due_again_s = self._streams.lead_due_s()
        if due_again_s is not None and due_again_s < latest_s:
            await self._streams.until(ends, latest_s)
        else:
            await self._streams.token_comes(opened_s + 1.25 * nominal_s)

    def _ended_inside(self) -> int:
        """Requests that have ended since the window was opened."""
        return 0 if self._ended_before is None else sum(self._streams.finished) - self._ended_before

    async def _requests_end(self, wanted: int) -> None:
        """Until so many requests have ended in the window, and then one of the last stream: whole periods of all.

        No limit of its own: each request has one, and the trial its deadline.
        """
        await self._streams.until(lambda: self._ended_inside() >= wanted, math.inf)
        if self._streams.last_ended != self._concurrency - 1:
            await self._streams.until(self._streams.lead_ends(), time.monotonic() + self._spec.request_timeout_s)

    async def _settle(self) -> None:
        """Read until the server's books have caught up with ours: they are written a moment after the last answer."""
        assert self._before is not None
        ours = measure.books(self._streams.timings, self._spec.output_tokens)
        async for now in self._snapshots(time.monotonic() + _SETTLE_S):
            self._after = now
            if measure.settled(self._before, now, ours) or scrape.was_reset(self._before, now):
                return

    async def _last_look(self) -> None:
        """One read of a server that may be dead."""
        read = await self._get()
        if read.page.kind is None and read.page.status == 200:
            with contextlib.suppress(Over):  # it is over; why is in the books
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
            Over: there is no counter to read; why is in the books.
        """
        read = await self._get()
        if read.page.kind in ("connection_refused", "connection_lost", "cut_stream", "timeout"):
            self._streams.count(read.page.kind, f"/metrics: {read.page.detail}")
            raise Over
        if read.page.kind is not None:
            self._invalid.append(f"no_counter: /metrics: {read.page.error}")
            raise Over
        return read

    def _parse(self, read: _Read) -> Snapshot:
        """The snapshot of a read.

        Raises:
            Over: what answered was no metrics page; why is in the books.
        """
        page, url = read.page, f"{self._target.base_url}/metrics"
        kind = page.headers.get(b"content-type", b"").decode("latin-1")
        try:
            text = scrape.read_page(url, page.status or 0, kind, bytes(page.body))
        except BoxError as error:
            self._invalid.append(f"no_counter: {error.what}")
            raise Over from error
        offset = time.time() - time.monotonic()
        return scrape.read(text, read.at_s, half_s=read.half_s, at_s=read.at_s + offset)

    async def _snapshots(self, until_s: float) -> AsyncIterator[Snapshot]:
        """Snapshots until `until_s`, one at least, ever more slowly."""
        pause_s = 0.005
        while True:
            yield self._parse(await self._read())
            if time.monotonic() + pause_s > until_s:
                return
            await asyncio.wait({asyncio.ensure_future(happens(asyncio.Event(), pause_s))})
            pause_s = min(2 * pause_s, 0.1)

    # -- the result ---------------------------------------------------------------------------------------------------

    def _result(self, reason: str | None, seconds: float) -> TrialResult:
        """Everything that was seen, judged."""
        spec, timings = self._spec, tuple(self._streams.timings)
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
        rig = {kind: count for kind, count in self._streams.errors.items() if kind.startswith(_RIG_KINDS)}
        self._invalid += [f"{kind}: {count} requests: {self._streams.examples[kind]}" for kind, count in rig.items()]
        failed = len(rig) < len(self._streams.errors)
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
            errors=dict(self._streams.errors),
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
            error_examples=self._streams.examples,
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
        except Over:
            return None

    def _health(self, opened: Snapshot, closed: Snapshot) -> Health:
        inside = [gap for at, gap in self._streams.turnarounds if opened.t_s <= at <= closed.t_s]
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
            t.ended_at_s > ends[0].t_s for t in self._streams.timings if not t.error
        ):
            self._streams.count("stall", "no token in the window")
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
        if self._streams.other_length:
            self._warnings.append(f"{self._streams.other_length} answers were not of the length that was asked for")
        if self._own is not None:
            again = self._own.again - self._again
            if again:
                how = "as it is" if self._own.repeat else "behind a serial of its own"
                many = f"{again} requests sent a prompt of the file again, {how}: the file has {len(self._own)}"
                self._warnings.append(many)
            return
        told = [timing.prompt_tokens for timing in timings if timing.prompt_tokens is not None]
        asked = self._streams.input_tokens
        if told and max(abs(count - asked) for count in told) > max(2, 0.01 * asked):
            seen = f"{min(told)}" if min(told) == max(told) else f"{min(told)} to {max(told)}"
            self._warnings.append(f"prompts had {seen} tokens, {asked} were asked for")


def _window(opened: Snapshot, closed: Snapshot) -> Window:
    assert opened.at_s is not None
    return Window(opened.t_s, closed.t_s, opened.at_s, opened.at_s + closed.t_s - opened.t_s)


def _iso(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
