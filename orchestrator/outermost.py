"""The outermost door of every command: what a function returns or raises becomes the process's exit code and one line.

Every failure on purpose is a `ColdbootError`, which knows its exit code; anything else is one line here and a traceback
in a file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from orchestrator import early
from orchestrator.closing import spoken
from orchestrator.errors import INTERRUPTED, OK, TERMINATED, USAGE, ColdbootError
from orchestrator.later import load_for
from orchestrator.progress import folded
from orchestrator.redact import redact_text

_NO_CAMPAIGN = "no campaign was under way; what is recorded stays"
_STOPPED = {
    "matrix": _NO_CAMPAIGN,  # before it, or after it, while `on_end` runs
    "aa": _NO_CAMPAIGN,
    "report": "each of its files is whole, and may be the one of before",
    "restore": "it may be half done: run it again",
}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def _streams() -> None:
    """A closed stream takes all and keeps nothing; what an encoding has no letter for is a question mark in it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `>&-`, and some that start us without one
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - the process has it
        elif isinstance(stream, io.TextIOWrapper) and (stream.encoding or "").lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="replace")


def say(text: str) -> None:
    """One message on standard error. Where that is full the command goes on: its result and exit code matter more."""
    with contextlib.suppress(OSError):
        sys.stderr.write(folded(text.rstrip("\n"), width(sys.stderr)) + "\n")


def show(text: str) -> None:
    """A result in words on standard output. What is to be copied line by line is printed as it is."""
    print(folded(text, width(sys.stdout)))


def width(stream: TextIO) -> int | None:
    """Columns where it is a terminal; None for a log and a pipe, which get whole lines."""
    return Console(file=stream).width if stream.isatty() else None


def _keep_traceback(name: str) -> Path:
    with tempfile.NamedTemporaryFile("w", prefix=f"coldboot-{name}-", suffix=".log", delete=False) as file:
        file.write(redact_text(traceback.format_exc()))
    return Path(file.name)


def _bug(name: str, error: Exception, code: int) -> int:
    where = _keep_traceback(name)
    say(f"coldboot {name}: unexpected {type(error).__name__}: {redact_text(str(error))}; details in {where}")
    return code


def _stopped(name: str, stop: KeyboardInterrupt) -> int:
    """A signal that no campaign took: nothing is left to restore, and what there is to know is said."""
    terminated = isinstance(stop, early.Terminated)
    how = f"terminated by {stop}" if terminated else "interrupted by Ctrl-C"
    say(f"coldboot {name}: {how}; {_STOPPED.get(name, 'nothing was changed')}")
    return TERMINATED if terminated else INTERRUPTED


def _silence() -> None:
    """What Python still holds for standard output must not fail at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _full(name: str) -> int:
    """The disk below the result is full; no traceback either, which would need room, too."""
    _silence()
    what = "no space left on the device: the result could not be written whole"
    say(f"coldboot {name}: {what}\n  → make room, and run it again")
    return USAGE


def _os_error(name: str, error: OSError, code: int) -> int:
    if error.errno in _NO_ROOM:
        return _full(name)
    if isinstance(error, PermissionError) and error.filename is not None:
        say(f"coldboot {name}: {error.filename}: {error.strerror}")  # of this side: boxes have doors of their own
        return USAGE
    return _bug(name, error, code)


def command(unexpected: int) -> Callable[[Callable[..., int]], Callable[..., None]]:
    """Turns what a function returns or raises into the process's exit code; `unexpected` is a bug's."""

    def wrap(function: Callable[..., int]) -> Callable[..., None]:
        name = function.__name__.rstrip("_").replace("_", "-")

        @wraps(function)
        def ended(*args: Any, **kwargs: Any) -> None:
            _streams()
            try:
                load_for(function)
                early.begun()
                code = function(*args, **kwargs)
                print(end="", flush=True)  # at the interpreter's own end nobody could say what went wrong
            except ColdbootError as error:
                say(f"coldboot {name}: {redact_text(spoken(str(error)))}")
                code = error.exit_code
            except KeyboardInterrupt as stop:
                code = _stopped(name, stop)
            except BrokenPipeError:
                # Whoever read the result (`| head`) has enough.
                _silence()
                code = OK
            except OSError as error:
                code = _os_error(name, error, unexpected)
            except Exception as error:  # noqa: BLE001 - the outermost door: a bug is one line, its traceback a file
                code = _bug(name, error, unexpected)
            if code != OK:
                sys.exit(code)

        return ended

    return wrap
