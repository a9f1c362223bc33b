"""Hand-recorded boots, or another tool's results, to a `Series`: YAML, JSON or CSV, every problem at once.

YAML and JSON (`.yaml`, `.yml`, `.json`)::

    experiment: seed            # default: the file's stem
    tolerance: 0.05             # sd of logs between boots; default 0.05
    production: spec-3          # the variant that is production's own setting; default: none
    cache: cold                 # cold, clear, warm or as-is, of boots that do not say; default cold
    variants:
      spec-8:                   # concurrency: one value a boot, in boot order, tok/s
        1: [124.8, 46.8]
        8: [null, "-"]          # null: measured and failed; "-": not measured
      spec-3:
        boots:                  # or boot by boot
          - {fatal: triton_oom} # died before the trials
          - {cache: warm, trials: {1: 46.7}}

A level is a concurrency, or `8@8000`: eight streams with prompts of 8000 tokens, where several lengths were measured.
`box`, `boots_planned` and `rehearsal` may be given too. A list that is shorter than the variant's longest leaves its
last boots not measured.

CSV (`.csv`): a header, then one value a line; columns in any order, `cache` and `fatal` may be left out::

    variant,boot,concurrency,value,cache,fatal
    spec-8,1,1,124.8,cold,
    spec-8,1,8,null,cold,
    spec-3,1,,,cold,triton_oom

`concurrency` is a level: `8`, or `8@8000`. `boot` is any name; boots stand in the order in which their names first
appear. `value` is a number, `null` or `-`.

A folder, or a `.json` that another load generator wrote, is read by `foreign`.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from orchestrator import foreign, yamlfile
from orchestrator.errors import SeriesError
from orchestrator.records import LEVEL_HELP, BootResult, CacheState, Level, LevelResult, Series, with_one_length
from orchestrator.yamlfile import KeyPath, say_path

CACHE_STATES: tuple[CacheState, ...] = get_args(CacheState)
NOT_MEASURED = "-"
MOST_BYTES = 64 * 1024 * 1024
KEYS = ("experiment", "box", "rehearsal", "tolerance", "production", "boots_planned", "cache", "variants")
COLUMNS = ("variant", "boot", "concurrency", "value", "cache", "fatal")
NEEDED_COLUMNS = COLUMNS[:4]
_VALUE_HELP = 'a finite positive number, null (measured and failed) or "-" (not measured)'


def read_series(path: Path) -> Series:
    """Read a file of boots.

    Args:
        path: `.csv`, `.json`, or anything else as YAML; or results of another tool, a file or a folder of them.

    Returns:
        The boots variant by variant; `block` is the boot's number within its variant.

    Raises:
        SeriesError: the file cannot be read or has problems, all of them, each with where it stands.
    """
    if path.is_dir() or _is_foreign(path):
        return foreign.read_results(path)
    text = _text(path)
    reading = _Reading(path.name)
    series = _from_csv(reading, text, path.stem) if path.suffix.lower() == ".csv" else _from_tree(reading, text, path)
    if reading.problems or series is None:
        raise SeriesError(tuple(reading.problems), hint="`null` is measured and failed, `-` is not measured")
    return series


def _is_foreign(path: Path) -> bool:
    """Whether another tool wrote this file; what cannot be read is for our own reader to say."""
    try:
        return path.suffix.lower() == ".json" and foreign.is_result(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return False


def _text(path: Path) -> str:
    try:
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            raise SeriesError([f"{path}: larger than {MOST_BYTES // 1024 // 1024} MiB"])
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SeriesError([f"{path}: cannot be read: {error.strerror or error}"]) from error
    except UnicodeDecodeError as error:
        raise SeriesError([f"{path}: not UTF-8 text (byte {error.start})"]) from error


# --- problems ------------------------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """Collects problems; `lines` tells where a key stands, where the format knows."""

    file: str
    document: yamlfile.Document | None = None
    problems: dict[str, None] = field(default_factory=dict)

    def wrong(self, path: KeyPath, what: str, accepted: str | None = None) -> None:
        """Note one problem with what stands at `path`."""
        line = f":{self.document.mark(path).line}" if self.document is not None else ""
        where = f"{say_path(path)}: " if path else ""
        self.note(f"{self.file}{line}: {where}{what}" + (f"; accepted: {accepted}" if accepted else ""))

    def knows(self, path: KeyPath) -> bool:
        """Whether the file's form has a problem at `path` already, such as a number that is too large."""
        return self.document is not None and any(p.key == say_path(path) for p in self.document.problems)

    def note(self, problem: str) -> None:
        """Note one problem, once; what cannot be printed stands in it as an escape."""
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in problem)
        self.problems.setdefault(shown)


