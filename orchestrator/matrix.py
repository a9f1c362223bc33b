"""The experiment as the user writes it: matrix.yaml → `Matrix`, or every problem it has with its line.

The keys are in `matrix_keys`, the checks in `matrix_check`, YAML itself in `yamlfile`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field

from orchestrator import matrix_check
from orchestrator.errors import LedgerError, MatrixError, ProblemsError, UsageError
from orchestrator.journal.rules import Rule
from orchestrator.matrix_check import EITHER_LOAD, flag_name, rule_of, suggestion
from orchestrator.matrix_grid import ReadInclude, named, with_grids, with_includes
from orchestrator.matrix_keys import (
    BOOTS,
    BoxKeys,
    Deadlines,
    FlagValue,
    LimitKeys,
    LoadSpec,
    MatrixFile,
    ObjectiveKeys,
    duration,
)
from orchestrator.promptfile import PromptFile, read_prompts
from orchestrator.records import CacheState, Frozen, Level, Objective, levels_of
from orchestrator.yamlfile import Document, Mark, Problem, decode, load_yaml, parse, say_path

__all__ = [
    "BoxSpec",
    "Deadlines",
    "FlagValue",
    "LimitKeys",
    "LoadSpec",
    "Matrix",
    "UnitCheck",
    "Variant",
    "differences",
    "duration",
    "find_experiment",
    "flag_name",
    "load_matrix",
    "load_yaml",
    "newest_experiment",
    "parse_boots",
    "parse_matrix",
    "select",
]

MAX_BYTES = 1 << 20

# What changes neither an engine's command nor a number: it may differ between two sessions of one experiment.
_BOX_MAY_CHANGE = frozenset(
    {
        "transport",
        "host",
        "ssh_config",
        "user",
        "sudo",
        "root",
        "cache_root",
        "dead_man_s",
        "reconnect_s",
        "port",
        "isolate_port",
        "memory_bandwidth_gb_s",
        "weights_gib",
    }
    | {"load", "deadlines", "name"}
)
_LATER_LOAD = ("window_requests", "prompts", "repeat_prompts")
_DEADLINES_MAY_CHANGE = frozenset({"clean_slate_s", "stop_s", "command_s", "on_end_s"})


class BoxSpec(BoxKeys):
    """One box of the matrix. `unit_file` is absolute, or relative to the working directory."""

    name: str

    @property
    def rehearsal(self) -> bool:
        """Whether what is made on it is stamped REHEARSAL."""
        return self.engine == "rehearsal"


class Variant(Frozen):
    """One named engine configuration, as what differs from production's command.

    Flags are named without leading dashes and with `-` for `_` (see `flag_name`), in the order of the file. A value
    True is a bare flag, False is `--no-FLAG`, a list several values, a dict JSON. `env`: None takes a variable away.
    `program` replaces what stands before the first flag, before the box's own does.
    """

    name: str
    set: dict[str, FlagValue] = Field(default_factory=dict)
    unset: tuple[str, ...] = ()
    env: dict[str, str | None] = Field(default_factory=dict)
    program: tuple[str, ...] | None = None


class Matrix(Frozen):
    """The factors and levels of one experiment.

    `text` is the file as given, `path` its name as given, `included` the files that it names, as (name, text),
    `prompt_files` the user's own prompts by the name that the file gives them (none in a kept copy's).
    `variants` and `cache` are those that this session boots; `all_variants`, `own_box` and `own_cache` what the file
    says (`select` narrows the former). `notes` are lines about what is allowed and yet probably not meant.
    """

    experiment: str
    box: str
    boxes: dict[str, BoxSpec]
    variants: tuple[Variant, ...]
    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    boots: int | Literal["auto"] | None = None
    cache: tuple[CacheState, ...] = ("cold",)
    seed: int = 1
    tolerance: float = 0.05
    headroom: bool = True
    load: LoadSpec = LoadSpec()
    deadlines: Deadlines = Deadlines()
    limits: LimitKeys = LimitKeys()
    production: str | None = None
    objective: Objective = Objective()
    constraints: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    on_end: tuple[str, ...] | None = None
    rules: tuple[Rule, ...] = ()
    text: str = ""
    included: tuple[tuple[str, str], ...] = ()
    prompt_files: dict[str, PromptFile] = Field(default_factory=dict)
    path: Path = Path("matrix.yaml")
    own_box: str = ""
    own_cache: tuple[CacheState, ...] = ()
    all_variants: tuple[Variant, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def target(self) -> BoxSpec:
        """The chosen box."""
        return self.boxes[self.box]

    def variant(self, name: str) -> Variant:
        """The variant of that name, selected or not.

        Raises:
            UsageError: there is none; names the nearest.
        """
        every = self.all_variants or self.variants
        for variant in every:
            if variant.name == name:
                return variant
        raise UsageError(_unknown("variant", name, [variant.name for variant in every]))

    def effective_load(self, box: str | None = None) -> LoadSpec:
        """The load on a box (default: the chosen one): the top-level keys with the box's own over them."""
        own = self.boxes[box or self.box].load
        if own is None:
            return self.load
        given = _given(own)
        replaced = {pair[1 - place] for pair in EITHER_LOAD for place in (0, 1) if given.get(pair[place]) is not None}
        defaults = {name: LoadSpec.model_fields[name].default for name in replaced}
        return self.load.model_copy(update=defaults | given)

    @property
    def levels(self) -> tuple[Level, ...]:
        """What each boot on the chosen box measures, in order."""
        return levels_of(self.concurrency, self.effective_load().lengths)

    def effective_deadlines(self, box: str | None = None) -> Deadlines:
        """The deadlines on a box (default: the chosen one)."""
        own = self.boxes[box or self.box].deadlines
        return self.deadlines if own is None else self.deadlines.model_copy(update=_given(own))

    def own_prompts(self, box: str | None = None) -> PromptFile | None:
        """The user's own prompts on a box (default: the chosen one); None where they are generated."""
        named = self.effective_load(box).prompts
        return None if named is None else self.prompt_files.get(named)

    def digest(self, box: str | None = None) -> str:
        """SHA-256 (hexadecimal) over what must not change between sessions of one experiment on one box.

        Covered: all variants, concurrency, cache states, headroom, tolerance, the effective load and the deadlines
        that decide an outcome, and of the box what changes the engine. Not: boots, seed, `box:`, order, comments, and
        `rules:`, which change no measurement.
        """
        return hashlib.sha256(_json(_canonical(self, box or self.box)).encode()).hexdigest()

    def line_of(self, *keys: str | int) -> int:
        """The line (from 1) of a key, or of the nearest thing around it. Flags may be named as `flag_name` does."""
        return _mark_of(self._document, keys).line

    def problem(self, *keys: str | int, what: str, accepted: str | None = None) -> str:
        """A line for `MatrixError` about a key of this file, found out later (by the unit, by the box)."""
        mark = _mark_of(self._document, keys)
        return Problem(mark.line, say_path(keys), what, accepted, mark.file).say(str(self.path))

    @property
    def _document(self) -> Document:
        return _written_out(parse(self.text), _given_files(self.included))[0]

    @property
    def kept(self) -> str:
        """What an experiment keeps: the file as given, or what it and the files that it includes come to, as JSON."""
        if not self.included:
            return self.text
        document = self._document
        data = matrix_check.plain_data(document)
        for name, body in data["variants"].items():
            if body and "env" in body:
                path = ("variants", name, "env")
                data["variants"][name] = {**body, "env": matrix_check.env_as_written(document, path, body["env"])}
        names = ", ".join(name for name, _ in self.included)
        told = {key: value for key, value in data.items() if key not in ("include", "grids")}
        if "experiment" not in told:
            told["experiment"] = self.path.stem
        return f"# {self.path.name} with {names}, as one file\n{json.dumps(told, indent=2, ensure_ascii=False)}\n"


