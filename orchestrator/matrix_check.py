"""Checks of matrix.yaml: every problem with its line, all at once. Pure but for `check_files`."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.goals import CLAIM_HELP, CONSTRAINT_HELP, GoalError, parse_claim, parse_constraint
from orchestrator.journal.rules import Rule, checked, load_causes
from orchestrator.matrix_keys import (
    FLAG_VALUE,
    MAX_NAME,
    NAME,
    NAME_PATTERN,
    BoxKeys,
    Deadlines,
    GridKeys,
    LimitKeys,
    LoadSpec,
    MatrixFile,
    ObjectiveKeys,
    RuleKeys,
    duration,
)
from orchestrator.records import Level
from orchestrator.yamlfile import Document, KeyPath, Mark, Problem, say_path

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FLAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*(?:\.[A-Za-z0-9_.-]+)?")
_WRITTEN_OUT = 1e15  # what is larger has hundreds of digits that nobody meant
_SWITCHES = frozenset({"on", "off", "yes", "no", "y", "n"})
_ENV_ACCEPTED = "text or a number (true and false in quotes)"
_RESERVED = ("unset", "env", "program")
_OURS = frozenset({"host", "port"})
EITHER_LOAD = (("window_requests", "window_s"), ("prompts", "input_tokens"))
"""Keys of `load:` that rule each other out: both in one place are a mistake; a box's own replaces the other."""


def check(document: Document, stem: str, made: Container[str] = ()) -> Iterator[Problem]:
    """Every problem of a matrix.yaml whose data is a mapping.

    Args:
        document: With included files and grids written out.
        stem: Names the experiment when the file does not.
        made: Names of the variants that grids made; one mistake in a grid is said once.
    """
    data = document.data
    yield from _texts(document)
    yield from _keys(document)
    yield from _experiment(document, stem)
    yield from _levels(document)
    yield from _objective(document)
    yield from _constraints(document)
    yield from _claims(document)
    yield from _rules(document)
    boxes, variants = data.get("boxes"), data.get("variants")
    if isinstance(boxes, dict):
        yield from _boxes(document, boxes)
    if isinstance(variants, dict):
        yield from _variants(document, variants, made)
    if not variants and not data.get("grids"):
        what = "an empty mapping is not accepted" if variants == {} else "is missing"
        yield document.problem(("variants",), what, f"{_accepted(('variants',))}; or `grids:`")
    yield from _load(document, boxes if isinstance(boxes, dict) else {})


def check_files(document: Document, folder: Path) -> Iterator[Problem]:
    """Files that the boxes name and that are not there. Relative names are relative to `folder`."""
    boxes = document.data.get("boxes")
    for name, box in boxes.items() if isinstance(boxes, dict) else ():
        unit_file = box.get("unit_file") if isinstance(box, dict) else None
        if isinstance(unit_file, str) and not (folder / Path(unit_file).expanduser()).is_file():
            what = f"there is no file `{unit_file}`"
            yield document.problem(("boxes", name, "unit_file"), what, f"a unit file, relative to {folder.resolve()}")


def flag_name(text: str) -> str:
    """A flag as Coldboot writes it: no leading dashes, `_` as `-` up to the first dot (`--a_b.c_d` is `a-b.c_d`)."""
    head, dot, tail = text.strip().lstrip("-").partition(".")
    return head.replace("_", "-") + dot + tail


def suggestion(word: str, known: Iterable[str]) -> str:
    """`, did you mean `x`?` or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean `{close[0]}`?" if close else ""


def env_as_written(document: Document, path: KeyPath, value: Any) -> Any:
    """A mapping of environment variables with numbers as the text that stands in the file."""
    if not isinstance(value, dict):
        return value
    return {name: _text(inner, document.mark((*path, name))) for name, inner in value.items()}


def plain_data(document: Document) -> dict[str, Any]:
    """The file's data as the models read it: numbers of `env:` as text."""
    data = dict(document.data)
    boxes = data.get("boxes")
    if isinstance(boxes, dict):
        data["boxes"] = {
            name: {**box, "env": env_as_written(document, ("boxes", name, "env"), box["env"])}
            if isinstance(box, dict) and "env" in box
            else box
            for name, box in boxes.items()
        }
    return data


