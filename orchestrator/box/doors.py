"""Who does on the box what only root may: sudo with a list of exact commands, or root's own helper.

`SudoDoor` is the plain way: systemctl and the writing of our files, each an exact command that sudoers names; whoever
may do that is root, as a drop-in can say anything. `HelperDoor` is the recommended one: `coldboot-box`, which writes
nothing but what Coldboot writes, for the units that root has named (see `coldboot_box.py`). Both are the same actions
in the same order; the helper does those that follow one another in one call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.box import coldboot_box
from orchestrator.box.commands import HELPER
from orchestrator.box.deadman import BEAT, DeadMan
from orchestrator.box.unit import Action, UnitFacts
from orchestrator.errors import BoxError, UsageError


@dataclass(frozen=True, slots=True)
class Places:
    """Where the things of one unit are.

    unit        the unit's full name
    login       who reaches the box
    as_user     who does what is done: root, or None for a unit of the login's own manager
    ctl         `systemctl` of that manager
    directory   of our files; `drop_in` and `env_file` lie in it
    dead        the restore that the box does by itself
    """

    unit: str
    login: str
    as_user: str | None
    ctl: tuple[str, ...]
    directory: str
    drop_in: str
    env_file: str
    dead: DeadMan


class Door(Protocol):
    """What is changed on the box, as actions."""

    def install(self, drop_in: str, variables: str, *, whole: bool) -> tuple[Action, ...]:
        """Our files; `whole`: the drop-in too, and systemd reads it. Raises UsageError for what cannot be installed."""

    def start(self) -> Action:
        """Starts the unit, without waiting."""

    def stop(self) -> Action:
        """Stops it politely."""

    def kill(self) -> tuple[Action, ...]:
        """Kills all of its processes."""

    def restore(self, *, active: bool) -> tuple[Action, ...]:
        """Our files away; started when it was `active`."""

    def arm(self, *, active: bool, dead_man_s: float, sweep: str = ":") -> tuple[Action, ...]:
        """The restore that the box does by itself; `sweep` is the command that takes our cold caches away."""

    def disarm(self) -> tuple[Action, ...]:
        """That away."""


# --- sudo, or nothing at all where none is needed --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SudoDoor:
    """Each change is one command of the box's own programs."""

    at: Places

    def _do(self, why: str, *argv: str, given: str | None = None, may_fail: bool = False) -> Action:
        return Action(why, argv, input=given, as_user=self.at.as_user, may_fail=may_fail)

    def _ctl(self, why: str, *words: str, may_fail: bool = False) -> Action:
        return self._do(why, *self.at.ctl, *words, may_fail=may_fail)

    def install(self, drop_in: str, variables: str, *, whole: bool) -> tuple[Action, ...]:
        """See `Door.install`."""
        at = self.at
        ours = self._do("what this boot runs", "tee", at.env_file, given=variables)
        if not whole:
            return (ours,)
        place = Action(
            "a place for our drop-in", ("mkdir", "-p", at.directory), as_user=at.as_user, unless=at.directory
        )
        return (
            place,
            self._do("what stays the same for all boots", "tee", at.drop_in, given=drop_in),
            # It may hold keys; systemd reads it as whoever the manager is.
            self._do("a file that nobody else reads", "install", "-m", "0600", "/dev/null", at.env_file),
            ours,
            self._ctl("systemd reads it", "daemon-reload"),
        )

    def start(self) -> Action:
        """See `Door.start`."""
        return self._ctl("start it, without waiting", "start", "--no-block", self.at.unit)

    def stop(self) -> Action:
        """See `Door.stop`."""
        return self._ctl("stop it when it serves", "stop", self.at.unit)

    def kill(self) -> tuple[Action, ...]:
        """See `Door.kill`."""
        why = "kill all of its processes when it hangs"
        return (self._ctl(why, "kill", "-s", "KILL", self.at.unit, may_fail=True), self.stop())

    def restore(self, *, active: bool) -> tuple[Action, ...]:
        """See `Door.restore`."""
        return (
            *self.kill(),
            self._do("our drop-in away", "rm", "-f", *self.at.dead.ours),
            self._do("and its directory if it is empty", "rmdir", self.at.directory, may_fail=True),
            self._ctl("systemd reads that", "daemon-reload"),
            self._ctl("our failures forgotten", "reset-failed", self.at.unit, may_fail=True),
            *((self.start(),) if active else ()),
        )

    def arm(self, *, active: bool, dead_man_s: float, sweep: str = ":") -> tuple[Action, ...]:
        """See `Door.arm`."""
        dead = self.at.dead
        service, timer = dead.unit_paths
        base = timer.rpartition("/")[0]
        script = dead.script_text(active=active, dead_man_s=dead_man_s, sweep=sweep)
        return (
            # One that is just restoring must not end under the campaign that takes over.
            self._ctl("no older restore any more", "stop", dead.timer, dead.service, may_fail=True),
            self._do("a place for the restore", "mkdir", "-p", dead.run, base),
            self._do("a heartbeat", "install", "-o", self.at.login, "-m", "0644", "/dev/null", dead.heart),
            Action("its first beat", ("sh", "-c", BEAT, "coldboot", dead.heart)),
            self._do("the restore", "tee", dead.script, given=script),
            self._do("its service", "tee", service, given=dead.service_text()),
            self._do("its timer", "tee", timer, given=dead.timer_text(dead_man_s)),
            self._ctl("systemd reads them", "daemon-reload"),
            self._ctl("from now on the box restores by itself", "restart", dead.timer),
        )

    def disarm(self) -> tuple[Action, ...]:
        """See `Door.disarm`."""
        dead = self.at.dead
        return (
            self._ctl("no restore by itself any more", "stop", dead.timer, dead.service, may_fail=True),
            self._do("its units away", "rm", "-f", *dead.unit_paths),
            self._do("its script and heartbeat away", "rm", "-rf", dead.run),
            self._ctl("systemd reads that", "daemon-reload"),
        )


