"""One systemd unit, of the system or of the user's own manager: read, taken over by a run-time drop-in, given back.

What the user wrote is never edited: our drop-in lies below /run, is named so that it sorts after `override.conf` (which
is what `systemctl edit` makes), and is gone after a reboot. What is needed of root is done by a door of `doors.py`: the
helper on the box, or a short list of exact commands (`sudo_lines`). Everything that only reads runs as the login. One
method is one round trip to the box.

A daemon-reload takes systemd some tenths of a second, for every boot. So the drop-in stays the same from boot to boot:
it names the program and takes arguments and environment from a file of ours beside it, which systemd reads at each
start. It is written and reloaded anew only when it differs.
"""

from __future__ import annotations

import re
import shlex
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from orchestrator.box import caches, coldboot_box, commands, unitfile
from orchestrator.box.aside import Aside
from orchestrator.box.commands import HELPER
from orchestrator.box.deadman import BEAT, FIRED, DeadMan, was_active
from orchestrator.box.doors import Door, Granted, HelperDoor, Places, choose, grant_problem, read_granted
from orchestrator.box.engines import Launch
from orchestrator.box.helper import install_command
from orchestrator.box.owncaches import PUT_BACK_S, OwnCaches
from orchestrator.box.process import read_argv, read_environ
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
from orchestrator.errors import BoxError, CommandFailed, CommandTimeout, RestoreFailed, UsageError
from orchestrator.journal import entries
from orchestrator.matrix import BoxSpec
from orchestrator.records import JournalEntry, ProductionState, StepName

DROP_IN = "zz-coldboot.conf"
_ENV_FILE = "zz-coldboot.env"
_ARGS = "COLDBOOT_ARGS"
_PART = "\x1e"
_RUNNING = ("active", "activating", "reloading", "refreshing")
_TYPES = ("simple", "exec", "notify", "notify-reload", "idle")
_SETTLE_S = 10.0

_STATE = ("ActiveState", "SubState", "MainPID", "InvocationID", "NRestarts", "Result", "ExecMainCode", "ExecMainStatus")
_FACTS = (
    *("Id", "LoadState", "ActiveState", "MainPID", "FragmentPath", "DropInPaths", "UnitFileState", "User", "Type"),
    *("DynamicUser", "Transient", "ProtectSystem", "ProtectHome"),
)

_DESCRIBE = r"""
unit=$1 drop_in=$2 script=$3 helper=$4; shift 4
part() { printf '\036%s\n' "$1"; }
part show; "$@" show --no-pager -p __FACTS__ -- "$unit" 2>&1
part cat; "$@" cat --no-pager -- "$unit" 2>&1
user=$("$@" show -p User --value -- "$unit" 2>/dev/null)
part passwd; getent passwd "${user:-$(id -un)}" || getent passwd root
part me; id -un; id -u; printf '%s\n' "$HOME"; uname -n; uname -r; uname -m
cat /etc/machine-id /proc/sys/kernel/random/boot_id 2>/dev/null
part linger; [ -e "/var/lib/systemd/linger/$(id -un)" ] && echo yes
part journal
for file in /var/log/journal/*/system.journal /run/log/journal/*/system.journal; do [ -r "$file" ] && echo yes; done
part ours; [ -e "$drop_in" ] && echo yes
part script; cat -- "$script" 2>/dev/null
part helper; [ -n "$helper" ] && [ -x __HELPER__ ] && __CALL__ </dev/null 2>/dev/null
exit 0
"""
_READ = r"""for f; do printf '\036%s\n' "$f"; cat -- "$f" 2>/dev/null; done; exit 0"""
_PIDS = r"""
unit=$1; shift
group=$("$@" show -p ControlGroup --value -- "$unit") || exit 1
case $group in '' | /) exit 0 ;; esac
for top in /sys/fs/cgroup /sys/fs/cgroup/systemd /sys/fs/cgroup/unified; do
  [ -d "$top$group" ] || continue
  find "$top$group" -name cgroup.procs -exec cat {} + 2>/dev/null
  exit 0
done
"$@" show -p MainPID --value -- "$unit" | grep -vx 0
exit 0
"""
_COMMAND = r"""
unit=$1; shift
pid=$("$@" show -p MainPID --value -- "$unit") || exit 1
[ "${pid:-0}" = 0 ] || cat "/proc/$pid/cmdline" 2>/dev/null
exit 0
"""
_EFFECTIVE = r"""
unit=$1 cut=$2 file=$3 helper=$4; shift 4
pid=$("$@" show -p MainPID --value -- "$unit") || exit 1
[ "${pid:-0}" != 0 ] || exit 0
cat "/proc/$pid/cmdline" 2>/dev/null; printf %s "$cut"
if [ -r "/proc/$pid/environ" ] && cat "/proc/$pid/environ" 2>/dev/null; then exit 0; fi
if [ -n "$helper" ] && [ -e "$file" ] && __CALL__ </dev/null 2>/dev/null; then exit 0; fi
printf %s "$cut"; "$@" show -p Environment --value -- "$unit"; printf %s "$cut"; cat -- "$file" 2>/dev/null
exit 0
"""
_LOOK = r"""
unit=$1 drop_in=$2 aside=$3; shift 3
"$@" show -p ActiveState --value -- "$unit" || exit 1
[ -e "$drop_in" ] && echo ours
[ -e "$aside" ] && echo aside
exit 0
"""


