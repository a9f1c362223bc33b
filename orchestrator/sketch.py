"""`invoke init`: a first matrix.yaml from a unit, installed on a box or in a file.

Production's command is read and shown; the variants are sketched around what is there. The text is pure
(`matrix_text`); it is checked by the loader before it is written, so what `init` writes can be used at once.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from orchestrator.box import unitfile
from orchestrator.box.engines import ENGINES, Flag, Launch, parse_flags, split_program
from orchestrator.box.services import make_service
from orchestrator.box.transports import connect
from orchestrator.errors import UsageError
from orchestrator.matrix import BoxSpec, Matrix, Variant, parse_matrix
from orchestrator.matrix_keys import MAX_NAME
from orchestrator.redact import redact_argv

SPEC_TOKENS = ("spec-tokens", "num-speculative-tokens")
SPEC_COUNTS = (1, 2, 3, 5, 8)
SPEC_CONFIG = "speculative-config"
COUNT_KEY = "num_speculative_tokens"
LEVELS = (1, 2, 4, 8)
# What the default prompts and answers need of the model's context.
INPUT_TOKENS, OUTPUT_TOKENS, TEMPLATE_TOKENS = 512, 256, 64
SCHEMA = "orchestrator/matrix.schema.json"

_PLAIN = re.compile(r"[A-Za-z_/.~][A-Za-z0-9_./~+@%=-]*")
_WORDS = frozenset({"true", "false", "null", "on", "off", "yes", "no", "y", "n", "~", ".inf", ".nan"})


@dataclass(frozen=True, slots=True)
class Source:
    """Where production's command was read from, and what it says.

    `host` is an ssh alias (None: this machine), `unit_file` a path as it stands in matrix.yaml (None: installed).
    """

    unit: str
    argv: tuple[str, ...]
    own: Launch
    service: Literal["systemd", "systemd-user"] = "systemd"
    host: str | None = None
    ssh_config: str | None = None
    unit_file: str | None = None


@dataclass(frozen=True, slots=True)
class Sketched:
    """One variant of the sketch: its flags as YAML lines below its name, none for production as it is."""

    name: str
    lines: tuple[str, ...]
    remark: str = ""


# --- reading ---------------------------------------------------------------------------------------------------------


def from_box(unit: str, *, host: str | None, ssh_config: str | None = None, user: bool = False) -> Source:
    """Read the installed unit; over ssh, or of this machine without a host. Changes nothing.

    `user`: it is a unit of the login's own manager.

    Raises:
        BoxError: no way in, no such unit.
        UsageError: a command whose flags cannot be changed.
    """
    service: Literal["systemd", "systemd-user"] = "systemd-user" if user else "systemd"
    try:
        box = BoxSpec(
            name="init",
            transport="local" if host is None else "ssh",
            host=host,
            ssh_config=ssh_config,
            service=service,
            unit=unit,
        )
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UsageError(
            f"--{'box-host' if wrong['loc'] == ('host',) else 'unit'}: {wrong['input']!r} is none"
        ) from error
    transport = connect(box)
    try:
        found = make_service(transport, box, Path()).look()
    finally:
        transport.close()
    return Source(found.name, found.argv, _own(found.argv), service, host, ssh_config)


def from_file(path: Path, target: Path) -> Source:
    """Read a unit file on this side; `target` is the matrix.yaml that will name it.

    Raises:
        UsageError: it cannot be read, or its command's flags cannot be changed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--unit-file {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    with unitfile.problems_of(str(path), text):
        argv = unitfile.exec_argv(unitfile.parse(text), unitfile.unit_specifiers(path.name, user="", uid=0, home=""))
    named = os.path.relpath(path.absolute(), target.absolute().parent)
    return Source(path.name, argv, _own(argv), unit_file=str(path.absolute()) if named.startswith("..") else named)


def _own(argv: Sequence[str]) -> Launch:
    composed = ENGINES["vllm"].compose(argv, Variant(name="production"), host=None, port=None)
    if isinstance(composed, Launch):
        return composed
    raise UsageError("; ".join(problem.what for problem in composed))


# --- the sketch ------------------------------------------------------------------------------------------------------


def sketch(argv: Sequence[str]) -> tuple[Sketched, ...]:
    """Variants around a command: without speculation and with other numbers of tokens where it speculates.

    A command that does not speculate gives production alone.
    """
    flags = parse_flags(split_program(argv)[1])[1]
    spec = [flag.name for flag in flags if _speculates(flag)]
    if not spec:
        return (Sketched("production", (), "as it runs now; add what you would like to compare"),)
    without = Sketched("no-spec", (f"unset: [{', '.join(dict.fromkeys(spec))}]",))
    return (without, *_counts(flags))


