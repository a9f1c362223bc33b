"""A real HTTP server on loopback that serves like an engine, with behaviours that a test programs, and exact truth."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from orchestrator.rehearsal.text import pieces, token_id

ERROR = {
    "error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", "code": 500}
}


@dataclass
class Answering:
    """How one request is answered. Tokens come `per_chunk` a chunk, a chunk every `gap_s`, the first after `ttft_s`."""

    ttft_s: float = 0.01
    gap_s: float = 0.005
    per_chunk: int = 1
    word_every: int = 1  # a new word begins every so many tokens
    status: int = 200
    stall_after: int | None = None  # chunks, then nothing comes any more
    cut_after: int | None = None  # chunks, then the connection is cut
    half: bool = False  # cut in the middle of a chunk
    no_done: bool = False
    error_after: int | None = None  # chunks, then an error object and [DONE]
    finish: str = "length"
    html: bool = False
    redirect: str | None = None
    usage: bool = True


@dataclass
class Engine:
    """The stub's state; the truth that a test compares with."""

    answering: Callable[[int, dict[str, Any]], Answering] = lambda _number, _body: Answering()
    engines: int = 1
    metrics: str = "vllm"  # or: none, html, key, other (a page without vLLM's counters)
    tokenizer: str = "words"  # two tokens a word, no ids; or: pieces (of four letters, with ids), none
    max_model_len: int | None = 32768
    model: str | None = None  # the only one that is served; None: any
    tokenized: int = 0  # requests to /tokenize
    template_tokens: int = 5
    generated: int = 0
    prompted: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    running: int = 0
    most_running: int = 0
    hits: float = 0.0
    born: float = 1.7960480026e9
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    scrapes: int = 0
    connections: set[Any] = field(default_factory=set)
    url: str = ""

    def count(self, prompt: str) -> int:
        """Tokens of a prompt, the template included."""
        own = len(pieces(prompt)) if self.tokenizer == "pieces" else 2 * len(prompt.split())
        return own + self.template_tokens

    def page(self) -> str:
        """The metrics page; counters are split unevenly over the engines, as a server's would be."""
        self.scrapes += 1
        lines = ["# HELP vllm:generation_tokens_total Number of generation tokens processed."]
        for engine in range(self.engines):
            label = f'engine="{engine}",model_name="a model, with {{words}}"'

            def part(value: float, engine: int = engine) -> float:
                first = value // 3 if self.engines > 1 else value
                return first if engine == 0 else (value - first if engine == 1 else 0)

            lines += [
                f"vllm:generation_tokens_total{{{label}}} {part(self.generated):.1f}",
                f"vllm:generation_tokens_created{{{label}}} {self.born}",
                f"vllm:prompt_tokens_total{{{label}}} {part(self.prompted):.1f}",
                f"vllm:num_requests_running{{{label}}} {part(self.running):.1f}",
                f"vllm:num_requests_waiting{{{label}}} 0.0",
                f"vllm:prefix_cache_queries_total{{{label}}} {part(self.prompted):.1f}",
                f"vllm:prefix_cache_hits_total{{{label}}} {part(self.hits):.1f}",
            ]
            lines += [
                f'vllm:request_success_total{{{label},finished_reason="{reason}"}} {part(count):.1f}'
                for reason, count in self.finished.items()
            ]
        return "\n".join(lines) + "\n"


def _event(body: dict[str, Any], text: str, finish: str | None, *, chat: bool) -> bytes:
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    event = {"id": f"cmpl-{id(body)}", "object": "chunk", "created": 1, "model": body["model"], "choices": [choice]}
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"


