"""The cache state that a boot starts from: how it is made, how it is proven, and what is cleaned up.

Every cold boot has empty directories of its own for every store of the engine; production's caches are never touched.
They lie below one root that is ours by a marker file: a directory that exists, is not empty and has no marker is
refused, and so are `/`, a home directory and whatever resolves to one. All of it is done as the user of the service.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from orchestrator.box.coldboot_box import CONFIG
from orchestrator.box.commands import HELPER
from orchestrator.box.engines import Carried, Engine
from orchestrator.box.transports import Transport
from orchestrator.box.unit import COMMAND_S, UnitFacts
from orchestrator.errors import BoxError, CommandFailed, UsageError
from orchestrator.records import CacheState

MARKER = ".coldboot"
AS_USER = ("sh", "-s")
"""The one command that runs as the service's user: a script on standard input, so that sudoers can name it."""

_REFUSED = "coldboot-refused: "
_REMOVE_S = 300.0

# Functions of every script. `enter ROOT` goes into the root, physically, and marks it as ours.
_PRELUDE = f"""
set -u
refuse() {{ printf '%s%s\\n' {shlex.quote(_REFUSED)} "$1" >&2; exit 3; }}
enter() {{
  mkdir -p -m 0700 -- "$1" 2>/dev/null || refuse "cannot make $1 as $(id -un)"
  cd -P -- "$1" || refuse "cannot enter $1"
  here=$(pwd -P)
  case $here in
    / | /home | /root | /tmp | /var | /var/tmp | /usr | /etc | /opt | /srv | /run | /dev/shm)
      refuse "$here is no place for caches" ;;
  esac
  for each in "${{HOME:-/}}" "$home"; do
    [ "$here" != "$(cd -P -- "$each" 2>/dev/null && pwd -P)" ] || refuse "$here is a home directory"
  done
  if [ ! -f {MARKER} ]; then
    [ -z "$(ls -A)" ] || refuse "$here is not empty and not ours (no file {MARKER} in it)"
    printf 'caches of coldboot; all of it may be removed while no campaign runs\\n' >{MARKER} ||
      refuse "cannot write in $here"
  fi
}}
gone() {{
  [ -e "$1" ] || [ -L "$1" ] || return 0
  rm -rf -- "./$1" 2>/dev/null || {{ chmod -R u+rwX -- "./$1"; rm -rf -- "./$1"; }} || refuse "cannot remove $here/$1"
}}
copy() {{
  [ -d "$1" ] || return 0
  mkdir -p -- "$2" && {{ cp -a --reflink=auto -- "$1/." "$2/" 2>/dev/null || cp -R -p "$1/." "$2/"; }}
}}
carry() {{ printf '%s' "$copies" | while IFS='	' read -r from to; do copy "$from" "$to"; done; }}
"""
_COLD = """
enter "$root"
for old in b-*; do gone "$old"; done
mkdir -m 0700 -- "$tag" || refuse "cannot make $here/$tag"
(cd -- "$tag" && mkdir -p -- $names) || refuse "cannot fill $here/$tag"
[ -z "$(find "$tag" ! -type d)" ] || refuse "$here/$tag is not empty"
printf '%s\\n' "$here"
carry
"""
_WARM = """
enter "$root"
mkdir -p -m 0700 -- "$tag" && (cd -- "$tag" && mkdir -p -- $names) || refuse "cannot fill $here/$tag"
printf '%s\\n' "$here"
carry
"""
_REMOVE = """
enter "$root"
carry
gone "$tag"
"""
_SWEEP = """
[ -d "$root" ] || exit 0
cd -P -- "$root" && [ -f .coldboot ] || exit 0
here=$(pwd -P)
for old in b-* w-* carried; do gone "$old"; done
rm -f .coldboot; cd / && rmdir -- "$here" 2>/dev/null
exit 0
"""

# The place may not be there yet: then its disk is that of the nearest directory above it.
_FREE = """
until [ -d "$root" ]; do root=$(dirname -- "$root"); done
df -Pk -- "$root" | { read -r _; read -r _ _ _ free _; printf '%s\\n' "$free"; }
"""