UnitCheck: TypeAlias = Callable[[BoxSpec, Variant], Iterable[tuple[tuple[str, ...], str]]]
"""What is wrong with a variant on a box's unit: keys below the variant, and what."""


def load_matrix(
    path: Path, *, box: str | None = None, unit_check: UnitCheck | None = None, prompts: bool = True
) -> Matrix:
    """Read matrix.yaml.

    Args:
        path: The file.
        box: The box for `unit_check`; default: the file's own.
        unit_check: Is asked about each variant that can be read, whatever else is wrong with the file, so that what
            only the unit knows (a flag that it does not have to unset) is said together with all the rest.
        prompts: Whether the user's own prompts are read; to bring production back nobody needs them.

    Raises:
        MatrixError: it cannot be used; holds every problem, each `file:line: key: what is wrong; accepted: …`.
    """
    text = _file_text(path)
    included: list[tuple[str, str]] = []

    def read(name: str) -> Document | str:
        place = path.parent / Path(name).expanduser()
        if not place.is_file():
            return f"there is no file `{name}`"
        included.append((name, _file_text(place)))
        return named(parse(included[-1][1]), str(place))

    document, made = _written_out(parse(text), read)
    own, wrong, lines = _prompt_files(document, path.parent) if prompts else ({}, [], [])
    source = _Source(document, made, text, tuple(included), path, own)
    more = [] if unit_check is None else list(_unit_problems(document, path, box, unit_check))
    return _read(source, files=True, more=[*more, *wrong], lines=lines)


