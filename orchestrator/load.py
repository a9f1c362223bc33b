"""The load: a trial at one concurrency, the first request, the headroom prompts, the sanity answers.

Each function owns an event loop for as long as it runs and keeps nothing afterwards. What the server does wrong never
raises: it is told by kind (`client.KINDS`), and everything ends by its deadline with a named outcome.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from orchestrator import client as http
from orchestrator.client import PATHS, Answer, Cancelled, Client, Endpoint, Page, Target, completion_body
from orchestrator.prompts import SANITY, Scale, text
from orchestrator.records import RequestTiming
from orchestrator.rulers import Window, with_logger
from orchestrator.trial import Load, LoadLike, Trial, TrialResult, to_record_fields

__all__ = [
    "Greedy",
    "Load",
    "LoadLike",
    "Scale",
    "Target",
    "TrialResult",
    "Window",
    "calibrate",
    "greedy",
    "probe",
    "run_trial",
    "to_record_fields",
    "with_logger",
]

_POLL_S = 0.02
_SIZING_S = 5.0  # at most so long for asking /tokenize


def _go_on() -> str | None:
    return None


def run_trial(
    target: Target,
    spec: LoadLike,
    *,
    concurrency: int,
    seed: str,
    cancelled: Cancelled = _go_on,
    deadline_s: float,
    scale: Scale | None = None,
    prompts: Sequence[str] = (),
) -> TrialResult:
    """Load the server with `concurrency` streams and measure one window.

    Args:
        target: the server.
        spec: lengths, window and time-outs.
        concurrency: streams, each with one request at a time.
        seed: makes the prompts; two trials of one boot must differ in seed or concurrency, or prompts repeat.
        cancelled: asked every 20 ms; a reason ends the trial at once, invalid.
        deadline_s: the trial is over by then, whatever the server does.
        scale: words per token of this server (see `calibrate`); None: asked from its `/tokenize`, if it has one.
        prompts: the user's own prompts instead of generated ones.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be 1 or more, not {concurrency}")

    async def main() -> TrialResult:
        began_s = time.monotonic()
        measured = [scale or Scale()]

        async def size() -> None:
            measured.append(await _scale(target, spec.endpoint, began_s + min(deadline_s, _SIZING_S)))

        if scale is None:
            await _cancellable(size(), cancelled)
        trial = Trial(target, spec, concurrency, seed=seed, scale=measured[-1], own=prompts)
        return await trial.run(cancelled, deadline_s - (time.monotonic() - began_s))

    return http.run(main())


def probe(
    target: Target,
    *,
    prompt_tokens: int,
    output_tokens: int,
    n: int = 1,
    deadline_s: float,
    seed: str = "probe",
    sampling: Mapping[str, Any] | None = None,
    endpoint: Endpoint = "chat",
    stream: bool = True,
    scale: Scale | None = None,
    cancelled: Cancelled = _go_on,
) -> tuple[RequestTiming, ...]:
    """Send `n` requests at once, each with a prompt of its own; one timing each, in order, all over by `deadline_s`.

    Prompts of 256 tokens or more are fitted by the server's `/tokenize`, if it has one: at most `prompt_tokens`, and
    hardly less. `sampling` is merged into each request (`{"temperature": 0.8, "top_p": 0.9}`).
    """

    async def main() -> list[Answer]:
        until_s = time.monotonic() + deadline_s
        seeds = [f"{seed}/probe/{prompt_tokens}/{n}/{index}" for index in range(n)]
        said: list[str] = []

        async def write() -> None:
            said.extend(await _fitted(target, endpoint, seeds, prompt_tokens, scale=scale, until_s=until_s))

        await _cancellable(write(), cancelled)
        bodies = [
            completion_body(
                target.model, prompt, endpoint=endpoint, stream=stream, output_tokens=output_tokens, sampling=sampling
            )
            for prompt in said or seeds
        ]
        return await _ask(target, endpoint, bodies, until_s - time.monotonic(), cancelled)

    return tuple(answer.timing() for answer in http.run(main()))


@dataclass(frozen=True, slots=True)
class Greedy:
    """Answers to fixed prompts at temperature 0.

    `digest` is the SHA-256 of the texts; None unless all were answered. `repetition` is the share of an answer that
    repeats what stood before it, 0 (none) to 1 (babble), the worst of the answers. `tokens` per answer.
    """

    texts: tuple[str, ...]
    digest: str | None
    repetition: float | None
    tokens: tuple[int | None, ...]
    timings: tuple[RequestTiming, ...]

    @property
    def errors(self) -> tuple[str, ...]:
        """What went wrong, one an answer that failed."""
        return tuple(timing.error for timing in self.timings if timing.error is not None)

    def to_facts(self) -> dict[str, Any]:
        """For the sanity step's record."""
        return {
            "digest": self.digest,
            "repetition": None if self.repetition is None else round(self.repetition, 4),
            "tokens": list(self.tokens),
            "characters": [len(said) for said in self.texts],
            "texts": [said[:400] for said in self.texts],
            "errors": list(self.errors),
        }


