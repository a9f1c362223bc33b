"""One ssh connection by paramiko with many channels, and the door at which every foreign exception is translated.

Commands and streams are sessions (sshd allows ten at once by default: `MaxSessions`), forwarded ports are not. A
connection that stalls without closing is noticed: a keepalive wants an answer every few seconds, and when none comes
the connection is given up, which ends everything that waits on it with `Unreachable`.

A lost connection stays lost, as the lock that it held is lost with it: whoever owns the transport connects anew.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import paramiko
from paramiko.ssh_exception import NoValidConnectionsError, PartialAuthentication

from orchestrator.box import commands
from orchestrator.box.forward import Forward
from orchestrator.box.sshconfig import Hop, check_host_key, known_keys
from orchestrator.errors import BoxError, CommandTimeout, Unreachable

BANNER_S = 15.0
AUTH_S = 20.0
CHANNEL_S = 15.0
KEEPALIVE_S = 5.0
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

# What goes wrong is raised. paramiko would also log it as an error, each refused connection of a poll included.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)

FOREIGN = (paramiko.SSHException, OSError, EOFError)
"""All that paramiko, sockets and the system raise while a connection is made or used."""

_BY_HAND = "`{ssh}` shows the same by hand"
_EXPLANATIONS: tuple[tuple[type[BaseException], str, str], ...] = (
    # The first that fits counts: a class stands before those that it derives from.
    (PartialAuthentication, "a key is not enough for this server ({said})", "allow this user to log in by key alone"),
    (paramiko.BadAuthenticationType, "the server takes no keys ({said})", "allow PubkeyAuthentication for this user"),
    (paramiko.PasswordRequiredException, "the key is locked by a passphrase", "load it into the agent: `ssh-add`"),
    (
        paramiko.AuthenticationException,
        "the server refused to let us in ({said})",
        "put the public key into this user's authorized_keys on the box (`ssh-copy-id`)",
    ),
    (
        paramiko.ChannelException,
        "the server refused another channel ({said})",
        "see MaxSessions (8 are needed) and AllowTcpForwarding in the box's sshd_config",
    ),
    (paramiko.BadHostKeyException, "the host key is another one ({said})", "compare it with the box's console"),
    (
        paramiko.IncompatiblePeer,
        "no algorithm in common ({said})",
        "the server is too old or too strict: see KexAlgorithms and HostKeyAlgorithms in the box's sshd_config",
    ),
    (paramiko.ProxyCommandFailure, "the ProxyCommand failed ({said})", "run the ProxyCommand by hand"),
    (paramiko.ConfigParseError, "the ssh config cannot be read ({said})", "mend the ssh config"),
    (paramiko.CouldNotCanonicalize, "the host name cannot be made canonical ({said})", "see CanonicalDomains"),
    (
        paramiko.SSHException,
        "ssh failed ({said})",
        "something there may not speak ssh, or the connection was lost: is sshd running (`systemctl status ssh`)?",
    ),
    (EOFError, "the connection was closed by the other side", "see `journalctl -u ssh` on the box"),
    (socket.gaierror, "the host name is not known ({said})", "mend HostName in the ssh config"),
    (
        ConnectionRefusedError,
        "nothing listens there (connection refused)",
        "start sshd on the box, or mend Port in the ssh config",
    ),
    (
        NoValidConnectionsError,
        "nothing listens there ({said})",
        "start sshd on the box, or mend Port in the ssh config",
    ),
    (ConnectionResetError, "the connection was reset", "see `journalctl -u ssh` on the box (MaxStartups, a firewall)"),
    (BrokenPipeError, "the connection was lost", "see `journalctl -u ssh` on the box"),
    (TimeoutError, "no answer in time", "is the box up, and does a firewall drop the packets?"),
    (FileNotFoundError, "a file is missing ({said})", "mend IdentityFile or ProxyCommand in the ssh config"),
    (PermissionError, "a file cannot be read ({said})", "mend the permissions of the ssh config or key"),
    (OSError, "the network failed ({said})", "is the box up, and is there a route to it?"),
)


def unreachable(error: BaseException, where: Hop, doing: str) -> Unreachable:
    """Translate what paramiko, sockets and the system raise into what happened and what to run."""
    said = " ".join(str(error).split()) or type(error).__name__
    what, hint = next(
        ((what.format(said=said), hint) for kind, what, hint in _EXPLANATIONS if isinstance(error, kind)),
        (f"{type(error).__name__}: {said}", "this is new to us: please report it"),
    )
    by_hand = _BY_HAND.format(ssh=where.ssh("true"))
    return Unreachable(f"{_named(where)}: {doing}: {what}", hint=f"{hint}; {by_hand}")


def _named(where: Hop) -> str:
    return f"{where.alias} ({where.user}@{where.host}:{where.port})"


# --- the way in ------------------------------------------------------------------------------------------------------


class Connection:
    """A logged-in connection to the last hop of a way, all hops closed together."""

    def __init__(self, where: Hop) -> None:
        self.where = where
        self._stack = contextlib.ExitStack()
        # Whatever goes wrong on the way closes what is open; a whole way is closed by `close`.
        with self._stack:
            self.transport = self._open(where)
            self._stack = self._stack.pop_all()

    def close(self) -> None:
        """Close every hop; what waits on a channel ends."""
        self._stack.close()

    def _open(self, where: Hop) -> paramiko.Transport:
        previous: paramiko.Transport | None = None
        for one in (*where.jumps, where):
            try:
                previous = self._log_in(one, self._socket(one, previous))
            except FOREIGN as error:
                raise unreachable(error, one, "cannot connect") from error
        assert previous is not None
        return previous

    def _socket(self, where: Hop, through: paramiko.Transport | None) -> socket.socket | paramiko.Channel:
        if through is not None:
            address = (where.host, where.port)
            channel = through.open_channel("direct-tcpip", address, ("127.0.0.1", 0), timeout=where.connect_timeout_s)
            self._stack.callback(channel.close)
            return channel
        if where.proxy_command is not None:
            return self._proxied(where.proxy_command)
        direct = socket.create_connection((where.host, where.port), timeout=where.connect_timeout_s)
        self._stack.callback(direct.close)
        direct.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        direct.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return direct

    def _proxied(self, command: str) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._stack.callback(ours.close)
        with theirs:
            end = theirs.fileno()
            process = subprocess.Popen(
                ("sh", "-c", f"exec {command}"), stdin=end, stdout=end, stderr=subprocess.DEVNULL
            )
        self._stack.callback(_end, process)
        return ours

    def _log_in(self, where: Hop, through: socket.socket | paramiko.Channel) -> paramiko.Transport:
        known = known_keys(where)
        transport = paramiko.Transport(through)
        self._stack.callback(transport.close)
        transport.daemon = True
        transport.banner_timeout = BANNER_S
        transport.auth_timeout = AUTH_S
        transport.channel_timeout = CHANNEL_S
        _prefer(transport, tuple(known.keys))
        transport.start_client(timeout=BANNER_S)
        check_host_key(where, known, transport.get_remote_server_key())
        _authenticate(transport, where)
        return transport


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _prefer(transport: paramiko.Transport, known: Sequence[str]) -> None:
    """Ask for a host key of a type that is known, so that a new type of key is no surprise."""
    wanted = [kind for key in known for kind in (("rsa-sha2-512", "rsa-sha2-256") if key == "ssh-rsa" else (key,))]
    options = transport.get_security_options()
    first = [kind for kind in wanted if kind in options.key_types]
    options.key_types = (*first, *(kind for kind in options.key_types if kind not in first))


def _authenticate(transport: paramiko.Transport, where: Hop) -> None:
    offered: list[str] = []
    unusable: list[str] = []
    agent = paramiko.Agent()
    try:
        for label, key in _offers(where, agent.get_keys(), unusable):
            offered.append(label)
            try:
                further = transport.auth_publickey(where.user, key)
            except paramiko.BadAuthenticationType:
                raise
            except paramiko.AuthenticationException:
                continue
            if further:
                raise PartialAuthentication(further)
            return
        # Some servers know who we are by the network already.
        transport.auth_none(where.user)
    except FOREIGN as error:
        raise _not_let_in(error, where, offered, unusable) from error
    finally:
        agent.close()


def _not_let_in(error: BaseException, where: Hop, offered: Sequence[str], unusable: Sequence[str]) -> Unreachable:
    if not isinstance(error, PartialAuthentication) and "publickey" in getattr(error, "allowed_types", ()):
        # The answer to auth_none, our last resort, after the keys had been refused.
        error = paramiko.AuthenticationException("none of our keys fits" if offered else "we had no key to offer")
    answer = unreachable(error, where, "cannot log in")
    keys = [f"offered: {', '.join(offered)}"] if offered else []
    details = "".join(f"\n    {line}" for line in (*keys, *unusable))
    return Unreachable(f"{answer.what}{details}", hint=answer.hint)


def _offers(where: Hop, held: Sequence[paramiko.PKey], unusable: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """The keys to try, in OpenSSH's order: those of the config (from the agent if it holds them), then the agent's."""
    by_blob = {key.asbytes(): key for key in held}
    for path in where.identities:
        public = _public(path)
        if public is not None and public.asbytes() in by_blob:
            yield f"{path} (agent)", by_blob.pop(public.asbytes())
            continue
        try:
            yield str(path), paramiko.PKey.from_path(path)
        except TypeError:
            unusable.append(f"{path} is locked by a passphrase: `ssh-add {shlex.quote(str(path))}` first")
        except (*FOREIGN, ValueError, paramiko.UnknownKeyType) as error:
            unusable.append(f"{path} cannot be used: {' '.join(str(error).split()) or type(error).__name__}")
    if not where.identities_only:
        for key in by_blob.values():
            yield f"{key.get_name()} from the agent", key


def _public(path: Path) -> paramiko.PublicBlob | None:
    try:
        kind, blob, *_ = Path(f"{path}.pub").read_text().split()
        return paramiko.PKey.from_type_string(kind, base64.b64decode(blob))
    except (*FOREIGN, ValueError, paramiko.UnknownKeyType):
        return None


# --- the transport ---------------------------------------------------------------------------------------------------


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
        channel = self._session(commands.stream_line(full, keep_stdin=keep_stdin), time.monotonic() + CHANNEL_S)
        return SshStream(self, channel, tuple(argv))

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
                f"{_named(self.where)}: {doing}: {self._lost}",
                hint="is the box up and the network whole? The same command goes on where it stopped",
            )
        if self._closing.is_set():
            return Unreachable(f"{_named(self.where)}: {doing}: this connection has been closed")
        return unreachable(cause, self.where, doing)

    def alive(self) -> bool:
        """Whether the connection still stands; for whoever found a channel closed."""
        # paramiko closes the channels of a lost connection a moment before it calls the connection lost.
        self._ssh.join(_SETTLE_S)
        return bool(self._ssh.is_active())

    def release(self) -> None:
        """A session of ours has ended: another may begin."""
        self._sessions.release()

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
                f"{_named(self.where)}: {doing}: {MAX_SESSIONS} commands are running already", hint="close a stream"
            )
        try:
            channel = self._open_session(deadline)
            # exec: the login's shell makes room, so that our process id is the leader of the process group.
            channel.exec_command(f"exec {shlex.join(line)}")
        except FOREIGN as error:
            self.release()
            if time.monotonic() >= deadline and self.alive():
                raise CommandTimeout(f"{_named(self.where)}: {doing}: the box did not answer in time") from error
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
        while not self._closing.wait(KEEPALIVE_S):
            watchdog = threading.Timer(STALL_S, self._give_up)
            watchdog.daemon = True
            watchdog.start()
            try:
                self._ssh.global_request("keepalive@openssh.com", wait=True)
            except FOREIGN:
                return
            finally:
                watchdog.cancel()
            if not self._ssh.is_active():
                return

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
