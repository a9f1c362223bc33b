"""systemd unit files: read them as systemd reads them, and write values that systemd reads back unchanged.

Reading follows systemd's own `conf-parser.c`, `extract-word.c`, `escape.c`, `specifier.c`, `env-util.c`: continuation
lines (comments inside them are skipped), quotes, C escapes, an empty assignment that clears what came before, the
prefixes of an executable, specifiers, and the expansion of `${NAME}` and `$NAME` at execution. Writing has one place,
`quote_exec` and `quote_env`. This module does no input or output.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from orchestrator.errors import UsageError

WHITESPACE = " \t\n\r"
PREFIXES = "-@:+!"
_COMMENTS = "#;"
_SIMPLE = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " "} | {
    char: char for char in "\\\"'"
}
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./:=,+@^%${}\[\]~-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIRECTIVE = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\", '"': '\\"'}


@dataclass(frozen=True, slots=True)
class Assignment:
    """One `Key=value` of a unit file, continuation lines joined, quotes and escapes still in place."""

    section: str
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A unit with its drop-ins, as assignments in the order in which systemd applies them."""

    assignments: tuple[Assignment, ...] = ()

    def values(self, section: str, key: str) -> tuple[str, ...]:
        """The assignments of a list-like key that hold: an empty one clears those before it."""
        kept: list[str] = []
        for entry in self.assignments:
            if (entry.section, entry.key) == (section, key):
                kept = [*kept, entry.value] if entry.value else []
        return tuple(kept)

    def last(self, section: str, key: str) -> str | None:
        """The value of a key that holds one value; None when unset or emptied."""
        values = self.values(section, key)
        return values[-1] if values else None

    def __add__(self, other: UnitFile) -> UnitFile:
        return UnitFile(self.assignments + other.assignments)


@dataclass(frozen=True, slots=True)
class Command:
    """One command of an `Exec…=` line: specifiers resolved, `$` not yet expanded."""

    path: str
    argv: tuple[str, ...]
    flags: frozenset[str] = field(default_factory=frozenset)

    @property
    def expands(self) -> bool:
        """Whether systemd expands `$NAME` in it (the prefix `:` says no)."""
        return ":" not in self.flags


# --- reading -------------------------------------------------------------------------------------------------------


def parse(*texts: str) -> UnitFile:
    """Read a unit file and its drop-ins, given in the order in which systemd applies them.

    Raises:
        UsageError: a line that is no section, no assignment and no comment; the line is named.
    """
    assignments: list[Assignment] = []
    for text in texts:
        section = ""
        for number, line in _logical_lines(text):
            if line.startswith("["):
                if not line.endswith("]"):
                    raise UsageError(f"line {number}: section header without `]`: {line[:80]}")
                section = line[1:-1]
                continue
            key, equals, value = line.partition("=")
            if not equals:
                raise UsageError(f"line {number}: neither a section nor `Key=value`: {line[:80]}")
            assignments.append(Assignment(section, key.strip(WHITESPACE), value.strip(WHITESPACE)))
    return UnitFile(tuple(assignments))


@contextmanager
def problems_of(name: str, text: str) -> Iterator[None]:
    """Puts the file and the line before what is wrong with one unit file: `qwen.service:14: a quote … does not end`.

    Args:
        name: What the file is called.
        text: What it holds.
    """
    try:
        yield
    except UsageError as error:
        found = re.match(r"line (\d+): ", error.what)
        line = int(found[1]) if found else _line_of(text, "ExecStart")
        what = error.what[found.end() :] if found else error.what
        raise UsageError(f"{name}:{line}: {what}", hint=error.hint) from error


