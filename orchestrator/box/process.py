"""One engine as a plain process, where no service manager is: the rehearsal box, containers, a bare login.

A small supervisor on the box starts the engine in a session of its own, writes its output to a log, waits for it and
notes how it ended. So the exit status and the log survive us, and what a killed campaign left is found again: by the
process id, the start time and the boot of the machine in its file, and by a variable in the environment of each of its
processes. Never by a name. There is no production here: nothing runs before a campaign, and nothing after it.
"""

from __future__ import annotations

import hashlib
import posixpath
import time
import uuid
from dataclasses import dataclass
from pathlib import PurePosixPath

from orchestrator.box import unitfile
from orchestrator.box.engines import Launch
from orchestrator.box.transports import Transport
from orchestrator.box.unit import (
    COMMAND_S,
    STOP_TIMEOUT_S,
    Action,
    EntryStream,
    LineEntries,
    UnitFacts,
    UnitState,
    together,
)
from orchestrator.errors import BoxError, UsageError
from orchestrator.matrix import BoxSpec
from orchestrator.records import JournalEntry, ProductionState, StepName

_STARTED = "\x1ecoldboot-started"
_EXIT = "\x1ecoldboot-exit "
_KILL_GRACE_S = 5.0
_SIGNALS = {1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 6: "ABRT", 7: "BUS", 8: "FPE", 9: "KILL", 11: "SEGV", 15: "TERM"}
_STATUS_NAMES = {0: "SUCCESS", 1: "FAILURE", 2: "INVALIDARGUMENT", 126: "n/a", 127: "n/a"}

