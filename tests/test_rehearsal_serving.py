"""The rehearsal engine as a program: boots, endpoints, books, errors."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rehearsal_engine import Box, spec, wait_until

SEED_RATES = {1: 66.9, 8: 339.9}


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    return Box(tmp_path_factory.mktemp("box"), VLLM_LOG_STATS_INTERVAL="300")


@pytest.fixture(scope="module")
def true_speed(tmp_path_factory):
    """A server with the shipped personality, whose rates are the rehearsal's."""
    with Box(tmp_path_factory.mktemp("true"), personality="").start(*spec(1)) as engine:
        yield engine.ready()


@pytest.fixture(scope="module")
def server(box):
    with box.start(*spec(1), "--enable-prompt-tokens-details", VLLM_SERVER_DEV_MODE="1") as engine:
        yield engine.ready()


def events(response):
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def chunks(response):
    found = events(response)
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


TOO_LONG = (
    "This model's maximum context length is 98304 tokens. However, you requested 16 output tokens and your prompt "
    "contains 98305 input tokens"
)

# --- boots ------------------------------------------------------------------------------------------------------------

COLD = (
    "APIServer api_utils.py non-default args",
    "APIServer model.py Resolved architecture: Qwen3_5ForConditionalGeneration",
    "APIServer model.py Using max model len 98304",
    "APIServer model.py Resolved architecture: Qwen3_5MTP",
    "APIServer scheduler.py Chunked prefill is enabled with max_num_batched_tokens=2048.",
    "EngineCore core.py Initializing a V1 LLM engine (v0.26.0) with config: model='/models/qwen', speculative_config=",
    "Worker_TP0 parallel_state.py world_size=2 rank=0",
    "Worker_TP1 parallel_state.py world_size=2 rank=1",
    "Worker_TP0 gpu_worker.py Using V2 Model Runner",
    "Worker_TP0 model_runner.py Loading model from scratch...",
    "Worker_TP0 default_loader.py Loading weights took",
    "Worker_TP0 model_runner.py Model loading took 8.66 GiB and",
    "Worker_TP0 backends.py Using cache directory: ",
    "Worker_TP0 backends.py Dynamo bytecode transform time: ",
    "Worker_TP0 backends.py Cache the graph of compile range (1, 2048) for later use",
    "Worker_TP0 backends.py Compiling a graph for compile range (1, 2048) takes ",
    "Worker_TP0 decorators.py saved AOT compiled function to ",
    "Worker_TP0 monitor.py torch.compile took ",
    "Worker_TP0 monitor.py Initial profiling/warmup run took ",
    "Worker_TP0 gpu_worker.py Available KV cache memory: 13.2 GiB",
    "EngineCore kv_cache_utils.py GPU KV cache size: 864,800 tokens",
    "EngineCore kv_cache_utils.py Maximum concurrency for 98,304 tokens per request: 8.80x",
    "Worker_TP0 speculator.py Capturing model for speculator...",
    "Worker_TP0 model_runner.py Graph capturing finished in ",
    "Worker_TP0 gpu_worker.py Free memory on device (23.78/24.0 GiB) on startup. Desired GPU memory utilization is (",
    "Worker_TP0 jit_monitor.py Kernel JIT monitor activated",
    "EngineCore core.py init engine (profile, create kv cache, warmup model) took ",
    "APIServer api_server.py Supported tasks",
    "APIServer api_server.py Starting vLLM server on http://127.0.0.1:",
    "APIServer launcher.py Available routes are:",
)
WARM = (
    "Worker_TP0 backends.py Dynamo bytecode transform time: ",
    "Worker_TP0 backends.py Directly load the compiled graph(s) for compile range (1, 2048) from the cache, took ",
    "Worker_TP0 decorators.py Directly load AOT compilation from path ",
    "Worker_TP0 monitor.py torch.compile took ",
    "EngineCore kv_cache_utils.py GPU KV cache size: 866,208 tokens",
)


