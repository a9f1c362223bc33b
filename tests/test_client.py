"""The streaming client: what it reads from a stream cut anywhere, and what it calls each way a request ends."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import itertools
import json
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.client import (
    KINDS,
    Answer,
    Client,
    Connection,
    EventStream,
    Page,
    Target,
    completion_body,
    run,
)
from orchestrator.errors import UsageError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ANSWERS = Path(__file__).parent / "data" / "answers"


def chunk(text: str, finish: str | None = None, **more: object) -> dict:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    return {"id": "c-1", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [choice], **more}


USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}}


def sse(*events: object, done: bool = True, newline: str = "\n") -> bytes:
    lines = [event if isinstance(event, str) else json.dumps(event, ensure_ascii=False) for event in events]
    lines += ["[DONE]"] * done
    return "".join(f"data: {line}{newline}{newline}" for line in lines).encode()


def fed(*pieces: bytes, stream: bool = True, whole: bool = True) -> Answer:
    """An answer that got these pieces, one a second from second 1 on."""
    answer = Answer(stream=stream)
    answer.headers[b"content-type"] = b"text/event-stream"
    answer.headers_complete(200)
    for at, piece in enumerate(pieces, start=1):
        answer.received(piece, float(at))
    answer.complete(100.0, whole=whole)
    return answer


STORY = sse(
    chunk(""),
    chunk("Once upon"),
    chunk(" a"),
    chunk(' "time"\n'),
    chunk(" \u00e9t\u00e9 \\o/"),
    chunk(" end", "length"),
    USAGE,
)
TEXT = 'Once upon a "time"\n \u00e9t\u00e9 \\o/ end'


def seen(answer: Answer) -> tuple:
    return (
        answer.kind,
        answer.text(),
        len(answer.chunk_at),
        answer.finish_reason,
        answer.completion_tokens,
        answer.done,
    )


# --- the stream, cut anywhere ----------------------------------------------------------------------------------------


def test_a_stream_as_it_comes():
    answer = fed(STORY)
    assert seen(answer) == (None, TEXT, 5, "length", 9, True)
    assert answer.prompt_tokens == 5
    timing = answer.timing()
    assert (timing.chunks, timing.words, timing.error) == (5, 7, None)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_a_stream_cut_into_two_at_every_byte(newline):
    story = STORY.replace(b"\n", newline.encode())
    whole = seen(fed(story))
    assert whole[1] == TEXT
    for cut in range(len(story) + 1):
        assert seen(fed(story[:cut], story[cut:])) == whole, f"cut at byte {cut}"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_stream_in_single_bytes(newline):
    story = STORY.replace(b"\n", newline)
    assert seen(fed(*(story[i : i + 1] for i in range(len(story)))))[:5] == seen(fed(STORY))[:5]


def test_a_short_stream_cut_into_three_at_every_two_bytes():
    story = b"\xef\xbb\xbf: hi\r\ndata: a\r\ndata:b\r\n\r\nevent: x\rdata: c\n\n"
    expected = EventStream().feed(story)
    assert expected == [b"a\nb", b"c"]
    for first, second in itertools.combinations(range(len(story) + 1), 2):
        stream = EventStream()
        events = stream.feed(story[:first]) + stream.feed(story[first:second]) + stream.feed(story[second:])
        assert events == expected, (first, second)


@given(st.lists(st.text(max_size=12), min_size=1, max_size=6), st.data())
def test_any_texts_cut_anywhere_come_out_whole(texts, data):
    story = sse(*(chunk(text) for text in texts), USAGE)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(story)), max_size=8)))
    pieces = [story[a:b] for a, b in itertools.pairwise([0, *cuts, len(story)])]
    answer = fed(*pieces)
    assert answer.text() == "".join(texts)
    assert len(answer.chunk_at) == sum(bool(text) for text in texts)


def test_comments_other_fields_and_events_without_space_are_understood():
    story = b": keep-alive\n\nid: 1\nretry: 9\ndata:" + json.dumps(chunk("hi")).encode() + b"\n\n" + sse(USAGE)
    assert seen(fed(story))[:3] == (None, "hi", 1)


def test_each_chunk_bears_the_time_at_which_it_was_complete():
    first, second = sse(chunk("a"), done=False), sse(chunk("b"), done=False)
    answer = fed(first, second[:20], second[20:], sse(USAGE))
    assert answer.chunk_at == [1.0, 3.0]
    assert answer.ended_at == 4.0


# --- the short cut for plain chunks ----------------------------------------------------------------------------------


def test_plain_chunks_are_not_parsed_and_all_others_are():
    answer = fed(sse(*(chunk(f" {i}") for i in range(50)), chunk(' "', None), chunk(" z", "stop"), USAGE))
    assert answer._prefix is not None
    assert answer.text() == "".join(f" {i}" for i in range(50)) + ' " z'
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "odd",
    [
        chunk("x", "stop"),
        chunk("x", None, usage={"completion_tokens": 3}),
        {**chunk("x"), "created": 8},
        {"error": {"message": "x"}},
        chunk('x"}}],"error":{"message":"no"},"y":[{"z":{"w":"'),
        chunk("x\\"),
        chunk(""),
        chunk("\u2028 \x7f"),
    ],
)
def test_an_odd_chunk_after_plain_ones_means_what_it_means_without_the_short_cut(odd):
    learned = fed(sse(chunk("a"), chunk("b"), odd, USAGE))
    alone = fed(sse(odd, USAGE))
    assert learned.text() == "ab" + alone.text()
    assert (learned.kind, learned.finish_reason) == (alone.kind, alone.finish_reason)
    assert len(learned.chunk_at) == 2 + len(alone.chunk_at)


def test_a_first_text_that_also_stands_elsewhere_in_the_chunk_teaches_nothing_wrong():
    answer = fed(sse(chunk("m"), chunk("x"), chunk("m"), USAGE))
    assert answer.text() == "mxm"


@given(st.lists(st.tuples(st.text(max_size=6), st.sampled_from([None, "stop"])), max_size=8))
def test_with_and_without_the_short_cut_is_the_same(said):
    events = [chunk(text, finish) for text, finish in said]
    together = fed(sse(*events, USAGE))
    texts = [fed(sse(event, USAGE)).text() for event in events]
    assert together.text() == "".join(texts)


# --- how a request may end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "kind", "detail"),
    [
        (sse(chunk("a"), done=False), "cut_stream", "1 chunks with text, no [DONE]"),
        (
            sse(chunk("a"), {"error": {"message": "EngineCore encountered an issue.", "code": 500}}),
            "error_chunk",
            "EngineCore",
        ),
        (sse(chunk("a"), {"error": "plain words"}), "error_chunk", "plain words"),
        (sse(chunk("a", "abort"), USAGE), "abort", "finish_reason"),
        (sse(chunk("a"), "{broken"), "bad_json", "{broken"),
        (sse(chunk("a"), "[1]"), "bad_json", "[1]"),
        (sse(), "empty_stream", "neither"),
        (b"", "cut_stream", "0 chunks"),
    ],
)
def test_streams_that_end_badly_under_200(story, kind, detail):
    answer = fed(story)
    assert answer.kind == kind
    assert detail in answer.detail
    assert kind in KINDS


def test_no_event_may_grow_without_end():
    answer = Answer(stream=True)
    answer.headers[b"content-type"] = b"text/event-stream"
    answer.headers_complete(200)
    wanted = [answer.received(b"data: " + b"x" * (1 << 20), 1.0) for _ in range(10)]
    assert wanted == [True] * 7 + [False] * 3
    assert answer.kind == "too_big"


# --- over a real connection ------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def request_of(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """One request: its head and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next((int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line), 0)
    return head, await reader.readexactly(length)


