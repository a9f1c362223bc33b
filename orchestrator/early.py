"""Signals outside of a campaign: while modules are loaded, and while a command runs that takes none itself.

Before the first command nothing has begun, so the process ends at once, with the exit code and the line that it
promises. A command that runs is ended by an exception, so that it takes away what it started. Imports nothing of ours.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

_PROGRAMS = ("invoke", "inv", "coldboot")
_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP while a command runs; its text is the signal's name."""


def _end(number: int, _frame: FrameType | None) -> None:
    os.write(2, b"coldboot: interrupted before anything was begun; nothing was changed\n")
    os._exit(_CODES[signal.Signals(number)])


def _stop(number: int, _frame: FrameType | None) -> None:
    raise Terminated(signal.Signals(number).name)


def is_program(argv0: str) -> bool:
    """Whether this process is one of the programs that run our tasks, and not another that imports them."""
    path = Path(argv0)
    return (path.parent.name if path.stem == "__main__" else path.stem) in _PROGRAMS


def until_begun() -> None:
    """Takes the signals, until `begun` gives them back."""
    for number in _CODES:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)


def begun() -> None:
    """A command runs now: each signal is an exception in it, `KeyboardInterrupt` or `Terminated`."""
    for number in _CODES:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _stop)
