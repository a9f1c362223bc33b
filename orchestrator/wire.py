"""Plain TCP connections of the load, stamped by the kernel: when bytes came in, not when we got round to reading them.

A load client that reads one socket after the other stamps the last of 64 answers by the time that the 63 before it
took. Linux notes when each segment arrived (SO_TIMESTAMPNS) and tells it with the bytes; that is the time of the chunk
here, however late we are. Where a kernel tells none, a chunk has the time of its reading.

Since lateness costs no truth, it may save work: while chunks come densely (`_DENSE` wake-ups in a row, each within
`PAUSE_S` of the one before), the sockets of one `Wires` are looked at together, once every `PAUSE_S`. A stream's next
request is sent that much later at most, and not at all later where chunks are sparse.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

PAUSE_S = 0.00025
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h, the same on x86-64 and arm64; Python names it from 3.14 on
_TIMESPEC = struct.Struct("@qq")
_ROOM = socket.CMSG_SPACE(_TIMESPEC.size) if hasattr(socket, "CMSG_SPACE") else 0
_MOST = 1 << 14
_DENSE = 16
# Two readings of one clock around a reading of the other, further apart than this: we were set aside between them.
_TIGHT_NS = 5_000
# A stamp older than this is none: the clock was set meanwhile.
_OLDEST_NS = 60 * 10**9

AVAILABLE = sys.platform == "linux"


Resolve = Callable[..., Awaitable[Sequence[tuple[int, int, int, str, Any]]]]


class Reader(Protocol):
    """Who is told what came in. Times are `time.monotonic()` seconds."""

    def bytes_received(self, data: bytes, at_s: float) -> None:
        """Bytes, and when the last of them arrived."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side is gone; None when it closed in order."""


class Wires:
    """The connections of one client: one epoll for all, which the event loop watches."""

    def __init__(self, resolve: Resolve | None = None) -> None:
        """Nothing yet. `resolve` has the form of the event loop's own getaddrinfo, which it replaces."""
        self._resolve = resolve
        self._epoll: select.epoll | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wires: dict[int, Wire] = {}
        self._looked_s = 0.0
        self._streak = 0
        self._offset_ns = 0
        self._now_ns = 0

    async def connect(self, host: str, port: int, reader: Reader) -> Wire:
        """A connection to the first address of the host that takes it.

        Raises:
            OSError: none does; the last address's error.
        """
        loop = asyncio.get_running_loop()
        found = await (self._resolve or loop.getaddrinfo)(host, port, type=socket.SOCK_STREAM)
        failure: OSError = OSError(f"no address of {host}")
        for family, kind, proto, _, address in found:
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, proto)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
                await loop.sock_connect(sock, address)
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
            else:
                return Wire(self, sock, reader)
        raise failure

    def add(self, wire: Wire, number: int) -> None:
        """Watch one more."""
        if self._epoll is None:
            self._epoll = select.epoll()
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._epoll.fileno(), self._ready)
        self._wires[number] = wire
        self._epoll.register(number, select.EPOLLIN)

    def expect(self, number: int, *, writing: bool) -> None:
        """Whether room to write is waited for too."""
        assert self._epoll is not None
        self._epoll.modify(number, select.EPOLLIN | (select.EPOLLOUT if writing else 0))

    def drop(self, number: int) -> None:
        """Watch one no more; with the last one goes the epoll."""
        if self._wires.pop(number, None) is None or self._epoll is None:
            return
        self._epoll.unregister(number)
        if not self._wires:
            assert self._loop is not None
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = self._loop = None

    def stamp_s(self, ancillary: list[tuple[int, int, bytes]]) -> float:
        """When the bytes came in: what the kernel says, else now."""
        for _, kind, data in ancillary:
            if kind == _SO_TIMESTAMPNS and len(data) == _TIMESPEC.size:
                seconds, nanoseconds = _TIMESPEC.unpack(data)
                at_ns: int = seconds * 1_000_000_000 + nanoseconds + self._offset_ns
                if self._now_ns - _OLDEST_NS < at_ns < self._now_ns:
                    return at_ns / 1e9
        return time.monotonic()

    def _ready(self) -> None:
        early_s = self._looked_s + PAUSE_S - time.monotonic()
        self._streak = self._streak + 1 if early_s > 0 else 0
        waited = self._streak > _DENSE
        if waited:
            time.sleep(early_s)
        if self._epoll is None:
            return
        events = self._epoll.poll(0)
        if waited and len(events) < 2:  # one alone was worth no waiting
            self._streak = 0
        self.read_clocks()
        self._looked_s = self._now_ns / 1e9
        for number, event in events:
            wire = self._wires.get(number)
            if wire is not None:
                wire.ready(event)

    def read_clocks(self) -> None:
        """What to add to the kernel's clock (real time) to have ours; of three tries the tightest."""
        best = 1 << 62
        for _ in range(3):
            before, real, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
            if after - before < best:
                best = after - before
                self._offset_ns = (before + after) // 2 - real
                self._now_ns = after
            if best < _TIGHT_NS:
                break


class Wire:
    """One connection. `write` and `abort` are all that is done to it; what comes is told to its reader."""

    def __init__(self, wires: Wires, sock: socket.socket, reader: Reader) -> None:
        self._wires = wires
        self._sock: socket.socket | None = sock
        self._number = sock.fileno()
        self._reader = reader
        self._unsent = b""
        self._last_s = 0.0
        wires.add(self, self._number)

    def is_closing(self) -> bool:
        """Whether it is closed."""
        return self._sock is None

    def write(self, message: bytes) -> None:
        """Send now what goes, and the rest when there is room. A broken connection is told by reading."""
        if self._sock is None:
            return
        if not self._unsent:
            message = message[self._send(message) :]
            if not message:
                return
            self._wires.expect(self._number, writing=True)
        self._unsent += message

    def _send(self, message: bytes) -> int:
        assert self._sock is not None
        try:
            return self._sock.send(message)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(message)

    def abort(self) -> None:
        """Close now; the reader is not told."""
        if self._sock is not None:
            self._wires.drop(self._number)
            self._sock.close()
            self._sock = None

    def ready(self, event: int) -> None:
        """Epoll says that there is something to do."""
        if event & ~select.EPOLLOUT:
            self._read()
        if event & select.EPOLLOUT and self._sock is not None:
            self._unsent = self._unsent[self._send(self._unsent) :]
            if not self._unsent:
                self._wires.expect(self._number, writing=False)

    def _read(self) -> None:
        assert self._sock is not None
        try:
            data, ancillary, _, _ = self._sock.recvmsg(_MOST, _ROOM)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(error)
            return
        if not data:
            self._lost(None)
            return
        self._last_s = at_s = max(self._wires.stamp_s(ancillary), self._last_s)
        self._reader.bytes_received(data, at_s)

    def _lost(self, error: OSError | None) -> None:
        self.abort()
        self._reader.connection_lost(error)
