r"""How one argv becomes one command line on a box, and what its answer means; the same for every transport.

Every command runs under a small `sh` of ours. It says its process id first (`\x1ecoldboot:PID`), so that a command
that does not end by its deadline can be killed with its whole process group without having asked before; everything
that a chatty login shell prints before that mark is dropped. A long-running command has a second, waiting shell at its
side: when the standard input ends, because we closed it or because we died, the process group is killed. Over a network
the end may never be told (our machine lost its power): there the waiting shell wants a heartbeat too.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.errors import BoxError, CommandFailed, CommandTimeout
from orchestrator.records import CommandResult

OUTPUT_LIMIT = 16 * 2**20
STDERR_LIMIT = 256 * 2**10
LINE_LIMIT = 2**20
KILL_S = 5.0

MARK = b"\x1ecoldboot:"

# LC_ALL: sudo's and systemctl's words are read by us. PATH: a login without root often has no sbin.
_PRELUDE = 'export LC_ALL=C.UTF-8 PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"; printf "\\036coldboot:%s\\n" $$; '
# Not `exec`: the shell stays and turns a death by signal into 128 + signal, which ssh would not tell.
_RUN = _PRELUDE + '"$@"; exit $?'
# `read` is the shell's own: no further process waits beside the command.
_BESIDE = (
    _PRELUDE
    + "exec 3<&0; (while {waits}; do :; done; kill -KILL 0) >/dev/null 2>&1 & "
    + '"$@" </dev/null 3<&-; status=$?; kill $! 2>/dev/null; exit $status'
)
_WATCHED = _BESIDE.replace("{waits}", "read -r line <&3")
# dash cannot wait for input with a limit. --foreground: all of it stays in one process group.
_BEATEN = _BESIDE.replace("{waits}", '[ "$(timeout --foreground LIMIT head -c 1 <&3)" = . ]')
BEAT_EXPIRES_S = 120
BEAT = "."


def run_line(argv: Sequence[str]) -> tuple[str, ...]:
    """The argv of `sh` that runs one command to its end, with our standard input as its own."""
    return ("sh", "-c", _RUN, "coldboot", *argv)


def stream_line(argv: Sequence[str], *, keep_stdin: bool, expires_s: float | None = None) -> tuple[str, ...]:
    """The argv of `sh` that runs a long command, which dies when standard input ends.

    With `keep_stdin` the standard input is the command's own, and to end with it is its own business (as `cat` does).
    With `expires_s` it also dies when no `BEAT` came on its standard input for so long.
    """
    watched = _WATCHED if expires_s is None else _BEATEN.replace("LIMIT", f"{expires_s:g}")
    return ("sh", "-c", _RUN if keep_stdin else watched, "coldboot", *argv)


def kill_line(pid: int, *, with_sudo: bool) -> tuple[str, ...]:
    """The argv of `sh` that kills the process group of a command of ours.

    A command under sudo belongs to root and cannot be killed by its login; sudo is asked for that too, in vain where
    sudoers allows only named commands.
    """
    kill = f"kill -s KILL -- -{pid}"
    if not with_sudo:
        return ("sh", "-c", f"{kill} 2>/dev/null; exit 0")
    # A group of which only root's processes are left answers "not permitted"; one that is dead but not yet reaped
    # answers nothing.
    look = f"said=$(LC_ALL=C kill -s 0 -- -{pid} 2>&1)"
    gone = 'case "$said" in *"No such process"*) exit 0;; esac'
    wait = f"for i in 1 2 3 4 5 6 7 8; do {look}; {gone}; sleep 0.05; done"
    return ("sh", "-c", f'{{ {kill}; sudo -n -- {kill}; }} 2>/dev/null; {wait}; [ -z "$said" ]')


def split_mark(output: bytes) -> tuple[int | None, bytes]:
    """Cut our shell's first line off: its process id (None: it has not come yet), and what the command itself said."""
    at = output.find(MARK)
    end = output.find(b"\n", at)
    if at < 0 or end < 0:
        return None, b""
    digits = output[at + len(MARK) : end]
    return (int(digits) if digits.isdigit() else None), output[end + 1 :]


# --- sudo ------------------------------------------------------------------------------------------------------------


def as_user_argv(argv: Sequence[str], user: str, *, by: Literal["sudo", "runuser"]) -> tuple[str, ...]:
    """The argv that runs `argv` as another user without asking for a password."""
    if by == "runuser":
        return ("runuser", "-u", user, "--", *argv)
    if user == "root":
        return ("sudo", "-n", "--", *argv)
    return ("sudo", "-n", "-u", user, "--", *argv)


HELPER = "/usr/local/sbin/coldboot-box"
"""Root's own program on the box, which checks its arguments itself (`coldboot_box.py`): sudoers allows it with any."""

