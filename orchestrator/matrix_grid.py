"""matrix.yaml for grown use: files that it includes, and grids, both written out as if they stood in the file.

Pure: documents in, one document out, whose marks say in which file and line each value really stands. Whatever is
checked afterwards sees plain variants only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from orchestrator.yamlfile import Document, KeyPath, Mark, Problem

MAX_VARIANTS = 500
MAX_IN_ALL = 1000
_MERGED = ("boxes", "variants", "grids", "load", "deadlines")
_HOLE = re.compile(r"\{([^{}]*)\}")
_VALUES = "a list of values, or a mapping: label, then the keys of a variant"

ReadInclude: TypeAlias = Callable[[str], "Document | str"]
"""The document of an included file, or why there is none."""


# --- includes ------------------------------------------------------------------------------------------------------


def with_includes(document: Document, read: ReadInclude) -> Document:
    """The document with what it includes; of two values for one key its own counts, then that of the later file.

    Boxes, variants, grids, and the keys of `load:` and `deadlines:` are put together name by name. A box, a variant and
    a grid are taken whole: half of one and half of another would be a box that nobody has described.
    """
    given = document.data.get("include") if isinstance(document.data, dict) else None
    if not isinstance(given, list):
        return document
    problems = list(document.problems)
    data: dict[str, Any] = {}
    marks: dict[KeyPath, Mark] = {}
    for index, name in enumerate(given):
        if not isinstance(name, str):
            continue
        found = read(name)
        if isinstance(found, str):
            problems.append(document.problem(("include", index), found, "a file, relative to this one"))
            continue
        problems += found.problems
        wrong = _no_part(found)
        if wrong is not None:
            problems += [] if found.problems else [wrong]
            continue
        _lay_over(data, marks, found)
    _lay_over(data, marks, document)
    marks[()] = document.mark(())
    return Document(data, marks, tuple(problems))


def _no_part(document: Document) -> Problem | None:
    if not isinstance(document.data, dict):
        return document.problem((), "is no mapping of keys", "keys of matrix.yaml")
    if "include" in document.data:
        return document.problem(("include",), "an included file includes no other", "name it in the first file")
    return None


def _lay_over(data: dict[str, Any], marks: dict[KeyPath, Mark], document: Document) -> None:
    """Puts a document's keys over those that are there."""
    for key, value in document.data.items():
        inner = value if key in _MERGED and isinstance(value, dict) and isinstance(data.get(key), dict) else None
        paths: list[KeyPath] = [(key,)] if inner is None else [(key, name) for name in inner]
        for path in paths:
            for old in [mark for mark in marks if mark[: len(path)] == path]:
                del marks[old]
        data[key] = value if inner is None else {**data[key], **inner}
        marks.update({path: mark for path, mark in document.marks.items() if path[:1] == (key,)})


# --- grids ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Level:
    """One level of a factor: how it is called, what it sets, and where that stands."""

    label: str
    value: Any
    body: Mapping[str, Any]
    marks: Mapping[KeyPath, Mark]


@dataclass(frozen=True, slots=True)
class _Factor:
    name: str
    levels: tuple[_Level, ...]


@dataclass(slots=True)
class _Expansion:
    document: Document
    data: dict[str, Any]
    marks: dict[KeyPath, Mark]
    problems: list[Problem] = field(default_factory=list)
    made: set[str] = field(default_factory=set)
    in_all: int = 0

    def wrong(self, path: KeyPath, what: str, accepted: str | None = None) -> None:
        self.problems.append(self.document.problem(path, what, accepted))


def with_grids(document: Document) -> tuple[Document, frozenset[str]]:
    """The document with each grid's variants below `variants:`, after those that are written out; and their names."""
    grids = document.data.get("grids") if isinstance(document.data, dict) else None
    variants = document.data.get("variants", {}) if isinstance(document.data, dict) else None
    if not isinstance(grids, dict) or not isinstance(variants, dict | None):
        count = len(variants) if isinstance(variants, dict) else 0
        return replace(document, problems=(*document.problems, *_too_many(document, "variants", count))), frozenset()
    all_of_it = _Expansion(document, {**document.data, "variants": dict(variants or {})}, dict(document.marks))
    all_of_it.in_all = len(variants or {})
    all_of_it.marks.setdefault(("variants",), document.mark(("grids",)))
    for name, grid in grids.items():
        if isinstance(grid, dict):
            _expand(all_of_it, ("grids", name), grid)
    all_of_it.problems += _too_many(document, "grids", all_of_it.in_all)
    done = Document(all_of_it.data, all_of_it.marks, (*document.problems, *all_of_it.problems))
    return done, frozenset(all_of_it.made)


