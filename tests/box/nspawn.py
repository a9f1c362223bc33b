"""A real Debian with systemd, journald and sshd of its own, started in about a second: the box of the tests.

Built once by debootstrap into a cache folder ($COLDBOOT_TEST_CACHE, else ~/.cache/coldboot-test), laid under a
throw-away overlay for each test session, and started by systemd-nspawn in its own cgroup. The box shares this
machine's loopback, so its sshd has a free port of its own; the checkout, its virtual environment and the Python it was
made with stand inside at the same paths, read-only.

Whatever becomes of the test session, the box ends: nspawn dies with its parent, and the next session sweeps up what is
left of sessions whose process is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

TOOLS = {"systemd-nspawn": "systemd-container", "debootstrap": "debootstrap", "ssh-keygen": "openssh-client"}
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "libpam-systemd",
    "dbus",
    "openssh-server",
    "python3",
    "sudo",
    "procps",
    "iproute2",
    "util-linux",
)
RECIPE = "2"
"""Part of the cache's name: raise it when the recipe below changes."""

CHECKOUT = Path(__file__).resolve().parents[2]
LOGIN = "alex"
BOOT_S = 60.0
STOP_S = 15.0

# What a box for tests does not need, and what makes its boot slow or noisy.
_MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
    "console-getty.service",
    "getty.target",
    "systemd-update-utmp.service",
    "systemd-update-utmp-runlevel.service",
)
_SSHD = """\
Port {port}
ListenAddress 127.0.0.1
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
MaxStartups 100
"""
_SSH_CONFIG = """\
Host gwen
    User {login}

Host gwen-root
    User root

Host *
    HostName 127.0.0.1
    Port {port}
    IdentityFile {key}
    IdentitiesOnly yes
    UserKnownHostsFile {known_hosts}
    GlobalKnownHostsFile none
"""


class NoBox(Exception):
    """This machine cannot have the box; says why."""


# --- the tree --------------------------------------------------------------------------------------------------------


def base_tree(more: Sequence[str] = ()) -> Path:
    """The cached Debian, with `more` packages, built when it is not there yet (about a minute).

    Raises:
        NoBox: Not root, not Debian, or the tools cannot be had.
    """
    suite = _suite()
    _tools()
    packages = (*PACKAGES, *more)
    recipe = repr((suite, platform.machine(), packages, RECIPE))
    tree = _cache() / f"box-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    with _locked(tree.with_suffix(".lock")):
        if not tree.exists():
            building = tree.with_suffix(".building")
            shutil.rmtree(building, ignore_errors=True)
            _build(building, suite, packages)
            building.rename(tree)
    return tree


def _suite() -> str:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoBox("the real box needs root on Linux")
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', Path("/etc/os-release").read_text(), re.MULTILINE))
    if release.get("ID") != "debian" or shutil.which("apt-get") is None:
        raise NoBox(f"the real box is built from Debian's packages; this is {release.get('PRETTY_NAME', 'no Debian')}")
    return release["VERSION_CODENAME"]


