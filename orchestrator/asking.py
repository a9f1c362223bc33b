"""Single requests, apart from any trial: completions, JSON pages, and work that can be given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import orjson

from orchestrator.client import PATHS, Answer, Cancelled, Client, Connection, Endpoint, Page, Target

_POLL_S = 0.02


async def ask(
    target: Target,
    endpoint: Endpoint,
    bodies: Sequence[Mapping[str, Any]],
    deadline_s: float,
    cancelled: Cancelled,
    *,
    at_once: bool = True,
) -> list[Answer]:
    """Answers to `bodies`, all at once or one after the other, over by `deadline_s` or when `cancelled` says so."""
    client = Client(target)
    until_s = time.monotonic() + deadline_s
    answers = [Answer(stream=bool(body.get("stream"))) for body in bodies]
    connections = [client.connection() for _ in (bodies if at_once else bodies[:1])]

    async def one(index: int) -> None:
        connection = connections[index if at_once else 0]
        left_s = max(until_s - time.monotonic(), 0.001)
        await connection.request(client.post(PATHS[endpoint], bodies[index]), answers[index], deadline_s=left_s)

    async def all_of_them() -> None:
        if at_once:
            await asyncio.gather(*(connection.try_open() for connection in connections))
            await asyncio.gather(*(one(index) for index in range(len(bodies))))
        else:
            for index in range(len(bodies)):
                await one(index)

    try:
        reason = cancelled() or await cancellable(all_of_them(), cancelled)
    finally:
        for connection in connections:
            connection.abort()
    for answer in answers:
        if answer.kind is None and answer.ended_at == 0.0:
            answer.sent_at = answer.sent_at or time.monotonic()
            answer.ended_at = time.monotonic()
            answer.fail("cancelled", reason or "never sent")
    return answers


async def cancellable(work: Coroutine[Any, Any, None], cancelled: Cancelled) -> str | None:
    """Do the work, or stop as soon as `cancelled` gives a reason, which is returned."""
    task = asyncio.ensure_future(work)
    reason: str | None = None
    try:
        while not task.done() and reason is None:
            await asyncio.wait({task}, timeout=_POLL_S)
            reason = None if task.done() else cancelled()
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return reason


class Pages:
    """Asks for JSON on one kept connection, until a moment (monotonic seconds); close it with `abort`."""

    def __init__(self, target: Target, until_s: float) -> None:
        self._client = Client(target)
        self._connection: Connection = self._client.connection()
        self._until_s = until_s
        self.model = target.model

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The object that answers, None for anything but a 200 that holds one."""
        return await self._answer(self._client.post(path, {"model": self.model} | dict(body)))

    async def get(self, path: str) -> dict[str, Any] | None:
        """The same without a body."""
        return await self._answer(self._client.get(path))

    async def _answer(self, message: bytes) -> dict[str, Any] | None:
        page = Page()
        left_s = max(self._until_s - time.monotonic(), 0.05)
        await self._connection.request(message, page, deadline_s=left_s)
        if page.kind is not None or page.status != 200:
            return None
        try:
            found = orjson.loads(page.body)
        except orjson.JSONDecodeError:
            return None
        return found if isinstance(found, dict) else None

    def abort(self) -> None:
        """Drop the connection."""
        self._connection.abort()
