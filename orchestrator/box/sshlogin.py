"""The way in by ssh: sockets, jumps, host keys and logins; and the one door for what paramiko and sockets raise."""

from __future__ import annotations

import base64
import contextlib
import logging
import shlex
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import paramiko
from paramiko.ssh_exception import NoValidConnectionsError, PartialAuthentication

from orchestrator.box.sshconfig import Hop, check_host_key, known_keys
from orchestrator.errors import Unreachable

BANNER_S = 15.0
AUTH_S = 20.0
CHANNEL_S = 15.0

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
    (
        socket.gaierror,
        "the host name is not known ({said})",
        "give this alias a HostName in the ssh config, or the box another `host:` in matrix.yaml",
    ),
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
    return Unreachable(f"{named(where)}: {doing}: {what}", hint=f"{hint}; {by_hand}")


def named(where: Hop) -> str:
    """A server as errors name it."""
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