def _tools() -> None:
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if not missing:
        return
    install = ("apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "-qq", "--no-install-recommends", *missing)
    for command in (("apt-get", "update", "-qq"), install):
        done = _run(command, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, check=False)
        if done.returncode != 0:
            raise NoBox(f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}")


def _build(tree: Path, suite: str, packages: Sequence[str]) -> None:
    tree.mkdir(parents=True)
    command = (
        "debootstrap",
        "--variant=minbase",
        f"--include={','.join(packages)}",
        suite,
        str(tree),
        *mirror_of(suite),
    )
    done = _run(command, env={**os.environ, **_apt_proxy()}, check=False)
    if done.returncode != 0:
        raise NoBox(f"debootstrap failed: {done.stdout.strip()[-500:]} {done.stderr.strip()[-500:]}")
    _run(("chroot", str(tree), "useradd", "-m", "-s", "/bin/bash", "-G", "systemd-journal", LOGIN))
    for unit in _MASKED:
        (tree / "etc/systemd/system" / unit).symlink_to("/dev/null")
    shutil.rmtree(tree / "var/cache/apt/archives", ignore_errors=True)
    shutil.rmtree(tree / "var/lib/apt/lists", ignore_errors=True)


def mirror_of(suite: str, apt: Path = Path("/etc/apt")) -> tuple[str, ...]:
    """The mirror that this machine's apt uses for the suite; none: debootstrap's own."""
    for path in sorted((*apt.glob("sources.list"), *apt.glob("sources.list.d/*.list"))):
        for line in path.read_text().splitlines():
            match = re.match(rf"deb\s+(?:\[.*?\]\s+)?(\S+)\s+{suite}\s+.*\bmain\b", line.strip())
            if match:
                return (match[1],)
    for path in sorted(apt.glob("sources.list.d/*.sources")):
        for block in re.split(r"\n\s*\n", path.read_text()):
            keys = dict(re.findall(r"^(\w[\w-]*):\s*(.*)$", block, re.MULTILINE))
            if suite in keys.get("Suites", "").split() and "main" in keys.get("Components", "").split():
                return (keys["URIs"].split()[0],)
    return ()


def _apt_proxy() -> dict[str, str]:
    shown = _run(("apt-config", "shell", "proxy", "Acquire::http::Proxy"), check=False).stdout
    match = re.match(r"proxy='(.*)'", shown.strip())
    return {"http_proxy": match[1]} if match else {}


def _cache() -> Path:
    cache = Path(os.environ.get("COLDBOOT_TEST_CACHE") or Path.home() / ".cache" / "coldboot-test")
    cache.mkdir(parents=True, exist_ok=True)
    return cache.resolve()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(
    argv: Sequence[str],
    *,
    check: bool = True,
    env: dict[str, str] | None = None,
    feed: str | None = None,
    timeout_s: float = 600.0,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, check=check, env=env, input=feed, timeout=timeout_s, capture_output=True, text=True)


# --- one session's box -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BoxProcess:
    """One process of the box: its id inside, its id out here, and its command line."""

    pid: int
    host_pid: int
    argv: tuple[str, ...]


class Box:
    """A running box; a context manager that ends it for sure. `binds`: more folders that it sees, read-only.

    root         its file tree, seen from here (/run, /tmp and /dev are its own and not seen: use `sh`)
    ssh_config   a config with the aliases `gwen` (the user alex, no root) and `gwen-root`
    alias        "gwen"; `root_alias` "gwen-root"
    port         its sshd's port on 127.0.0.1
    folder       keys, known_hosts and configs of this session
    """

    alias = "gwen"
    root_alias = "gwen-root"
    login = LOGIN
    python = sys.executable
    """The project's Python, at the same path inside and outside."""

    def __init__(self, base: Path, binds: Sequence[Path] = ()) -> None:
        sessions = _cache() / "sessions"
        sessions.mkdir(exist_ok=True)
        sweep(sessions)
        self._session = Path(tempfile.mkdtemp(prefix="box-", dir=sessions))
        (self._session / "owner").write_text(f"{os.getpid()} {_started_at(os.getpid())}")
        self.name = f"coldboot-{self._session.name.removeprefix('box-').replace('_', '-').lower()}-{os.getpid()}"
        self.root = self._session / "root"
        self.folder = self._session / "ssh"
        self.port = free_port()
        self._binds = tuple(binds)
        self._process: subprocess.Popen[bytes] | None = None
        self._cgroups = _new_cgroups(self.name)
        (self._session / "cgroups").write_text("\n".join(map(str, self._cgroups)))
        _lay(base, self._session)
        self._furnish()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.discard()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()

    # power

    def start(self) -> None:
        """Switch the box on; returns when its systemd says that it has started."""
        assert self._process is None, "the box runs already"
        with (
            tempfile.TemporaryDirectory(prefix="coldboot-") as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready,
        ):
            ready.bind(f"{folder}/notify")
            binds = [f"--bind-ro={path}" for path in _bound(self._binds)]
            join = "".join(f"echo $$ > {path}/cgroup.procs; " for path in self._cgroups)
            nspawn = (
                "systemd-nspawn",
                "-q",
                "--boot",
                "--register=no",
                "--keep-unit",
                "--notify-ready=yes",
                f"--machine={self.name}",
                f"--directory={self.root}",
                *binds,
            )
            with (self._session / "console.log").open("ab") as console:
                self._process = subprocess.Popen(
                    ("sh", "-c", f'{join}exec setpriv --pdeathsig KILL -- "$@"', "sh", *nspawn),
                    env={**os.environ, "NOTIFY_SOCKET": f"{folder}/notify", "SYSTEMD_NSPAWN_TMPFS_TMP": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=console,
                    start_new_session=True,
                )
            (self._session / "nspawn.pid").write_text(f"{self._process.pid} {_started_at(self._process.pid)}")
            self._wait_ready(ready)

    def power_off(self, *, cut: bool = False) -> None:
        """Switch the box off: in good order, or by a power cut. Its disk stays, /run and /tmp are lost."""
        if self._process is None:
            return
        if not cut:
            with contextlib.suppress(subprocess.SubprocessError):
                self.sh(("systemctl", "poweroff", "--no-block"), check=False)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(STOP_S)
        self._process = None
        _kill_all(self._cgroups)

    def reboot(self, *, cut: bool = False) -> None:
        """Switch the box off and on again, on the same port."""
        self.power_off(cut=cut)
        self.start()

    def discard(self) -> None:
        """End the box and remove what it left; a second call is nothing."""
        self.power_off()
        _remove(self._session)

    # inside

    def sh(
        self, argv: Sequence[str], *, check: bool = True, feed: str | None = None, timeout_s: float = 30.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside as root, without ssh (milliseconds)."""
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        enter = (
            "nsenter",
            "-t",
            str(self._leader()),
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--cgroup",
            "--root",
            "--wd=/",
        )
        done = _run(
            (*enter, "--", "env", "-i", path, "LC_ALL=C.UTF-8", *argv), check=False, feed=feed, timeout_s=timeout_s
        )
        assert not check or done.returncode == 0, f"{argv} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def processes(self) -> tuple[BoxProcess, ...]:
        """Every process of the box."""
        found = []
        for host_pid in _members(self._cgroups):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{host_pid}/status").read_text()
                ids = re.search(r"^NSpid:\s+(.*)$", status, re.MULTILINE)
                argv = Path(f"/proc/{host_pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
                if ids is not None and len(ids[1].split()) > 1:
                    found.append(BoxProcess(int(ids[1].split()[-1]), host_pid, tuple(argv)))
        return tuple(sorted(found, key=lambda process: process.pid))

    def pids(self, word: str = "") -> tuple[int, ...]:
        """Process ids, as the box itself counts them, of those whose command line holds `word`."""
        return tuple(process.pid for process in self.processes() if word in " ".join(process.argv))

    def kill(self, pid: int, how: int = signal.SIGKILL) -> None:
        """Send a signal to a process of the box, named as the box itself counts; nothing when it is gone already."""
        for process in self.processes():
            if process.pid == pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.host_pid, how)

    def write_unit(self, name: str, text: str) -> None:
        """Install a system unit and have systemd read it."""
        (self.root / "etc/systemd/system" / name).write_text(text)
        self.sh(("systemctl", "daemon-reload"))

    def remove_unit(self, name: str) -> None:
        """Stop a unit, whatever state it is in, and remove it with its drop-ins."""
        self.sh(("systemctl", "kill", "-s", "KILL", name), check=False)
        self.sh(("systemctl", "stop", name), check=False)
        self.sh(
            (
                "rm",
                "-rf",
                f"/etc/systemd/system/{name}",
                f"/etc/systemd/system/{name}.d",
                f"/run/systemd/system/{name}.d",
            )
        )
        self.sh(("systemctl", "reset-failed", name), check=False)
        self.sh(("systemctl", "daemon-reload"))

    def write_sudoers(self, lines: Sequence[str]) -> None:
        """Let the login do exactly this as root; no lines: nothing."""
        path = self.root / "etc/sudoers.d/coldboot"
        path.unlink(missing_ok=True)
        if lines:
            path.write_text("".join(f"{line}\n" for line in lines))
            path.chmod(0o440)
            self.sh(("visudo", "-cf", "/etc/sudoers.d/coldboot"))

    # ssh

    @property
    def ssh_config(self) -> Path:
        """The config by which the box is reached."""
        return self.folder / "config"

    @property
    def key(self) -> Path:
        """The private key of both users."""
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The box's host keys, as its console would tell them."""
        return self.folder / "known_hosts"

    def _furnish(self) -> None:
        self.folder.mkdir(mode=0o700)
        _run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "coldboot-test", "-f", str(self.key)))
        public = self.key.with_suffix(".pub").read_text()
        # The venv's Python may stand below root's home; the login must get through.
        (self.root / "root").chmod(0o711)
        for home, owner in ((self.root / "root", 0), (self.root / "home" / LOGIN, 1000)):
            (home / ".ssh").mkdir(mode=0o700, exist_ok=True)
            (home / ".ssh/authorized_keys").write_text(public)
            os.chown(home / ".ssh", owner, owner)
            os.chown(home / ".ssh/authorized_keys", owner, owner)
        etc = self.root / "etc"
        (etc / "ssh/sshd_config.d/test.conf").write_text(_SSHD.format(port=self.port))
        (etc / "hostname").write_text("gwen\n")
        (etc / "hosts").write_text("127.0.0.1 localhost gwen\n")
        (etc / "machine-id").write_text(f"{uuid.uuid4().hex}\n")
        host_keys = sorted((etc / "ssh").glob("ssh_host_*_key.pub"))
        self.known_hosts.write_text("".join(f"[127.0.0.1]:{self.port} {path.read_text()}" for path in host_keys))
        self.ssh_config.write_text(
            _SSH_CONFIG.format(login=LOGIN, port=self.port, key=self.key, known_hosts=self.known_hosts)
        )

    def _leader(self) -> int:
        assert self._process is not None, "the box is off"
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def _wait_ready(self, ready: socket.socket) -> None:
        deadline = time.monotonic() + BOOT_S
        said = ""
        while "READY=1" not in said.splitlines():
            left_s = deadline - time.monotonic()
            assert self._process is not None
            if left_s <= 0 or self._process.poll() is not None:
                log = (self._session / "console.log").read_text(errors="replace")
                self.power_off(cut=True)
                raise NoBox(f"the box did not start within {BOOT_S:g} s:\n{log[-2000:]}")
            if select.select((ready,), (), (), min(left_s, 0.5))[0]:
                said = ready.recv(4096).decode(errors="replace")


def _bound(more: Sequence[Path]) -> tuple[Path, ...]:
    """What the box sees of this machine: the checkout, the virtual environment, the Python below it, and `more`."""
    wanted = sorted({CHECKOUT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), *more})
    # Debian's own Python is in the box already, from the same release.
    outside = [path for path in wanted if path != Path("/usr")]
    return tuple(path for path in outside if not any(path != other and path.is_relative_to(other) for other in outside))


