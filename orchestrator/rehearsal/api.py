"""The API server's requests: routes, generations, what the engine reports, and its death."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

from orchestrator.rehearsal import log as logs
from orchestrator.rehearsal import metrics as prometheus
from orchestrator.rehearsal import protocol, text
from orchestrator.rehearsal.flags import Settings
from orchestrator.rehearsal.http import Request
from orchestrator.rehearsal.log import Log
from orchestrator.rehearsal.protocol import Refusal, Work
from orchestrator.rehearsal.setup import Setup
from orchestrator.rehearsal.statslog import StatsLog
from orchestrator.rehearsal.wire import Wire

ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_DEAD_ERROR = f"vllm.v1.engine.exceptions.EngineDeadError: {ENGINE_DEAD}"
_DEAD_BODY = {"error": {"message": ENGINE_DEAD, "type": "InternalServerError", "param": None, "code": 500}}
_FAILED_BODY = {
    "error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
}
_GUARDED = ("/v1", "/v2", "/inference")
_UNCOUNTED = frozenset({"/metrics", "/health", "/ping", "/version", "/load", "/server_info"})


class Generation:
    """One request between client and engine."""

    def __init__(self, api: Api, request: Request, work: Work) -> None:
        self.api = api
        self.request = request
        self.work = work
        unique = os.urandom(8).hex()
        self.public = f"{'chatcmpl' if work.chat else 'cmpl'}-{unique}"
        self.name = (
            f"{self.public}-0-{os.urandom(4).hex()}" if not work.chat else f"{self.public}-{os.urandom(4).hex()}"
        )
        self.created = int(time.time())
        self.arrived = self.last = time.monotonic()
        self.first = 0.0
        self.queued = self.prefilled = 0.0
        self.cached = 0
        self.produced = 0
        self.open = False
        self._answer: Iterator[str] = api.author.answer(work.seed)
        self._texts: list[str] = []
        request.on_disconnect = self._gone

    def admitted(self) -> None:
        """The engine has scheduled it: a stream's head goes out."""
        if self.work.stream and not self.open:
            self.open = True
            self.request.start_stream()

    def started(self, cached: int, queued: float, prefilled: float) -> None:
        """Its prompt is done."""
        self.cached, self.queued, self.prefilled = cached, queued, prefilled

    def tokens(self, count: int, reason: str | None) -> None:
        """New tokens, and the end of it if there is a reason."""
        new = "".join(next(self._answer) for _ in range(count))
        first = self.produced == 0
        self.produced += count
        stop_reason = None
        if self.work.stop:
            new, stop_reason = self._cut(new)
            if stop_reason is not None and reason is None:
                self.api.abort(self)
            reason = reason if stop_reason is None else "stop"
        if self.work.stream:
            self._chunk(new, reason, stop_reason, first=first)
        else:
            self._texts.append(new)
        if reason is not None:
            self._end(reason, stop_reason)

    def fail(self, body: dict[str, Any], *, dead: bool) -> None:
        """Answers with an error: as an event when the stream has begun, as a status else."""
        if self.open:
            if dead:
                self.api.log_stream_error()
            self.request.event(json.dumps(body))
            self.request.event("[DONE]")
            self.request.end_stream()
        else:
            self.request.json(body, 500)

    def aborted(self) -> None:
        """The server stops: what is there goes out, with that reason."""
        self.admitted()
        if self.work.stream:
            self._chunk("", "abort", None, first=self.produced == 0)
        self._end("abort", None)

    def _cut(self, new: str) -> tuple[str, str | None]:
        before = "".join(self._texts)
        whole = before + new
        found = [(whole.find(stop), stop) for stop in self.work.stop if stop and stop in whole]
        if self.work.stream:
            self._texts.append(new)
        if not found:
            return new, None
        position, stop = min(found)
        return whole[len(before) : max(position, len(before))], stop

    def _chunk(self, new: str, reason: str | None, stop_reason: str | None, *, first: bool) -> None:
        work = self.work
        if work.chat and first:
            self._event(
                {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            )
        if first and work.echo:
            new = work.prompt + new
        if work.chat:
            choice: dict[str, Any] = {"index": 0, "delta": {"content": new}, "logprobs": None, "finish_reason": reason}
        else:
            choice = {"index": 0, "text": new, "logprobs": None, "finish_reason": reason}
        if reason is not None or not work.chat:
            choice["stop_reason"] = stop_reason
        self._event(choice)

    def _event(self, choice: dict[str, Any] | None) -> None:
        message: dict[str, Any] = {
            "id": self.public,
            "object": "chat.completion.chunk" if self.work.chat else "text_completion",
            "created": self.created,
            "model": self.work.model,
            "choices": [] if choice is None else [choice],
        }
        if choice is None or self.work.continuous_usage:
            message["usage"] = self._usage()
        self.request.event(json.dumps(message, ensure_ascii=False, separators=(",", ":")))

    def _usage(self) -> dict[str, Any]:
        prompt = self.work.prompt_tokens
        details = {"cached_tokens": self.cached} if self.api.settings.prompt_details else None
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self.produced,
            "completion_tokens": self.produced,
            "prompt_tokens_details": details,
        }

    def _end(self, reason: str, stop_reason: str | None) -> None:
        self.api.finished(self, reason)
        if self.work.stream:
            if self.work.include_usage:
                self._event(None)
            self.request.event("[DONE]")
            self.request.end_stream()
            return
        whole = "".join(self._texts)
        if self.work.echo:
            whole = self.work.prompt + whole
        if self.work.chat:
            message: dict[str, Any] = {
                "role": "assistant",
                "content": whole,
                "refusal": None,
                "tool_calls": [],
                "reasoning": None,
            }
            choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
        else:
            choice = {"index": 0, "text": whole, "logprobs": None}
        choice |= {"finish_reason": reason, "stop_reason": stop_reason}
        self.request.json(
            {
                "id": self.public,
                "object": "chat.completion" if self.work.chat else "text_completion",
                "created": self.created,
                "model": self.work.model,
                "choices": [choice],
                "service_tier": None,
                "system_fingerprint": self.api.fingerprint,
                "usage": self._usage(),
            }
        )

    def _gone(self) -> None:
        self.api.abort(self)
        self.api.finished(self, "abort")


