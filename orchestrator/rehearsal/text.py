"""Text and tokens: how prompts are counted, and what the model says."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

_PROSE = Path(__file__).with_name("data") / "prose.txt"
_PIECE = re.compile(r" ?[^\W\d_]{1,4}| ?\d{1,3}| ?[^\w\s]| ?_|\s")
_VOCABULARY = 151_936


def pieces(text: str) -> list[str]:
    """The tokens of a text: English prose has about 0.7 words in each."""
    return _PIECE.findall(text)


def token_id(piece: str) -> int:
    """A stable number for a token."""
    return zlib.crc32(piece.encode()) % _VOCABULARY


def block_hashes(tokens: Sequence[object], block_size: int) -> list[int]:
    """Hashes of the full prefix blocks of a prompt, each over all that stands before; valid within one process."""
    hashes: list[int] = []
    previous = 0
    for start in range(0, len(tokens) - block_size + 1, block_size):
        previous = hash((previous, tuple(tokens[start : start + block_size])))
        hashes.append(previous)
    return hashes


class Author:
    """Writes answers: real sentences in an order that the prompt decides, the same on every boot."""

    def __init__(self) -> None:
        self._sentences = [pieces(" " + line) for line in _PROSE.read_text(encoding="utf-8").splitlines() if line]

    def answer(self, seed: int) -> Iterator[str]:
        """The endless tokens of an answer."""
        count = len(self._sentences)
        position, stride = seed % count, 1 + (seed // count) % (count - 1)
        while _common(stride, count):
            stride += 1
        while True:
            yield from self._sentences[position]
            position = (position + stride) % count


def seed_of(prompt: str, extra: object = None) -> int:
    """The seed of an answer: the prompt, and what a sampled request adds to it."""
    return zlib.crc32(prompt.encode("utf-8", "surrogatepass") + (repr(extra).encode() if extra is not None else b""))


def natural_length(seed: int) -> int:
    """Tokens after which an answer ends by itself, from 120 to 631."""
    return 120 + (seed >> 7) % 512


def _common(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a != 1
