"""Rulers, quantiles, client health and the books, from made-up requests whose sums can be done by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import rulers as measure
from orchestrator.records import Deltas, RequestTiming, Rulers
from orchestrator.rulers import Window, audit, books, health, latencies, prefix_hits, quantiles, rulers, with_logger
from orchestrator.scrape import Snapshot

WINDOW = Window(start_s=10.0, end_s=20.0, started_at=1000.0, ended_at=1010.0)


def request(*chunks: float, sent: float | None = None, tokens: int | None = 0, words: int = 0, error=None, ended=None):
    sent = (chunks[0] - 1.0) if sent is None else sent
    return RequestTiming(
        sent_at_s=sent,
        ended_at_s=(chunks[-1] if chunks else sent) if ended is None else ended,
        first_token_at_s=chunks[0] if chunks else None,
        chunk_at_s=chunks,
        prompt_tokens=1,
        completion_tokens=tokens,
        chunks=len(chunks),
        words=words,
        finish_reason=None if error else "length",
        status=200,
        error=error,
    )


# --- rulers ----------------------------------------------------------------------------------------------------------


def test_each_ruler_by_hand():
    timings = [
        request(8.0, 9.0, 11.0, 12.0, tokens=8, words=6),  # two of four chunks inside: 4 tokens, 3 words
        request(13.0, 14.0, tokens=6, words=4),  # all inside
        request(19.0, 21.0, tokens=4, words=2),  # half inside: 2 tokens, 1 word
        request(22.0, 23.0, tokens=9, words=9),  # after it
    ]
    found = rulers(timings, WINDOW, Deltas(seconds=10, generation_tokens=13))
    assert found == Rulers(counter=1.3, usage=1.2, chunks=0.5, words=0.8)


def test_not_streamed_answers_are_spread_over_their_time():
    timings = [request(sent=5.0, ended=15.0, tokens=10, words=6), request(sent=19.0, ended=29.0, tokens=10, words=5)]
    found = rulers(timings, WINDOW, Deltas(seconds=10, generation_tokens=6))
    assert (found.usage, found.chunks, found.words) == (pytest.approx(0.6), None, pytest.approx(0.35))


def test_what_is_not_known_is_none():
    timings = [request(11.0, tokens=None, words=1), request(12.0, tokens=3, words=1)]
    found = rulers(timings, WINDOW, Deltas(seconds=10))
    assert (found.counter, found.usage, found.chunks, found.words) == (None, None, 0.2, 0.2)
    assert rulers([], WINDOW, Deltas(seconds=10)) == Rulers()


@given(st.lists(st.lists(st.floats(0, 30), min_size=1, max_size=9).map(sorted), max_size=8), st.floats(0, 30))
def test_two_neighbouring_windows_share_no_chunk_and_lose_none(arrivals, cut):
    timings = [request(*chunks, tokens=len(chunks)) for chunks in arrivals]
    whole = Window(-1.0, 31.0, 0, 0)
    first, second = Window(-1.0, cut, 0, 0), Window(cut, 31.0, 0, 0)
    for timing in timings:
        parts = measure.chunks_in(timing, first) + measure.chunks_in(timing, second)
        assert parts == measure.chunks_in(timing, whole) == timing.chunks


# --- the logger ------------------------------------------------------------------------------------------------------


def logger(*samples: tuple[float, float]) -> float | None:
    return with_logger(Rulers(counter=1.0), samples, WINDOW).logger


def test_the_loggers_lines_inside_the_window_are_averaged_as_they_stand():
    assert logger((999, 1.0), (1003, 300.0), (1008, 340.0), (1013, 9.0)) == 320.0


def test_a_line_whose_interval_reaches_back_into_the_window_is_taken_when_none_is_inside():
    assert logger((998.0, 7.0), (1011.0, 250.0), (1021.0, 1.0)) == 250.0


def test_no_line_no_value():
    assert logger() is None
    assert logger((998.0, 7.0)) is None
    assert logger((1011.0, 250.0)) is None
    assert with_logger(Rulers(counter=1.0, words=0.7), [], WINDOW) == Rulers(counter=1.0, words=0.7)


# --- quantiles -------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=60))
def test_quantiles_are_numpys(values):
    found = quantiles(values)
    assert (found.p50, found.p90, found.p99) == pytest.approx(tuple(np.quantile(values, (0.5, 0.9, 0.99)) * 1e3))
    assert (found.n, found.max) == (len(values), pytest.approx(max(values) * 1e3))


def test_a_stall_stands_in_the_gaps_and_not_in_a_mean_of_them():
    at, chunks = 11.0, []
    for number in range(150):
        at += 0.22 if number % 50 == 49 else 0.02
        chunks.append(at)
    _, itl, _ = latencies([request(*chunks)], WINDOW)
    assert itl.n == 149
    assert (itl.p50, itl.p99) == (pytest.approx(20), pytest.approx(220))


def test_latencies_speak_of_the_window_and_of_what_succeeded():
    timings = [
        request(9.5, 10.5, 11.5, sent=9.0),  # sent before: no TTFT; two gaps ended inside
        request(12.0, 12.1, sent=11.0),  # TTFT 1 s
        request(15.0, sent=11.0, error="timeout: x"),
        request(19.5, 21.0, sent=19.0),  # TTFT 0.5 s; its gap and its end are outside
    ]
    ttft, itl, e2e = latencies(timings, WINDOW)
    assert (ttft.n, ttft.max, itl.n, e2e.n) == (2, pytest.approx(1000), 3, 2)


# --- our own client --------------------------------------------------------------------------------------------------


def state(**more):
    given = {
        "seconds": 10,
        "cpu_s": 1.0,
        "lags_s": [0.0] * 1000,
        "requests": 100,
        "turnaround_s": 0.0,
        "concurrency": 8,
        "stamped": False,
    }
    return health(**given | more)


def test_a_client_that_keeps_up_has_no_problem():
    assert state().problems() == ((), ())
    assert state(lags_s=[]).problems() == ((), ())


def test_a_client_that_is_late_by_40_ms_a_request_loses_5_percent_of_100_ms_requests():
    late = state(lags_s=[0.04] * 200, requests=101)
    assert late.lost_share == pytest.approx(101 * 0.04 / 80)
    ((reason,), ()) = late.problems()
    assert reason.startswith("client_late: 5.1%")
    assert state(lags_s=[0.04] * 200, requests=41).problems()[1] == (
        "2.1% of the streams' time was lost in our own client",
    )


def test_where_the_kernel_says_when_an_answer_ended_the_lateness_is_in_the_turnaround_already():
    late = state(lags_s=[0.04] * 200, requests=101, turnaround_s=4.04, stamped=True)
    assert late.lost_share == pytest.approx(4.04 / 80)
    ((reason,), ()) = late.problems()
    assert reason.startswith("client_late: 5.1%")
    assert state(lags_s=[0.04] * 200, requests=101, turnaround_s=4.04).lost_share == pytest.approx(8.08 / 80)


def test_one_long_stall_counts_by_its_length_and_not_as_one_tick():
    assert state(lags_s=[0.0] * 999 + [2.0]).lag_mean_ms == pytest.approx(2.0**2 / 20 * 1e3)


def test_a_saturated_client():
    ((reason,), ()) = state(cpu_s=9.6).problems()
    assert reason == "client_saturated: our client used 96% of a core in the window"
    assert state(cpu_s=9.4).problems() == ((), ())


def test_lateness_that_spoils_only_the_latencies_is_a_warning():
    (), (warning,) = state(lags_s=[0.0] * 980 + [0.06] * 20, requests=1).problems()
    assert warning == "event loop late by 60 ms at p99: TTFT and ITL are as much too high"


# --- the books -------------------------------------------------------------------------------------------------------

IDLE = Snapshot(t_s=0.0, running=0.0, waiting=0.0)
DONE = [request(1.0, tokens=12) for _ in range(5)]


def judged(tokens, reasons, timings=DONE, before=IDLE, after=IDLE):
    whole = Deltas(seconds=9, generation_tokens=tokens, requests_by_reason=reasons)
    return audit(whole, before, after, books(timings, 12))


def test_equal_books_are_in_order():
    assert judged(60, {"length": 5, "stop": 0}) == ((), ())


@pytest.mark.parametrize(
    ("tokens", "requests", "reason"),
    [
        (61, 5, "foreign_traffic: 0 requests and 1 tokens were not ours"),
        (60, 6, "foreign_traffic: 1 requests and 0 tokens were not ours"),
        (90, 8, "foreign_traffic: 3 requests and 30 tokens were not ours"),
        (59, 5, "ledger: the server counted 5 requests and 59 tokens, our answers say 5 and 60"),
        (60, 4, "ledger: the server counted 4 requests and 60 tokens, our answers say 5 and 60"),
    ],
)
def test_one_token_or_request_too_many_or_too_few_is_seen(tokens, requests, reason):
    assert judged(tokens, {"length": requests}) == ((reason,), ())


@pytest.mark.parametrize(("tokens", "requests", "good"), [(60, 5, True), (72, 6, True), (73, 6, False), (72, 7, False)])
def test_a_request_that_failed_may_have_made_as_many_tokens_as_it_asked_for(tokens, requests, good):
    timings = [*DONE, request(1.0, tokens=None, error="timeout: stall")]
    invalid, _ = judged(tokens, {"length": 5, "abort": requests - 5}, timings)
    assert (invalid == ()) is good


def test_a_request_that_never_began_made_none():
    timings = [*DONE, request(sent=1.0, tokens=None, error="connection_refused: h:1")]
    assert judged(61, {"length": 5}, timings)[0] == ("foreign_traffic: 0 requests and 1 tokens were not ours",)


def test_what_ran_before_and_after():
    busy = Snapshot(t_s=0.0, running=2.0, waiting=1.0)
    assert judged(60, {"length": 5}, before=busy)[0] == ("foreign_traffic: 3 requests ran before our first request",)
    assert judged(60, {"length": 5}, after=busy)[0] == ("foreign_traffic: 3 requests ran after our last request",)


def test_what_the_server_does_not_tell_is_a_warning_or_no_measurement():
    silent = Snapshot(t_s=0.0)
    invalid, warned = judged(60, {}, before=silent)
    assert invalid == ()
    assert len(warned) == 2
    assert judged(None, {})[0] == ("no_counter: the server exports no vllm:generation_tokens_total",)


def hits(count: float, template: float = 0.0):
    return prefix_hits(Deltas(seconds=1, prefix_cache_queries=5000, prefix_cache_hits=count), 10, template)


def test_prefix_hits_from_one_percent_on_but_not_the_shared_template():
    assert hits(49) == ((), ())
    assert hits(50)[0][0].startswith("prefix_cache: 1.0%")
    invalid, warned = hits(160, template=16)
    assert (invalid, len(warned)) == ((), 1)
    assert hits(161, template=16)[0]
    assert prefix_hits(Deltas(seconds=1), 10, 0) == ((), ())
