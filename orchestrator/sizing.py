"""How long text is for one server: what each word of ours costs there, measured by its own tokenizer.

Asked once a boot. `/tokenize` is given all words with a separator between them, and the token ids that come back are
cut at the separator's: a table of costs, with which every prompt is then written to its length without asking again.
Two whole prompts check the table and show what the server puts around them. A server that counts and shows no ids is
known by the mean cost of a word; one without `/tokenize` by the `usage` of two short requests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.asking import Pages, ask
from orchestrator.client import Cancelled, Endpoint, Target, completion_body
from orchestrator.prompts import OPENING, Scale, serial, vocabulary, writer_of

_PAGE = 120  # words asked for at once: some 500 tokens, which every context holds
_SIZES = (24, 400)  # tokens, about, of the two prompts that are counted
_DRIFTS = (0.9, 1.1)  # a table that is off by more is none


async def measure(
    target: Target, endpoint: Endpoint, until_s: float, *, cancelled: Cancelled, requests: bool = False
) -> Scale:
    """The server's scale by its `/tokenize`; else, if `requests` may be sent, by their usage; else the default one."""
    pages = Pages(target, until_s)
    try:
        scale = await _by_tokenizer(pages, endpoint)
        if scale is not None:
            return scale
        limit = await _max_model_len(pages, target.model)
    finally:
        pages.abort()
    known = replace(Scale(), max_model_len=limit)
    return await _by_usage(target, endpoint, until_s, known, cancelled) if requests else known


async def count(pages: Pages, endpoint: Endpoint, said: str) -> int | None:
    """Tokens of a prompt as the server would see it, template included; None when it does not say."""
    return _number(await pages.post("/tokenize", _form(endpoint, said)), "count")


def _form(endpoint: Endpoint, said: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": said}]} if endpoint == "chat" else {"prompt": said}


def _number(answer: Mapping[str, Any] | None, key: str) -> int | None:
    found = None if answer is None else answer.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None


async def _max_model_len(pages: Pages, model: str) -> int | None:
    answer = await pages.get("/v1/models")
    cards = None if answer is None else answer.get("data")
    for card in cards if isinstance(cards, list) else ():
        if isinstance(card, dict) and card.get("id") == model:
            return _number(card, "max_model_len") or None
    return None


async def _by_tokenizer(pages: Pages, endpoint: Endpoint) -> Scale | None:
    """The scale, None without a tokenizer to ask."""
    first = await pages.post("/tokenize", _form(endpoint, _plain(0)))
    small = _number(first, "count")
    if small is None:
        return None
    limit = _number(first, "max_model_len") or None
    shared = await count(pages, endpoint, f"{OPENING} {serial('')[0]}") or 0
    costs = await _costs(pages)
    blank = Scale(costs=costs, template_tokens=shared, max_model_len=limit, measured=True)
    if costs:
        mean = sum(costs.values()) / len(costs)
        found = await _checked(pages, endpoint, replace(blank, tokens_per_word=mean))
        if found is not None:
            return found
    large = await count(pages, endpoint, _plain(1))
    line = None if large is None else _line(small, large)
    return line and replace(line, template_tokens=shared, max_model_len=limit)


def _plain(place: int) -> str:
    """One of the two prompts by which a mean cost is measured."""
    return writer_of(Scale()).write(f"calibrate/{place}", _SIZES[place])


def _line(small: int, large: int) -> Scale | None:
    """The mean cost of a word from the tokens of the two plain prompts."""
    words = [len(_plain(place).split()) for place in (0, 1)]
    if large <= small:
        return None
    per_word = (large - small) / (words[1] - words[0])
    return Scale(per_word, max(0.0, small - per_word * words[0]), measured=True)


async def _costs(pages: Pages) -> dict[str, int]:
    """What each word costs; empty when the server shows no ids, or they cannot be cut."""
    every = vocabulary()
    costs: dict[str, int] = {}
    for start in range(0, len(every), _PAGE):
        words = every[start : start + _PAGE]
        # The last two separators have nothing between them: what they cost beyond the one id is known by that.
        said = f"{OPENING} | {' | '.join(words)} | |"
        answer = await pages.post("/tokenize", {"prompt": said, "add_special_tokens": False})
        ids = None if answer is None else answer.get("tokens")
        found = _cut(ids, len(words)) if isinstance(ids, list) else None
        if found is None:
            return {}
        costs |= dict(zip(words, found, strict=True))
    return costs


def _cut(ids: Sequence[object], words: int) -> list[int] | None:
    """Tokens of each word between separators, None when their number is not right."""
    if not ids:
        return None
    places = [place for place, one in enumerate(ids) if one == ids[-1]]
    if len(places) != words + 2:
        return None
    gaps = [after - before - 1 for before, after in itertools.pairwise(places)]
    costs = [gap - gaps[-1] for gap in gaps[:-1]]
    return costs if min(costs) > 0 else None


async def _checked(pages: Pages, endpoint: Endpoint, scale: Scale) -> Scale | None:
    """The table with what stands around a prompt, from two whole prompts; None when it does not explain them."""
    writer = writer_of(scale)
    told: list[tuple[float, int]] = []
    for place, size in enumerate(_SIZES):
        said = writer.write(f"check/{place}", size)
        counted = await count(pages, endpoint, said)
        if counted is None:
            return None
        told.append((scale.length(said), counted))
    (small, seen_small), (large, seen_large) = told
    if large <= small:
        return None
    drift = (seen_large - seen_small) / (large - small)
    if not _DRIFTS[0] < drift < _DRIFTS[1]:
        return None
    return replace(scale, drift=drift, overhead_tokens=seen_small - drift * small)


async def _by_usage(target: Target, endpoint: Endpoint, until_s: float, known: Scale, cancelled: Cancelled) -> Scale:
    bodies = [
        completion_body(target.model, _plain(place), endpoint=endpoint, stream=False, output_tokens=1)
        for place in (0, 1)
    ]
    left_s = until_s - time.monotonic()
    answers = await ask(target, endpoint, bodies, max(left_s, 0.1), cancelled)
    small, large = (answer.prompt_tokens if answer.ok else None for answer in answers)
    line = None if small is None or large is None else _line(small, large)
    return known if line is None else replace(line, max_model_len=known.max_model_len)
