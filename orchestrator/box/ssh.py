"""The box by ssh: one connection by paramiko with many channels.

Commands and streams are sessions (sshd allows ten at once by default: `MaxSessions`), forwarded ports are not. A
connection that stalls without closing is noticed: a keepalive wants an answer every few seconds, and when none comes
the connection is given up, which ends everything that waits on it with `Unreachable`.

A lost connection stays lost, as the lock that it held is lost with it: whoever owns the transport connects anew.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import paramiko

from orchestrator.box import commands
from orchestrator.box.forward import Forward
from orchestrator.box.sshconfig import Hop
from orchestrator.box.sshlogin import BANNER_S, CHANNEL_S, FOREIGN, Connection, named, unreachable
from orchestrator.errors import BoxError, CommandTimeout, Unreachable

KEEPALIVE_S = 1.0
BEAT_EVERY_S = 10.0
STALL_S = 20.0
MAX_SESSIONS = 8

_CHUNK = 65536
# How often a waiting reader looks up; data wakes it at once.
_LOOK_UP_S = 1.0
_SETTLE_S = 0.2
_COUNTED_S = 3.0
_AGAIN_S = 0.05
# What the shell of ours itself died of is told by no status; OpenSSH's own client says 255 then.
_DIED = 255


class SshTransport(commands.Runner):
    """The box by ssh. Safe for use by several threads."""

    name = "ssh"

    def __init__(self, where: Hop, *, sudo: bool | None = None) -> None:
        super().__init__(user=where.user, is_root=False, sudo=sudo)
        self.where = where
        self._connection = Connection(where)
        self._ssh = self._connection.transport
        self._sessions = threading.BoundedSemaphore(MAX_SESSIONS)
        self._closing = threading.Event()
        self._lost: str | None = None
        self._forwards: dict[int, Forward] = {}
        self._forwards_lock = threading.Lock()
        self._beaten: set[SshStream] = set()
        self._beaten_lock = threading.Lock()
        self._answers: deque[tuple[float, float]] = deque(maxlen=4096)
        self._asked_at: float | None = None
        threading.Thread(target=self._keep_alive, name=f"keepalive-{where.alias}", daemon=True).start()
        try:
            who = self.run(("sh", "-c", "id -u; id -un 2>/dev/null || id -u"), timeout_s=BANNER_S).stdout.split()
        except BoxError:
            self.close()
            raise
        self.is_root, self.user = who[0] == "0", who[1]

    def stream(self, argv: Sequence[str], *, as_user: str | None = None, keep_stdin: bool = False) -> SshStream:
        """Start a long-running command. See `Transport.stream`."""
        full = self.as_user(argv, as_user)
        line = commands.stream_line(full, keep_stdin=keep_stdin, expires_s=commands.BEAT_EXPIRES_S)
        channel = self._session(line, time.monotonic() + CHANNEL_S)
        stream = SshStream(self, channel, tuple(argv))
        if not keep_stdin:
            with self._beaten_lock:
                self._beaten.add(stream)
        return stream

    def reach(self, port: int) -> tuple[str, int]:
        """The address here at which the box's 127.0.0.1:`port` answers; the same at every call."""
        with self._forwards_lock:
            if self._closing.is_set():
                raise self.lost(None, f"cannot reach port {port}")
            if port not in self._forwards:
                self._forwards[port] = Forward(port, lambda peer: self._tunnel(port, peer))
            return self._forwards[port].address

    def close(self) -> None:
        """Close the connection; long-running commands on the box die."""
        self._closing.set()
        with self._forwards_lock:
            forwards = tuple(self._forwards.values())
        for one in forwards:
            one.close()
        self._connection.close()

    def lost(self, error: BaseException | None, doing: str) -> Unreachable:
        """The error of a connection that was lost: why, as far as we know."""
        cause = error or self._ssh.get_exception() or EOFError()
        if self._lost is not None:
            return Unreachable(
                f"{named(self.where)}: {doing}: {self._lost}",
                hint="is the box up and the network whole? The same command goes on where it stopped",
            )
        if self._closing.is_set():
            return Unreachable(f"{named(self.where)}: {doing}: this connection has been closed")
        return unreachable(cause, self.where, doing)

    def alive(self) -> bool:
        """Whether the connection still stands; for whoever found a channel closed."""
        # paramiko closes the channels of a lost connection a moment before it calls the connection lost.
        self._ssh.join(_SETTLE_S)
        return bool(self._ssh.is_active())

    def stalled_s(self, since: float) -> float:
        """See `Transport.stalled_s`."""
        asked_at, now = self._asked_at, time.monotonic()
        waits = [waited for at, waited in tuple(self._answers) if at >= since]
        return max([*waits, 0.0 if asked_at is None else now - asked_at], default=0.0)

    def release(self) -> None:
        """A session of ours has ended: another may begin."""
        self._sessions.release()

    def forget(self, stream: SshStream) -> None:
        """A stream was closed: it needs no heartbeat any more."""
        with self._beaten_lock:
            self._beaten.discard(stream)

    def _execute(self, line: tuple[str, ...], data: bytes | None, timeout_s: float) -> commands.Raw:
        deadline = time.monotonic() + timeout_s
        channel = self._session(line, deadline)
        try:
            return _Exchange(channel, data, self.alive).until(deadline)
        except FOREIGN as error:
            raise self.lost(error, f"the connection was lost during `{_shown(line)}`") from error
        finally:
            channel.close()
            self.release()

    def _session(self, line: tuple[str, ...], deadline: float) -> paramiko.Channel:
        doing = f"cannot run `{_shown(line)}`"
        if not self._ssh.is_active():
            raise self.lost(None, doing)
        left_s = max(0.0, deadline - time.monotonic())
        if not self._sessions.acquire(timeout=left_s):
            raise CommandTimeout(
                f"{named(self.where)}: {doing}: {MAX_SESSIONS} commands are running already", hint="close a stream"
            )
        try:
            channel = self._open_session(deadline)
            # exec: the login's shell makes room, so that our process id is the leader of the process group.
            channel.exec_command(f"exec {shlex.join(line)}")
        except FOREIGN as error:
            self.release()
            if time.monotonic() >= deadline and self.alive():
                raise CommandTimeout(f"{named(self.where)}: {doing}: the box did not answer in time") from error
            raise self.lost(error, doing) from error
        return channel

    def _open_session(self, deadline: float) -> paramiko.Channel:
        patience = min(deadline, time.monotonic() + _COUNTED_S)
        while True:
            try:
                return self._ssh.open_session(timeout=min(CHANNEL_S, max(0.1, deadline - time.monotonic())))
            except paramiko.ChannelException:
                # sshd counts a session of ours that has ended until it has buried its process.
                if time.monotonic() >= patience or self._closing.wait(_AGAIN_S):
                    raise

    def _tunnel(self, port: int, peer: tuple[str, int]) -> paramiko.Channel:
        try:
            return self._ssh.open_channel("direct-tcpip", ("127.0.0.1", port), peer, timeout=CHANNEL_S)
        except FOREIGN as error:
            raise ConnectionRefusedError(str(error)) from error

    def _keep_alive(self) -> None:
        beaten_at = time.monotonic()
        while not self._closing.wait(KEEPALIVE_S):
            watchdog = threading.Timer(STALL_S, self._give_up)
            watchdog.daemon = True
            watchdog.start()
            asked_at = self._asked_at = time.monotonic()
            try:
                self._ssh.global_request("keepalive@openssh.com", wait=True)
            except FOREIGN:
                return
            finally:
                watchdog.cancel()
            if not self._ssh.is_active():
                return
            now = time.monotonic()
            self._answers.append((now, now - asked_at))
            self._asked_at = None
            if now - beaten_at >= BEAT_EVERY_S:
                beaten_at = now
                self._beat()

    def _beat(self) -> None:
        with self._beaten_lock:
            streams = tuple(self._beaten)
        for stream in streams:
            # One that has ended is told of where it is read.
            with contextlib.suppress(BoxError):
                stream.send(commands.BEAT)

    def _give_up(self) -> None:
        self._lost = f"the connection stalled: no answer for {STALL_S:g} s"
        self._ssh.close()


