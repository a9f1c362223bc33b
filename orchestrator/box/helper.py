"""`coldboot-box` for a box: the program as it is installed there, and the script that installs it. Pure text.

The program is `coldboot_box.py` with the scripts that it needs of ours written into it, so that they stand in one
place here and in one file there. The script can be run again: it replaces the program and keeps a configuration that
is there already.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from orchestrator.box import aside, caches, coldboot_box
from orchestrator.box.deadman import SCRIPT, DeadMan
from orchestrator.matrix import BoxSpec

_EMPTY = "TEMPLATES: dict[str, str] = {}\n"
_EVERY_S = 7.0

_INSTALL = r"""#!/bin/sh
# Installs coldboot-box __VERSION__ for __LOGIN__ and __UNIT__; run it as root. It may be run again, and then replaces
# the program and keeps the configuration. To take it away: rm -r __HERE__ __CONFIG__ /etc/sudoers.d/__SUDOERS__
set -eu
umask 022
[ "$(id -u)" = 0 ] || { echo "run this as root: sudo sh $0" >&2; exit 3; }
/usr/bin/python3 -ISB -c 'import sys; sys.exit(sys.version_info < (3, 9))' || {
  echo "coldboot-box needs /usr/bin/python3, 3.9 or newer" >&2; exit 3; }
new=$(mktemp __HERE__.XXXXXX)
trap 'rm -f "$new"' EXIT
cat >"$new" <<'COLDBOOT-BOX-END'
__PROGRAM__COLDBOOT-BOX-END
echo '__DIGEST__  '"$new" | sha256sum -c --quiet -
chmod 0755 "$new"
mv -f "$new" __HERE__
mkdir -p __CONFIG__
chmod 0755 __CONFIG__
if [ -e __CONFIG__/__UNIT__.conf ]; then
  echo "__CONFIG__/__UNIT__.conf is kept as it is"
  grep -qx 'login __LOGIN__' __CONFIG__/__UNIT__.conf || echo 'login __LOGIN__' >>__CONFIG__/__UNIT__.conf
else
  cat >"$new" <<'COLDBOOT-BOX-END'
__CONF__COLDBOOT-BOX-END
  chmod 0644 "$new"
  mv -f "$new" __CONFIG__/__UNIT__.conf
fi
cat >"$new" <<'COLDBOOT-BOX-END'
__SUDOERS_TEXT__COLDBOOT-BOX-END
visudo -cqf "$new"
chmod 0440 "$new"
mv -f "$new" /etc/sudoers.d/__SUDOERS__
__HERE__ version
"""


def templates() -> dict[str, str]:
    """What the program needs of ours: scripts and units, with `__NAME__` where it fills in a name of its own."""
    dead = DeadMan("__UNIT__", False, "__BASE__", "__RUN__", "__DROP_IN__", ("__OURS__",))  # noqa: FBT003
    timer = dead.timer_text(6 * _EVERY_S).replace(f"={_EVERY_S:g}s", "=__EVERY__s")
    guard = aside.Aside("__UNIT__", "__OWNER__", coldboot_box.ON_DISK, "__DROP_IN__")
    text = guard.text(("/__MOUNTS__/__DIRECTORIES__",))
    for said, filled in (
        (guard.name, "__GUARD__"),
        ("RequiresMountsFor=/__MOUNTS__", "__MOUNTS__"),
        ("/__MOUNTS__/__DIRECTORIES__", "__DIRECTORIES__"),
    ):
        assert said in text
        text = text.replace(said, filled)
    return {
        "restore": SCRIPT,
        "service": dead.service_text(),
        "timer": timer,
        **{f"caches-{name}": script for name, script in caches.SCRIPTS.items()},
        "clear-unit": text,
        **{f"clear-{name}": script for name, script in aside.SCRIPTS.items()},
    }


@cache
def program() -> str:
    """The helper, as one file."""
    text = Path(coldboot_box.__file__).read_text(encoding="utf-8")
    assert text.count(_EMPTY) == 1
    said = "".join(f"    {name!r}: (\n{_written(part)}    ),\n" for name, part in templates().items())
    return text.replace(_EMPTY, "TEMPLATES: dict[str, str] = {\n" + said + "}\n")


def _written(text: str) -> str:
    return "".join(f"        {line!r}\n" for line in text.splitlines(keepends=True))


def digest() -> str:
    """SHA-256 of the helper."""
    return hashlib.sha256(program().encode()).hexdigest()


def configuration(login: str, roots: Sequence[str], clears: Sequence[str] = ()) -> str:
    """The configuration of one unit, root's to change."""
    lines = (
        "# What coldboot-box may do with this unit, and for whom; `coldboot-box` tells the words in its first lines.",
        f"login {login}",
        *(f"cache {root}" for root in roots),
        *(f"clear {path}" for path in clears),
    )
    return "\n".join(lines) + "\n"


def sudoers(login: str) -> str:
    """The file of sudoers: the helper alone, which checks its arguments itself."""
    return (
        "# coldboot-box trusts none of its arguments: it does what its configuration allows, and no more.\n"
        f"{login} ALL=(root) NOPASSWD: {coldboot_box.HERE}\n"
    )


def install_script(unit: str, login: str, roots: Sequence[str], clears: Sequence[str] = ()) -> str:
    """The script that installs all of it, for `sudo sh`.

    Args:
        unit: which may be taken over.
        login: who may call.
        roots: below which cold caches may lie.
        clears: the unit's own caches that may be set aside.
    """
    values = {
        "VERSION": str(coldboot_box.VERSION),
        "LOGIN": login,
        "UNIT": unit,
        "HERE": coldboot_box.HERE,
        "CONFIG": coldboot_box.CONFIG,
        "SUDOERS": "coldboot-box-" + re.sub(r"[^a-z0-9_-]", "_", login),
        "PROGRAM": program(),
        "DIGEST": digest(),
        "CONF": configuration(login, roots, clears),
        "SUDOERS_TEXT": sudoers(login),
    }
    return re.sub(r"__([A-Z_]+?)__", lambda match: values[match.group(1)], _INSTALL)


def install_command(box: BoxSpec, matrix: str | None = None) -> str:
    """The one command that installs the helper on a box, from here."""
    file = "" if matrix in (None, "matrix.yaml") else f" --matrix {shlex.quote(str(matrix))}"
    printed = f"invoke box-helper --box {shlex.quote(box.name)}{file}"
    if box.transport != "ssh":
        return f"{printed} | sudo sh"
    config = "" if box.ssh_config is None else f" -F {shlex.quote(str(box.ssh_config))}"
    way = f"{config}{'' if box.user is None else f' -l {box.user}'}"
    host = shlex.quote(box.host or box.name)
    return f"{printed} | ssh{way} {host} 'cat >coldboot-box.sh' && ssh{way} -t {host} sudo sh coldboot-box.sh"