def _prompt_files(document: Document, folder: Path) -> tuple[dict[str, PromptFile], list[Problem], list[ProblemsError]]:
    """The prompts that each `load:` names; what is wrong with a name, and with the lines of a file."""
    data = document.data if isinstance(document.data, dict) else {}
    boxes = data.get("boxes")
    places: dict[tuple[str, ...], Any] = {("load",): data.get("load")}
    for name, box in boxes.items() if isinstance(boxes, dict) else ():
        places["boxes", name, "load"] = box.get("load") if isinstance(box, dict) else None
    found: dict[str, PromptFile] = {}
    problems: list[Problem] = []
    lines: list[ProblemsError] = []
    for path, load in places.items():
        named_file = load.get("prompts") if isinstance(load, dict) else None
        if not isinstance(named_file, str) or not named_file or "\0" in named_file:
            continue
        try:
            found[named_file] = read_prompts(folder / Path(named_file).expanduser())
        except ProblemsError as error:
            alone = error.count == 1
            what = error.problems[0] if alone else f"{error.count} things are wrong with `{named_file}`"
            problems.append(document.problem((*path, "prompts"), what))
            lines += () if alone else (error,)
    return found, problems, lines


def _file_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        hint = "`invoke init --box-host ALIAS --unit UNIT` writes one from a box's unit, `--unit-file FILE` from a file"
        raise MatrixError([f"{path}: there is no such file"], hint=hint) from error
    except OSError as error:
        raise MatrixError([f"{path}: cannot be read: {error.strerror or error}"]) from error
    if len(raw) > MAX_BYTES:
        raise MatrixError([f"{path}:1: larger than {MAX_BYTES >> 20} MiB; accepted: a matrix.yaml"])
    try:
        return decode(raw)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        what = f"byte 0x{raw[error.start]:02x} is not UTF-8; accepted: text in UTF-8"
        raise MatrixError([f"{path}:{line}: {what}"]) from error


def parse_matrix(text: str, path: Path = Path("matrix.yaml")) -> Matrix:
    """The same from text, such as an experiment's kept copy: no file that it names has to be there.

    Raises:
        MatrixError: it cannot be used.
    """
    document, made = _written_out(parse(text), _given_files(()))
    return _read(_Source(document, made, text, (), path, {}), files=False)


def select(
    matrix: Matrix,
    only: Sequence[str] | None = None,
    *,
    box: str | None = None,
    cache: Sequence[str] | None = None,
    experiment: str | None = None,
    seed: int | None = None,
) -> Matrix:
    """The matrix narrowed and redirected by the command line. What is None stays as the file says.

    `only` keeps the order of the file. The digest stays the same but for the box.

    Raises:
        UsageError: a name that is not there; says which are.
    """
    update: dict[str, Any] = {}
    if only is not None:
        wanted = _each_known("variant", only, [variant.name for variant in matrix.all_variants or matrix.variants])
        update["variants"] = tuple(v for v in matrix.all_variants or matrix.variants if v.name in wanted)
    if box is not None:
        update["box"] = _each_known("box", [box], list(matrix.boxes))[0]
    if cache is not None:
        update["cache"] = tuple(dict.fromkeys(_each_known("cache state", cache, ["cold", "clear", "warm", "as-is"])))
    if experiment is not None:
        problems = list(matrix_check.name_problems(experiment))
        if problems:
            raise UsageError(f"--experiment: {problems[0]}")
        update["experiment"] = experiment
    if seed is not None:
        if not 0 <= seed < 2**32:
            raise UsageError(f"--seed: {seed} is not accepted; accepted: a whole number, 0 to {2**32 - 1}")
        update["seed"] = seed
    return matrix.model_copy(update=update)