SCRIPTS = {
    "cold": _PRELUDE + _COLD,
    "warm": _PRELUDE + _WARM,
    "remove": _PRELUDE + _REMOVE,
    "sweep": _PRELUDE + _SWEEP,
    "free": _PRELUDE + _FREE,
}
"""What is done as the service's user. Fixed texts: what differs from call to call is in variables, which are data to
them. `home` and `root` are always there; `tag`, `names` (words) and `copies` (lines `from TAB to`) where they are used.
"""


@dataclass(frozen=True, slots=True)
class ColdRoots:
    """What one boot starts from. `root` is None when nothing was made; `empty` is None where that was not asked for."""

    root: str | None
    empty: bool | None
    env: dict[str, str]
    _transport: Transport | None = field(default=None, repr=False)
    _unit: UnitFacts | None = field(default=None, repr=False)
    _values: dict[str, str] = field(default_factory=dict, repr=False)

    def remove(self) -> None:
        """Takes the directories of this boot away and keeps what is no compile cache. A second call changes nothing.

        Raises:
            BoxError: something of it is left.
        """
        if self._values and self._transport is not None and self._unit is not None:
            _run(self._transport, self._unit, "remove", self._values, timeout_s=_REMOVE_S)


def prepare(
    transport: Transport,
    unit: UnitFacts,
    engine: Engine,
    *,
    experiment: str,
    boot: str,
    variant: str,
    state: CacheState,
    root: str | None = None,
    clear: Callable[[], Sequence[str]] | None = None,
) -> ColdRoots:
    """Make the cache state of one boot.

    `cold`: empty directories of its own; what an earlier boot left below this root is removed. `warm`: directories that
    all boots of the variant share. `clear`: the unit's own directories, emptied. `as-is`: nothing.

    Args:
        transport: the box.
        unit: whose caches, and as which user.
        engine: which stores there are.
        experiment: names the directories, with `boot` or `variant`.
        boot: the boot's name.
        variant: the variant's name.
        state: the cache state.
        root: where to make them; None: the unit's own place, else `~/.cache/coldboot` of the service's user.
        clear: empties the unit's own directories (`owncaches`); None where that cannot be had.

    Raises:
        UsageError: a root that is not usable, or a state that is not offered.
        BoxError: the box failed.
    """
    if state == "as-is":
        return ColdRoots(None, None, {})
    if state == "clear":
        if clear is None:
            raise UsageError(
                "cache: clear needs a unit of systemd", hint="cache: cold starts from empty caches as well"
            )
        return ColdRoots(" ".join(clear()), empty=True, env={})
    place = cache_place(unit, root)
    key = f"{experiment}\0{boot}" if state == "cold" else f"{experiment}\0{variant}"
    tag = ("b-" if state == "cold" else "w-") + hashlib.sha256(key.encode()).hexdigest()[:10]
    names = sorted(path.removeprefix("@/") for path in engine.cold_env("@").values())
    copies = "".join(_copies(each, unit, tag) for each in engine.carried)
    _check_sockets(engine, engine.cold_env(f"{place}/{tag}"), f"{place}/{tag}")
    told = {"root": place, "tag": tag, "names": " ".join(names), "copies": copies}
    made = _run(transport, unit, "cold" if state == "cold" else "warm", told)
    directory = f"{made.strip().splitlines()[-1]}/{tag}"
    env = engine.cold_env(directory)
    _check_sockets(engine, env, directory)
    keep = "".join(f"{tag}/{each.target}\tcarried/{each.target}\n" for each in engine.carried)
    removal = {"root": place, "tag": tag, "copies": keep}
    cold = state == "cold"
    return ColdRoots(directory, cold or None, env, transport, unit, removal if cold else {})


def sweep(transport: Transport, unit: UnitFacts, *, root: str | None = None) -> None:
    """Remove everything below the root that is ours, and the root; for the end of a campaign, and after a killed one.

    Raises:
        BoxError: something of it is left.
    """
    _run(transport, unit, "sweep", {"root": cache_place(unit, root)}, timeout_s=_REMOVE_S)


def sweep_script(unit: UnitFacts, *, root: str | None = None) -> str:
    """What `sweep` runs, for a box that does it by itself."""
    return _assigned({"home": unit.home, "root": cache_place(unit, root)}) + SCRIPTS["sweep"]


def free_mib(transport: Transport, unit: UnitFacts, *, root: str | None = None) -> int | None:
    """Free MiB on the disk where the caches of a unit are made; None when it cannot be told."""
    said = _run(transport, unit, "free", {"root": cache_place(unit, root)}).strip()
    return int(said) // 1024 if said.isdigit() else None


