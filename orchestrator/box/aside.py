"""`cache: clear`: the unit's own cache directories set aside, and put back whatever happens. Names and texts; pure.

Each directory D is renamed to `D.coldboot-aside`, and an empty one of the same owner and mode takes its place before
every boot. All of that is done as the service's user. Beside D lies a note, `D.coldboot-note`, written and flushed
before the rename: whoever finds it knows what is half done.

They are put back by one oneshot unit of ours on persistent disk, `coldboot-caches-NAME.service`, which runs as the
service's user and holds the list of directories. It stands, is enabled and flushed before the first rename. Everybody
starts it: the end of a campaign, `invoke restore`, the dead man, and systemd itself before every start of the service,
at boot too (`Before=` and `WantedBy=` the service). While our drop-in is there what starts is a variant, and the unit
does nothing (`ConditionPathExists=!`); so production never starts over cleared caches. Having put back it removes
itself, with its links.

Where the helper on the box is in use (`coldboot_box`), it does as root what is done as root, with the same texts. The
plain way, for a system unit NAME.service with U = /etc/systemd/system/coldboot-caches-NAME.service (for a user's unit
the same without root, below ~/.config/systemd/user):

    tee U.new                                         the unit's text on standard input
    mv -f U.new U
    systemctl enable coldboot-caches-NAME.service
    systemctl start coldboot-caches-NAME.service      puts the caches back; returns when that is done

and, for the file with the environment of a boot, which may hold keys, before its first `tee`:

    install -m 0600 /dev/null /run/systemd/system/NAME.service.d/zz-coldboot.env
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.box import unitfile
from orchestrator.box.unitfile import quote_exec, quote_path

# Functions of every script here. `look D` sets d, up, note, aside, spent, and from the note: there (whether D was there
# before), id (the machine's boot in which a variant was last given D), first (the first directory above D that was
# missing).
_LOOK = r"""
look() {
  d=$1 up=${1%/*} note=$1.coldboot-note aside=$1.coldboot-aside spent=$1.coldboot-spent
  there='' id='' first=''
  if [ -f "$note" ]; then { read -r there; read -r id; IFS= read -r first; } <"$note"; fi
  return 0
}
gone() {
  [ -e "$1" ] || [ -L "$1" ] || return 0
  rm -rf -- "$1" 2>/dev/null || { chmod -R u+rwX -- "$1" 2>/dev/null; rm -rf -- "$1"; }
}
# What is in D is a variant's, and may go: the service does not run, and if the machine was restarted since a variant
# was given D, nothing in it is younger than that restart. (Then production can only have started over it by force.)
mine() {
  [ -n "$id" ] || return 1
  [ -z "$(find /sys/fs/cgroup -path "*/$pattern/*cgroup.procs" -exec cat {} + 2>/dev/null)" ] || return 1
  read -r now </proc/sys/kernel/random/boot_id
  [ "$id" != "$now" ] || return 0
  { read -r stat </proc/1/stat && read -r uptime _ </proc/uptime; } 2>/dev/null || return 1
  set -- ${stat##*) }
  # In hundredths: a machine may be back within a second of its last write.
  now=$(date +%s%N) up_for=${uptime%.*}${uptime#*.}
  begun=$((now / 10000000 - up_for + ${20} * 100 / $(getconf CLK_TCK)))
  begun=$((begun / 100)).$(printf %02d $((begun % 100)))
  [ -z "$(find "$d" -newerct "@$begun" -print 2>&1 | head -n 1)" ]
}
keep() {
  kept=$d.coldboot-kept-$(date +%Y%m%dT%H%M%S)
  [ ! -e "$kept" ] || kept=$kept-$$
  mv -T -- "$d" "$kept" && echo "what the service wrote into $d meanwhile is kept in $kept"
}
# An empty D is nobody's.
away() { rmdir -- "$d" 2>/dev/null && return; if mine; then gone "$spent" && mv -T -- "$d" "$spent"; else keep; fi; }
"""
_PUT_BACK = (
    _LOOK
    + r"""
put_back() {
  look "$1"
  if [ ! -f "$note" ] && [ ! -d "$aside" ]; then rm -f -- "$note.new"; gone "$spent"; return; fi
  if [ -d "$aside" ]; then
    if [ -e "$d" ] || [ -L "$d" ]; then away || return 1; fi
    mv -T -- "$aside" "$d" || return 1
    echo "$d is back"
  elif [ "$there" = no ] && [ -e "$d" ]; then
    if rmdir -- "$d" 2>/dev/null; then :
    elif mine; then away || return 1
    else echo "$d was made by the service meanwhile, and stays"; fi
  fi
  sync -- "$up" 2>/dev/null
  rm -f -- "$note" "$note.new" || return 1
  gone "$spent"
  [ -n "$first" ] || return 0
  while rmdir -- "$up" 2>/dev/null; do [ "$up" != "$first" ] || break; up=${up%/*}; done
  return 0
}
failed=0
pattern=$1; shift
for each; do put_back "$each" || { echo "$each could not be put back"; failed=1; }; done
exit $failed
"""
)
# `place D` says where D really is, or returns 1 and says why it must be left alone. The lists `roots` and `precious`
# have one path a line.
_PATHS = r"""
paths() { printf '%s\n' "$own" | cut -f 1; }
"""
_PLACE = (
    _PATHS
    + r"""
within() {
  printf '%s\n' "$roots" | {
    while IFS= read -r root; do
      real=$(cd -P -- "$root" 2>/dev/null && pwd -P) || continue
      [ "$real" != / ] || continue
      case $1 in "$real"/?*) exit 0 ;; esac
    done
    exit 1
  }
}
holds() {
  printf '%s\n' "$precious" | while IFS= read -r each; do
    [ -n "$each" ] || continue
    case $each/ in "$1"/*) echo "$each"; break ;; esac
    case $(realpath -m -- "$each" 2>/dev/null)/ in "$1"/*) echo "$each"; break ;; esac
  done
}
place() {
  case $1 in /?*/?*) ;; *) echo "$1 is no absolute path below a directory"; return 1 ;; esac
  case $1/ in *//* | */./* | */../*) echo "$1 is no plain path"; return 1 ;; esac
  if [ -L "$1" ]; then
    echo "$1 is a symbolic link, to $(realpath -m -- "$1"): have the unit name the directory itself"; return 1
  fi
  near=${1%/*}
  until [ -d "${near:-/}" ]; do near=${near%/*}; done
  base=$(cd -P -- "${near:-/}" 2>/dev/null && pwd -P) || { echo "$near cannot be entered"; return 1; }
  real=${base%/}${1#"$near"}
  within "$real" || { echo "$1 is $real, which lies below none of: $(printf '%s' "$roots" | tr '\n' ' ')"; return 1; }
  held=$(holds "$real")
  [ -z "$held" ] || { echo "$1 holds $held, which is no compile cache"; return 1; }
  [ -w "$base" ] && [ -x "$base" ] || { echo "$1 cannot be renamed by $(id -un): $base is not writable"; return 1; }
  if [ -d "$1" ]; then
    [ "$(stat -c %u -- "$1")" = "$(id -u)" ] || { echo "$1 does not belong to $(id -un)"; return 1; }
    [ -r "$1" ] && [ -w "$1" ] && [ -x "$1" ] || { echo "$1 cannot be read and written by $(id -un)"; return 1; }
    mounted=$(while read -r _ _ _ _ at _; do
      case $(printf '%b' "$at")/ in "$real"/*) echo "$at"; break ;; esac
    done </proc/self/mountinfo)
    [ -z "$mounted" ] || { echo "$1 is or holds a mount point ($mounted)"; return 1; }
  elif [ -e "$1" ]; then
    echo "$1 is no directory"; return 1
  fi
  echo "$real"
}
"""
)
_CHECK = (
    _PLACE
    + r"""
link() {
  way='' rest=${1#/}
  while [ -n "$rest" ]; do
    way=$way/${rest%%/*}
    [ ! -L "$way" ] || { printf '\t%s' "$way"; break; }
    case $rest in */*) rest=${rest#*/} ;; *) rest='' ;; esac
  done
}
paths | while IFS= read -r each; do
  if said=$(place "$each"); then printf 'at %s%s\n' "$said" "$(link "$each")"; else printf 'no %s\n' "$said"; fi