def parse_boots(value: int | str) -> int | Literal["auto"]:
    """`--boots`: a number of boots for each variant, or auto.

    Raises:
        UsageError: neither.
    """
    text = str(value).strip()
    if text == "auto":
        return "auto"
    if text.isascii() and text.isdecimal() and not text.startswith("0") and int(text) <= 1000:
        return int(text)
    raise UsageError(f"--boots: `{value}` is not accepted; accepted: {BOOTS}")


def differences(
    old_text: str, new: Matrix, box: str | None = None, *, old_prompts: str | None = None
) -> tuple[str, ...]:
    """What changed since a kept matrix.yaml among what `digest` covers, in words: `concurrency: [1, 2] → [1, 2, 4]`.

    `old_prompts` is the digest of the prompts that were kept beside it.
    """
    name = box or new.box
    try:
        old = parse_matrix(old_text)
    except MatrixError as error:
        return (f"the kept matrix.yaml cannot be read any more ({error.problems[0]})",)
    if name not in old.boxes:
        return (f"boxes.{name}: not there → there",)
    before, after = _flat(_canonical(old, name)), _flat(_canonical(new, name))
    if old_prompts is not None and ("load", "prompts") in before:
        before["load", "prompts"] = _json(old_prompts)
    changed = [path for path in dict.fromkeys((*before, *after)) if before.get(path) != after.get(path)]
    return tuple(f"{'.'.join(p)}: {before.get(p, 'not set')} → {after.get(p, 'not set')}" for p in changed)


def newest_experiment(out: Path) -> Path | None:
    """The folder under `out` whose records.jsonl was written last; None without any."""
    return next(iter(_ledgers(out)), None)


def find_experiment(out: Path, name: str | None = None) -> Path:
    """The folder of an experiment by its name (`gwen`, `gwen.box`, `gwen.2`), or the newest.

    Raises:
        LedgerError: there is none; names those that are there.
    """
    there = _ledgers(out)
    if not there:
        raise LedgerError(f"{out}: no experiment yet", hint="`invoke matrix --boots 3` makes one")
    if name is None:
        return there[0]
    found = next((folder for folder in there if folder.name == name), None)
    if found is None:
        raise LedgerError(f"{out}: " + _unknown("experiment", name, [folder.name for folder in there]))
    return found


def _ledgers(out: Path) -> list[Path]:
    """Folders with a ledger, the one written last first."""
    try:
        written = [(path.stat().st_mtime_ns, path.parent) for path in out.glob("*/records.jsonl")]
    except OSError as error:
        raise LedgerError(f"{out}: cannot be read: {error.strerror or error}") from error
    return [folder for _, folder in sorted(written, reverse=True)]


# --- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """What was read: the document with everything written out, and the files that it came from."""

    document: Document
    made: frozenset[str]
    text: str
    included: tuple[tuple[str, str], ...]
    path: Path
    own: Mapping[str, PromptFile]


def _written_out(document: Document, read: ReadInclude) -> tuple[Document, frozenset[str]]:
    return with_grids(with_includes(document, read))


def _given_files(included: Sequence[tuple[str, str]]) -> ReadInclude:
    """Reads nothing but what was read before."""
    texts = dict(included)
    return lambda name: named(parse(texts[name]), name) if name in texts else f"`{name}` is not kept with this copy"


