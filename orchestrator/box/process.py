"""One engine as a plain process, where no service manager is: the rehearsal box, containers, a bare login.

A small supervisor on the box starts the engine in a session of its own, writes its output to a log, waits for it and
notes how it ended. So the exit status and the log survive us, and what a killed campaign left is found again: by the
process id, the start time and the boot of the machine in its file, and by a variable in the environment of each of its
processes. Never by a name. Production, where it runs as a plain process too, is found by its whole command line and
started again as it was (see `standing`); a watchdog on the box does that when we die (see `guard`). The rehearsal has
no production: nothing runs before it, and nothing after.
"""

from __future__ import annotations

import hashlib
import posixpath
import shlex
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import PurePosixPath

from orchestrator.box import caches, standing, unitfile
from orchestrator.box.engines import Launch
from orchestrator.box.guard import FIRED, Guard
from orchestrator.box.standing import TREE, Standing
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
from orchestrator.errors import BoxError, CommandFailed, RestoreFailed, UsageError
from orchestrator.matrix import BoxSpec
from orchestrator.records import JournalEntry, ProductionState, StepName
from orchestrator.redact import redact_argv

_STARTED = "\x1ecoldboot-started"
_EXIT = "\x1ecoldboot-exit "
_KILL_GRACE_S = 5.0
_BACK_S = 5.0
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
[ -z "$1" ] || [ -e "$1" ] || exit 4
dir=$2 script=$3; shift 3
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
# With production's process id and start time, where one was found: while it runs, it is what is asked about.
_STATE = TREE + 'stands "$2" "$3" && echo production\n' + _KNOWN + 'echo "state $pid $id $alive $status"\n'
_PIDS = TREE + 'tree "$2" "$3"\n' + _KNOWN + _MEMBERS + "members | sort -un\n"
_STOP = (
    _KNOWN
    + _MEMBERS
    + r"""
clock() { read -r up _ </proc/uptime; up=${up%.*}${up#*.}; }
listed=
signal() { listed=$(members); for p in $listed; do kill "-$1" "$p" 2>/dev/null; done; }
# Looking through all of /proc takes as long as many looks at those that we know; new ones are looked for in between.
living() {
  for p in $listed; do
    { IFS= read -r line <"/proc/$p/stat"; } 2>/dev/null || continue
    set -- ${line##*) }
    [ "$1" = Z ] || [ "$1" = X ] || return 0
  done
  return 1
}
gone() {
  looks=$((${looks:-0} + 1))
  if living && [ $((looks % 10)) != 0 ]; then return 1; fi
  listed=$(members)
  [ -z "$listed" ]
}
await() { clock; end=$((up + $1)); until gone; do clock; [ "$up" -lt "$end" ] || return 1; sleep 0.02; done; }
if [ "$2" -gt 0 ]; then signal TERM; await "$2" || signal KILL; else signal KILL; fi
if ! await "$3"; then signal KILL; await "$3" || { echo left $(members); exit 0; }; fi
n=0; until [ -e "$dir/status" ] || [ $n -ge 25 ]; do n=$((n + 1)); sleep 0.02; done
"""
)
_EFFECTIVE = (
    TREE
    + 'both() { cat "/proc/$1/cmdline"; printf %s "$2"; cat "/proc/$1/environ"; }\n'
    + 'if stands "$3" "$4"; then both "$3" "$2"; exit 0; fi\n'
    + _KNOWN
    + 'if [ "$alive" = 1 ]; then both "$pid" "$2"; fi\n'
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
        self._facts: UnitFacts | None = None
        self._installed: Installed | None = None
        self._invocation: str | None = None
        self._standing: Standing | None = None
        self._armed = False

    # --- what is there ---------------------------------------------------------------------------------------------

    def describe(self) -> UnitFacts:
        """See `Service.describe`. The command comes from the box's `unit_file:`, or is `program:` alone."""
        lines = self._sh(_DESCRIBE).splitlines()
        home, uid, *missing = lines
        if missing:
            raise BoxError(f"a plain process needs {' and '.join(missing)} on the box", hint="util-linux has setsid")
        argv, env = self._base(home, int(uid))
        self._standing = self._find(argv, None)
        self._facts = UnitFacts(
            name=self.name,
            exists=True,
            argv=argv,
            env=env,
            user=self._transport.user,
            home=home,
            active=self._standing is not None,
            enabled=None,
            main_pid=None if self._standing is None else self._standing.pid,
            cache_root=posixpath.join(home, posixpath.dirname(self._dir), "caches"),
        )
        return self._facts

    def _find(self, argv: tuple[str, ...], known: tuple[str, ...] | None) -> Standing | None:
        """Production, if it runs: by its command of today, or by the one that a killed campaign had found."""
        if self._box.engine == "rehearsal":
            return None
        return standing.find(self._transport, [argv] if known is None else [argv, known])

    def _unit(self) -> UnitFacts:
        return self._facts or self.describe()

    @property
    def guard_folder(self) -> str:
        """Where the watchdog lives while a campaign does, from the login's home."""
        return f"{self._dir}-guard"

    @property
    def _guard(self) -> Guard:
        home = self._unit().home
        return Guard(posixpath.join(home, self.guard_folder), posixpath.join(home, self._dir))

    def _of_production(self) -> tuple[str, str]:
        return ("0", "0") if self._standing is None else (str(self._standing.pid), self._standing.start)

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
        with unitfile.problems_of(str(path), text):
            unit = unitfile.parse(text)
            specifiers = unitfile.unit_specifiers(
                path.name, user=self._transport.user, uid=uid, home=home, fragment=str(path)
            )
            return unitfile.exec_argv(unit, specifiers), unitfile.environment(unit, specifiers)

    def production(self) -> ProductionState:
        """See `Service.production`."""
        if self._box.engine == "rehearsal":
            return ProductionState(unit=self.name, active=False)
        known = self._guard.knows(self._transport)
        self._standing = found = self._find(self._unit().argv, known)
        command = found.argv if found is not None else known or ()
        return ProductionState(unit=self.name, active=bool(command), command=command)

    def state(self) -> UnitState:
        """See `Service.state`."""
        words = self._sh(_STATE, self._dir, *self._of_production()).split()
        if words[:1] == ["production"] and self._standing is not None:
            return UnitState("active", "running", self._standing.pid, None, 0, "success", None)
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
        return tuple(int(word) for word in self._sh(_PIDS, self._dir, *self._of_production()).split() if word.isdigit())

    def ours(self) -> bool:
        """See `Service.ours`."""
        return self._standing is None or self.state().main_pid != self._standing.pid

    def command(self) -> tuple[str, ...]:
        """See `Service.command`."""
        return self.effective()[0]

    def effective(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """See `Service.effective`."""
        cut = uuid.uuid4().hex  # an argument may hold anything, but not this
        cmdline, _, environ = self._sh(_EFFECTIVE, self._dir, cut, *self._of_production()).partition(cut)
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
        started = Action("in a session of its own, output to its log", _command(_installed(launch, self._unit().env)))
        ended = Action("at the end, to each of its processes", ("kill", "-TERM", "PIDS"))
        return {"render": self.install_actions(launch), "start": (started,), "stop": (ended,)}

    def boot_actions(self, launch: Launch) -> tuple[Action, ...]:
        """See `Service.boot_actions`."""
        return tuple(action for actions in self.step_actions(launch).values() for action in actions)

    def install(self, launch: Launch, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        """See `Service.install`."""
        together(self._transport, self.install_actions(launch, stop_timeout_s=stop_timeout_s))
        self._installed = _installed(launch, self._unit().env)

    def start(self) -> None:
        """See `Service.start`."""
        if self._installed is None:
            raise BoxError("nothing was installed to start")
        self._invocation = uuid.uuid4().hex
        heart = self._guard.heart if self._armed else ""
        try:
            self._sh(_START, heart, self._dir, _SUPERVISE, self._invocation, *_command(self._installed)[1:])
        except CommandFailed as error:
            if error.status == FIRED:
                raise self._guard.fired() from error
            raise

    def stop(self, *, kill: bool, deadline_s: float) -> None:
        """See `Service.stop`. Production is never killed before its deadline."""
        self._stop_ours(kill=kill, deadline_s=deadline_s)
        if self._standing is not None:
            standing.stop(self._transport, self._standing, deadline_s=deadline_s, grace_s=_KILL_GRACE_S)

    def _stop_ours(self, *, kill: bool, deadline_s: float) -> None:
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

    def restore(self, was: ProductionState) -> None:
        """See `Service.restore`."""
        self._stop_ours(kill=True, deadline_s=0.0)
        if not was.active:
            return
        self._standing = self._find(self._unit().argv, was.command or None)
        if self._standing is not None:
            return
        try:
            self._guard.start_production(self._transport)
        except BoxError as error:
            raise RestoreFailed(
                f"{self.name} does not run, and {error.what}",
                hint=f"start it by hand: {shlex.join(redact_argv(was.command))}",
            ) from error
        self._await_production(was)

    def _await_production(self, was: ProductionState) -> None:
        end, pause = time.monotonic() + _BACK_S, threading.Event()
        while time.monotonic() < end:
            self._standing = self._find(self._unit().argv, was.command or None)
            if self._standing is not None:
                return
            pause.wait(0.1)
        raise RestoreFailed(
            f"{self.name} was started again as it was, but does not run", hint="its own log on the box says why"
        )

    def arm(self, was: ProductionState, dead_man_s: float) -> None:
        """See `Service.arm`. A watchdog that a killed campaign left is taken over."""
        guard, unit = self._guard, self._unit()
        again = None
        if was.active:
            known = guard.knows(self._transport)
            self._standing = self._find(unit.argv, known)
            if self._standing is not None:
                log = posixpath.join(posixpath.dirname(guard.dir), "production.log")
                again = standing.capture(self._transport, self._standing, folder=guard.folder, log=log)
            elif known is None:
                raise BoxError(
                    f"{self.name} ran before this campaign and does not now, and how it was started is not known on "
                    "the box any more",
                    hint="start it by hand, then run the same command again",
                )
        guard.arm(
            self._transport,
            dead_man_s=dead_man_s,
            end_engine=_STOP,
            grace_s=_KILL_GRACE_S,
            sweep=caches.sweep_script(unit, root=self._box.cache_root),
            production=again,
        )
        self._armed = True

    def beat(self) -> None:
        """See `Service.beat`."""
        if self._armed:
            self._guard.beat(self._transport)

    def disarm(self) -> None:
        """See `Service.disarm`. The engine's log and process id go too: a boot's journal is kept on our side."""
        self._guard.disarm(self._transport)
        self._armed = False

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
