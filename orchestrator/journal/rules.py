"""Rules as data: what a line means, in readable TOML files with their witnesses, and the index that finds them fast.

A rule is looked at only when the line holds one of its `words` (whole runs of letters), so that a journal of 100 MB is
screened by one set operation a line. Order is part of the data: the first rule that fits a line decides. Imports
records and errors only.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from orchestrator.errors import ProblemsError
from orchestrator.journal import lines
from orchestrator.records import Frozen

Kind = Literal["fault", "death", "benign", "frame", "phase", "stop", "exit", "served", "ready", "chain", "missing"]
FILES = ("box.toml", "gpu.toml", "vllm.toml", "others.toml")

PHASES = (
    "exec",
    "config",
    "weights",
    "profiling",
    "kv_cache",
    "compile",
    "graph_capture",
    "warmup",
    "first_request",
    "load",
    "idle",
    "shutdown",
    "unknown",
)
# Rank of an end that names no reason.
NO_REASON = 5
SERVING = frozenset({"first_request", "load", "idle"})

_words = re.compile(r"[A-Za-z]{3,}").findall
PROGRESS_BAR = "progressbar"


def words_of(text: str) -> list[str]:
    """The runs of three letters and more; the word `progressbar` stands for a bar that names nothing."""
    words: list[str] = _words(text)
    if "it/s]" in text or "s/it]" in text:
        words.append(PROGRESS_BAR)
    return words


class Cause(Frozen):
    """One word of the vocabulary: what it means, whether the same boot would fail again, and what to do about it."""

    slug: str
    outcome: Literal["failure", "benign"]
    definition: str
    advice: str
    permanent: bool | None = None


class RuleFaults(ValueError):
    """What is wrong with a rule as a whole: (key, what)."""

    def __init__(self, faults: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{key}: {what}" for key, what in faults))
        self.faults = tuple(faults)


class Rule(Frozen):
    """What one kind of line means.

    Attributes:
        name: CamelCase reason, shown as evidence.
        kind: `fault` names a cause of our own; `death` says that something died without naming why (a wrapper, never a
            cause); `benign` looks alarming and is not; `frame` is a traceback's line that tells the phase (or, for
            exceptions that nobody names, the cause); `phase` is a milestone of the boot; `stop` a requested stop;
            `exit` the end of the unit; `served` a sign of serving; `ready` the server's word that it is ready;
            `chain` systemd starts the unit (again); `missing` says that entries were lost.
        pattern: Regular expression, searched in the line without its log prefix.
        unless: A line that this fits, too, is not meant.
        words: At least one of these stands in every line that fits, as a whole run of letters.
        cause: Slug of the vocabulary.
        by_phase: Other cause in that phase (an OOM while CUDA graphs are captured).
        phase: Where this happens, whatever the boot said last; None: the phase of the boot so far.
        fallback: Phase when nothing in the log tells one.
        then: For `phase`: what comes after this milestone.
        rank: 0 kernel or manager evidence about ours, 1 a named root, 2 a time-out, a native crash or a failed compile
            (often the consequence of a named root), 3 an exit code that tells a crash, 4 the C++ run-time's last word
            or a refused value, 5 an end that names no reason. The lowest rank of a start wins, then the earliest.
        sticky: Later successes do not take it back (a lost GPU, a dead context).
        boot_only: Such a thing ends a boot, never an engine that serves, whatever was printed before it.
        clean: For `exit`: an end with status 0.
        if_dead: For `benign`: the cause when the start died and nothing else names one.
        answers: For `served`: the line shows that requests are being answered.
        quotes: For milestones: the rest of the line is quoted (a prompt, settings), which only milestones may look at.
        when: For `death`: which part of life the wrapper belongs to.
        alarm: The start can no longer succeed once this line is seen.
        transport: Only entries of this transport (`kernel`, `journal`), else the program's own.
        source: File that the rule came from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=r"^[A-Z][A-Za-z0-9]+$")
    kind: Kind = "fault"
    pattern: str
    unless: str | None = None
    words: tuple[str, ...] = ()
    cause: str | None = None
    by_phase: dict[str, str] = Field(default_factory=dict)
    phase: str | None = None
    fallback: str | None = None
    then: str | None = None
    rank: int = Field(default=1, ge=0, le=5)
    sticky: bool = False
    clean: bool = False
    boot_only: bool = False
    answers: bool = False
    quotes: bool = False
    if_dead: str | None = None
    when: Literal["startup", "runtime", "any"] = "any"
    alarm: bool = False
    transport: Literal["program", "journal", "kernel"] = "program"
    permanent: bool | None = None
    advice: str | None = None
    matches: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    source: str = ""

    @field_validator("pattern", "unless")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _whole(self) -> Rule:
        faults = tuple(self._faults())
        if faults:
            raise RuleFaults(faults)
        return self

    def _faults(self) -> Iterator[tuple[str, str]]:
        if not self.matches or not self.ignores:
            yield (
                "ignores" if self.matches else "matches",
                "no witnesses: give `matches` (lines that must fit) and `ignores` (near misses)",
            )
        for key in ("phase", "fallback", "then"):
            value = getattr(self, key)
            if value is not None and value not in PHASES:
                yield key, f"{value!r} is no phase; accepted: {', '.join(PHASES)}"
        if self.kind in ("fault", "benign") and self.cause is None:
            yield "cause", "is missing"
        if any(len(word) < 3 or not word.isalpha() or not word.isascii() for word in self.words):
            yield "words", "runs of at least three letters, each"
        for text in self.matches:
            if not self.fits(text):
                yield "matches", f"does not fit its own witness: {text!r}"
        for text in self.ignores:
            if self.fits(text):
                yield "ignores", f"fits a line that it must not: {text!r}"

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern."""
        return re.compile(self.pattern)

    @cached_property
    def _unless(self) -> re.Pattern[str] | None:
        return None if self.unless is None else re.compile(self.unless)

    def search(self, body: str) -> re.Match[str] | None:
        """Where the rule fits a line without its prefix."""
        found = self.regex.search(body)
        if found is not None and self._unless is not None and self._unless.search(body) is not None:
            return None
        return found

    def fits(self, text: str) -> bool:
        """Whether this rule fits a whole line with its prefix; order and transport are the set's affair."""
        body = lines.parse(text).body
        if self.words and set(self.words).isdisjoint(words_of(body)):
            return False
        return self.search(body) is not None


