"""The harness of benchmarks/clients.py: what the stub sent is what our client counts, and nothing is made up."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def clients(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("clients", "drain", "peers")
    yield importlib.import_module("clients")
    for name in names:
        sys.modules.pop(name, None)


def test_our_client_counts_each_of_the_stubs_tokens_and_its_cpu_is_told_apart_from_its_start(clients):
    run = clients.measured("burst8", clients.own("ours"), (None, None))
    streams, requests = clients.RUNS["burst8"]
    assert run.answered == len(run.waited_s) == requests
    assert run.said.tokens == 256 * requests
    assert run.said.seconds > 0
    assert 0.05 < run.start_cpu_s < 5
    assert 0.05 < run.load_cpu_s < 20
    assert streams == 8


def test_a_load_generator_that_no_option_names_is_said_and_has_no_row(clients, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["clients.py", "--own", ""])
    monkeypatch.setattr(clients.os, "sched_setaffinity", lambda *_: None)
    clients.main()
    said = capsys.readouterr().out
    assert [line.split()[3] for line in said.splitlines() if line.startswith("- not run:")] == [
        "vllm",
        "aiperf",
        "guidellm",
    ]
    assert "| ours |" not in said


def test_a_load_generator_that_fails_has_no_number_and_its_words_are_told(clients):
    broken = clients.Client(lambda _job: [sys.executable, "-c", "raise SystemExit('no such model')"], lambda _: None)
    line, failures = clients.row("broken", broken, (None, None), 1)
    assert line.startswith("| broken | – | – | – | – | – | – | – | – | – | – |")
    assert len(failures) == len(clients.RUNS)
    assert "no such model" in failures[0]
