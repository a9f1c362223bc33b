"""The load: a trial at one concurrency, the first request, the headroom prompts, the sanity answers.

Each function owns an event loop for as long as it runs and keeps nothing afterwards. What the server does wrong never
raises: it is told by kind (`client.KINDS`), and everything ends by its deadline with a named outcome.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from orchestrator import client as http
from orchestrator import sizing
from orchestrator.asking import Pages, ask, cancellable
from orchestrator.client import Answer, Cancelled, Endpoint, Target, completion_body
from orchestrator.prompts import SANITY, OwnPrompts, Scale, Writer, writer_of
from orchestrator.records import RequestTiming
from orchestrator.rulers import Window, with_logger
from orchestrator.trial import Trial
from orchestrator.trialspec import Load, LoadLike, TrialResult, to_record_fields

__all__ = [
    "REFUSALS",
    "Greedy",
    "Load",
    "LoadLike",
    "OwnPrompts",
    "Scale",
    "Target",
    "TrialResult",
    "Window",
    "calibrate",
    "greedy",
    "probe",
    "run_trial",
    "to_record_fields",
    "too_long",
    "with_logger",
]

# Not the engine's weakness: it does not know the model or the key that we name, or somebody else answers.
REFUSALS = ("http_401", "http_403", "http_404", "http_405", "redirect", "not_sse", "bad_http", "tls", "connect_failed")
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
    prompts: OwnPrompts | None = None,
) -> TrialResult:
    """Load the server with `concurrency` streams and measure one window.

    Args:
        target: the server.
        spec: lengths, window and time-outs.
        concurrency: streams, each with one request at a time.
        seed: makes the prompts; two trials of one boot must differ in seed or concurrency, or prompts repeat.
        cancelled: asked every 20 ms; a reason ends the trial at once, invalid.
        deadline_s: the trial is over by then, whatever the server does.
        scale: how long text is for this server (see `calibrate`); None: asked from its `/tokenize`, if it has one.
        prompts: the user's own prompts instead of generated ones; all trials of a boot share them.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be 1 or more, not {concurrency}")

    async def main() -> TrialResult:
        began_s = time.monotonic()
        known = scale or await _measured(target, spec.endpoint, began_s + min(deadline_s, _SIZING_S), cancelled)
        trial = Trial(target, spec, concurrency, seed=seed, scale=known, own=prompts)
        return await trial.run(cancelled, deadline_s, began=began_s)

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

    Prompts are as long as `scale` can tell (None: asked from the server), and no longer than the server takes.
    `sampling` is merged into each request (`{"temperature": 0.8, "top_p": 0.9}`).
    """

    async def main() -> list[Answer]:
        until_s = time.monotonic() + deadline_s
        seeds = [f"{seed}/probe/{prompt_tokens}/{n}/{index}" for index in range(n)]
        known = scale or await _measured(target, endpoint, min(until_s, time.monotonic() + _SIZING_S), cancelled)
        room = known.longest(output_tokens)
        tokens = prompt_tokens if room is None else min(prompt_tokens, room)
        writer, said = writer_of(known), list[str]()
        drafts = [_Draft(writer, one, tokens) for one in seeds]

        async def write() -> None:
            said.extend(await asyncio.gather(*(_fitted(Pages(target, until_s), endpoint, one) for one in drafts)))

        if known.exact or not known.measured or tokens < _FITTED_FROM:
            said.extend(writer.write(one, tokens) for one in seeds)
        else:
            await cancellable(write(), cancelled)
        bodies = [
            completion_body(
                target.model, prompt, endpoint=endpoint, stream=stream, output_tokens=output_tokens, sampling=sampling
            )
            for prompt in said or seeds
        ]
        return await ask(target, endpoint, bodies, until_s - time.monotonic(), cancelled)

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
    answers = http.run(ask(target, endpoint, bodies, deadline_s, cancelled, at_once=False))
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
    """How long text is for this server: by its `/tokenize`, else by the usage of two short requests.

    The default `Scale` (`measured` is False) when the server tells neither.
    """
    return http.run(_measured(target, endpoint, time.monotonic() + deadline_s, cancelled, requests=True))


async def _measured(
    target: Target, endpoint: Endpoint, until_s: float, cancelled: Cancelled, *, requests: bool = False
) -> Scale:
    found = [Scale()]

    async def look() -> None:
        found.append(await sizing.measure(target, endpoint, until_s, cancelled=cancelled, requests=requests))

    await cancellable(look(), cancelled)
    return found[-1]


_FITTED_FROM = 256  # tokens: below, a few more or fewer do not matter
_MAX_FOUND = 20


@dataclass(frozen=True, slots=True)
class _Draft:
    """A prompt that is still to be written, of at most so many tokens."""

    writer: Writer
    seed: str
    tokens: int


async def _fitted(pages: Pages, endpoint: Endpoint, draft: _Draft) -> str:
    """The prompt, where the server counts but its words cannot be told apart."""
    size, wanted = float(draft.tokens), draft.tokens
    try:
        for _ in range(4):
            said = draft.writer.write(draft.seed, size)
            counted = await sizing.count(pages, endpoint, said)
            if counted is None or 0.985 * wanted <= counted <= wanted:
                break
            size *= wanted / counted * 0.995
    finally:
        pages.abort()
    return said


def too_long(
    target: Target,
    prompts: Sequence[str],
    scale: Scale,
    *,
    endpoint: Endpoint,
    output_tokens: int,
    deadline_s: float,
    cancelled: Cancelled = _go_on,
) -> dict[int, int]:
    """Those of the user's prompts that do not fit with their answer: place → tokens; 20 at most.

    A token is a byte at least, so only prompts of that many bytes are counted by the server; one whose tokens it does
    not tell (no `/tokenize`, or `deadline_s` has passed) is not in the answer.
    """
    room = None if scale.max_model_len is None else scale.max_model_len - output_tokens
    found: dict[int, int] = {}

    async def look(room: int) -> None:
        pages = Pages(target, time.monotonic() + deadline_s)
        try:
            for place, prompt in enumerate(prompts):
                if len(prompt.encode("utf-8", "replace")) + scale.overhead_tokens <= room or len(found) >= _MAX_FOUND:
                    continue
                counted = await sizing.count(pages, endpoint, prompt)
                if counted is None:
                    return
                if counted > room:
                    found[place] = counted
        finally:
            pages.abort()

    if room is not None:
        http.run(cancellable(look(room), cancelled))
    return found
