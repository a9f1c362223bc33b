"""The restore that the box does by itself: a script, a timer and a heartbeat, all below /run. Pure text.

While a campaign lives it writes the machine's uptime into the heartbeat file (as its own user, without sudo). A timer
on the box runs the script every few seconds; once the heartbeat is older than the dead-man's time, the script takes our
drop-in away, reloads, puts the caches of `cache: clear` back (`aside`), starts the unit iff it was active before, takes
our cold caches away, and removes itself. Uptime, because the wall clock may be set; /run, because after a reboot there
is nothing of ours left to undo but what `aside` has a unit of its own for.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass

from orchestrator.box.unitfile import quote_exec

BEAT = r"""
[ -w "$1" ] || exit 4
read -r up _ </proc/uptime && echo "$up" >"$1"
"""
FIRED = 4
"""The status of `BEAT` when there is no heartbeat file any more: the box has restored by itself."""

SCRIPT = r"""#!/bin/sh
# Written by coldboot: gives __UNIT__ back when its campaign has died. Run by a timer.
was_active=__ACTIVE__
unit=__UNIT__
ctl() { systemctl__SCOPE__ "$@"; }
read -r now _ </proc/uptime
read -r beat _ 2>/dev/null <__HEART__ || exit 0
now=${now%%.*} beat=${beat%%.*}
# The login writes it, and a shell that is bash would run what stands in an index: digits, or it is no sign at all.
case $beat in '' | *[!0-9]*) exit 0 ;; esac
[ "$((now - beat))" -ge __LIMIT__ ] || exit 0
echo "coldboot: no sign of life of the campaign for $((now - beat)) s: restoring $unit"
if [ -e __DROP_IN__ ]; then
  ctl kill -s KILL -- "$unit" 2>/dev/null
  ctl stop -- "$unit"
  rm -f -- __OURS__
  rmdir -- __DIR__ 2>/dev/null
  ctl daemon-reload || exit 1
  ctl reset-failed -- "$unit" 2>/dev/null
fi
if [ -e __ASIDE__ ]; then ctl start -- __PUT_BACK__ || echo "coldboot: some caches of $unit are still set aside"; fi
if [ "$was_active" = 1 ]; then ctl start --no-block -- "$unit" || exit 1; fi
__SWEEP__
rm -rf -- __RUN__
rm -f -- __UNITS__
ctl daemon-reload
ctl stop --no-block -- __TIMER__
"""


@dataclass(frozen=True, slots=True)
class DeadMan:
    """Where the restore of one unit lives on the box.

    unit      the unit's full name
    user      whether it is a unit of the user's own manager
    base      where the manager reads run-time units
    run       a directory of ours below /run
    drop_in   our drop-in; `ours` are all the files that the restore removes
    put_back  name and path of the unit that puts caches back, where it is there
    """

    unit: str
    user: bool
    base: str
    run: str
    drop_in: str
    ours: tuple[str, ...]
    put_back: tuple[str, str] = ("", "")

    @property
    def stem(self) -> str:
        """The name of the timer and its service, without suffix."""
        return "coldboot-restore-" + re.sub(r"[^A-Za-z0-9_.-]", "_", self.unit.removesuffix(".service"))

    @property
    def timer(self) -> str:
        """The timer's unit name."""
        return f"{self.stem}.timer"

    @property
    def service(self) -> str:
        """The name of the service that the timer starts."""
        return f"{self.stem}.service"

    @property
    def script(self) -> str:
        """Path of the script."""
        return f"{self.run}/restore"

    @property
    def heart(self) -> str:
        """Path of the heartbeat file."""
        return f"{self.run}/heart"

    @property
    def unit_paths(self) -> tuple[str, str]:
        """Paths of the service and the timer."""
        return f"{self.base}/{self.service}", f"{self.base}/{self.timer}"

    def script_text(self, *, active: bool, dead_man_s: float, sweep: str = ":") -> str:
        """The restore; `active`: whether the unit ran before the campaign; `sweep`: takes our cold caches away."""
        values = {
            "UNIT": shlex.quote(self.unit),
            "ACTIVE": str(int(active)),
            "SCOPE": " --user" if self.user else "",
            "HEART": shlex.quote(self.heart),
            "LIMIT": str(max(1, math.ceil(dead_man_s))),
            "DROP_IN": shlex.quote(self.drop_in),
            "OURS": shlex.join(self.ours),
            "DIR": shlex.quote(self.drop_in.rpartition("/")[0]),
            "ASIDE": shlex.quote(self.put_back[1]),
            "PUT_BACK": shlex.quote(self.put_back[0]),
            "SWEEP": sweep,
            "RUN": shlex.quote(self.run),
            "UNITS": shlex.join(self.unit_paths),
            "TIMER": shlex.quote(self.timer),
        }
        return re.sub(r"__([A-Z_]+?)__", lambda match: values[match.group(1)], SCRIPT)

    def service_text(self) -> str:
        """The service that the timer starts; its comings and goings are kept out of the journal."""
        return (
            f"[Unit]\nDescription=Give {self.unit} back when its campaign has died (coldboot)\n"
            "[Service]\nType=oneshot\nLogLevelMax=notice\nSyslogLevel=notice\n"
            f"ExecStart={quote_exec(('/bin/sh', self.script))}\n"
        )

    def timer_text(self, dead_man_s: float) -> str:
        """The timer; without AccuracySec systemd may be a minute late."""
        every = max(1.0, min(30.0, dead_man_s / 6))
        return (
            f"[Unit]\nDescription=Look whether the campaign on {self.unit} lives (coldboot)\n"
            f"[Timer]\nOnActiveSec={every:g}s\nOnUnitInactiveSec={every:g}s\nAccuracySec=100ms\n"
        )


def was_active(script: str) -> bool | None:
    """What an armed script knows of the time before its campaign; None when it is no script of ours."""
    found = re.search(r"^was_active=([01])$", script, re.MULTILINE)
    return None if found is None else found.group(1) == "1"