class _Handlers:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.forever = asyncio.Event()

    async def metrics(self, _request: web.Request) -> web.Response:
        if self.engine.metrics == "none":
            return web.Response(status=404)
        if self.engine.metrics == "key":
            return web.Response(status=401)
        if self.engine.metrics == "html":
            return web.Response(text="<html><body>Welcome to nginx!</body></html>", content_type="text/html")
        if self.engine.metrics == "other":
            return web.Response(text="# TYPE process_open_fds gauge\nprocess_open_fds 12.0\n")
        return web.Response(text=self.engine.page())

    async def models(self, _request: web.Request) -> web.Response:
        engine = self.engine
        card = {"id": engine.model or "m", "object": "model", "max_model_len": engine.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    def unknown(self, body: dict[str, Any]) -> web.Response | None:
        if self.engine.model in (None, body["model"]):
            return None
        message = f"The model `{body['model']}` does not exist."
        return web.json_response({"error": {"message": message, "type": "NotFoundError", "code": 404}}, status=404)

    async def tokenize(self, request: web.Request) -> web.Response:
        engine, body = self.engine, await request.json()
        engine.tokenized += 1
        if engine.tokenizer == "none":
            return web.json_response({"detail": "Not Found"}, status=404)
        if (refused := self.unknown(body)) is not None:
            return refused
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        ids = [token_id(piece) for piece in pieces(prompt)] if engine.tokenizer == "pieces" else []
        answer = {"count": engine.count(prompt), "max_model_len": engine.max_model_len, "tokens": ids}
        return web.json_response(answer)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        engine, body = self.engine, await request.json()
        engine.requests.append(body)
        engine.headers.append(dict(request.headers))
        engine.connections.add(request.transport)
        how = engine.answering(len(engine.requests) - 1, body)
        if (refused := self.unknown(body)) is not None:
            return refused
        if engine.max_model_len is not None:
            chat = "messages" in body
            tokens = engine.count(body["messages"][0]["content"] if chat else body["prompt"]) + body["max_tokens"]
            if tokens > engine.max_model_len:
                message = f"This model's maximum context length is {engine.max_model_len} tokens, not {tokens}."
                return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        if how.redirect:
            return web.Response(status=307, headers={"Location": how.redirect})
        if how.html:
            return web.Response(text="<html>nothing here</html>", content_type="text/html")
        if how.status != 200:
            return web.json_response(ERROR, status=how.status)
        engine.running += 1
        engine.most_running = max(engine.most_running, engine.running)
        try:
            return await self._answer(request, body, how)
        except (ConnectionError, asyncio.CancelledError):
            engine.finished["abort"] += 1
            raise
        finally:
            engine.running -= 1

    async def _answer(  # noqa: C901  # one answer, step by step, reads best in one piece
        self, request: web.Request, body: dict[str, Any], how: Answering
    ) -> web.StreamResponse:
        engine, chat = self.engine, request.path.endswith("/chat/completions")
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        prompt_tokens = engine.count(prompt)
        engine.prompted += prompt_tokens
        stream = body.get("stream", False)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        if stream:
            await response.prepare(request)
        loop = asyncio.get_running_loop()
        wanted, sent, chunks, said = body["max_tokens"], 0, 0, ""
        due = loop.time() + how.ttft_s
        while sent < wanted:
            if chunks == how.stall_after:
                await self.forever.wait()
            if chunks == how.cut_after:
                if how.half:
                    request.transport.write(b'113\r\ndata: {"id": "cmpl-1", "choices": [{"index"')
                request.transport.close()
                engine.finished["abort"] += 1
                return response
            if chunks == how.error_after:
                await response.write(b"data: " + json.dumps(ERROR).encode() + b"\n\ndata: [DONE]\n\n")
                engine.finished["error"] += 1
                return response
            await asyncio.sleep(max(0.0, due - loop.time()))
            due += how.gap_s
            count = min(how.per_chunk, wanted - sent)
            text = "".join((" w" if (sent + i) % how.word_every == 0 else "x") for i in range(count))
            sent, chunks, said = sent + count, chunks + 1, said + text
            engine.generated += count
            if stream:
                if chat and chunks == 1:
                    await response.write(_event(body, "", None, chat=chat))
                await response.write(_event(body, text, how.finish if sent == wanted else None, chat=chat))
        # Books first, then the answer's end: whoever has the answer finds it in the counters.
        engine.finished[how.finish] += 1
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": sent, "total_tokens": prompt_tokens + sent}
        if not stream:
            choice = {"index": 0, "finish_reason": how.finish, "message": {"role": "assistant", "content": said}}
            return web.json_response({"choices": [choice if chat else choice | {"text": said}], "usage": usage})
        if how.usage:
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        if not how.no_done:
            await response.write(b"data: [DONE]\n\n")
        return response


@contextlib.contextmanager
def serve(engine: Engine, *, keepalive_s: float = 75.0) -> Iterator[Engine]:
    """Serve `engine` from a thread of its own until the block ends."""
    ready, loop = threading.Event(), asyncio.new_event_loop()

    async def main() -> None:
        handlers = _Handlers(engine)
        app = web.Application()
        app.router.add_get("/metrics", handlers.metrics)
        app.router.add_get("/v1/models", handlers.models)
        app.router.add_post("/tokenize", handlers.tokenize)
        app.router.add_post("/v1/chat/completions", handlers.complete)
        app.router.add_post("/v1/completions", handlers.complete)
        runner = web.AppRunner(app, keepalive_timeout=keepalive_s, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        engine.url = f"http://127.0.0.1:{port}"
        engine.stop = stop = asyncio.Event()  # type: ignore[attr-defined]
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield engine
    finally:
        loop.call_soon_threadsafe(engine.stop.set)  # type: ignore[attr-defined]
        thread.join(10)
        loop.close()
        assert not thread.is_alive()