def _text(value: Any, mark: Mark) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return mark.text if mark.text is not None else str(value)
    return value


# --- keys and types ------------------------------------------------------------------------------------------------


def _texts(document: Document) -> Iterator[Problem]:
    """Text that no command line and no file of ours can hold."""
    for path, mark in document.marks.items():
        text = f"{path[-1] if path else ''}{mark.text or ''}"
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            yield document.problem(path, "a NUL or half a surrogate pair", "text")


def _keys(document: Document) -> Iterator[Problem]:
    """What the models say, in our words: one problem a place."""
    said = {problem.key for problem in document.problems}
    # Half a surrogate pair has no UTF-8; `_texts` has said so, and the models see a question mark.
    written = json.dumps(plain_data(document), ensure_ascii=False).encode("utf-8", "replace")
    try:
        MatrixFile.model_validate_json(written, strict=True)
    except ValidationError as error:
        grouped: dict[KeyPath, list[ErrorDetails]] = {}
        for detail in error.errors():
            grouped.setdefault(_place(document, detail), []).append(detail)
        for path, details in grouped.items():
            # Of a union, the branch that fails deeper is the one that was meant.
            deeper = any(other != path and other[: len(path)] == path for other in grouped)
            if say_path(path) not in said and not (path and deeper):
                yield _explain(document, path, details)


def _place(document: Document, detail: ErrorDetails) -> KeyPath:
    """Where it stands in the file; the models put the names of a union's branches between."""
    if detail["type"] == "missing":
        return detail["loc"]
    path: KeyPath = ()
    for part in detail["loc"]:
        if (*path, part) in document.marks:
            path = (*path, part)
    return path


def _explain(document: Document, path: KeyPath, details: list[ErrorDetails]) -> Problem:
    kinds = {detail["type"] for detail in details}
    if "extra_forbidden" in kinds:
        known = _known_keys(path[:-1])
        return document.problem(path, f"unknown key{suggestion(str(path[-1]), known)}", ", ".join(known))
    what = "is missing" if "missing" in kinds else _wrong_value(document, path, kinds, details)
    return document.problem(path, what, _accepted(path))


def _wrong_value(document: Document, path: KeyPath, kinds: set[str], details: list[ErrorDetails]) -> str:
    own = [str(detail["ctx"]["error"]) for detail in details if detail["type"] == "value_error" and "ctx" in detail]
    value, mark = _value(document.data, path), document.mark(path)
    if own:
        return own[0].partition("; accepted")[0]
    if any(kind.startswith(("int", "float")) for kind in kinds):
        return _no_number(value, mark)
    if "bool_type" in kinds and ("literal_error" not in kinds or _switch(value, mark)):
        return _no_boolean(value, mark)
    if "string_too_long" in kinds:
        return f"a text of {len(value)} characters, at most {details[0]['ctx']['max_length']} are accepted"
    shown, words = _show(value, mark), re.findall(r"[a-z][a-z-]+", _accepted(path)) if "literal_error" in kinds else []
    return f"{shown} is not accepted{suggestion(value, words) if isinstance(value, str) else ''}"


def _show(value: Any, mark: Mark) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict):
        return "an empty mapping" if not value else "a mapping"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    written = mark.text if mark.text is not None else str(value)
    written = written if len(written) <= 60 else f"{written[:57]}…"
    return f"`{written}`" if mark.plain else f'"{written}" (text)'


