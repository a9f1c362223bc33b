"""The API server's life: configuration, engine, HTTP, and the ways in which it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from typing import Any

from orchestrator.rehearsal import log as logs
from orchestrator.rehearsal.api import Api
from orchestrator.rehearsal.http import Connection, Server
from orchestrator.rehearsal.log import Log
from orchestrator.rehearsal.setup import EngineHandle, Setup
from orchestrator.rehearsal.wire import Gone

_SIGNAL_GRACE_S = 0.05  # a stop that signals all processes reaches us within this after the engine's end
_INIT_FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
_ROUTES = (
    *((path, "HEAD, GET") for path in ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc")),
    *((path, "GET") for path in ("/load", "/version", "/health", "/metrics")),
    ("/tokenize", "POST"),
    ("/v1/models", "GET"),
    ("/ping", "GET"),
    ("/ping", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
)


class ApiServer:
    """One server process, from the first line to its exit status.

    Args:
        setup: Flags, constants, time scale.
        log: The log of this process.
        listener: The bound socket; it listens only when all is ready.
        engine: EngineCore, already booting.
        boot_signals: SIGTERMs that came before the event loop ran.
    """

    def __init__(
        self,
        setup: Setup,
        log: Log,
        listener: socket.socket,
        engine: EngineHandle,
        boot_signals: list[int],
    ) -> None:
        self.setup = setup
        self.settings = setup.settings
        self.personality = setup.personality
        self.scale = setup.scale
        self.log = log
        self.listener = listener
        self.engine = engine.pid
        self.wire = engine.wire
        self.boot_signals = boot_signals
        self.api: Api | None = None
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[str] = self._loop.create_future()
        self._ready: asyncio.Future[dict[str, Any] | None] = self._loop.create_future()
        self._told = False

    async def run(self) -> int:
        """Boots, serves and ends; returns the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        self._loop.add_reader(self.wire.socket, self._on_wire)
        facts = await self._wait_ready()
        if facts is None:
            self.log.raw(
                logs.traceback(
                    "api.init",
                    error=_INIT_FAILED,
                )
            )
            return 1
        api = self.api = self._make_api(facts)
        server = Server(
            handle=api.handle,
            log_access=api.log_access,
            warn=lambda message: self.log.uvicorn(message, "WARNING"),
            keep_alive_s=float(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE") or self.personality.server.keep_alive_s),
        )
        self._announce()
        try:
            listening = await self._listen(server)
        except OSError as error:
            # Somebody else has begun to listen since we bound: both binds succeed, the second listen does not.
            self._kill_engine()
            self.log.raw(["Traceback (most recent call last):", f"OSError: [Errno {error.errno}] {error.strerror}"])
            return 1
        ticker = self._loop.create_task(self._tick())
        why = await self._end
        ticker.cancel()
        if why == "stop":
            await self._stop(api, server, listening)
        else:
            self._close_after_death(server, listening)
        return 0

    # --- booting ------------------------------------------------------------------------------------------------

    async def _wait_ready(self) -> dict[str, Any] | None:
        limit = float(os.environ.get("VLLM_ENGINE_READY_TIMEOUT_S") or self.personality.server.ready_timeout_s)
        while True:
            done, _ = await asyncio.wait([self._ready], timeout=limit if self._deaf() else None)
            if not done:
                return None
            facts = self._ready.result()
            if facts is None:
                # vLLM loses sight of a dead engine once a SIGTERM has broken its first wait: it waits out the timeout.
                await asyncio.sleep(_SIGNAL_GRACE_S)
                if self._deaf():
                    self._ready = self._loop.create_future()
                    continue
            return facts

    def _deaf(self) -> bool:
        return bool(self.boot_signals)

    def _make_api(self, facts: dict[str, Any]) -> Api:
        return Api(self.setup, self.log, self.wire, facts, self._trouble)

    def _announce(self) -> None:
        log, host, port = self.log, self.settings.host or "0.0.0.0", self.settings.port  # noqa: S104 - vLLM's default
        log.at_info("api_server.py:673", "Supported tasks: ['generate']")
        log.at_info(
            "hf.py:540",
            "Detected the chat template content format to be 'string'. You can set `--chat-template-content-format` to "
            "override this.",
        )
        if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            log.at_warning(
                "api_router.py:27",
                "SECURITY WARNING: Development endpoints are enabled! This should NOT be used in production!",
            )
        log.at_info("api_server.py:677", f"Starting vLLM server on http://{host}:{port}")
        log.at_info("launcher.py:37", "Available routes are:")
        for path, methods in _ROUTES:
            log.at_info("launcher.py:46", f"Route: {path}, Methods: {methods}")
        log.uvicorn(f"Started server process [{os.getpid()}]")
        log.uvicorn("Waiting for application startup.")
        log.uvicorn("Application startup complete.")

    async def _listen(self, server: Server) -> asyncio.Server:
        return await self._loop.create_server(lambda: Connection(server), sock=self.listener, backlog=2048)

    async def _tick(self) -> None:
        habits = self.personality.server
        interval = float(os.environ.get("VLLM_LOG_STATS_INTERVAL") or habits.stats_interval_s) * self.scale
        interval = max(interval, min(habits.stats_floor_s, habits.stats_interval_s))
        due = self._loop.time()
        while self.settings.log_stats and self.api is not None:
            due = max(due + interval, self._loop.time())
            await asyncio.sleep(due - self._loop.time())
            self.api.stats.print()

    # --- events -------------------------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        if self.api is None:
            self.boot_signals.append(1)
            if len(self.boot_signals) > 1:
                self.log.raw(["Traceback (most recent call last):", "KeyboardInterrupt: terminated"])
                self._kill_engine()
                os._exit(130)
            return
        if not self._end.done():
            self._end.set_result("stop")

    def _on_wire(self) -> None:
        try:
            messages = self.wire.receive()
        except Gone:
            self._loop.remove_reader(self.wire.socket)
            if self.api is None:
                if not self._ready.done():
                    self._ready.set_result(None)
            elif not self._told:
                self._loop.call_later(_SIGNAL_GRACE_S, self._engine_gone)
            return
        for message in messages:
            if "ready" in message:
                self._ready.set_result(message["ready"])
            elif "dead" in message:
                self._told = True
                self._died(unexpected=False)
            elif self.api is not None:
                self.api.report(message)

    def _engine_gone(self) -> None:
        if not self._end.done():
            self._died(unexpected=True)

    def _died(self, *, unexpected: bool) -> None:
        assert self.api is not None
        if self.api.engine_died(unexpected=unexpected):
            self._trouble()
        else:
            tick = max(self.personality.server.watchdog_s * self.scale, self.personality.server.death_exit_s)
            self._loop.call_later(tick, self._give_up)

    def _trouble(self) -> None:
        self._loop.call_later(self.personality.server.death_exit_s, self._give_up)

    def _give_up(self) -> None:
        keep = os.environ.get("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH") in {"1", "true", "True"}
        if not keep and not self._end.done():
            self._end.set_result("dead")

    # --- ending -------------------------------------------------------------------------------------------------

    async def _stop(self, api: Api, server: Server, listening: asyncio.Server) -> None:
        log, timeout = self.log, self.settings.shutdown_timeout_s
        mode = "drain" if timeout else "abort"
        api.stopping = True
        listening.close()
        log.at_info("launcher.py:100", "[shutdown] API server: shutdown triggered")
        log.at_info("launcher.py:116", f"[shutdown] API server: stopping engine client mode={mode} timeout={timeout}s")
        log.at_info("core_client.py:655", f"[shutdown] MPClient: start timeout={timeout}s")
        log.at_info("core_client.py:657", "[shutdown] MPClient: stopping engine manager")
        until = self._loop.time() + timeout
        while timeout and api.generations and (left := until - self._loop.time()) > 0:
            api.emptied.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(api.emptied.wait(), left)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.engine, signal.SIGTERM)
        api.abort_all()
        if not timeout:
            log.at_warning("utils.py:626", "[shutdown] Process manager: force killing remaining processes count=1")
        await asyncio.sleep(self.personality.server.stop_s)
        self._kill_engine()
        log.at_info("core_client.py:659", "[shutdown] MPClient: engine manager stopped")
        log.at_info("core_client.py:660", "[shutdown] MPClient: cleaning up background resources")
        log.at_info("core_client.py:662", "[shutdown] MPClient: complete")
        log.at_info("launcher.py:125", "[shutdown] API server: engine client stopped")
        log.at_info("launcher.py:128", "[shutdown] API server: signalling HTTP server shutdown")
        log.at_info("launcher.py:149", "[shutdown] API server: shutting down FastAPI HTTP server")
        server.close_idle()
        log.uvicorn("Shutting down")
        log.uvicorn("Waiting for application shutdown.")
        log.uvicorn("Application shutdown complete.")
        if timeout:
            log.uvicorn(f"Finished server process [{os.getpid()}]")

    def _close_after_death(self, server: Server, listening: asyncio.Server) -> None:
        log = self.log
        listening.close()
        server.close_idle()
        log.uvicorn("Shutting down")
        log.uvicorn("Waiting for application shutdown.")
        log.uvicorn("Application shutdown complete.")
        log.uvicorn(f"Finished server process [{os.getpid()}]")
        log.at_info("core_client.py:655", "[shutdown] MPClient: start timeout=0s")
        log.at_info("core_client.py:657", "[shutdown] MPClient: stopping engine manager")
        if self._told:
            log.at_warning("utils.py:626", "[shutdown] Process manager: force killing remaining processes count=1")
        self._kill_engine()
        log.at_info("core_client.py:659", "[shutdown] MPClient: engine manager stopped")
        log.at_info("core_client.py:660", "[shutdown] MPClient: cleaning up background resources")
        log.at_info("core_client.py:662", "[shutdown] MPClient: complete")

    def _kill_engine(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.engine, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.engine, 0)


def serve(setup: Setup, log: Log, listener: socket.socket, engine: EngineHandle, noted: list[int]) -> int:
    """Runs the API server until its end; returns the exit status."""

    async def main() -> int:
        return await ApiServer(setup, log, listener, engine, noted).run()

    return asyncio.run(main())
