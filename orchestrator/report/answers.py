"""What happened between ready and the trials: headroom under a full batch, and what the variants answer.

A variant that is fast because it babbles, or that answers otherwise than all others, shows here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.report import words
from orchestrator.report.model import BootView, Section, Table

BABBLES = 0.5
_AT = "at_"


def section(boots: Sequence[BootView]) -> Section | None:
    """Headroom and answers of every boot that got so far; None where no boot did."""
    rows = [row for boot in boots if boot.counted and (row := _row(boot)) is not None]
    if not rows:
        return None
    sentences = (*_headroom_sentences(boots), *_answer_sentences(boots))
    columns = ("boot", "longest prompt", "answered", "same as", "repetition", "first answer begins")
    marks = _marks(boots)
    shown = tuple((*row[:3], marks.get(row[0], words.ABSENT), *row[3:]) for row in rows)
    table = Table("Headroom and answers of each boot", columns, shown, frozenset({1, 4}), frozenset({0}), folded=True)
    return Section("answers", "Before the trials: headroom and answers", sentences, (table,))


def _facts(boot: BootView, name: str) -> Mapping[str, Any]:
    return next((step.facts for step in reversed(boot.steps) if step.name == name), {})


def _row(boot: BootView) -> tuple[str, ...] | None:
    headroom, sanity = _facts(boot, "headroom"), _facts(boot, "sanity")
    if not headroom and not sanity:
        return None
    prompt = headroom.get("prompt_tokens")
    texts, repetition = sanity.get("texts"), sanity.get("repetition")
    return (
        boot.name,
        f"{prompt} tokens" if isinstance(prompt, int) else words.ABSENT,
        "; ".join(f"{good} of {asked} at {level}" for level, good, asked in _asked(headroom)) or words.ABSENT,
        words.percent(repetition) if isinstance(repetition, int | float) else words.ABSENT,
        words.clean(str(texts[0]), 80) if isinstance(texts, list) and texts else words.ABSENT,
    )


def _asked(headroom: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """(streams at once, answered, asked), ascending."""
    found = []
    for key, value in headroom.items():
        level = key.removeprefix(_AT)
        if key.startswith(_AT) and level.isdecimal() and isinstance(value, Mapping):
            good, bad = (value.get(name) for name in ("answered", "failed"))
            if isinstance(good, int) and isinstance(bad, int):
                found.append((int(level), good, good + bad))
    yield from sorted(found)


def _headroom_sentences(boots: Sequence[BootView]) -> Iterator[str]:
    failed: dict[str, list[str]] = defaultdict(list)
    tried = 0
    for boot in boots:
        counts = list(_asked(_facts(boot, "headroom"))) if boot.counted else []
        tried += bool(counts)
        for level, good, asked in counts:
            if good < asked:
                failed[boot.variant].append(f"{asked - good} of {asked} at {level} in {boot.name}")
    if not tried:
        return
    if not failed:
        yield (
            f"A prompt that fills a whole prefill batch, and as many at once as the highest concurrency, were answered "
            f"in all {words.plural(tried, 'boot')} that got so far."
        )
        return
    said = "; ".join(f"{words.clean(variant)} ({words.listing(lost)})" for variant, lost in failed.items())
    yield f"Requests with a full prefill batch were answered with errors by a living engine: {said}."


def _digests(boots: Sequence[BootView]) -> dict[str, tuple[str, str]]:
    """Boot → (variant, digest of its answers)."""
    return {
        boot.name: (boot.variant, digest)
        for boot in boots
        if boot.counted and isinstance(digest := _facts(boot, "sanity").get("digest"), str)
    }


def _marks(boots: Sequence[BootView]) -> dict[str, str]:
    """Boot → a letter for its answers: boots with the same letter answered alike; `A` are the most."""
    found = _digests(boots)
    ranked = [digest for digest, _ in Counter(digest for _, digest in found.values()).most_common()]
    return {name: _letter(ranked.index(digest)) for name, (_, digest) in found.items()}


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else f"A{place}"


def _answer_sentences(boots: Sequence[BootView]) -> Iterator[str]:
    found = _digests(boots)
    if not found:
        return
    groups = Counter(digest for _, digest in found.values())
    if len(groups) == 1:
        yield f"{words.plural(len(found), 'boot')} gave the same answers to the fixed prompts at temperature 0."
    else:
        most, count = groups.most_common(1)[0]
        others = Counter(variant for variant, digest in found.values() if digest != most)
        said = words.listing(f"{words.clean(variant)} ({words.plural(n, 'boot')})" for variant, n in others.items())
        yield (
            f"{count} of {words.plural(len(found), 'boot')} gave the same answers to the fixed prompts; otherwise "
            f"answered {said}. Other numerics can change a word; read the answers before believing the speed."
        )
    for boot in boots:
        repetition = _facts(boot, "sanity").get("repetition")
        if boot.counted and isinstance(repetition, int | float) and repetition >= BABBLES:
            yield f"{boot.name} babbles: {words.percent(repetition)} of an answer repeats what stood before it."