def _too_many(document: Document, key: str, count: int) -> list[Problem]:
    """Each variant is a boot of minutes in every block: what nobody can have meant is not begun."""
    if count <= MAX_IN_ALL:
        return []
    what = f"{count} variants in all" + (", with those that are written out" if key == "grids" else "")
    return [document.problem((key,), what, f"at most {MAX_IN_ALL}")]


def _expand(into: _Expansion, path: KeyPath, grid: Mapping[str, Any]) -> None:
    """Adds one grid's variants; a grid with a problem adds none, so that nothing is said twice."""
    before = len(into.problems)
    factors = _factors(into, (*path, "factors"), grid.get("factors"))
    axes = _axes(into, (*path, "linked"), grid.get("linked"), factors)
    excluded = _excluded(into, (*path, "exclude"), grid.get("exclude"), factors)
    common = _common(into, (*path, "common"), grid.get("common"))
    pattern = _pattern(into, (*path, "name"), grid.get("name"), factors)
    if len(into.problems) > before or not factors:
        return
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MAX_VARIANTS:
        into.wrong(path, f"{count} variants", f"at most {MAX_VARIANTS}; leave levels out, or link factors")
        return
    into.in_all += count
    if into.in_all > MAX_IN_ALL:
        return  # counted on, and none is made: it would only take long to say the same
    used: set[int] = set()
    made = 0
    for point in itertools.product(*axes):
        levels = {name: level for axis in point for name, level in axis.items()}
        out = [number for number, rule in enumerate(excluded) if all(_is(levels[name], v) for name, v in rule.items())]
        used.update(out)
        if out:
            continue
        made += 1
        _add(into, path, _name(pattern, levels), (common, *(levels[factor.name] for factor in factors)))
    for number in range(len(excluded)):
        if number not in used:
            into.wrong((*path, "exclude", number), "excludes nothing", "levels as they stand under `factors:`")
    if not made:
        into.wrong((*path, "exclude"), "excludes everything", "at least one variant that is left")


def _add(into: _Expansion, path: KeyPath, name: str, parts: Sequence[_Level]) -> None:
    variants = into.data["variants"]
    if name in variants:
        first = into.document.mark(("variants", name)).line if ("variants", name) in into.document.marks else None
        where = "another of its own" if first is None else f"line {first}"
        into.wrong(path, f"makes a second variant `{name}` (see {where})", "`name:` with every factor in braces")
        return
    body: dict[str, Any] = {}
    marks: dict[KeyPath, Mark] = {("variants", name): into.document.mark(path)}
    for part in parts:
        shift = len(body["unset"]) if isinstance(body.get("unset"), list) else 0
        for below, mark in part.marks.items():
            if below[0] == "unset" and len(below) > 1 and isinstance(below[1], int):
                below = ("unset", below[1] + shift)  # noqa: PLW2901 - the lists are put behind each other
            marks["variants", name, *below] = mark
        for key, value in part.body.items():
            body[key] = _together(body.get(key), value) if key in ("env", "unset") else value
    # What one level sets, another cannot leave out: the check of the variant says so, at the line of `unset:`.
    variants[name] = body
    into.marks.update(marks)
    into.made.add(name)


def _together(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **other}
    if isinstance(one, list) and isinstance(other, list):
        return [*one, *other]
    return other


def _factors(into: _Expansion, path: KeyPath, given: Any) -> tuple[_Factor, ...]:
    if not isinstance(given, dict):
        return ()  # the model says what is wrong with it
    factors = []
    for name, levels in given.items():
        inner = (*path, name)
        if not levels or not isinstance(levels, list | dict):
            into.wrong(inner, "no levels", _VALUES)
        elif isinstance(levels, list):
            factors.append(_Factor(name, tuple(_value_levels(into, inner, name, levels))))
        else:
            factors.append(_Factor(name, tuple(_named_levels(into, inner, levels))))
    return tuple(factors)


def _value_levels(into: _Expansion, path: KeyPath, name: str, levels: Sequence[Any]) -> Iterator[_Level]:
    """Levels of a flag, or of a variable as `env.NAME`."""
    seen: dict[str, int] = {}
    for index, value in enumerate(levels):
        inner = (*path, index)
        label = f"{_slug(name.removeprefix('env.'))}-{_value_label(value, index)}"
        if label in seen:
            into.wrong(
                inner, f"is called `{label}` as well as level {seen[label] + 1}", "labels of your own: a mapping"
            )
        seen[label] = index
        below: KeyPath = ("env", name.removeprefix("env.")) if name.startswith("env.") else (name,)
        body: dict[str, Any] = {"env": {below[1]: value}} if name.startswith("env.") else {name: value}
        marks = _moved(into.document, inner, below)
        yield _Level(label, value, body, marks | ({("env",): marks[below]} if name.startswith("env.") else {}))


