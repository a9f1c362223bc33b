"""The person's ssh config and known hosts: from an alias to the way to a box.

Read with paramiko's own parser, which lacks `Include`: that is added here, as are the tilde and the tokens in
`UserKnownHostsFile`. What paramiko cannot do is not read: GSSAPI, hardware keys, `ControlMaster`. Whatever
`StrictHostKeyChecking` says, an unknown host key is refused.
"""

from __future__ import annotations

import base64
import getpass
import hashlib
import hmac
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko

from orchestrator.errors import Unreachable

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
MAX_HOPS = 8
MAX_INCLUDES = 16

_INCLUDE = re.compile(r"\s*include[\s=]+(?P<paths>.+?)\s*$", re.IGNORECASE)
_BLOCK = re.compile(r"\s*(host|match)[\s=]", re.IGNORECASE)
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^:\[\]]+)(?::(?P<port>\d+))?$")


@dataclass(frozen=True)
class Hop:
    """One ssh server on the way: where it is, who we are there, and which keys speak for either side.

    `alias` is the name as the person writes it; `config` the file that was read for it (None: the person's own).
    `identities` are given (`IdentityFile`) or, without any, the usual names in ~/.ssh.
    """

    alias: str
    host: str
    port: int
    user: str
    identities: tuple[Path, ...]
    identities_only: bool
    known_hosts: tuple[Path, ...]
    host_key_alias: str | None = None
    proxy_command: str | None = None
    jumps: tuple[Hop, ...] = ()
    connect_timeout_s: float = 10.0
    config: Path | None = None

    @property
    def known_as(self) -> str:
        """The name under which known_hosts lists this server."""
        name = self.host_key_alias or self.host
        return name if self.port == 22 or self.host_key_alias else f"[{name}]:{self.port}"

    def ssh(self, *rest: str) -> str:
        """The command line by which a person tries the same by hand."""
        options = () if self.config is None else ("-F", str(self.config))
        return shlex.join(("ssh", *options, self.alias, *rest))


def hop(alias: str, *, config: Path | None = None, user: str | None = None) -> Hop:
    """Read the way to `alias` from an ssh config.

    Args:
        alias: A `Host` of the config, or a host name; `user@host` is understood.
        config: The file to read instead of ~/.ssh/config and the system's (as `ssh -F`).
        user: The login, stronger than the config's.

    Raises:
        Unreachable: The config cannot be read or does not lead anywhere.
    """
    try:
        parsed = paramiko.SSHConfig.from_text("\n".join(_config_lines(config)))
        return _hop(parsed, alias, file=config, user=user, port=None, depth=0)
    except (OSError, ValueError, paramiko.SSHException) as error:
        where = config or "~/.ssh/config"
        raise Unreachable(
            f"the ssh config for {alias} cannot be used: {error}",
            hint=f"mend {where}; `ssh -G {shlex.quote(alias)}` shows how OpenSSH reads it",
        ) from error


def _hop(
    config: paramiko.SSHConfig, alias: str, *, file: Path | None, user: str | None, port: int | None, depth: int
) -> Hop:
    if depth > MAX_HOPS:
        raise ValueError(f"ProxyJump leads through more than {MAX_HOPS} hosts")
    login, at, name = alias.rpartition("@")
    found = config.lookup(name)
    return Hop(
        alias=alias,
        host=found["hostname"],
        port=port or int(found.get("port", 22)),
        user=user or (login if at else None) or found.get("user") or getpass.getuser(),
        identities=_identities(found.get("identityfile", [])),
        identities_only=found.get("identitiesonly", "no").lower() == "yes",
        known_hosts=_known_hosts_files(found),
        host_key_alias=found.get("hostkeyalias"),
        proxy_command=None if _is_none(found.get("proxycommand")) else found["proxycommand"],
        jumps=tuple(_jumps(config, found.get("proxyjump"), file=file, depth=depth)),
        connect_timeout_s=float(found.get("connecttimeout", 10)),
        config=file,
    )


def _is_none(value: str | None) -> bool:
    return value is None or value.lower() == "none"


def _jumps(config: paramiko.SSHConfig, value: str | None, *, file: Path | None, depth: int) -> Iterator[Hop]:
    if value is None or _is_none(value):
        return
    for position, item in enumerate(value.split(",")):
        match = _JUMP.match(item.strip())
        if match is None:
            raise ValueError(f"ProxyJump {item.strip()!r} is not [user@]host[:port]")
        port = None if match["port"] is None else int(match["port"])
        jump = _hop(config, match["host"].strip("[]"), file=file, user=match["user"], port=port, depth=depth + 1)
        # As OpenSSH: only the first of several may have a way of its own.
        yield from jump.jumps if position == 0 else ()
        yield jump


def _identities(listed: Sequence[str]) -> tuple[Path, ...]:
    given = tuple(Path(item).expanduser() for item in listed if item.lower() != "none")
    if given or listed:
        return given
    usual = (Path.home() / ".ssh" / f"id_{kind}" for kind in ("ed25519", "ecdsa", "rsa"))
    return tuple(path for path in usual if path.exists())


