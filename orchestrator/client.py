"""The streaming HTTP client of the load: httptools and orjson over `wire`, or over asyncio with TLS; on uvloop.

One `Connection` carries one request at a time and is kept alive between requests. Cost per streamed chunk is what
matters (see benchmarks/clients.py): a chunk that differs from the one before it only in its text is not parsed as JSON.
Every way in which a request may end badly has a name, see `KINDS`; nothing here raises for what the server does.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httptools
import orjson

from orchestrator import wire
from orchestrator.errors import UsageError
from orchestrator.records import RequestTiming

try:
    import uvloop
except ImportError:  # no wheels for this platform
    uvloop = None  # type: ignore[assignment]

Endpoint = Literal["chat", "completions"]
PATHS: Mapping[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

KINDS: Mapping[str, str] = {
    "http_NNN": "the status, for any that is not 200 (but 3xx)",
    "redirect": "3xx: never followed, the load would go to somebody else",
    "error_chunk": "an `error` object under HTTP 200",
    "abort": "finish_reason abort under HTTP 200",
    "cut_stream": "the answer broke off: connection lost inside it, or a stream without [DONE]",
    "empty_stream": "an answer that ended well and held neither text nor tokens",
    "not_sse": "200 with something that is no event stream (HTML)",
    "bad_json": "200 with JSON that cannot be read, or an event that is none",
    "bad_http": "no HTTP/1.1 answer at all",
    "too_big": "one event or body above 8 MiB",
    "timeout": "the request's deadline passed (a stall)",
    "connection_refused": "nothing listens",
    "connection_lost": "the connection broke before any answer",
    "connect_timeout": "no connection within the connect time-out",
    "connect_failed": "any other failure to connect (no route, unknown name)",
    "tls": "the certificate is not trusted, or no TLS is spoken",
    "cancelled": "we gave it up ourselves",
}
"""How a request may fail: the first word of `RequestTiming.error`, before `: ` and what was seen."""

_MAX_BYTES = 8 << 20
_SPECIAL = re.compile(rb'["\\\r\n]').search
_EXCERPT = 200

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on an event loop of its own (uvloop where present) and close it."""
    factory = None if uvloop is None else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


@dataclass(frozen=True, slots=True)
class Target:
    """The server under load. `base_url` is `http://host:port`; a trailing `/v1` is dropped. `ca_file` for https."""

    base_url: str
    model: str
    api_key: str | None = None
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.base_url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            usable = False
        if not usable:
            raise UsageError(f"{self.base_url!r} is no base URL", hint="http://host:port or https://host:port")

    def __repr__(self) -> str:
        return f"Target({self.base_url!r}, {self.model!r}, api_key={'…' if self.api_key else None})"


