"""The narrow door to a box: run a command, follow a long one, reach a port.

Two ways lead through it: `local`, where the orchestrator runs on the box itself, and `ssh`. What a command may do, how
it ends and which error it gives is the same for both (see commands.py); a third way is one more line in `TRANSPORTS`.
"""

from __future__ import annotations

import contextlib
import io
import os
import pwd
import select
import selectors
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Literal, Protocol

from orchestrator.box import commands
from orchestrator.box.ssh import SshTransport
from orchestrator.box.sshconfig import hop
from orchestrator.errors import BoxError, Unreachable
from orchestrator.matrix import BoxSpec
from orchestrator.records import CommandResult

_CHUNK = 65536
_LOOK_UP_S = 1.0


class Stream(Protocol):
    """A long-running command on the box.

    It dies with `close()`, with its transport and with this process, however that ends.
    """

    argv: tuple[str, ...]
    status: int | None
    """Its status once it has ended by itself and `lines` has come to its end (128 + n: died of signal n; 255: our shell
    around it was killed); None while it runs, or when we ended it."""

    @property
    def ended(self) -> bool:
        """Whether it has ended, was closed, or was lost with its connection."""

    @property
    def stderr(self) -> str:
        """The last 256 KiB of what it said on stderr."""

    def lines(self) -> Iterator[str]:
        """Its output line by line, without line ends, each as soon as it comes (milliseconds).

        Ends when the command ends (then `status` is known) or when `close()` is called by whatever thread. Of a line
        longer than 1 MiB only so much is kept. For one reader; to be called once.

        Raises:
            Unreachable: The connection was lost.
        """

    def send(self, text: str) -> None:
        """Write to its standard input, with `keep_stdin`.

        Raises:
            BoxError: It takes no more input: it has ended, or the connection was lost.
        """

    def close(self) -> None:
        """Kill the command on the box, and its children; end the iteration. Never raises; a second call is nothing."""


class Transport(Protocol):
    """A box that can be reached. Every method may be called by several threads at once."""

    name: str
    user: str
    is_root: bool

    def as_user(self, argv: Sequence[str], user: str | None) -> tuple[str, ...]:
        """The argv by which this login runs `argv` as `user`. See `commands.Runner.as_user`."""

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        input: str | bytes | None = None,  # noqa: A002 - the word that subprocess uses
        check: bool = True,
        as_user: str | None = None,
    ) -> CommandResult:
        """Run one command to its end. See `commands.Runner.run`."""

    def stream(self, argv: Sequence[str], *, as_user: str | None = None, keep_stdin: bool = False) -> Stream:
        """Start a long-running command.

        Args:
            argv: Program and arguments; no shell reads them.
            as_user: Who runs it; None: the login. What runs under sudo cannot be killed by a login without root: it
                ends with its next output line.
            keep_stdin: Leave standard input to the command (`send`), which must then end with it, as `cat` does.

        Raises:
            Unreachable: The connection was lost.
            CommandTimeout: Too many commands run at once.
        """

    def reach(self, port: int) -> tuple[str, int]:
        """Host and port at which the box's 127.0.0.1:`port` answers from here; the same at every call.

        A connection is reset at once while nothing listens there.

        Raises:
            Unreachable: The transport has been closed.
        """

    def stalled_s(self, since: float) -> float:
        """The longest wait for an answer of the box, seconds, that ended or went on after `since` (monotonic clock)."""

    def close(self) -> None:
        """End every stream, forward and connection. Never raises; a second call is nothing."""


def connect(box: BoxSpec) -> Transport:
    """Reach a box.

    Raises:
        Unreachable: No way in; the hint says what to run.
    """
    return TRANSPORTS[box.transport](box)


class LocalTransport(commands.Runner):
    """This machine as the box, with the same rules as a distant one."""

    name = "local"

    def __init__(self, *, sudo: bool | None = None) -> None:
        super().__init__(user=_login(), is_root=os.geteuid() == 0, sudo=sudo)
        self._lock = threading.Lock()
        self._streams: set[LocalStream] = set()

    def stream(self, argv: Sequence[str], *, as_user: str | None = None, keep_stdin: bool = False) -> LocalStream:
        """Start a long-running command. See `Transport.stream`."""
        full = self.as_user(argv, as_user)
        process = _start(commands.stream_line(full, keep_stdin=keep_stdin), subprocess.PIPE)
        stream = LocalStream(process, tuple(argv), self._forget)
        with self._lock:
            self._streams.add(stream)
        return stream

    def reach(self, port: int) -> tuple[str, int]:
        """The port itself: we are on the box."""
        return ("127.0.0.1", port)

    def stalled_s(self, since: float) -> float:  # noqa: ARG002 - the same for every transport
        """Nothing is between us and the box."""
        return 0.0

    def close(self) -> None:
        """End every stream."""
        with self._lock:
            streams = tuple(self._streams)
        for stream in streams:
            stream.close()

    def _forget(self, stream: LocalStream) -> None:
        with self._lock:
            self._streams.discard(stream)

    def _execute(self, line: tuple[str, ...], data: bytes | None, timeout_s: float) -> commands.Raw:
        deadline = time.monotonic() + timeout_s
        process = _start(line, subprocess.PIPE if data else subprocess.DEVNULL)
        try:
            return _Exchange(process, data or b"").until(deadline)
        finally:
            if process.returncode is None:
                _kill_group(process)
            _reap(process)