# sudoers(5): what its own reader would take, and what its patterns would. A backslash must survive both.
_SUDOERS_SPECIAL = re.compile(r"[,:=#*?\[\]!^]")


def sudoers_line(login: str, user: str, argv: Sequence[str], *, path: str | None = None) -> str:
    """The line of sudoers that allows `login` exactly this command as `user`, without a password.

    `path` is where the program stands on the box (sudoers wants it absolute); left out, `/usr/bin` is assumed for a
    bare name. Special characters are escaped as sudoers(5) asks, so that no argument is taken for a pattern.
    """
    program = path or (argv[0] if "/" in argv[0] else f"/usr/bin/{argv[0]}")
    if program == HELPER:
        return f"{login} ALL=({user}) NOPASSWD: {HELPER}"
    words = [_SUDOERS_SPECIAL.sub(r"\\\g<0>", word.replace("\\", 4 * "\\")) for word in (program, *argv[1:])]
    # Without arguments sudoers would allow any: "" allows none.
    allowed = " ".join(words) if len(words) > 1 else f'{words[0]} ""'
    return f"{login} ALL=({user}) NOPASSWD: {allowed}"


# `command -v` would answer with the shell's own printf or kill; sudo looks where its secure_path says.
FIND = """
IFS=:
for folder in /usr/local/sbin /usr/local/bin /usr/sbin /usr/bin /sbin /bin $PATH; do
    [ -x "$folder/$1" ] && { echo "$folder/$1"; exit 0; }
done
"""
"""A script that says where a program stands, for sudoers."""
_REFUSALS = re.compile(
    r"^(?:sudo: (?:a password is required|a terminal is required|sorry, you must have a tty|no tty present)"
    r"|Sorry, user \S+ (?:is not allowed to execute|may not run sudo)"
    r"|\S+ is not (?:in the sudoers file|allowed to run sudo)"
    r"|sudo: (?:unknown user|\S+ is not in the sudoers file|I'm sorry \S+\. I'm afraid I can't do that))",
    re.MULTILINE,
)
_NO_SUDO = re.compile(r"sudo: (?:command )?not found$", re.MULTILINE)


def refused(stderr: str, status: int) -> str | None:
    """The line in which sudo itself refused, None when it was not sudo."""
    if status == 0:
        return None
    found = _REFUSALS.search(stderr) or (_NO_SUDO.search(stderr) if status == 127 else None)
    return None if found is None else stderr[found.start() :].splitlines()[0]


def refusal(argv: Sequence[str], user: str, *, login: str, line: str, status: int, path: str | None) -> CommandFailed:
    """The error of a command that sudo refused, with the line of sudoers that is missing."""
    if "not found" in line:
        hint = f"sudo is not installed on the box: install it, or log in as {user}"
    elif "unknown user" in line:
        hint = f"the box has no user {user}"
    else:
        allowed = sudoers_line(login, user, argv, path=path)
        hint = f"allow it on the box (`visudo -f /etc/sudoers.d/coldboot`):\n      {allowed}"
    return CommandFailed(shlex.join(argv), status, line, hint=hint)


# --- what an answer means --------------------------------------------------------------------------------------------


def failed(result: CommandResult) -> CommandFailed:
    """The error of a command whose status is not 0: what it said on stderr, or else on stdout."""
    hint = None
    if result.status == 127:
        hint = f"`{result.argv[0]}` is not there, or not in the PATH of this login"
    said = result.stderr if result.stderr.strip() else result.stdout
    return CommandFailed(shlex.join(result.argv), result.status, said, hint=hint)


def timed_out(argv: Sequence[str], timeout_s: float, *, killed: bool, pid: int | None, stderr: str) -> CommandTimeout:
    """The error of a command that did not end by its deadline."""
    shown = shlex.join(argv)
    last = "".join(f"\n    {line}" for line in stderr.strip().splitlines()[-10:])
    if killed:
        return CommandTimeout(f"`{shown}` did not end within {timeout_s:g} s and was killed{last}")
    where = "" if pid is None else f" (process group {pid})"
    return CommandTimeout(
        f"`{shown}` did not end within {timeout_s:g} s{last}",
        hint=f"it may still be running on the box{where}: it could not be killed by this login",
    )


def too_much(argv: Sequence[str]) -> BoxError:
    """The error of a command that printed more than we keep."""
    return BoxError(
        f"`{shlex.join(argv)}` printed more than {OUTPUT_LIMIT // 2**20} MiB and was killed",
        hint="ask it for less",
    )


class Lines:
    """Cuts arriving bytes into lines; of a line longer than `LINE_LIMIT` bytes only so many are kept."""

    def __init__(self) -> None:
        self._rest = b""
        self._begun = False

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes, without their ends."""
        self._rest += data
        if not self._begun and not self._begin():
            return []
        *whole, rest = self._rest.split(b"\n")
        self._rest = rest[:LINE_LIMIT]
        return [_text(line[:LINE_LIMIT]) for line in whole]

    def end(self) -> list[str]:
        """What is left at the end of the output, when it did not end in a newline."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest and self._begun else []

    def _begin(self) -> bool:
        pid, rest = split_mark(self._rest)
        self._begun = pid is not None
        self._rest = rest if self._begun else self._rest[-LINE_LIMIT:]
        return self._begun


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace").removesuffix("\r")