def _say(value: Any) -> str:
    """What stands there, short enough for one line."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


# --- YAML and JSON -------------------------------------------------------------------------------------------------


def _from_tree(reading: _Reading, text: str, path: Path) -> Series | None:
    data = _json(reading, text) if path.suffix.lower() == ".json" else _yaml(reading, text)
    if not isinstance(data, dict):
        if not reading.problems:
            reading.wrong((), f"no keys, but {_say(data)}", "a mapping with `variants:`")
        return None
    for key in data:
        if key not in KEYS:
            reading.wrong((key,), "unknown key", ", ".join(KEYS))
    default = _cache(reading, ("cache",), data.get("cache", "cold"))
    boots = _variants(reading, data, default)
    names = tuple(boots)
    production = _text_or_none(reading, data, "production")
    if production is not None and names and production not in names:
        reading.wrong(("production",), f"{production!r} is no variant here", ", ".join(names))
    fields: dict[str, Any] = {
        "experiment": _text_or_none(reading, data, "experiment") or path.stem,
        "box": _text_or_none(reading, data, "box"),
        "rehearsal": _flag(reading, data, "rehearsal"),
        "tolerance": _tolerance(reading, data),
        "production": production,
        "boots_planned": _boots_planned(reading, data),
    }
    return None if reading.problems else _series(boots, fields)


def _yaml(reading: _Reading, text: str) -> Any:
    document = yamlfile.parse(text)
    reading.document = document
    for problem in document.problems:
        reading.note(problem.say(reading.file))
    return document.data


class _Twice(dict[str, Any]):
    """A JSON object that remembers which of its keys stood in it more than once."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        times = Counter(name for name, _ in pairs)
        self.twice = tuple(name for name, count in times.items() if count > 1)


def _json(reading: _Reading, text: str) -> Any:
    try:
        data = json.loads(text, object_pairs_hook=_Twice)
    except json.JSONDecodeError as error:
        reading.note(f"{reading.file}:{error.lineno}: not JSON: {error.msg}")
        return None
    except (RecursionError, ValueError) as error:  # nested without end; a whole number of thousands of digits
        reading.note(f"{reading.file}: not JSON that can be read: {type(error).__name__}")
        return None
    _note_twice(reading, data)
    return data


def _note_twice(reading: _Reading, data: Any) -> None:
    """Note every key that stands twice in an object; JSON may nest deeper than functions may call each other."""
    left: list[tuple[Any, KeyPath]] = [(data, ())]
    while left:
        value, path = left.pop()
        if isinstance(value, _Twice):
            for name in value.twice:
                reading.wrong((*path, name), "given twice", "each key once")
            left += [(inner, (*path, name)) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(inner, (*path, index)) for index, inner in enumerate(value)]


# --- keys at the top -----------------------------------------------------------------------------------------------


def _text_or_none(reading: _Reading, data: Mapping[str, Any], key: str) -> str | None:
    value = data.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        reading.wrong((key,), f"{_say(value)} is no name", "text on one line")
        return None
    return value


def _flag(reading: _Reading, data: Mapping[str, Any], key: str) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        reading.wrong((key,), f"{_say(value)} is not accepted", "true or false")
        return False
    return value


