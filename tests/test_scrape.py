"""The counters: what a page says, what grew between two, and what answers instead of a page."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_engine import Engine, serve

from orchestrator import scrape
from orchestrator.errors import BoxError, Unreachable
from orchestrator.scrape import Histogram, Sample, delta, parse, read

PAGES = Path(__file__).parent / "data" / "metrics"


def page(name: str) -> str:
    return (PAGES / f"{name}.txt").read_text(encoding="utf-8")


def one(line: str) -> Sample:
    (sample,) = parse(line + "\n")
    return sample


# --- parsing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "name", "labels", "value"),
    [
        ("up 1", "up", {}, 1.0),
        ("up{} 1", "up", {}, 1.0),
        ('x{a="b"} 1.5e3', "x", {"a": "b"}, 1500.0),
        ('x{a="b, c",d="e f"} -2', "x", {"a": "b, c", "d": "e f"}, -2.0),
        ('x{a="}",b="{"} 3', "x", {"a": "}", "b": "{"}, 3.0),
        (r'x{a="say \"hi\"",b="c:\\d",e="two\nlines"} 4', "x", {"a": 'say "hi"', "b": "c:\\d", "e": "two\nlines"}, 4.0),
        ('x{a="b",} 5', "x", {"a": "b"}, 5.0),
        ('x { a = "b" , c = "d" }  6', "x", {"a": "b", "c": "d"}, 6.0),
        ('x{a="b"} 7 1760000000000', "x", {"a": "b"}, 7.0),
        ('x{a="b"} 8 # {trace_id="q} 99"} 0.5 1760000000.123', "x", {"a": "b"}, 8.0),
        ('x{a="# no comment"} 9', "x", {"a": "# no comment"}, 9.0),
        ("x +Inf", "x", {}, math.inf),
        ("x -Inf", "x", {}, -math.inf),
        ("x 10\r", "x", {}, 10.0),
    ],
)
def test_one_line_is_one_sample(line, name, labels, value):
    sample = one(line)
    assert (sample.name, sample.labels, sample.value) == (name, labels, value)


def test_nan_is_a_value_and_is_not_summed():
    assert math.isnan(one("x NaN").value)
    text = 'vllm:generation_tokens_total{engine="0"} NaN\nvllm:generation_tokens_total{engine="1"} 4\n'
    assert read(text, 0.0).generation_tokens == 4


@pytest.mark.parametrize(
    "line", ["", "# HELP x 1", "# x 1", "x", "x{", 'x{a="b} 1', "x{a=b} 1", "x 1e", "x one", "1x 1", "x{} ", "<html> 1"]
)
def test_what_is_no_sample_is_passed_over(line):
    assert [sample.name for sample in parse(f"before 1\n{line}\nafter 2\n")] == ["before", "after"]


def test_the_last_line_of_half_a_page_is_not_read():
    whole = 'vllm:generation_tokens_total{engine="0"} 1234.0\n'
    for cut in range(len(whole)):
        assert list(parse(whole[:cut])) == []
    assert read(whole, 0.0).generation_tokens == 1234


label_values = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)


@given(
    st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), label_values, max_size=4),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_whatever_is_written_by_the_format_is_read_back(labels, value):
    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    inside = ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())
    sample = one(f"vllm:x{{{inside}}} {value!r}")
    assert sample.labels == labels
    assert sample.value == value


@given(st.text(max_size=200))
def test_no_text_upsets_the_parser(text):
    for sample in parse(text):
        assert isinstance(sample.labels, dict)
    read(text, 0.0)


@given(st.text(alphabet='x{}="\\,# \n1aNI+-.e_', max_size=120))
def test_no_text_of_the_formats_own_characters_upsets_the_parser(text):
    for sample in parse(text):
        assert sample.name.strip("_aNIex.") == "" or sample.name
        assert isinstance(sample.labels, dict)


@given(st.integers(0, 3000), st.integers(0, 60), st.sampled_from(['"', "{", "}", "\\", "\n", "#", " ", "NaN", "\x00"]))
def test_a_real_page_with_a_piece_torn_out_or_garbled_is_still_read(start, length, instead):
    text = page("vllm_0.26.0")[-4000:]
    read(text[:start] + instead + text[start + length :], 0.0)


def test_reading_only_the_known_names_finds_what_reading_everything_finds():
    for name in ("vllm_0.26.0", "vllm_0.26.0_dp2", "vllm_0.10.2", "spec"):
        text = page(name)
        assert read(text, 1.0) == scrape.snapshot(parse(text), 1.0)


# --- snapshots -------------------------------------------------------------------------------------------------------


def test_a_real_page_of_0_26():
    now = read(page("vllm_0.26.0"), 0.0)
    assert (now.engines, now.generation_tokens, now.prompt_tokens) == (1, 40, 2)
    assert now.requests_by_reason == {"stop": 0, "length": 1, "abort": 0, "error": 0, "repetition": 0}
    assert (now.running, now.waiting, now.busy, now.kv_usage, now.preemptions) == (0, 0, 0, 0, 0)
    assert (now.prefix_cache_queries, now.prefix_cache_hits) == (2, 0)
    assert now.spec_drafts is None
    assert now.spec_accepted_per_position == ()
    assert now.created["process_start_time_seconds{}"] == 1.79604788681e9


def test_the_stamps_of_creation_are_never_summed():
    now = read(page("vllm_0.26.0"), 0.0)
    assert all(value < 1e6 for value in now.series.values())
    assert len([key for key in now.created if key.startswith("vllm:generation_tokens_created")]) == 1


def test_two_engines_are_summed():
    now = read(page("vllm_0.26.0_dp2"), 0.0)
    assert (now.engines, now.generation_tokens) == (2, 160)
    assert now.requests == 8
    assert [value for key, value in now.series.items() if "generation_tokens" in key] == [80, 80]


def test_names_of_0_10_and_no_family_read_twice():
    now = read(page("vllm_0.10.2"), 0.0)
    assert (now.kv_usage, now.busy) == (0.25, 5)
    assert (now.prefix_cache_queries, now.prefix_cache_hits) == (1000, 16)
    assert now.itl is not None
    assert now.itl.bounds == (0.01, 0.025, math.inf)
    assert now.itl.count == 630


def test_speculation_by_position_over_two_engines_and_kv_use_as_their_mean():
    now = read(page("spec"), 0.0)
    assert (now.spec_drafts, now.spec_draft_tokens, now.spec_accepted_tokens) == (80, 160, 80)
    assert now.spec_accepted_per_position == (57, 23)
    assert now.generation_tokens == 160
    assert now.kv_usage == pytest.approx(0.3)
    assert next(parse(page("spec"))).labels["model_name"] == 'a, "b" {c} \\ d'


def test_what_is_not_exported_is_none():
    now = read("up 1\n", 0.0)
    assert (now.generation_tokens, now.running, now.busy, now.kv_usage, now.ttft) == (None,) * 5
    assert delta(now, now).generation_tokens is None


# --- deltas ----------------------------------------------------------------------------------------------------------


def counters(*tokens: float, born: float = 1.0, extra: str = "") -> str:
    return extra + "".join(
        f'vllm:generation_tokens_total{{engine="{engine}"}} {count}\n'
        f'vllm:generation_tokens_created{{engine="{engine}"}} {born}\n'
        for engine, count in enumerate(tokens)
    )


def test_the_increase_and_its_seconds():
    grown = delta(read(counters(10, 20), 100.0), read(counters(25, 40), 102.5))
    assert (grown.generation_tokens, grown.seconds, grown.counter_reset) == (35, 2.5, False)


@pytest.mark.parametrize(
    ("later", "why"),
    [
        (counters(5, 40), "one engine of two fell, their sum rose"),
        (counters(25), "an engine vanished"),
        (counters(25, 40, born=2.0), "the birth stamp moved although every counter rose"),
    ],
)
def test_a_reset_leaves_no_increase(later, why):
    grown = delta(read(counters(10, 20), 0.0), read(later, 1.0))
    assert grown.counter_reset, why
    assert grown.generation_tokens is None
    assert grown.requests_by_reason == {}


def test_the_same_page_twice_is_no_reset_and_no_increase():
    now = read(page("vllm_0.26.0"), 0.0)
    grown = delta(now, now)
    assert (grown.counter_reset, grown.generation_tokens) == (False, 0)


def test_a_series_that_appears_counts_from_zero():
    born = 'vllm:request_success_total{finished_reason="length"} 3\n'
    grown = delta(read(counters(1), 0.0), read(counters(2, extra=born), 1.0))
    assert grown.requests_by_reason == {"length": 3}
    assert not grown.counter_reset


# --- histograms ------------------------------------------------------------------------------------------------------


def test_a_quantile_names_the_bucket_in_which_the_truth_lies():
    times = Histogram(bounds=(0.01, 0.1, 1.0, math.inf), counts=(50, 90, 99, 100), total=7.0, count=100)
    assert times.quantile(0.5) == pytest.approx((0.01, 0.0, 0.01))
    assert times.quantile(0.7) == pytest.approx((0.01 + 0.09 * 20 / 40, 0.01, 0.1))
    assert times.quantile(0.999) == (1.0, 1.0, math.inf)
    assert times.mean == pytest.approx(0.07)


@given(st.lists(st.floats(0.0001, 20), min_size=1, max_size=80), st.floats(0, 1))
def test_the_true_quantile_lies_in_the_named_bucket(values, q):
    bounds = (0.01, 0.1, 0.5, 1.0, 5.0, math.inf)
    counts = tuple(float(sum(value <= bound for value in values)) for bound in bounds)
    found = Histogram(bounds, counts, math.fsum(values), len(values)).quantile(q)
    assert found is not None
    estimate, lower, upper = found
    assert lower <= estimate <= upper
    true = sorted(values)[max(0, math.ceil(q * len(values)) - 1)]
    assert lower <= true <= upper


def test_histograms_are_compared_only_with_themselves():
    early = Histogram((0.1, math.inf), (1, 2), 0.3, 2)
    late = Histogram((0.1, math.inf), (4, 6), 0.9, 6)
    assert late.minus(early) == Histogram((0.1, math.inf), (3, 4), pytest.approx(0.6), 4)
    assert early.minus(late) is None
    assert Histogram((0.2, math.inf), (4, 6), 0.9, 6).minus(early) is None
    assert Histogram((), (), 0.0, 0).quantile(0.5) is None


# --- the door --------------------------------------------------------------------------------------------------------


def test_fetch_reads_a_live_server_at_the_midpoint_of_its_request():
    with serve(Engine(generated=77, engines=2)) as engine:
        now = scrape.fetch(engine.url, 5)
    assert now.generation_tokens == 77
    assert 0 < now.half_s < 1


@pytest.mark.parametrize(
    ("metrics", "what"), [("none", "disable-log-stats"), ("html", "answered HTML"), ("key", "wants a key")]
)
def test_what_answers_instead_of_a_page_is_named(metrics, what):
    with serve(Engine(metrics=metrics)) as engine, pytest.raises(BoxError, match=what):
        scrape.fetch(engine.url, 5)


def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(Unreachable, match="no connection"):
            scrape.fetch(url, 5)


@contextlib.contextmanager
def raw_server(answer: bytes, *, then_close: bool):
    """Answers one connection with these bytes, then closes or stays silent."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve_one() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(answer)
                if not then_close:
                    over.wait(10)

        thread = threading.Thread(target=serve_one)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            thread.join(10)


def test_half_a_page_is_no_page():
    half = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 500\r\n\r\nvllm:x 1\nvllm:y"
    with raw_server(half, then_close=True) as url, pytest.raises(Unreachable, match="RemoteProtocolError"):
        scrape.fetch(url, 5)


def test_a_page_that_does_not_come_ends_at_the_time_out():
    with (
        raw_server(b"HTTP/1.1 200 OK\r\n", then_close=False) as url,
        pytest.raises(Unreachable, match=r"within 0\.2 s"),
    ):
        scrape.fetch(url, 0.2)
