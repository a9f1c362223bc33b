"""YAML 1.2 files that people write: plain data, the line of every key, and all problems at once.

Only `true` and `false` (also `True`, `TRUE` …: the core schema) are booleans; `on`, `yes`, `no`, `off` are text. Keys
are always text. A key twice is a problem, and so is an unquoted `010`, which is 8 to YAML 1.1 and 10 to YAML 1.2.
What only other YAML dialects read as a number (`1_000`, `0x10`, `.inf`) stays text, so that whoever expects a number
refuses it. Anchors, aliases and merge keys (`<<`) work.

ruamel.yaml is used for its events alone: they say whether a scalar was quoted, which its constructors forget.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from orchestrator.errors import ProblemsError

KeyPath: TypeAlias = tuple[str | int, ...]

MAX_NODES = 100_000  # aliases of aliases grow exponentially ("billion laughs")
MAX_DEPTH = 60

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_STR_TAG = "tag:yaml.org,2002:str"


@dataclass(frozen=True, slots=True)
class Mark:
    """Where something stands. `text` is a scalar as it was written, `plain` that it stood without quotes.

    `file` names another file than the one that is read: one that it includes.
    """

    line: int
    text: str | None = None
    plain: bool = False
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a file. `line` counts from 1; `file` as in `Mark`."""

    line: int
    key: str
    what: str
    accepted: str | None = None
    file: str | None = None

    def say(self, filename: str) -> str:
        """`file:line: key: what is wrong; accepted: …`, on one line; what cannot be printed stands as an escape."""
        key = f"{self.key}: " if self.key else ""
        accepted = f"; accepted: {self.accepted}" if self.accepted else ""
        said = f"{key}{self.what}{accepted}"
        return f"{self.file or filename}:{self.line}: " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in said)


def say_path(path: KeyPath) -> str:
    """`("a", "b", 0)` as `a.b[0]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


@dataclass(frozen=True)
class Document:
    """A file as plain data. `marks` has one entry for each key and list item; `()` is the whole."""

    data: Any
    marks: Mapping[KeyPath, Mark]
    problems: tuple[Problem, ...]

    def mark(self, path: KeyPath) -> Mark:
        """The mark of a key, or of the nearest thing around it that stands in the file."""
        for end in range(len(path), -1, -1):
            found = self.marks.get(path[:end])
            if found is not None:
                return found if end == len(path) else Mark(found.line, file=found.file)
        return Mark(1)

    def problem(self, path: KeyPath, what: str, accepted: str | None = None) -> Problem:
        """A problem with one key, at its line."""
        mark = self.mark(path)
        return Problem(mark.line, say_path(path), what, accepted, mark.file)


def load_yaml(text: str, filename: str) -> tuple[Any, Mapping[KeyPath, Mark]]:
    """Read one YAML document.

    Returns:
        The data (dict with text keys, list, str, int, float, bool, None) and, for each key path, its `Mark`.

    Raises:
        ProblemsError: every problem of form, each `file:line: key: what; accepted: …`.
    """
    document = parse(text)
    if document.problems:
        raise ProblemsError([problem.say(filename) for problem in document.problems])
    return document.data, document.marks


def decode(raw: bytes) -> str:
    """Bytes of a file as text, without a byte order mark.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    return raw.decode("utf-8-sig")


def parse(text: str) -> Document:
    """Read one YAML document and keep going where that is possible; never raises for what stands in the text."""
    reader = _Reader()
    try:
        root = reader.read(text)
    except (YAMLError, _Stop) as error:
        return Document(None, {}, (_syntax_problem(error, text),))
    builder = _Builder(list(reader.problems))
    try:
        data = builder.build(root, (), None) if root is not None else None
    except _Stop as error:
        return Document(None, {}, (*builder.problems, error.problem))
    return Document(data, builder.marks, tuple(sorted(builder.problems, key=lambda problem: problem.line)))


# --- events to nodes -----------------------------------------------------------------------------------------------


