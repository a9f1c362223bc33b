"""What the rehearsal engine writes: text and tokens, the metrics page, the statistics lines, log lines, caches."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.rehearsal import caches, flags, log, personality, text
from orchestrator.rehearsal.api import cache_labels
from orchestrator.rehearsal.metrics import EngineMetrics, HttpMetrics, one_two_five, process_lines
from orchestrator.rehearsal.statslog import StatsLog

BOX = personality.load()
REAL = Path(__file__).parent / "data" / "metrics" / "vllm_0.26.0.txt"
FACTS = {"num_gpu_blocks": 100, "kv_cache_size_tokens": 1600, "kv_cache_max_concurrency": 3.1}


def settings(line="", **changes):
    return replace(flags.parse(line.split(), BOX, {}), **changes)


# --- text -------------------------------------------------------------------------------------------------------------


def take(seed, count):
    answer = text.Author().answer(seed)
    return [next(answer) for _ in range(count)]


def test_an_answer_has_about_seven_words_for_ten_tokens():
    for seed in range(0, 5000, 500):
        answer = "".join(take(seed, 1000))
        assert 0.66 < len(answer.split()) / 1000 < 0.72


def test_counting_an_answer_gives_the_tokens_that_made_it():
    answer = take(77, 500)
    assert text.pieces("".join(answer)) == answer


def test_an_answer_depends_on_the_prompt_alone():
    assert take(text.seed_of("a"), 200) == take(text.seed_of("a"), 200)
    assert take(text.seed_of("a"), 200) != take(text.seed_of("b"), 200)
    assert take(text.seed_of("a"), 200) != take(text.seed_of("a", (0.7, None)), 200)


def test_an_answer_visits_every_sentence_before_it_repeats_one():
    whole = "".join(take(12345, 1400))
    sentences = re.findall(r" [^.]+\.", whole)
    count = len(Path(text.__file__).with_name("data").joinpath("prose.txt").read_text().splitlines())
    assert len(set(sentences[: count - 1])) == count - 1


@pytest.mark.parametrize("prompt", ["Grüße aus Köln, 北京 🎉", "a\n\n\tb", "x_y 12345 #!", "\ud800"])
def test_no_character_of_a_prompt_is_lost_in_counting(prompt):
    assert "".join(text.pieces(prompt)) == prompt
    text.seed_of(prompt)


def test_only_whole_blocks_are_hashed_and_a_block_knows_all_before_it():
    first, second = text.block_hashes("abcdefgh" * 5, 16), text.block_hashes("Xbcdefgh" + "abcdefgh" * 4, 16)
    assert len(first) == len(second) == 2
    assert set(first).isdisjoint(second)
    assert text.block_hashes("abcdefgh" * 4, 16) == first


# --- metrics ----------------------------------------------------------------------------------------------------------


def heads(page):
    return {tuple(line.split(" ", 3)[2:4]) for line in page.splitlines() if line.startswith("# TYPE")}


def page(tokens=0, length=512):
    made = settings("--max-model-len 512", spec_tokens=tokens)
    lines = [*process_lines(1.0), *EngineMetrics("m", length, tokens, cache_labels(made, FACTS)).render()]
    http = HttpMetrics()
    http.count("/v1/completions", "POST", 200, 0.3, (91, 504))
    return "\n".join([*lines, *http.render()])


def test_the_page_has_every_family_of_a_real_one_and_no_other():
    assert heads(page()) == heads(REAL.read_text())


def test_every_sample_of_a_real_page_is_there_with_its_labels():
    def names(text):
        samples = {line.rpartition(" ")[0] for line in text.splitlines() if line and not line.startswith("#")}
        kept = {re.sub(r'model_name="[^"]*"', 'model_name="m"', name) for name in samples}
        return {re.sub(r'="[^"]*"', "", name) if "info{" in name else name for name in kept}

    assert names(page()) == names(REAL.read_text())


def test_help_texts_are_those_of_a_real_page():
    def helps(text):
        return {line for line in text.splitlines() if line.startswith("# HELP vllm:")}

    assert helps(page()) == helps(REAL.read_text())


def test_speculation_has_its_series_only_when_there_is_speculation():
    assert "spec_decode" not in page(0)
    assert page(3).count("vllm:spec_decode_num_accepted_tokens_per_pos_total{") == 3
    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 0.0' in page(3)


def test_edges_of_token_histograms_follow_the_model_length():
    assert one_two_five(512) == [1, 2, 5, 10, 20, 50, 100, 200, 500]
    assert 'request_prompt_tokens_bucket{engine="0",le="50000.0",model_name="m"} 0.0' in page(length=98304)


def test_a_histogram_counts_a_value_in_its_edges_bucket():
    metrics = EngineMetrics("m", 512, 0, {})
    for value in (0.01, 0.011, 100.0):
        metrics.inter_token.observe(value)
    rows = dict(re.findall(r'le="([^"]+)",model_name="m"} (\S+)', "\n".join(metrics.inter_token.render())))
    assert (rows["0.01"], rows["0.025"], rows["80.0"], rows["+Inf"]) == ("1.0", "2.0", "2.0", "3.0")


def test_a_model_name_with_quotes_and_backslashes_is_escaped():
    assert r'model_name="a \"b\" \\c"' in "\n".join(EngineMetrics(r'a "b" \c', 8, 0, {}).render())


# --- statistics lines -------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def lines(monkeypatch, capfd):
    clock = Clock()
    monkeypatch.setattr("orchestrator.rehearsal.statslog.time", clock)
    stats = StatsLog(log.Log("APIServer", 7), 2)

    def after(seconds):
        clock.now += seconds
        stats.print()
        return capfd.readouterr().out.splitlines()

    return stats, after


def test_generation_is_emitted_tokens_over_the_window_and_drafts_stand_beside_it(lines):
    stats, after = lines
    stats.tokens(30, 170)
    stats.drafts(100, 200, [2] * 30 + [1] * 10 + [0] * 60)
    stats.prefix(40, 10)
    general, speculative = after(10)
    assert general.endswith(
        "Engine 000: Avg prompt throughput: 3.0 tokens/s, Avg generation throughput: 17.0 tokens/s, Running: 0 reqs, "
        "Waiting: 0 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 25.0%"
    )
    assert speculative.endswith(
        "SpecDecoding metrics: Mean acceptance length: 1.70, Accepted throughput: 7.00 tokens/s, Drafted throughput: "
        "20.00 tokens/s, Accepted: 70 tokens, Drafted: 200 tokens, Per-position acceptance rate: 0.400, 0.300, "
        "Avg Draft acceptance rate: 35.0%"
    )


def test_after_work_comes_one_line_of_zero_and_then_silence(lines):
    stats, after = lines
    stats.tokens(0, 10)
    assert len(after(10)) == 1
    (idle,) = after(10)
    assert "Avg generation throughput: 0.0 tokens/s" in idle
    assert after(10) == []


def test_the_speculative_rates_divide_by_the_idle_time_too(lines):
    stats, after = lines
    stats.tokens(0, 10)
    stats.drafts(5, 10, [1] * 5)
    after(10)
    after(10)
    after(10)
    stats.tokens(0, 20)
    stats.drafts(10, 20, [1] * 10)
    general, speculative = after(10)
    assert "Avg generation throughput: 2.0 tokens/s" in general
    assert "Drafted throughput: 0.67 tokens/s" in speculative  # 20 tokens in the 30 s since the last such line


# --- log lines --------------------------------------------------------------------------------------------------------


def test_a_record_of_several_lines_repeats_the_prefix_and_ends_as_vllms_do(capfd):
    log.Log("EngineCore", 9).at_error("core.py:1332", "one\ntwo")
    out = capfd.readouterr().out
    head = r"\(EngineCore pid=9\) ERROR \d\d-\d\d \d\d:\d\d:\d\d \[core.py:1332\] "
    assert re.fullmatch(rf"{head}one\r\n{head}two\n", out)


def test_a_bar_is_one_line_with_bare_carriage_returns_on_stderr(capfd):
    log.Log("EngineCore", 9).bar("Capturing CUDA graphs (FULL)", 49, 2.0)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(
        "(EngineCore pid=9) \rCapturing CUDA graphs (FULL):   0%|          | 0/49 [00:00<?, ?it/s]"
    )
    assert "\rCapturing CUDA graphs (FULL): 100%|██████████| 49/49 [" in captured.err


def test_tracebacks_have_no_placeholder_left_and_end_with_the_error():
    lines = log.traceback("run.core", "run.uniproc", "run.worker.triton", error="RuntimeError: x", root="/r", aot="ab")
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "RuntimeError: x"
    assert not any("@@" in line for line in lines)
    assert any(line.endswith('vllm/compilation/cuda_graph.py", line 254, in __call__') for line in lines)


# --- caches -----------------------------------------------------------------------------------------------------------


def look(home, monkeypatch, line="", **environ):
    monkeypatch.setenv("HOME", str(home))
    return caches.look(settings(f"--model m -tp 2 {line}"), "0.26.0", environ)


def test_three_states_first_compiles_second_lacks_kernels_third_has_all(tmp_path, monkeypatch):
    states = []
    for _ in range(3):
        found = look(tmp_path, monkeypatch)
        states.append((found.loaded, found.kernels_loaded))
        if not found.loaded:
            caches.save_graphs(found, settings("--model m -tp 2"))
        caches.save_kernels(found)
    assert states == [(False, False), (True, False), (True, True)]


def test_with_triton_cache_dir_the_second_boot_has_all(tmp_path, monkeypatch):
    environ = {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    first = look(tmp_path, monkeypatch, **environ)
    caches.save_graphs(first, settings("--model m -tp 2"))
    caches.save_kernels(first)
    second = look(tmp_path, monkeypatch, **environ)
    assert (second.loaded, second.kernels_loaded) == (True, True)


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"VLLM_CACHE_ROOT": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/vllm"),
        ({}, "/home/me/.cache/vllm"),
    ],
)
def test_the_cache_root_is_found_as_vllm_finds_it(environ, root, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert caches.cache_root(environ) == Path(root)


@pytest.mark.parametrize(
    ("line", "environ", "same"),
    [
        ("--max-num-batched-tokens 4096", {}, False),
        ("--max-model-len 1024", {}, False),
        ("--max-num-seqs 16", {}, False),
        ("--dtype float16", {}, False),
        ("", {"VLLM_API_KEY": "k"}, False),
        ("--spec-method eagle3 --spec-tokens 1", {}, False),
        ("--spec-method mtp --spec-tokens 3", {}, True),
        ("--gpu-memory-utilization 0.5 --seed 3 --port 1", {}, True),
        ("", {"VLLM_CACHE_ROOT": "/elsewhere", "VLLM_LOG_STATS_INTERVAL": "1"}, True),
    ],
)
def test_the_hash_counts_what_vllms_counts(line, environ, same, tmp_path, monkeypatch):
    base = look(tmp_path, monkeypatch, "--max-num-seqs 256")
    other = look(tmp_path, monkeypatch, line if "max-num-seqs" in line else f"--max-num-seqs 256 {line}", **environ)
    assert (base.aot_hash == other.aot_hash) == same
    assert (base.short_hash == other.short_hash) == same


# --- the processes' weight --------------------------------------------------------------------------------------------


def test_the_engines_process_loads_neither_asyncio_nor_an_http_parser():
    code = "import sys, orchestrator.rehearsal.engine, orchestrator.rehearsal.configuration; print(*sys.modules)"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint({"asyncio", "httptools", "aiohttp", "httpx", "ssl", "numpy", "pydantic", "logging"})


def test_the_package_imports_nothing_else_of_this_project():
    for file in Path(text.__file__).parent.glob("*.py"):
        for found in re.findall(r"^\s*(?:from|import) (orchestrator[\w.]*)", file.read_text(), re.MULTILINE):
            assert found.startswith("orchestrator.rehearsal"), file
