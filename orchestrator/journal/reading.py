"""Reading messages fast: what a message says is found out once, and remembered for those that repeat.

Three memories, each bounded: a message's shape (its text with every digit as 0) that holds nothing any rule looks for,
so that a flood of access-log lines costs one look-up each; a whole message, with all that its lines say; and a line's
body without prefix, so that a flood whose clock moves on costs the prefix alone.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import NamedTuple

from orchestrator.journal import lines
from orchestrator.journal.entries import DIGITS
from orchestrator.journal.rules import Rule, RuleSet, words_of

# These tell where the boot is, whatever else their line means: they are looked at first and end no search.
MILESTONES = frozenset({"phase", "served", "ready"})

_OK = '" 200 OK'
_ACCESS = re.compile(r'\\?"(?P<verb>GET|POST|PUT|DELETE|HEAD) (?P<path>\S+) HTTP/[\d.]+\\?" (?P<status>\d{3})\b')
_GENERATES = re.compile(r"/v\d+/(?!.*lora)|^/(?:generate|invocations|score|rerank|embed\w*|pooling|classify)\b")
_STATS = re.compile(
    r"Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, Avg generation throughput: (?P<generation>[\d.]+) tokens/s, "
    r"Running: (?P<running>\d+) reqs"
    r"(?:, (?:Swapped|Waiting): (?P<waiting>\d+) reqs)?(?:, Pending: (?P<pending>\d+) reqs)?"
)
_SERVING_SOURCES = ("serving", "loggers.py", "async_llm", "protocol.py", "v1/engine/async_llm")
_LOUD = frozenset({"ERROR", "CRITICAL"})

_MOST_SHAPES = 1 << 16
_MOST_READ = 1 << 23  # characters
_OVERHEAD = 512
_LONGEST = 2048
_CURSOR = b'"__CURSOR":"'


class Meaning(Enum):
    """What all messages of one shape mean."""

    DULL = auto()
    ANSWERED = auto()
    GENERATED = auto()
    PROGRESS = auto()


class Fit(NamedTuple):
    """A rule fits a line: the values of its pattern's named groups, and the text that it was found in."""

    rule: Rule
    values: dict[str, str | None]
    text: str


class Access(NamedTuple):
    """An access-log line: its status, and whether the request was for work of the model."""

    status: int
    generates: bool


class Stats(NamedTuple):
    """The engine's periodic line: requests running and waiting, tokens/s of prompts and answers together."""

    running: int
    waiting: int
    tokens_per_s: float


class Step(NamedTuple):
    """A line that says something. `at` counts the message's lines from 1.

    `fits`: milestones first, then the verdict (and beside a fault the wrapper that names it in the same line).
    `error`: printed as an error, and no rule names it. `serves`: printed by what only serving prints.
    """

    at: int
    line: lines.Line
    fits: tuple[Fit, ...] = ()
    access: Access | None = None
    stats: Stats | None = None
    error: bool = False
    serves: bool = False
    traceback: bool = False


class Reading(NamedTuple):
    """A message: how many lines it has, and those that say something."""

    lines: int
    steps: tuple[Step, ...]


