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
from orchestrator.box.coldboot_box import AT_HOME, may_clear
from orchestrator.box.commands import HELPER
from orchestrator.box.doors import clear_problem
from orchestrator.box.engines import Engine, OwnCache
from orchestrator.box.transports import Transport
from orchestrator.box.unit import COMMAND_S, Action, UnitFacts, together
from orchestrator.errors import BoxError, CommandFailed

PUT_BACK_S = 600.0
_ROOTS = ("/var/cache", "/var/lib", "/var/tmp", "/tmp")  # noqa: S108 - where caches lie, besides a home
_WEIGHTS = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "XDG_CACHE_HOME")


@dataclass(slots=True)
class OwnCaches:
    """The cache directories of one unit, as a campaign clears them and anybody puts them back.

    as_user who does what the service manager needs: root, or None for a unit of the login's own manager
    ctl     `systemctl` of that manager
    granted which of them the helper on the box sets aside; None where it is not in use
    kept    directories in which production wrote while its caches were aside; they stand beside the original
    """

    transport: Transport
    names: Aside
    as_user: str | None
    ctl: tuple[str, ...]
    granted: tuple[str, ...] | None = None
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
        if self._by_helper(unit):
            own = outermost(own)
            refused = self._refused([one.path for one in own])
            if refused:
                return (), refused
        said = self._run(unit, "check", self._told(unit, own, precious, cache_root)).splitlines()
        found: dict[str, OwnCache] = {}
        problems: list[str] = []
        for one, line in zip(own, said, strict=True):
            what, _, rest = line.partition(" ")
            if what == "at":
                real, _, link = rest.partition("\t")
                found[real] = replace(one, path=real)
                problems += self._linked(one.path, real, link) if self._by_helper(unit) else ()
            else:
                problems.append(rest)
        outer = outermost(tuple(found.values()))
        return outer, tuple(problems) or self._refused([one.path for one in outer])

    def _linked(self, path: str, real: str, link: str) -> tuple[str, ...]:
        """Why the helper would not set a directory aside that is reached by a link; it does what root names itself."""
        wrong = None if real == path or self.granted is None else clear_problem(self.granted, self.names.unit, (real,))
        if wrong is None:
            return ()
        by = f"{link} is a link" if link else "a link leads there"
        return (f"{path} is {real}, as {by}, and coldboot-box follows none: root names {real} too: {wrong[1]}",)

    def _refused(self, paths: Sequence[str]) -> tuple[str, ...]:
        """What the helper on the box would not set aside, with what to run."""
        wrong = None if self.granted is None else clear_problem(self.granted, self.names.unit, paths)
        return () if wrong is None else (f"{wrong[0]}; on the box: {wrong[1]}",)

    def free_mib(self, unit: UnitFacts, own: Sequence[OwnCache]) -> tuple[tuple[int, str], ...]:
        """Free MiB on the disks of these directories, each with the directory at which it was asked."""
        if not own:
            return ()
        said = self._run(unit, "free", {"own": "\n".join(one.path for one in own)}).splitlines()
        rows = dict.fromkeys(line.partition(" ")[::2] for line in said)
        return tuple((int(free) // 1024, at) for free, at in rows if free.isdigit())

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
        listed = self._listed_as_ours()
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
        # What lies in another one comes after it: it can only be put back once that one is.
        together(self.transport, self.guard_actions(tuple(sorted({*listed, *paths}))))
        folders = (names.base, *(link.rpartition("/")[0] for link in names.links))
        self.transport.run(("sync", names.path, *folders), timeout_s=COMMAND_S)

    def guard_actions(self, directories: Sequence[str]) -> tuple[Action, ...]:
        """What makes the unit that puts these directories back."""
        if self.granted is not None:
            given = "".join(f"own={path}\n" for path in directories)
            return (self._helped("what puts the caches back, also after a power cut", "guard", given),)
        new = f"{self.names.path}.new"
        return (
            *((self._act("a place for it", "mkdir", "-p", self.names.base),) if self.names.owner is None else ()),
            self._act("what puts the caches back", "tee", new, given=self.names.text(directories)),
            self._act("whole or not at all", "mv", "-f", new, self.names.path),
            self._act("also after a power cut", *self.ctl, "enable", self.names.name),
        )

    def _helped(self, why: str, what: str, given: str | None) -> Action:
        return Action(why, (HELPER, self.names.unit, "clear", what), input=given, as_user="root")

    def _act(self, why: str, *argv: str, given: str | None = None) -> Action:
        return Action(why, argv, input=given, as_user=self.as_user)

    # --- afterwards ------------------------------------------------------------------------------------------------

    @property
    def put_back_action(self) -> Action:
        """Puts everything back that the unit lists; without our drop-in, or it does nothing."""
        if self.granted is not None:
            return replace(self._helped("the caches back", "back", None), may_fail=True)
        return replace(self._act("the caches back", *self.ctl, "start", self.names.name), may_fail=True)

    def listed(self) -> tuple[str, ...]:
        """The directories that may be set aside at this moment; none where no campaign has done it."""
        return aside.directories(self._text())

    def _listed_as_ours(self) -> tuple[str, ...]:
        """The same; refused where a campaign of another user of the service has left them: only that user can."""
        text, names = self._text(), self.names
        listed = aside.directories(text)
        if listed and aside.owner(text) != names.owner:
            was, now = aside.owner(text), names.owner
            raise BoxError(
                f"{names.name} still has to put back the caches of {was}, as whom {names.unit} ran; it is {now} now",
                hint="`invoke restore` puts them back first",
            )
        return listed

    def _text(self) -> str:
        said = self.transport.run(("cat", "--", self.names.path), timeout_s=COMMAND_S, check=False)
        return said.stdout if said.status == 0 else ""

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
        at_home = (f"{home}{below}" for below in AT_HOME)
        told = (unit.env[name] for name in _WEIGHTS if unit.env.get(name))
        return {
            "own": "\n".join("\t".join((one.path, *one.carried)) for one in own),
            "roots": "\n".join(roots),
            "precious": "\n".join((*at_home, *told, *precious)),
            "pattern": self.names.pattern,
            "guard": self.names.path,
            "link": self.names.links[1],
        }

    def _by_helper(self, unit: UnitFacts) -> bool:
        return self.granted is not None and unit.user != self.transport.user

    def call(self, unit: UnitFacts, what: str) -> tuple[tuple[str, ...], str | None]:
        """The command that does one of `aside.SCRIPTS`, and as whom; None: as the login."""
        if self._by_helper(unit):
            return (HELPER, unit.name, "clear", what), "root"
        return AS_USER, None if unit.user == self.transport.user else unit.user

    def _run(self, unit: UnitFacts, what: str, told: dict[str, str]) -> str:
        argv, user = self.call(unit, what)
        given = "".join(f"{name}={shlex.quote(value)}\n" for name, value in told.items()) + aside.SCRIPTS[what]
        if argv != AS_USER:
            lines = ((name, line) for name in ("own", "precious") for line in told.get(name, "").split("\n"))
            given = "".join(f"{name}={line}\n" for name, line in lines if line)
        try:
            return self.transport.run(argv, input=given, timeout_s=PUT_BACK_S, as_user=user).stdout
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


def outermost(own: Sequence[OwnCache]) -> tuple[OwnCache, ...]:
    """Those that lie in no other one: what lies in another is set aside with it."""
    paths = [one.path for one in own]
    return tuple(one for one in own if not any(one.path.startswith(f"{path}/") for path in paths))


def proposed(unit: UnitFacts, own: Sequence[OwnCache], cache_root: str | None) -> tuple[str, ...]:
    """The caches that root may well allow the helper to set aside: those of usual places and plain names.

    Args:
        unit: whose they are.
        own: what its environment says.
        cache_root: of the box.
    """
    home = unit.env.get("HOME") or unit.home
    roots = (home, *_ROOTS, *((cache_root,) if cache_root else ()))
    never = {f"{home}{below}" for below in AT_HOME}
    fit = [
        one
        for one in own
        if may_clear(one.path) and one.path not in never and any(one.path.startswith(f"{root}/") for root in roots)
    ]
    return tuple(dict.fromkeys(one.path for one in outermost(fit)))


def precious_of(argv: Sequence[str]) -> tuple[str, ...]:
    """The paths in a command: programs, weights, templates; none of them lies in a compile cache."""
    values = (word.partition("=")[2] if re.match(r"--?[\w-]+=/", word) else word for word in argv)
    return tuple(dict.fromkeys(value.rstrip("/") for value in values if re.match(r"/[^\n]+$", value)))