def _start(line: Sequence[str], stdin: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            line, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise Unreachable(
            f"cannot start a command on this machine: {error}", hint="is there memory, a process, a descriptor left?"
        ) from error


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # A group that is gone, or that belongs to root by now, is nothing that we could mend here.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _reap(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            # A pipe that broke with input still to be written was told of already.
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(commands.KILL_S)


def _status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


class _Exchange:
    """One command's input and both outputs, until it ends or its deadline; never more in memory than the limits."""

    def __init__(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        self._process = process
        self._data = memoryview(data)
        self._stdout = bytearray()
        self._stderr = bytearray()

    def until(self, deadline: float) -> commands.Raw:
        with selectors.DefaultSelector() as selector:
            selector.register(_pipe(self._process.stdout), selectors.EVENT_READ, self._read_stdout)
            selector.register(_pipe(self._process.stderr), selectors.EVENT_READ, self._read_stderr)
            if self._process.stdin is not None:
                os.set_blocking(self._process.stdin.fileno(), False)
                selector.register(self._process.stdin, selectors.EVENT_WRITE, self._write)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    return self._raw("late")
                for key, _ in ready:
                    if not key.data():
                        selector.unregister(key.fileobj)
                        _close(key.fileobj)
                if len(self._stdout) > commands.OUTPUT_LIMIT:
                    return self._raw("too_much")
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return self._raw("late")
        return self._raw("ended")

    def _raw(self, end: Literal["ended", "late", "too_much"]) -> commands.Raw:
        code = self._process.returncode
        return commands.Raw(end, None if code is None else _status(code), bytes(self._stdout), bytes(self._stderr))

    def _read_stdout(self) -> bool:
        data = os.read(_pipe(self._process.stdout).fileno(), _CHUNK)
        self._stdout += data
        return bool(data)

    def _read_stderr(self) -> bool:
        data = os.read(_pipe(self._process.stderr).fileno(), _CHUNK)
        self._stderr += data
        del self._stderr[: -commands.STDERR_LIMIT]
        return bool(data)

    def _write(self) -> bool:
        try:
            written = os.write(_pipe(self._process.stdin).fileno(), self._data[:_CHUNK])
        except BrokenPipeError:
            # A command that ends without reading its input is its own business: the status tells.
            return False
        self._data = self._data[written:]
        return bool(self._data)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


class LocalStream:
    """A long-running command on this machine. See `Stream`."""

    def __init__(
        self, process: subprocess.Popen[bytes], argv: tuple[str, ...], forget: Callable[[LocalStream], None]
    ) -> None:
        self.argv = argv
        self.status: int | None = None
        self._process = process
        self._forget = forget
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._closed = False
        self._stderr = bytearray()

    @property
    def ended(self) -> bool:
        """Whether the command has ended or was closed."""
        return self._closed or self._process.poll() is not None

    @property
    def stderr(self) -> str:
        """The last of what the command said on stderr."""
        return self._stderr.decode("utf-8", errors="replace")

    def lines(self) -> Iterator[str]:
        """The lines as they come. See `Stream.lines`."""
        cutter = commands.Lines()
        open_pipes = {_pipe(self._process.stdout), _pipe(self._process.stderr)}
        while open_pipes:
            data = self._read(open_pipes)
            if data is None:
                return
            if data:
                yield from cutter.feed(data)
        yield from cutter.end()
        if not self._closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.status = _status(self._process.wait(_LOOK_UP_S))
            self.close()

    def send(self, text: str) -> None:
        """Write to the command's standard input. See `Stream.send`."""
        try:
            stdin = _pipe(self._process.stdin)
            stdin.write(text.encode())
            stdin.flush()
        except (OSError, ValueError) as error:
            raise BoxError(f"`{shlex.join(self.argv)}` takes no more input: it has ended") from error

    def close(self) -> None:
        """Kill the command and end the iteration. See `Stream.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._process.poll() is None:
            _kill_group(self._process)
        # The reader sees the end of the output, and leaves the pipes to us.
        with self._reading:
            _reap(self._process)
        self._forget(self)

    def _read(self, pipes: set[IO[bytes]]) -> bytes | None:
        """What stdout says next (stderr is kept aside), b"" for nothing yet, None when we were closed."""
        with self._reading:
            if self._closed:
                return None
            ready, _, _ = select.select(pipes, (), (), _LOOK_UP_S)
            data = b""
            for pipe in ready:
                got = os.read(pipe.fileno(), _CHUNK)
                if not got:
                    pipes.discard(pipe)
                elif pipe is self._process.stdout:
                    data = got
                else:
                    self._stderr += got
                    del self._stderr[: -commands.STDERR_LIMIT]
            return data


def _close(pipe: object) -> None:
    assert isinstance(pipe, io.IOBase)
    with contextlib.suppress(OSError):
        pipe.close()


def _login() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        # A container may run us under a number that has no name.
        return str(os.geteuid())


def _local(box: BoxSpec) -> Transport:
    return LocalTransport(sudo=box.sudo)


def _ssh(box: BoxSpec) -> Transport:
    config = None if box.ssh_config is None else Path(box.ssh_config).expanduser()
    return SshTransport(hop(box.host or box.name, config=config, user=box.user), sudo=box.sudo)


TRANSPORTS: dict[str, Callable[[BoxSpec], Transport]] = {"local": _local, "ssh": _ssh}
