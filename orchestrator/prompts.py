"""Prompts: real text from a seeded generator, no two alike, of a length in tokens; or the user's own file.

Text comes from sentences of our own (prompts.txt). Every prompt opens with a serial number of its own, so that no two
share a first block and a prefix cache has nothing to find. How many words make a token differs between models: a
`Scale` is measured on the server (`/tokenize`) or taken from the usage of an earlier answer.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from orchestrator.errors import ProblemsError

MAX_PROMPT_CHARS = 2_000_000

SANITY: tuple[str, ...] = (
    "Name the four seasons of the year in order, one on each line.",
    "Write two sentences about why bread rises in the oven.",
    "What is seventeen plus twenty-five? Explain how you get the result.",
)
"""The fixed prompts of the sanity step: short, harmless, answered alike by every model that is well."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How long text is for one server: `tokens = overhead + words · tokens_per_word`.

    `overhead_tokens` is what the server puts around a prompt (chat template, first token) and what the serial number
    costs beyond a word; `template_tokens` the first of these alone, which all prompts share. The default is what
    English text has under today's vocabularies.
    """

    tokens_per_word: float = 1.25
    overhead_tokens: float = 0.0
    measured: bool = False
    template_tokens: float = 0.0

    def words(self, tokens: int) -> int:
        """Words that make about `tokens`."""
        return max(1, round((tokens - self.overhead_tokens) / self.tokens_per_word))


@dataclass(frozen=True, slots=True)
class _Corpus:
    sentences: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]


_SLOT = re.compile(r"\{(\w+)\}")


@cache
def _corpus() -> _Corpus:
    """The shipped sentences; constant, so read once."""
    lists: dict[str, tuple[str, ...]] = {}
    sentences: list[str] = []
    text = resources.files("orchestrator").joinpath("prompts.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        name, colon, words = line.partition(": ")
        if line.startswith("#"):
            continue
        if colon and name.isalpha() and name.islower() and not sentences:
            lists[name] = tuple(word.strip() for word in words.split(","))
        elif line:
            sentences.append(line)
    return _Corpus(tuple(sentences), lists)


def text(seed: str, words: int) -> str:
    """Text of exactly `words` whitespace words, the same for the same seed on every platform."""
    corpus = _corpus()
    chance = random.Random(seed)  # noqa: S311  # reproducible on purpose, no secret
    # The serial differs from the first token on: blake2b of the seed, in groups as a person would write a number.
    serial = hashlib.blake2b(seed.encode(), digest_size=8).hexdigest()
    parts = [f"{serial[:4]}-{serial[4:8]}-{serial[8:12]}-{serial[12:]}:"]
    count = 1
    while count < words:
        sentence = _SLOT.sub(lambda slot: chance.choice(corpus.words[slot.group(1)]), chance.choice(corpus.sentences))
        parts.append(sentence[0].upper() + sentence[1:])
        count += sentence.count(" ") + 1
    return " ".join(" ".join(parts).split(" ")[:words])


class Prompts:
    """Prompts of one trial by number: generated ones, or those of the user's file in a seeded order.

    Generated prompts never repeat. A file's prompts do when there are fewer of them than requests; each round then
    opens with its serial, unless `repeat` is set.
    """

    def __init__(
        self, seed: str, tokens: int, scale: Scale = Scale(), *, own: Sequence[str] = (), repeat: bool = False
    ) -> None:
        self._seed = seed
        self._words = scale.words(tokens)
        self._own = list(own)
        self._repeat = repeat
        random.Random(seed).shuffle(self._own)  # noqa: S311  # reproducible on purpose, no secret

    def __getitem__(self, index: int) -> str:
        if not self._own:
            return text(f"{self._seed}/{index}", self._words)
        turn, place = divmod(index, len(self._own))
        prompt = self._own[place]
        return prompt if turn == 0 or self._repeat else f"{text(f'{self._seed}/{index}', 1)} {prompt}"


def read_prompts(path: Path) -> tuple[str, ...]:
    """The user's own prompts: JSON lines (a string, `{"prompt": …}`, or a ShareGPT conversation), or one JSON array.

    Raises:
        ProblemsError: every line that is empty, over-long or not understood, `file:line: what`.
    """
    try:
        raw = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemsError([f"{path}: cannot be read: {error}"]) from error
    prompts: list[str] = []
    problems: list[str] = []
    for where, row in _rows(path, raw):
        prompt = _prompt_of(row)
        if isinstance(row, json.JSONDecodeError):
            problems.append(f"{where}: {row.msg} at column {row.colno}")
        elif prompt is None:
            problems.append(f'{where}: no prompt; accepted: a string, {{"prompt": "…"}}, a ShareGPT conversation')
        elif not prompt.strip():
            problems.append(f"{where}: the prompt is empty")
        elif len(prompt) > MAX_PROMPT_CHARS:
            problems.append(f"{where}: {len(prompt)} characters; at most {MAX_PROMPT_CHARS}")
        else:
            prompts.append(prompt)
    if not prompts and not problems:
        problems.append(f"{path}: no prompt in it")
    if problems:
        raise ProblemsError(problems)
    return tuple(prompts)


def _rows(path: Path, raw: str) -> Iterator[tuple[str, object]]:
    """(where, what stands there); a line that is no JSON is its error."""
    if raw.lstrip().startswith("["):
        try:
            entries = json.loads(raw)
        except json.JSONDecodeError as error:
            yield f"{path}:{error.lineno}", error
            return
        for number, entry in enumerate(entries):
            yield f"{path}: entry {number}", entry
        return
    for number, line in enumerate(raw.removesuffix("\n").split("\n") if raw else (), start=1):
        try:
            yield f"{path}:{number}", json.loads(line) if line.strip() else ""
        except json.JSONDecodeError as error:
            yield f"{path}:{number}", error


def _prompt_of(row: object) -> str | None:
    if isinstance(row, str):
        return row
    if not isinstance(row, dict):
        return None
    if isinstance(row.get("prompt"), str):
        return str(row["prompt"])
    turns = row.get("conversations") or row.get("conversation") or row.get("messages")
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict) and turn.get("from", turn.get("role")) in ("human", "user"):
            said = turn.get("value", turn.get("content"))
            return said if isinstance(said, str) else None
    return None
