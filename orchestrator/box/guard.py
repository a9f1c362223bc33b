"""The restore that a box without a service manager does by itself: a process of its own session, and a heartbeat.

While a campaign lives it writes the machine's uptime into the heartbeat file. The watchdog reads it every few seconds;
once it is older than the dead-man's time, the watchdog ends the engine's processes, removes the caches of this
campaign, starts production again if it ran before, and takes itself away. Everything lies in one folder of ours, and
nothing needs root. A reboot ends the watchdog with everything else; the folder stays, so that the same command, or
`invoke restore`, still knows how production was started.
"""

from __future__ import annotations

import base64
import math
import re
import shlex
from dataclasses import dataclass

from orchestrator.box.standing import TREE, Again
from orchestrator.box.transports import Transport
from orchestrator.box.unit import COMMAND_S
from orchestrator.errors import BoxError

FIRED = 4
"""The status of a script that finds no heartbeat file any more."""
_LOST = "the box had no sign of life from us for its `dead_man_s` and has ended the engine by itself"
_CLOCK = "clock() { read -r up _ </proc/uptime; up=${up%.*}${up#*.}; }\n"

_WATCH = (
    TREE
    + _CLOCK
    + r"""# Written by coldboot: ends what a dead campaign left, and starts production again.
g=__FOLDER__ dir=__DIR__
IFS= read -r line <"/proc/$$/stat"
set -- ${line##*) }
echo "$$ ${20}" >"$g/watching.new" && mv -f "$g/watching.new" "$g/watching"
runs() {
  wanted=$(tr '\0' '\036' <"$g/cmdline")
  for f in /proc/[0-9]*/cmdline; do
    [ "$({ tr '\0' '\036' <"$f"; } 2>/dev/null)" = "$wanted" ] || continue
    grep -q -s -a -z '^COLDBOOT_INVOCATION=' "${f%cmdline}environ" || return 0
  done
  return 1
}
clock
beat=$up
while :; do
  sleep __EVERY__ || sleep 1
  [ -e "$g/heart" ] || exit 0
  # Between two writes it is empty for an instant, and on a full disk it stays so: then the last one counts.
  if read -r new _ <"$g/heart"; then beat=${new%.*}${new#*.}; fi 2>/dev/null
  clock
  [ "$((up - beat))" -lt __LIMIT__ ] || break
done
mv -f "$g/heart" "$g/fired" || exit 0
sh -c __STOP__ coldboot "$dir" 0 __GRACE__
sh -c __SWEEP__
if [ -e "$g/start" ] && ! runs; then
  env -i PATH="$PATH" setsid sh "$g/start" </dev/null >/dev/null 2>&1 &
  n=0; until [ -e "$g/started" ] || [ $n -ge 250 ]; do n=$((n + 1)); sleep 0.02; done
fi
rm -rf -- "$g"
rm -f -- "$dir/pid" "$dir/status" "$dir/log"
rmdir -- "$dir" 2>/dev/null
"""
)
# Whoever watched before is ended with the `sleep` that it waits for.
_END = r"""
g=$1
end_watch() {
  { read -r pid start <"$g/watching"; } 2>/dev/null || return 0
  n=0
  while stands "$pid" "$start" && [ $n -lt 250 ]; do kill -s KILL -- "-$pid"; n=$((n + 1)); sleep 0.02; done
}
"""
# One that a killed campaign left goes on watching until ours is there, but must not fire meanwhile.
_TAKE = (
    TREE
    + _END
    + r"""
if [ -w "$g/heart" ]; then read -r up _ </proc/uptime && echo "$up" >"$g/heart"; else end_watch; fi
exit 0
"""
)
_ARM = (
    TREE
    + _END
    + r"""
end_watch
rm -f -- "$g/watching" "$g/started" "$g/fired"
read -r up _ </proc/uptime && echo "$up" >"$g/heart" || exit 1
setsid sh "$g/watch" </dev/null >/dev/null 2>&1 &
n=0; until [ -e "$g/watching" ]; do n=$((n + 1)); [ $n -lt 250 ] || exit 1; sleep 0.02; done
"""
)
_BEAT = (
    TREE
    + r"""
g=$1
[ -w "$g/heart" ] || exit 4
read -r up _ </proc/uptime && echo "$up" >"$g/heart" || exit 1
{ read -r pid start <"$g/watching"; } 2>/dev/null && stands "$pid" "$start" && exit 0
setsid sh "$g/watch" </dev/null >/dev/null 2>&1 &
"""
)
_DISARM = (
    TREE
    + _END
    + r"""
end_watch
rm -rf -- "$g"
rm -f -- "$2/pid" "$2/status" "$2/log"
rmdir -- "$2" 2>/dev/null
exit 0
"""
)
_KEEP = 'umask 077; mkdir -p -- "$1" && cat >"$1/$2.new" && mv -f -- "$1/$2.new" "$1/$2"'
_START = r"""
g=$1
[ -e "$g/start" ] || exit 4
rm -f -- "$g/started"
env -i PATH="$PATH" setsid sh "$g/start" </dev/null >/dev/null 2>&1 &
n=0; until [ -e "$g/started" ] || [ $n -ge 250 ]; do n=$((n + 1)); sleep 0.02; done
"""