def _line_of(text: str, key: str) -> int:
    """The last line at which a key is set, else that of its section, else the first."""
    numbers = {1}
    for number, line in _logical_lines(text):
        if line == "[Service]" or line.partition("=")[0].strip(WHITESPACE) == key:
            numbers.add(number)
    return max(numbers)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Stripped lines that are not empty, continuation joined by a space, with the number of their first line."""
    joined, first = "", 0
    for number, raw in enumerate(re.split(r"\r\n|\n\r|[\n\r\0]", text.removeprefix("\ufeff")), start=1):
        if raw.lstrip(WHITESPACE)[:1] in _COMMENTS and raw.strip(WHITESPACE):
            continue
        first = first if joined else number
        joined += raw
        if (len(joined) - len(joined.rstrip("\\"))) % 2:
            joined = joined[:-1] + " "
            continue
        if line := joined.strip(WHITESPACE):
            yield first, line
        joined = ""
    if line := joined.strip(WHITESPACE):
        yield first, line


def words(text: str, *, relaxed: bool = True) -> tuple[str, ...]:
    """Split as systemd does: whitespace separates, quotes of both kinds join, C escapes are resolved.

    Args:
        text: the value after `Key=`.
        relaxed: keep an unknown escape as it stands (`Exec…=`) instead of refusing it (`Environment=`).

    Raises:
        UsageError: a quote that does not end, or an escape that systemd refuses.
    """
    found: list[str] = []
    at = 0
    while (start := _skip(text, at)) < len(text):
        word, at = _word(text, start, relaxed=relaxed)
        found.append(word)
    return tuple(found)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in WHITESPACE:
        at += 1
    return at


def split_variable(text: str) -> tuple[str, ...]:
    """Split as systemd splits the value of a `$NAME`: quotes join, a backslash only takes the next character as it is.

    Raises:
        UsageError: a quote that does not end.
    """
    found: list[str] = []
    at = 0
    while (start := _skip(text, at)) < len(text):
        word, at = _word(text, start, relaxed=True, c_escapes=False)
        found.append(word)
    return tuple(found)


def _word(text: str, at: int, *, relaxed: bool, c_escapes: bool = True) -> tuple[str, int]:
    """The word that begins at `at` (no whitespace there) and where it ends."""
    out = bytearray()
    quote = ""
    while at < len(text):
        char = text[at]
        if char == "\\" and c_escapes:
            chunk, at = _escape(text, at, relaxed=relaxed)
            out += chunk
            continue
        if char == "\\":
            out += text[at + 1 : at + 2].encode("utf-8", "surrogateescape")
            at += 2
            continue
        if quote:
            if char == quote:
                quote = ""
            else:
                out += char.encode("utf-8", "surrogateescape")
        elif char in "'\"":
            quote = char
        elif char in WHITESPACE:
            break
        else:
            out += char.encode("utf-8", "surrogateescape")
        at += 1
    if quote:
        raise UsageError(f"a quote {quote} does not end: {text}")
    return out.decode("utf-8", "surrogateescape"), at


def _escape(text: str, at: int, *, relaxed: bool) -> tuple[bytes, int]:
    """The bytes of the escape at `at` (a backslash) and where it ends; systemd's `cunescape_one`."""
    kind = text[at + 1 : at + 2]
    if kind in _SIMPLE and kind:
        return _SIMPLE[kind].encode(), at + 2
    for letter, digits, base in (("x", 2, 16), ("u", 4, 16), ("U", 8, 16), ("", 3, 8)):
        begin = at + 1 + len(letter)
        body = text[begin : begin + digits]
        allowed = string.hexdigits if base == 16 else string.octdigits
        if (letter and kind != letter) or len(body) != digits or not all(c in allowed for c in body):
            continue
        code = int(body, base)
        if code == 0 or code > (0x10FFFF if letter in ("u", "U") and letter else 0xFF):
            break
        plain = bytes((code,)) if letter in ("x", "") else chr(code).encode("utf-8", "surrogatepass")
        return plain, begin + digits
    if not kind or not relaxed:
        raise UsageError(f"an escape that systemd does not know: {text[at : at + 2]}… in {text}")
    return b"\\" + kind.encode("utf-8", "surrogateescape"), at + 2


