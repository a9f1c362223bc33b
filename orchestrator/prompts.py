"""Prompts: real text from a seeded generator, no two alike, of a length in tokens; or the user's own, each once.

Text is made of sentences of our own (prompts.txt). Every prompt opens with a serial of its own in words, so that no two
share a first block and a prefix cache has nothing to find. How long text is differs between models: a `Scale` knows
what each word costs on one server (`sizing` asks it), and a prompt is filled up word by word until its length is met.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources

SANITY: tuple[str, ...] = (
    "Name the four seasons of the year in order, one on each line.",
    "Write two sentences about why bread rises in the oven.",
    "What is seventeen plus twenty-five? Explain how you get the result.",
)
"""The fixed prompts of the sanity step: short, harmless, answered alike by every model that is well."""

# The first word is the same in all: what it costs without a space before it, inside a chat template, is measured once.
OPENING = "Note"
_SERIAL_BYTES = 8
_SHORTEST_SERIAL = 4
_POOL = 1024  # a power of two: every odd step comes by all of them
_LINEAR_ERROR = 0.02  # of a prompt's length, where only the mean cost of a word is known


@dataclass(frozen=True, slots=True)
class Scale:
    """How long text is for one server: `tokens = overhead + drift · (cost of each word)`.

    `costs` holds what each word of ours costs there with the space before it; a word that is not in it costs
    `tokens_per_word`, which for English text and today's vocabularies is about 1.25. `overhead_tokens` is what the
    server puts around a prompt (chat template, first token), `template_tokens` so much of it as all prompts share at
    their beginning. `drift` is 1 unless words cost more together than alone. `max_model_len`: None where not told.
    """

    tokens_per_word: float = 1.25
    overhead_tokens: float = 0.0
    measured: bool = False
    template_tokens: float = 0.0
    costs: Mapping[str, int] = field(default_factory=dict)
    drift: float = 1.0
    max_model_len: int | None = None

    def __hash__(self) -> int:
        """By its numbers: a table of costs is long, and two that differ say other numbers too."""
        return hash((self.tokens_per_word, self.overhead_tokens, self.drift, self.max_model_len, len(self.costs)))

    @property
    def exact(self) -> bool:
        """Whether a prompt has to the token the length that it was made for."""
        return bool(self.costs) and self.drift == 1.0

    def cost(self, word: str) -> float:
        """Tokens of one word with the space before it."""
        return self.costs.get(word, self.tokens_per_word)

    def length(self, said: str) -> float:
        """Tokens of one of our own prompts."""
        return self.overhead_tokens + self.drift * sum(self.cost(word) for word in said.split())

    def longest(self, output_tokens: int) -> int | None:
        """The longest prompt that surely fits with its answer; 0 or less: none does; None: no limit is known."""
        if self.max_model_len is None:
            return None
        room = self.max_model_len - output_tokens
        return room if self.exact else room - math.ceil(_LINEAR_ERROR * room)


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


@cache
def _pool() -> tuple[tuple[str, ...], ...]:
    """Sentences written out, as words: put together in ever other orders. The same on every platform."""
    corpus = _corpus()
    chance = random.Random("pool")  # noqa: S311  # reproducible on purpose, no secret
    written = []
    for number in range(_POOL):
        pattern = corpus.sentences[number % len(corpus.sentences)]
        sentence = _SLOT.sub(lambda slot: chance.choice(corpus.words[slot.group(1)]), pattern)
        written.append(tuple((sentence[0].upper() + sentence[1:]).split()))
    return tuple(written)


@cache
def _serial_words() -> tuple[str, ...]:
    """Words that a serial is written in, by number."""
    return tuple(sorted({word for sentence in _pool() for word in sentence if word.isalpha() and word.islower()}))


@cache
def vocabulary() -> tuple[str, ...]:
    """Every word, with its capitals and punctuation, that a generated prompt may hold after its first."""
    return tuple(sorted({word for sentence in _pool() for word in sentence} | {OPENING}))


def _digest(seed: str) -> bytes:
    return hashlib.blake2b(seed.encode(), digest_size=2 * _SERIAL_BYTES).digest()


def serial(seed: str) -> list[str]:
    """A number of its own for each seed, in words."""
    words = _serial_words()
    number = int.from_bytes(_digest(seed)[:_SERIAL_BYTES])
    found = []
    for _ in range(math.ceil(8 * _SERIAL_BYTES / math.log2(len(words)))):
        number, place = divmod(number, len(words))
        found.append(words[place])
    return found


class Writer:
    """Writes prompts of a length in tokens for one server.

    It runs between the chunks of other streams: a prompt of 8000 tokens is some 600 sentences put together as they are.
    """

    def __init__(self, scale: Scale = Scale()) -> None:
        self._scale = scale
        self._sentences = [(" ".join(words), sum(map(scale.cost, words))) for words in _pool()]
        self._least = min(map(scale.cost, vocabulary()))
        self._fillers = [word for word in _serial_words() if scale.cost(word) == self._least]

    def write(self, seed: str, tokens: float) -> str:
        """Text of `tokens`, the same for the same seed and scale; a few words at least, however few are asked for."""
        cost = self._scale.cost
        left = (tokens - self._scale.overhead_tokens) / self._scale.drift - cost(OPENING)
        parts = [OPENING]
        for number, word in enumerate(serial(seed)):
            if number >= _SHORTEST_SERIAL and cost(word) > left:
                break
            parts.append(word)
            left -= cost(word)
        chance = int.from_bytes(_digest(seed)[_SERIAL_BYTES:])
        for sentence, whole in self._endless(chance):
            if whole > left:
                break
            parts.append(sentence)
            left -= whole
        for word in sentence.split():
            if cost(word) > left:
                break
            parts.append(word)
            left -= cost(word)
        missing = max(0, math.floor(left / self._least + 0.5))
        parts += [self._fillers[(chance + place) % len(self._fillers)] for place in range(missing)]
        return " ".join(parts)

    def _endless(self, chance: int) -> Iterator[tuple[str, float]]:
        """Sentences with their costs, from anywhere on in steps of an odd width: none twice before all were there."""
        many = len(self._sentences)
        place, step = chance % many, 2 * (chance // many % many) + 1
        while True:
            for _ in range(many):
                yield self._sentences[place]
                place = (place + step) % many
            place, step = place + 1, step + 2


@lru_cache(maxsize=4)
def writer_of(scale: Scale) -> Writer:
    """The writer for one server: pricing all sentences takes as long as a short trial, and a boot has many."""
    return Writer(scale)


class Prompts:
    """The generated prompts of one stream by number; none is there twice."""

    def __init__(self, seed: str, tokens: int, writer: Writer) -> None:
        self._seed, self._tokens, self._writer = seed, tokens, writer

    def __getitem__(self, index: int) -> str:
        return self._writer.write(f"{self._seed}/{index}", self._tokens)


class OwnPrompts:
    """The user's own prompts for one boot, in an order that the seed decides; whoever asks gets the next one.

    All trials of a boot share it, so that none is sent twice to one engine. When all were sent, they are sent again:
    as they are where `repeat` is set, else behind a serial, which makes each a new prompt.
    """

    def __init__(self, prompts: Sequence[str], seed: str, *, repeat: bool = False) -> None:
        # What stands in the file twice is one prompt.
        self._prompts = list(prompts if repeat else dict.fromkeys(prompts))
        self._seed = seed
        self.repeat = repeat
        self.taken = 0
        random.Random(seed).shuffle(self._prompts)  # noqa: S311  # reproducible on purpose, no secret

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def again(self) -> int:
        """How often a prompt was given out that had been before."""
        return max(0, self.taken - len(self._prompts))

    def take(self) -> str:
        """The next one."""
        turn, place = divmod(self.taken, len(self._prompts))
        self.taken += 1
        if turn == 0 or self.repeat:
            return self._prompts[place]
        return f"{' '.join(serial(f'{self._seed}/{turn}/{place}'))}: {self._prompts[place]}"
