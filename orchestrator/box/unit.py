"""What a service manager says about one unit and does with it: the types that systemd and plain processes share."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.box import commands
from orchestrator.box.engines import Launch
from orchestrator.box.transports import Stream, Transport
from orchestrator.errors import BoxError, CommandFailed
from orchestrator.records import CommandResult, JournalEntry, ProductionState, StepName
from orchestrator.redact import redact_argv, redact_text

COMMAND_S = 30.0
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What is there before we change anything; our own drop-in never counts.

    `argv` and `env` are what the unit itself asks for. `environment_files` override `Environment=`, so ours has to be
    one too where they exist. `main_pid` is None when it does not run. `cache_root` is where cold caches go unless the
    box says otherwise; None: below `home`. `helper`: what needs root is done by `coldboot-box` on the box. `privileged`
    are its commands that run with more rights than its user, `mentioned` the variables that its own commands name.
    """

    name: str
    exists: bool
    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    user: str
    home: str
    active: bool
    enabled: bool | None
    drop_ins: tuple[str, ...] = ()
    main_pid: int | None = None
    environment_files: tuple[str, ...] = ()
    our_drop_in: bool = False
    cache_root: str | None = None
    helper: bool = False
    privileged: tuple[str, ...] = ()
    mentioned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitState:
    """What the service manager says now, in systemd's words. `exit_status` of a signal is 128 + its number."""

    active_state: str
    sub_state: str
    main_pid: int | None
    invocation_id: str | None
    n_restarts: int
    result: str | None
    exit_status: int | None


@dataclass(frozen=True, slots=True)
class Action:
    """One command that changes something, described before it is done.

    `may_fail`: it is fine when there is nothing to do it to. `unless`: it is left out where this path exists already.
    """

    why: str
    argv: tuple[str, ...]
    input: str | None = None
    as_user: str | None = None
    may_fail: bool = False
    unless: str | None = None

    @property
    def text(self) -> str:
        """For a person: the command with its reason, and what it is given; secrets are hidden."""
        sudo = {None: "", "root": "sudo "}.get(self.as_user, f"sudo -u {self.as_user} ")
        given = "".join(f"\n      | {line}" for line in (self.input or "").splitlines())
        return redact_text(f"{sudo}{shlex.join(redact_argv(self.argv))}  # {self.why}{given}")


class EntryStream(Protocol):
    """The entries of one unit as they come; ends when closed, raises BoxError when it broke."""

    def __iter__(self) -> Iterator[JournalEntry]:
        """The entries, oldest first."""

    def close(self) -> None:
        """Ends the iteration, also while it waits."""