def _speculates(flag: Flag) -> bool:
    return flag.name.startswith(("spec-", "speculative-")) or flag.name in SPEC_TOKENS


def _counts(flags: Sequence[Flag]) -> Iterator[Sketched]:
    """One variant for each number of speculative tokens around production's own."""
    counted = next((flag for flag in flags if flag.name in SPEC_TOKENS and flag.values), None)
    config = next((flag for flag in flags if flag.name == SPEC_CONFIG and flag.values), None)
    given = _config(config)
    if counted is not None and counted.values[0].isdigit():
        own = int(counted.values[0])
        for count in _around(own):
            yield _count(own, count, f"{counted.name}: {count}")
    elif isinstance(given.get(COUNT_KEY), int):
        own = given[COUNT_KEY]
        for count in _around(own):
            yield _count(own, count, f"{SPEC_CONFIG}: {json.dumps(given | {COUNT_KEY: count}, ensure_ascii=False)}")
    else:
        yield Sketched("production", (), "as it runs now")


def _config(flag: Flag | None) -> dict[str, Any]:
    try:
        found = json.loads(flag.values[0]) if flag is not None else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _around(own: int) -> list[int]:
    """One token, production's own number, and its neighbours: each a boot, so not more than four."""
    below = max((count for count in SPEC_COUNTS if count < own), default=own)
    above = min((count for count in SPEC_COUNTS if count > own), default=2 * own)
    return sorted({1, below, own, above} - {0})


def _count(own: int, count: int, line: str) -> Sketched:
    return Sketched(f"spec-{count}", () if count == own else (line,), "as it runs now" if count == own else "")


def examples(argv: Sequence[str]) -> list[str]:
    """Further variants as comments, out of what the command has and has not."""
    there = {flag.name: flag for flag in parse_flags(split_program(argv)[1])[1]}
    found = []
    if not any(_speculates(flag) for flag in there.values()):
        found.append("ngram-3: {speculative-config: {method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4}}")
    if (seqs := _number(there.get("max-num-seqs"))) is not None and seqs > 1:
        found.append(f"seqs-{seqs // 2}: {{max-num-seqs: {seqs // 2}}}")
    else:
        found.append("seqs-64: {max-num-seqs: 64}")
    if "enforce-eager" in there:
        found.append("compiled: {unset: [enforce-eager]}")
    else:
        found.append("eager: {enforce-eager: true}")
    prefix = there.get("enable-prefix-caching")
    if prefix is not None:
        found.append("no-prefix-cache: {enable-prefix-caching: false}")
    return found


def _number(flag: Flag | None) -> int | None:
    return int(flag.values[0]) if flag is not None and flag.values and flag.values[0].isdigit() else None


# --- the text --------------------------------------------------------------------------------------------------------


def matrix_text(source: Source, *, experiment: str | None = None, schema: bool = False) -> str:
    """The whole matrix.yaml, commented."""
    box = _name(source.host or ("real" if source.unit_file else "local"), "box")
    name = experiment or _name(source.unit.rpartition(".")[0] or source.unit, "experiment")
    chosen = "rehearsal" if source.unit_file else box
    lines = [
        *([f"# yaml-language-server: $schema={SCHEMA}", "#"] if schema else []),
        f"# Sketched by `init` from {_printable(source.unit_file or source.unit)}.",
        "# Every key is explained in docs/matrix.md. Only true and false are booleans here.",
        "",
        f"experiment: {scalar(name)}",
        f"box: {scalar(chosen)}",
        "",
        "# Production's command as it was read; a variant says only what differs from it:",
        *(f"#   {line}" for line in _shown(source.argv)),
        "#",
        "#   flag: value   --flag value        flag: true   --flag (false: --no-flag)",
        "#   unset: [flag, …]   leaves flags out        env: {NAME: text}   environment variables",
        "variants:",
        *_variants(sketch(source.argv)),
        *(f"  # {line}" for line in examples(source.argv)),
        "",
        "# Requests at once; one trial for each level in each boot.",
        f"concurrency: [{', '.join(map(str, _levels(source)))}]",
        "",
        "# Every boot starts with empty compile caches of its own; production's are never touched.",
        "cache: cold",
        "",
        "# A variant reproduces when its boots spread by no more than this (sd of logs, about 5 %).",
        "tolerance: 0.05",
        *_load(source),
        "",
        "boxes:",
        *(_rehearsal(source) if source.unit_file else ()),
        *_box(source, box),
    ]
    return "\n".join(lines) + "\n"


def scalar(text: str) -> str:
    """A text as YAML reads it back: plain where that is safe, else in double quotes."""
    return text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else json.dumps(text, ensure_ascii=False)