class Api:
    """All endpoints and all generations of one server.

    Args:
        setup: Flags, constants, time scale.
        log: The API server's log.
        wire: The way to the engine.
        facts: What the engine said when it was ready.
        on_trouble: Called when a request meets a dead engine.
    """

    def __init__(
        self,
        setup: Setup,
        log: Log,
        wire: Wire,
        facts: dict[str, Any],
        on_trouble: Callable[[], None],
    ) -> None:
        settings = self.settings = setup.settings
        personality = self.personality = setup.personality
        self.log = log
        self.wire = wire
        self.on_trouble = on_trouble
        self.author = text.Author()
        self.started = time.time()
        self.dead_since: float | None = None
        self.stopping = False
        self.generations: dict[str, Generation] = {}
        self.emptied = asyncio.Event()
        self.fingerprint = f"vllm-{personality.engine_version}-{text.seed_of(repr(settings)):08x}"
        self.stats = StatsLog(log, settings.spec_tokens)
        self.metrics = prometheus.EngineMetrics(
            settings.served_names[0], settings.max_model_len, settings.spec_tokens, cache_labels(settings, facts)
        )
        self.http_metrics = prometheus.HttpMetrics()
        self._resets: list[Request] = []
        self._dev = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
        self._times: dict[int, float] = {}
        get, post = self._get_routes(), self._post_routes()
        self._routes = {"GET": get, "HEAD": get, "POST": post}

    # --- routes -------------------------------------------------------------------------------------------------

    def handle(self, request: Request) -> None:
        """Answers a request, now or when the engine has."""
        self._times[id(request)] = time.monotonic()
        path = request.path
        keys = self.settings.api_keys
        if keys and path.startswith(_GUARDED) and not self._authorized(request):
            request.json({"error": "Unauthorized"}, 401)
            return
        route = self._routes.get(request.method, {}).get(path)
        if route is None:
            known = any(path in routes for routes in self._routes.values())
            request.json({"detail": "Method Not Allowed" if known else "Not Found"}, 405 if known else 404)
            return
        try:
            route(request)
        except Refusal as refusal:
            request.json(refusal.body, refusal.status)

    def log_access(self, request: Request) -> None:
        """Writes the access line when an answer begins, and counts it."""
        path = request.path
        if path not in _UNCOUNTED:
            began = self._times.pop(id(request), time.monotonic())
            handler = path if any(path in routes for routes in self._routes.values()) else "none"
            sizes = (len(request.body), request.sent)
            self.http_metrics.count(handler, request.method, request.status, time.monotonic() - began, sizes)
        else:
            self._times.pop(id(request), None)
        quiet = self.settings.uvicorn_level in {"warning", "error", "critical"}
        if not self.settings.access_log or quiet or path in self.settings.quiet_endpoints:
            return
        self.log.access(
            f'{request.connection.peer} - "{request.method} {request.target} HTTP/{request.version}" '
            f"{request.status} {HTTPStatus(request.status).phrase}"
        )

    def _get_routes(self) -> dict[str, Callable[[Request], None]]:
        routes: dict[str, Callable[[Request], None]] = {
            "/health": self._health,
            "/ping": self._health,
            "/version": lambda request: request.json({"version": f"{self.personality.engine_version}+rehearsal"}),
            "/load": lambda request: request.json({"server_load": 0}),
            "/metrics": self._metrics_page,
            "/metrics/": self._metrics_page,
            "/v1/models": self._models,
        }
        if self._dev:
            routes["/server_info"] = self._server_info
        return routes

    def _post_routes(self) -> dict[str, Callable[[Request], None]]:
        routes: dict[str, Callable[[Request], None]] = {
            "/ping": self._health,
            "/tokenize": self._tokenize,
            "/v1/completions": lambda request: self._generate(request, chat=False),
            "/v1/chat/completions": lambda request: self._generate(request, chat=True),
        }
        if self._dev:
            routes["/reset_prefix_cache"] = self._reset_prefix
        return routes

    def _authorized(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and token in self.settings.api_keys

    def _health(self, request: Request) -> None:
        dead = self.dead_since is not None
        over = dead and time.monotonic() - (self.dead_since or 0.0) >= self.personality.server.health_grace_s
        request.answer(b"", None, 503 if over else 200)

    def _models(self, request: Request) -> None:
        settings = self.settings
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": settings.model,
                "parent": None,
                "max_model_len": settings.max_model_len,
                "permission": [],
            }
            for name in settings.served_names
        ]
        request.json({"object": "list", "data": cards})

    def _metrics_page(self, request: Request) -> None:
        lines = list(prometheus.process_lines(self.started))
        if self.settings.log_stats:
            lines.extend(self.metrics.render())
        lines.extend(self.http_metrics.render())
        request.answer(("\n".join(lines) + "\n").encode(), prometheus.CONTENT_TYPE)

    def _server_info(self, request: Request) -> None:
        request.json({"vllm_config": repr(self.settings), "rehearsal": True})

    def _tokenize(self, request: Request) -> None:
        body = protocol.body_of(request.body)
        protocol.check_model(body, self.settings)
        _, tokens = protocol.prompt_of(body, chat="messages" in body)
        ids = [token if isinstance(token, int) else text.token_id(token) for token in tokens]
        request.json(
            {"count": len(ids), "max_model_len": self.settings.max_model_len, "tokens": ids, "token_strs": None}
        )

    def _reset_prefix(self, request: Request) -> None:
        self._resets.append(request)
        self.wire.send(("reset",))

    def _generate(self, request: Request, *, chat: bool) -> None:
        if self.dead_since is not None or self.stopping:
            request.json(_DEAD_BODY, 500)
            self.on_trouble()
            return
        work = protocol.work_of(protocol.body_of(request.body), self.settings, chat=chat)
        generation = Generation(self, request, work)
        self.generations[generation.name] = generation
        self.wire.send(("add", generation.name, work.prompt_tokens, work.blocks, work.max_tokens, work.eos_at))

    # --- the engine's reports -----------------------------------------------------------------------------------

    def report(self, message: dict[str, Any]) -> None:
        """Takes one message of the engine."""
        if (name := message.get("admitted")) and name in self.generations:
            self.generations[name].admitted()
        if (name := message.get("refused")) and name in self.generations:
            self._refused(self.generations[name])
        if "reset" in message and self._resets:
            self._resets.pop(0).json({"success": message["reset"]})
        if "prefix" in message:
            queries, hits = message["prefix"]
            self.metrics.prefix_queries.inc(queries)
            self.metrics.prefix_hits.inc(hits)
            self.stats.prefix(queries, hits)
        computed = self._started(message.get("started", ()))
        self._tokens(message.get("tokens", ()), computed)
        if "spec" in message:
            self._spec(*message["spec"])
        if "stats" in message:
            self._gauges(*message["stats"])

    def _started(self, started: Sequence[tuple[str, int, float, float]]) -> int:
        computed = 0
        for name, cached, queued, prefilled in started:
            generation = self.generations.get(name)
            if generation is None:
                continue
            generation.started(cached, queued, prefilled)
            prompt = generation.work.prompt_tokens
            self.metrics.prompt.inc(prompt)
            self.metrics.prompt_by_source.inc(prompt - cached, 0)
            self.metrics.prompt_by_source.inc(cached, 1)
            self.metrics.prompt_cached.inc(cached)
            computed += prompt - cached
        return computed

    def _tokens(self, tokens: Sequence[tuple[str, int, str | None]], computed: int) -> None:
        if not tokens:
            return
        now = time.monotonic()
        emitted = 0
        for name, count, reason in tokens:
            generation = self.generations.get(name)
            if generation is None:
                continue
            emitted += count
            if generation.produced:
                self.metrics.inter_token.observe(now - generation.last)
            else:
                generation.first = now
                self.metrics.first_token.observe(now - generation.arrived)
            generation.last = now
            # Counted before the client can see them: a scrape after an answer finds its tokens.
            self.metrics.generation.inc(count)
            generation.tokens(count, reason)
        self.metrics.iteration.observe(emitted + computed)
        self.stats.tokens(computed, emitted)

    def _spec(self, drafts: int, drafted: int, accepted: list[int]) -> None:
        self.metrics.drafts.inc(drafts)
        self.metrics.draft_tokens.inc(drafted)
        self.metrics.accepted.inc(sum(accepted))
        for count in accepted:
            for position in range(count):
                self.metrics.accepted_per_pos.inc(child=position)
        self.stats.drafts(drafts, drafted, accepted)

    def _gauges(self, running: int, waiting: int, usage: float) -> None:
        self.metrics.running.set(running)
        self.metrics.waiting.set(waiting)
        self.metrics.waiting_by_reason.set(waiting)
        self.metrics.kv_usage.set(usage)
        self.stats.running, self.stats.waiting, self.stats.usage = running, waiting, usage

    def _refused(self, generation: Generation) -> None:
        self.log.at_error(
            "serving.py:173", f"Request {generation.public} failed with an internal error during generation"
        )
        self.finished(generation, "error")
        generation.fail(_FAILED_BODY, dead=False)

    def finished(self, generation: Generation, reason: str) -> None:
        """Forgets a generation and counts it."""
        if self.generations.pop(generation.name, None) is None:
            return
        if not self.generations:
            self.emptied.set()
        now, metrics, work = time.monotonic(), self.metrics, generation.work
        metrics.finished(reason)
        metrics.e2e.observe(now - generation.arrived)
        metrics.queue_time.observe(generation.queued)
        metrics.prefill_time.observe(generation.prefilled)
        decode = max(generation.last - generation.first, 0.0) if generation.produced else 0.0
        metrics.decode_time.observe(decode)
        metrics.inference_time.observe(generation.prefilled + decode)
        metrics.request_prompt.observe(work.prompt_tokens)
        metrics.request_generation.observe(generation.produced)
        metrics.max_generation.observe(generation.produced)
        metrics.params_n.observe(1)
        metrics.params_max_tokens.observe(work.max_tokens)
        metrics.prefill_computed.observe(work.prompt_tokens - generation.cached)
        if generation.produced > 1:
            metrics.per_output_token.observe(decode / (generation.produced - 1))

    def abort(self, generation: Generation) -> None:
        """Tells the engine to drop a generation."""
        self.wire.send(("abort", generation.name))

    # --- endings ------------------------------------------------------------------------------------------------

    def engine_died(self, *, unexpected: bool) -> bool:
        """The engine is gone: every open request learns of it.

        Args:
            unexpected: It went without a word.

        Returns:
            Whether any request was open.
        """
        self.dead_since = time.monotonic()
        if unexpected:
            self.log.at_warning(
                "core_client.py:702",
                "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup",
            )
        trace = logs.traceback("output_handler", error=_DEAD_ERROR)
        self.log.at_error("async_llm.py:704", "\n".join(["AsyncLLM output_handler failed.", *trace]))
        open_ones = list(self.generations.values())
        self.generations.clear()
        for generation in open_ones:
            generation.request.on_disconnect = None
            generation.fail(_DEAD_BODY, dead=True)
        return bool(open_ones)

    def log_stream_error(self) -> None:
        """The traceback that each cut stream leaves."""
        trace = logs.traceback("stream", error=_DEAD_ERROR)
        self.log.at_error("serving.py:495", "\n".join(["Error in completion stream generator.", *trace]))

    def abort_all(self) -> None:
        """An orderly stop: open requests end with what they have."""
        for generation in list(self.generations.values()):
            generation.aborted()


def cache_labels(settings: Settings, facts: dict[str, Any]) -> dict[str, str]:
    """The labels of ``vllm:cache_config_info``."""
    values: dict[str, Any] = {
        "_block_size_resolved": True,
        "block_size": settings.block_size,
        "cache_dtype": settings.kv_cache_dtype,
        "calculate_kv_scales": False,
        "enable_prefix_caching": settings.prefix_caching,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "is_attention_free": False,
        "kv_cache_dtype_skip_layers": [],
        "kv_cache_max_concurrency": facts["kv_cache_max_concurrency"],
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        "kv_cache_size_tokens": facts["kv_cache_size_tokens"],
        "kv_offloading_backend": "native",
        "kv_offloading_size": None,
        "kv_sharing_fast_prefill": False,
        "mamba_block_size": None,
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": None,
        "mamba_ssm_cache_dtype": "auto",
        "num_cpu_blocks": None,
        "num_gpu_blocks": facts["num_gpu_blocks"],
        "num_gpu_blocks_override": settings.num_gpu_blocks_override,
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": None,
        "skip_page_size_padded": None,
        "sliding_window": None,
        "user_specified_block_size": False,
        "user_specified_mamba_block_size": False,
    }
    return {name: str(value) for name, value in values.items()}
