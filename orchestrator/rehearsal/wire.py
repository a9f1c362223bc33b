"""Small JSON messages between API server and EngineCore over a socket pair, and between engine and clock."""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any


class Gone(Exception):
    """The other end is closed."""


class Wire:
    """One end of the pair: a message is one JSON value on one line."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._buffer = b""

    def send(self, message: Any) -> None:
        """Sends a message; silently nothing when nobody listens any more."""
        try:
            self.socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return

    def receive(self) -> list[Any]:
        """All complete messages of one read from a readable socket.

        Raises:
            Gone: The other end is closed.
        """
        try:
            data = self.socket.recv(1 << 18)
        except (BlockingIOError, InterruptedError):
            return []
        except ConnectionResetError:
            data = b""
        if not data:
            raise Gone
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self, until: float | None) -> list[Any]:
        """Messages that arrive before a monotonic time, as soon as there are any; none when it has passed.

        Raises:
            Gone: The other end is closed.
        """
        left = None if until is None else max(until - time.monotonic(), 0.0)
        ready, _, _ = select.select([self.socket], [], [], left)
        return self.receive() if ready else []


class Phases:
    """Lets time pass phase by phase against an absolute schedule, shortened by the time scale."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.due = time.monotonic()

    def spend(self, seconds: float) -> float:
        """Waits until the phase is over; returns its scaled length in seconds."""
        length = seconds * self.scale
        self.due = max(self.due, time.monotonic() - 1.0) + length
        while (left := self.due - time.monotonic()) > 0:
            select.select([], [], [], left)
        return length
