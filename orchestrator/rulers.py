"""What one trial's requests and counter reads say: rulers, quantiles, and the ledger of tokens. Pure.

Only `counter` is the measurement: the increase of the server's count of emitted tokens over the time between two reads.
The other rulers look at the same window and stand beside it, so that each shows by how much it would have misled:

- `usage`: tokens that the answers report, each answer's spread evenly over its chunks with text, and counted for the
  chunks that came inside the window (not streamed: spread evenly over the time from sending to the answer).
- `chunks`: streamed chunks with text inside the window. Under speculation one chunk holds several tokens.
- `words`: whitespace words of the answers, spread as `usage` is.
- `logger`: the engine's own line, whose windows run free of ours: see `with_logger`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.records import Deltas, Quantiles, RequestTiming, Rulers
from orchestrator.scrape import Snapshot

# The window would have been off by as much as this share of its tokens, because our client was late.
LOST_SHARE_INVALID = 0.05
LOST_SHARE_WARNED = 0.02
CPU_SHARE_INVALID = 0.95
LAG_P99_WARNED_MS = 50.0
# Unique prompts find nothing in a prefix cache but the chat template that all share.
PREFIX_HITS_INVALID = 0.01


@dataclass(frozen=True, slots=True)
class Window:
    """From the first counter read to the second: client's monotonic seconds, and the epoch for the engine's log."""

    start_s: float
    end_s: float
    started_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Health:
    """How our own client did in the window.

    `cpu_share` is its thread's CPU time over wall time; `lag_*` by how much the event loop was late; `turnaround_s` the
    time, summed over streams, between the end of a request and the sending of the next; `lost_share` the share of
    stream time that our lateness cost, which is by how much the throughput may be too low. Where the kernel says when
    an answer's end came in, the turnaround holds all of it; elsewhere `lag_*` estimates how late we noticed the end.
    """

    cpu_share: float
    lag_mean_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    turnaround_s: float
    lost_share: float

    def problems(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(invalid reasons, warnings)."""
        invalid: list[str] = []
        warned: list[str] = []
        if self.cpu_share > CPU_SHARE_INVALID:
            invalid.append(f"client_saturated: our client used {self.cpu_share:.0%} of a core in the window")
        if self.lost_share > LOST_SHARE_INVALID:
            invalid.append(
                f"client_late: {self.lost_share:.1%} of the streams' time was lost in our own client "
                f"(limit {LOST_SHARE_INVALID:.0%}; event loop late by {self.lag_mean_ms:.1f} ms on average)"
            )
        elif self.lost_share > LOST_SHARE_WARNED:
            warned.append(f"{self.lost_share:.1%} of the streams' time was lost in our own client")
        if self.lag_p99_ms > LAG_P99_WARNED_MS:
            warned.append(f"event loop late by {self.lag_p99_ms:.0f} ms at p99: TTFT and ITL are as much too high")
        return tuple(invalid), tuple(warned)


def health(
    *,
    seconds: float,
    cpu_s: float,
    lags_s: Sequence[float],
    requests: int,
    turnaround_s: float,
    concurrency: int,
    stamped: bool,
) -> Health:
    """The client's health from its samples: `lags_s` by how much each tick of the event loop came late.

    `stamped`: a request's end is the kernel's time of its last bytes, not the time at which we read them.
    """
    ordered = sorted(lags_s)
    ticks = len(ordered) or 1
    # A stall of d seconds delays what arrives in it by d/2 on average; one tick sees it but once. The larger tells.
    mean = max(sum(ordered) / ticks, sum(lag * lag for lag in ordered) / (2 * seconds))
    late = turnaround_s if stamped else turnaround_s + requests * mean
    return Health(
        cpu_share=cpu_s / seconds,
        lag_mean_ms=mean * 1e3,
        lag_p99_ms=(_quantile(ordered, 0.99) if ordered else 0.0) * 1e3,
        lag_max_ms=(ordered[-1] if ordered else 0.0) * 1e3,
        turnaround_s=turnaround_s,
        lost_share=late / (concurrency * seconds),
    )


# --- rulers ----------------------------------------------------------------------------------------------------------


def chunks_in(timing: RequestTiming, window: Window) -> int:
    """Chunks with text that came inside the window, its end included."""
    return bisect_right(timing.chunk_at_s, window.end_s) - bisect_right(timing.chunk_at_s, window.start_s)