def _known_hosts_files(found: paramiko.SSHConfigDict) -> tuple[Path, ...]:
    listed = [
        *shlex.split(found.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2")),
        *shlex.split(found.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2")),
    ]
    tokens = {"%%": "%", "%d": str(Path.home()), "%h": found["hostname"], "%u": getpass.getuser()}
    expanded = (re.sub(r"%[%dhu]", lambda token: tokens[token[0]], item) for item in listed if item.lower() != "none")
    return tuple(Path(item).expanduser() for item in expanded)


def _config_lines(config: Path | None) -> Iterator[str]:
    """All lines in the order in which they count (the first value of a key wins), `Include` resolved."""
    if config is not None:
        yield from _file_lines(config.expanduser(), depth=0)
        return
    own = Path.home() / ".ssh" / "config"
    for path in (own, SYSTEM_CONFIG):
        if path.exists():
            yield from _file_lines(path, depth=0)
            # What stands before the first Host of the next file is for all hosts again.
            yield "Match all"


def _file_lines(path: Path, *, depth: int) -> Iterator[str]:
    if depth > MAX_INCLUDES:
        raise ValueError(f"Include is nested more than {MAX_INCLUDES} deep in {path}")
    block = None
    for line in path.read_text().splitlines():
        include = _INCLUDE.match(line)
        if include is None:
            if _BLOCK.match(line):
                block = line
            yield line
            continue
        for pattern in shlex.split(include["paths"]):
            for included in _included(pattern):
                yield from _file_lines(included, depth=depth + 1)
        yield block or "Match all"


def _included(pattern: str) -> list[Path]:
    expanded = os.path.expanduser(pattern)  # noqa: PTH111 - a glob pattern is no path yet
    base = Path("/") if expanded.startswith("/") else Path.home() / ".ssh"
    return sorted(path for path in base.glob(expanded.lstrip("/")) if path.is_file())


# --- known hosts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KnownKeys:
    """What the known hosts files say of one server: its keys by type, and the keys revoked for anybody."""

    keys: dict[str, paramiko.PKey]
    revoked: frozenset[str]
    files: tuple[Path, ...]


def known_keys(where: Hop) -> KnownKeys:
    """Read the host keys that are known for a server.

    Lines that cannot be read are passed over, as OpenSSH does; so are certificate authorities, which paramiko cannot
    check.

    Raises:
        Unreachable: A known hosts file cannot be read.
    """
    keys: dict[str, paramiko.PKey] = {}
    revoked: set[str] = set()
    for path in where.known_hosts:
        try:
            lines = path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise Unreachable(f"{path} cannot be read: {error}", hint="mend its permissions") from error
        for line in lines:
            words = line.split()
            if words[:1] == ["@revoked"] and len(words) > 3:
                revoked.add(words[3])
            elif len(words) > 2 and _names(words[0], where.known_as):
                key = _key(line.strip())
                if key is not None:
                    keys.setdefault(key.get_name(), key)
    return KnownKeys(keys, frozenset(revoked), where.known_hosts)


def _names(patterns: str, name: str) -> bool:
    """Whether the first field of a known hosts line names a server; see sshd(8), SSH_KNOWN_HOSTS FILE FORMAT."""
    if patterns.startswith("|1|"):
        return _hashed(patterns, name)
    listed = patterns.split(",")
    if any(_matches(pattern[1:], name) for pattern in listed if pattern.startswith("!")):
        return False
    return any(_matches(pattern, name) for pattern in listed)


def _hashed(field: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in field.split("|")[2:])
    except ValueError:
        return False
    return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)


def _matches(pattern: str, name: str) -> bool:
    # Only * and ? are special there: brackets part a host from its port.
    wild = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(wild, name, re.IGNORECASE) is not None


def _key(line: str) -> paramiko.PKey | None:
    try:
        entry = paramiko.hostkeys.HostKeyEntry.from_line(line)
    except (paramiko.SSHException, paramiko.hostkeys.InvalidHostKey, ValueError):
        return None
    return None if entry is None else entry.key


def check_host_key(where: Hop, known: KnownKeys, key: paramiko.PKey) -> None:
    """Refuse a server whose key is not the one in known_hosts.

    Raises:
        Unreachable: The key is unknown, another one, or revoked; the hint says how to compare and add it.
    """
    shown = f"{key.get_name()} {fingerprint(key)}"
    file = next(iter(known.files), Path.home() / ".ssh" / "known_hosts")
    if key.get_base64() in known.revoked:
        raise Unreachable(f"the host key of {where.alias} ({where.known_as}) is revoked: {shown}", hint=f"see {file}")
    if not known.keys:
        raise Unreachable(
            f"the host key of {where.alias} ({where.known_as}) is not known: it shows {shown}",
            hint=_add_key_hint(where, file),
        )
    ours = known.keys.get(key.get_name())
    if ours is None or ours.asbytes() != key.asbytes():
        listed = ", ".join(f"{kind} {fingerprint(one)}" for kind, one in known.keys.items())
        remove = shlex.join(("ssh-keygen", "-R", where.known_as, "-f", str(file)))
        raise Unreachable(
            f"the host key of {where.alias} ({where.known_as}) has changed: it shows {shown}, known is {listed}",
            hint="somebody may be listening in. Only if you know why it changed (the box was installed anew): "
            f"`{remove}`, then\n    {_add_key_hint(where, file)}",
        )


def _add_key_hint(where: Hop, file: Path) -> str:
    port = () if where.port == 22 else ("-p", str(where.port))
    scan = shlex.join(("ssh-keyscan", *port, where.host))
    return (
        f"compare it with what the box's own console says (`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` there; "
        f"`{scan} | ssh-keygen -lf -` here). If they are equal, `{where.ssh('true')}` asks once and adds it to {file}"
    )


def fingerprint(key: paramiko.PKey) -> str:
    """The key's SHA256 fingerprint as OpenSSH prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
