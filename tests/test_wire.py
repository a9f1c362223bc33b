"""Plain connections stamped by the kernel: over real sockets, with a reader that is late on purpose."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from orchestrator import wire
from orchestrator.client import run

pytestmark = pytest.mark.skipif(not wire.AVAILABLE, reason="epoll and SO_TIMESTAMPNS are Linux's")
TIMESPEC = struct.Struct("@qq")


class Heard:
    """What a wire tells, and a way to wait for it."""

    def __init__(self) -> None:
        self.pieces: list[tuple[bytes, float]] = []
        self.lost: list[Exception | None] = []
        self.news = asyncio.Event()

    def bytes_received(self, data: bytes, at_s: float) -> None:
        self.pieces.append((data, at_s))
        self.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)
        self.news.set()

    async def until(self, done) -> None:
        async with asyncio.timeout(20):
            while not done():
                await self.news.wait()
                self.news.clear()

    @property
    def data(self) -> bytes:
        return b"".join(piece for piece, _ in self.pieces)


def with_peer(talk) -> None:
    """Run `talk(wires, wire, heard, peer)` with a connected wire and the socket at its other end."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            wires, heard = wire.Wires(), Heard()
            mine = await wires.connect("127.0.0.1", listener.getsockname()[1], heard)
            peer, _ = listener.accept()
            with peer:
                try:
                    await talk(wires, mine, heard, peer)
                finally:
                    mine.abort()

    run(main())


def test_bytes_bear_the_time_of_their_arrival_however_late_they_are_read():
    async def talk(wires, mine, heard, peer):
        peer.send(b"the kernel begins to stamp with the first socket that asks for it")
        await heard.until(lambda: heard.pieces)
        before = time.monotonic()
        peer.send(b"one")
        after = time.monotonic()
        blocked_until = after + 0.3
        while time.monotonic() < blocked_until:  # the loop is busy, as with 63 other streams
            pass
        await heard.until(lambda: len(heard.pieces) == 2)
        assert before - 0.001 <= heard.pieces[1][1] <= after + 0.05

    with_peer(talk)


def test_connections_that_are_read_together_have_each_its_own_time():
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            wires, heards = wire.Wires(), [Heard() for _ in range(3)]
            mine = [await wires.connect("127.0.0.1", listener.getsockname()[1], heard) for heard in heards]
            peers = [listener.accept()[0] for _ in mine]
            sent = []
            for peer in peers:
                sent.append(time.monotonic())
                peer.send(b"x")
                until = time.monotonic() + 0.05
                while time.monotonic() < until:
                    pass
            for heard in heards:
                await heard.until(lambda heard=heard: heard.pieces)
            stamps = [heard.pieces[0][1] for heard in heards]
            for peer, one in zip(peers, mine, strict=True):
                one.abort()
                peer.close()
        assert all(later - earlier > 0.03 for earlier, later in itertools.pairwise(stamps)), (sent, stamps)

    run(main())


@pytest.mark.parametrize(
    "ancillary",
    [
        [],
        [(socket.SOL_SOCKET, 35, b"short")],
        [(socket.SOL_SOCKET, 35, TIMESPEC.pack(0, 1))],  # the clock was set by years since
        [(socket.SOL_SOCKET, 35, TIMESPEC.pack(int(time.time()) + 3600, 0))],  # or back
        [(socket.SOL_SOCKET, 29, TIMESPEC.pack(int(time.time()), 0))],  # something else
    ],
)
def test_where_the_kernel_tells_nothing_of_use_a_chunk_has_the_time_of_its_reading(ancillary):
    wires = wire.Wires()
    wires.read_clocks()
    before = time.monotonic()
    assert before <= wires.stamp_s(ancillary) <= time.monotonic()


def test_a_kernel_without_stamps(monkeypatch):
    monkeypatch.setattr(wire, "_SO_TIMESTAMPNS", 9999)

    async def talk(wires, mine, heard, peer):
        before = time.monotonic()
        peer.send(b"one")
        await heard.until(lambda: heard.pieces)
        assert before <= heard.pieces[0][1] <= time.monotonic()

    with_peer(talk)


def test_a_message_larger_than_all_buffers_goes_out_whole_and_in_order():
    message = os.urandom(1 << 20) * 24

    async def talk(wires, mine, heard, peer):
        got = bytearray()

        def read() -> None:
            while len(got) < len(message) + 4:
                got.extend(peer.recv(1 << 16))
            peer.send(b"done")

        mine.write(message)
        mine.write(b"tail")
        reader = threading.Thread(target=read)
        reader.start()
        await heard.until(lambda: heard.pieces)
        reader.join(20)
        assert bytes(got) == message + b"tail"

    with_peer(talk)


def test_an_orderly_end_and_a_reset_are_told_and_close_the_wire():
    async def ends(wires, mine, heard, peer):
        peer.send(b"last words")
        peer.close()
        await heard.until(lambda: heard.lost)
        assert (heard.data, heard.lost, mine.is_closing()) == (b"last words", [None], True)
        mine.write(b"nobody reads this")

    async def resets(wires, mine, heard, peer):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        await heard.until(lambda: heard.lost)
        assert isinstance(heard.lost[0], ConnectionResetError)
        assert mine.is_closing()

    with_peer(ends)
    with_peer(resets)


def test_what_is_closed_by_us_is_told_nothing_and_leaves_no_descriptor():
    before = len(list(Path("/proc/self/fd").iterdir()))

    async def talk(wires, mine, heard, peer):
        peer.send(b"unread")
        mine.abort()
        mine.abort()
        await asyncio.sleep(0)
        assert (heard.pieces, heard.lost, mine.is_closing()) == ([], [], True)

    with_peer(talk)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_second_address_of_a_host_is_tried_when_the_first_takes_nobody():
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            loop = asyncio.get_running_loop()
            both = [*await loop.getaddrinfo("127.0.0.2", port, type=socket.SOCK_STREAM)]
            both += await loop.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)

            async def getaddrinfo(*_, **__):
                return both

            wires = wire.Wires(resolve=getaddrinfo)
            mine = await wires.connect("two.addresses", port, Heard())
            assert not mine.is_closing()
            mine.abort()

    run(main())


def test_nobody_takes_the_connection():
    async def main() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            with pytest.raises(ConnectionRefusedError):
                await wire.Wires().connect("127.0.0.1", closed.getsockname()[1], Heard())

    run(main())