def cache_place(unit: UnitFacts, root: str | None) -> str:
    """The root of this unit's directories: units of one machine do not share one.

    Raises:
        UsageError: it is not absolute, or goes up by `..`.
    """
    base = root or unit.cache_root or f"{unit.home}/.cache/coldboot"
    path = PurePosixPath(base)
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 3:
        raise UsageError(
            f"cache_root {base!r} cannot be used", hint="an absolute path at least two levels deep, without `..`"
        )
    return f"{path}/{re.sub(r'[^A-Za-z0-9_.@-]', '_', unit.name.removesuffix('.service')) or 'unit'}"


def _copies(carried: Carried, unit: UnitFacts, tag: str) -> str:
    """Lines `from TAB to` of what is no compile cache: production's, then what earlier boots made."""
    source = f"{unit.home}/{carried.source}"
    for name, suffix in carried.variables:
        if unit.env.get(name):
            source = f"{unit.env[name]}/{suffix}".rstrip("/")
            break
    if not source.startswith("/") or set(source) & set("\t\n"):
        return ""
    target = f"{tag}/{carried.target}"
    return f"{source}\t{target}\ncarried/{carried.target}\t{target}\n"


def _check_sockets(engine: Engine, env: dict[str, str], directory: str) -> None:
    limit, tmp = engine.socket_limit, env.get("TMPDIR", "")
    if limit is not None and len(tmp.encode()) > limit:
        raise UsageError(
            f"the cache directory {directory} is too long: the engine makes sockets in its TMPDIR, which may have "
            f"{limit} bytes and would have {len(tmp.encode())}",
            hint="give the box a shorter `cache_root:`",
        )


def refuse_linked(transport: Transport, unit: UnitFacts, *, root: str | None = None) -> None:
    """Refuses a cache place that the helper would not enter at each boot; changes nothing.

    Args:
        transport: the box.
        unit: whose caches they are; the helper is in use for it.
        root: as for `cache_place`.

    Raises:
        BoxError: a link is on the way to it; says which and what to write.
    """
    try:
        free_mib(transport, unit, root=root)
    except CommandFailed as error:
        refused = next((line for line in error.tail.splitlines() if "on the way" in line), None)
        if refused is None:
            raise
        raise BoxError(
            f"coldboot-box follows no link to the caches of a boot: {refused.partition('refused: ')[2]}",
            hint=f"the directory itself as `cache_root:` of the box, and as `cache` in {CONFIG}/{unit.name}.conf",
        ) from error


def _assigned(values: Mapping[str, str]) -> str:
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def _run(
    transport: Transport, unit: UnitFacts, what: str, values: Mapping[str, str], *, timeout_s: float = COMMAND_S
) -> str:
    """One of `SCRIPTS` as the service's user: by the helper on the box where that is in use, else by `AS_USER`."""
    argv, user = call(unit, transport.user, what)
    if argv == AS_USER:
        given = _assigned({"home": unit.home, **values}) + SCRIPTS[what]
    else:
        lines = [f"{name}={value}\n" for name, value in values.items() if name != "copies"]
        given = "".join((*lines, *(f"copy={line}\n" for line in values.get("copies", "").split("\n")[:-1])))
    try:
        return transport.run(argv, input=given, timeout_s=timeout_s, as_user=user).stdout
    except CommandFailed as error:
        refusals = [line for line in error.tail.splitlines() if line.startswith(_REFUSED)]
        if error.status != 3 or not refusals:
            raise
        what = refusals[-1].removeprefix(_REFUSED)
        raise BoxError(
            f"the caches of this boot: {what}", hint="give the box a `cache_root:` of our own, with room on its disk"
        ) from error


def call(unit: UnitFacts, login: str, what: str) -> tuple[tuple[str, ...], str | None]:
    """The command that does one of `SCRIPTS`, and as whom; None: as the login. Its standard input says on what."""
    if unit.user == login:
        return AS_USER, None
    return ((HELPER, unit.name, "caches", what), "root") if unit.helper else (AS_USER, unit.user)


def sudo_needs(unit: UnitFacts, login: str) -> Sequence[tuple[str, tuple[str, ...]]]:
    """(user, command) that the login must be allowed when the service runs as somebody else."""
    return () if unit.user == login or unit.helper else ((unit.user, AS_USER),)