def answering(*answers: bytes, close: bool = False, heads: list[str] | None = None) -> Handler:
    """Answers the first request with the first of `answers`, and so on; then the connection stays open or closes."""
    left = list(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while left:
            head, _ = await request_of(reader)
            if heads is not None:
                heads.append(head)
            writer.write(left.pop(0))
            if close:
                return
        await reader.read()

    return handle


def ask(
    handler: Handler, *, count: int = 1, stream: bool = True, deadline_s: float = 5.0, **target: object
) -> list[Answer]:
    """`count` requests, one after the other on one connection, to a server of this test's own."""

    async def main() -> list[Answer]:
        async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve_one, "127.0.0.1", 0, ssl=target.pop("server_tls", None))
        port = server.sockets[0].getsockname()[1]
        url = str(target.pop("url", "http://127.0.0.1:{port}")).format(port=port)
        client = Client(Target(url, "m", **target))
        connection = client.connection()
        body = completion_body("m", "hi", endpoint="chat", stream=stream, output_tokens=9)
        answers = [Answer(stream=stream) for _ in range(count)]
        try:
            for answer in answers:
                message = client.post("/v1/chat/completions", body)
                await connection.request(message, answer, deadline_s=deadline_s)
        finally:
            connection.abort()
            server.close()
            await server.wait_closed()
            await asyncio.sleep(0)
        return answers

    return run(main())