def share_in(timing: RequestTiming, window: Window) -> float:
    """Which part of this request's output lies inside the window, 0..1."""
    if timing.chunk_at_s:
        return chunks_in(timing, window) / len(timing.chunk_at_s)
    span = timing.ended_at_s - timing.sent_at_s
    overlap = min(timing.ended_at_s, window.end_s) - max(timing.sent_at_s, window.start_s)
    return max(0.0, overlap) / span if span > 0 else 0.0


def rulers(timings: Iterable[RequestTiming], window: Window, deltas: Deltas) -> Rulers:
    """The same window by every ruler but the logger's."""
    touching = [(timing, share) for timing in timings if (share := share_in(timing, window)) > 0]
    seconds = window.seconds
    tokens = deltas.generation_tokens
    told = [timing.completion_tokens for timing, _ in touching]
    usage = (
        sum((timing.completion_tokens or 0) * share for timing, share in touching) / seconds
        if told and None not in told
        else None
    )
    streamed = [timing for timing, _ in touching if timing.chunk_at_s]
    return Rulers(
        counter=None if tokens is None else tokens / seconds,
        usage=usage,
        chunks=sum(chunks_in(timing, window) for timing in streamed) / seconds if streamed else None,
        words=sum(timing.words * share for timing, share in touching) / seconds if touching else None,
    )


def with_logger(rulers: Rulers, samples: Iterable[tuple[float, float]], window: Window) -> Rulers:
    """Add what somebody who watches the engine's log would have noted for this window.

    `samples` are (epoch seconds of the line, tok/s it says). Each line speaks of a free-running interval that ends at
    the line, so it is right in what it counts and wrong in its window: the ones stamped inside our window are averaged
    as they stand, ramp and idle time included. When none is, the first line after the window is taken, if its
    interval reaches back into it; its interval is taken to begin at the line before it. Else there is none.
    """
    ordered = sorted(samples)
    inside = [rate for at, rate in ordered if window.started_at < at <= window.ended_at]
    if inside:
        return replace(rulers, logger=sum(inside) / len(inside))
    after = bisect_right([at for at, _ in ordered], window.ended_at)
    reaches = 0 < after < len(ordered) and ordered[after - 1][0] < window.ended_at
    return replace(rulers, logger=ordered[after][1] if reaches else None)


# --- quantiles -------------------------------------------------------------------------------------------------------


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Linear between the two nearest ranks, as numpy's default."""
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def quantiles(values_s: Iterable[float]) -> Quantiles:
    """Quantiles in milliseconds of durations in seconds."""
    ordered = sorted(values_s)
    if not ordered:
        return Quantiles()
    p50, p90, p99 = (_quantile(ordered, q) * 1e3 for q in (0.5, 0.9, 0.99))
    return Quantiles(n=len(ordered), p50=p50, p90=p90, p99=p99, max=ordered[-1] * 1e3)


def latencies(timings: Iterable[RequestTiming], window: Window) -> tuple[Quantiles, Quantiles, Quantiles]:
    """(TTFT, ITL, end to end) of successful requests.

    TTFT of those sent inside the window; ITL as each single gap between two chunks with text that ended inside it, so
    that a stall stands in its p99 (under speculation a gap brings several tokens); end to end of those ended inside.
    """
    ttft: list[float] = []
    gaps: list[float] = []
    e2e: list[float] = []
    for timing in timings:
        if timing.error is not None:
            continue
        if timing.ttft_s is not None and window.start_s <= timing.sent_at_s <= window.end_s:
            ttft.append(timing.ttft_s)
        if window.start_s < timing.ended_at_s <= window.end_s:
            e2e.append(timing.ended_at_s - timing.sent_at_s)
        at = timing.chunk_at_s
        first = max(1, bisect_left(at, window.start_s))
        gaps.extend(at[i] - at[i - 1] for i in range(first, bisect_right(at, window.end_s)))
    return quantiles(ttft), quantiles(gaps), quantiles(e2e)


# --- the ledger of tokens --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Books:
    """Our side of the ledger: finished requests, their tokens (None: an answer told none), and what is uncertain.

    `open_requests` failed or were given up: the server may have counted each as finished or not, with at most
    `open_tokens` tokens in all.
    """

    requests: int
    tokens: int | None
    open_requests: int
    open_tokens: int