def _read(source: _Source, *, files: bool, more: Sequence[Problem] = (), lines: Sequence[ProblemsError] = ()) -> Matrix:
    document, path = source.document, source.path
    problems = [*document.problems, *more]
    if isinstance(document.data, dict) and document.data:
        problems += matrix_check.check(document, path.stem, source.made)
        if files:
            problems += matrix_check.check_files(document, path.parent)
    elif not problems:
        what = "is empty" if document.data in (None, {}) else "is no mapping of keys"
        problems.append(document.problem((), what, "`boxes:`, `variants:` and more, see docs/matrix.md"))
    if problems:
        ordered = sorted(dict.fromkeys(problems), key=lambda problem: (problem.file or "", problem.line))
        bad_files = {error.problems: error.count for error in lines}  # two boxes may name one file of prompts
        said = [*(problem.say(str(path)) for problem in ordered), *itertools.chain(*bad_files)]
        raise MatrixError(said, count=len(ordered) + sum(bad_files.values()))
    return _build(source)


def _unit_problems(document: Document, path: Path, box: str | None, unit_check: UnitCheck) -> Iterator[Problem]:
    """What the unit says about the variants that can be read, if the box can."""
    if not isinstance(document.data, dict):
        return
    data = matrix_check.plain_data(document)
    checks = (
        document.problems,
        matrix_check.check(document, path.stem),
        matrix_check.check_files(document, path.parent),
    )
    wrong = [problem.key for problem in itertools.chain(*checks)]
    boxes, variants = data.get("boxes"), data.get("variants")
    if not isinstance(boxes, dict) or not isinstance(variants, dict):
        return
    name = box or data.get("box") or next(iter(boxes), None)
    if not isinstance(name, str) or not isinstance(boxes.get(name), dict):
        return
    if any(key.startswith(f"boxes.{name}.") for key in wrong):
        return
    spec = _box(name, BoxKeys.model_validate_json(json.dumps(boxes[name]), strict=True), path.parent)
    for variant, body in variants.items():
        if isinstance(body, dict | None) and not any(key.startswith(f"variants.{variant}.") for key in wrong):
            for below, what in unit_check(spec, _variant(document, variant, body or {})):
                keys = ("variants", variant, *below)
                mark = _mark_of(document, keys)
                yield Problem(mark.line, say_path(keys), what, file=mark.file)


def _build(source: _Source) -> Matrix:
    document, path = source.document, source.path
    data = matrix_check.plain_data(document)
    file = MatrixFile.model_validate_json(json.dumps(data), strict=True)
    box = file.box or next(iter(file.boxes))
    cache: tuple[CacheState, ...] = (file.cache,) if isinstance(file.cache, str) else file.cache
    variants = tuple(_variant(document, name, body or {}) for name, body in data["variants"].items())
    return Matrix(
        experiment=file.experiment or path.stem,
        box=box,
        own_box=box,
        boxes={name: _box(name, spec, path.parent) for name, spec in file.boxes.items()},
        variants=variants,
        all_variants=variants,
        concurrency=tuple(sorted(file.concurrency)),
        boots=file.boots,
        cache=cache,
        own_cache=cache,
        seed=file.seed,
        tolerance=file.tolerance,
        headroom=file.headroom in (True, "on"),
        load=file.load,
        deadlines=file.deadlines,
        limits=file.limits,
        production=file.production,
        objective=_objective(file.objective),
        constraints=file.constraints,
        claims=file.claims,
        on_end=file.on_end,
        rules=tuple(rule for keys in file.rules if (rule := rule_of(keys, path.name)[0]) is not None),
        text=source.text,
        included=source.included,
        prompt_files=dict(source.own),
        path=path,
        notes=tuple(note.say(str(path)) for note in matrix_check.notes(document)),
    )


def _box(name: str, keys: BoxKeys, folder: Path) -> BoxSpec:
    given: dict[str, Any] = {field: getattr(keys, field) for field in keys.model_fields_set}
    if keys.unit_file is not None:
        given["unit_file"] = folder / keys.unit_file.expanduser()
    if keys.transport == "ssh" and keys.host is None:
        given["host"] = name
    return BoxSpec(name=name, **given)


def _objective(keys: ObjectiveKeys) -> Objective:
    return Objective(metric=keys.metric, levels=tuple(sorted(keys.levels or ())), weights=keys.weights)


def _variant(document: Document, name: str, body: Mapping[str, Any]) -> Variant:
    env = matrix_check.env_as_written(document, ("variants", name, "env"), body.get("env", {}))
    return Variant(
        name=name,
        set={flag_name(flag): value for flag, value in body.items() if flag not in ("unset", "env", "program")},
        program=tuple(body["program"]) if "program" in body else None,
        unset=tuple(flag_name(flag) for flag in body.get("unset", ())),
        env=env,
    )