def free_port() -> int:
    """A port that nobody has: boxes of several sessions share this machine's loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _lay(base: Path, session: Path) -> None:
    """Give the session a tree that it may change: an overlay, or a copy where overlays cannot be had."""
    for name in ("upper", "work", "root"):
        (session / name).mkdir()
    options = f"lowerdir={base},upperdir={session}/upper,workdir={session}/work"
    mounted = _run(("mount", "-t", "overlay", "overlay", "-o", options, str(session / "root")), check=False)
    if mounted.returncode != 0:
        _run(("cp", "-a", "--reflink=auto", f"{base}/.", str(session / "root")))


def _new_cgroups(name: str) -> tuple[Path, ...]:
    """Cgroups of the box's own, so that several boxes on one machine do not take each other's processes for theirs."""
    top = Path("/sys/fs/cgroup")
    if (top / "cgroup.controllers").exists():
        wanted = [top]
    else:
        wanted = [path for path in (top / "systemd", top / "unified") if (path / "cgroup.procs").exists()]
    made = tuple(path / name for path in wanted)
    try:
        for path in made:
            path.mkdir()
    except OSError as error:
        raise NoBox(f"the real box needs a cgroup of its own: {error}") from error
    return made


def _members(cgroups: Sequence[Path]) -> tuple[int, ...]:
    if not cgroups:
        return ()
    pids: set[int] = set()
    # Groups come and go meanwhile: os.walk passes over those that are gone.
    for folder, _, _ in os.walk(cgroups[0]):
        with contextlib.suppress(OSError):
            pids.update(map(int, Path(folder, "cgroup.procs").read_text().split()))
    return tuple(sorted(pids))


def _kill_all(cgroups: Sequence[Path]) -> None:
    deadline = time.monotonic() + STOP_S
    while pids := _members(cgroups):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < deadline, f"processes of the box cannot be killed: {pids}"
        select.select((), (), (), 0.02)


def _started_at(pid: int) -> str:
    """The start time of a process, which tells it from a later one of the same number; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _alive(path: Path) -> int | None:
    """The process that a file names, if it still lives."""
    try:
        pid, started_at = path.read_text().split()
    except (OSError, ValueError):
        return None
    return int(pid) if _started_at(int(pid)) == started_at else None


def sweep(sessions: Path) -> None:
    """Remove what sessions left whose process was killed."""
    for session in sessions.iterdir():
        # A session without an owner is just being made, unless it is old.
        old = time.time() - session.stat(follow_symlinks=False).st_mtime > 60
        if _alive(session / "owner") is None and ((session / "owner").exists() or old):
            nspawn = _alive(session / "nspawn.pid")
            if nspawn is not None:
                os.kill(nspawn, signal.SIGKILL)
            _remove(session)


def _remove(session: Path) -> None:
    listed = session / "cgroups"
    cgroups = [Path(line) for line in listed.read_text().splitlines()] if listed.exists() else []
    _kill_all([path for path in cgroups if path.exists()])
    for cgroup in cgroups:
        for folder, _, _ in os.walk(cgroup, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
    if os.path.ismount(session / "root"):
        _run(("umount", "--lazy", str(session / "root")))
    shutil.rmtree(session, onerror=_force)


def _force(_function: object, path: str, _error: object) -> None:
    with contextlib.suppress(OSError):
        Path(path).chmod(stat.S_IRWXU)
        Path(path).unlink()