def _tolerance(reading: _Reading, data: Mapping[str, Any]) -> float:
    value = data.get("tolerance", 0.05)
    if not _is_number(value) or not 0 < value <= 1:
        reading.wrong(
            ("tolerance",), f"{_say(value)} is not accepted", "an sd of logs above 0, at most 1, such as 0.05"
        )
        return 0.05
    return float(value)


def _boots_planned(reading: _Reading, data: Mapping[str, Any]) -> int | None:
    value = data.get("boots_planned")
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    reading.wrong(("boots_planned",), f"{_say(value)} is not accepted", "a whole number from 1, or null")
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cache(reading: _Reading, path: KeyPath, value: Any) -> CacheState:
    for state in CACHE_STATES:
        if value == state:
            return state
    reading.wrong(path, f"{_say(value)} is no cache state", ", ".join(CACHE_STATES))
    return "cold"


# --- variants ------------------------------------------------------------------------------------------------------


@dataclass
class _Boot:
    """One boot while it is being read. `fatal`: the cause of a death before the trials."""

    cache: CacheState
    fatal: str | None = None
    levels: dict[Level, LevelResult] = field(default_factory=dict)


def _variants(reading: _Reading, data: Mapping[str, Any], default: CacheState) -> dict[str, list[_Boot]]:
    variants = data.get("variants")
    if not isinstance(variants, dict) or not variants:
        what = "missing" if "variants" not in data else "no variants"
        reading.wrong(
            ("variants",) if "variants" in data else (),
            f"`variants` {what}" if what == "missing" else what,
            "variants: {name: {1: [124.8, 46.8]}}",
        )
        return {}
    return {name: _variant(reading, ("variants", name), body, default) for name, body in variants.items()}


def _variant(reading: _Reading, path: KeyPath, body: Any, default: CacheState) -> list[_Boot]:
    name = path[-1]
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        reading.wrong(path, f"{_say(name)} is no name of a variant", "text on one line")
    if not isinstance(body, dict) or not body:
        reading.wrong(
            path,
            "no boots" if not body else f"{_say(body)} are no boots",
            "{1: [124.8, 46.8]} or {boots: [{trials: {1: 124.8}}]}",
        )
        return []
    if "boots" not in body:
        return _columns(reading, path, body, default)
    for key in body:
        if key != "boots":
            reading.wrong((*path, key), "beside `boots`", "either `boots:` or one list for each level")
    entries = body["boots"]
    if not isinstance(entries, list) or not entries:
        reading.wrong((*path, "boots"), "no boots", "[{trials: {1: 124.8}}, {fatal: triton_oom}]")
        return []
    return [_entry(reading, (*path, "boots", index), entry, default) for index, entry in enumerate(entries)]


def _columns(reading: _Reading, path: KeyPath, body: Mapping[str, Any], default: CacheState) -> list[_Boot]:
    """The short form: one list for each level, one value for each boot."""
    columns: dict[Level, list[Any]] = {}
    for key, values in body.items():
        inner = (*path, key)
        level = _level(reading, inner, key, columns, "or `boots:`")
        if not isinstance(values, list) or not values:
            reading.wrong(
                inner,
                "an empty list" if values == [] else f"{_say(values)} is no list",
                "one value for each boot, such as [124.8, 46.8]",
            )
        elif level is not None:
            columns[level] = values
            for index, value in enumerate(values):
                _check(reading, (*inner, index), value)
    boots = [_Boot(default) for _ in range(max((len(values) for values in columns.values()), default=0))]
    for level, values in columns.items():
        for index, boot in enumerate(boots):
            boot.levels[level] = _measured(level, values[index] if index < len(values) else NOT_MEASURED)
    return boots


