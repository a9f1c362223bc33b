"""A small HTTP/1.1 server on asyncio and httptools, with uvicorn's manners.

It stands here because importing a full framework costs more CPU than a whole rehearsal boot may.  Answers are written
by callbacks, not coroutines: a stream is a handful of writes.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

import httptools

_PHRASES = {status.value: status.phrase for status in HTTPStatus}


@dataclass
class Request:
    """One HTTP request and the way to answer it; exactly one of the answering methods starts the answer.

    Attributes:
        on_disconnect: Called when the client goes away before the answer is complete.
    """

    connection: Connection
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    version: str
    keep_alive: bool
    on_disconnect: Callable[[], None] | None = None
    status: int = 0
    done: bool = False
    sent: int = 0

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    def json(self, value: Any, status: int = 200) -> None:
        """Answers with JSON."""
        self.answer(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(), "application/json", status)

    def answer(
        self, body: bytes, content_type: str | None, status: int = 200, extra: Mapping[str, str] | None = None
    ) -> None:
        """Answers as a whole."""
        if self.done:
            return
        headers = dict(extra or {})
        if content_type:
            headers["content-type"] = content_type
        headers["content-length"] = str(len(body))
        self.sent = len(body)
        self._head(status, headers, b"" if self.method == "HEAD" else body)
        self._finish()

    def start_stream(self) -> None:
        """Starts a stream of server-sent events."""
        self._head(200, {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"}, b"")

    def event(self, data: str) -> None:
        """Sends one event of a started stream."""
        if self.done:
            return
        payload = f"data: {data}\n\n".encode()
        self.sent += len(payload)
        self.connection.write(b"%x\r\n%b\r\n" % (len(payload), payload))

    def end_stream(self) -> None:
        """Ends a started stream."""
        if not self.done:
            self.connection.write(b"0\r\n\r\n")
            self._finish()

    def _head(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.connection.server.log_access(self)
        lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, '')}", "server: uvicorn"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if not self.keep_alive:
            lines.append("connection: close")
        self.connection.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def _finish(self) -> None:
        self.done = True
        self.on_disconnect = None
        self.connection.finished(self)


@dataclass
class Server:
    """What all connections share."""

    handle: Callable[[Request], None]
    log_access: Callable[[Request], None]
    warn: Callable[[str], None]
    keep_alive_s: float
    connections: set[Connection] = field(default_factory=set)

    def close_idle(self) -> None:
        """Closes connections that wait for a next request, and makes the others close after their answer."""
        for connection in list(self.connections):
            connection.shut()


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.peer = "-"
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Request] = deque()
        self._current: Request | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._closing = False
        self._reset()

    # --- asyncio ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if peer and len(peer) > 1 else ""
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        del exc
        self.server.connections.discard(self)
        self._stop_timer()
        self._queue.clear()
        current, self._current = self._current, None
        if current is not None:
            current.done = True
            if current.on_disconnect is not None:
                current.on_disconnect()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        self._stop_timer()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return
        except httptools.HttpParserError:
            self.server.warn("Invalid HTTP request received.")
            self.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
                b"content-length: 30\r\n\r\nInvalid HTTP request received."
            )
            self.close()

    def eof_received(self) -> bool:
        """The client sends no more: uvicorn closes too."""
        return False

    # --- httptools ----------------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        """The target, perhaps in parts."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All headers are there."""
        if self._headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        request = Request(
            connection=self,
            method=self._parser.get_method().decode("latin-1"),
            target=self._url.decode("latin-1"),
            headers=self._headers,
            body=b"".join(self._body),
            version=self._parser.get_http_version(),
            keep_alive=self._parser.should_keep_alive(),
        )
        self._reset()
        self._queue.append(request)
        self._next()

    # --- answering ----------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Sends bytes unless the client has gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def finished(self, request: Request) -> None:
        """An answer is complete: take the next request or wait for it."""
        self._current = None
        if not request.keep_alive or self._closing:
            self.close()
        elif self._queue:
            self._loop.call_soon(self._next)
        else:
            self._idle = self._loop.call_later(self.server.keep_alive_s, self.close)

    def close(self) -> None:
        """Closes after what is written has been sent."""
        if self._transport is not None:
            self._transport.close()

    def shut(self) -> None:
        """Closes now when idle, else after the current answer."""
        self._closing = True
        if self._current is None:
            self.close()

    def _next(self) -> None:
        if self._current is None and self._queue:
            self._current = self._queue.popleft()
            self.server.handle(self._current)

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    def _stop_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