def commands(value: str, specifiers: Mapping[str, str]) -> tuple[Command, ...]:
    """The commands of one `Exec…=` value; `;` as a word of its own separates them.

    Raises:
        UsageError: broken quoting, a specifier without a value, or prefixes without a command.
    """
    found: list[Command] = []
    at = 0
    while (at := _skip(value, at)) < len(value):
        first, at = _word(value, at, relaxed=True)
        name = first.lstrip(PREFIXES)
        flags = frozenset(first[: len(first) - len(name)])
        path = specify(name, specifiers)
        if not path:
            raise UsageError(f"a command without a program: {value}")
        argv = [] if "@" in flags else [path]
        while (at := _skip(value, at)) < len(value):
            if value[at] == ";" and value[at + 1 : at + 2] in ("", *WHITESPACE):
                at += 1
                break
            if value.startswith("\\;", at) and value[at + 2 : at + 3] in ("", *WHITESPACE):
                argv.append(";")
                at += 2
                continue
            word, at = _word(value, at, relaxed=True)
            argv.append(specify(word, specifiers))
        found.append(Command(path, tuple(argv), flags))
    return tuple(found)


def specify(text: str, specifiers: Mapping[str, str]) -> str:
    """Resolve `%x`; an unknown letter stays as it is, as in systemd.

    Raises:
        UsageError: a specifier that systemd knows and that has no value here.
    """

    def value(match: re.Match[str]) -> str:
        letter = match.group(1)
        if letter == "%":
            return "%"
        if letter in specifiers:
            return specifiers[letter]
        if letter in KNOWN_SPECIFIERS:
            raise UsageError(f"the unit uses %{letter}, whose value is not known here: {text}")
        return match.group(0)

    return re.sub(r"%(.)", value, text, flags=re.DOTALL)


KNOWN_SPECIFIERS = frozenset("aAbBCdDEfgGhHiIjJlLmMnNopPqsStTuUvVwWyY")


