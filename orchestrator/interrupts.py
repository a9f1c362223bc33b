"""Ctrl-C, SIGTERM and SIGHUP as a wish that every wait notices, so that production is restored before we end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from orchestrator.errors import INTERRUPTED, TERMINATED

_WISHES = {
    signal.SIGINT: ("interrupted by Ctrl-C", INTERRUPTED),
    signal.SIGTERM: ("terminated by SIGTERM", TERMINATED),
    signal.SIGHUP: ("the terminal hung up (SIGHUP)", TERMINATED),
}


class Interrupts:
    """Holds the wish to stop. As a context manager it takes the signals of the process, and gives them back."""

    def __init__(self, on_wish: Callable[[str], None] | None = None) -> None:
        """`on_wish` is told each wish; it runs inside a signal handler and must not block."""
        self.reason: str | None = None
        self.exit_code = INTERRUPTED
        self._event = threading.Event()
        self._on_wish = on_wish
        self._before: dict[signal.Signals, Any] = {}

    def wish(self, reason: str, exit_code: int = INTERRUPTED) -> None:
        """Asks for the end; the first reason stays."""
        if self.reason is None:
            self.reason = reason
            self.exit_code = exit_code
        self._event.set()
        if self._on_wish is not None:
            self._on_wish(reason)

    def wait(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s`; True as soon as there is a wish."""
        return self._event.wait(timeout_s)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.wish(*_WISHES[signal.Signals(number)])

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _WISHES}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