class Reader:
    """Reads messages against rules. Its memory is bounded: full tables are emptied."""

    def __init__(self, rules: RuleSet) -> None:
        self.rules = rules
        self._shapes: dict[bytes, Meaning] = {}
        self._readings: dict[str, dict[str, Reading]] = {"program": {}, "journal": {}, "kernel": {}}
        self._bodies: dict[tuple[str, str], tuple[Fit, ...]] = {}
        self._read = self._fitted = 0

    def meaning(self, message: str) -> Meaning | None:
        """What a program's message of this shape is known to mean."""
        return self._shapes.get(message.encode("utf-8", "replace").translate(DIGITS))

    def known(self, transport: str, message: str) -> Reading | None:
        """What a message says, if it was read before."""
        return self._readings[transport].get(message)

    def read(self, transport: str, message: str) -> Reading:
        """What a message says, read for the first time."""
        reading = self._fresh(transport, message)
        if reading.steps or transport != "program" or len(message) > _LONGEST:
            self._read += len(message) + _OVERHEAD
            if self._read > _MOST_READ:
                for table in self._readings.values():
                    table.clear()
                self._read = len(message) + _OVERHEAD
            self._readings[transport][message] = reading
        return reading

    def _fresh(self, transport: str, message: str) -> Reading:
        texts = lines.split(message)
        steps, dull = [], True
        for at, text in enumerate(texts, start=1):
            step = self._step(transport, text, at)
            if step is not None:
                dull &= step.line.is_frame and not step.fits
                steps.append(step)
        if transport == "program" and len(message) <= _LONGEST:
            # A rule without words may look for numbers, of which a shape knows nothing.
            if dull and not self.rules.always:
                self._remember(message, Meaning.DULL)
                return Reading(len(texts), ())
            if len(texts) == len(steps) == 1:
                self._remember_shape(message, steps[0])
        return Reading(len(texts), tuple(steps))

    def _remember_shape(self, message: str, step: Step) -> None:
        """Lines that come by the thousand and mean the same whatever their numbers are."""
        if step.access is not None and message.endswith(_OK):
            self._remember(message, Meaning.GENERATED if step.access.generates else Meaning.ANSWERED)
        elif step.stats is not None and step.stats.tokens_per_s > 0:
            self._remember(message, Meaning.PROGRESS)

    def _remember(self, message: str, meaning: Meaning) -> None:
        if len(self._shapes) >= _MOST_SHAPES:
            self._shapes.clear()
        self._shapes[message.encode("utf-8", "replace").translate(DIGITS)] = meaning

    def _step(self, transport: str, text: str, at: int) -> Step | None:
        """What one line says; None when it says nothing."""
        line = lines.parse(text)
        if transport != "program":
            fits = self._fits(transport, line)
            return Step(at, line, fits) if fits else None
        if " HTTP/" in line.body:
            found = _ACCESS.search(line.body)
            if found is not None:
                # What a client wrote into its request's path is no word of ours: no rule looks at it.
                generates = found["verb"] == "POST" and _GENERATES.search(found["path"]) is not None
                return Step(at, line, access=Access(int(found["status"]), generates))
        if "Avg generation throughput" in line.body:
            found = _STATS.search(line.body)
            if found is not None:
                waiting = int(found["waiting"] or 0) + int(found["pending"] or 0)
                tokens = float(found["prompt"]) + float(found["generation"])
                return Step(at, line, stats=Stats(int(found["running"]), waiting, tokens), serves=True)
        fits = self._fits(transport, line)
        named = any(fit.rule.kind not in MILESTONES for fit in fits)
        traceback = line.body.startswith("Traceback")
        step = Step(
            at,
            line,
            fits,
            error=line.level in _LOUD and not (named or traceback or line.is_frame),
            serves=line.source.startswith(_SERVING_SOURCES) or line.source.endswith("_parser.py"),
            traceback=traceback,
        )
        return step if fits or step.error or step.serves or step.traceback else None

    def _fits(self, transport: str, line: lines.Line) -> tuple[Fit, ...]:
        key = (transport, line.body)
        known = self._bodies.get(key)
        if known is None:
            words = words_of(line.body)
            dull = not self.rules.always and self.rules.keys.isdisjoint(words)
            known = () if dull else self._search(transport, line, words)
            self._fitted += len(line.body) + _OVERHEAD
            if self._fitted > _MOST_READ:
                self._bodies.clear()
                self._fitted = len(line.body) + _OVERHEAD
            self._bodies[key] = known
        return known

    def _search(self, transport: str, line: lines.Line, words: list[str]) -> tuple[Fit, ...]:
        frame = transport == "program" and line.is_frame
        milestones: list[Fit] = []
        verdicts: list[Fit] = []
        for rule in self.rules.candidates(words):
            milestone = rule.kind in MILESTONES
            decided = not milestone and bool(verdicts) and not _joins(rule, verdicts)
            if rule.transport != transport or (rule.kind == "frame") != frame or decided:
                continue
            found = rule.search(line.body)
            if found is None:
                continue
            fit = Fit(rule, found.groupdict(), line.body)
            (milestones if milestone else verdicts).append(fit)
        if any(fit.rule.quotes for fit in milestones):
            return tuple(milestones)
        return (*milestones, *verdicts)


def without_cursor(line: bytes) -> bytes:
    """A line of `journalctl -o json` without its cursor, whose hexadecimal digits would make every shape another."""
    begin = line.find(_CURSOR)
    return line if begin < 0 else line[:begin] + line[line.find(b'"', begin + len(_CURSOR)) :]


def _joins(rule: Rule, verdicts: list[Fit]) -> bool:
    """A wrapper that names its root in the same line says both: the fault, and that something died."""
    return rule.kind == "death" and len(verdicts) == 1 and verdicts[0].rule.kind == "fault"