def unit_specifiers(
    unit: str,
    *,
    user: str,
    uid: int,
    home: str,
    runtime_dir: str = "/run",
    fragment: str | None = None,
    facts: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The specifiers of a unit, letter → value.

    Args:
        unit: full name with suffix, e.g. `vllm@a.service`.
        user: who runs the service manager (`root` for a system unit), not who runs the unit.
        uid: its number.
        home: its home directory.
        runtime_dir: `/run`, or `$XDG_RUNTIME_DIR` of a user's manager.
        fragment: path of the unit file.
        facts: further letters as read on the box (`H`, `m`, `b`, `v`, `a` …).
    """
    stem = unit.rpartition(".")[0] or unit
    prefix, _, instance = stem.partition("@")
    system = runtime_dir == "/run"
    found = {
        "n": unit,
        "N": stem,
        "p": prefix,
        "P": unescape_name(prefix),
        "i": instance,
        "I": unescape_name(instance),
        "j": prefix.rpartition("-")[2],
        "J": unescape_name(prefix.rpartition("-")[2]),
        "f": "/" + unescape_name(instance or prefix),
        "u": user,
        "U": str(uid),
        "h": home,
        "t": runtime_dir,
        "T": "/tmp",  # noqa: S108 - systemd's own default for %T
        "V": "/var/tmp",  # noqa: S108 - systemd's own default for %V
        "E": "/etc" if system else f"{home}/.config",
        "C": "/var/cache" if system else f"{home}/.cache",
    }
    if system:
        found |= {"S": "/var/lib", "L": "/var/log"}
    if fragment:
        found |= {"y": fragment, "Y": fragment.rpartition("/")[0]}
    return found | dict(facts or {})


def unescape_name(name: str) -> str:
    r"""Undo systemd's escaping of a unit name: `-` is `/`, `\xNN` a byte."""
    dashed = name.replace("-", "/").encode("utf-8", "surrogateescape")
    return re.sub(rb"\\x([0-9a-fA-F]{2})", lambda m: bytes((int(m.group(1), 16),)), dashed).decode(
        "utf-8", "surrogateescape"
    )


def environment(
    unit: UnitFile, specifiers: Mapping[str, str], files: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What the unit itself puts into the process's environment.

    Args:
        unit: the unit with its drop-ins.
        specifiers: letter → value.
        files: text of each `EnvironmentFile=`, by path; those that are missing here count as empty.
    """
    found: dict[str, str] = {}
    for value in unit.values("Service", "Environment"):
        found |= _assigned(value, specifiers)
    for path, _ in environment_files(unit, specifiers):
        found |= parse_environment_file((files or {}).get(path, ""))
    for value in unit.values("Service", "UnsetEnvironment"):
        for word in words(value):
            name, equals, wanted = specify(word, specifiers).partition("=")
            if not equals or found.get(name) == wanted:
                found.pop(name, None)
    return found


def _assigned(value: str, specifiers: Mapping[str, str]) -> dict[str, str]:
    """The assignments of one `Environment=`; what systemd ignores with a warning is ignored here too."""
    found: dict[str, str] = {}
    at = 0
    while (at := _skip(value, at)) < len(value):
        try:
            word, at = _word(value, at, relaxed=False)
        except UsageError:
            break
        name, equals, text = specify(word, specifiers).partition("=")
        if equals and _NAME.fullmatch(name) and is_env_value(text):
            found[name] = text
    return found


def environment_files(unit: UnitFile, specifiers: Mapping[str, str]) -> tuple[tuple[str, bool], ...]:
    """`EnvironmentFile=` in order: the path and whether it may be missing. They override `Environment=`."""
    values = (specify(value, specifiers) for value in unit.values("Service", "EnvironmentFile"))
    return tuple((value.removeprefix("-"), value.startswith("-")) for value in values)


def parse_environment_file(text: str) -> dict[str, str]:
    """Read an `EnvironmentFile=` as systemd's `env-file.c` does: shell-like, comments, both quotes, backslashes."""
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        if text[at] in WHITESPACE:
            at += 1
        elif text[at] in _COMMENTS:
            at = _line_end(text, at)
        else:
            equals, end = text.find("=", at), _line_end(text, at)
            if not at <= equals < end:
                at = end
                continue
            name = text[at:equals].rstrip(WHITESPACE)
            value, at = _env_file_value(text, equals + 1)
            if _NAME.fullmatch(name):
                found[name] = value
    return found


def _line_end(text: str, at: int) -> int:
    """Where the line ends; a backslash takes the next character along."""
    match = re.compile(r"(?:\\.|[^\\\n\r])*", re.DOTALL).match(text, at)
    return at + 1 if match is None or match.end() == at else match.end()


_ENV_PIECES = re.compile(
    r"""(?P<space>[ \t]+)|'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|(?P<bare>(?:\\.|[^\\\n\r])+)""", re.DOTALL
)


def _env_file_value(text: str, at: int) -> tuple[str, int]:
    """One value: quoted pieces, then perhaps a bare rest, in which quotes mean nothing."""
    value = ""
    while (piece := _ENV_PIECES.match(text, at)) is not None:
        at = piece.end()
        if piece["double"] is not None:
            value += re.sub(r'\\(["\\`$\n])', lambda m: m.group(1).strip("\n"), piece["double"])
        elif piece["bare"] is not None:
            value += re.sub(r"\\(.)", lambda m: m.group(1).strip("\n"), piece["bare"], flags=re.DOTALL).rstrip(
                WHITESPACE
            )
        else:
            value += piece["single"] or ""
    return value, at


def expand(argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Expand as systemd does at execution: `$NAME` as a whole word splits, `${NAME}` inside a word does not.

    `$$` is `$`; an unknown variable is empty (as a whole word: no word at all).
    """
    out: list[str] = []
    for word in argv:
        if word.startswith("$") and word[1:2] not in ("{", "$"):
            out.extend(split_variable(env.get(word[1:], "")))
        else:
            out.append(
                re.sub(r"\$\$|\$\{([^}:]*)\}", lambda m: "$" if m.group(1) is None else env.get(m.group(1), ""), word)
            )
    return tuple(out)


def exec_argv(
    unit: UnitFile, specifiers: Mapping[str, str], env: Mapping[str, str] | None = None, *, key: str = "ExecStart"
) -> tuple[str, ...]:
    """The argument vector that systemd would execute; first the program, also where `@` gives it another name.

    Args:
        unit: the unit with its drop-ins.
        specifiers: letter → value, see `unit_specifiers`.
        env: the environment for `$NAME`; by default what `Environment=` says.
        key: which `Exec…=`.

    Raises:
        UsageError: none, several, or one that cannot be read.
    """
    found = [command for value in unit.values("Service", key) for command in commands(value, specifiers)]
    if len(found) != 1:
        raise UsageError(f"{key}= stands for {len(found)} commands; exactly one is needed")
    command = found[0]
    if not command.expands:
        return (command.path, *command.argv[1:])
    return (command.path, *expand(command.argv[1:], environment(unit, specifiers) if env is None else env))


# --- writing -------------------------------------------------------------------------------------------------------


def quote_exec(argv: Sequence[str]) -> str:
    """The value of `ExecStart=` that makes systemd execute exactly `argv`.

    Raises:
        UsageError: an argument holds a NUL, or the program is one that systemd would refuse or read as a prefix.
    """
    if not argv or not argv[0]:
        raise UsageError("a command needs a program")
    program = argv[0]
    if program[0] in PREFIXES or program.endswith("/") or any(c in "\\\"'\x7f" or c < " " for c in program):
        raise UsageError(f"systemd refuses this program: {program!r}; give its plain absolute path")
    literal = "$" in program  # the path is not expanded but argv[0] is: switch expansion off for the whole command
    head = (":" if literal else "") + program
    return " ".join(_quote(word, dollars=index > 0 and not literal) for index, word in enumerate((head, *argv[1:])))


def quote_env(name: str, value: str) -> str:
    """The value of `Environment=` that sets `name` to exactly `value`.

    Raises:
        UsageError: a name or a value that systemd would ignore.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"not a name of an environment variable: {name!r}; letters, digits and _ are accepted")
    if not is_env_value(value):
        raise UsageError(f"{name}: systemd ignores values with control characters other than tab and newline")
    return _quote(f"{name}={value}", dollars=False)


def quote_words(argv: Sequence[str]) -> str:
    """The value of a variable `NAME` that `$NAME` in an `Exec…=` splits into exactly `argv`."""
    return " ".join(
        word if _PLAIN_WORD.fullmatch(word) else '"' + re.sub(r'(["\\])', r"\\\1", word) + '"' for word in argv
    )


def is_env_value(value: str) -> bool:
    """Whether systemd accepts it as the value of an environment variable: no control characters but tab and newline."""
    return not any((c < " " and c not in "\t\n") or c == "\x7f" or _is_no_character(c) for c in value)


def quote_path(path: str) -> str:
    """A path in a list of paths, such as `ReadWritePaths=`."""
    return _quote(path, dollars=False)


def quote_env_file(name: str, value: str) -> str:
    """The line of an `EnvironmentFile=` that sets `name` to exactly `value`. Raises as `quote_env` does."""
    quote_env(name, value)
    return f"{name}=" + '"' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'


def _is_no_character(char: str) -> bool:
    """Code points that systemd calls invalid UTF-8: surrogates and Unicode's noncharacters."""
    code = ord(char)
    return 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE


def _quote(word: str, *, dollars: bool) -> str:
    """One word, in double quotes when it needs them: specifiers and (in commands) `$` doubled, the rest C-escaped."""
    text = word.replace("%", "%%")
    if dollars:
        text = text.replace("$", "$$")
    if _PLAIN_WORD.fullmatch(text):
        return text
    return '"' + "".join(_quoted_char(char) for char in text) + '"'


def _quoted_char(char: str) -> str:
    if char == "\0":
        raise UsageError("an argument cannot hold a NUL")
    if char in _DIRECTIVE:
        return _DIRECTIVE[char]
    if "\ud800" <= char <= "\udfff" and not "\udc80" <= char <= "\udcff":
        raise UsageError("an argument cannot hold a lone surrogate")
    if char < " " or char == "\x7f" or _is_no_character(char):  # also a byte that is no UTF-8, as Python carries it
        return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))
    return char