def assert_order(messages, wanted):
    rest = iter(message.replace(" INFO ", " ", 1).replace(" WARNING ", " ", 1) for message in messages)
    for start in wanted:
        assert any(message.startswith(start) for message in rest), f"{start!r} is missing or out of order"


def test_a_cold_boot_compiles_and_the_next_loads_in_vllms_order(tmp_path):
    box = Box(tmp_path)
    with box.start(*spec(1)) as cold:
        cold.ready()
        assert cold.stop() == 0
    assert_order(cold.messages(), COLD)
    assert not cold.has("Directly load")
    with box.start(*spec(3)) as warm:  # the hash does not count the drafts of MTP, as vLLM's does not
        warm.ready()
        assert warm.stop() == 0
    assert_order(warm.messages(), WARM)
    assert not warm.has("Compiling a graph")


def test_the_streams_are_vllms_logger_out_uvicorn_and_bars_err(server):
    assert re.search(r"^\(APIServer pid=\d+\) INFO:     Application startup complete\.$", server.err, re.MULTILINE)
    assert "\rCapturing CUDA graphs (PIECEWISE): 100%|██████████| 51/51" in server.err
    assert re.search(
        r"\(APIServer pid=\d+\) INFO:     127\.0\.0\.1:\d+ - \"GET /health HTTP/1\.1\" 200 OK\n", server.out
    )
    assert "Started server process" not in server.out
    assert not any(" [core.py:" in line for line in server.err.splitlines())


def test_an_eager_boot_neither_compiles_nor_captures(tmp_path):
    with Box(tmp_path).start("--enforce-eager") as engine:
        engine.ready()
        assert engine.complete().status_code == 200
        for text in ("torch.compile", "Capturing", "AOT", "Cache the graph"):
            assert not any(text in message for message in engine.messages() if " with config: " not in message), text


def test_api_server_ready_costs_less_than_four_tenths_of_a_cpu_second(tmp_path):
    with Box(tmp_path).start(*spec(1)) as engine:
        engine.ready()
        spent = 0
        for pid in (engine.process.pid, engine.engine_pid()):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent += int(fields[11]) + int(fields[12])
    assert spent / os.sysconf("SC_CLK_TCK") < 0.4


