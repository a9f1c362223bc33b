"""Production as a plain process: how it is found, how it was started, and the script that starts it so again.

Found by its whole command line, never by a name, and never one of ours (`COLDBOOT_INVOCATION` in its environment).
What it takes to start it again is read from /proc: command, environment, working directory, where its output goes, and
how many files it may open. The environment may hold secrets, so the script is for its owner alone and nobody's argv.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from orchestrator.box.transports import Transport
from orchestrator.box.unit import COMMAND_S
from orchestrator.errors import BoxError

_CANDIDATES = r"""
grep -l -s -a -z '^COLDBOOT_INVOCATION=' /proc/[0-9]*/environ | tr '\n' ' '
printf '\0'
grep -s -a -z -H '' /proc/[0-9]*/cmdline
exit 0
"""
# Of each: parent, start time, and whether it is this login's own.
_ABOUT = r"""
for p; do
  { IFS= read -r stat <"/proc/$p/stat"; } 2>/dev/null || continue
  own=no
  [ -O "/proc/$p" ] && own=yes
  set -- ${stat##*) }
  [ "$1" = Z ] || [ "$1" = X ] || echo "$p $2 ${20} $own"
done
"""
_READ = r"""
p=$1
say() { base64 | tr -d '\n'; echo; }
say <"/proc/$p/cmdline"
say <"/proc/$p/environ"
for link in cwd fd/1 fd/2; do readlink -n "/proc/$p/$link" | say; done
while read -r a b c soft _; do [ "$a $b $c" != 'Max open files' ] || echo "$soft"; done <"/proc/$p/limits"
"""
# `tree PID START`: the process, if it is still the one that began then, and all of its descendants.
TREE = r"""
stands() {
  { IFS= read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
  began=$2
  set -- ${line##*) }
  [ "${20}" = "$began" ] && [ "$1" != Z ] && [ "$1" != X ]
}
tree() {
  stands "$1" "$2" || return 0
  found=" $1 "
  all=
  for f in /proc/[0-9]*/stat; do
    { IFS= read -r line <"$f"; } 2>/dev/null || continue
    p=${line%% *}
    set -- ${line##*) }
    [ "$1" = Z ] || [ "$1" = X ] || all="$all $p:$2"
  done
  again=1
  while [ "$again" = 1 ]; do
    again=0
    for each in $all; do
      case $found in *" ${each%:*} "*) continue ;; esac
      case $found in *" ${each#*:} "*) found="$found${each%:*} " again=1 ;; esac
    done
  done
  printf '%s\n' $found
}
"""
# What it started outlives it for a while (EngineCore), so all of it is listed before the first signal.
_STOP = (
    TREE
    + r"""
polite=$3 grace=$4
listed=$(tree "$1" "$2")
left() {
  for p in $listed; do
    { IFS= read -r line <"/proc/$p/stat"; } 2>/dev/null || continue
    set -- ${line##*) }
    [ "$1" = Z ] || [ "$1" = X ] || echo "$p"
  done
}
clock() { read -r up _ </proc/uptime; up=${up%.*}${up#*.}; }
await() {
  clock; end=$((up + $1))
  until [ -z "$(left)" ]; do clock; [ "$up" -lt "$end" ] || return 1; sleep 0.02; done
}
kill -TERM "$1" 2>/dev/null
await "$polite" || { kill -KILL $(left) 2>/dev/null; await "$grace" || echo left $(left); }
"""
)
_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
_SHELLS_OWN = (b"PWD", b"OLDPWD", b"SHLVL", b"_")


@dataclass(frozen=True, slots=True)
class Standing:
    """Production's main process: its id, when it began (clock ticks since the machine's boot), its command line."""

    pid: int
    start: str
    argv: tuple[str, ...]


def find(transport: Transport, commands: Sequence[tuple[str, ...]]) -> Standing | None:
    """The process that runs one of these commands and is none of ours; None when there is none.

    Raises:
        BoxError: there are several, or it is not this login's own.
    """
    ours, *words = transport.run(("sh", "-c", _CANDIDATES), timeout_s=COMMAND_S).stdout.split("\0")
    taken = {int(path.split("/")[2]) for path in ours.split()}
    lines: dict[int, list[str]] = {}
    for word in words:
        path, colon, argument = word.partition(":")
        if colon:
            lines.setdefault(int(path.split("/")[2]), []).append(argument)
    same = {
        pid: tuple(argv)
        for pid, argv in lines.items()
        if pid not in taken and any(runs(tuple(argv), command) for command in commands)
    }
    if not same:
        return None
    said = transport.run(("sh", "-c", _ABOUT, "coldboot", *map(str, same)), timeout_s=COMMAND_S).stdout
    rows = [line.split() for line in said.splitlines()]
    pids = {int(row[0]) for row in rows}
    # What it forked has its command line too, until it gives itself another.
    roots = [row for row in rows if int(row[1]) not in pids]
    if len(roots) > 1:
        raise BoxError(
            f"{len(roots)} processes run production's command: {', '.join(row[0] for row in roots)}",
            hint="which of them is production? end the others",
        )
    for pid, parent, start, own in roots:
        if own == "no":
            raise BoxError(
                f"production runs as process {pid}, which is another login's", hint="log in as the user that runs it"
            )
        if pid == "1":
            raise BoxError(
                "production is process 1 of its container: it cannot be stopped without the container",
                hint="start it below an init, or boot variants in another container",
            )
        del parent
        return Standing(int(pid), start, same[int(pid)])
    return None


def runs(cmdline: tuple[str, ...], command: tuple[str, ...]) -> bool:
    """Whether a process with this command line was started by that command.

    The kernel puts the interpreter before a script, and the script's path in place of its name.
    """
    if cmdline == command:
        return True
    script = cmdline[-len(command) :]
    between = len(cmdline) - len(command)
    return (
        1 <= between <= 2
        and script[1:] == command[1:]
        and PurePosixPath(script[0]).is_absolute()
        and (script[0] == command[0] or PurePosixPath(script[0]).name == command[0])
    )


def stop(transport: Transport, standing: Standing, *, deadline_s: float, grace_s: float) -> None:
    """Ends production politely, and what is left of it after the deadline by SIGKILL.

    Raises:
        BoxError: something of it survives that.
    """
    numbers = (str(max(1, round(deadline_s * 100))), str(round(grace_s * 100)))
    argv = ("sh", "-c", _STOP, "coldboot", str(standing.pid), standing.start, *numbers)
    said = transport.run(argv, timeout_s=deadline_s + grace_s + COMMAND_S).stdout
    if said.startswith("left"):
        raise BoxError(
            f"processes of production survive SIGKILL: {said.removeprefix('left').strip()}",
            hint="they hang in the kernel (state D): the driver or the disk; a reboot of the box ends them",
        )


@dataclass(frozen=True, slots=True)
class Again:
    """How production is started again, and its command line as /proc has it."""

    script: bytes
    cmdline: bytes


def capture(transport: Transport, standing: Standing, *, folder: str, log: str) -> Again:
    """Reads how production was started.

    Args:
        transport: the box.
        standing: the process, alive.
        folder: where the script notes on the box that it has begun, in a file `started`.
        log: a file on the box for output that went to a terminal or a pipe.

    Raises:
        BoxError: it cannot be read.
    """
    said = transport.run(("sh", "-c", _READ, "coldboot", str(standing.pid)), timeout_s=COMMAND_S).stdout
    lines = said.splitlines()
    if len(lines) < 5 or not lines[0]:
        raise BoxError(f"production's process {standing.pid} has ended meanwhile", hint="run the same command again")
    cmdline, environ, cwd, out, err = (base64.b64decode(line) for line in lines[:5])
    files = lines[5].strip() if len(lines) > 5 and lines[5].strip().isdigit() else None
    output = (_target(out) or log.encode(), _target(err) or log.encode())
    script = _script(cmdline, environ, cwd, output=output, files=files, started=f"{folder}/started")
    return Again(script, cmdline)


def _target(link: bytes) -> bytes | None:
    """The file that a descriptor writes to; None for a terminal, a pipe, a socket."""
    path = link.removesuffix(b" (deleted)")
    if path == b"/dev/null" or (path.startswith(b"/") and not path.startswith((b"/dev/", b"/proc/", b"/memfd:"))):
        return path
    return None


def _script(
    cmdline: bytes, environ: bytes, cwd: bytes, *, output: tuple[bytes, bytes], files: str | None, started: str
) -> bytes:
    # A process that wrote a title over its environment has entries without `=`: those say nothing.
    pairs = [tuple(entry.split(b"=", 1)) for entry in environ.split(b"\0") if b"=" in entry.lstrip(b"=")]
    names = {name for name, _ in pairs}
    exports = [b"export " + name + b"=" + _quoted(value) for name, value in pairs if _NAME.fullmatch(name)]
    odd = [_quoted(name + b"=" + value) for name, value in pairs if not _NAME.fullmatch(name)]
    unset = [b"-u " + name for name in _SHELLS_OWN if name not in names]
    argv = [_quoted(word) for word in cmdline.removesuffix(b"\0").split(b"\0")]
    out, err = map(_quoted, output)
    lines = (
        b"#!/bin/sh",
        b"# Written by coldboot: starts production as it was.",
        b"cd " + _quoted(cwd) + b" || cd /",
        b"exec </dev/null",
        b"{ : >>" + out + b"; } 2>/dev/null && exec >>" + out,
        b"{ : >>" + err + b"; } 2>/dev/null && exec 2>>" + err,
        b"echo $$ >" + _quoted(started.encode()) + b" 2>/dev/null",
        *([] if files is None else [b"ulimit -S -n " + files.encode() + b" 2>/dev/null"]),
        *([] if b"PATH" in names else [b"unset PATH"]),
        *exports,
        b"exec env " + b" ".join((*unset, *odd, *argv)),
    )
    return b"\n".join(lines) + b"\n"


def _quoted(word: bytes) -> bytes:
    return shlex.quote(word.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