def _shown(line: Sequence[str]) -> str:
    """The command inside our wrapper (`sh -c script coldboot command …`), as a person would type it."""
    return shlex.join(line[4:] or line)


class _Exchange:
    """One command's input and both outputs, until it ends or its deadline; never more in memory than the limits."""

    def __init__(self, channel: paramiko.Channel, data: bytes | None, alive: Callable[[], bool]) -> None:
        self._channel = channel
        self._alive = alive
        self._stdout = bytearray()
        self._stderr = bytearray()
        self._data = data
        # stdout is read here, the others beside it: a full window of one must not stop the others.
        self._helpers = [threading.Thread(target=self._read_stderr, daemon=True)]
        if data:
            self._helpers.append(threading.Thread(target=self._write, daemon=True))
        else:
            channel.shutdown_write()

    def until(self, deadline: float) -> commands.Raw:
        for helper in self._helpers:
            helper.start()
        end: Literal["ended", "late", "too_much"] = "ended"
        try:
            while data := self._recv(deadline):
                self._stdout += data
                if len(self._stdout) > commands.OUTPUT_LIMIT:
                    end = "too_much"
                    break
            else:
                end = "ended" if self._channel.status_event.wait(max(0.0, deadline - time.monotonic())) else "late"
        except TimeoutError:
            end = "late"
        status = None
        if end == "ended":
            self._helpers[0].join(max(0.0, deadline - time.monotonic()))
            status = self._channel.exit_status
            if status < 0:
                if not self._alive():
                    raise EOFError
                status = _DIED
        return commands.Raw(end, status, bytes(self._stdout), bytes(self._stderr))

    def _recv(self, deadline: float) -> bytes:
        self._channel.settimeout(max(0.001, deadline - time.monotonic()))
        data: bytes = self._channel.recv(_CHUNK)
        return data

    def _read_stderr(self) -> None:
        with contextlib.suppress(*FOREIGN):
            while data := self._channel.recv_stderr(_CHUNK):
                self._stderr += data
                del self._stderr[: -commands.STDERR_LIMIT]

    def _write(self) -> None:
        # A command that ends without reading its input is its own business: the status tells.
        with contextlib.suppress(*FOREIGN):
            self._channel.sendall(self._data)
            self._channel.shutdown_write()


