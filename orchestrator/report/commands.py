"""Commands as the report shows them: secrets taken out, flags side by side with production's."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from orchestrator.redact import redact_argv, redact_env
from orchestrator.report import words

_FLAG = re.compile(r"-{1,2}[A-Za-z]")
# Isolation puts every variant on an address of its own; that is no difference in the configuration.
ISOLATION = frozenset({"--host", "--port"})


def flags(argv: Sequence[str]) -> dict[str, str]:
    """Flag → its values in shell quoting, empty for a bare flag; the program is under the empty name."""
    found: dict[str, list[str]] = {}
    current = ""
    for word in redact_argv(argv):
        # `python -m module` is the program: its own short options are no flags of the engine.
        if word.startswith("--") or (current and _FLAG.match(word)):
            name, equals, value = word.partition("=")
            current = name
            found.setdefault(current, []).extend([value] if equals else [])
        else:
            found.setdefault(current, []).append(word)
    return {name: shlex.join(values) for name, values in found.items()}


def shown(argv: Sequence[str]) -> str:
    """The command in shell quoting, one line, secrets hidden."""
    return words.clean(shlex.join(redact_argv(argv)))


def environment(env: Mapping[str, str]) -> tuple[str, ...]:
    """`NAME=value` lines, secrets hidden."""
    return tuple(words.clean(f"{name}={value}", 300) for name, value in sorted(redact_env(env).items()))


def difference(base: Sequence[str], argv: Sequence[str]) -> tuple[str, ...]:
    """What `argv` has otherwise than `base`: `--a 1 (was 3)`, `without --b`, `--c new`; address and port left out."""
    before, after = flags(base), flags(argv)
    said = []
    for name in dict.fromkeys((*before, *after)):
        if not name or name in ISOLATION or before.get(name) == after.get(name):
            continue
        if name not in after:
            said.append(f"without {name}")
        elif name not in before:
            said.append(f"{name} {after[name]}".rstrip())
        else:
            said.append(f"{name} {after[name] or '(bare)'} (was {before[name] or 'bare'})")
    return tuple(words.clean(line, 300) for line in said)


def common(argvs: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """A command of the flags that all of `argvs` share, to compare with where production is not known."""
    first, *others = [flags(argv) for argv in argvs]
    shared = [(name, value) for name, value in first.items() if name and all(o.get(name) == value for o in others)]
    return tuple(word for name, value in shared for word in (name, *shlex.split(value)))