@dataclass(frozen=True)
class RuleSet:
    """Rules in order, and the index word → rules."""

    rules: tuple[Rule, ...]
    causes: Mapping[str, Cause]
    index: Mapping[str, tuple[int, ...]] = field(init=False)
    always: tuple[int, ...] = field(init=False)
    keys: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        index: dict[str, list[int]] = {}
        always: list[int] = []
        for number, rule in enumerate(self.rules):
            for word in rule.words:
                index.setdefault(word, []).append(number)
            if not rule.words:
                always.append(number)
        object.__setattr__(self, "index", {word: tuple(numbers) for word, numbers in index.items()})
        object.__setattr__(self, "always", tuple(always))
        object.__setattr__(self, "keys", frozenset(index))

    def candidates(self, words: Iterable[str]) -> list[Rule]:
        """The rules whose words stand in a line, in order."""
        numbers = set(self.always)
        for word in self.keys.intersection(words):
            numbers.update(self.index[word])
        return [self.rules[number] for number in sorted(numbers)]

    def extended(self, rules: Sequence[Rule]) -> RuleSet:
        """This set with a user's rules before it: they decide first."""
        return RuleSet((*rules, *self.rules), self.causes)


def rules_from(
    items: Sequence[Mapping[str, Any]], *, source: str, causes: Mapping[str, Cause] | None = None
) -> tuple[Rule, ...]:
    """Rules out of plain dicts (a TOML file, or a user's matrix.yaml).

    Raises:
        ProblemsError: Every problem at once, `source: name: what`; a rule without witnesses is one.
    """
    known = causes if causes is not None else load_causes()
    problems: list[str] = []
    rules: list[Rule] = []
    for position, item in enumerate(items, start=1):
        name = item.get("name", f"rule {position}")
        rule, faults = checked(item, source=source, causes=known)
        problems += [f"{source}: {name}: {key}: {what}" if key else f"{source}: {name}: {what}" for key, what in faults]
        rules += [] if rule is None else [rule]
    names = [rule.name for rule in rules]
    problems += [f"{source}: {name}: named twice" for name in sorted({n for n in names if names.count(n) > 1})]
    if problems:
        raise ProblemsError(problems)
    return tuple(rules)


def checked(
    item: Mapping[str, Any], *, source: str, causes: Mapping[str, Cause]
) -> tuple[Rule | None, tuple[tuple[str, str], ...]]:
    """A rule out of a plain dict, or None, and all that is wrong with it: (key, what)."""
    rule: Rule | None = None
    faults: list[tuple[str, str]] = []
    try:
        rule = Rule.model_validate({**item, "source": source})
    except ValidationError as error:
        for detail in error.errors():
            whole = detail.get("ctx", {}).get("error")
            if isinstance(whole, RuleFaults):
                faults += whole.faults
            else:
                where = ".".join(str(part) for part in detail["loc"])
                faults.append((where, str(detail["msg"]).removeprefix("Value error, ")))
    slugs = [("cause", item.get("cause")), ("if_dead", item.get("if_dead"))]
    slugs += [("by_phase", slug) for slug in (item.get("by_phase") or {}).values()]
    faults += [(key, _no_cause(slug, causes)) for key, slug in slugs if slug is not None and slug not in causes]
    return (None if faults else rule), tuple(faults)


def _no_cause(slug: Any, causes: Mapping[str, Cause]) -> str:
    near = difflib.get_close_matches(str(slug), causes, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{slug!r} is no cause{meant}; docs/causes.md has them all"


def _toml(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def load_causes() -> dict[str, Cause]:
    """The vocabulary, slug → cause, in the order of causes.toml."""
    return {item["slug"]: Cause.model_validate(item) for item in _toml("causes.toml")["cause"]}


def load_rules() -> RuleSet:
    """The shipped rules, file by file in the order of FILES."""
    causes = load_causes()
    rules: list[Rule] = []
    for name in FILES:
        rules += rules_from(_toml(name).get("rule", ()), source=name, causes=causes)
    return RuleSet(tuple(rules), causes)


DEFAULT = load_rules