def _no_number(value: Any, mark: Mark) -> str:
    shown, text = _show(value, mark), (mark.text or "").strip()
    if isinstance(value, float) and value.is_integer():
        return f"{shown} is no whole number as written" + (f", write {int(value)}" if abs(value) < _WRITTEN_OUT else "")
    if not isinstance(value, str):
        return f"{shown} is not accepted"
    advice = "is no number"
    if not mark.plain and re.fullmatch(r"[-+]?[0-9]+(\.[0-9]+)?", text):
        advice = f"is text because of its quotes, write {text}"
    elif re.fullmatch(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?", text):
        advice = f"is text in YAML 1.2, write {text.replace('_', '')}"
    elif re.fullmatch(r"[-+]?0[xob][0-9a-fA-F_]+", text):
        advice = f"is text here, write {_based(text)}"
    elif re.fullmatch(r"[-+]?\.(inf|nan)", text, re.IGNORECASE):
        advice = "is no finite number"
    return f"{shown} {advice}"


def _based(text: str) -> str:
    try:
        return str(int(text, 0))
    except ValueError:
        return "it as a decimal number"


def _switch(value: Any, mark: Mark) -> bool:
    return isinstance(value, str) and mark.plain and value.lower() in _SWITCHES


def _no_boolean(value: Any, mark: Mark) -> str:
    if _switch(value, mark):
        meant = "true" if value.lower() in {"on", "yes", "y"} else "false"
        return f"`{value}` is text in YAML 1.2, not a boolean, write {meant}"
    return f"{_show(value, mark)} is no boolean"


def _value(data: Any, path: KeyPath) -> Any:
    for part in path:
        data = data[part]
    return data


_MODELS: tuple[tuple[tuple[str | None, ...], type[BaseModel]], ...] = (
    ((), MatrixFile),
    (("load",), LoadSpec),
    (("boxes", None, "load"), LoadSpec),
    (("deadlines",), Deadlines),
    (("boxes", None, "deadlines"), Deadlines),
    (("limits",), LimitKeys),
    (("objective",), ObjectiveKeys),
    (("rules", None), RuleKeys),
    (("boxes", None), BoxKeys),
    (("grids", None), GridKeys),
)


def _model(path: KeyPath) -> type[BaseModel] | None:
    """The model whose keys stand at a path; None in a pattern is any name."""
    for pattern, model in _MODELS:
        if len(pattern) == len(path) and all(part in (None, key) for part, key in zip(pattern, path, strict=True)):
            return model
    return None


def _known_keys(path: KeyPath) -> tuple[str, ...]:
    model = _model(path)
    return tuple(model.model_fields) if model is not None else ()


def _accepted(path: KeyPath) -> str:
    for end in range(len(path), 0, -1):
        model = _model(path[: end - 1])
        if model is not None and (found := model.model_fields.get(str(path[end - 1]))) is not None:
            extra = found.json_schema_extra
            return str(extra["accepted"]) if isinstance(extra, dict) else "see docs/matrix.md"
    return "a mapping of keys"


# --- what spans several keys ---------------------------------------------------------------------------------------


def _experiment(document: Document, stem: str) -> Iterator[Problem]:
    if "experiment" not in document.data and any(name_problems(stem)):
        yield document.problem((), f"the file's name `{stem}` cannot name the experiment", f"`experiment:` with {NAME}")


def _levels(document: Document) -> Iterator[Problem]:
    data = document.data
    places: dict[KeyPath, Any] = {(name,): data.get(name) for name in ("concurrency", "cache")}
    places |= {(*path, "input_tokens"): load.get("input_tokens") for path, load in _loads(data).items()}
    for path, values in places.items():
        for index, value in enumerate(values if isinstance(values, list) else ()):
            if value in values[:index]:
                yield document.problem((*path, index), f"`{value}` is given twice", _accepted(path))


def _loads(data: Mapping[str, Any]) -> dict[KeyPath, Mapping[str, Any]]:
    """Every `load:` of the file that is a mapping, by where it stands: at the top, and under each box."""
    there: dict[KeyPath, Any] = {("load",): data.get("load")}
    for name, box in _boxes_of(data).items():
        there["boxes", name, "load"] = box.get("load") if isinstance(box, dict) else None
    return {path: load for path, load in there.items() if isinstance(load, dict)}


def _boxes_of(data: Mapping[str, Any]) -> Mapping[str, Any]:
    boxes = data.get("boxes")
    return boxes if isinstance(boxes, dict) else {}


# --- goals ---------------------------------------------------------------------------------------------------------


def _measured_levels(document: Document) -> tuple[Level, ...]:
    """The levels that some box measures, as far as they are numbers."""
    data = document.data
    streams = data.get("concurrency", MatrixFile.model_fields["concurrency"].default)
    own = [load for path, load in _loads(data).items() if path != ("load",) and "input_tokens" in load]
    lengths = [load["input_tokens"] for load in own]
    if len(own) < len(_boxes_of(data)) or not own:  # some box takes what stands at the top
        default = LoadSpec.model_fields["input_tokens"].default
        lengths.append(_loads(data).get(("load",), {}).get("input_tokens", default))
    every = {one for given in lengths for one in (given if isinstance(given, list) else [given])}
    counts = [one for one in streams if isinstance(one, int)] if isinstance(streams, list | tuple) else []
    known = sorted(one for one in every if isinstance(one, int) and not isinstance(one, bool))
    return tuple(Level(count, length) for length in known for count in counts)


def _no_level(document: Document, path: KeyPath, level: Level, quote: str = "`") -> Iterator[Problem]:
    """A level that nobody measures."""
    there = _measured_levels(document)
    if any(level.covers(one) for one in there):
        return
    counts = dict.fromkeys(one.concurrency for one in there)
    if level.input_tokens is None or level.concurrency not in counts:
        what = f"{quote}{level.concurrency}{quote} is no level of `concurrency:`"
        yield document.problem(path, what, ", ".join(map(str, counts)))
    else:
        what = f"{quote}{level.input_tokens}{quote} is no prompt length of `input_tokens:`"
        yield document.problem(path, what, ", ".join(str(n) for n in dict.fromkeys(one.input_tokens for one in there)))


def _as_level(value: object) -> Level | None:
    """A level as it stands in the file; None where the models have said that it is none."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        return Level.parse(str(value))
    except ValueError:
        return None


def _objective(document: Document) -> Iterator[Problem]:
    """Levels that nobody measures, or that stand there twice."""
    objective = document.data.get("objective")
    if not isinstance(objective, dict):
        return
    levels, weights = objective.get("levels"), objective.get("weights")
    listed = [_as_level(one) for one in levels] if isinstance(levels, list) else []
    for index, level in enumerate(listed):
        path: KeyPath = ("objective", "levels", index)
        if level is not None and level in listed[:index]:
            yield document.problem(path, f"`{level}` is given twice", _accepted(("objective", "levels")))
        elif level is not None:
            yield from _no_level(document, path, level)
    for name in weights if isinstance(weights, dict) else ():
        weighted = _as_level(name)
        if weighted is not None:
            yield from _no_level(document, ("objective", "weights", name), weighted)


def rule_of(keys: RuleKeys, source: str) -> tuple[Rule | None, tuple[tuple[str, str], ...]]:
    """The journal's rule that a user wrote, and all that is wrong with it: (key, what)."""
    kind = "benign" if keys.cause.startswith(("benign", "healthy")) else "fault"
    item = {**keys.model_dump(exclude={"reason"}), "name": keys.reason, "kind": kind}
    return checked(item, source=source, causes=load_causes())


def _rules(document: Document) -> Iterator[Problem]:
    given = plain_data(document).get("rules")
    names: list[str] = []
    for index, item in enumerate(given if isinstance(given, list) else ()):
        try:
            keys = RuleKeys.model_validate_json(json.dumps(item), strict=True)
        except ValidationError:
            continue  # `_keys` says what
        if keys.reason in names:
            yield document.problem(("rules", index, "reason"), f"`{keys.reason}` is there twice", "another name")
        names.append(keys.reason)
        for key, what in rule_of(keys, "")[1]:
            yield document.problem(("rules", index, key), what)


def _texts_of(document: Document, name: str) -> Iterator[tuple[KeyPath, str]]:
    """The texts of a list, each once; what is no text, the models have said."""
    values = document.data.get(name)
    for index, text in enumerate(values if isinstance(values, list) else ()):
        if isinstance(text, str):
            yield (name, index), text


def _constraints(document: Document) -> Iterator[Problem]:
    for path, text in _texts_of(document, "constraints"):
        try:
            levels = parse_constraint(text).levels
        except GoalError as error:
            yield document.problem(path, str(error), CONSTRAINT_HELP)
            continue
        yield from _unmeasured(document, path, levels)


def _claims(document: Document) -> Iterator[Problem]:
    variants = document.data.get("variants")
    names = frozenset(variants) if isinstance(variants, dict) else frozenset()
    for path, text in _texts_of(document, "claims"):
        try:
            claim = parse_claim(text, names)
        except GoalError as error:
            yield document.problem(path, str(error), CLAIM_HELP)
            continue
        for name in (claim.one, claim.other):
            if name is not None and names and name not in names:
                yield document.problem(
                    path, f"there is no variant `{name}`{suggestion(name, names)}", ", ".join(sorted(names))
                )
        yield from _unmeasured(document, path, claim.levels)


def _unmeasured(document: Document, path: KeyPath, levels: Iterable[Level]) -> Iterator[Problem]:
    for level in levels:
        yield from _no_level(document, path, level, quote="")


# --- names ---------------------------------------------------------------------------------------------------------


def name_problems(name: str) -> Iterator[str]:
    """Why a name cannot be one of a folder."""
    if not re.fullmatch(NAME_PATTERN.strip("^$"), name):
        yield f"`{name}` cannot name a folder; accepted: {NAME}"
    elif len(name) > MAX_NAME:
        yield f"a name of {len(name)} characters; accepted: at most {MAX_NAME}"


def _name(document: Document, path: KeyPath, name: str) -> Iterator[Problem]:
    for problem in name_problems(name):
        yield document.problem(path, problem)


def _boxes(document: Document, boxes: Mapping[str, Any]) -> Iterator[Problem]:
    chosen = document.data.get("box")
    if isinstance(chosen, str) and chosen not in boxes:
        what = f"there is no box `{chosen}`{suggestion(chosen, boxes)}"
        yield document.problem(("box",), what, ", ".join(boxes) or "a name under `boxes:`")
    if "box" not in document.data and len(boxes) > 1:
        yield document.problem(("box",), "is missing, and there are several boxes", ", ".join(boxes))
    for name, box in boxes.items():
        path = ("boxes", name)
        yield from _name(document, path, name)
        if name.isdecimal():
            yield document.problem(
                path, "a number cannot name a box (`.2`, `.3` … are repeats)", "a name with a letter"
            )
        if isinstance(box, dict):
            yield from _box(document, path, box)


def _box(document: Document, path: KeyPath, box: Mapping[str, Any]) -> Iterator[Problem]:
    given = {name for name, value in box.items() if value is not None}
    for name, what, accepted in (*_needed(box, given), *_meaningless(box, given)):
        yield document.problem((*path, name), what, accepted)
    env = box.get("env")
    if isinstance(env, dict):
        yield from _env(document, (*path, "env"), env, may_unset=False)


def _needed(box: Mapping[str, Any], given: set[str]) -> Iterator[tuple[str, str, str]]:
    """Key, what is wrong, accepted: for keys that another key asks for."""
    service = box.get("service", "systemd")
    if service in ("systemd", "systemd-user") and "unit" not in given:
        yield "unit", f"is missing for `service: {service}`", _accepted(("boxes", "", "unit"))
    if service == "process" and not given & {"unit_file", "program"}:
        what = "is missing for `service: process` (so is `program`, which would do)"
        yield "unit_file", what, "a unit file whose ExecStart is production's command"


def _meaningless(box: Mapping[str, Any], given: set[str]) -> Iterator[tuple[str, str, str]]:
    """The same for keys that another key rules out."""
    for name in ("host", "user", "ssh_config"):
        if name in given and box.get("transport", "local") == "local":
            yield name, "means nothing without `transport: ssh`", "leave it out, or `transport: ssh`"
    if "time_scale" in given and box.get("engine", "vllm") == "vllm":
        yield "time_scale", "means nothing without `engine: rehearsal`", "leave it out"
    if "isolate_port" in given and box.get("isolate") is False:
        yield "isolate_port", "means nothing with `isolate: false`", "leave it out, or `isolate: true`"
    elif "isolate_port" in given and box.get("port") == box["isolate_port"]:
        yield "isolate_port", "is production's own port", "another port"


def _load(document: Document, boxes: Mapping[str, Any]) -> Iterator[Problem]:
    """Pairs within `load:`, at the top and as each box sees it."""
    top = document.data.get("load")
    top = top if isinstance(top, dict) else {}
    places: dict[KeyPath, Any] = {("load",): top}
    places |= {("boxes", name, "load"): box.get("load") for name, box in boxes.items() if isinstance(box, dict)}
    for path, load in places.items():
        named = [name for name in ("max_warmup_s", "warmup_s") if isinstance(load, dict) and name in load]
        shortest, longest = (
            _seconds({**top, **load}, name) if named else None for name in ("warmup_s", "max_warmup_s")
        )
        if shortest is not None and longest is not None and longest < shortest:
            what = f"the longest warm-up ({longest:g} s) is shorter than the shortest ({shortest:g} s)"
            yield document.problem((*path, named[0]), what, "warmup_s ≤ max_warmup_s")
        for name, other in EITHER_LOAD if isinstance(load, dict) else ():
            if load.get(name) is not None and load.get(other) is not None:
                yield document.problem((*path, name), f"is there beside `{other}`", "one of the two")
        if isinstance(load, dict) and load.get("repeat_prompts") and not {**top, **load}.get("prompts"):
            what = "means nothing without prompts of your own"
            yield document.problem((*path, "repeat_prompts"), what, "leave it out, or `prompts: FILE`")


def _seconds(load: Mapping[str, Any], name: str) -> float | None:
    """A duration of `load:`; None where it is none, which the models have said."""
    try:
        return duration(load.get(name, LoadSpec.model_fields[name].default))
    except ValueError:
        return None


# --- variants ------------------------------------------------------------------------------------------------------


def _variants(document: Document, variants: Mapping[str, Any], made: Container[str]) -> Iterator[Problem]:
    folded: dict[str, str] = {}
    said: set[Problem] = set()
    for name in variants:
        for problem in _named_variant(document, variants, name, folded):
            place = replace(problem, key=problem.key.replace(name, "", 1)) if name in made else problem
            if place not in said:
                said.add(place)
                yield problem
    production = document.data.get("production")
    if isinstance(production, str) and production not in variants:
        what = f"there is no variant `{production}`{suggestion(production, variants)}"
        yield document.problem(("production",), what, ", ".join(variants))


def _named_variant(
    document: Document, variants: Mapping[str, Any], name: str, folded: dict[str, str]
) -> Iterator[Problem]:
    path, body = ("variants", name), variants[name]
    yield from _name(document, path, name)
    if re.search(r"\.r[0-9]+$", name):
        yield document.problem(path, "ends like the repeat of a boot", "a name without `.r1` at its end")
    twin = folded.setdefault(name.lower(), name)
    if twin != name:
        yield document.problem(path, f"differs from `{twin}` only in case, and names a folder", "another name")
    if isinstance(body, dict):
        yield from _variant(document, path, body)
    elif body is not None:
        what = f"{_show(body, document.mark(path))} is no mapping"
        yield document.problem(path, what, "flags, `unset:`, `env:`; {} for production as it is")


def _variant(document: Document, path: KeyPath, body: Mapping[str, Any]) -> Iterator[Problem]:
    names: dict[str, str] = {}
    for written, value in body.items():
        if written in _RESERVED:
            continue
        name = flag_name(written)
        inner = (*path, written)
        yield from _flag(document, inner, name)
        other = names.get(name) or names.get(_opposite(name))
        if other is not None:
            yield document.problem(inner, f"is the same flag as `{other}`", "each flag once")
        names[name] = written
        yield from _flag_value(document, inner, value)
    if "program" in body:
        yield from _program(document, (*path, "program"), body["program"])
    if "unset" in body:
        yield from _unset(document, (*path, "unset"), body["unset"], names)
    env = body.get("env", {})
    if isinstance(env, dict):
        yield from _env(document, (*path, "env"), env, may_unset=True)
    else:
        yield document.problem(
            (*path, "env"), f"{_show(env, document.mark((*path, 'env')))} is no mapping", "NAME: text"
        )


def _opposite(name: str) -> str:
    return name[3:] if name.startswith("no-") else f"no-{name}"


def _flag(document: Document, path: KeyPath, name: str) -> Iterator[Problem]:
    if not FLAG_NAME.fullmatch(name):
        yield document.problem(path, f"`{path[-1]}` is no flag", "a flag's name, such as spec-tokens")
    elif name in _OURS:
        yield document.problem(
            path, f"`{name}` belongs to the box, not to a variant", "`port:` or `isolate:` of the box"
        )


def _flag_value(document: Document, path: KeyPath, value: Any) -> Iterator[Problem]:
    if value is None:
        what = "nothing (null) is no value of a flag"
        yield document.problem(path, what, f"{FLAG_VALUE}; or name the flag under `unset:`")
    elif isinstance(value, list):
        if not value:
            yield document.problem(path, "an empty list", FLAG_VALUE)
        for index, item in enumerate(value):
            if item is None or isinstance(item, list | bool):
                shown = _show(item, document.mark((*path, index)))
                yield document.problem((*path, index), f"{shown} in a list of values", "text, numbers, mappings (JSON)")
            else:
                yield from _number_as_meant(document, (*path, index), item)
    else:
        yield from _number_as_meant(document, path, value)


def _number_as_meant(document: Document, path: KeyPath, value: Any) -> Iterator[Problem]:
    """`1e3` is 1000.0 to YAML 1.2 and text to others; a flag that wants 1000 would refuse both."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _number_as_meant(document, (*path, name), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _number_as_meant(document, (*path, index), inner)
    elif isinstance(value, float) and value.is_integer():
        text = document.mark(path).text or ""
        if "e" in text.lower():
            what = f"`{text}` is {value} to YAML 1.2 and text to other readers"
            plain = f"{int(value)}, or " if abs(value) < _WRITTEN_OUT else ""
            yield document.problem(path, what, f'{plain}"{text}" in quotes')


def _program(document: Document, path: KeyPath, value: Any) -> Iterator[Problem]:
    words = isinstance(value, list) and value and all(isinstance(word, str) and word for word in value)
    if not words:
        yield document.problem(path, f"{_show(value, document.mark(path))} is not accepted", "a list of words")


def _unset(document: Document, path: KeyPath, value: Any, names: Mapping[str, str]) -> Iterator[Problem]:
    accepted = "a list of flags, such as [spec-method, spec-tokens]"
    if not isinstance(value, list):
        yield document.problem(path, f"{_show(value, document.mark(path))} is no list", accepted)
        return
    seen: set[str] = set()
    for index, item in enumerate(value):
        inner = (*path, index)
        if not isinstance(item, str) or not FLAG_NAME.fullmatch(flag_name(item)):
            yield document.problem(inner, f"{_show(item, document.mark(inner))} is no flag", accepted)
            continue
        name = flag_name(item)
        if name in names:
            yield document.problem(inner, f"`{item}` is set and unset in the same variant", "one of the two")
        if name in seen:
            yield document.problem(inner, f"`{item}` is given twice", accepted)
        if name in _OURS:
            yield document.problem(inner, f"`{name}` belongs to the box, not to a variant", "leave it out")
        seen.add(name)


def _env(document: Document, path: KeyPath, env: Mapping[str, Any], *, may_unset: bool) -> Iterator[Problem]:
    for name, value in env.items():
        inner = (*path, name)
        if not ENV_NAME.fullmatch(name):
            yield document.problem(inner, f"`{name}` cannot name an environment variable", "letters, digits and `_`")
        # A box's values are the model's to check; a variant's are free-form until here.
        if may_unset and value is not None and (isinstance(value, bool) or not isinstance(value, str | int | float)):
            shown = _show(value, document.mark(inner))
            yield document.problem(inner, f"{shown} is not accepted", f"{_ENV_ACCEPTED}; null takes it away")


def notes(document: Document) -> Iterator[Problem]:
    """What is allowed and yet probably not meant."""
    variants: Mapping[str, Any] = document.data.get("variants") or {}
    for variant, body in variants.items():
        for name, value in (body or {}).items():
            path = ("variants", variant, name)
            if name not in _RESERVED and _switch(value, document.mark(path)):
                what = f"`{value}` is passed on as the text {value}; a switch is written true or false"
                yield document.problem(path, what)
    yield from _overruled(document)


def _overruled(document: Document) -> Iterator[Problem]:
    """Keys of the load at the top that no box takes, since each has its own: they measure nothing."""
    loads, boxes = _loads(document.data), _boxes_of(document.data)
    instead = {one: {one, other} for pair in EITHER_LOAD for one, other in (pair, pair[::-1])}
    for key in loads.get(("load",), {}):
        taken = {
            name: next((k for k in loads.get(("boxes", name, "load"), {}) if k in instead.get(key, {key})), None)
            for name in boxes
        }
        if boxes and None not in taken.values():
            said = ", ".join(
                f"`{own}` of {name} (line {document.mark(('boxes', name, 'load', own)).line})"
                for name, own in taken.items()
                if own is not None
            )
            yield document.problem(("load", key), f"counts on no box: {said} is nearer")