class EventStream:
    """Server-sent events, fed in pieces cut at any byte: returns the `data` of each event that is complete."""

    __slots__ = ("_data", "_rest", "_start")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._start = True

    @property
    def idle(self) -> bool:
        """Whether the next byte begins an event."""
        return not self._rest and not self._data

    @property
    def pending(self) -> int:
        """Bytes held back because their event is not complete."""
        return len(self._rest) + sum(map(len, self._data))

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that `piece` completes, in order."""
        # One whole event a piece, as servers write them: no copying.
        if (
            not self._rest
            and not self._data
            and piece[:6] == b"data: "
            and piece[-2:] == b"\n\n"
            and piece.find(b"\r") < 0  # faster than `in`
            and piece.find(b"\n", 0, -2) < 0
        ):
            self._start = False
            return [piece[6:-2]]
        return self._slow(piece)

    def _slow(self, piece: bytes) -> list[bytes]:
        text = self._rest + piece
        if self._start:
            if len(text) < 3 and b"\xef\xbb\xbf".startswith(text):
                self._rest = text
                return []
            text = text.removeprefix(b"\xef\xbb\xbf")
            self._start = False
        # A CR at the very end may be the first half of CRLF: it waits for the next byte.
        held = b"\r" if text.endswith(b"\r") else b""
        if b"\r" in text:
            text = text[: len(text) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = text.split(b"\n")
        self._rest = lines.pop() + held
        events: list[bytes] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        return events


class Answer:
    """One request's answer as it comes in. Times are `time.monotonic()` seconds."""

    __slots__ = (
        "_events",
        "_prefix",
        "_suffix",
        "_tries",
        "body",
        "chunk_at",
        "completion_tokens",
        "detail",
        "done",
        "ended_at",
        "finish_reason",
        "headers",
        "kind",
        "parts",
        "prompt_tokens",
        "sent_at",
        "status",
        "stream",
    )

    def __init__(self, *, stream: bool) -> None:
        self.stream = stream
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.sent_at = 0.0
        self.ended_at = 0.0
        self.chunk_at: list[float] = []
        self.parts: list[bytes] = []
        self.body = bytearray()
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.finish_reason: str | None = None
        self.done = False
        self.kind: str | None = None
        self.detail = ""
        self._events: EventStream | None = None
        self._prefix: bytes | None = None
        self._suffix = b""
        self._tries = 0

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return self.kind is None

    @property
    def error(self) -> str | None:
        """`kind: what was seen`, None when it succeeded."""
        return None if self.kind is None else f"{self.kind}: {self.detail}"

    def text(self, start: int = 0, stop: int | None = None) -> str:
        """The text of the chunks from `start` to `stop`, joined."""
        return b"".join(self.parts[start:stop]).decode("utf-8", "replace")

    def timing(self) -> RequestTiming:
        """The finished request as a record."""
        return RequestTiming(
            sent_at_s=self.sent_at,
            ended_at_s=self.ended_at,
            first_token_at_s=self.chunk_at[0] if self.chunk_at and self.stream else None,
            chunk_at_s=tuple(self.chunk_at) if self.stream else (),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            chunks=len(self.chunk_at) if self.stream else 0,
            words=len(self.text().split()),
            finish_reason=self.finish_reason,
            status=self.status,
            error=self.error,
        )

    def fail(self, kind: str, detail: str) -> None:
        """Name what went wrong; the first name stays."""
        if self.kind is None:
            self.kind, self.detail = kind, detail

    # -- what the connection tells ------------------------------------------------------------------------------------

    def headers_complete(self, status: int) -> None:
        """Status and headers are here: decide how to read the body."""
        self.status = status
        kind = self.headers.get(b"content-type", b"").lower()
        if status == 200 and self.stream and kind.startswith(b"text/event-stream"):
            self._events = EventStream()

    def received(self, piece: bytes, at_s: float) -> bool:
        """A piece of the body; False when no more of it is wanted."""
        prefix = self._prefix
        if prefix is not None and piece.startswith(prefix) and piece.endswith(self._suffix):
            # One whole event with the same JSON around a string without quote or backslash: its text stands between.
            text = piece[len(prefix) : -len(self._suffix)]
            if text and _SPECIAL(text) is None and self._events is not None and self._events.idle:
                self.chunk_at.append(at_s)
                self.parts.append(text)
                return True
        events = self._events
        if events is None:
            self.body += piece
            if len(self.body) > _MAX_BYTES:
                self.fail("too_big", f"a body of more than {_MAX_BYTES >> 20} MiB")
                return False
            return True
        payloads = events.feed(piece)
        if not payloads and events.pending > _MAX_BYTES:
            self.fail("too_big", f"an event of more than {_MAX_BYTES >> 20} MiB")
            return False
        for payload in payloads:
            self._event(payload, at_s)
        return True

    def _event(self, payload: bytes, at_s: float) -> None:
        if payload == b"[DONE]":
            self.done = True
            self.ended_at = at_s
            return
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self.fail("bad_json", _excerpt(payload))
            return
        text = self._read(event, payload)
        if text:
            encoded = text.encode("utf-8", "replace")
            self.chunk_at.append(at_s)
            self.parts.append(encoded)
            # Not from the first one, whose time is the TTFT of others too; and not for ever: a server whose chunks
            # differ in more than their text is parsed.
            if len(self.parts) > 1 and self._tries < 3:
                self._tries += 1
                self._learn(payload, encoded)

    def _learn(self, payload: bytes, text: bytes) -> None:
        """Keep what stands around the text of this chunk, if replacing the text changes nothing else."""
        head, quoted, tail = payload.partition(b'"' + text + b'"')
        if not quoted or len(tail) < 2:
            return
        try:
            other = orjson.loads(head + b'"\xc2\xa7"' + tail)
        except orjson.JSONDecodeError:
            return
        probe = Answer(stream=True)
        plain = probe._read(other, payload) == "\xa7"
        if plain and probe.kind is None and probe.finish_reason is None and probe.completion_tokens is None:
            self._prefix, self._suffix = b"data: " + head + b'"', b'"' + tail + b"\n\n"

    def _read(self, event: Any, payload: bytes) -> str:
        """Take usage, finish reason and error from one JSON object; returns its text."""
        if not isinstance(event, dict):
            self.fail("bad_json", _excerpt(payload))
            return ""
        error = event.get("error")
        if error:
            self.fail("error_chunk", _message(error))
            return ""
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
            self.completion_tokens = _count(usage.get("completion_tokens"), self.completion_tokens)
        text = ""
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                text += _choice_text(choice)
                reason = choice.get("finish_reason")
                if isinstance(reason, str):
                    self.finish_reason = reason
        return text

    def complete(self, at_s: float, *, whole: bool = True) -> None:
        """The answer is over; `whole` is False when the connection broke inside it."""
        if not self.done:
            self.ended_at = at_s
        if self._events is not None:
            self._close_stream(whole=whole)
        elif self.kind is None:
            self._close_body(at_s, whole=whole)
        if self.kind is None and self.finish_reason in ("abort", "error"):
            self.fail(self.finish_reason if self.finish_reason == "abort" else "error_chunk", "by finish_reason")
        if self.kind is None and self.stream and not self.parts and not self.completion_tokens:
            self.fail("empty_stream", "neither text nor tokens")

    def _close_stream(self, *, whole: bool) -> None:
        if self.kind is None and not self.done:
            seen = f"{len(self.chunk_at)} chunks with text, no [DONE]"
            self.fail("cut_stream", seen if whole else f"connection lost after {seen}")

    def _close_body(self, at_s: float, *, whole: bool) -> None:
        body = bytes(self.body)
        if self.status is None:
            self.fail("cut_stream", "connection lost inside the head of the answer")
        elif 300 <= self.status < 400:
            self.fail("redirect", f"{self.status} to {self.headers.get(b'location', b'?').decode('latin-1')}")
        elif self.status != 200:
            self.fail(f"http_{self.status}", _body_message(body))
        elif not whole:
            self.fail("cut_stream", f"connection lost after {len(body)} bytes")
        elif self.stream:
            try:
                event = orjson.loads(body)
            except orjson.JSONDecodeError:
                event = None
            if isinstance(event, dict) and event.get("error"):
                self.fail("error_chunk", _message(event["error"]))
            else:
                self.fail("not_sse", _excerpt(body))
        else:
            try:
                event = orjson.loads(body)
            except orjson.JSONDecodeError:
                self.fail("bad_json", _excerpt(body))
                return
            text = self._read(event, body)
            if text:
                self.parts.append(text.encode("utf-8", "replace"))
                self.chunk_at.append(at_s)