class SshStream:
    """A long-running command by ssh. See `Stream`."""

    def __init__(self, owner: SshTransport, channel: paramiko.Channel, argv: tuple[str, ...]) -> None:
        self.argv = argv
        self.status: int | None = None
        self._owner = owner
        self._channel = channel
        self._lock = threading.Lock()
        self._closed = False
        self._stderr = bytearray()
        channel.settimeout(_LOOK_UP_S)

    @property
    def ended(self) -> bool:
        """Whether the command has ended, was closed, or was lost with its connection."""
        return bool(self._closed or self._channel.closed or self._channel.exit_status_ready())

    @property
    def stderr(self) -> str:
        """The last of what the command said on stderr."""
        return self._stderr.decode("utf-8", errors="replace")

    def lines(self) -> Iterator[str]:
        """The lines as they come. See `Stream.lines`."""
        cutter = commands.Lines()
        while not self._closed:
            try:
                data = self._channel.recv(_CHUNK)
            except TimeoutError:
                self._drain_stderr()
                continue
            if not data:
                break
            yield from cutter.feed(data)
            self._drain_stderr()
        if self._closed:
            return
        yield from cutter.end()
        self._end()

    def send(self, text: str) -> None:
        """Write to the command's standard input. See `Stream.send`."""
        try:
            self._channel.sendall(text.encode())
        except FOREIGN as error:
            raise self._owner.lost(error, f"`{shlex.join(self.argv)}` takes no more input") from error

    def close(self) -> None:
        """End the command on the box and the iteration here. See `Stream.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # The end of its input ends the command: see commands.stream_line.
        with contextlib.suppress(*FOREIGN):
            self._channel.close()
        self._owner.forget(self)
        self._owner.release()

    def _drain_stderr(self) -> None:
        while self._channel.recv_stderr_ready():
            self._stderr += self._channel.recv_stderr(_CHUNK)
            del self._stderr[: -commands.STDERR_LIMIT]

    def _end(self) -> None:
        self._channel.status_event.wait(_LOOK_UP_S)
        self._drain_stderr()
        status = self._channel.exit_status
        lost = status < 0 and not self._closed and not self._owner.alive()
        if not self._closed and not lost:
            self.status = status if status >= 0 else _DIED
        self.close()
        if lost:
            raise self._owner.lost(None, f"the connection was lost during `{shlex.join(self.argv)}`")
