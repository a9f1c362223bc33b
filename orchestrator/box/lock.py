"""One campaign at a time per box: a lock on the box that dies with its holder, and says who holds it.

The lock is `flock` on a directory in the box's /tmp: a directory, since there every login can lock it, whoever made it
(a file of somebody else in /tmp may not be opened to be locked, see fs.protected_regular), and nothing is ever written
that could be stale. Who holds it stands in the command line of the process that holds it. The directory goes with its
holder, who removes it while it still holds the lock; so whoever gets the lock looks whether the directory that it has
locked is still the one that others will find, and else begins again.

That process is a streamed command. It ends when its input ends (our connection or our process ended) and also when no
heartbeat came for `EXPIRES_S` (our machine lost its power, and the box's sshd does not know yet).
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from orchestrator.box.transports import Stream, Transport
from orchestrator.errors import BoxBusy, BoxError, CommandFailed, CommandTimeout
from orchestrator.records import now

BEAT_S = 15.0
EXPIRES_S = 120
ANSWER_S = 15.0
RELEASE_S = 3.0

_FOLDER = "/tmp/coldboot-lock-{name}"  # noqa: S108 - the one place where every login of a box can lock the same thing
_BUSY = 75

# head: dash cannot wait for input with a limit. -o: the lock is flock's alone, no child can outlive it holding it.
# --foreground: all of it stays in one process group, which can be killed as one. "$1/.": flock would make a file of
# that name where there is no directory; it says 66 instead.
_HOLD = """
for again in 1 2 3 4 5 6 7 8 9 10; do
    mkdir -m 0755 -- "$1" 2>/dev/null
    flock -n -o -E 75 "$1/." sh -c '
        for held in /proc/$PPID/fd/*; do [ "$held" -ef "$2" ] && break; done
        [ "$held" -ef "$2" ] || exit 76
        echo locked
        while [ "$(timeout --foreground "$1" head -c 1)" = . ]; do :; done
        rmdir -- "$2" 2>/dev/null
        exit 0
    ' coldboot-lock "$2" "$1" "$3"
    status=$?
    [ $status = 76 ] || [ $status = 66 ] || break
done
if [ $status = 75 ]; then
    pid=$(pgrep -o -f "^flock -n -o -E 75 $1(/[.])? sh -c")
    echo "$pid"
    [ -z "$pid" ] || tr '\\0' '\\n' < "/proc/$pid/cmdline" | tail -n 1
fi
exit $status
"""
_LOOK = """
[ -d "$1" ] || exit 0
flock -n -E 75 "$1/." true 2>/dev/null
status=$?
if [ $status = 75 ]; then
    pid=$(pgrep -o -f "^flock -n -o -E 75 $1(/[.])? sh -c")
    [ -z "$pid" ] || tr '\\0' '\\n' < "/proc/$pid/cmdline" | tail -n 1
fi
exit $status
"""
_BREAK = """
group=$(ps -o pgid= -p "$1") || exit 0
kill -s KILL -- "-$((group))"
"""
_NEEDS = (
    "flock (util-linux), timeout and head (coreutils) are needed on the box, and a /tmp that this login may write to"
)


class Lock:
    """A held lock; a context manager. It beats in a thread of its own until released."""

    def __init__(self, stream: Stream, lines: Iterator[str], name: str) -> None:
        self._stream = stream
        self._lines = lines
        self._name = name
        self._released = threading.Event()
        self._lost: str | None = None
        threading.Thread(target=self._beat, name=f"lock-{name}", daemon=True).start()

    def check(self) -> None:
        """Make sure that the box is still ours.

        Raises:
            BoxError: It is not: the lock was broken by somebody, it expired, or the connection was lost.
        """
        if self._released.is_set():
            raise BoxError(f"the lock {self._name} has been released")
        if self._lost is None and self._stream.ended:
            self._lost = "its holder on the box has ended"
        if self._lost is not None:
            raise BoxError(
                f"the lock {self._name} is lost: {self._lost}",
                hint="another campaign may have broken it; the same command goes on when the box is free",
            )

    @property
    def lost(self) -> bool:
        """Whether `check` would say that it is no longer ours."""
        return self._lost is not None or self._stream.ended

    def release(self) -> None:
        """Give the box back; it is free when this returns. Never raises; a second call is nothing."""
        if self._released.is_set():
            return
        self._released.set()
        late = threading.Timer(RELEASE_S, self._stream.close)
        late.daemon = True
        late.start()
        # Anything but a heartbeat ends the holder; a lock that was lost meanwhile needs no giving back.
        with contextlib.suppress(BoxError):
            self._stream.send("!")
            deque(self._lines, maxlen=0)
        late.cancel()
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            try:
                self._stream.send(".")
            except BoxError as error:
                self._lost = error.what
                return


def hold(transport: Transport, name: str, holder: str, *, break_lock: bool = False, again: bool = False) -> Lock:
    """Take the lock of a box.

    Args:
        transport: The way to the box; the lock lives no longer than it.
        name: What is locked, equal for everybody who shall exclude each other: the box's unit, say.
        holder: Who holds it, as others shall read it: user, host, pid. The time is added.
        break_lock: End another holder's process first, as far as this login may.
        again: End our own: the holder of the same name, whose connection we have lost and the box not yet.

    Returns:
        The held lock.

    Raises:
        BoxBusy: Somebody holds it; says who, and since when.
        BoxError: The lock could not be asked for.
    """
    claim = f"{' '.join(holder.split())} since {now()}"
    taken = _ask(transport, name, claim)
    if isinstance(taken, _Holder) and taken.pid is None:
        # Its holder may have ended between the two looks.
        taken = _ask(transport, name, claim)
    ours = again and isinstance(taken, _Holder) and taken.claim.startswith(f"{' '.join(holder.split())} since ")
    if (break_lock or ours) and isinstance(taken, _Holder):
        _end(transport, name, taken)
        taken = _ask(transport, name, claim)
    if isinstance(taken, _Holder):
        raise _busy(name, taken, hint=_WAIT)
    return taken


def holder(transport: Transport, name: str) -> str | None:
    """Who holds the lock of a box, as they said themselves; None when it is free. Takes it for an instant at most.

    Raises:
        BoxError: it could not be asked.
    """
    said = transport.run(("sh", "-c", _LOOK, "coldboot-lock", _folder(name)), timeout_s=ANSWER_S, check=False)
    if said.status != _BUSY:
        return None
    return said.stdout.strip() or "a process that this login cannot see"


_WAIT = "wait for it to end; if it is nobody's any more, `invoke restore --break-lock` ends it"


@dataclass(frozen=True)
class _Holder:
    pid: int | None
    claim: str


def _folder(name: str) -> str:
    return _FOLDER.format(name=re.sub(r"[^A-Za-z0-9_-]", lambda odd: f"%{ord(odd[0]):x}", name))


def _ask(transport: Transport, name: str, claim: str) -> Lock | _Holder:
    """The lock, or who holds it."""
    stream = transport.stream(
        ("sh", "-c", _HOLD, "coldboot-lock", _folder(name), str(EXPIRES_S), claim), keep_stdin=True
    )
    late = threading.Timer(ANSWER_S, stream.close)
    late.daemon = True
    late.start()
    try:
        lines = stream.lines()
        first = next(lines, None)
        if first == "locked":
            return Lock(stream, lines, name)
        held_by = next(lines, "")
        # To the end, so that the status is known.
        deque(lines, maxlen=0)
    finally:
        late.cancel()
    if stream.status == _BUSY and first is not None:
        return _Holder(int(first) if first.isdigit() else None, held_by)
    if stream.status is None:
        raise CommandTimeout(f"the box did not answer within {ANSWER_S:g} s whether {_folder(name)} is locked")
    raise CommandFailed(f"flock {_folder(name)}", stream.status, stream.stderr, hint=_NEEDS)


def _end(transport: Transport, name: str, held: _Holder) -> None:
    """Kill the process that holds the lock, with its group."""
    if held.pid is None:
        raise _busy(name, held, hint="its process cannot be seen by this login: end it as root")
    result = transport.run(("sh", "-c", _BREAK, "coldboot-lock", str(held.pid)), timeout_s=ANSWER_S, check=False)
    if result.status != 0:
        raise _busy(name, held, hint=f"this login may not end it: on the box, `sudo kill -KILL {held.pid}`")


def _busy(name: str, held: _Holder, *, hint: str) -> BoxBusy:
    process = "a process that this login cannot see" if held.pid is None else f"process {held.pid} on the box"
    return BoxBusy(f"the box is taken ({name}): {held.claim or 'somebody'} holds it, by {process}", hint=hint)
