"""Journal and log files → entries: `journalctl -o json` (or one JSON array), `-o export`, `-o short*`, a plain log.

No line is ever lost: what is not journald's is an entry of a plain log. `index` counts from 0 over the input's
entries (lines of a plain log). Fields as journald 252 writes them: MESSAGE is a string, a list of bytes (when it holds
control characters), null (over 4096 bytes without `--all`), or a list of strings (a field given twice).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import orjson

from orchestrator.errors import JournalError
from orchestrator.records import JournalEntry

Form = Literal["json", "array", "export", "short", "plain"]

KEPT = frozenset({"_COMM", "_SYSTEMD_CGROUP", "PRIORITY", "JOB_TYPE", "JOB_RESULT", "EXIT_CODE", "EXIT_STATUS"})
_MOST_PROGRAMS = 1024
MOST_ARRAY_BYTES = 64 << 20
DIGITS = bytes(ord("0") if ord("0") <= byte <= ord("9") else byte for byte in range(256))
# Fields that name another unit or start than the one that an entry comes from.
_SPEAKS_OF_ANOTHER = frozenset(
    {"UNIT", "USER_UNIT", "_SYSTEMD_USER_UNIT", "INVOCATION_ID", "USER_INVOCATION_ID", "COREDUMP_UNIT"}
)
TOO_LONG = "(message left out by journalctl: give it --all)"

_SHORT = re.compile(
    r"^(?:(?P<month>[A-Z][a-z]{2}) +(?P<day>\d{1,2}) (?P<clock>\d\d:\d\d:\d\d)(?P<fraction>\.\d+)?"
    r"|(?P<iso>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d))"
    r"|(?P<full>[A-Z][a-z]{2} \d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \S+)"
    r"|(?P<unix>\d{9,11}\.\d{6})"
    r"|\[ *(?P<mono>\d+\.\d{6})\])"
    r" (?P<host>[\w.-]+) (?P<name>[^\s:\[]+)(?:\[(?P<pid>\d+)\])?: (?P<text>.*)$",
    re.DOTALL,
)
_MONTHS = {
    name: number
    for number, name in enumerate(
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1
    )
}
_UNIT = re.compile(r"\b([\w@.:\\-]+\.service)\b")


def text_of(value: Any) -> str:
    """A field's value as text: bytes are decoded (what is no UTF-8 is shown as �), a repeated field gives its first."""
    if isinstance(value, str):
        return value
    if value is None:
        return TOO_LONG
    if isinstance(value, list):
        if value and isinstance(value[0], int):
            try:
                return bytes(value).decode("utf-8", "replace")
            except (ValueError, TypeError):
                return str(value)
        return text_of(value[0]) if value else ""
    return str(value)