# --- comparing -----------------------------------------------------------------------------------------------------


def _canonical(matrix: Matrix, box: str) -> dict[str, Any]:
    """What `digest` covers, as JSON data; independent of the file's order, comments and spelling."""
    spec = matrix.boxes[box]
    engine = {key: value for key, value in spec.model_dump(mode="json").items() if key not in _BOX_MAY_CHANGE}
    # The folder may have moved; what the file says is the fingerprint's to compare.
    engine["unit_file"] = spec.unit_file.name if spec.unit_file is not None else None
    deadlines = matrix.effective_deadlines(box).model_dump(mode="json")
    return {
        "variants": {
            variant.name: {
                **variant.set,
                **({"unset": sorted(variant.unset)} if variant.unset else {}),
                **({"env": variant.env} if variant.env else {}),
                **({"program": variant.program} if variant.program else {}),
            }
            for variant in matrix.all_variants or matrix.variants
        },
        "concurrency": list(matrix.concurrency),
        "cache": sorted(matrix.own_cache or matrix.cache),
        "headroom": matrix.headroom,
        "tolerance": matrix.tolerance,
        "load": _load_told(matrix, box),
        "deadlines": {key: value for key, value in deadlines.items() if key not in _DEADLINES_MAY_CHANGE},
        f"boxes.{box}": engine,
        **_declared(matrix),
    }


def _load_told(matrix: Matrix, box: str) -> dict[str, Any]:
    """The load; keys that came later stand there only where they say something: older experiments keep their digest.

    Of the prompts it is what the file says that counts, not its name.
    """
    told = matrix.effective_load(box).model_dump(mode="json")
    own = matrix.own_prompts(box)
    if own is not None:
        told["prompts"] = own.digest
    later = {name: told.pop(name) for name in _LATER_LOAD}
    return told | {name: value for name, value in later.items() if value != LoadSpec.model_fields[name].default}


def _declared(matrix: Matrix) -> dict[str, Any]:
    """What shall be shown is said before the boots; experiments that say nothing keep their digest."""
    goals: dict[str, Any] = {"constraints": list(matrix.constraints), "claims": list(matrix.claims)}
    if matrix.objective != Objective():
        goals["objective"] = matrix.objective.model_dump(mode="json")
    return {name: value for name, value in goals.items() if value}


def _flat(canonical: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
    """Canonical data as key path → JSON, one entry for each value that is named when it changes."""
    flat: dict[tuple[str, ...], str] = {}
    for section, value in canonical.items():
        if section == "variants":
            for name, body in value.items():
                flat[section, name] = "there"
                flat |= {(section, name, key): _json(inner) for key, inner in body.items()}
        elif isinstance(value, dict):
            flat |= {(section, key): _json(inner) for key, inner in value.items()}
        else:
            flat[section,] = _json(value)
    return flat


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False)


def _given(keys: LoadSpec | Deadlines) -> dict[str, Any]:
    return {field: getattr(keys, field) for field in keys.model_fields_set}


def _mark_of(document: Document, keys: tuple[str | int, ...]) -> Mark:
    """The mark of a key, or of the nearest thing around it; a flag in any spelling."""
    for end in range(len(keys), 0, -1):
        wanted = _normal(keys[:end])
        for path, mark in document.marks.items():
            if len(path) == end and _normal(path) == wanted:
                return mark
    return document.mark(())


def _normal(path: Iterable[str | int]) -> tuple[str | int, ...]:
    parts = tuple(path)
    if len(parts) == 3 and parts[0] == "variants" and isinstance(parts[2], str):
        return (*parts[:2], flag_name(parts[2]))
    return parts


def _each_known(what: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Raises UsageError for the names that are not known, all at once, or if there is none."""
    given = [name.strip() for name in names if name.strip()]
    wrong = [_unknown(what, name, known) for name in dict.fromkeys(given) if name not in known]
    if not given:
        wrong = [f"no {what} is named; there: {', '.join(known)}"]
    if wrong:
        raise UsageError("\n".join(wrong))
    return given


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    return f"there is no {what} `{name}`{suggestion(name, known)}; there: {', '.join(known)}"
