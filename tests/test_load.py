"""A trial against a real server whose truth is known: what it measures, what it refuses to call a measurement."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import socket
import threading
import time

import pytest
from stub_engine import Answering, Engine, serve

from orchestrator import client as http
from orchestrator import load, rulers
from orchestrator.load import Load, Scale, Target
from orchestrator.records import TrialEnded
from orchestrator.streams import Streams

# 12 tokens: 10 ms to the first, 5 ms a chunk: a request of one token a chunk lasts 10 + 11 · 5 = 65 ms.
SHORT = Load(input_tokens=32, output_tokens=12, window_s=0.2, warmup_s=0.0, max_warmup_s=5.0, request_timeout_s=3.0)


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch):
    """Requests of 65 ms make much of a few ms of lateness, and this machine may be busy: health has its own tests."""
    monkeypatch.setattr(rulers, "LOST_SHARE_INVALID", 0.9)


def trial(
    engine: Engine, spec: Load = SHORT, *, concurrency: int = 2, seed: str = "s", deadline_s: float = 20.0, **more
):
    with serve(engine):
        return load.run_trial(
            Target(engine.url, "m"), spec, concurrency=concurrency, seed=seed, deadline_s=deadline_s, **more
        )


def always(**how) -> Engine:
    return Engine(answering=lambda _number, _body: Answering(**how))


def kinds(reasons) -> list[str]:
    return [reason.partition(":")[0] for reason in reasons]


# --- what it measures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_throughput_is_the_counters_and_the_books_agree_to_the_token(stream, endpoint):
    engine = always()
    result = trial(engine, dataclasses.replace(SHORT, stream=stream, endpoint=endpoint), concurrency=4)
    assert (result.valid, result.invalid_reasons, result.failed, result.errors) == (True, (), False, {})
    assert result.client_tokens == engine.generated == result.whole.generation_tokens
    assert result.requests_sent == result.requests_ok == sum(engine.finished.values()) == len(engine.requests)
    # Four streams, 12 tokens in 65 ms each; the stub's own lateness only takes away.
    assert 0.5 * 4 * 12 / 0.065 < result.tokens_per_s <= 1.08 * 4 * 12 / 0.065
    assert result.tokens_per_s == pytest.approx(result.tokens / result.window_s)
    assert 0.9 * 0.2 <= result.window_s < 0.2 * 1.5 + 0.2
    assert engine.most_running == 4


def test_the_rulers_stand_side_by_side_with_their_true_distortions():
    # 4 tokens a chunk, a new word every 2nd token (the answers' pieces are joined before words are counted).
    result = trial(always(per_chunk=4, gap_s=0.02, word_every=2), concurrency=2)
    found = result.rulers
    assert found.counter == result.tokens_per_s
    assert found.usage / found.counter == pytest.approx(1, abs=0.15)
    assert found.chunks / found.usage == pytest.approx(1 / 4, rel=1e-6)
    assert found.words / found.usage == pytest.approx(1 / 2, rel=1e-6)
    assert found.logger is None


def test_words_are_counted_over_the_joined_text_and_not_per_chunk():
    result = trial(always(per_chunk=1, word_every=3), concurrency=1)
    assert result.rulers.words / result.rulers.usage == pytest.approx(1 / 3, rel=1e-6)
    assert result.rulers.chunks / result.rulers.usage == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("window_s", [0.25, 0.3, 0.35, 0.4])
def test_a_window_of_few_requests_holds_whole_ones(window_s):
    # 12 tokens in 120 ms to the first and 55 ms after it. Cut anywhere, 0.3 s would hold 12 to 24 of 20.6 tokens.
    spec = dataclasses.replace(SHORT, window_s=window_s)
    result = trial(always(ttft_s=0.12, gap_s=0.005), spec, concurrency=1)
    assert result.tokens in (12, 24, 36)
    assert result.tokens_per_s == pytest.approx(12 / 0.175, rel=0.3)


def test_a_window_of_few_tokens_begins_and_ends_at_one():
    # A token every 60 ms, 2.4 s a request: 8 or 9 tokens in half a second, by luck, were the ends not at tokens.
    spec = dataclasses.replace(SHORT, output_tokens=40, window_s=0.5, max_warmup_s=0.1)
    result = trial(always(gap_s=0.06), spec, concurrency=1)
    assert 7 <= result.tokens <= 11
    assert result.tokens_per_s == pytest.approx(1 / 0.06, rel=0.06)


@pytest.mark.parametrize(("wanted", "concurrency"), [(1, 1), (7, 1), (9, 3), (20, 4)])
def test_a_window_of_so_many_requests_holds_them_and_at_most_one_a_stream_more(wanted, concurrency):
    # window_s is not looked at: 0.2 s would hold 3 requests of 65 ms a stream.
    spec = dataclasses.replace(SHORT, window_requests=wanted, window_s=60)
    result = trial(always(), spec, concurrency=concurrency)
    window = result.window
    ended = [timing for timing in result.timings if window.start_s < timing.ended_at_s <= window.end_s]
    assert result.valid
    # One that ends while the counters are read may stand on either side.
    assert wanted - 1 <= len(ended) <= wanted + concurrency
    assert result.tokens == pytest.approx(12 * wanted, abs=12 * concurrency)


def test_a_window_in_requests_keeps_all_streams_busy():
    result = trial(always(), dataclasses.replace(SHORT, window_requests=18), concurrency=3)
    window = result.window
    busy = sum(
        max(0.0, min(timing.ended_at_s, window.end_s) - max(timing.sent_at_s, window.start_s))
        for timing in result.timings
    )
    assert busy / (3 * window.seconds) > 0.97


def test_a_window_in_requests_that_is_never_full_is_the_deadlines_and_says_how_far_it_came():
    spec = dataclasses.replace(SHORT, window_requests=10_000)
    result = trial(always(), spec, deadline_s=1.0)
    assert (result.failed, result.errors, result.tokens_per_s) == (True, {"deadline": 1}, None)
    assert re.search(r"within 1 s; \d+ of 10000 requests had ended", result.error_examples["deadline"])


def test_a_window_in_requests_ends_when_requests_fail():
    engine = Engine(answering=lambda number, _body: Answering(status=500) if number == 8 else Answering())
    spec = dataclasses.replace(SHORT, window_requests=10_000)
    result = trial(engine, spec, deadline_s=20)
    assert (result.failed, result.errors) == (True, {"http_500": 1})
    assert result.seconds < 8


def test_latencies_are_the_servers():
    result = trial(always(ttft_s=0.05, gap_s=0.02), dataclasses.replace(SHORT, window_s=0.6), concurrency=1)
    # Times are never less than what the stub waits; how much more depends on how busy this machine is.
    assert 50 <= result.ttft_ms.p50 < 100
    assert 17 <= result.itl_ms.p50 < 40
    assert 50 + 11 * 20 <= result.e2e_ms.p50 < 400
    assert result.ttft_ms.n >= 2


def test_messages_are_written_one_at_a_time_with_a_look_at_the_sockets_between_them():
    order: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        one = Streams(http.Client(Target("http://127.0.0.1:9", "m")), SHORT, 4, seed="s", scale=Scale())
        message = one._message
        one._message = lambda stream, number: order.append(f"{stream}.{number}") or message(stream, number)
        ours, theirs = socket.socketpair()
        ours.settimeout(0)
        loop.add_reader(ours, lambda: order.append(ours.recv(1).decode()))
        for stream in range(4):  # all streams send at once, and a chunk comes in
            one._write_later(stream, 1)
        theirs.send(b"!")
        taken = one._written(3)  # this stream's answer is over before its turn came
        for _ in range(100):
            await asyncio.sleep(0)
        loop.remove_reader(ours)
        ours.close()
        theirs.close()
        assert taken[1] == SHORT.output_tokens
        assert sorted(one._coming) == [0, 1, 2]

    http.run(main())
    assert order[0] == "3.1"
    assert sorted(order) == ["!", "0.1", "1.1", "2.1", "3.1"]
    assert order.index("!") <= 2  # not after all of them


def test_first_requests_are_staggered_and_all_later_ones_have_the_full_length():
    engine = always()
    trial(engine, concurrency=4)
    lengths = [body["max_tokens"] for body in engine.requests]
    assert sorted(lengths[:4]) == [3, 6, 9, 12]
    assert set(lengths[4:]) == {12}


def test_the_window_begins_when_each_stream_has_finished_a_request():
    result = trial(always(), concurrency=3)
    before = [timing for timing in result.timings if timing.ended_at_s <= result.window.start_s]
    assert len(before) >= 3
    inside = [timing for timing in result.timings if timing.sent_at_s > result.window.start_s]
    assert min(timing.completion_tokens for timing in inside) == 12


def test_all_streams_are_busy_from_the_first_read_to_the_second():
    result = trial(always(), concurrency=3)
    window = result.window
    busy = sum(
        max(0.0, min(timing.ended_at_s, window.end_s) - max(timing.sent_at_s, window.start_s))
        for timing in result.timings
    )
    assert busy / (3 * window.seconds) > 0.97


def test_no_prompt_is_sent_twice_and_the_seed_decides():
    def prompts(seed: str, concurrency: int) -> list[str]:
        engine = always(gap_s=0.002)
        trial(engine, dataclasses.replace(SHORT, window_s=0.1), seed=seed, concurrency=concurrency)
        return [body["messages"][0]["content"] for body in engine.requests]

    first, again, other, level = prompts("a", 2), prompts("a", 2), prompts("b", 2), prompts("a", 3)
    assert len(set(first)) == len(first) > 5
    assert set(first[:4]) & set(again[:4])
    assert not set(first) & set(other)
    assert not set(first) & set(level)
    beginnings = {" ".join(prompt.split()[:4]) for prompt in first + other + level}
    assert len(beginnings) == len(first + other + level)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("tokens", [64, 512, 7900])
def test_prompts_have_exactly_the_tokens_that_were_asked_for(endpoint, tokens):
    engine = always(gap_s=0.001)
    engine.tokenizer = "pieces"
    result = trial(engine, dataclasses.replace(SHORT, input_tokens=tokens, endpoint=endpoint))
    assert {timing.prompt_tokens for timing in result.timings} == {tokens}
    assert not any("prompts have" in warning for warning in result.warnings)


def test_where_the_tokenizer_shows_no_ids_lengths_are_right_on_average():
    engine = always()  # two tokens a word and five around it
    result = trial(engine, dataclasses.replace(SHORT, input_tokens=405))
    assert {timing.prompt_tokens for timing in result.timings} == {405}


def test_prompts_that_do_not_fit_are_cut_with_a_warning_that_names_the_number_and_no_request_is_refused():
    engine = always()
    engine.tokenizer, engine.max_model_len = "pieces", 512
    result = trial(engine, dataclasses.replace(SHORT, input_tokens=512))
    assert (result.valid, result.errors) == (True, {})
    assert {timing.prompt_tokens for timing in result.timings} == {500}
    said = "prompts have 500 tokens, not 512: with answers of 12 more do not fit into the model's 512 (max_model_len)"
    assert said in result.warnings


def test_answers_that_leave_no_room_for_a_prompt_are_told_before_anything_is_sent():
    engine = always()
    engine.tokenizer, engine.max_model_len = "pieces", 12
    result = trial(engine)
    assert result.invalid_reasons == ("too_long: answers of 12 tokens leave no room in 12",)
    assert engine.requests == []


def test_a_server_without_a_tokenizer_is_known_by_the_usage_of_two_requests():
    engine = always(gap_s=0.001)
    engine.tokenizer = "none"
    with serve(engine):
        target = Target(engine.url, "m")
        scale = load.calibrate(target)
        asked, calls = len(engine.requests), engine.tokenized
        spec = dataclasses.replace(SHORT, input_tokens=405)
        result = load.run_trial(target, spec, concurrency=2, seed="s", deadline_s=20, scale=scale)
    assert scale == Scale(2.0, 5.0, measured=True, max_model_len=32768)
    assert (asked, calls) == (2, 1)
    assert {timing.prompt_tokens for timing in result.timings} == {405}
    assert engine.tokenized == calls


def test_a_trial_that_is_given_the_scale_asks_no_tokenizer():
    with serve(always()) as engine:
        target = Target(engine.url, "m")
        scale = load.calibrate(target)
        calls = engine.tokenized
        for concurrency in (1, 2):
            load.run_trial(target, SHORT, concurrency=concurrency, seed="s", deadline_s=20, scale=scale)
        load.probe(target, prompt_tokens=1005, output_tokens=2, n=3, deadline_s=5, scale=dataclasses.replace(scale))
    assert engine.tokenized - calls <= 3  # the long ones, by a table that is none, are looked at


def own(*, repeat: bool = False, many: int = 400) -> load.OwnPrompts:
    return load.OwnPrompts([f"question {number} of the user" for number in range(many)], "s", repeat=repeat)


def test_the_users_prompts_are_sent_as_they_stand_and_once_in_all_trials_of_a_boot():
    prompts = own()
    with serve(always(gap_s=0.002)) as engine:
        target = Target(engine.url, "m")
        for concurrency in (1, 3):
            spec = dataclasses.replace(SHORT, window_s=0.1)
            result = load.run_trial(target, spec, concurrency=concurrency, seed="s", deadline_s=20, prompts=prompts)
            assert result.valid
            assert not any("of the file" in warning for warning in result.warnings)
    said = [body["messages"][0]["content"] for body in engine.requests]
    assert len(set(said)) == len(said) > 10
    assert all(one.startswith("question ") for one in said)


@pytest.mark.parametrize("repeat", [False, True])
def test_a_file_of_few_prompts_is_sent_again_and_the_trial_says_how_often_and_how(repeat):
    prompts = own(many=3, repeat=repeat)
    engine = always(gap_s=0.002)
    result = trial(engine, prompts=prompts)
    said = [body["messages"][0]["content"] for body in engine.requests]
    assert (len(set(said)) == len(said)) is not repeat
    how = "as it is" if repeat else "behind a serial of its own"
    assert re.fullmatch(rf"\d+ requests sent a prompt of the file again, {how}: the file has 3", result.warnings[-1])


@pytest.mark.parametrize("repeat", [False, True])
def test_prefix_hits_of_the_users_own_prompts_disturb_nothing_and_are_said(repeat):
    result = trial(with_hits(10), prompts=own(repeat=repeat))
    assert result.valid
    says = "prompts were repeated on purpose" if repeat else "prompts of the file begin alike"
    assert any(says in warning for warning in result.warnings)


def test_the_users_prompts_that_do_not_fit_are_found_before_any_is_sent():
    prompts = ["short", "w " * 300, "x" * 2000, "w " * 260]
    with serve(always()) as engine:
        engine.max_model_len = 512
        target = Target(engine.url, "m")
        scale = load.calibrate(target)
        calls = engine.tokenized
        found = load.too_long(target, prompts, scale, endpoint="chat", output_tokens=12, deadline_s=5)
    # 2 tokens a word and 5 around it, 500 of room: 605 and 525. One word of 2000 letters has to be counted, too.
    assert found == {1: 605, 3: 525}
    assert engine.tokenized - calls == 3
    assert engine.requests == []


def test_connections_are_opened_before_the_window_and_kept():
    engine = always()
    trial(engine, concurrency=3)
    assert len(engine.connections) == 3


def test_between_trials_hardly_any_time_is_lost():
    with serve(always()) as engine:
        began = time.monotonic()
        result = load.run_trial(Target(engine.url, "m"), SHORT, concurrency=2, seed="s", deadline_s=20)
        took = time.monotonic() - began
    first = min(timing.sent_at_s for timing in result.timings)
    last = max(timing.ended_at_s for timing in result.timings)
    # Measured 10-20 ms on an idle machine; the bound leaves room for a busy one.
    assert took - (last - first) < 0.4


def test_it_becomes_a_record():
    result = trial(always(), concurrency=1)
    start = result.window.started_at
    lines = [(start + 0.1, 80.0), (start + 0.15, 100.0), (start + 60, 7.0)]
    fields = load.to_record_fields(result, lines)
    key = {"boot": "b01-x", "variant": "x", "cache": "cold", "block": 1, "position": 1}
    record = TrialEnded(**key, **fields)
    assert record.tokens_per_s == result.tokens_per_s
    assert record.rulers.logger == 90.0
    assert record.window_started_at.endswith("Z")
    assert abs(start - time.time()) < 60


def test_two_engines_are_summed():
    engine = Engine(engines=2)
    result = trial(engine)
    assert result.client_tokens == engine.generated == result.whole.generation_tokens


# --- what the variant did wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ({"status": 500}, "http_500"),
        ({"status": 503}, "http_503"),
        ({"cut_after": 3}, "cut_stream"),
        ({"cut_after": 3, "half": True}, "cut_stream"),
        ({"error_after": 3}, "error_chunk"),
        ({"finish": "abort"}, "abort"),
        ({"no_done": True}, "cut_stream"),
    ],
)
def test_one_bad_answer_fails_the_trial_and_has_a_name(how, kind):
    engine = Engine(answering=lambda number, _body: Answering(**how) if number == 5 else Answering())
    result = trial(engine)
    assert result.failed
    assert result.errors == {kind: 1}
    assert result.tokens_per_s is None
    assert result.requests_sent - result.requests_ok == 1
    assert result.invalid_reasons == ()
    assert result.error_examples[kind]


def test_a_server_that_only_answers_500_is_not_hammered():
    engine = always(status=500)
    began = time.monotonic()
    result = trial(engine, concurrency=8)
    assert (result.failed, result.tokens_per_s, result.window) == (True, None, None)
    assert set(result.errors) == {"http_500"}
    assert 8 <= len(engine.requests) == result.errors["http_500"] <= 24
    assert time.monotonic() - began < 3


def test_500_for_some_shows_how_many_and_ends_soon():
    engine = Engine(answering=lambda number, _body: Answering(status=500) if number % 3 == 2 else Answering())
    result = trial(engine, concurrency=4)
    assert result.failed
    assert result.errors["http_500"] >= 2
    assert result.requests_ok >= 4
    assert result.invalid_reasons == ()


def test_a_stall_ends_with_the_requests_own_time_out():
    spec = dataclasses.replace(SHORT, request_timeout_s=0.4)
    engine = Engine(answering=lambda number, _body: Answering(stall_after=2 if number >= 3 else None))
    result = trial(engine, spec)
    assert result.failed
    assert result.errors["timeout"] >= 2
    assert "2 chunks came" in result.error_examples["timeout"]


def test_an_engine_that_gives_no_token_is_given_up_after_the_warm_up():
    spec = dataclasses.replace(SHORT, max_warmup_s=0.3, window_s=0.2)
    result = trial(always(stall_after=0), spec)
    assert (result.failed, result.tokens_per_s) == (True, None)
    assert "stall" in result.errors
    assert result.seconds < 6


def test_an_engine_that_dies_in_the_trial_ends_it():
    engine = always()
    over = threading.Event()

    def die() -> None:
        with serve(engine):
            over.wait(10)

    server = threading.Thread(target=die)
    server.start()
    while not engine.url and server.is_alive():
        over.wait(0.01)
    timer = threading.Timer(0.3, over.set)
    timer.start()
    result = load.run_trial(
        Target(engine.url, "m"), dataclasses.replace(SHORT, window_s=3), concurrency=2, seed="s", deadline_s=20
    )
    server.join(10)
    assert (result.failed, result.tokens_per_s) == (True, None)
    assert set(result.errors) <= {"cut_stream", "connection_refused", "connection_lost"}
    assert result.errors["connection_refused"] >= 2
    assert result.seconds < 3


def test_nobody_listens():
    result = load.run_trial(Target("http://127.0.0.1:9", "m"), SHORT, concurrency=2, seed="s", deadline_s=5)
    assert (result.failed, result.errors, result.requests_sent) == (True, {"connection_refused": 1}, 0)
    assert result.seconds < 1


# --- what the rig did wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ({"status": 404}, "http_404"),
        ({"status": 401}, "http_401"),
        ({"html": True}, "not_sse"),
        ({"redirect": "http://127.0.0.1:9/"}, "redirect"),
    ],
)
def test_a_wrong_answer_that_is_not_the_variants_fault_is_disturbed_and_not_failed(how, kind):
    result = trial(always(**how))
    assert (result.valid, result.failed, result.tokens_per_s) == (False, False, None)
    assert kind in kinds(result.invalid_reasons)
    assert result.seconds < 3


@pytest.mark.parametrize(
    ("metrics", "what"),
    [
        ("none", "is not there (404)"),
        ("html", "answered HTML"),
        ("key", "wants a key"),
        ("other", "exports no vllm:generation_tokens_total"),
    ],
)
def test_no_counter_no_measurement(metrics, what):
    engine = Engine(metrics=metrics)
    result = trial(engine)
    assert (result.valid, result.failed, result.tokens_per_s, len(engine.requests)) == (False, False, None, 0)
    assert what in result.invalid_reasons[0]


def test_a_model_that_the_server_does_not_have_is_named_and_nothing_is_measured():
    began = time.monotonic()
    result = trial(Engine(model="qwen"))
    assert (result.valid, result.failed, result.tokens_per_s) == (False, False, None)
    (reason,) = result.invalid_reasons
    assert re.fullmatch(r"http_404: \d+ requests: The model `m` does not exist\.", reason)
    assert time.monotonic() - began < 5


CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n<html>Welcome to nginx!</html>",
        b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}",
        CHUNKED + b'20\r\n{"count": 3, "tok',
        CHUNKED + b"12\r\n" + b'{"count": "many"} ' + b"\r\n0\r\n\r\n",
        CHUNKED + b"2\r\n[]\r\n0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
    ids=["nothing", "html", "401", "half a chunk", "no number", "a list", "ssh"],
)
@pytest.mark.parametrize("stall", [False, True])
def test_whatever_answers_in_the_tokenizers_place_the_length_of_text_is_guessed_by_the_deadline(said, stall):
    over = threading.Event()

    def answer(listener: socket.socket) -> None:
        held = []
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                peer, _ = listener.accept()
                peer.recv(1 << 16)
                peer.sendall(said)
                if stall:
                    held.append(peer)
                else:
                    peer.close()
        for peer in held:
            peer.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        server = threading.Thread(target=answer, args=(listener,))
        server.start()
        target = Target(f"http://127.0.0.1:{listener.getsockname()[1]}", "m")
        began = time.monotonic()
        scale = load.calibrate(target, deadline_s=0.5)
        took = time.monotonic() - began
        long = load.too_long(
            target, ["x" * 9000], Scale(max_model_len=99), endpoint="chat", output_tokens=9, deadline_s=0.5
        )
        over.set()
        server.join(10)
    assert scale == Scale()
    assert long == {}
    assert took < 2


def test_a_counter_that_goes_away_during_the_trial():
    engine = Engine()

    def answer(number, _body):
        if number == 3:
            engine.metrics = "html"
        return Answering()

    engine.answering = answer
    result = trial(engine)
    assert (result.valid, result.failed, result.tokens_per_s) == (False, False, None)
    assert set(kinds(result.invalid_reasons)) <= {"no_counter", "no_window"}
    assert "answered HTML" in result.invalid_reasons[0]


def test_somebody_elses_running_request_before_ours():
    engine = Engine(running=3)
    result = trial(engine)
    assert result.invalid_reasons == ("foreign_traffic: 3 requests ran before our first request",)
    assert engine.requests == []


def test_a_strangers_finished_requests_are_counted_in_requests_and_tokens():
    engine = Engine()

    def answer(number, _body):
        if number == 4:
            engine.generated += 768
            engine.finished["stop"] += 3
        return Answering()

    engine.answering = answer
    result = trial(engine)
    assert result.invalid_reasons == ("foreign_traffic: 3 requests and 768 tokens were not ours",)
    assert (result.valid, result.failed, result.tokens_per_s) == (False, False, None)


def test_a_stranger_who_still_runs_is_seen_at_the_reads():
    engine = Engine()

    def answer(number, _body):
        if number == 3:
            engine.running += 2
        return Answering()

    engine.answering = answer
    result = trial(engine)
    assert set(kinds(result.invalid_reasons)) == {"foreign_traffic"}


def test_a_restart_under_the_trial():
    engine = Engine()

    def answer(number, _body):
        if number == 5:
            engine.generated, engine.born = 0, engine.born + 60
        return Answering()

    engine.answering = answer
    result = trial(engine)
    assert "counter_reset" in kinds(result.invalid_reasons)
    assert result.tokens_per_s is None


def with_hits(tokens: int) -> Engine:
    engine = Engine()  # template and first two words, which prompts may share: nine tokens

    def answer(_number, _body):
        engine.hits += tokens
        return Answering()

    engine.answering = answer
    return engine


def test_prefix_hits_beyond_the_template_that_all_prompts_share():
    beyond, within = trial(with_hits(10)), trial(with_hits(9))
    assert kinds(beyond.invalid_reasons) == ["prefix_cache"]
    assert beyond.tokens_per_s is None
    assert within.valid
    assert any("chat template" in warning for warning in within.warnings)


def test_answers_without_usage_leave_requests_to_compare():
    result = trial(always(usage=False))
    assert result.valid
    assert (result.client_tokens, result.rulers.usage) == (None, None)
    assert "an answer held no usage: only requests are compared" in result.warnings


# --- ending ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"stall_after": 1}])
def test_a_reason_to_stop_ends_it_within_100_ms(how):
    asked: list[float] = []

    def cancelled() -> str | None:
        asked.append(time.monotonic())
        return "fatal journal entry" if asked[-1] - asked[0] > 0.4 else None

    result = trial(always(**how), dataclasses.replace(SHORT, window_s=5), cancelled=cancelled)
    said = asked[-1]
    assert result.cancelled == "fatal journal entry"
    assert (result.valid, result.invalid_reasons) == (False, ("cancelled: fatal journal entry",))
    assert result.failed is False
    assert max(timing.ended_at_s for timing in result.timings) - said < 0.1


def test_a_server_that_hangs_at_the_tokenizer_delays_no_reason_to_stop():
    asked: list[float] = []

    def cancelled() -> str | None:
        asked.append(time.monotonic())
        return "SIGTERM" if asked[-1] - asked[0] > 0.2 else None

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = load.run_trial(Target(url, "m"), SHORT, concurrency=1, seed="s", deadline_s=20, cancelled=cancelled)
    assert time.monotonic() - asked[0] < 1.0
    assert (result.cancelled, result.requests_sent, result.valid) == ("SIGTERM", 0, False)


def test_nothing_outlives_the_deadline():
    began = time.monotonic()
    result = trial(always(stall_after=1), dataclasses.replace(SHORT, max_warmup_s=60), deadline_s=0.5)
    assert time.monotonic() - began < 2.0
    assert (result.failed, result.errors, result.tokens_per_s) == (True, {"deadline": 1}, None)


def test_a_drain_that_does_not_end_is_the_deadlines():
    engine = Engine(answering=lambda number, _body: Answering(stall_after=3 if number >= 5 else None))
    spec = dataclasses.replace(SHORT, request_timeout_s=60, window_s=0.3)
    result = trial(engine, spec, deadline_s=1.5)
    assert (result.failed, result.tokens_per_s) == (True, None)
    assert result.errors == {"deadline": 1}
    assert result.seconds < 2.5


def test_concurrency_0_is_a_mistake():
    with pytest.raises(ValueError, match="1 or more"):
        load.run_trial(Target("http://127.0.0.1:9", "m"), SHORT, concurrency=0, seed="s", deadline_s=1)


# --- probe, sanity, scale --------------------------------------------------------------------------------------------


def test_probes_go_out_at_once_each_with_a_prompt_of_its_own():
    with serve(always(ttft_s=0.05)) as engine:
        timings = load.probe(
            Target(engine.url, "m"),
            prompt_tokens=1005,
            output_tokens=2,
            n=5,
            deadline_s=5,
            sampling={"temperature": 0.7, "top_p": 0.9},
        )
    assert [timing.error for timing in timings] == [None] * 5
    assert engine.most_running == 5
    assert len({body["messages"][0]["content"] for body in engine.requests}) == 5
    assert all(985 <= timing.prompt_tokens <= 1005 for timing in timings)
    assert (engine.requests[0]["temperature"], engine.requests[0]["top_p"]) == (0.7, 0.9)


@pytest.mark.parametrize(("how", "kind"), [({"status": 500}, "http_500"), ({"stall_after": 0}, "timeout")])
def test_a_probe_that_fails_says_how(how, kind):
    with serve(always(**how)) as engine:
        timings = load.probe(Target(engine.url, "m"), prompt_tokens=16, output_tokens=2, n=2, deadline_s=0.3)
    assert [timing.error.partition(":")[0] for timing in timings] == [kind] * 2


def test_a_probe_is_given_up_when_there_is_a_reason():
    began = time.monotonic()
    with serve(always(stall_after=0)) as engine:
        (timing,) = load.probe(
            Target(engine.url, "m"),
            prompt_tokens=16,
            output_tokens=2,
            deadline_s=30,
            cancelled=lambda: "dead" if time.monotonic() - began > 0.2 else None,
        )
    assert timing.error.startswith("cancelled")
    assert time.monotonic() - began < 2


def test_greedy_answers_have_a_digest_that_only_equal_answers_share():
    def ask(**how) -> load.Greedy:
        with serve(always(gap_s=0.001, **how)) as engine:
            said = load.greedy(Target(engine.url, "m"), output_tokens=24, deadline_s=5)
        assert {body["temperature"] for body in engine.requests} == {0.0}
        assert engine.most_running <= 1
        return said

    one, same, other, dead = ask(), ask(per_chunk=3), ask(word_every=2), ask(status=500)
    assert one.digest == same.digest != other.digest
    assert one.tokens == (24, 24, 24)
    assert (dead.digest, dead.repetition, len(dead.errors)) == (None, None, 3)
    assert one.repetition == pytest.approx(20 / 21)  # "w" 24 times: 21 runs of four words, one of them new
    assert set(one.to_facts()) == {"digest", "repetition", "tokens", "characters", "texts", "errors"}


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ("", 0.0),
        ("one two three four five six seven eight nine", 0.0),
        ("!!!!!!!!!!!!", 8 / 9),
        ("a b c d " * 5, 13 / 17),
    ],
)
def test_repetition(said, share):
    assert load.repetition(said) == pytest.approx(share)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_scale_is_the_servers(endpoint):
    with serve(Engine(template_tokens=11)) as engine:
        scale = load.calibrate(Target(engine.url, "m"), endpoint=endpoint)
    assert scale == Scale(2.0, 11.0, measured=True, template_tokens=15, max_model_len=32768)
    assert engine.requests == []


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_tokenizer_that_shows_ids_gives_a_table_of_every_word(endpoint):
    with serve(Engine(template_tokens=11, tokenizer="pieces")) as engine:
        scale = load.calibrate(Target(engine.url, "m"), endpoint=endpoint)
    assert (scale.exact, scale.overhead_tokens, scale.template_tokens) == (True, 11, 13)
    assert (scale.cost("reason"), scale.cost("It"), scale.cost("storm,")) == (2, 1, 3)
    assert engine.tokenized <= 12