class Service(Protocol):
    """One unit on one box, under whatever service manager."""

    name: str
    lock_name: str

    def describe(self) -> UnitFacts:
        """Reads what is there.

        Raises:
            BoxError: no such unit, or one that cannot be measured; says what to run.
        """

    def look(self) -> UnitFacts:
        """The same, also for a login that may not read the journal, or whose units end with its session.

        Raises:
            BoxError: no such unit, or one that cannot be measured by whomever.
        """

    def production(self) -> ProductionState:
        """What must be there after the campaign; after a killed one, what that one had found."""

    def install_actions(self, launch: Launch, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> tuple[Action, ...]:
        """What `install` does."""

    def step_actions(self, launch: Launch) -> dict[StepName, tuple[Action, ...]]:
        """What each step of a boot does to the box; `clean_slate` only where something still runs."""

    def boot_actions(self, launch: Launch) -> tuple[Action, ...]:
        """What one boot does to the box, from install to stop."""

    def install(self, launch: Launch, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Puts our command in place of production's, until `restore` or a reboot."""

    def start(self) -> None:
        """Starts it; returns when the manager has accepted it."""

    def stop(self, *, kill: bool, deadline_s: float) -> None:
        """Stops it: politely until the deadline, then (or with `kill` at once) by killing all of its processes.

        Raises:
            BoxError: something of it still lives.
        """

    def state(self) -> UnitState:
        """What the manager says now."""

    def pids(self) -> tuple[int, ...]:
        """All of its processes, orphans included; empty when nothing of it lives."""

    def ours(self) -> bool:
        """Whether what runs now, if anything does, is a variant and not production."""

    def command(self) -> tuple[str, ...]:
        """The argument vector of its main process, from /proc; empty where it cannot be read."""

    def effective(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """The argument vector and environment of its main process, from /proc; empty where they cannot be read."""

    def cursor(self) -> str:
        """The journal's present end."""

    def follow(self, cursor: str) -> EntryStream:
        """Its entries after `cursor`, the manager's about it, and the kernel's."""

    def restore(self, was: ProductionState) -> None:
        """Our changes away, and started iff it was active. A second call changes nothing.

        Raises:
            RestoreFailed: it is not as it was; says what is left and what to run.
        """

    def arm(self, was: ProductionState, dead_man_s: float) -> None:
        """Makes the box restore by itself when `beat` has not been called for `dead_man_s` seconds."""

    def beat(self) -> None:
        """A sign of life. Raises BoxError when the box has restored by itself meanwhile."""

    def disarm(self) -> None:
        """Takes the timer away. A second call changes nothing."""

    def sudo_needs(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(user, command) that the login must be allowed to run by sudo; empty when it needs none."""

    def sudo_lines(self) -> tuple[str, ...]:
        """The lines of sudoers that the login needs; empty when it needs none."""


def together(transport: Transport, actions: Sequence[Action], *, timeout_s: float = COMMAND_S) -> CommandResult:
    """Do several actions in one round trip; the first that fails ends it (unless it `may_fail`).

    Raises:
        CommandFailed: names the action's own command and what it said; when sudo refused it, the line that is missing.
    """
    lines = []
    for index, action in enumerate(actions):
        line = shlex.join(transport.as_user(action.argv, action.as_user))
        if action.input is not None:
            line = f"printf %s {shlex.quote(action.input)} | {line} >/dev/null"
        else:
            line += " </dev/null"
        if action.unless is not None:
            line = f"[ -e {shlex.quote(action.unless)} ] || {line}"
        otherwise = ":" if action.may_fail else f"{{ s=$?; echo {_FAILED}{index} >&2; exit $s; }}"
        lines.append(f"{line} || {otherwise}")
    # On standard input: an argv is seen by everybody on the box, and what is given may hold a key.
    result = transport.run(("sh", "-s"), input="\n".join(lines) + "\n", timeout_s=timeout_s, check=False)
    if result.status != 0:
        raise _failure(transport, actions, result)
    return result


_FAILED = "coldboot-failed:"


def _failure(transport: Transport, actions: Sequence[Action], result: CommandResult) -> CommandFailed:
    said, _, index = result.stderr.rpartition(_FAILED)
    if not index.strip().isdigit():
        return CommandFailed("sh", result.status, result.stderr or result.stdout)
    action = actions[int(index)]
    hint = None
    if commands.refused(said, result.status) is not None and action.as_user is not None:
        needed = {commands.sudoers_line(transport.user, action.as_user, each.argv) for each in actions if each.as_user}
        hint = "allow it on the box (`visudo -f /etc/sudoers.d/coldboot`):" + "".join(
            f"\n      {line}" for line in sorted(needed)
        )
    return CommandFailed(shlex.join(action.argv), result.status, said, hint=hint)


@dataclass(slots=True)
class LineEntries:
    """Turns the lines of a stream into entries; `read` gives those of one line, given the next index."""

    stream: Stream
    read: Callable[[str, int], Sequence[JournalEntry]]
    closed: bool = False

    def __iter__(self) -> Iterator[JournalEntry]:
        index = 0
        for line in self.stream.lines():
            for entry in self.read(line, index):
                yield entry
                index += 1
        # Without a status it was we who ended it: by `close`, or with the whole transport.
        if not self.closed and self.stream.status is not None:
            said = self.stream.stderr.strip().splitlines()[-1:]
            raise BoxError(
                f"`{shlex.join(self.stream.argv)}` ended with status {self.stream.status}"
                + (f": {said[0]}" if said else "")
            )

    def close(self) -> None:
        """Ends the command and the iteration."""
        self.closed = True
        self.stream.close()