@dataclass(frozen=True, slots=True)
class Guard:
    """The watchdog of one engine.

    folder  where it lives on the box, absolute
    dir     the engine's own folder, with its process id and log, absolute
    """

    folder: str
    dir: str

    def arm(
        self,
        transport: Transport,
        *,
        dead_man_s: float,
        end_engine: str,
        grace_s: float,
        sweep: str,
        production: Again | None,
    ) -> None:
        """Starts it, in place of one that a killed campaign left.

        Args:
            transport: the box.
            dead_man_s: how old the heartbeat may become.
            end_engine: the script that ends the engine's processes.
            grace_s: how long SIGKILL may take.
            sweep: the script that removes the caches of this campaign.
            production: how production is started again; None: as the folder knows it already, or not at all.

        Raises:
            BoxError: it could not be started.
        """
        self._sh(transport, _TAKE)
        if production is not None:
            self._keep(transport, "cmdline", production.cmdline)
            self._keep(transport, "start", production.script)
        values = {
            "FOLDER": shlex.quote(self.folder),
            "DIR": shlex.quote(self.dir),
            "EVERY": f"{max(0.2, min(30.0, dead_man_s / 6)):g}",
            "LIMIT": str(max(50, math.ceil(dead_man_s * 100))),
            "STOP": shlex.quote(end_engine),
            "GRACE": str(round(grace_s * 100)),
            "SWEEP": shlex.quote(sweep),
        }
        text = re.sub(r"__([A-Z]+?)__", lambda match: values[match.group(1)], _WATCH)
        self._keep(transport, "watch", text.encode())
        self._sh(transport, _ARM)

    def beat(self, transport: Transport) -> None:
        """A sign of life; starts the watchdog again when somebody has ended it.

        Raises:
            BoxError: it has fired.
        """
        result = transport.run(("sh", "-c", _BEAT, "coldboot", self.folder), timeout_s=COMMAND_S, check=False)
        if result.status == FIRED:
            raise self.fired()
        if result.status != 0:
            raise BoxError(f"no heartbeat could be written on the box: {result.stderr.strip()}")

    @staticmethod
    def fired() -> BoxError:
        """What is said when it has fired."""
        return BoxError(_LOST, hint="give the box a longer `dead_man_s:`")

    @property
    def heart(self) -> str:
        """The heartbeat file: gone when it has fired, so that nobody starts anything then."""
        return f"{self.folder}/heart"

    def disarm(self, transport: Transport) -> None:
        """Ends it, and removes its folder. A second call changes nothing."""
        self._sh(transport, _DISARM)

    def knows(self, transport: Transport) -> tuple[str, ...] | None:
        """The command of the production that the folder can start again; None when there is none."""
        script = '[ ! -e "$1/start" ] || base64 "$1/cmdline"'
        said = transport.run(("sh", "-c", script, "coldboot", self.folder), timeout_s=COMMAND_S).stdout
        words = base64.b64decode(said).decode(errors="replace")
        return tuple(words.removesuffix("\0").split("\0")) if words else None

    def start_production(self, transport: Transport) -> None:
        """Starts production as it was.

        Raises:
            BoxError: the folder does not know how.
        """
        result = transport.run(("sh", "-c", _START, "coldboot", self.folder), timeout_s=COMMAND_S, check=False)
        if result.status != 0:
            raise BoxError("the box does not know any more how production was started")

    def _keep(self, transport: Transport, name: str, data: bytes) -> None:
        argv = ("sh", "-c", _KEEP, "coldboot", self.folder, name)
        transport.run(argv, timeout_s=COMMAND_S, input=data)

    def _sh(self, transport: Transport, script: str) -> None:
        transport.run(("sh", "-c", script, "coldboot", self.folder, self.dir), timeout_s=COMMAND_S)