def _entry(reading: _Reading, path: KeyPath, entry: Any, default: CacheState) -> _Boot:
    """The long form: one boot."""
    if not isinstance(entry, dict):
        reading.wrong(path, f"{_say(entry)} is no boot", "{trials: {1: 124.8}} or {fatal: triton_oom}")
        return _Boot(default)
    for key in entry:
        if key not in ("cache", "fatal", "trials"):
            reading.wrong((*path, key), "unknown key", "cache, fatal, trials")
    boot = _Boot(_cache(reading, (*path, "cache"), entry["cache"]) if "cache" in entry else default)
    if ("fatal" in entry) == ("trials" in entry):
        what = "both `fatal` (a death before the trials) and `trials`" if "fatal" in entry else "an empty boot"
        reading.wrong(path, what, "either `fatal: cause` or `trials: {level: value}`")
    if "fatal" in entry:
        cause = entry["fatal"]
        if not isinstance(cause, str) or not cause.strip() or not cause.isprintable():
            reading.wrong((*path, "fatal"), f"{_say(cause)} is no cause", "text, such as triton_oom")
        else:
            boot.fatal = cause
    if "trials" in entry:
        _trials(reading, (*path, "trials"), entry["trials"], boot)
    return boot


def _trials(reading: _Reading, path: KeyPath, trials: Any, boot: _Boot) -> None:
    if not isinstance(trials, dict) or not trials:
        reading.wrong(path, f"{_say(trials)} are no trials", "{1: 124.8, 8: null}")
        return
    for key, value in trials.items():
        level = _level(reading, (*path, key), key, boot.levels, "")
        if level is not None and _check(reading, (*path, key), value):
            boot.levels[level] = _measured(level, value)


def _level(reading: _Reading, path: KeyPath, key: str, there: Mapping[Level, Any], also: str) -> Level | None:
    try:
        level = Level.parse(key)
    except ValueError:
        reading.wrong(path, f"{_say(key)} is no concurrency", f"{LEVEL_HELP}{' ' + also if also else ''}")
        return None
    if level in there:
        reading.wrong(path, "given twice", "each level once")
        return None
    return level


def _check(reading: _Reading, path: KeyPath, value: Any) -> bool:
    """Whether `value` may stand for one boot at one level; notes the problem if not."""
    if value is None or (isinstance(value, str) and value == NOT_MEASURED):
        return True
    if isinstance(value, list):
        reading.wrong(path, "a list inside of one boot: repeats within one boot are no boots", _VALUE_HELP)
        return False
    if not _is_number(value):
        if not reading.knows(path):
            reading.wrong(path, f"{_say(value)} is no number", _VALUE_HELP)
        return False
    if not _is_finite(value):
        reading.wrong(path, f"{_say(value)} is not finite", _VALUE_HELP)
        return False
    if value <= 0:
        reading.wrong(path, f"{_say(value)} is not positive", _VALUE_HELP)
        return False
    return True


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a whole number above 1.8e308
        return False


def _measured(level: Level, value: Any) -> LevelResult:
    """A result from a value that may stand there; one that may not has been noted, and ends the reading."""
    where = {"concurrency": level.concurrency, "input_tokens": level.input_tokens}
    if value is None:
        return LevelResult(**where, value=None, failed=True)
    if not _is_number(value) or not _is_finite(value):
        return LevelResult(**where, value=None, measured=False)
    return LevelResult(**where, value=float(value))


# --- CSV -----------------------------------------------------------------------------------------------------------


def _from_csv(reading: _Reading, text: str, stem: str) -> Series | None:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    boots: dict[str, dict[str, _Boot]] = {}
    header: list[str] = []
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            if not header:
                header = cells
                if not _header(reading, header, reader.line_num):
                    return None
                continue
            _row(reading, dict(zip(header, cells, strict=False)), len(cells) - len(header), reader.line_num, boots)
    except csv.Error as error:
        reading.note(f"{reading.file}:{reader.line_num}: not CSV: {error}")
        return None
    if not boots and not reading.problems:
        reading.note(f"{reading.file}: no boots; accepted: a header {','.join(COLUMNS)}, then one value a line")
    lists = {name: list(own.values()) for name, own in boots.items()}
    return None if reading.problems else _series(lists, {"experiment": stem})