def greedy(
    target: Target,
    prompts: Sequence[str] = SANITY,
    *,
    output_tokens: int = 64,
    deadline_s: float,
    endpoint: Endpoint = "chat",
    exact: bool = False,
    cancelled: Cancelled = _go_on,
) -> Greedy:
    """Ask fixed prompts one after the other (alone in the batch, so that answers can be compared between boots)."""
    bodies = [
        completion_body(target.model, prompt, endpoint=endpoint, stream=True, output_tokens=output_tokens, exact=exact)
        for prompt in prompts
    ]
    answers = http.run(_ask(target, endpoint, bodies, deadline_s, cancelled, at_once=False))
    texts = tuple(answer.text() for answer in answers)
    whole = bool(answers) and all(answer.ok for answer in answers)
    repeated = [repetition(said) for answer, said in zip(answers, texts, strict=True) if answer.ok]
    return Greedy(
        texts=texts,
        digest=hashlib.sha256(orjson.dumps(texts)).hexdigest() if whole else None,
        repetition=max(repeated) if repeated else None,
        tokens=tuple(answer.completion_tokens for answer in answers),
        timings=tuple(answer.timing() for answer in answers),
    )


def repetition(said: str) -> float:
    """Share of the four-word runs (of four characters, in a text of few words) that stood there before, 0..1."""
    units: Sequence[str] = said.split()
    if len(units) < 8:
        units = said.strip()
    runs = [tuple(units[i : i + 4]) for i in range(len(units) - 3)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def calibrate(
    target: Target, *, endpoint: Endpoint = "chat", deadline_s: float = 10.0, cancelled: Cancelled = _go_on
) -> Scale:
    """How many tokens this server makes of a word: by its `/tokenize`, else by the usage of two short requests.

    The default `Scale` (`measured` is False) when the server tells neither.
    """
    return http.run(_calibrate(target, endpoint, time.monotonic() + deadline_s, cancelled))


_SIZES = (16, 272)  # words of the two texts that are counted
_FITTED_FROM = 256  # tokens: below, a few more or fewer do not matter


async def _calibrate(target: Target, endpoint: Endpoint, until_s: float, cancelled: Cancelled) -> Scale:
    texts = [text(f"calibrate/{size}", size) for size in _SIZES]
    scale = await _scale(target, endpoint, until_s)
    if scale.measured:
        return scale
    bodies = [completion_body(target.model, said, endpoint=endpoint, stream=False, output_tokens=1) for said in texts]
    answers = await _ask(target, endpoint, bodies, max(until_s - time.monotonic(), 0.1), cancelled)
    return _line([answer.prompt_tokens if answer.ok else None for answer in answers])


async def _scale(target: Target, endpoint: Endpoint, until_s: float) -> Scale:
    """The server's scale by its `/tokenize`; the default one when it has none."""
    counts: list[int | None] = []
    for size in _SIZES:
        counts.append(await _tokenize(target, endpoint, text(f"calibrate/{size}", size), until_s))
        if counts[-1] is None:
            return Scale()
    template = await _tokenize(target, endpoint, "", until_s)
    return replace(_line(counts), template_tokens=template or 0)


def _line(counts: Sequence[int | None]) -> Scale:
    small, large = counts
    if small is None or large is None or large <= small:
        return Scale()
    per_word = (large - small) / (_SIZES[1] - _SIZES[0])
    return Scale(per_word, max(0.0, small - per_word * _SIZES[0]), measured=True)


async def _fitted(
    target: Target, endpoint: Endpoint, seeds: Sequence[str], tokens: int, *, scale: Scale | None, until_s: float
) -> list[str]:
    """One prompt a seed: `tokens` long by the scale, and never longer where the server counts them for us."""
    if scale is None:
        scale = await _scale(target, endpoint, until_s) if tokens >= _FITTED_FROM else Scale()
    words = scale.words(tokens)
    if not scale.measured or tokens < _FITTED_FROM:
        return [text(seed, words) for seed in seeds]

    async def fit(seed: str) -> str:
        size, said = words, text(seed, words)
        for _ in range(4):
            count = await _tokenize(target, endpoint, said, until_s)
            if count is None or 0.985 * tokens <= count <= tokens:
                break
            size = max(1, int(size * tokens / count * 0.995))
            said = text(seed, size)
        return said

    return list(await asyncio.gather(*(fit(seed) for seed in seeds)))


async def _tokenize(target: Target, endpoint: Endpoint, said: str, until_s: float) -> int | None:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": said}]} if endpoint == "chat" else {"prompt": said}
    )
    client = Client(target)
    connection, page = client.connection(), Page()
    try:
        left_s = max(until_s - time.monotonic(), 0.1)
        await connection.request(client.post("/tokenize", {"model": target.model} | prompt), page, deadline_s=left_s)
    finally:
        connection.abort()
    if page.kind is not None or page.status != 200:
        return None
    try:
        count = orjson.loads(page.body).get("count")
    except (orjson.JSONDecodeError, AttributeError):
        return None
    return count if isinstance(count, int) and count >= 0 else None


async def _ask(
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
        reason = cancelled() or await _cancellable(all_of_them(), cancelled)
    finally:
        for connection in connections:
            connection.abort()
    for answer in answers:
        if answer.kind is None and answer.ended_at == 0.0:
            answer.sent_at = answer.sent_at or time.monotonic()
            answer.ended_at = time.monotonic()
            answer.fail("cancelled", reason or "never sent")
    return answers


async def _cancellable(work: Coroutine[Any, Any, None], cancelled: Cancelled) -> str | None:
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