def books(timings: Sequence[RequestTiming], output_tokens: int) -> Books:
    """Add up our requests. One that was refused before it began (4xx, no connection) may have made no token."""
    done = [timing for timing in timings if timing.error is None]
    never_began = ("connection_refused", "connect_", "tls", "redirect", "http_4")
    unsure = [t for t in timings if t.error is not None and not t.error.startswith(never_began)]
    told = [timing.completion_tokens for timing in done]
    tokens = None if None in told else sum(count or 0 for count in told)
    return Books(len(done), tokens, len(unsure), output_tokens * len(unsure))


def settled(before: Snapshot, now: Snapshot, ours: Books) -> bool:
    """Whether the server's books have caught up with ours: nothing runs, and its counter says what the answers said."""
    if now.busy not in (None, 0):
        return False
    if ours.tokens is None or now.generation_tokens is None or before.generation_tokens is None:
        return True
    return now.generation_tokens - before.generation_tokens >= ours.tokens


def audit(whole: Deltas, before: Snapshot, after: Snapshot, ours: Books) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compare the server's books with ours over the whole trial, idle to idle: (invalid reasons, warnings)."""
    invalid: list[str] = []
    warned: list[str] = []
    if whole.counter_reset:
        return ("counter_reset: the server's counters began anew during the trial",), ()
    # What we gave up may still be on its way out of the server.
    for when, snapshot, ours_still in (("before our first", before, 0), ("after our last", after, ours.open_requests)):
        if snapshot.busy is None:
            warned.append(f"the server does not tell whether requests ran {when} request")
        elif snapshot.busy > ours_still:
            strangers = snapshot.busy - ours_still
            invalid.append(f"foreign_traffic: {strangers:.0f} requests ran {when} request")
    if whole.generation_tokens is None:
        invalid.append("no_counter: the server exports no vllm:generation_tokens_total")
        return tuple(invalid), tuple(warned)
    invalid += _strangers(whole, whole.generation_tokens, ours, warned)
    return tuple(invalid), tuple(warned)


def _strangers(whole: Deltas, counted: float, ours: Books, warned: list[str]) -> list[str]:
    finished = sum(whole.requests_by_reason.values()) if whole.requests_by_reason else None
    foreign = None if finished is None else finished - ours.requests
    if finished is None:
        warned.append("the server does not count finished requests: only tokens are compared")
    tokens = None if ours.tokens is None else counted - ours.tokens
    if ours.tokens is None:
        warned.append("an answer held no usage: only requests are compared")
    many = (foreign or 0) > ours.open_requests or (tokens or 0) > ours.open_tokens
    if many:
        who = "an unknown number of" if foreign is None else f"{max(0.0, foreign - ours.open_requests):.0f}"
        what = "an unknown number of" if tokens is None else f"{max(0.0, tokens):.0f}"
        return [f"foreign_traffic: {who} requests and {what} tokens were not ours"]
    if (foreign or 0) < 0 or (tokens or 0) < 0:
        theirs = f"{'?' if finished is None else round(finished)} requests and {counted:.0f} tokens"
        return [f"ledger: the server counted {theirs}, our answers say {ours.requests} and {ours.tokens}"]
    return []


def prefix_hits(
    whole: Deltas, requests: int, template_tokens: float, *, own: Literal["once", "repeated"] | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(invalid reasons, warnings) of prefix-cache hits.

    `template_tokens` is what all prompts share by the template; `own`: they are the user's, who may want hits.
    """
    queries, hits = whole.prefix_cache_queries, whole.prefix_cache_hits
    if not queries or not hits or hits / queries < PREFIX_HITS_INVALID:
        return (), ()
    said = f"{hits / queries:.1%} of the prompt tokens came from the prefix cache"
    if hits <= template_tokens * requests:
        return (), (f"{said}, all within the chat template that every prompt shares",)
    if own == "repeated":
        return (), (f"{said}: prompts were repeated on purpose, these are not the speeds of new ones",)
    if own == "once":
        return (), (f"{said}: prompts of the file begin alike",)
    return (f"prefix_cache: {said}; our prompts are unique (limit {PREFIX_HITS_INVALID:.0%})",), ()
