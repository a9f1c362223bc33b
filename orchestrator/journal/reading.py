"""Reading lines fast: what rules fit a line, remembered for lines that repeat, and lines that need no second look.

A line's shape is its text with every digit as 0. Rules are found by runs of letters, so a line of a shape that held no
rule's word can hold none either; a flood of access-log lines costs one look-up each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from orchestrator.journal import lines
from orchestrator.journal.rules import Rule, RuleSet, words_of

# These tell where the boot is, whatever else their line means: they are looked at first and end no search.
MILESTONES = frozenset({"phase", "served", "ready"})

_MOST_SHAPES = 1 << 16
_MOST_READ = 1 << 23  # characters
_LONGEST = 2048
_DIGITS = bytes(ord("0") if ord("0") <= byte <= ord("9") else byte for byte in range(256))


class Meaning(Enum):
    """What all lines of one shape mean."""

    DULL = auto()
    ANSWERED = auto()
    GENERATED = auto()
    PROGRESS = auto()


@dataclass(frozen=True, slots=True)
class Reading:
    """A line without its prefix, and the rules that fit it: milestones first, then the verdict (a fault's wrapper beside it)."""

    line: lines.Line
    fits: tuple[tuple[Rule, re.Match[str]], ...]


class Reader:
    """Reads lines against rules. Its memory is bounded: full tables are emptied."""

    def __init__(self, rules: RuleSet) -> None:
        self.rules = rules
        self._shapes: dict[bytes, Meaning] = {}
        self._readings: dict[tuple[str, str], Reading] = {}
        self._read = 0

    def meaning(self, message: str) -> Meaning | None:
        """What a message of this shape is known to mean."""
        return self._shapes.get(message.encode("utf-8", "replace").translate(_DIGITS))

    def remember(self, message: str, meaning: Meaning) -> None:
        """All messages of this shape mean this."""
        if len(message) > _LONGEST:
            return
        if len(self._shapes) >= _MOST_SHAPES:
            self._shapes.clear()
        self._shapes[message.encode("utf-8", "replace").translate(_DIGITS)] = meaning

    def read(self, transport: str, text: str) -> Reading | None:
        """What a line says; None when none of the rules' words stands in it. The same text is read once."""
        known = self._readings.get((transport, text))
        if known is not None:
            return known
        words = words_of(text)
        if not self.rules.always and self.rules.keys.isdisjoint(words):
            return None
        line = lines.parse(text)
        reading = Reading(line, self._fits(transport, line, words))
        self._read += len(text) + _LONGEST // 4
        if self._read > _MOST_READ:
            self._readings.clear()
            self._read = len(text)
        self._readings[transport, text] = reading
        return reading

    def _fits(self, transport: str, line: lines.Line, words: list[str]) -> tuple[tuple[Rule, re.Match[str]], ...]:
        frame = transport == "program" and line.is_frame
        milestones: list[tuple[Rule, re.Match[str]]] = []
        verdicts: list[tuple[Rule, re.Match[str]]] = []
        for rule in self.rules.candidates(words):
            milestone = rule.kind in MILESTONES
            decided = not milestone and bool(verdicts) and not _joins(rule, verdicts)
            if rule.transport != transport or (rule.kind == "frame") != frame or decided:
                continue
            found = rule.search(line.body)
            if found is None:
                continue
            if rule.quotes:
                return ((rule, found),)
            (milestones if milestone else verdicts).append((rule, found))
        return (*milestones, *verdicts)


def _joins(rule: Rule, verdicts: list[tuple[Rule, re.Match[str]]]) -> bool:
    """A wrapper that names its root in the same line says both: the fault, and that something died."""
    return rule.kind == "death" and len(verdicts) == 1 and verdicts[0][0].kind == "fault"
