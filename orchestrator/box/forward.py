"""A port of the box, answered on a port of this machine: each connection is a channel of the one ssh connection.

A connection that the box refuses is reset at once, so that polling for readiness sees what it would see there.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

import paramiko

_CHUNK = 65536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

OpenChannel = Callable[[tuple[str, int]], paramiko.Channel]
"""Opens a channel to `127.0.0.1:port` of the box; raises ConnectionRefusedError when there is none to be had."""


class Forward:
    """Listens on a free port of 127.0.0.1 until closed. Threads: one that accepts, two a connection."""

    def __init__(self, port: int, open_channel: OpenChannel) -> None:
        self._open = open_channel
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, name=f"forward-{port}", daemon=True).start()

    def close(self) -> None:
        """Stop listening and cut every connection."""
        with self._lock:
            self._closed = True
            sockets = tuple(self._sockets)
        # shutdown wakes the thread in accept; close alone would not.
        for one in (self._listener, *sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, peer = self._listener.accept()
            except OSError:
                return
            # Refused by a client that is gone already; its thread will see that.
            with contextlib.suppress(OSError):
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if self._closed:
                    client.close()
                    return
                self._sockets.add(client)
            threading.Thread(target=self._serve, args=(client, peer), name=f"forward-{self._port}", daemon=True).start()

    def _serve(self, client: socket.socket, peer: tuple[str, int]) -> None:
        try:
            channel = self._open(peer)
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        else:
            up = threading.Thread(target=_up, args=(client, channel), name=f"forward-{self._port}-up", daemon=True)
            up.start()
            _down(channel, client)
            up.join()
        with self._lock:
            self._sockets.discard(client)
        client.close()


# Either side may go at any moment, and the connection below both: that ends the pair, and is no error here.
_GONE = (OSError, EOFError, paramiko.SSHException)


def _up(client: socket.socket, channel: paramiko.Channel) -> None:
    with contextlib.suppress(*_GONE):
        while data := client.recv(_CHUNK):
            channel.sendall(data)
        # The client will say no more, but may still listen.
        channel.shutdown_write()
        return
    with contextlib.suppress(*_GONE):
        channel.close()


def _down(channel: paramiko.Channel, client: socket.socket) -> None:
    with contextlib.suppress(*_GONE):
        while data := channel.recv(_CHUNK):
            client.sendall(data)
    with contextlib.suppress(*_GONE):
        channel.close()
    with contextlib.suppress(*_GONE):
        client.shutdown(socket.SHUT_RDWR)
