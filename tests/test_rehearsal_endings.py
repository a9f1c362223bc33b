"""How the rehearsal engine ends: bad starts, deaths, stops, and what survives them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import pytest
from rehearsal_engine import LINE, Box, free_port, spec, wait_until

SCALE = "COLDBOOT_REHEARSAL_TIME_SCALE"
SOON = "[boot]\nimport_api_s = 0.0\ninspect_s = 0.0\nimport_engine_s = 0.0\n"  # the engine is there at once
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@pytest.fixture
def box(tmp_path):
    return Box(tmp_path)


def stream(engine, **body):
    defaults = {"model": "qwen3-27b", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    return engine.client.stream("POST", "/v1/completions", json=defaults | body)


def read_on(lines):
    return [line for line in lines if line]


# --- starts that fail -------------------------------------------------------------------------------------------------


TOO_LITTLE_FREE = (
    "ValueError: Free memory on device cuda:0 (23.19/24.0 GiB) on startup is less than desired GPU memory utilization "
    "(0.97, 23.28 GiB)."
)
TOO_SMALL_KV = (
    "ValueError: To serve at least one request with the model's max seq len (98304), (1.5 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (0.72 GiB). Based on the available memory, the estimated "
    "maximum model length is 46912."
)
NO_ROOM_TO_WARM_UP = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB."


@pytest.mark.parametrize(
    ("flags", "other_mib", "cause"),
    [
        ((), 600, TOO_LITTLE_FREE),
        (("--gpu-memory-utilization", "0.42"), 0, "ValueError: No available memory for the cache blocks."),
        (("--gpu-memory-utilization", "0.45"), 0, TOO_SMALL_KV),
        (("--gpu-memory-utilization", "0.99"), 0, NO_ROOM_TO_WARM_UP),
        ((*spec(3), "--gpu-memory-utilization", "0.987"), 0, "private pools (e.g., CUDA Graphs)"),
    ],
)
def test_a_start_without_enough_memory_fails_with_its_root_first(box, flags, other_mib, cause):
    box.personality(f"[memory]\nother_process_mib = {other_mib}.0\n")
    with box.start(*flags) as engine:
        assert engine.wait() == 1
    errors = [message for message in engine.messages() if " ERROR " in message]
    first = next(error for error in errors if re.search(r"(Error|Exception): ", error))
    assert cause in first
    assert any(error.endswith("EngineCore failed to start.") for error in errors)
    assert engine.err.rstrip().endswith(
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    )
    assert "Application startup complete" not in engine.err


def test_an_unknown_flag_prints_vllms_usage_and_ends_with_2(box):
    with box.start("--no-such-flag") as engine:
        assert engine.wait() == 2
    assert engine.err.startswith("usage: api_server.py [-h]")
    assert engine.err.splitlines()[-1] == "api_server.py: error: unrecognized arguments: --no-such-flag"
    assert engine.out == ""


def test_drafts_given_both_ways_end_with_1(box):
    with box.start(*spec(3), "--speculative-config", '{"num_speculative_tokens": 3}') as engine:
        assert engine.wait() == 1
    assert "ValueError: Cannot set both --spec-tokens" in engine.err


def test_a_port_where_somebody_listens_ends_with_1_before_the_engine(box):
    with socket.create_server(("127.0.0.1", 0)) as taken, box.start(port=taken.getsockname()[1]) as engine:
        assert engine.wait() == 1
    assert "OSError: [Errno 98] Address already in use" in engine.err
    assert "EngineCore" not in engine.out


def test_of_two_on_one_port_the_second_dies_after_its_whole_boot(box):
    box.personality(SOON)  # both bind at once
    port, slow, slower = free_port(), {SCALE: "0.01"}, {SCALE: "0.03"}
    with box.start(port=port, **slow) as first, box.start(port=port, **slower) as second:
        first.ready()
        assert second.wait() == 1
        assert "Application startup complete" in second.err
        assert first.client.get("/health").status_code == 200


def test_a_killed_engine_ends_the_boot_with_1(tmp_path):
    with Box(tmp_path, scale=0.1, personality=SOON).start() as engine:
        engine.wait_for("Using V2 Model Runner")
        os.kill(engine.engine_pid(), signal.SIGKILL)
        assert engine.wait() == 1
    assert "Engine core initialization failed" in engine.err


# --- the first request ------------------------------------------------------------------------------------------------


def test_spec_3_dies_cold_at_its_first_request_with_exit_0_and_serves_warm(box):
    with box.start(*spec(3)) as cold:
        cold.ready()
        with stream(cold) as answer:
            body = answer.read().decode()
        assert answer.status_code == 200
        assert [json.loads(line[6:])["error"]["message"] for line in body.splitlines() if "error" in line] == [DEAD]
        assert body.endswith("data: [DONE]\n\n")
        assert cold.wait() == 0
    errors = [message for message in cold.messages() if " ERROR " in message]
    roots = [error for error in errors if error.endswith("RuntimeError: Triton Error [CUDA]: out of memory")]
    assert roots[0].startswith("Worker_TP0")
    assert any('vllm/compilation/cuda_graph.py", line 254, in __call__' in error for error in errors)
    places = [
        next(number for number, error in enumerate(errors) if text in error)
        for text in (
            "Dumping input data for V1 LLM engine (v0.26.0) with config: ",
            "Dumping scheduler output for model execution: ",
            "EngineCore encountered a fatal error.",
            "AsyncLLM output_handler failed.",
            f"vllm.v1.engine.exceptions.EngineDeadError: {DEAD}",
        )
    ]
    assert places == sorted(places)
    assert not cold.has("engine core exited unexpectedly")
    assert cold.has("INFO:     Finished server process [")
    with box.start(*spec(3)) as warm:
        assert warm.ready().complete(max_tokens=30).status_code == 200
        assert warm.stop() == 0
    assert warm.has("Directly load AOT compilation from path")


def test_on_one_card_the_engine_itself_shows_the_frame(box):
    box.personality("[memory]\nweights_mib = 9000.0\n")
    with box.start(*spec(3), "-tp", "1") as engine:
        assert engine.ready().complete().status_code == 500
        assert engine.wait() == 0
    errors = [message for message in engine.messages() if message.startswith("EngineCore ERROR core.py")]
    assert errors[-1].endswith("RuntimeError: Triton Error [CUDA]: out of memory")
    assert any('cuda_graph.py", line 254' in error for error in errors)


def test_a_long_prompt_kills_what_a_short_one_does_not(box):
    with box.start("--gpu-memory-utilization", "0.985", "--max-num-batched-tokens", "8192") as engine:
        engine.ready()
        engine.wait_for("Kernel JIT monitor activated")
        assert engine.stop() == 0  # fills the compile cache: loaded code needs little at the first request
    with box.start("--gpu-memory-utilization", "0.985", "--max-num-batched-tokens", "8192") as engine:
        assert engine.ready().complete().status_code == 200
        answer = engine.complete(prompt="word " * 8000)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == DEAD
        assert engine.wait() == 0
    assert engine.has("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 156.")


# --- load -------------------------------------------------------------------------------------------------------------


def closed_loop(engine, streams, requests):
    """Every client asks again at once; returns the statuses."""
    numbers = count()

    def client(_):
        return [
            engine.complete(prompt=f"{next(numbers)}", max_tokens=6, ignore_eos=True).status_code
            for _ in range(requests)
        ]

    with ThreadPoolExecutor(streams) as pool:
        return [status for statuses in pool.map(client, range(streams)) for status in statuses]


def test_spec_5_collapses_with_concurrency_answers_500_at_eight_and_lives(box):
    with box.start(*spec(5)) as engine:
        engine.ready()
        assert set(closed_loop(engine, 2, 2)) == {200}
        drafts = engine.metrics()["vllm:spec_decode_num_drafts_total"]
        assert drafts > 0
        assert set(closed_loop(engine, 4, 1)) == {200}
        eight = closed_loop(engine, 8, 2)
        assert 500 in eight
        assert 200 in eight
        answer = engine.metrics()
        assert answer['vllm:request_success_total{finished_reason="error"}'] == eight.count(500)
        assert (answer["vllm:num_requests_running"], answer["vllm:num_requests_waiting"]) == (0, 0)
        assert set(closed_loop(engine, 2, 2)) == {200}
        assert engine.stop() == 0
    assert re.search(r"ERROR .* Request cmpl-[0-9a-f]{16} failed with an internal error during generation", engine.out)
    assert not engine.has("EngineDeadError")


def test_a_refused_stream_gets_its_500_as_a_status_with_vllms_json(box):
    with box.start(*spec(5)) as engine:
        engine.ready()
        with ThreadPoolExecutor(4) as pool:
            held = [pool.submit(engine.complete, prompt=f"{n}", max_tokens=60, ignore_eos=True) for n in range(4)]
            wait_until(lambda: engine.metrics()["vllm:num_requests_running"] == 4, "four running", 5)
            with stream(engine) as answer:
                answer.read()
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "InternalServerError"
            assert [run.result(30).status_code for run in held] == [200] * 4


def test_spec_8_is_fast_on_one_of_three_boots_and_slow_on_another(box):
    seconds = []
    for _ in range(3):
        with box.start(*spec(8)) as engine:
            engine.ready().complete(max_tokens=2)
            before = engine.metrics()["vllm:request_decode_time_seconds_sum"]
            engine.complete(prompt="speed", max_tokens=60, ignore_eos=True)
            seconds.append(engine.metrics()["vllm:request_decode_time_seconds_sum"] - before)
    assert max(seconds) > 2 * min(seconds)


# --- deaths while serving ---------------------------------------------------------------------------------------------


def test_a_killed_engine_cuts_streams_with_an_error_and_the_server_exits_0(box):
    with box.start(*spec(1)) as engine:
        engine.ready()
        with stream(engine) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith('data: {"id":"cmpl-')
            os.kill(engine.engine_pid(), signal.SIGKILL)
            *_, error, done = read_on(lines)
        assert answer.status_code == 200
        assert json.loads(error.removeprefix("data: ")) == {
            "error": {"message": DEAD, "type": "InternalServerError", "param": None, "code": 500}
        }
        assert done == "data: [DONE]"
        assert engine.complete().status_code == 500
        assert engine.wait() == 0
    assert engine.has("WARNING ")
    assert engine.has("[shutdown] MPClient: engine core exited unexpectedly; starting cleanup")
    assert engine.has("Error in completion stream generator.")
    assert not engine.has("[shutdown] API server: shutdown triggered")


def test_a_killed_worker_takes_the_engine_with_it(box):
    with box.start(*spec(1)) as engine:
        engine.ready()
        worker = int(re.search(r"\(Worker_TP1 pid=(\d+)\)", engine.out).group(1))
        with stream(engine) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(worker, signal.SIGKILL)
            assert DEAD in read_on(lines)[-2]
        assert engine.wait() == 0
    errors = [message for message in engine.messages() if " ERROR " in message]
    assert errors[0].endswith("Worker proc VllmWorker-1 died unexpectedly (exit code: None), shutting down executor.")
    assert any(error.endswith("RuntimeError: cancelled") for error in errors)


def test_health_says_200_for_a_moment_after_the_death_then_503_and_the_idle_server_ends_by_its_watchdog(tmp_path):
    names = (
        "import_api",
        "import_engine",
        "inspect",
        "weights",
        "dynamo_cold",
        "inductor",
        "save",
        "triton_cold",
        "profile",
    )
    boot = "[boot]\n" + "".join(f"{name}_s = 0.0\n" for name in names)
    with Box(tmp_path, scale=0.2, personality=boot).start() as engine:  # the watchdog looks every second
        engine.ready()
        os.kill(engine.engine_pid(), signal.SIGKILL)
        statuses = list(_healths(engine))
        assert engine.wait() == 0
    assert statuses[0] == 200
    assert statuses[-1] == 503
    assert statuses == sorted(statuses)


def test_a_stopped_engine_hangs_behind_a_healthy_face_and_goes_on_afterwards(box):
    with box.start(*spec(1)) as engine:
        engine.ready()
        with stream(engine, max_tokens=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(engine.engine_pid(), signal.SIGSTOP)
            frozen = [engine.metrics()["vllm:generation_tokens_total"] for _ in range(2)]
            assert engine.client.get("/health").status_code == 200
            wait_until(lambda: frozen.append(_tokens(engine)) or frozen[-1] == frozen[-2], "a frozen counter", 3)
            assert engine.metrics()["vllm:num_requests_running"] == 1
            os.kill(engine.engine_pid(), signal.SIGCONT)
            assert read_on(lines)[-1] == "data: [DONE]"


def _healths(engine):
    """The statuses of /health until nobody answers."""
    with contextlib.suppress(httpx.TransportError):
        while True:
            yield engine.client.get("/health").status_code


def _tokens(engine):
    return engine.metrics()["vllm:generation_tokens_total"]


def test_a_killed_api_server_leaves_its_engine_behind(box):
    with box.start(*spec(1)) as engine:
        engine.ready()
        orphan = engine.engine_pid()
        engine.signal(signal.SIGKILL)
        assert engine.wait() == -signal.SIGKILL
        os.kill(orphan, 0)
        os.kill(orphan, signal.SIGTERM)
        wait_until(lambda: not _lives(orphan), "end of the orphan", 5)


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- stops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_stop_ends_open_requests_with_abort_and_exits_0_without_a_crash_line(box, whole_group):
    with box.start(*spec(1)) as engine:
        engine.ready()
        with stream(engine) as answer:
            lines = answer.iter_lines()
            next(lines)
            if whole_group:
                os.killpg(engine.process.pid, signal.SIGTERM)
            else:
                engine.signal(signal.SIGTERM)
            *_, last, done = read_on(lines)
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        assert done == "data: [DONE]"
        assert engine.wait() == 0
    texts = [match["msg"] for match in map(LINE.match, engine.out.split("\n")) if match]
    order = [
        texts.index(text)
        for text in (
            "[shutdown] API server: shutdown triggered",
            "[shutdown] API server: stopping engine client mode=abort timeout=0s",
            "[shutdown] MPClient: complete",
            "[shutdown] API server: shutting down FastAPI HTTP server",
        )
    ]
    assert order == sorted(order)
    assert engine.has("[shutdown] EngineCore: trigger received signal=SIGTERM")
    assert not any(" ERROR " in line for line in engine.messages())
    assert "EngineDeadError" not in engine.out + engine.err


def test_with_a_shutdown_timeout_open_requests_finish_first(box):
    with box.start(*spec(1), "--shutdown-timeout", "20") as engine:
        engine.ready()
        with stream(engine, max_tokens=40) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine.signal(signal.SIGTERM)
            *_, last, _ = read_on(lines)
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert engine.wait() == 0
    assert engine.has("stopping engine client mode=drain timeout=20s")


def test_a_stop_signal_to_the_booting_server_alone_is_swallowed(tmp_path):
    with Box(tmp_path, scale=0.02, personality=SOON).start() as engine:
        engine.wait_for("Using V2 Model Runner")
        engine.signal(signal.SIGTERM)
        assert engine.ready().complete().status_code == 200
        assert engine.stop() == 0


def test_a_stop_signal_to_the_booting_group_leaves_a_server_that_waits_for_nothing(tmp_path):
    with Box(tmp_path, scale=0.1, personality=SOON).start() as engine:
        engine.wait_for("Using V2 Model Runner")
        os.killpg(engine.process.pid, signal.SIGTERM)
        engine.wait_for("KeyboardInterrupt: terminated")
        wait_until(lambda: not _lives(engine.engine_pid()), "end of the engine", 5)
        with pytest.raises(Exception, match="timed out"):
            engine.wait(0.5)
        engine.signal(signal.SIGTERM)
        assert engine.wait() == 130