# --- one way to run, whatever reaches the box ------------------------------------------------------------------------


@dataclass
class Raw:
    """What came of one command line. `end` says why we stopped reading."""

    end: Literal["ended", "late", "too_much"]
    status: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""


def not_run(argv: Sequence[str], raw: Raw) -> BoxError:
    """The error of a login whose shell did something else than to run our command."""
    said = (raw.stdout + raw.stderr).decode("utf-8", errors="replace").strip().splitlines()[-10:]
    return BoxError(
        f"`{shlex.join(argv)}` was not run; the login answered:" + "".join(f"\n    {line}" for line in said),
        hint="the login needs a shell of its own on the box: no nologin, no forced command",
    )


class Runner(ABC):
    """`run` of every transport: quoting, sudo, deadline, limits and errors are the same wherever the box is."""

    def __init__(self, *, user: str, is_root: bool, sudo: bool | None) -> None:
        self.user = user
        self.is_root = is_root
        self._sudo = sudo

    def as_user(self, argv: Sequence[str], user: str | None) -> tuple[str, ...]:
        """The argv by which this login runs `argv` as `user`: as it is, under sudo, or under runuser where it is root.

        `sudo: true` of the box asks sudo even as root; `sudo: false` never does.
        """
        if user is None or (self._sudo is not True and user in (self.user, "root" if self.is_root else self.user)):
            return tuple(argv)
        if self._sudo is not True and self.is_root:
            return as_user_argv(argv, user, by="runuser")
        return tuple(argv) if self._sudo is False else as_user_argv(argv, user, by="sudo")

    @abstractmethod
    def _execute(self, line: tuple[str, ...], data: bytes | None, timeout_s: float) -> Raw:
        """Run one argv to its end, its deadline or the limit of its output; leave it running in the latter cases."""

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        input: str | bytes | None = None,  # noqa: A002 - the word that subprocess uses
        check: bool = True,
        as_user: str | None = None,
    ) -> CommandResult:
        """Run one command on the box to its end.

        Args:
            argv: Program and arguments; no shell reads them.
            timeout_s: Its deadline; a command that is not over by then is killed with its process group.
            input: Its standard input; None: at its end from the start.
            check: Whether a status other than 0 is an error.
            as_user: Who runs it; None: the login.

        Returns:
            Status (128 + n: it died of signal n), both outputs and the seconds it took, the way to the box included.
            Of stderr the last 256 KiB are kept.

        Raises:
            CommandFailed: Status other than 0 and `check`; or sudo refused, whatever `check` says.
            CommandTimeout: Not over by the deadline.
            BoxError: It printed more than 16 MiB on stdout, or the login has no shell to run it.
            Unreachable: The connection was lost.
        """
        data = input.encode() if isinstance(input, str) else input
        full = self.as_user(argv, as_user)
        under_sudo = full[0] == "sudo" and full != tuple(argv)
        started = time.monotonic()
        raw = self._execute(run_line(full), data, timeout_s)
        seconds = time.monotonic() - started
        pid, stdout = split_mark(raw.stdout)
        stderr = raw.stderr.decode("utf-8", errors="replace")
        if raw.end != "ended":
            killed = pid is not None and self._kill(pid, with_sudo=under_sudo)
            raise (
                too_much(argv)
                if raw.end == "too_much"
                else timed_out(argv, timeout_s, killed=killed, pid=pid, stderr=stderr)
            )
        assert raw.status is not None
        if pid is None:
            raise not_run(argv, raw)
        result = CommandResult(
            tuple(argv), raw.status, stdout.decode("utf-8", errors="replace"), stderr, round(seconds, 6)
        )
        if under_sudo and (line := refused(stderr, raw.status)) is not None:
            raise self._refusal(argv, as_user or "root", line, raw.status)
        if check and raw.status != 0:
            raise failed(result)
        return result

    def _kill(self, pid: int, *, with_sudo: bool) -> bool:
        with contextlib.suppress(BoxError):
            return self._execute(kill_line(pid, with_sudo=with_sudo), None, KILL_S).status == 0
        return False

    def _refusal(self, argv: Sequence[str], user: str, line: str, status: int) -> CommandFailed:
        path = None
        if "/" not in argv[0]:
            _, found = split_mark(self._execute(run_line(("sh", "-c", FIND, "sh", argv[0])), None, KILL_S).stdout)
            path = found.decode("utf-8", errors="replace").strip() or None
        return refusal(argv, user, login=self.user, line=line, status=status, path=path)