# --- the helper ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    """What the helper on a box says of itself, and allows for one unit.

    version    of the helper; `digest` is the SHA-256 of its file
    known      whether this login may use it for this unit
    caches     roots below which cold caches may lie
    clears     caches of the unit's own that may be set aside
    env        variables that may be set although they can load code
    programs   commands besides the installed one
    root       the unit may run as root
    """

    version: int
    digest: str
    known: bool = False
    caches: tuple[str, ...] = ()
    clears: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    programs: tuple[tuple[str, ...], ...] = ()
    root: bool = False


def read_granted(text: str, unit: str) -> Granted | None:
    """What `coldboot-box version` says; None when it says nothing, as it is not there or not allowed."""
    first = re.match(r"coldboot-box (\d+)\nsha256 ([0-9a-f]{64})\n", text)
    if first is None:
        return None
    sections = re.split(r"^unit (.*)\n", text[first.end() :], flags=re.MULTILINE)
    of_units = dict(zip(sections[1::2], sections[2::2], strict=True))
    said = [line.partition(" ")[::2] for line in of_units.get(unit, "").splitlines()]
    return Granted(
        int(first[1]),
        first[2],
        unit in of_units,
        caches=tuple(value for word, value in said if word == "cache"),
        clears=tuple(value for word, value in said if word == "clear"),
        env=tuple(value for word, value in said if word == "env"),
        programs=tuple(tuple(value.split()) for word, value in said if word == "program"),
        root=("root", "yes") in said,
    )


def grant_problem(granted: Granted | None, unit: UnitFacts, place: str) -> tuple[str, str] | None:
    """What the helper would refuse at every boot of a unit, whatever the variant, and what to run; None: nothing.

    Args:
        granted: what it allows.
        unit: the unit.
        place: where its cold caches would lie.
    """
    conf = f"{coldboot_box.CONFIG}/{unit.name}.conf"
    if granted is None:
        return None
    if unit.user == "root" and not granted.root:
        return (
            f"{unit.name} runs as root: whoever may set its flags is root, and coldboot-box refuses that",
            f"give the unit a User= of its own; or, if its callers may be root: echo 'root yes' | sudo tee -a {conf}",
        )
    if unit.privileged and not granted.root:
        return coldboot_box.privileged_words(unit.name, unit.privileged[0]), f"systemctl edit --full {unit.name}"
    if not coldboot_box.below(place, granted.caches):
        return (
            f"cold caches would lie in {place}, which coldboot-box does not allow for {unit.name}",
            f"echo 'cache {place}' | sudo tee -a {conf}   # on the box",
        )
    return None


def clear_problem(clears: Sequence[str], unit: str, paths: Sequence[str]) -> tuple[str, str] | None:
    """Which of a unit's own caches the helper would not set aside, and what to run on the box; None: it sets all aside.

    Args:
        clears: what the helper allows.
        unit: the unit's name.
        paths: the caches.
    """
    missing = [path for path in paths if path not in clears]
    if not missing:
        return None
    odd = [path for path in missing if not coldboot_box.may_clear(path)]
    if odd:
        return f"coldboot-box sets no directory aside that is called {odd[0]!r}", "`root: sudo` of the box does"
    said = f"coldboot-box does not allow {unit}'s own caches: {' '.join(missing)}"
    return said, f"printf 'clear %s\\n' {' '.join(missing)} | sudo tee -a {coldboot_box.CONFIG}/{unit}.conf"


@dataclass(frozen=True, slots=True)
class HelperDoor:
    """Each change is one call of the helper.

    `installed` is production's own command, `mentioned` the variables that production's own commands name.
    """

    at: Places
    granted: Granted
    installed: tuple[str, ...]
    mentioned: tuple[str, ...] = ()

    def _call(self, why: str, *words: str, given: str | None = None) -> Action:
        return Action(why, (HELPER, self.at.unit, *words), input=given, as_user=self.at.as_user)

    def install(self, drop_in: str, variables: str, *, whole: bool) -> tuple[Action, ...]:
        """See `Door.install`. What the helper would refuse is refused here, before anything is taken down."""
        self._refuse(drop_in, variables)
        if not whole:
            return (self._call("what this boot runs", "arguments", given=variables),)
        both = f"{drop_in}{coldboot_box.CUT}{variables}"
        return (self._call("our drop-in and what this boot runs, and systemd reads it", "install", given=both),)

    def _refuse(self, drop_in: str, variables: str) -> None:
        granted = self.granted
        heads = (*granted.programs, coldboot_box.head(self.installed))
        try:
            program = coldboot_box.check_drop_in(drop_in, self.at.unit, granted.caches)
            found = coldboot_box.read_variables(variables)
            coldboot_box.check_variables(found, granted.env, granted.caches, self.mentioned)
            words = coldboot_box.read_arguments(found.get(coldboot_box.ARGS, ""))
            coldboot_box.check_command((program, *words), heads)
        except coldboot_box.Refused as why:
            raise UsageError(
                f"coldboot-box on the box would refuse it: {why}",
                hint=f"root allows it in {coldboot_box.CONFIG}/{self.at.unit}.conf; or `root: sudo` of the box",
            ) from why

    def start(self) -> Action:
        """See `Door.start`."""
        return self._call("start it, without waiting", "start")

    def stop(self) -> Action:
        """See `Door.stop`."""
        return self._call("stop it when it serves", "stop")

    def kill(self) -> tuple[Action, ...]:
        """See `Door.kill`."""
        return (self._call("kill all of its processes when it hangs", "kill"),)

    def restore(self, *, active: bool) -> tuple[Action, ...]:
        """See `Door.restore`."""
        return (self._call("our drop-in away, as it was before", "restore", *(("start",) if active else ())),)

    def arm(self, *, active: bool, dead_man_s: float, sweep: str = ":") -> tuple[Action, ...]:  # noqa: ARG002 - its own
        """See `Door.arm`."""
        was = "active" if active else "inactive"
        return (self._call("from now on the box restores by itself", "arm", f"{dead_man_s:.3f}", was),)

    def disarm(self) -> tuple[Action, ...]:
        """See `Door.disarm`."""
        return (self._call("no restore by itself any more", "disarm"),)


def choose(
    at: Places,
    wanted: str | None,
    granted: Granted | None,
    installed: Sequence[str],
    install: str,
    *,
    mentioned: Sequence[str] = (),
) -> Door:
    """The way that is used: the helper where it is there and allowed, unless the box says `root: sudo`.

    Args:
        at: the unit.
        wanted: the box's `root:`.
        granted: what the helper said; None: there is none, or it may not be used.
        installed: production's own command.
        install: the command that installs the helper, for whoever is told to.
        mentioned: variables that production's own commands name.

    Raises:
        BoxError: the helper is asked for and cannot be used, or it is another version than ours.
    """
    if at.as_user is None or wanted == "sudo" or (granted is None and wanted is None):
        return SudoDoor(at)
    if granted is None:
        raise BoxError(
            f"coldboot-box cannot be used by {at.login}: it is not installed, or sudo does not allow it",
            hint=f"install it: {install}",
        )
    if granted.version != coldboot_box.VERSION:
        age = "older" if granted.version < coldboot_box.VERSION else "newer"
        raise BoxError(
            f"coldboot-box on the box is version {granted.version}, {age} than ours ({coldboot_box.VERSION})",
            hint=f"install ours: {install}"
            if age == "older"
            else "use the coldboot that installed it, or `root: sudo`",
        )
    if not granted.known:
        if wanted is None:
            return SudoDoor(at)
        raise BoxError(f"coldboot-box does not know {at.unit}, or not for {at.login}", hint=f"add it: {install}")
    return HelperDoor(at, granted, tuple(installed), tuple(mentioned))