class SystemdService:
    """A systemd unit; see `unit.Service`."""

    def __init__(self, transport: Transport, box: BoxSpec, *, user: bool = False) -> None:
        """`user`: the unit of the login's own manager instead of the system's."""
        if box.unit is None:
            raise UsageError(f"box {box.name} names no unit", hint="`unit: vllm.service`, or `service: process`")
        self._transport = transport
        self._box = box
        self._user = user
        self.name = box.unit if "." in box.unit else f"{box.unit}.service"
        self.lock_name = self.name
        self._facts: UnitFacts | None = None
        self._launch: Launch | None = None
        self._writable: str | None = None
        self._loaded: str | None = None
        self._armed = False
        self._kept: list[str] = []
        self._granted: Granted | None = None

    # --- where -----------------------------------------------------------------------------------------------------

    @cached_property
    def _runtime(self) -> str:
        """`$XDG_RUNTIME_DIR` of the login; `/run` for a system unit."""
        if not self._user:
            return "/run"
        return "/run/user/" + self._transport.run(("id", "-u"), timeout_s=COMMAND_S).stdout.strip()

    @property
    def _base(self) -> str:
        return f"{self._runtime}/systemd/{'user' if self._user else 'system'}"

    @property
    def _directory(self) -> str:
        return f"{self._base}/{self.name}.d"

    @property
    def drop_in(self) -> str:
        """Path of our drop-in."""
        return f"{self._directory}/{DROP_IN}"

    @property
    def dead_man(self) -> DeadMan:
        """Where the restore that the box does by itself lives."""
        ours = (self.drop_in, self._env_file)
        run = f"{self._runtime}/coldboot/{self.name}"
        aside = self._aside
        return DeadMan(self.name, self._user, self._base, run, self.drop_in, ours, put_back=(aside.name, aside.path))

    @property
    def _aside(self) -> Aside:
        """The unit that puts back what `cache: clear` has set aside."""
        owner = None if self._user else self._facts.user if self._facts else "root"
        return Aside(self.name, owner, self._persistent, self.drop_in)

    @cached_property
    def _persistent(self) -> str:
        """Where the manager reads units that survive a reboot."""
        if not self._user:
            return "/etc/systemd/system"
        home = self._transport.run(("sh", "-c", 'printf %s "$HOME"'), timeout_s=COMMAND_S).stdout
        return f"{home}/.config/systemd/user"

    @property
    def own_caches(self) -> OwnCaches:
        """The unit's own cache directories, for `cache: clear`; the unit has been read before."""
        granted = self._granted.clears if self._granted and self._facts and self._facts.helper else None
        return OwnCaches(self._transport, self._aside, None if self._user else "root", self._ctl, granted, self._kept)

    @property
    def _ctl(self) -> tuple[str, ...]:
        if not self._user:
            return ("systemctl",)
        return ("env", f"XDG_RUNTIME_DIR={self._runtime}", "systemctl", "--user")

    @property
    def _places(self) -> Places:
        return Places(
            unit=self.name,
            login=self._transport.user,
            as_user=None if self._user else "root",
            ctl=self._ctl,
            directory=self._directory,
            drop_in=self.drop_in,
            env_file=self._env_file,
            dead=self.dead_man,
        )

    @property
    def door(self) -> Door:
        """The way to what only root may do, as `describe` or `look` found it.

        Raises:
            BoxError: the box asks for the helper, which cannot be used.
        """
        facts = self._facts
        argv, mentioned = ((), ()) if facts is None else (facts.argv, facts.mentioned)
        install = install_command(self._box)
        return choose(self._places, self._box.root, self._granted, argv, install, mentioned=mentioned)

    @property
    def granted(self) -> Granted | None:
        """What the helper on the box said to `describe` or `look`; None where there is none that answers."""
        return self._granted

    def _by_granted(self) -> bool:
        try:
            return isinstance(self.door, HelperDoor)
        except BoxError:
            return False

    def _asks_helper(self) -> bool:
        return not self._user and self._box.root != "sudo" and (self._box.root is not None or not self._is_root)

    @property
    def _is_root(self) -> bool:
        return self._transport.is_root and self._box.sudo is not True

    def _by_helper(self, script: str, *words: str) -> str:
        """A script in which the helper is called with these words, as this login calls it."""
        call = shlex.join(self._transport.as_user((HELPER, *words), "root"))
        return script.replace("__HELPER__", HELPER).replace("__CALL__", call)

    # --- what is there ---------------------------------------------------------------------------------------------

    def describe(self) -> UnitFacts:
        """See `Service.describe`. Base flags come from the installed unit, or from the box's `unit_file:`."""
        parts = self._parts()
        self._refuse_unit(parts)
        self._refuse_login(parts)
        found = self._read(parts)
        if isinstance(self.door, HelperDoor):
            self._refuse_grant(found)
        return found

    def look(self) -> UnitFacts:
        """See `Service.look`."""
        parts = self._parts()
        self._refuse_unit(parts)
        return self._read(parts)

    def _read(self, parts: dict[str, str]) -> UnitFacts:
        shown = _properties(parts["show"])
        self.name = self.lock_name = shown["Id"]
        drop_ins = _paths(shown.get("DropInPaths", ""))
        files = _split_cat(parts["cat"], (shown["FragmentPath"], *drop_ins))
        theirs = tuple(path for path in drop_ins if path != self.drop_in)
        self._refuse_later_drop_ins(theirs)
        texts = [files[path] for path in (shown["FragmentPath"], *theirs) if path in files]
        installed = tuple(texts)
        if self._box.unit_file is not None:
            texts = [_read_local(self._box)]
        unit = unitfile.parse(*texts)
        specifiers = self._specifiers(parts["me"].split("\n"), shown["FragmentPath"])
        paths = unitfile.environment_files(unit, specifiers)
        env = unitfile.environment(unit, specifiers, self._environment_files([path for path, _ in paths]))
        passwd = (parts["passwd"].strip() or "root:x:0:0::/root:/bin/sh").split(":")
        self._facts = UnitFacts(
            name=self.name,
            exists=True,
            argv=unitfile.exec_argv(unit, specifiers, env),
            env=env,
            user=self._transport.user if self._user else passwd[0] if shown.get("User") else "root",
            home=passwd[5] if self._user or shown.get("User") else "/root",
            active=shown["ActiveState"] in _RUNNING,
            enabled={"enabled": True, "enabled-runtime": True, "disabled": False}.get(shown.get("UnitFileState", "")),
            drop_ins=theirs,
            main_pid=int(shown.get("MainPID") or 0) or None,
            environment_files=tuple(path for path, _ in paths),
            our_drop_in=parts["ours"].strip() == "yes",
            privileged=coldboot_box.privileged_lines(installed),
            mentioned=coldboot_box.mentioned(installed),
        )
        self._granted = read_granted(parts.get("helper", ""), self.name)
        self._facts = replace(self._facts, helper=self._by_granted())
        self._writable = self._behind_protection(shown, self._facts)
        return self._facts

    def _behind_protection(self, shown: dict[str, str], facts: UnitFacts) -> str | None:
        """The cache directory that the unit's sandbox must let through; None when there is no sandbox.

        Raises:
            BoxError: the sandbox hides the place altogether.
        """
        home, system = shown.get("ProtectHome", "no"), shown.get("ProtectSystem", "no")
        place = caches.cache_place(facts, self._box.cache_root)
        if home in ("yes", "tmpfs") and place.startswith(("/home/", "/root/", "/run/user/")):
            raise BoxError(
                f"{self.name} has ProtectHome={home}: it could not see its cold caches in {place}",
                hint=f"`cache_root: /var/cache/coldboot`, a directory of {facts.user}",
            )
        return place if system == "strict" or home == "read-only" else None

    def _parts(self) -> dict[str, str]:
        script = _DESCRIBE.replace("__FACTS__", " -p ".join(_FACTS))
        script = self._by_helper(script, "version")
        asks = "yes" if self._asks_helper() else ""
        said = self._sh(script, self.name, self.drop_in, self.dead_man.script, asks, *self._ctl)
        found = (part.partition("\n") for part in said.split(_PART)[1:])
        return {name: text for name, _, text in found}

    def _refuse_unit(self, parts: dict[str, str]) -> None:
        """Raises for a unit that cannot be measured, with what to run."""
        shown = _properties(parts["show"])
        ctl = "systemctl --user" if self._user else "systemctl"
        if "LoadState" not in shown:
            raise BoxError(
                f"the service manager does not answer: {parts['show'].strip()[:300]}",
                hint=f"`loginctl enable-linger {self._transport.user}` on the box" if self._user else None,
            )
        if shown["LoadState"] != "loaded" or not shown.get("FragmentPath"):
            raise BoxError(
                f"no unit {self.name} on the box (LoadState={shown['LoadState']})",
                hint=f"`{ctl} list-unit-files --type=service` shows what there is; name it in the box's `unit:`",
            )
        if shown.get("Transient") == "yes":
            raise BoxError(f"{self.name} is transient: stopped, it would be gone", hint="install it as a unit file")
        if shown.get("Type") not in _TYPES:
            raise BoxError(
                f"{self.name} is Type={shown.get('Type')}; a server that stays in the foreground is needed",
                hint=f"one of Type={', '.join(_TYPES)}",
            )
        if shown.get("DynamicUser") == "yes":
            raise BoxError(
                f"{self.name} has DynamicUser=yes: there is no user to whom cold caches could belong",
                hint="give it a User= of its own",
            )

    def _refuse_login(self, parts: dict[str, str]) -> None:
        """Raises for a login that cannot see or keep the unit, with what to run."""
        if self._user and parts["linger"].strip() != "yes":
            raise BoxError(
                f"the login {self._transport.user} has no lingering: its units end with its last session",
                hint=f"`sudo loginctl enable-linger {self._transport.user}` on the box",
            )
        if not self._user and not parts["journal"].strip():
            raise BoxError(
                f"the login {self._transport.user} cannot read the journal",
                hint=f"`sudo usermod -aG systemd-journal {self._transport.user}` on the box, then log in anew",
            )

    def _refuse_grant(self, facts: UnitFacts) -> None:
        """Raises for what the helper on the box would refuse at every boot, with what to run."""
        wrong = grant_problem(self._granted, facts, caches.cache_place(facts, self._box.cache_root))
        if wrong is not None:
            raise BoxError(wrong[0], hint=wrong[1])

    def _refuse_later_drop_ins(self, drop_ins: Sequence[str]) -> None:
        later = [path for path in drop_ins if path.rpartition("/")[2] > DROP_IN]
        if later:
            raise BoxError(
                f"{later[0]} is read after our drop-in and could undo it",
                hint=f"rename it so that it sorts before {DROP_IN}",
            )

    def _specifiers(self, me: Sequence[str], fragment: str) -> dict[str, str]:
        login, uid, home, host, release, machine = me[:6]
        ids = [line for line in me[6:] if line]
        facts = {"H": host, "l": host.partition(".")[0], "v": release, "a": machine.replace("_", "-")}
        facts |= dict(zip(("m", "b"), (each.replace("-", "") for each in ids), strict=False))
        if not self._user:
            login, uid, home = "root", "0", "/root"
        return unitfile.unit_specifiers(
            self.name, user=login, uid=int(uid), home=home, runtime_dir=self._runtime, fragment=fragment, facts=facts
        )

    def _environment_files(self, paths: Sequence[str]) -> dict[str, str]:
        """Those that the login may read; a secret one counts as empty, as systemd alone reads it at the start."""
        if not paths:
            return {}
        found = (part.partition("\n") for part in self._sh(_READ, *paths).split(_PART)[1:])
        return {path: text for path, _, text in found}

    def production(self) -> ProductionState:
        """See `Service.production`. After a killed campaign its restore script still knows whether the unit ran."""
        facts = self.describe()
        # The script is there as long as a campaign has not given back, also before and after our drop-in is.
        known = was_active(self._sh(_READ, self.dead_man.script))
        active = facts.active if known is None else known
        return ProductionState(
            unit=self.name, active=active, enabled=facts.enabled, command=facts.argv, drop_ins=facts.drop_ins
        )

    def state(self) -> UnitState:
        """See `Service.state`."""
        said = self._transport.run((*self._ctl, "show", *_wanted(_STATE), "--", self.name), timeout_s=COMMAND_S)
        shown = _properties(said.stdout)
        killed = shown.get("ExecMainCode") in ("2", "3")
        status = int(shown.get("ExecMainStatus") or 0)
        ended = shown.get("ExecMainCode", "0") != "0"
        return UnitState(
            active_state=shown.get("ActiveState", "unknown"),
            sub_state=shown.get("SubState", "unknown"),
            main_pid=int(shown.get("MainPID") or 0) or None,
            invocation_id=shown.get("InvocationID") or None,
            n_restarts=int(shown.get("NRestarts") or 0),
            result=shown.get("Result") or None,
            exit_status=(128 + status if killed else status) if ended else None,
        )

    def pids(self) -> tuple[int, ...]:
        """See `Service.pids`: everything in its control group."""
        return tuple(sorted(int(word) for word in self._sh(_PIDS, self.name, *self._ctl).split()))

    def ours(self) -> bool:
        """See `Service.ours`: our drop-in is there."""
        return self._look()[1]

    def command(self) -> tuple[str, ...]:
        """See `Service.command`. It needs nothing of root: each boot asks it."""
        return self._argv(self._sh(_COMMAND, self.name, *self._ctl))

    def _argv(self, cmdline: str) -> tuple[str, ...]:
        known = [each.argv for each in (self._launch, self._facts) if each is not None]
        argv = read_argv(cmdline, ())
        return next((each for each in known if read_argv(cmdline, each) == each), argv)

    def effective(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """See `Service.effective`. Where /proc/PID/environ may not be read, what systemd was told stands for it."""
        cut = uuid.uuid4().hex  # an argument may hold anything, but not this
        script = self._by_helper(_EFFECTIVE, self.name, "environment")
        helper = "yes" if self._facts is not None and self._facts.helper else ""
        said = self._sh(script, self.name, cut, self._env_file, helper, *self._ctl)
        cmdline, environ, shown, ours = [*said.split(cut), "", "", ""][:4]
        told = read_environ("\0".join(unitfile.words(shown.strip()))) | unitfile.parse_environment_file(ours)
        if self._launch is not None:
            # Our own file is root's alone; what we wrote into it is known here.
            told |= self._launch.env
        env = read_environ(environ) or told
        return self._argv(cmdline), env

    # --- what we do ------------------------------------------------------------------------------------------------

    def drop_in_text(self, launch: Launch, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> str:
        """Our drop-in for one launch. Raises UsageError for what systemd would not take."""
        program, *arguments = launch.argv
        by_file = unitfile.is_env_value("".join(arguments))
        command = unitfile.quote_exec((program,)) + f" ${_ARGS}" if by_file else unitfile.quote_exec(launch.argv)
        lines = (
            "# Written by coldboot. Gone after a reboot; `invoke restore` takes it away.",
            "[Unit]",
            "StartLimitIntervalSec=0",
            "[Service]",
            "ExecStart=",
            f"ExecStart={command}",
            "Restart=no",
            "KillMode=control-group",
            "SendSIGKILL=yes",
            "TimeoutStartSec=infinity",
            f"TimeoutStopSec={stop_timeout_s:g}",
            "StandardOutput=journal",
            "StandardError=journal",
            "LogRateLimitIntervalSec=0",
            f"EnvironmentFile={self._env_file}",
            *(f"UnsetEnvironment={name}" for name in launch.unset_env),
            *((f"ReadWritePaths=-{unitfile.quote_path(self._writable)}",) if self._writable else ()),
        )
        return "\n".join(lines) + "\n"

    @property
    def _env_file(self) -> str:
        """Path of the file with arguments and environment. It prevails over production's, in files or not."""
        return f"{self._directory}/{_ENV_FILE}"

    def _env_text(self, launch: Launch, drop_in: str) -> str:
        env = dict(launch.env)
        if f"${_ARGS}\n" in drop_in:
            env[_ARGS] = unitfile.quote_words(launch.argv[1:])
        return "".join(f"{unitfile.quote_env_file(*pair)}\n" for pair in env.items())

    def install_actions(self, launch: Launch, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> tuple[Action, ...]:
        """See `Service.install_actions`."""
        text = self.drop_in_text(launch, stop_timeout_s=stop_timeout_s)
        return self.door.install(text, self._env_text(launch, text), whole=text != self._loaded)

    def step_actions(self, launch: Launch) -> dict[StepName, tuple[Action, ...]]:
        """See `Service.step_actions`."""
        return {
            "clean_slate": (self.door.stop(),),
            "render": self.install_actions(launch),
            "start": (self.door.start(),),
            "stop": (self.door.stop(), *self.door.kill()),
        }

    def boot_actions(self, launch: Launch) -> tuple[Action, ...]:
        """See `Service.boot_actions`."""
        door = self.door
        return (*self.install_actions(launch), door.start(), door.stop(), *door.kill())

    def install(self, launch: Launch, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        """See `Service.install`."""
        self._act(self.install_actions(launch, stop_timeout_s=stop_timeout_s))
        self._loaded = self.drop_in_text(launch, stop_timeout_s=stop_timeout_s)
        self._launch = launch

    def start(self) -> None:
        """See `Service.start`.

        Raises:
            BoxError: our drop-in is gone, so that it would be production that starts.
        """
        self._act((self.door.start(),))

    def _act(self, actions: Sequence[Action]) -> None:
        """Do what goes on with a boot, unless the box has restored by itself or somebody took our drop-in away."""
        dead, checks = self.dead_man, []
        if self._armed:
            checks.append(Action("the box has not restored by itself", ("test", "-e", dead.heart)))
        if self._loaded is not None:
            checks.append(Action("our drop-in is there", ("test", "-e", self.drop_in)))
        try:
            together(self._transport, (*checks, *actions))
        except CommandFailed as error:
            self._loaded = None
            if error.command == shlex.join(("test", "-e", dead.heart)):
                raise self._restored_by_itself() from error
            if error.command == shlex.join(("test", "-e", self.drop_in)):
                raise BoxError(
                    f"our drop-in for {self.name} is gone, and without it production would start",
                    hint="was the box rebooted, or is somebody else at work on it?",
                ) from error
            raise

    def _restored_by_itself(self) -> BoxError:
        return BoxError(
            f"the box has restored {self.name} by itself: it had no sign of life of us for too long",
            hint="give the box a longer `dead_man:`",
        )

    def stop(self, *, kill: bool, deadline_s: float) -> None:
        """See `Service.stop`."""
        left = Action("what still lives", ("sh", "-c", _PIDS, "coldboot", self.name, *self._ctl))
        if not kill:
            try:
                said = together(self._transport, (self.door.stop(), left), timeout_s=max(1.0, deadline_s))
            except CommandTimeout:
                kill = True
        if kill:
            said = together(self._transport, (*self.door.kill(), left), timeout_s=max(COMMAND_S, deadline_s))
        if said.stdout.split():
            raise BoxError(
                f"processes of {self.name} survive SIGKILL: {' '.join(said.stdout.split())}",
                hint="they hang in the kernel (state D): the driver or the disk; a reboot of the box ends them",
            )

    # --- the journal -----------------------------------------------------------------------------------------------

    def cursor(self) -> str:
        """See `Service.cursor`."""
        said = self._transport.run(("journalctl", "-q", "-n", "0", "--show-cursor"), timeout_s=COMMAND_S).stdout
        found = re.search(r"^-- cursor: (\S+)$", said, re.MULTILINE)
        if found is None:
            raise BoxError("the journal has no entry that this login may read", hint="is journald running on the box?")
        return found.group(1)

    def follow(self, cursor: str) -> EntryStream:
        """See `Service.follow`."""
        words = ("journalctl", "-q", "-o", "json", "--all", "--no-tail", "-f", "--after-cursor", cursor)
        return LineEntries(self._transport.stream((*words, *self._matches())), _read_entry)

    def _matches(self) -> tuple[str, ...]:
        if self._user:
            own = (f"_SYSTEMD_USER_UNIT={self.name}", "+", f"USER_UNIT={self.name}", "+")
            return (*own, f"COREDUMP_USER_UNIT={self.name}", "+", "_TRANSPORT=kernel")
        return (
            *(f"_SYSTEMD_UNIT={self.name}", "+", "_PID=1", f"UNIT={self.name}", "+"),
            *("_UID=0", f"OBJECT_SYSTEMD_UNIT={self.name}", "+", "_TRANSPORT=kernel"),
        )

    # --- the end ---------------------------------------------------------------------------------------------------

    def restore(self, was: ProductionState) -> None:
        """See `Service.restore`. While our drop-in is there, what runs is a variant and is killed."""
        if self._facts is None:
            self.look()
        active, ours, aside = self._look()
        own = self.own_caches
        listed = own.listed() if aside else ()
        actions = (
            *(self.door.restore(active=False) if ours else ()),
            *((own.put_back_action,) if aside else ()),
            *((self.door.start(),) if was.active and (ours or not active) else ()),
        )
        if actions:
            together(self._transport, actions, timeout_s=2 * COMMAND_S + (PUT_BACK_S if aside else 0))
        self._launch = self._loaded = None
        self._confirm(was)
        self._confirm_caches(listed)

    def _confirm_caches(self, listed: Sequence[str]) -> None:
        """Production runs by now; that some of its caches are not back is told nevertheless."""
        if not listed:
            return
        assert self._facts is not None
        left = self.own_caches.left(self._facts, listed)
        if left:
            unit = self.own_caches.names.name
            raise RestoreFailed(
                f"caches of {self.name} are still set aside: {', '.join(f'{path}.coldboot-aside' for path in left)}",
                hint=f"`systemctl start {unit}` on the box puts them back; `journalctl -u {unit}` says why not",
            )

    def _look(self) -> tuple[bool, bool, bool]:
        """Whether it runs, whether our drop-in is there, and whether caches may be set aside."""
        words = self._sh(_LOOK, self.name, self.drop_in, self._aside.path, *self._ctl).split()
        return words[0] in _RUNNING, "ours" in words, "aside" in words

    def _confirm(self, was: ProductionState) -> None:
        end = time.monotonic() + _SETTLE_S
        while True:
            active, ours, _ = self._look()
            if not ours and (active or not was.active):
                return
            if time.monotonic() >= end:
                break
        left = f"{self.drop_in} is still there" if ours else f"{self.name} does not run, and did before"
        raise RestoreFailed(
            left,
            hint="on the box: "
            + "; ".join(
                shlex.join(action.argv) for action in self.door.restore(active=was.active) if not action.may_fail
            ),
        )

    # --- the dead man ----------------------------------------------------------------------------------------------

    def arm(self, was: ProductionState, dead_man_s: float) -> None:
        """See `Service.arm`. A timer that a killed campaign left is taken over."""
        together(self._transport, self.door.arm(active=was.active, dead_man_s=dead_man_s, sweep=self._sweep()))
        self._armed = True

    def _sweep(self) -> str:
        """The command by which the box takes our cold caches away, as the service's user."""
        if self._facts is None:
            return ":"
        script = caches.sweep_script(self._facts, root=self._box.cache_root)
        as_user = () if self._user else ("runuser", "-u", self._facts.user, "--")
        return f"printf %s {shlex.quote(script)} | {shlex.join((*as_user, *caches.AS_USER))}"

    def beat(self) -> None:
        """See `Service.beat`."""
        said = self._transport.run(
            ("sh", "-c", BEAT, "coldboot", self.dead_man.heart), timeout_s=COMMAND_S, check=False
        )
        if said.status == FIRED:
            raise self._restored_by_itself()
        if said.status != 0:
            raise commands.failed(said)

    def disarm(self) -> None:
        """See `Service.disarm`."""
        together(self._transport, self.door.disarm())
        self._armed = False

    def sudo_needs(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """See `Service.sudo_needs`: exactly what the actions of this service are, and the caches as the unit's user."""
        if self._user or self._transport.is_root:
            return ()
        door = self.door
        if isinstance(door, HelperDoor):
            return (("root", (HELPER, "version")),)
        actions = (
            *door.install("", "", whole=True),
            *(door.start(), door.stop(), *door.kill()),
            *door.arm(active=True, dead_man_s=60.0),
            *door.disarm(),
            *door.restore(active=True),
            *self.own_caches.guard_actions(()),
            self.own_caches.put_back_action,
        )
        needed = [("root", action.argv) for action in actions if action.as_user == "root"]
        if self._facts is not None:
            needed += caches.sudo_needs(self._facts, self._transport.user)
        return tuple(dict.fromkeys(needed))

    def sudo_lines(self) -> tuple[str, ...]:
        """See `Service.sudo_lines`."""
        return tuple(commands.sudoers_line(self._transport.user, user, argv) for user, argv in self.sudo_needs())

    def _sh(self, script: str, *arguments: str) -> str:
        return self._transport.run(("sh", "-c", script, "coldboot", *arguments), timeout_s=COMMAND_S).stdout


def _wanted(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("-p", name))


def _properties(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z]\w*=", line))


def _paths(text: str) -> tuple[str, ...]:
    return unitfile.words(text)


def _split_cat(text: str, paths: Sequence[str]) -> dict[str, str]:
    """`systemctl cat` cut at the headers `# PATH`, taken in the order in which systemd has loaded the files."""
    found: dict[str, str] = {}
    waiting = list(paths)
    current: list[str] = []
    for line in text.splitlines(keepends=True):
        if waiting and line.rstrip("\n") == f"# {waiting[0]}":
            current = []
            found[waiting.pop(0)] = ""
        elif found:
            current.append(line)
        if found:
            found[next(reversed(found))] = "".join(current)
    return found


def _read_local(box: BoxSpec) -> str:
    assert box.unit_file is not None
    try:
        return box.unit_file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"unit_file {box.unit_file}: {error.strerror or error}") from error


def _read_entry(line: str, index: int) -> tuple[JournalEntry, ...]:
    entry = entries.parse_json_line(line, index)
    return () if entry is None else (entry,)