def test_an_answer_byte_by_byte():
    async def handle(reader, writer):
        await request_of(reader)
        for byte in HEAD + chunked(STORY[:100], STORY[100:]):
            writer.write(bytes([byte]))
            await writer.drain()
        await reader.read()

    (answer,) = ask(handle)
    assert seen(answer) == (None, TEXT, 5, "length", 9, True)
    assert answer.status == 200


def test_one_connection_is_kept_and_used_again():
    heads: list[str] = []
    answers = ask(answering(*[HEAD + chunked(STORY)] * 3, heads=heads), count=3)
    assert [answer.kind for answer in answers] == [None] * 3
    assert len(heads) == 3


def test_a_server_that_closes_after_each_answer_costs_no_request():
    connections = 0

    async def handle(reader, writer):
        nonlocal connections
        connections += 1
        await request_of(reader)
        writer.write(HEAD + chunked(STORY))

    answers = ask(handle, count=3)
    assert [answer.kind for answer in answers] == [None] * 3
    assert connections == 3


def test_a_kept_connection_that_closes_under_a_request_is_opened_once_more():
    requests = 0

    async def handle(reader, writer):
        nonlocal requests
        first = True
        while True:
            await request_of(reader)
            requests += 1
            if not first:
                return  # closed under the second request on this connection, without a byte
            first = False
            writer.write(HEAD + chunked(STORY))

    answers = ask(handle, count=2)
    assert [answer.kind for answer in answers] == [None, None]
    assert requests == 3


def test_a_fresh_connection_that_closes_without_a_byte_is_lost_and_not_tried_again():
    requests = 0

    async def handle(reader, _writer):
        nonlocal requests
        await request_of(reader)
        requests += 1

    (answer,) = ask(handle)
    assert (answer.kind, requests) == ("connection_lost", 1)


def reply(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


@pytest.mark.parametrize(
    ("raw", "kind", "detail"),
    [
        (reply("500 Oops", b'{"error": {"message": "EngineCore is dead"}}'), "http_500", "EngineCore is dead"),
        (reply("500 Oops", b'{"message": "older form"}'), "http_500", "older form"),
        (reply("500 Oops", b"Internal Server Error"), "http_500", "Internal Server Error"),
        (reply("503 No", b""), "http_503", ""),
        (reply("404 No", b'{"error": {"message": "The model `m` does not exist."}}'), "http_404", "The model `m`"),
        (reply("401 No", b'{"error": "Unauthorized"}'), "http_401", "Unauthorized"),
        (reply("422 No", b'{"detail": [{"loc": 1}]}'), "http_422", "loc"),
        (reply("307 Go", b"", "Location: http://else.where/"), "redirect", "http://else.where/"),
        (reply("200 OK", b"<html> hello ", "Content-Type: text/html"), "not_sse", "<html> hello"),
        (reply("200 OK", b'{"error": "bad"}', "Content-Type: application/json"), "error_chunk", "bad"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "bad_http", "SSH-2.0"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "cut_stream", "inside the head"),
        (HEAD + chunked(sse(chunk("a"), done=False)[:40])[:-5], "cut_stream", "connection lost"),
    ],
)
def test_answers_that_are_none(raw, kind, detail):
    (answer,) = ask(answering(raw, close=True))
    assert (answer.kind, detail in answer.detail) == (kind, True), answer.error
    assert answer.ended_at >= answer.sent_at > 0


@pytest.mark.parametrize(
    ("name", "kind", "detail", "chunks", "tokens"),
    [
        ("engine_killed.stream", "error_chunk", "EngineCore encountered an issue.", 31, None),
        ("engine_killed.whole", "http_500", "EngineCore encountered an issue.", 0, None),
        ("asked_to_stop.stream", "abort", "by finish_reason", 45, 124),
        ("asked_to_stop.whole", "abort", "by finish_reason", 1, 128),
    ],
)
def test_how_a_real_vllm_on_an_h200_ends_what_is_in_flight(name, kind, detail, chunks, tokens):
    (answer,) = ask(answering((ANSWERS / f"{name}.http").read_bytes(), close=True), stream=name.endswith("stream"))
    assert (answer.kind, len(answer.chunk_at), answer.completion_tokens) == (kind, chunks, tokens)
    assert answer.detail.startswith(detail)


def test_a_stream_without_length_ends_with_its_connection():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    (whole,) = ask(answering(head + STORY, close=True))
    (half,) = ask(answering(head + STORY[:300], close=True))
    assert (whole.kind, half.kind) == (None, "cut_stream")


def test_what_follows_done_is_not_missed():
    (answer,) = ask(answering(HEAD + chunked(STORY)[:-5], close=True))
    assert answer.kind is None


def test_an_interim_response_is_passed_over():
    (answer,) = ask(answering(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + HEAD + chunked(STORY)))
    assert answer.kind is None


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + chunked(sse(chunk("a"), done=False))[:-5]])
def test_a_stall_ends_at_the_deadline(sent):
    began = time.monotonic()
    (answer,) = ask(answering(sent), deadline_s=0.15)
    assert answer.kind == "timeout"
    assert 0.14 < answer.ended_at - answer.sent_at < 1.0
    assert time.monotonic() - began < 2.0


