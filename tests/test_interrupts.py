"""A signal becomes a wish that every wait notices."""

from __future__ import annotations

import os
import signal
import time

import pytest

from orchestrator.interrupts import Interrupts


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM"), (signal.SIGHUP, 143, "SIGHUP")],
)
def test_each_signal_has_its_exit_code(number, code, word):
    with Interrupts() as interrupts:
        os.kill(os.getpid(), number)
        assert interrupts.wait(5)
        assert interrupts.exit_code == code
        assert word in str(interrupts.reason)


def test_the_first_wish_stays_and_each_is_told():
    told = []
    with Interrupts(told.append) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.wait(5)
    assert interrupts.exit_code == 143
    assert len(told) == 2


def test_the_process_gets_its_own_handlers_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_a_wish_waiting_ends_by_its_deadline():
    begun = time.monotonic()
    assert not Interrupts().wait(0.02)
    assert time.monotonic() - begun >= 0.02