def _header(reading: _Reading, header: Sequence[str], line: int) -> bool:
    before = len(reading.problems)
    for name in dict.fromkeys(header):
        if name not in COLUMNS:
            reading.note(f"{reading.file}:{line}: {_say(name)} is no column; accepted: {', '.join(COLUMNS)}")
        if header.count(name) > 1:
            reading.note(f"{reading.file}:{line}: column {_say(name)} given twice; accepted: each column once")
    missing = [name for name in NEEDED_COLUMNS if name not in header]
    if missing:
        reading.note(f"{reading.file}:{line}: no column {', '.join(missing)}; accepted: {', '.join(COLUMNS)}")
    return len(reading.problems) == before


def _row(
    reading: _Reading, row: Mapping[str, str], surplus: int, line: int, boots: dict[str, dict[str, _Boot]]
) -> None:
    def wrong(column: str, what: str, accepted: str) -> None:
        reading.note(f"{reading.file}:{line}: {column}: {what}; accepted: {accepted}")

    if surplus != 0:
        wrong("columns", f"{'more' if surplus > 0 else 'fewer'} than the header has", "one cell for each column")
        return
    for column in ("variant", "boot"):
        if not row[column] or not row[column].isprintable():
            wrong(column, f"{_say(row[column])} is no name", "text on one line")
    cache = next((state for state in CACHE_STATES if state == (row.get("cache") or "cold")), None)
    if cache is None:
        wrong("cache", f"{_say(row['cache'])} is no cache state", ", ".join(CACHE_STATES))
        return
    boot = boots.setdefault(row["variant"], {}).setdefault(row["boot"], _Boot(cache))
    if boot.cache != cache:
        wrong("cache", f"{cache}, but this boot was {boot.cache} before", "one cache state for each boot")
    if row.get("fatal"):
        if row["concurrency"] or row["value"] or boot.levels or boot.fatal:
            wrong("fatal", "a death before the trials has no values", "one line for that boot, its value left empty")
        boot.fatal = row["fatal"]
        return
    if boot.fatal:
        wrong("boot", "died before the trials, so it has no values", "another boot")
        return
    _csv_value(row, wrong, boot)


def _csv_value(row: Mapping[str, str], wrong: Any, boot: _Boot) -> None:
    try:
        level = Level.parse(row["concurrency"])
    except ValueError:
        wrong("concurrency", f"{_say(row['concurrency'])} is no concurrency", LEVEL_HELP)
        return
    if level in boot.levels:
        wrong("concurrency", f"{level} given twice for this boot", "each level once")
        return
    value = _csv_number(row["value"])
    if isinstance(value, str) and value != NOT_MEASURED:
        wrong("value", f"{_say(value)} is no number", _VALUE_HELP)
    elif isinstance(value, float) and not (math.isfinite(value) and value > 0):
        wrong("value", f"{_say(row['value'])} is not finite and positive", _VALUE_HELP)
    boot.levels[level] = _measured(level, value)


def _csv_number(text: str) -> float | str | None:
    if text == "null":
        return None
    try:
        return text if "_" in text else float(text)
    except ValueError:
        return text


# --- to a series ---------------------------------------------------------------------------------------------------


def _series(variants: Mapping[str, Sequence[_Boot]], fields: Mapping[str, Any]) -> Series:
    boots, lengths = with_one_length(
        _result(name, number, boot) for name, boots in variants.items() for number, boot in enumerate(boots, start=1)
    )
    return Series(variants=tuple(variants), boots=boots, input_tokens=lengths, **fields)


def _result(variant: str, number: int, boot: _Boot) -> BootResult:
    """A hand-recorded boot; its place among other variants' boots is not known, so it is its own number."""
    dead = boot.fatal is not None
    return BootResult(
        boot=f"b{number:02d}-{variant}" + ("" if boot.cache == "cold" else f"@{boot.cache}"),
        variant=variant,
        cache=boot.cache,
        block=number,
        position=number,
        outcome="crashed" if dead else "completed",
        why=f"died before the trials: {boot.fatal}" if dead else "",
        died=dead,
        died_before_trials=dead,
        cause=boot.fatal,
        levels=tuple(boot.levels[level] for level in sorted(boot.levels)),
    )