def _int(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else text_of(value)


def from_fields(fields: dict[str, Any], index: int) -> JournalEntry:
    """One entry from journald's fields."""
    get = fields.get
    message = get("MESSAGE", "")
    at_us = get("__REALTIME_TIMESTAMP") or get("_SOURCE_REALTIME_TIMESTAMP")
    pid = get("_PID") or get("SYSLOG_PID")
    if "COREDUMP_UNIT" in fields:
        # The core dump's handler is a unit of its own, but speaks of ours.
        fields = {**fields, "UNIT": fields["COREDUMP_UNIT"], "_SYSTEMD_INVOCATION_ID": None, "INVOCATION_ID": None}
        get = fields.get
    return JournalEntry(
        index,
        message if isinstance(message, str) else text_of(message),
        None if at_us is None else _int(at_us),
        _text(get("INVOCATION_ID") or get("USER_INVOCATION_ID") or get("_SYSTEMD_INVOCATION_ID")),
        _text(get("UNIT") or get("USER_UNIT") or get("_SYSTEMD_USER_UNIT") or get("_SYSTEMD_UNIT")),
        _text(get("SYSLOG_IDENTIFIER")),
        None if pid is None else _int(pid),
        _text(get("_TRANSPORT")),
        _text(get("__CURSOR")),
        {name: text_of(fields[name]) for name in KEPT & fields.keys()},
    )


def parse_json_line(line: str | bytes, index: int) -> JournalEntry | None:
    """One line of `journalctl -o json`; None for an empty line or one that is no JSON object."""
    if not line.strip():
        return None
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return from_fields(fields, index) if isinstance(fields, dict) else None


def parse_short_line(line: str, index: int) -> JournalEntry | None:
    """One line of `journalctl -o short*` (also short-precise, short-iso, short-full, short-unix, short-monotonic)."""
    found = _SHORT.match(line)
    if found is None:
        return None
    name = found["name"]
    manager = name.startswith("systemd")
    unit = _UNIT.search(found["text"]) if manager else None
    return JournalEntry(
        index=index,
        message=found["text"],
        at_us=_short_time(found),
        unit=unit[1] if unit else None,
        identifier=name,
        pid=_int(found["pid"]),
        transport="kernel" if name == "kernel" else "journal" if manager else "stdout",
    )


def _short_time(found: re.Match[str]) -> int | None:
    try:
        if found["unix"]:
            return round(float(found["unix"]) * 1e6)
        if found["iso"]:
            moment = datetime.fromisoformat(found["iso"].replace(",", "."))
        elif found["full"]:
            moment = datetime.fromisoformat(found["full"].split(" ", 1)[1].rsplit(" ", 1)[0]).replace(tzinfo=UTC)
        elif found["month"]:
            hour, minute, second = (int(part) for part in found["clock"].split(":"))
            # The form has no year: any leap year does, for only differences within one log are used.
            month, day = _MONTHS[found["month"]], int(found["day"])
            moment = datetime(2000, month, day, hour, minute, second, tzinfo=UTC)
        else:
            return round(float(found["mono"]) * 1e6)
    except (ValueError, KeyError):
        return None
    fraction = round(float(found["fraction"]) * 1e6) if found["fraction"] else 0
    return round(moment.timestamp() * 1e6) + fraction


def plain_entry(line: str, index: int) -> JournalEntry:
    """One line of a plain log: everything is the program's own word."""
    return JournalEntry(index=index, message=line, transport="stdout")


def form_of(head: bytes) -> Form:
    """Which form the first bytes of a file have."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"{") and isinstance(_object(start.split(b"\n", 1)[0]), dict):
        return "json"
    if start[:1] == b"[" and start[1:].lstrip()[:1] in (b"{", b"]"):
        return "array"
    if start.startswith((b"__CURSOR=", b"__REALTIME_TIMESTAMP=")):
        return "export"
    lines = [line for line in start.decode("utf-8", "replace").splitlines()[:40] if line and not line.startswith("-- ")]
    short = sum(_SHORT.match(line) is not None for line in lines)
    return "short" if lines and 2 * short >= len(lines) else "plain"


def _object(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        # The first line may be longer than what was read of it: then its beginning tells.
        return {} if line.startswith((b'{"', b'{ "')) else None


# Microseconds since the epoch: as a number, as journald's own text, or to be found out when somebody asks.
Moment = int | str | Callable[[], int | None] | None


def moment_us(moment: Moment) -> int | None:
    """The number; None when there is none."""
    if moment is None or isinstance(moment, int):
        return moment
    return _int(moment) if isinstance(moment, str) else moment()


class Source(NamedTuple):
    """Whose program said it: InvocationID and unit."""

    invocation: str
    unit: str


class Taker(Protocol):
    """Someone who may take a program's message before an entry is made of it."""

    def take_line(self, line: bytes) -> bool:
        """Whether a line of `journalctl -o json` has been taken by its shape alone and needs no parsing."""

    def take_early(
        self, source: Source | None, message: str, index: int, moment: Moment, line: bytes | None = None
    ) -> bool:
        """Whether the message (of this line of JSON) has been taken and needs no entry. Source None: nobody's own."""


def read(file: BinaryIO, taker: Taker | None = None) -> Iterator[JournalEntry]:
    """Entries of an open binary file, form found out from its first 64 KiB; memory stays flat.

    Of messages that `taker` takes no entry is made; the others keep their index.
    """
    head = file.read(65536)
    form = form_of(head)
    source = _lines(file, head)
    if form == "json":
        return _json_entries(source, taker)
    if form == "array":
        return _array_entries(head, file)
    if form == "export":
        return _export_entries(source)
    return _text_entries(source, taker, short=form == "short")


def _lines(file: BinaryIO, head: bytes) -> Iterator[bytes]:
    rest = head.removeprefix(b"\xef\xbb\xbf")
    while True:
        lines = rest.split(b"\n")
        rest = lines.pop()
        yield from lines
        chunk = file.read(1 << 20)
        if not chunk:
            break
        rest += chunk
    if rest:
        yield rest


def _json_entries(source: Iterable[bytes], taker: Taker | None) -> Iterator[JournalEntry]:
    index = -1
    loads = orjson.loads
    for line in source:
        if taker is not None and taker.take_line(line):
            index += 1
            continue
        try:
            fields = loads(line)
        except orjson.JSONDecodeError:
            if not line or line.isspace():
                continue
            fields = None
        index += 1
        if fields.__class__ is not dict:
            yield plain_entry(line.decode("utf-8", "replace"), index)
            continue
        if taker is not None:
            get = fields.get
            message, invocation, unit = get("MESSAGE"), get("_SYSTEMD_INVOCATION_ID"), get("_SYSTEMD_UNIT")
            # A line of a system unit's own program, which says all that matters about it.
            if (
                invocation.__class__ is str
                and unit.__class__ is str
                and message.__class__ is str
                and get("_TRANSPORT") == "stdout"
                and _SPEAKS_OF_ANOTHER.isdisjoint(fields)
                and taker.take_early(Source(invocation, unit), message, index, get("__REALTIME_TIMESTAMP"), line)
            ):
                continue
        yield from_fields(fields, index)


def _array_entries(head: bytes, file: BinaryIO) -> Iterator[JournalEntry]:
    """One JSON array of entries, as `jq -s` makes it; it must be read whole."""
    whole = head.removeprefix(b"\xef\xbb\xbf") + file.read(MOST_ARRAY_BYTES)
    if file.read(1):
        raise JournalError(
            f"a JSON array of more than {MOST_ARRAY_BYTES >> 20} MiB", hint="give it a line an entry: jq -c '.[]' FILE"
        )
    try:
        found = orjson.loads(whole)
    except orjson.JSONDecodeError:
        # It only began like one.
        found = whole.decode("utf-8", "replace").splitlines()
    for index, fields in enumerate(found):
        yield from_fields(fields, index) if isinstance(fields, dict) else plain_entry(text_of(fields), index)


def _text_entries(source: Iterable[bytes], taker: Taker | None, *, short: bool) -> Iterator[JournalEntry]:
    if short:
        yield from _short_entries(source, taker)
        return
    for index, line in enumerate(source):
        text = line.decode("utf-8", "replace").removesuffix("\r")
        if taker is None or not taker.take_early(None, text, index, None):
            yield plain_entry(text, index)


def _short_entries(source: Iterable[bytes], taker: Taker | None) -> Iterator[JournalEntry]:
    # Time, host and name of lines that were a program's, with every digit as 0: such a head needs no second look.
    heads: set[bytes] = set()
    for index, line in enumerate(source):
        whole = line.decode("utf-8", "replace").removesuffix("\r")
        head, _, text = whole.partition(": ")
        shape = head.encode("utf-8", "replace").translate(DIGITS)
        if taker is not None and shape in heads and taker.take_early(None, text, index, partial(_time_of, whole)):
            continue
        entry = parse_short_line(whole, index)
        if entry is None:
            yield plain_entry(whole, index)
            continue
        if entry.transport == "stdout" and entry.message == text and len(heads) < _MOST_PROGRAMS:
            heads.add(shape)
        yield entry


def _time_of(whole: str) -> int | None:
    found = _SHORT.match(whole)
    return None if found is None else _short_time(found)


def _export_entries(source: Iterator[bytes]) -> Iterator[JournalEntry]:
    """The export format: `NAME=value` lines, or NAME, a little-endian length of 8 bytes and that many bytes."""
    index = 0
    fields: dict[str, Any] = {}
    for line in source:
        if not line:
            if fields:
                yield from_fields(fields, index)
                index += 1
                fields = {}
            continue
        name, equals, value = line.partition(b"=")
        key = name.decode("ascii", "replace")
        content = value if equals else _binary(source)
        fields.setdefault(key, content.decode("utf-8", "replace"))
    if fields:
        yield from_fields(fields, index)


def _binary(source: Iterator[bytes]) -> bytes:
    """A length-prefixed value, which may hold newlines; `source` has been split at them."""
    data = bytearray()
    for line in source:
        data += line + b"\n"
        if len(data) >= 8 and len(data) >= 8 + int.from_bytes(data[:8], "little") + 1:
            break
    return bytes(data[8 : 8 + int.from_bytes(data[:8], "little")])