def _name(text: str, other: str) -> str:
    """A name that can be a folder's: what cannot stand in one is a dash; a number is no name."""
    made = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:MAX_NAME]
    return f"{other}-{made}"[:MAX_NAME] if not made or re.fullmatch(r"[0-9.]+", made) else made


def _shown(argv: Sequence[str]) -> list[str]:
    """A command over several lines, secrets hidden, nothing that would end a comment."""
    runs, told = split_program(redact_argv(argv))
    positional, flags = parse_flags(told)
    lines = [shlex.join((*runs, *positional)), *(f"  {shlex.join(flag.words)}" for flag in flags)]
    return [_printable(line) for line in lines]


def _printable(text: str) -> str:
    """One line that ends no comment."""
    return "".join(char if char.isprintable() else " " for char in text)


def _variants(found: Sequence[Sketched]) -> Iterator[str]:
    for each in found:
        remark = f" # {each.remark}" if each.remark else ""
        if each.lines:
            yield f"  {each.name}:{remark}"
            yield from (f"    {line}" for line in each.lines)
        else:
            yield f"  {each.name}: {{}}{remark}"


def _levels(source: Source) -> tuple[int, ...]:
    most = ENGINES["vllm"].limits(source.argv).max_num_seqs
    return tuple(level for level in LEVELS if most is None or level <= most) or (1,)


def _load(source: Source) -> list[str]:
    """Shorter prompts where the model's context is short."""
    context = ENGINES["vllm"].limits(source.argv).max_model_len
    if context is None or context >= INPUT_TOKENS + OUTPUT_TOKENS + TEMPLATE_TOKENS:
        return []
    room = max(4, context - TEMPLATE_TOKENS)
    tokens = f"load: {{input_tokens: {max(1, room * 2 // 3)}, output_tokens: {max(1, room // 3)}}}"
    return ["", f"# The unit allows {context} tokens in all.", tokens]


def _rehearsal(source: Source) -> list[str]:
    """A box that needs nothing, so that the file can be tried before the real box is named."""
    return [
        "  rehearsal: # no GPU, no root, no ssh: a stand-in engine that takes the same flags",
        "    engine: rehearsal",
        "    transport: local",
        "    service: process",
        f"    unit_file: {scalar(source.unit_file or '')}",
        "    time_scale: 0.003",
        "    load: {window_s: 0.65, warmup_s: 0.1, max_warmup_s: 0.5, input_tokens: 64, output_tokens: 12,",
        "           sanity_tokens: 4, headroom_tokens: 4, request_timeout_s: 20}",
        "",
    ]


def _box(source: Source, box: str) -> list[str]:
    where = [f"    transport: {'ssh' if source.host is not None or source.unit_file else 'local'}"]
    if source.host is not None:
        where.append(f"    host: {scalar(source.host)} # an alias of ~/.ssh/config; its host key must be known")
    elif source.unit_file:
        where.append("    host: real # put the alias of your ssh config here; its host key must be known")
    if source.ssh_config is not None:
        where.append(f"    ssh_config: {scalar(source.ssh_config)}")
    return [
        f"  {box}:",
        *where,
        f"    service: {source.service}",
        f"    unit: {scalar(source.unit)} # its ExecStart is production's command",
        f"    port: {source.own.port} # where production listens",
        "    dead_man_s: 15min # the box restores production by itself after so long without a sign of life",
        "    # cache_root: /var/cache/coldboot   # where cold caches go; default: beside the service user's own",
        "    deadlines:",
        "      ready_s: 15min",
    ]


def next_lines(matrix: Matrix, source: Source, path: Path, *, tool: str, options: str) -> Iterator[str]:
    """What to fill in, and what to run next, each command in a line; `options` are theirs, with a leading blank."""
    if source.unit_file is None:
        yield from ("next:", f"  {tool} doctor{options}", f"  {tool} plan{options}")
        return
    real = next(name for name, box in matrix.boxes.items() if not box.rehearsal)
    yield f"fill in: `host:` of box `{real}` in {path}, an alias of your ssh config; look at its `unit:` and `port:`"
    yield from ("next:", f"  {tool} doctor{options} --box {real}", f"  {tool} plan{options} --box {real}")
    yield from ("without the box, a rehearsal of it on this machine:", f"  {tool} matrix{options} --boots 3")


# --- writing ---------------------------------------------------------------------------------------------------------


def write(path: Path, text: str, *, force: bool) -> Matrix:
    """Check the text as matrix.yaml is checked, then write it whole.

    Raises:
        UsageError: the file is there already and `force` is not given, or it cannot be written.
    """
    if path.exists() and not force:
        raise UsageError(f"{path} is there already, and nothing was written", hint="--force replaces it")
    matrix = parse_matrix(text, path)
    try:
        handle, partial = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    return matrix
