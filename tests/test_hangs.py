"""What hangs comes to an end, with the outcome that the table says."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_boot import DEADLINES, Bench, bench

from orchestrator import boot as boot_room
from orchestrator import exercise, life
from orchestrator.box import facts
from orchestrator.hangs import HANGS, LATE, page
from orchestrator.matrix import Deadlines
from orchestrator.records import STEPS, StepEnded

ROOT = Path(__file__).parent.parent
__all__ = ["bench"]

# Accepts, reads, and says nothing; `healthy` answers /health alone.
SERVER = """
import socket, sys, threading
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("here", flush=True)
kept = []
def serve(one):
    said = one.recv(65536)
    if sys.argv[2] == "healthy" and b"/health" in said:
        one.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\nconnection: close\\r\\n\\r\\n")
        one.close()
    kept.append(one)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


def launch_of(bench: Bench, kind: str):
    argv = (sys.executable, "-c", SERVER, str(bench.port), kind)
    return replace(bench.launch(1), argv=argv)


def squatter(bench: Bench, kind: str):
    """Takes the boot's port as soon as the slate was clean; ends with the test."""

    def take(record) -> None:
        if isinstance(record, StepEnded) and record.name == "clean_slate":
            argv = (sys.executable, "-c", SERVER, str(bench.port), kind)
            bench.stranger = subprocess.Popen(argv, stdout=subprocess.PIPE)
            assert bench.stranger.stdout is not None
            assert bench.stranger.stdout.readline() == b"here\n"

    return take


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("healthy", "another program than the engine answers on port {port}"),
        ("mute", "somebody else took the engine's port (port_in_use)"),
    ],
)
def test_a_stranger_on_the_engines_port_is_not_measured_and_blames_no_variant(bench, kind, why):
    try:
        bench.boot(bench.launch(1), at=squatter(bench, kind))
    finally:
        bench.stranger.kill()
        bench.stranger.communicate()
    assert (bench.end.boot_outcome, bench.end.step) == ("disturbed", "ready")
    assert bench.end.why == why.format(port=bench.port)
    assert bench.trials == []


def test_a_server_that_never_answers_health_is_not_ready_by_its_deadline(bench):
    bench.deadlines = DEADLINES.model_copy(update={"ready_s": 1.0})
    bench.boot(launch_of(bench, "mute"))
    assert (bench.end.boot_outcome, bench.end.died, bench.end.step) == (LATE["ready"], False, "ready")
    assert bench.step("ready").seconds < 5
    assert bench.service.pids() == ()


def test_a_server_that_is_healthy_and_never_answers_ends_at_the_first_request(bench, monkeypatch):
    monkeypatch.setattr(exercise, "ALIVE_S", 0.5)
    bench.deadlines = DEADLINES.model_copy(update={"first_request_s": 0.5})
    bench.boot(launch_of(bench, "healthy"))
    assert (bench.end.boot_outcome, bench.end.step) == (LATE["first_request"], "first_request")
    assert bench.end.why == "the engine answers no request any more (0.5 s after an error)"
    assert bench.service.pids() == ()


class Nothing:
    """The entries of a journal that says nothing."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def __iter__(self):
        self.closed.wait(30)
        return iter(())

    def close(self) -> None:
        self.closed.set()


def test_a_journal_that_says_nothing_disturbs_the_boot_since_nothing_tells_that_it_was_cold(bench, monkeypatch):
    monkeypatch.setattr(bench.service, "follow", lambda _cursor: Nothing())
    bench.boot(bench.launch(1))
    assert (bench.end.boot_outcome, bench.end.step) == ("disturbed", "ready")
    assert bench.end.why == "the journal is silent: not one entry since the start"
    assert bench.service.pids() == ()


def test_memory_that_does_not_drain_disturbs_the_boot_and_names_gpu_and_numbers(bench, monkeypatch):
    bench.deadlines = DEADLINES.model_copy(update={"clean_slate_s": 0.5})
    gpu = facts.Gpu(0, "GPU-0", 24576, 900, 23676, None, None, None, None, None)
    monkeypatch.setattr(boot_room.facts, "gpu_state", lambda _transport: facts.GpuState((gpu,), ()))
    bench.idle = life.GpuIdle((12,))
    begun = time.monotonic()
    bench.boot(bench.launch(1))
    assert bench.steps == ["clean_slate", "stop"]
    assert bench.end.boot_outcome == LATE["clean_slate"]
    assert "GPU 0 still has 900 MiB in use, 12 MiB when idle" in bench.end.why
    assert time.monotonic() - begun < 10


def test_a_gpu_that_is_too_hot_is_waited_for_and_named(bench, monkeypatch):
    bench.deadlines = DEADLINES.model_copy(update={"clean_slate_s": 0.5})
    gpu = facts.Gpu(0, "GPU-0", 24576, 12, 24564, None, 81, None, None, None)
    monkeypatch.setattr(boot_room.facts, "gpu_state", lambda _transport: facts.GpuState((gpu,), ()))
    bench.temperature_c = 80
    bench.boot(bench.launch(1))
    assert bench.end.boot_outcome == "disturbed"
    assert "GPU 0 has 81 °C, limit 80" in bench.end.why


def test_every_late_step_is_a_step_with_a_deadline_of_its_own():
    names = {"trials": "trial_s"}
    for step in LATE:
        assert step in STEPS
        assert names.get(step, f"{step}_s") in Deadlines.model_fields


def test_the_page_shows_the_table_as_the_code_has_it():
    assert page() in (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    assert len(HANGS) == 12