def _named_levels(into: _Expansion, path: KeyPath, levels: Mapping[str, Any]) -> Iterator[_Level]:
    """Levels with a label and all that belongs to them: flags, `unset:`, `env:`, `program:`."""
    for label, body in levels.items():
        if not isinstance(body, dict | None):
            into.wrong((*path, label), "is no mapping", "the keys of a variant; {} for production as it is")
            continue
        yield _Level(label, label, body or {}, _moved(into.document, (*path, label), ()))


def _common(into: _Expansion, path: KeyPath, body: Any) -> _Level:
    return _Level("", None, body if isinstance(body, dict) else {}, _moved(into.document, path, ()))


def _moved(document: Document, source: KeyPath, target: KeyPath) -> dict[KeyPath, Mark]:
    """The marks below `source` as they stand below `target`; not the mark of an empty path."""
    found = {path: mark for path, mark in document.marks.items() if path[: len(source)] == source}
    moved = {(*target, *path[len(source) :]): mark for path, mark in found.items()}
    moved.pop((), None)
    return moved


def _axes(
    into: _Expansion, path: KeyPath, given: Any, factors: Sequence[_Factor]
) -> tuple[tuple[dict[str, _Level], ...], ...]:
    """What varies by itself: a factor, or factors that are linked and go through their levels together."""
    by_name = {factor.name: factor for factor in factors}
    group_of: dict[str, tuple[str, ...]] = {}
    for index, names in enumerate(given if isinstance(given, list) else ()):
        inner = (*path, index)
        if not isinstance(names, list) or len(names) < 2 or not all(name in by_name for name in names):
            into.wrong(inner, "is no list of factors", f"two or more of {', '.join(by_name) or 'the factors'}")
            continue
        counts = {name: len(by_name[name].levels) for name in names}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{name} has {count}" for name, count in counts.items())
            into.wrong(inner, f"linked factors with different numbers of levels: {told}", "the same number")
        for name in names:
            if name in group_of:
                into.wrong(inner, f"`{name}` is linked twice", "each factor once")
            group_of[name] = tuple(names)
    groups = dict.fromkeys(group_of.get(factor.name, (factor.name,)) for factor in factors)
    return tuple(
        tuple(
            dict(zip(group, point, strict=True))
            for point in zip(*(by_name[name].levels for name in group), strict=False)
        )
        for group in groups
    )


def _excluded(into: _Expansion, path: KeyPath, given: Any, factors: Sequence[_Factor]) -> tuple[dict[str, Any], ...]:
    by_name = {factor.name: factor for factor in factors}
    rules = []
    for index, rule in enumerate(given if isinstance(given, list) else ()):
        if not isinstance(rule, dict) or not rule:
            into.wrong((*path, index), "is no mapping", "factor: level, for one factor or more")
            continue
        for name, value in rule.items():
            if name not in by_name:
                into.wrong((*path, index, name), f"there is no factor `{name}`", ", ".join(by_name) or "a factor")
            elif not any(_is(level, value) for level in by_name[name].levels):
                there = ", ".join(level.label for level in by_name[name].levels)
                into.wrong((*path, index, name), "is none of its levels", there)
        rules.append(rule)
    return tuple(rules)


def _is(level: _Level, value: Any) -> bool:
    """Whether a rule means this level: by its value, or by its label. True is not 1 here."""
    return value == level.label or (type(value) is type(level.value) and value == level.value)


def _pattern(into: _Expansion, path: KeyPath, given: Any, factors: Sequence[_Factor]) -> str:
    if not isinstance(given, str):
        return "_".join(f"{{{factor.name}}}" for factor in factors)
    names = [factor.name for factor in factors]
    for hole in _HOLE.findall(given):
        if hole.removesuffix("!") not in names:
            into.wrong(path, f"there is no factor `{hole}`", ", ".join(f"{{{name}}}" for name in names))
    return given


def _name(pattern: str, levels: Mapping[str, _Level]) -> str:
    """The name of one variant; `{factor!}` is the level's value alone."""

    def fill(hole: re.Match[str]) -> str:
        level = levels[hole[1].removesuffix("!")]
        if not hole[1].endswith("!") or level.value == level.label:
            return level.label
        return _value_label(level.value, 0)

    return _HOLE.sub(fill, pattern)


def _value_label(value: Any, index: int) -> str:
    """A value as part of a name: `true` is `on`; what has no short text is counted."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str | int | float):
        return _slug(str(value)) or str(index + 1)
    return str(index + 1)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")


def named(document: Document, name: str) -> Document:
    """The document of an included file: its marks and problems say which file they speak of."""
    marks = {path: replace(mark, file=name) for path, mark in document.marks.items()}
    marks.setdefault((), Mark(1, file=name))
    return Document(document.data, marks, tuple(replace(one, file=name) for one in document.problems))