done
"""
)
REFUSED = "coldboot-refused: "
UNGUARDED = 9
"""The status of `empty` when the unit that puts back is not there."""

_EMPTY = (
    _LOOK
    + _PLACE
    + rf"""
refuse() {{ printf '%s%s\n' '{REFUSED}' "$1" >&2; exit 3; }}
copy() {{
  [ -d "$1" ] || return 0
  mkdir -p -- "$2" && {{ cp -a --reflink=auto -- "$1/." "$2/" 2>/dev/null || cp -R -p "$1/." "$2/"; }}
}}
guarded() {{ [ -e "$guard" ] && [ -L "$link" ] || exit {UNGUARDED}; }}
missing() {{
  way=$1 found=''
  until [ -d "$way" ]; do found=$way way=${{way%/*}}; done
  printf '%s' "$found"
}}
empty() {{
  said=$(place "$1") || refuse "$said"
  look "$1"
  if [ -d "$aside" ]; then there=yes
  elif [ "$there" = no ] && [ -f "$note" ]; then :
  elif [ -d "$d" ]; then there=yes first=''
  else there=no first=$(missing "$up")
  fi
  if [ -e "$d" ]; then
    if [ -d "$aside" ] || [ "$there" = no ]; then away || refuse "cannot take $d away"; fi
  fi
  read -r id </proc/sys/kernel/random/boot_id
  mkdir -p -- "$up" && printf '%s\n%s\n%s\n' "$there" "$id" "$first" >"$note.new" && sync -- "$note.new" &&
    mv -T -- "$note.new" "$note" && sync -- "$up" || {{ rm -f -- "$note.new"; refuse "cannot write $note"; }}
  if [ "$there" = yes ] && [ ! -d "$aside" ]; then
    guarded
    mv -T -- "$d" "$aside" && sync -- "$up" || refuse "cannot set $d aside"
  fi
  mkdir -m 0700 -- "$d" || refuse "cannot make $d"
  if [ "$there" = yes ]; then
    [ "$(stat -c %g -- "$d")" = "$(stat -c %g -- "$aside")" ] || chgrp --reference="$aside" -- "$d" ||
      refuse "cannot give $d the group of $aside"
    chmod --reference="$aside" -- "$d" || refuse "cannot give $d the mode of $aside"
  fi
  [ -z "$(ls -A -- "$d")" ] || refuse "$d is not empty"
}}
carry() {{
  d=$1; shift
  for each; do
    copy "$d.coldboot-aside/$each" "$d/$each" && copy "$d.coldboot-spent/$each" "$d/$each" ||
      refuse "cannot fill $d/$each"
  done
  gone "$d.coldboot-spent"
}}
guarded
paths | {{ while IFS= read -r each; do empty "$each"; done; }} || exit
printf '%s\n' "$own" | {{ set -f; IFS='	'; while read -r line; do carry $line; done; }}
"""
)

_LEFT_OVER = (
    _PATHS
    + r"""
paths | while IFS= read -r d; do
  for each in "$d.coldboot-aside" "$d.coldboot-note"; do [ ! -e "$each" ] || { printf 'aside %s\n' "$d"; break; }; done
  for each in "$d".coldboot-kept-*; do [ ! -e "$each" ] || printf 'kept %s\n' "$each"; done
done
exit 0
"""
)

# A cache may not be there yet: then its disk is that of the nearest directory above it.
_FREE = (
    _PATHS
    + r"""
paths | while IFS= read -r d; do
  until [ -d "${d:-/}" ]; do d=${d%/*}; done
  df -Pk -- "${d:-/}" | { read -r _; read -r _ _ _ free _; printf '%s %s\n' "$free" "${d:-/}"; }
done
exit 0
"""
)

SCRIPTS = {"check": _CHECK, "empty": _EMPTY, "left": _LEFT_OVER, "free": _FREE}
"""What is done as the service's user; fixed texts, to which variables are data.

`own` has a line for each directory: its path, then names below it that are carried over, TAB between.
check   says for each `at REAL_PATH`, with TAB and the first link on the way where there is one, or `no` and why it must
        be left alone; changes nothing; wants `roots`, `precious`
empty   sets each aside unless that was done, and leaves an empty one; also wants `pattern`, `guard`, `link`
left    says which are still set aside (`aside PATH`), and what was kept of production's beside them (`kept PATH`)
free    says for each how many KiB are free on its disk, and at which directory that was asked
`roots` and `precious` have a path a line: below what caches may lie, and what none may hold. `pattern` is the unit's
name for find. `guard` and `link` must be there before anything is set aside.
"""


@dataclass(frozen=True, slots=True)
class Aside:
    """The unit that puts the caches of one service back.

    unit      the service's full name
    owner     the service's user, as whom it runs; None for a unit of the user's own manager
    base      where the manager reads persistent units of ours
    drop_in   our drop-in: while it is there, what runs is a variant
    """

    unit: str
    owner: str | None
    base: str
    drop_in: str

    @property
    def name(self) -> str:
        """The unit's name."""
        return "coldboot-caches-" + re.sub(r"[^A-Za-z0-9_.-]", "_", self.unit.removesuffix(".service")) + ".service"

    @property
    def path(self) -> str:
        """Path of the unit's file."""
        return f"{self.base}/{self.name}"

    @property
    def pattern(self) -> str:
        """The service's name as a pattern of find."""
        return re.sub(r"([\\*?\[\]])", r"\\\1", self.unit)

    @property
    def links(self) -> tuple[str, str]:
        """Paths of the links by which systemd starts it: at boot, and before the service."""
        target = "default.target" if self.owner is None else "multi-user.target"
        return f"{self.base}/{target}.wants/{self.name}", f"{self.base}/{self.unit}.wants/{self.name}"

    def text(self, directories: Sequence[str]) -> str:
        """The unit's file; `directories` are absolute and resolved."""
        away = ("/bin/rm", "-f", "--", self.path, *self.links)
        run = ("/bin/sh", "-c", _PUT_BACK, "coldboot", self.pattern, *directories)
        lines = (
            "# Written by coldboot: puts back the caches that a campaign has set aside, then removes itself.",
            "# By hand: `invoke restore`.",
            "[Unit]",
            f"Description=Put back the caches of {self.unit} (coldboot)",
            "ConditionPathExists=!" + self.drop_in.replace("%", "%%"),
            *(f"RequiresMountsFor={quote_path(path.rpartition('/')[0])}" for path in directories),
            f"Before={self.unit}",
            "[Service]",
            "Type=oneshot",
            *(() if self.owner is None else (f"User={self.owner}",)),
            "TimeoutStartSec=600",
            "SyslogIdentifier=coldboot",
            f"ExecStart={quote_exec(run)}",
            f"ExecStartPost=+-{quote_exec(away)}",
            "[Install]",
            f"WantedBy={'default.target' if self.owner is None else 'multi-user.target'} {self.unit}",
        )
        return "\n".join(lines) + "\n"


def directories(text: str) -> tuple[str, ...]:
    """The directories that a unit's file puts back; none when it is no file of ours."""
    argv = unitfile.exec_argv(unitfile.parse(text), {}) if "coldboot" in text and "ExecStart=" in text else ()
    return argv[5:] if argv[1:2] == ("-c",) and argv[3:4] == ("coldboot",) else ()


def owner(text: str) -> str | None:
    """The user as whom a unit's file puts back; None where it says none."""
    return next(iter(unitfile.parse(text).values("Service", "User")), None)