class _Stop(Exception):
    """Ends reading; it never leaves this module."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


@dataclass(eq=False)
class _Node:
    line: int
    tag: str | None
    text: str | None = None  # a scalar's
    plain: bool = False
    items: list[_Node] | None = None
    entries: list[tuple[_Node, _Node]] | None = None


@dataclass
class _Reader:
    anchors: dict[str, _Node] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def read(self, text: str) -> _Node | None:
        events: Iterator[Event] = iter(YAML(typ="rt", pure=True).parse(text))
        root: _Node | None = None
        documents = 0
        for event in events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _Stop(Problem(_line(event), "", "a second document begins here", "one document a file"))
            elif isinstance(event, NodeEvent):
                root = self.node(event, events, 0)
            elif isinstance(event, StreamEndEvent):
                break
        return root

    def node(self, event: Event, events: Iterator[Event], depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise _Stop(Problem(_line(event), "", f"nested more than {MAX_DEPTH} deep", "plain keys and lists"))
        if isinstance(event, AliasEvent):
            if event.anchor not in self.anchors:
                raise _Stop(Problem(_line(event), "", f"alias `*{event.anchor}` has no anchor before it"))
            return self.anchors[event.anchor]
        assert isinstance(event, ScalarEvent | SequenceStartEvent | MappingStartEvent)
        node = _Node(_line(event), str(event.tag) if event.tag is not None else None)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        if isinstance(event, ScalarEvent):
            node.text, node.plain = event.value, event.style in (None, "")
        elif isinstance(event, SequenceStartEvent):
            node.items = []
            while not isinstance(inner := next(events), SequenceEndEvent):
                node.items.append(self.node(inner, events, depth + 1))
        elif isinstance(event, MappingStartEvent):
            node.entries = []
            while not isinstance(inner := next(events), MappingEndEvent):
                key = self.node(inner, events, depth + 1)
                node.entries.append((key, self.node(next(events), events, depth + 1)))
        return node


def _line(event: Event) -> int:
    return int(event.start_mark.line) + 1


# --- nodes to data -------------------------------------------------------------------------------------------------


@dataclass
class _Builder:
    problems: list[Problem]
    marks: dict[KeyPath, Mark] = field(default_factory=dict)
    open: list[_Node] = field(default_factory=list)
    built: int = 0

    def build(self, node: _Node, path: KeyPath, line: int | None) -> Any:
        """Data of one node; `line` is that of its key, else its own."""
        self.built += 1
        where = node.line if line is None else line
        if self.built > MAX_NODES:
            raise _Stop(Problem(where, say_path(path), f"more than {MAX_NODES} values once aliases are written out"))
        if any(node is outer for outer in self.open):
            raise _Stop(Problem(where, say_path(path), "an alias inside of what it stands for"))
        if node.tag is not None and not (node.tag == _STR_TAG and node.text is not None):
            self.problems.append(Problem(where, say_path(path), f"the tag `{node.tag}` means nothing here", "no tags"))
        self.marks[path] = Mark(where, node.text, node.plain)
        if node.text is not None:
            return self.scalar(node, path, where)
        self.open.append(node)
        try:
            return self.sequence(node.items, path) if node.items is not None else self.mapping(node, path)
        finally:
            self.open.pop()

    def scalar(self, node: _Node, path: KeyPath, line: int) -> Any:
        assert node.text is not None
        if not node.plain or node.tag == _STR_TAG:
            return node.text
        if _LEADING_ZERO.fullmatch(node.text):
            plain = node.text.lstrip("+-0") or "0"
            what = f"`{node.text}` is 8-based to some YAML readers and 10-based to others"
            self.problems.append(Problem(line, say_path(path), what, f'{plain} as a number, "{node.text}" as text'))
            return node.text
        value = resolve(node.text)
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            self.problems.append(Problem(line, say_path(path), f"`{node.text}` is too large", "a finite number"))
            return node.text
        return value

    def sequence(self, items: list[_Node], path: KeyPath) -> list[Any]:
        return [self.build(item, (*path, index), None) for index, item in enumerate(items)]

    def mapping(self, node: _Node, path: KeyPath) -> dict[str, Any]:
        assert node.entries is not None
        data: dict[str, Any] = {}
        seen: dict[str, int] = {}
        merged: list[_Node] = []
        for key, value in node.entries:
            if key.text is None:
                self.problems.append(Problem(key.line, say_path(path), "a list or mapping as a key", "text as a key"))
                continue
            if key.text == "<<" and key.plain:
                merged += value.items if value.items is not None else [value]
                continue
            inner = (*path, key.text)
            if key.text in seen:
                what = f"given twice (first in line {seen[key.text]})"
                self.problems.append(Problem(key.line, say_path(inner), what, "each key once"))
                continue
            seen[key.text] = key.line
            data[key.text] = self.build(value, inner, key.line)
        for source in merged:
            self.merge(source, path, data)
        return data

    def merge(self, source: _Node, path: KeyPath, data: dict[str, Any]) -> None:
        """Add what `<<` brings, below what is written out."""
        if source.entries is None:
            what = "`<<` brings in something that is no mapping"
            self.problems.append(Problem(source.line, say_path(path), what, "an alias of a mapping"))
            return
        kept = {mark: self.marks[mark] for mark in self.marks if mark[: len(path)] == path}
        brought = self.build(source, path, None)
        self.marks.update(kept)
        for key, value in brought.items():
            data.setdefault(key, value)


def resolve(text: str) -> Any:
    """An unquoted scalar by the core schema of YAML 1.2, without its octal, hexadecimal, infinite and NaN numbers."""
    if text in _NULL:
        return None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    if _INT.fullmatch(text):
        return int(text) if len(text) < 400 else float(text)
    if _FLOAT.fullmatch(text) and not _LEADING_ZERO.fullmatch(text):
        return float(text)
    return text


def _syntax_problem(error: YAMLError | _Stop, text: str) -> Problem:
    if isinstance(error, _Stop):
        return error.problem
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line = int(mark.line) + 1 if mark is not None else 1
        lines = text.splitlines()
        shown = lines[line - 1] if line <= len(lines) else ""
        what = " ".join(str(part) for part in (error.context, error.problem) if part)
        if "\t" in shown[: len(shown) - len(shown.lstrip())] or "'\\t'" in what:
            return Problem(line, "", "a tab where the indentation stands", "spaces")
        return Problem(line, "", f"not YAML: {what}", "YAML 1.2")
    position = getattr(error, "position", None)
    line = text.count("\n", 0, position) + 1 if isinstance(position, int) else 1
    character = getattr(error, "character", None)
    named = f" (U+{character:04X})" if isinstance(character, int) else ""
    return Problem(line, "", f"a control character{named} that YAML does not allow", "printable text")