class Page(Answer):
    """The answer to a plain request: status, headers and body as they came."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(stream=False)

    def complete(self, at_s: float, *, whole: bool = True) -> None:
        """The answer is over."""
        self.ended_at = at_s
        if not whole:
            self.fail("cut_stream", f"connection lost after {len(self.body)} bytes")


def _count(value: object, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def _choice_text(choice: dict[str, Any]) -> str:
    """Text of one choice: completions, chat stream, or chat; a model's reasoning counts as text."""
    text = choice.get("text")
    if isinstance(text, str):
        return text
    said = choice.get("delta") or choice.get("message")
    if not isinstance(said, dict):
        return ""
    reasoning = said.get("reasoning_content") or said.get("reasoning")
    content = said.get("content")
    return (reasoning if isinstance(reasoning, str) else "") + (content if isinstance(content, str) else "")


def _excerpt(body: bytes) -> str:
    text = " ".join(body[: _EXCERPT * 4].decode("utf-8", "replace").split())
    return text if len(text) <= _EXCERPT else text[: _EXCERPT - 1] + "…"


def _message(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return _excerpt(str(message or error).encode())


def _body_message(body: bytes) -> str:
    try:
        event = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _excerpt(body)
    if isinstance(event, dict):
        said = event.get("error") or event.get("message") or event.get("detail")
        if said:
            return _message(said)
    return _excerpt(body)


class Connection(asyncio.Protocol):
    """One connection, kept alive; one request at a time.

    A server may close an idle connection at any moment. A request that meets such a closing without a byte of answer
    is sent once more on a fresh connection: servers close idle connections without reading from them.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | wire.Wire | None = None
        self._at_s = 0.0
        self._parser: Any = None
        self._answer: Answer | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._answered = False
        self._used = 0

    @property
    def is_open(self) -> bool:
        """Whether the connection stands, as far as this end knows."""
        return self._transport is not None and not self._transport.is_closing()

    async def open(self) -> None:
        """Connect, within the client's connect time-out.

        Raises:
            _ConnectError: with the kind and what was seen.
        """
        if self.is_open:
            return
        client = self._client
        self._used = 0
        try:
            async with asyncio.timeout(client.connect_timeout_s):
                if client.wires is not None:
                    self._transport = await client.wires.connect(client.host, client.port, self)
                else:
                    await self._loop.create_connection(
                        lambda: self, client.host, client.port, ssl=client.tls, server_hostname=client.server_hostname
                    )
        except TimeoutError as error:
            raise _ConnectError("connect_timeout", f"{client.where} within {client.connect_timeout_s:g} s") from error
        except ConnectionRefusedError as error:
            raise _ConnectError("connection_refused", client.where) from error
        except ssl.SSLError as error:
            raise _ConnectError("tls", f"{client.where}: {error}") from error
        except (OSError, ValueError) as error:
            kind = "connection_lost" if isinstance(error, ConnectionError) else "connect_failed"
            raise _ConnectError(kind, f"{client.where}: {error}") from error

    async def try_open(self) -> None:
        """Connect ahead of the first request; a failure is told by that request."""
        with contextlib.suppress(_ConnectError):
            await self.open()

    async def request(self, message: bytes, answer: Answer, *, deadline_s: float) -> None:
        """Send `message`, fill `answer`; over at the latest after `deadline_s`. Raises only when it is cancelled."""
        until = self._loop.time() + deadline_s
        for attempt in (1, 2):
            try:
                await self.open()
            except _ConnectError as error:
                answer.sent_at = answer.ended_at = time.monotonic()
                answer.fail(error.kind, error.detail)
                return
            reused = self._used > 0
            stale = await self._exchange(message, answer, until)
            if not (stale and reused and attempt == 1):
                break
        else:  # pragma: no cover - the second attempt always breaks
            return
        if stale:
            answer.ended_at = time.monotonic()
            answer.fail("connection_lost", f"{self._client.where} closed before any answer")

    async def _exchange(self, message: bytes, answer: Answer, until: float) -> bool:
        """One attempt; True when the connection broke without a byte of answer."""
        transport = self._transport
        assert transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._answer, self._answered = answer, False
        self._used += 1
        waiter = self._waiter = self._loop.create_future()
        timer = self._loop.call_at(until, self._timed_out)
        answer.sent_at = time.monotonic()
        transport.write(message)
        try:
            await waiter
        except asyncio.CancelledError:
            if self._answer is not None:
                answer.fail("cancelled", f"given up after {len(answer.chunk_at)} chunks")
                answer.ended_at = time.monotonic()
            self.abort()
            raise
        finally:
            timer.cancel()
            self._answer = self._waiter = None
        return not self._answered and answer.kind is None

    def _timed_out(self) -> None:
        answer = self._answer
        if answer is None:
            return
        answer.fail("timeout", f"no end by the deadline; {len(answer.chunk_at)} chunks came")
        answer.ended_at = time.monotonic()
        self._answered = True
        self._finish()
        self.abort()

    def _finish(self) -> None:
        self._answer = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self) -> None:
        """Drop the connection now; the server sees it at once."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self._transport = transport  # type: ignore[assignment]  # a TCP transport is a Transport
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Bytes came in over TLS: no kernel can say when their plain text did."""
        self.bytes_received(data, time.monotonic())

    def bytes_received(self, data: bytes, at_s: float) -> None:
        """Bytes came in at this time."""
        self._at_s = at_s
        answer = self._answer
        if answer is None:  # bytes that nobody asked for: this connection cannot be trusted any more
            self.abort()
            return
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._broken(answer, "switched protocols")
        except httptools.HttpParserError as error:
            self._broken(answer, f"{error}: {_excerpt(data)}")

    def _broken(self, answer: Answer, detail: str) -> None:
        if self._answer is answer:  # else it was complete, and what followed is garbage
            answer.fail("bad_http", detail)
            answer.ended_at = time.monotonic()
            self._finish()
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone; `exc` is None when the server closed it in order."""
        self._transport = None
        answer = self._answer
        if answer is not None:
            if self._answered:
                framed = b"content-length" in answer.headers or b"transfer-encoding" in answer.headers
                # Without a length the end of the connection is the end of the body; after [DONE] nothing is missing.
                whole = exc is None and answer.status is not None and not framed
                answer.complete(time.monotonic(), whole=whole or answer.done)
            self._finish()

    # -- httptools ----------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        if self._answer is not None:
            self._answer.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head is here; 1xx heads are passed over."""
        if self._answer is not None:
            status = self._parser.get_status_code()
            if status >= 200:
                self._answer.headers_complete(status)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        answer = self._answer
        if answer is not None and not answer.received(body, self._at_s):
            answer.ended_at = time.monotonic()
            self._finish()
            self.abort()

    def on_message_complete(self) -> None:
        """The answer is over."""
        answer = self._answer
        if answer is None or answer.status is None:
            return
        answer.complete(self._at_s)
        keep = self._parser.should_keep_alive()
        self._finish()
        if not keep:
            self.abort()


class _ConnectError(Exception):
    """No connection; `kind` is one of KINDS. It never leaves this module."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Client:
    """Makes connections and messages for one target. Lives inside one event loop."""

    def __init__(self, target: Target, *, connect_timeout_s: float = 5.0) -> None:
        self.target = target
        self.connect_timeout_s = connect_timeout_s
        parts = urlsplit(target.base_url)
        assert parts.hostname is not None
        self.host = parts.hostname
        secure = parts.scheme == "https"
        self.port = parts.port or (443 if secure else 80)
        self.where = f"{self.host}:{self.port}"
        self.tls = ssl.create_default_context(cafile=target.ca_file) if secure else None
        self.server_hostname = self.host if secure else None
        self.wires = wire.Wires() if wire.AVAILABLE and not secure else None
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept-Encoding: identity\r\nUser-Agent: coldboot\r\n"
        if target.api_key is not None:
            if not target.api_key.isascii() or not target.api_key.isprintable():
                raise UsageError("the API key holds characters that no HTTP header may hold")
            head += f"Authorization: Bearer {target.api_key}\r\n"
        self._head = head

    def connection(self) -> Connection:
        """A connection, not yet open."""
        return Connection(self)

    def get(self, path: str) -> bytes:
        """The message that asks for `path`."""
        return f"GET {self._root}{path} HTTP/1.1\r\n{self._head}\r\n".encode("ascii")

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The message that posts `body` as JSON to `path`."""
        payload = orjson.dumps(body)
        head = f"POST {self._root}{path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode("ascii") + payload


def completion_body(
    model: str,
    prompt: str,
    *,
    endpoint: Endpoint,
    stream: bool,
    output_tokens: int,
    exact: bool = True,
    sampling: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON of one request; `exact` asks for exactly `output_tokens`, else for at most so many."""
    body: dict[str, Any] = {"model": model, "max_tokens": output_tokens, "temperature": 0.0}
    if endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if exact:
        body |= {"min_tokens": output_tokens, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | dict(sampling or {})


Cancelled = Callable[[], str | None]
"""Why to stop now, or None to go on; asked many times a second."""
