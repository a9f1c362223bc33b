"""A box in our hands: connection, lock, armed restore and heartbeat. Taken, taken again after a loss, given back.

A connection that was lost stays lost, and with it the lock and everything that ran over it. So a campaign asks before
each boot whether the box is still its own (`sure`), and takes it again when it is not: it connects anew until the
box's `reconnect_s` are over, ends the holder of its own old lock, refuses a box that is no longer what the experiment
began with, and arms the restore anew, which a reboot or the box itself has taken away.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from orchestrator import load
from orchestrator.box import caches, lock
from orchestrator.box.engines import Launch
from orchestrator.box.services import Service, make_service, own_caches
from orchestrator.box.transports import Transport, connect
from orchestrator.errors import BoxBusy, BoxError, CommandTimeout, Interrupted, RestoreFailed, Unreachable, UsageError
from orchestrator.failpoints import reached
from orchestrator.interrupts import Interrupts
from orchestrator.matrix import Deadlines
from orchestrator.progress import Listener, hours
from orchestrator.records import ProductionState
from orchestrator.redact import redact_argv
from orchestrator.survey import Design, Site, engine_fingerprint, refuse_changed, running_requests

API_KEY = "COLDBOOT_API_KEY"
API_KEY_FILE = "COLDBOOT_API_KEY_FILE"
_KEY_LIMIT = 4096
AGAIN_EVERY_S = 1.0
WHEN_ASKED_TO_STOP_S = 20.0


def holder(what: str) -> str:
    """Who we are, as others shall read it who find the box taken."""
    return f"{getpass.getuser()}@{socket.gethostname()} pid {os.getpid()} {what}"


def api_key() -> str | None:
    """The key that the server asks of its clients, from the environment or from a file that it names; never an argv.

    Raises:
        UsageError: the file cannot be read, is empty, or can be read by others than its owner.
    """
    path = os.environ.get(API_KEY_FILE)
    if os.environ.get(API_KEY) or not path:
        return os.environ.get(API_KEY) or None
    try:
        with Path(path).open(encoding="utf-8") as file:
            others = os.fstat(file.fileno()).st_mode & 0o077
            key = file.read(_KEY_LIMIT).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{API_KEY_FILE}={path} cannot be read: {error}") from error
    if others:
        raise UsageError(f"{API_KEY_FILE}={path} can be read by others", hint=f"chmod 600 {shlex.quote(path)}")
    if not key:
        raise UsageError(f"{API_KEY_FILE}={path} is empty")
    return key


class Custody:
    """One campaign's hold of its box; a context manager from the lock to its release.

    site    the box as it is reached now: after a loss another connection and service stand in it
    """

    def __init__(
        self, design: Design, site: Site, listener: Listener, interrupts: Interrupts, *, drain_s: float | None = None
    ) -> None:
        self.site = site
        self._design = design
        self._listener = listener
        self._interrupts = interrupts
        self._drain_s = drain_s
        self._holder = holder(f"experiment {design.matrix.experiment}")
        self._lock: lock.Lock | None = None
        self._gone = False
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._lock = lock.hold(self.site.transport, self.site.service.lock_name, self._holder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._still()
        if self._lock is not None:
            self._lock.release()
        self.site.transport.close()

    # --- taking it -------------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Arms the restore on the box, and keeps it from firing while we live.

        Raises:
            BoxError: it could not be armed; nothing of it is left then.
        """
        site, limit_s = self.site, self._design.box.dead_man_s
        try:
            site.service.arm(site.production, limit_s)
        except BoxError:
            with contextlib.suppress(BoxError):
                site.service.disarm()
            raise
        if self._heart is None:
            every_s = max(0.5, limit_s / 6)
            self._heart = threading.Thread(target=self._beat, args=(every_s,), name="heart", daemon=True)
            self._heart.start()
        reached("armed")

    def _beat(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            # Who boots now notices a lost box itself; the timer on the box is what this is about.
            with contextlib.suppress(BoxError):
                self.site.service.beat()

    def _still(self) -> None:
        self._stop.set()
        if self._heart is not None:
            self._heart.join(timeout=60)

    def sure(self) -> None:
        """Before a boot: the box is ours and restores by itself without us; what was lost of that is taken again.

        Raises:
            BoxBusy: somebody else has taken it, or production serves again.
            ExperimentChanged: it is not what the experiment began with.
            BoxError: it cannot be reached any more.
        """
        try:
            self._held().check()
            self.site.service.beat()
        except BoxError as error:
            self._listener.warn(f"the box is not ours at this moment: {error.what}")
        else:
            return
        self._again(self._design.box.reconnect_s)
        self._refuse_changed()
        if self.site.has_production:
            drain(self.site, self._interrupts, self._drain_s)
        self.arm()
        self._listener.say("the box is ours again; going on")

    def _held(self) -> lock.Lock:
        assert self._lock is not None, "the box was never taken"
        return self._lock

    def _again(self, patience_s: float) -> None:
        """Connects anew and takes the lock again, until it works or the time is over."""
        self._held().release()
        self.site.transport.close()
        begun = time.monotonic()
        pause = threading.Event()
        while True:
            try:
                return self._take_over(connect(self._design.box))
            except BoxBusy:
                raise
            except BoxError as error:
                lost = error
            wished = self._interrupts.reason is not None
            waited_s = time.monotonic() - begun
            if waited_s >= (min(patience_s, WHEN_ASKED_TO_STOP_S) if wished else patience_s):
                self._gone = True
                raise Unreachable(f"the box is gone, for {hours(waited_s)}: {lost.what}", hint=lost.hint) from lost
            pause.wait(AGAIN_EVERY_S)

    def _take_over(self, transport: Transport) -> None:
        try:
            service = make_service(transport, self._design.box, self._design.folder.resolve() / "box")
            unit = service.describe()
            self._lock = lock.hold(transport, service.lock_name, self._holder, again=True)
        except BoxError:
            transport.close()
            raise
        # What was composed stays, the port too; what is left of the engine that was lost is not production.
        self.site = replace(self.site, transport=transport, service=service, unit=unit)
        self._gone = False

    def _refuse_changed(self) -> None:
        site = self.site
        found = engine_fingerprint(site.transport, site.unit, site.launches)
        refuse_changed(site.fingerprint, found, redact_argv(site.production.command), redact_argv(site.unit.argv))

    # --- giving it back --------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Production as it was, proven by its command and a generated token; then the timer on the box is taken away.

        Raises:
            RestoreFailed: it did not come back; says what is left and what to run.
        """
        self._still()
        reached("restoring")
        try:
            try:
                self._held().check()
                self._give_back()
            except (Unreachable, CommandTimeout) as error:
                self._listener.warn(f"the box was lost while restoring: {error.what}")
                self._again_to_restore()
            except BoxError:
                if not self._held().lost:
                    raise
                self._again_to_restore()
        except BoxError as error:
            box = self._design.box
            raise RestoreFailed(
                f"{self.site.unit.name} may not be as it was: {error.what}",
                hint=f"`invoke restore --box {box.name}`; the timer on the box does it by itself "
                f"{hours(box.dead_man_s)} after our last sign of life",
            ) from error
        reached("restored")

    def _again_to_restore(self) -> None:
        self._again(0.0 if self._gone else self._design.box.reconnect_s)
        self._give_back()

    def _give_back(self) -> None:
        site = self.site
        try:
            site.service.restore(site.production)
        finally:
            tell_kept(site.service, self._listener)
        if site.has_production and site.production.active:
            self._listener.say(f"restoring {site.unit.name}: waiting until it serves again")
            deadlines = self._design.matrix.effective_deadlines()
            prove_back(site.service, site.production, site.own, site.transport, deadlines)
        site.service.disarm()
        caches.sweep(site.transport, site.unit, root=self._design.box.cache_root)


def drain(site: Site, interrupts: Interrupts, drain_s: float | None) -> None:
    """Waits until production serves nobody; refuses at once without `--drain`.

    Raises:
        BoxBusy: requests are (still) running.
    """
    end = time.monotonic() + (drain_s or 0.0)
    while running := running_requests(site):
        if time.monotonic() >= end:
            raise BoxBusy(
                f"{running:g} requests are running in {site.unit.name}",
                hint="--drain 5min waits for them; production was left alone",
            )
        if interrupts.wait(0.5):
            raise Interrupted(f"{interrupts.reason}; production was left alone", exit_code=interrupts.exit_code)


def tell_kept(service: Service, listener: Listener) -> None:
    """Names what production wrote while its caches were set aside: both are there, and somebody has to choose."""
    door = own_caches(service)
    while door is not None and door.kept:
        listener.warn(f"production wrote while its caches were set aside; that is kept in {door.kept.pop()}")


def prove_back(
    service: Service, was: ProductionState, own: Launch | None, transport: Transport, deadlines: Deadlines
) -> None:
    """The same effective command as before, and one generated token.

    Raises:
        RestoreFailed: not by the deadline.
    """
    end = time.monotonic() + deadlines.ready_s
    pause = threading.Event()
    missing = "it is not active"
    while time.monotonic() < end:
        argv = service.command() if service.state().active_state == "active" else ()
        if argv:
            same = not was.command or argv == was.command
            missing = "it does not serve yet" if same else f"another command runs: {' '.join(redact_argv(argv))}"
            if same and (own is None or _generates(transport, own)):
                return
        pause.wait(0.2)
    raise RestoreFailed(
        f"{service.name} was started but {missing}",
        hint=f"`systemctl status {service.name}` on the box; our drop-in is gone",
    )


def _generates(transport: Transport, own: Launch) -> bool:
    host, local = transport.reach(own.port)
    base_url = f"http://{host}:{local}"
    try:
        with httpx.Client(base_url=base_url, timeout=10, trust_env=False) as client:
            if client.get("/health").status_code != httpx.codes.OK:
                return False
    except httpx.HTTPError:
        return False
    target = load.Target(base_url=base_url, model=own.model, api_key=own.api_key or api_key())
    seed = f"back/{time.monotonic_ns()}"
    return load.probe(target, prompt_tokens=8, output_tokens=1, seed=seed, deadline_s=60)[0].error is None
