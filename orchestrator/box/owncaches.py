"""`cache: clear` on a box: what may be set aside, an empty directory before each boot, and put back. See `aside`.

The same things hold for a system unit and for one of the user's own manager; only who is asked differs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from orchestrator.box import aside
from orchestrator.box.aside import Aside
from orchestrator.box.caches import AS_USER
from orchestrator.box.engines import Engine, OwnCache
from orchestrator.box.transports import Transport
from orchestrator.box.unit import COMMAND_S, Action, UnitFacts, together
from orchestrator.errors import BoxError, CommandFailed

PUT_BACK_S = 600.0
_ROOTS = ("/var/cache", "/var/lib", "/var/tmp", "/tmp")  # noqa: S108 - where caches lie, besides a home
_WEIGHTS = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "XDG_CACHE_HOME")
_AT_HOME = ("", "/.cache", "/.cache/huggingface", "/.config", "/.local", "/.ssh", "/.local/share")


@dataclass(slots=True)
class OwnCaches:
    """The cache directories of one unit, as a campaign clears them and anybody puts them back.

    as_user who does what the service manager needs: root, or None for a unit of the login's own manager
    ctl     `systemctl` of that manager
    kept    directories in which production wrote while its caches were aside; they stand beside the original
    """

    transport: Transport
    names: Aside
    as_user: str | None
    ctl: tuple[str, ...]
    kept: list[str] = field(default_factory=list)

    # --- before a campaign -----------------------------------------------------------------------------------------

    def resolve(
        self, unit: UnitFacts, own: Sequence[OwnCache], precious: Sequence[str], cache_root: str | None
    ) -> tuple[tuple[OwnCache, ...], tuple[str, ...]]:
        """Where a unit's caches really are, and why some of them must be left alone; changes nothing.

        Args:
            unit: whose they are.
            own: what its environment says.
            precious: paths that no cache may hold: weights, programs.
            cache_root: of the box; caches may lie below it too.

        Raises:
            BoxError: the box could not be asked.
        """
        odd = [f"{one.path!r} is no plain path" for one in own if set(one.path) & set("\n\t")]
        if odd:
            return (), tuple(odd)
        said = self._run(unit, "check", self._told(unit, own, precious, cache_root)).splitlines()
        found: dict[str, OwnCache] = {}
        problems = []
        for one, line in zip(own, said, strict=True):
            what, _, rest = line.partition(" ")
            if what == "at":
                found[rest] = replace(one, path=rest)
            else:
                problems.append(rest)
        # What lies in another one is set aside with it.
        outer = (one for path, one in found.items() if not any(path.startswith(f"{other}/") for other in found))
        return tuple(outer), tuple(problems)

    # --- before a boot ---------------------------------------------------------------------------------------------

    def empty(
        self, unit: UnitFacts, own: Sequence[OwnCache], precious: Sequence[str], cache_root: str | None
    ) -> tuple[str, ...]:
        """Empty directories in place of the unit's own, which are set aside unless they are so already.

        Args:
            unit: whose they are; it is stopped.
            own: as `resolve` has found them.
            precious: as for `resolve`.
            cache_root: as for `resolve`.

        Raises:
            BoxError: a directory that must not or cannot be set aside. What was done can be put back.
        """
        paths = tuple(one.path for one in own)
        told = self._told(unit, own, precious, cache_root)
        listed = self.listed()
        if not set(paths) <= set(listed):
            self._guard(listed, paths)
        try:
            said = self._run(unit, "empty", told)
        except CommandFailed as error:
            # Production was started since, by its manager or by somebody: then it has put everything back and is gone.
            if error.status != aside.UNGUARDED:
                raise
            self._guard(listed, paths)
            said = self._run(unit, "empty", told)
        self.kept += [line.rpartition(" is kept in ")[2] for line in said.splitlines() if " is kept in " in line]
        return paths

    def _guard(self, listed: Sequence[str], paths: Sequence[str]) -> None:
        """The unit that puts back, enabled and on the disk, before anything is set aside."""
        names = self.names
        together(self.transport, self.guard_actions((*listed, *(each for each in paths if each not in listed))))
        folders = (names.base, *(link.rpartition("/")[0] for link in names.links))
        self.transport.run(("sync", names.path, *folders), timeout_s=COMMAND_S)

    def guard_actions(self, directories: Sequence[str]) -> tuple[Action, ...]:
        """What makes the unit that puts these directories back."""
        new = f"{self.names.path}.new"
        return (
            *((self._act("a place for it", "mkdir", "-p", self.names.base),) if self.names.owner is None else ()),
            self._act("what puts the caches back", "tee", new, given=self.names.text(directories)),
            self._act("whole or not at all", "mv", "-f", new, self.names.path),
            self._act("also after a power cut", *self.ctl, "enable", self.names.name),
        )

    def _act(self, why: str, *argv: str, given: str | None = None) -> Action:
        return Action(why, argv, input=given, as_user=self.as_user)

    # --- afterwards ------------------------------------------------------------------------------------------------

    @property
    def put_back_action(self) -> Action:
        """Puts everything back that the unit lists; without our drop-in, or it does nothing."""
        return replace(self._act("the caches back", *self.ctl, "start", self.names.name), may_fail=True)

    def listed(self) -> tuple[str, ...]:
        """The directories that may be set aside at this moment; none where no campaign has done it."""
        said = self.transport.run(("cat", "--", self.names.path), timeout_s=COMMAND_S, check=False)
        return aside.directories(said.stdout) if said.status == 0 else ()

    def left(self, unit: UnitFacts, paths: Sequence[str]) -> tuple[str, ...]:
        """Of these directories, those that are still set aside; notes what production had written meanwhile."""
        if not paths:
            return ()
        said = self._run(unit, "left", {"own": "\n".join(paths)}).splitlines()
        rows = [line.partition(" ") for line in said]
        self.kept += [path for kind, _, path in rows if kind == "kept" and path not in self.kept]
        return tuple(path for kind, _, path in rows if kind == "aside")

    # --- how -------------------------------------------------------------------------------------------------------

    def _told(
        self, unit: UnitFacts, own: Sequence[OwnCache], precious: Sequence[str], cache_root: str | None
    ) -> dict[str, str]:
        home = unit.env.get("HOME") or unit.home
        roots = (home, *_ROOTS, *((cache_root,) if cache_root else ()))
        at_home = (f"{home}{below}" for below in _AT_HOME)
        told = (unit.env[name] for name in _WEIGHTS if unit.env.get(name))
        return {
            "own": "\n".join("\t".join((one.path, *one.carried)) for one in own),
            "roots": "\n".join(roots),
            "precious": "\n".join((*at_home, *told, *precious)),
            "pattern": self.names.pattern,
            "guard": self.names.path,
            "link": self.names.links[1],
        }

    def _run(self, unit: UnitFacts, what: str, told: dict[str, str]) -> str:
        script = "".join(f"{name}={shlex.quote(value)}\n" for name, value in told.items()) + aside.SCRIPTS[what]
        try:
            return self.transport.run(AS_USER, input=script, timeout_s=PUT_BACK_S, as_user=unit.user).stdout
        except CommandFailed as error:
            refusals = [line for line in error.tail.splitlines() if line.startswith(aside.REFUSED)]
            if error.status != 3 or not refusals:
                raise
            what = refusals[-1].removeprefix(aside.REFUSED)
            hint = "`cache: cold` needs nothing of the unit's own directories"
            raise BoxError(f"cache: clear: {what}", hint=hint) from error


def stores_of(engine: Engine, unit: UnitFacts, environments: Sequence[dict[str, str]]) -> tuple[OwnCache, ...]:
    """Every cache directory that a unit or one of its variants would use, each once.

    Args:
        engine: which stores there are.
        unit: whose environment it is.
        environments: what each variant sets beside or over it.
    """
    found: dict[str, OwnCache] = {}
    for own in environments or ({},):
        for each in engine.own_caches(unit.env | own, home=unit.home, user=unit.user):
            known = found.get(each.path)
            names = (*(known.carried if known else ()), *each.carried)
            found[each.path] = replace(each, carried=tuple(dict.fromkeys(names)))
    return tuple(found.values())


def precious_of(argv: Sequence[str]) -> tuple[str, ...]:
    """The paths in a command: programs, weights, templates; none of them lies in a compile cache."""
    values = (word.partition("=")[2] if re.match(r"--?[\w-]+=/", word) else word for word in argv)
    return tuple(dict.fromkeys(value.rstrip("/") for value in values if re.match(r"/[^\n]+$", value)))