def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        (answer,) = ask(answering(), url=url)
    assert answer.kind == "connection_refused"
    assert answer.status is None
    assert answer.sent_at > 0


def test_not_streamed():
    body = json.dumps(
        {"choices": [{"message": {"content": "two words"}, "finish_reason": "stop"}], "usage": USAGE["usage"]}
    )
    raw = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    (answer,) = ask(answering(raw), stream=False)
    timing = answer.timing()
    assert (answer.kind, timing.words, timing.completion_tokens, timing.finish_reason) == (None, 2, 9, "stop")
    assert (timing.ttft_s, timing.chunks, timing.chunk_at_s) == (None, 0, ())


def test_completions_text_and_reasoning_are_text():
    story = sse(
        {"choices": [{"text": "a b", "finish_reason": None}]},
        {"choices": [{"delta": {"reasoning_content": " c"}}]},
        {"choices": [{"delta": {"reasoning": " d", "content": None}}]},
        USAGE,
    )
    assert fed(story).text() == "a b c d"


def test_the_key_is_sent_and_never_shown():
    heads: list[str] = []
    ask(answering(HEAD + chunked(STORY), heads=heads), api_key="secret-1")
    assert "Authorization: Bearer secret-1\r\n" in heads[0]
    assert "secret-1" not in repr(Target("http://h:1", "m", api_key="secret-1"))


def test_a_path_before_v1_is_kept_and_v1_itself_is_not_doubled():
    heads: list[str] = []
    ask(answering(HEAD + chunked(STORY), heads=heads), url="http://127.0.0.1:{port}/gpu1/v1/")
    assert heads[0].startswith("POST /gpu1/v1/chat/completions HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://h:1", "http://", "http://h:99999", "http://h:x", "http://[::1"]
)
def test_a_base_url_that_is_none(url):
    with pytest.raises(UsageError, match="no base URL"):
        Target(url, "m")


def test_a_key_that_no_header_may_hold():
    with pytest.raises(UsageError, match="API key"):
        Client(Target("http://h:1", "m", api_key="a\r\nX-Evil: 1"))


def test_the_body_of_a_request():
    body = completion_body(
        "m", "p", endpoint="completions", stream=True, output_tokens=7, sampling={"temperature": 0.5}
    )
    assert body == {
        "model": "m",
        "prompt": "p",
        "max_tokens": 7,
        "min_tokens": 7,
        "ignore_eos": True,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 that signs itself: (server's context, file to trust)."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert, secret = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    secret.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, secret)
    return context, cert


def test_tls_with_a_trusted_certificate(certificate):
    context, cert = certificate
    handler = answering(HEAD + chunked(STORY))
    (answer,) = ask(handler, server_tls=context, url="https://127.0.0.1:{port}", ca_file=cert)
    assert seen(answer)[:2] == (None, TEXT)


def test_tls_with_a_certificate_that_nobody_vouches_for(certificate):
    context, _ = certificate
    (answer,) = ask(answering(b""), server_tls=context, url="https://127.0.0.1:{port}")
    assert answer.kind == "tls"
    assert "certificate verify failed" in answer.detail


def test_tls_to_a_server_that_speaks_none():
    async def handle(reader, writer):
        await reader.read(16)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    (answer,) = ask(handle, url="https://127.0.0.1:{port}")
    assert answer.kind in ("tls", "connection_lost")


def test_given_up_by_us():
    async def main() -> Answer:
        async def handle(reader, writer):
            await reader.read()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        client = Client(Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m"))
        connection, answer = client.connection(), Page()
        await connection.open()
        task = asyncio.ensure_future(connection.request(client.get("/x"), answer, deadline_s=5))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert isinstance(connection, Connection)
        assert not connection.is_open
        server.close()
        await server.wait_closed()
        return answer

    answer = run(main())
    assert answer.kind == "cancelled"