# The file `pid`: process id, start time (clock ticks since the machine's boot), the machine's boot, our invocation.
_SUPERVISE = r"""
dir=$1 id=$2; shift 2
printf '\036coldboot-started\n' >>"$dir/log"
COLDBOOT_INVOCATION="$id" setsid env "$@" </dev/null >>"$dir/log" 2>&1 &
pid=$!
start=
if { IFS= read -r stat <"/proc/$pid/stat"; } 2>/dev/null; then set -- ${stat##*) }; start=${20}; fi
read -r boot </proc/sys/kernel/random/boot_id
echo "$pid ${start:-0} $boot $id" >"$dir/pid.new" && mv -f "$dir/pid.new" "$dir/pid"
echo started
exec >/dev/null
wait "$pid"; status=$?
echo "$status" >"$dir/status.new" && mv -f "$dir/status.new" "$dir/status"
printf '\036coldboot-exit %s\n' "$status" >>"$dir/log"
"""
_START = r"""
dir=$1 script=$2; shift 2
rm -f "$dir/status" "$dir/pid"
said=$(setsid sh -c "$script" coldboot "$dir" "$@" </dev/null 2>/dev/null &)
[ "$said" = started ]
"""
# Sets pid, start, id and alive from the file; ends when there is none, or when it is of another boot of the machine.
_KNOWN = r"""
dir=$1
alive=0
{ read -r pid start boot id <"$dir/pid"; } 2>/dev/null || exit 0
read -r now </proc/sys/kernel/random/boot_id
status=
{ read -r status <"$dir/status"; } 2>/dev/null
[ "$boot" = "$now" ] || exit 0
leader() {
  alive=0
  { IFS= read -r stat <"/proc/$pid/stat"; } 2>/dev/null || return 0
  set -- ${stat##*) }
  [ "${20}" = "$start" ] && [ "$1" != Z ] && [ "$1" != X ] && alive=1
  return 0
}
leader
"""
# A session outlives its leader: then its members count only with our variable, or with the title that vLLM gives to
# its processes (which overwrites their environment).
_MEMBERS = r"""
members() {
  leader
  for f in /proc/[0-9]*/stat; do
    { IFS= read -r line <"$f"; } 2>/dev/null || continue
    p=${line%% *}
    set -- ${line##*) }
    [ "$4" = "$pid" ] && [ "$1" != Z ] && [ "$1" != X ] || continue
    if [ "$alive" = 0 ]; then
      case $(tr '\0' ' ' <"/proc/$p/cmdline" 2>/dev/null) in VLLM::*) ;; *) continue ;; esac
    fi
    echo "$p"
  done
  grep -l -s -z -x -F "COLDBOOT_INVOCATION=$id" /proc/[0-9]*/environ | while IFS=/ read -r _ _ p _; do
    { IFS= read -r line <"/proc/$p/stat"; } 2>/dev/null || continue
    set -- ${line##*) }
    [ "$1" != Z ] && [ "$1" != X ] && echo "$p"
  done
}
"""
_STATE = _KNOWN + 'echo "state $pid $id $alive $status"\n'
_PIDS = _KNOWN + _MEMBERS + "members | sort -un\n"
_STOP = (
    _KNOWN
    + _MEMBERS
    + r"""
clock() { read -r up _ </proc/uptime; up=${up%.*}${up#*.}; }
signal() { for p in $(members); do kill "-$1" "$p" 2>/dev/null; done; }
gone() { [ -z "$(members)" ]; }
await() { clock; end=$((up + $1)); until gone; do clock; [ "$up" -lt "$end" ] || return 1; sleep 0.02; done; }
if [ "$2" -gt 0 ]; then signal TERM; await "$2" || signal KILL; else signal KILL; fi
if ! await "$3"; then signal KILL; await "$3" || { echo left $(members); exit 0; }; fi
n=0; until [ -e "$dir/status" ] || [ $n -ge 25 ]; do n=$((n + 1)); sleep 0.02; done
"""
)
_EFFECTIVE = (
    _KNOWN + 'if [ "$alive" = 1 ]; then cat "/proc/$pid/cmdline"; printf %s "$2"; cat "/proc/$pid/environ"; fi\n'
)
_DESCRIBE = r"""
printf '%s\n' "$HOME"; id -u
command -v setsid >/dev/null || echo setsid
[ -r /proc/self/stat ] || echo /proc
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """What the next start runs."""

    argv: tuple[str, ...]
    env: dict[str, str]
    unset_env: tuple[str, ...]


class ProcessService:
    """An engine that we start ourselves; see `unit.Service`."""

    def __init__(self, transport: Transport, box: BoxSpec, *, state: str) -> None:
        """`state` is a directory on the box for its log, its process id and its status."""
        self._transport = transport
        self._box = box
        self._dir = f"{state}/service"
        self.name = box.unit or f"{box.name}.service"
        # Two rehearsals on one machine share nothing: each experiment has a box of its own, in its own directory.
        own = f"-{hashlib.sha256(state.encode()).hexdigest()[:10]}" if box.engine == "rehearsal" else ""
        self.lock_name = f"{box.name}{own}"
        self._base_env: dict[str, str] = {}
        self._installed: Installed | None = None
        self._invocation: str | None = None

    # --- what is there ---------------------------------------------------------------------------------------------

    def describe(self) -> UnitFacts:
        """See `Service.describe`. The command comes from the box's `unit_file:`, or is `program:` alone."""
        lines = self._sh(_DESCRIBE).splitlines()
        home, uid, *missing = lines
        if missing:
            raise BoxError(f"a plain process needs {' and '.join(missing)} on the box", hint="util-linux has setsid")
        argv, env = self._base(home, int(uid))
        self._base_env = env
        return UnitFacts(
            name=self.name,
            exists=True,
            argv=argv,
            env=env,
            user=self._transport.user,
            home=home,
            active=False,
            enabled=None,
            cache_root=posixpath.join(home, posixpath.dirname(self._dir), "caches"),
        )

    def look(self) -> UnitFacts:
        """See `Service.look`."""
        return self.describe()

    def _base(self, home: str, uid: int) -> tuple[tuple[str, ...], dict[str, str]]:
        path = self._box.unit_file
        if path is None:
            if self._box.program is None:
                raise UsageError(
                    f"box {self._box.name} says nothing about what to run",
                    hint="give it `unit_file:` with production's unit, or `program:`",
                )
            return self._box.program, {}
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"unit_file {path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UsageError(
                f"unit_file {path}: no text in UTF-8", hint="a systemd unit, as `systemctl cat`"
            ) from error
        unit = unitfile.parse(text)
        specifiers = unitfile.unit_specifiers(
            path.name, user=self._transport.user, uid=uid, home=home, fragment=str(path)
        )
        return unitfile.exec_argv(unit, specifiers), unitfile.environment(unit, specifiers)

    def production(self) -> ProductionState:
        """See `Service.production`: nothing runs before a campaign."""
        return ProductionState(unit=self.name, active=False)

    def state(self) -> UnitState:
        """See `Service.state`."""
        words = self._sh(_STATE, self._dir).split()
        if len(words) < 4:
            return UnitState("inactive", "dead", None, None, 0, None, None)
        _, pid, invocation, alive, *status = words
        code = int(status[0]) if status else None
        if alive == "1":
            return UnitState("active", "running", int(pid), invocation, 0, "success", None)
        if code is None:
            return UnitState("inactive", "dead", None, invocation, 0, None, None)
        failed = ("failed", "failed") if code else ("inactive", "dead")
        return UnitState(*failed, None, invocation, 0, _result(code), code)

    def pids(self) -> tuple[int, ...]:
        """See `Service.pids`."""
        return tuple(int(word) for word in self._sh(_PIDS, self._dir).split() if word.isdigit())

    def ours(self) -> bool:
        """See `Service.ours`: there is no production here."""
        return True

    def effective(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """See `Service.effective`."""
        cut = uuid.uuid4().hex  # an argument may hold anything, but not this
        cmdline, _, environ = self._sh(_EFFECTIVE, self._dir, cut).partition(cut)
        return read_argv(cmdline, self._installed.argv if self._installed else ()), read_environ(environ)

    # --- what we do ------------------------------------------------------------------------------------------------

    def install_actions(self, launch: Launch, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> tuple[Action, ...]:  # noqa: ARG002
        """See `Service.install_actions`."""
        return (
            Action("a place for its log", ("mkdir", "-p", "-m", "0700", self._dir)),
            Action("an empty log", ("cp", "/dev/null", f"{self._dir}/log")),
        )

    def step_actions(self, launch: Launch) -> dict[StepName, tuple[Action, ...]]:
        """See `Service.step_actions`."""
        started = Action("in a session of its own, output to its log", _command(_installed(launch, self._base_env)))
        ended = Action("at the end, to each of its processes", ("kill", "-TERM", "PIDS"))
        return {"render": self.install_actions(launch), "start": (started,), "stop": (ended,)}

    def boot_actions(self, launch: Launch) -> tuple[Action, ...]:
        """See `Service.boot_actions`."""
        return tuple(action for actions in self.step_actions(launch).values() for action in actions)

    def install(self, launch: Launch, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        """See `Service.install`."""
        together(self._transport, self.install_actions(launch, stop_timeout_s=stop_timeout_s))
        self._installed = _installed(launch, self._base_env)

    def start(self) -> None:
        """See `Service.start`."""
        if self._installed is None:
            raise BoxError("nothing was installed to start")
        self._invocation = uuid.uuid4().hex
        self._sh(_START, self._dir, _SUPERVISE, self._invocation, *_command(self._installed)[1:])

    def stop(self, *, kill: bool, deadline_s: float) -> None:
        """See `Service.stop`."""
        polite = 0 if kill else max(1, round(deadline_s * 100))
        said = self._sh(
            _STOP, self._dir, str(polite), str(round(_KILL_GRACE_S * 100)), timeout_s=deadline_s + 2 * COMMAND_S
        )
        if said.startswith("left"):
            raise BoxError(
                f"processes of {self.name} survive SIGKILL: {said.removeprefix('left').strip()}",
                hint="they hang in the kernel (state D): the driver or the disk; a reboot of the box ends them",
            )

    def cursor(self) -> str:
        """See `Service.cursor`: the log's size, bytes."""
        return self._sh('[ ! -e "$1" ] && echo 0 || wc -c <"$1"', f"{self._dir}/log").strip()

    def follow(self, cursor: str) -> EntryStream:
        """See `Service.follow`. The times are those of arrival; its start and its end are said in systemd's words."""
        log = f"{self._dir}/log"
        return LineEntries(self._transport.stream(("tail", "-c", f"+{int(cursor) + 1}", "-f", log)), self._entries)

    def _entries(self, line: str, index: int) -> tuple[JournalEntry, ...]:
        # Its first line comes 10 to 20 s after the start of a real engine, so the start has an entry of its own.
        if line == _STARTED:
            return (self._said(f"Started {self.name}.", index),)
        if line.startswith(_EXIT):
            words = exit_words(int(line.removeprefix(_EXIT)))
            return tuple(self._said(f"{self.name}: {text}", index + number) for number, text in enumerate(words))
        entry = JournalEntry(
            index=index,
            message=line,
            at_us=time.time_ns() // 1000,
            invocation_id=self._invocation,
            unit=self.name,
            identifier=PurePosixPath(self._installed.argv[0]).name if self._installed else None,
            transport="stdout",
        )
        return (entry,)

    def _said(self, text: str, index: int) -> JournalEntry:
        """What systemd would have said of the unit."""
        return JournalEntry(
            index=index,
            message=text,
            at_us=time.time_ns() // 1000,
            invocation_id=self._invocation,
            unit=self.name,
            identifier="systemd",
            pid=1,
            transport="journal",
        )

    # --- the end ---------------------------------------------------------------------------------------------------

    def restore(self, was: ProductionState) -> None:  # noqa: ARG002 - nothing ran before
        """See `Service.restore`: nothing of ours is left."""
        self.stop(kill=True, deadline_s=0.0)

    def arm(self, was: ProductionState, dead_man_s: float) -> None:
        """See `Service.arm`: there is no production to bring back."""

    def beat(self) -> None:
        """See `Service.beat`."""

    def disarm(self) -> None:
        """See `Service.disarm`."""

    def sudo_needs(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """See `Service.sudo_needs`: none."""
        return ()

    def sudo_lines(self) -> tuple[str, ...]:
        """See `Service.sudo_lines`: none is needed."""
        return ()

    def _sh(self, script: str, *arguments: str, timeout_s: float = COMMAND_S) -> str:
        return self._transport.run(("sh", "-c", script, "coldboot", *arguments), timeout_s=timeout_s).stdout


def _installed(launch: Launch, base_env: dict[str, str]) -> Installed:
    env = {name: value for name, value in base_env.items() if name not in launch.unset_env}
    return Installed(launch.argv, env | launch.env, launch.unset_env)


def _command(installed: Installed) -> tuple[str, ...]:
    unset = tuple(word for name in installed.unset_env for word in ("-u", name))
    return ("env", *unset, *(f"{name}={value}" for name, value in installed.env.items()), *installed.argv)


def _result(code: int) -> str:
    return "success" if code == 0 else "signal" if code > 128 else "exit-code"


def exit_words(code: int) -> tuple[str, str]:
    """What systemd says of a main process that ended with this status (128 + n: killed by signal n)."""
    if code > 128:
        how = f"code=killed, status={code - 128}/{_SIGNALS.get(code - 128, 'n/a')}"
    else:
        how = f"code=exited, status={code}/{_STATUS_NAMES.get(code, 'n/a')}"
    end = "Deactivated successfully." if code == 0 else f"Failed with result '{_result(code)}'."
    return f"Main process exited, {how}", end


def read_argv(cmdline: str, expected: tuple[str, ...]) -> tuple[str, ...]:
    """/proc/PID/cmdline as an argument vector; an interpreter that the kernel put before a script is taken off."""
    argv = tuple(cmdline.removesuffix("\0").split("\0")) if cmdline else ()
    if expected and len(argv) > len(expected) and argv[-len(expected) :] == expected:
        return expected
    return argv


def read_environ(text: str) -> dict[str, str]:
    """/proc/PID/environ as a mapping."""
    pairs = (word.partition("=") for word in text.split("\0") if "=" in word)
    return {name: value for name, _, value in pairs}