def test_two_processes_and_two_workers_hold_one_engine(server):
    groups = [_group_of(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    assert groups.count(server.process.pid) == 4


def _group_of(pid):
    try:
        return os.getpgid(int(pid))
    except ProcessLookupError:
        return None


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_stream_holds_several_tokens_a_chunk_and_its_usage_is_the_counters(server):
    before = server.metrics()
    answer = server.complete(max_tokens=60, ignore_eos=True, stream=True, stream_options={"include_usage": True})
    got = chunks(answer)
    after = server.metrics()
    assert answer.headers["content-type"].startswith("text/event-stream")
    usage = got[-1]["usage"]
    assert got[-1]["choices"] == []
    assert usage["completion_tokens"] == 60
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 60
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    assert 28 <= len(got) - 1 <= 34  # about two tokens in each
    assert [chunk["choices"][0]["finish_reason"] for chunk in got[:-1]][-2:] == [None, "length"]
    whole = server.complete(max_tokens=60, ignore_eos=True).json()["choices"][0]["text"]
    assert "".join(chunk["choices"][0]["text"] for chunk in got[:-1]) == whole


def test_accepted_and_drafted_fit_the_emitted_tokens(server):
    before = server.metrics()
    server.complete(prompt="books of the drafts", max_tokens=200, ignore_eos=True)
    delta = {name: value - before.get(name, 0) for name, value in server.metrics().items()}
    drafts, accepted = delta["vllm:spec_decode_num_drafts_total"], delta["vllm:spec_decode_num_accepted_tokens_total"]
    assert delta["vllm:spec_decode_num_draft_tokens_total"] == drafts
    assert delta['vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}'] == accepted
    assert accepted / drafts == pytest.approx(0.97, abs=0.02)
    assert 0 <= 1 + drafts + accepted - 200 <= 1  # one from the prompt; the last step may be cut
    assert delta["vllm:inter_token_latency_seconds_count"] == drafts
    assert delta['vllm:request_success_total{finished_reason="length"}'] == 1


def test_a_chat_stream_starts_with_the_role_and_ends_with_usage(server):
    body = {"model": "qwen3-27b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    got = chunks(
        server.client.post(
            "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        )
    )
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in got[1:-1])
    whole = server.client.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["usage"] == got[-1]["usage"] | {"prompt_tokens_details": whole["usage"]["prompt_tokens_details"]}
    assert got[-1]["usage"]["completion_tokens"] == 8


def test_without_ignore_eos_an_answer_ends_by_itself_and_min_tokens_holds_it(server):
    free = server.complete(prompt="How long?", max_tokens=700).json()
    assert free["choices"][0]["finish_reason"] == "stop"
    length = free["usage"]["completion_tokens"]
    assert 120 <= length < 632
    held = server.complete(prompt="How long?", max_tokens=700, min_tokens=length + 20).json()
    assert held["usage"]["completion_tokens"] == length + 20


def test_a_stop_string_cuts_the_text_before_it(server):
    whole = server.complete(max_tokens=40, ignore_eos=True).json()["choices"][0]["text"]
    word = whole.split()[5]
    cut = server.complete(max_tokens=40, ignore_eos=True, stop=[word]).json()["choices"][0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", word)
    assert cut["text"] == whole[: whole.index(word)]
    wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 0, "idle engine", 2)


def test_greedy_answers_are_the_same_on_another_boot_with_other_drafts(server, box):
    mine = server.complete(max_tokens=50, ignore_eos=True).json()["choices"][0]["text"]
    with box.start(*spec(5)) as other:
        assert other.ready().complete(max_tokens=50, ignore_eos=True).json()["choices"][0]["text"] == mine


def test_the_second_request_finds_its_prompt_in_the_prefix_cache(server):
    prompt = "A prompt long enough for several blocks of sixteen tokens. " * 8
    before = server.metrics()
    first = server.complete(prompt=prompt).json()["usage"]
    second = server.complete(prompt=prompt).json()["usage"]
    hits = server.metrics()["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == hits == (first["prompt_tokens"] - 1) // 16 * 16
    assert server.client.post("/reset_prefix_cache").json() == {"success": True}
    assert server.complete(prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_client_that_goes_away_aborts_its_request(server):
    before = server.metrics()
    body = {"model": "qwen3-27b", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # kept: the stream is closed with its iterator
        next(lines)
        assert server.metrics()["vllm:num_requests_running"] == 1
    name = 'vllm:request_success_total{finished_reason="abort"}'
    wait_until(lambda: server.metrics()[name] == before[name] + 1, "abort", 3)
    wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 0, "idle engine", 3)


def test_counters_agree_with_all_clients_to_the_token(server):
    before = server.metrics()["vllm:generation_tokens_total"]
    with ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(lambda n: server.complete(prompt=f"p{n}", max_tokens=20 + n, ignore_eos=True).json(), range(12))
        )
    total = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert total == sum(20 + n for n in range(12))
    assert server.metrics()["vllm:generation_tokens_total"] - before == total


@pytest.mark.parametrize("streams", [1, 8])
def test_spec_1_makes_the_seeds_counted_tokens_a_second(true_speed, streams):
    """The seed's only two numbers by counter: 66.9 tok/s alone, 339.9 with eight."""
    begun, over = threading.Barrier(streams + 1), threading.Event()

    def run(number):
        body = {
            "model": "qwen3-27b",
            "prompt": f"rate {number}",
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": True,
        }
        with true_speed.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            begun.wait(10)
            while not over.is_set():
                next(lines)

    with ThreadPoolExecutor(streams) as pool:
        runs = [pool.submit(run, number) for number in range(streams)]
        begun.wait(10)
        rate = _rate(true_speed)
        over.set()
        for done in runs:
            done.result(10)
    assert rate == pytest.approx(SEED_RATES[streams], rel=0.10)


def _rate(server, tokens=100):
    """Counter over the engine's own clock: from one change of it to a later one."""

    def change(least):
        while True:
            value = server.metrics()["vllm:generation_tokens_total"]
            if value >= least:
                return value, time.monotonic()

    first, begun = change(server.metrics()["vllm:generation_tokens_total"] + 1)
    last, ended = change(first + tokens)
    return (last - first) / (ended - begun)


# --- the other endpoints and errors -----------------------------------------------------------------------------------


def test_models_version_and_tokenize(server):
    card = server.client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["root"], card["max_model_len"]) == ("qwen3-27b", "/models/qwen", 98304)
    assert server.client.get("/version").json() == {"version": "0.26.0+rehearsal"}
    body = {"model": "qwen3-27b", "prompt": "Count these words, please."}
    counted = server.client.post("/tokenize", json=body).json()
    assert counted["count"] == len(counted["tokens"]) == server.complete(**body).json()["usage"]["prompt_tokens"]
    ids = server.complete(prompt=counted["tokens"]).json()["usage"]["prompt_tokens"]
    assert ids == counted["count"]


def test_cache_config_info_says_how_many_blocks_there_are(server):
    line = next(
        line for line in server.client.get("/metrics").text.splitlines() if line.startswith("vllm:cache_config_info{")
    )
    assert 'num_gpu_blocks="54050"' in line
    assert 'kv_cache_size_tokens="864800"' in line
    assert 'gpu_memory_utilization="0.97"' in line


@pytest.mark.parametrize(
    ("body", "status", "kind", "says"),
    [
        ({"model": "other"}, 404, "NotFoundError", "The model `other` does not exist."),
        ({"prompt": "a " * 98304}, 400, "BadRequestError", TOO_LONG),
        ({"max_tokens": 98304}, 400, "BadRequestError", "maximum context length is 98304"),
        ({"max_tokens": 0}, 400, "BadRequestError", "max_tokens must be at least 1, got 0."),
        ({"min_tokens": 17}, 400, "BadRequestError", "min_tokens must be less than or equal to max_tokens=16, got 17."),
        ({"temperature": -1}, 400, "BadRequestError", "temperature must be non-negative, got -1."),
        ({"stream_options": {"include_usage": True}}, 400, "BadRequestError", "can only be defined when `stream=True`"),
        ({"prompt": ""}, 400, "BadRequestError", "prompt"),
    ],
)
def test_a_bad_request_gets_vllms_error(server, body, status, kind, says):
    answer = server.complete(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, status, kind)
    assert says in error["message"]


def test_bad_json_an_unknown_path_and_a_wrong_method(server):
    assert server.client.post("/v1/completions", content=b"{").status_code == 400
    assert server.client.post("/v1/completions", content=b"[]").status_code == 400
    assert server.client.get("/nope").json() == {"detail": "Not Found"}
    answer = server.client.get("/v1/completions")
    assert (answer.status_code, answer.json()) == (405, {"detail": "Method Not Allowed"})


def test_an_api_key_guards_v1_alone(box):
    with box.start("--api-key", "secret") as engine:
        engine.ready()
        assert engine.complete().status_code == 401
        assert engine.client.get("/metrics").status_code == engine.client.get("/health").status_code == 200
        engine.client.headers["authorization"] = "Bearer secret"
        assert engine.complete().status_code == 200
        assert engine.client.get("/v1/models").status_code == 200


def test_too_many_requests_wait_in_the_queue(box):
    with box.start("--max-num-seqs", "2") as engine, ThreadPoolExecutor(5) as pool:
        engine.ready()
        runs = [pool.submit(engine.complete, prompt=f"q{n}", max_tokens=25, ignore_eos=True) for n in range(5)]
        wait_until(lambda: engine.metrics()["vllm:num_requests_waiting"] == 3, "three in the queue", 5)
        assert engine.metrics()["vllm:num_requests_running"] == 2
        assert [run.result(20).status_code for run in runs] == [200] * 5
