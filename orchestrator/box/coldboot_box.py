#!/usr/bin/python3 -ISB
"""coldboot-box: what a campaign of Coldboot does as root on this box, and nothing else.

Installed as /usr/local/sbin/coldboot-box (root's, 0755), for any Python from 3.9 on, with nothing but its standard
library. sudoers lets a login run exactly this file, with whatever arguments: it trusts none of them.

    coldboot-box version                            its version, its digest, the units that the caller may take over
    coldboot-box UNIT install                       our drop-in and its variables (standard input), read by systemd
    coldboot-box UNIT arguments                     the variables of the next start alone (standard input)
    coldboot-box UNIT start | stop | kill           of this unit
    coldboot-box UNIT restore [start]               our drop-in away, and the unit started if it ran before
    coldboot-box UNIT arm SECONDS active|inactive   the restore that the box does by itself; the caller beats
    coldboot-box UNIT disarm                        that away again
    coldboot-box UNIT environment                   of the main process: the variables that are as we set them
    coldboot-box UNIT caches WHAT                   cold cache folders (standard input), as the service's own user
    coldboot-box UNIT clear WHAT                    the unit's own caches (standard input): `check`, `empty`, `left` and
                                                    `free` as the service's own user; `guard`, a unit of ours on the
                                                    disk that puts them back; `back`, that now

/etc/coldboot-box/UNIT.conf, root's own, says who may do so and with what, a word and its value on a line:

    login alex                        who may call; once for each
    cache /home/svc/.cache/coldboot   where cold caches may lie; once for each
    clear /home/svc/.cache/vllm       a cache of the unit's own that may be set aside, this one; once for each
    program /opt/new/bin/python -m x  how a command besides the installed one may begin; once for each. The caller
                                      chooses what follows: say all up to where the program's own flags begin
    env PYTHONPATH                    a variable that may be set although it can load code, or although a command of the
                                      unit's own names it; once for each
    root yes                          the unit may run as root, or have commands that do: then the callers are root

What a caller gets: the unit's life, and the flags and variables of its own program, under its own user, group and
sandbox. Flags of an engine can load code, as that user. Root is not given away; a unit that runs as root is refused,
and one with a command that has more rights than its user (`ExecStartPre=+…`): it would be given the same variables.

Nothing that a caller says is ever read by a shell, or written into a file of systemd's unless it is, line by line, what
Coldboot writes. Exit codes: 0 done, 3 refused, 4 wrong words; else what failed.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
import sys

VERSION = 3
HERE = "/usr/local/sbin/coldboot-box"
CONFIG = "/etc/coldboot-box"
UNITS = "/run/systemd/system"
ON_DISK = "/etc/systemd/system"
OURS = "/run/coldboot"
DROP_IN = "zz-coldboot.conf"
VARIABLES = "zz-coldboot.env"
ARGS = "COLDBOOT_ARGS"
CUT = "%% zz-coldboot.env\n"
LIMIT = 1 << 20
# What a cache that is set aside may not be, nor hold, below the home of the service's user.
AT_HOME = ("", "/.cache", "/.cache/huggingface", "/.config", "/.local", "/.ssh", "/.local/share")
REFUSED = 3
USAGE = 4

TEMPLATES: dict[str, str] = {}
"""The restore that the box does by itself (script, service, timer), the scripts of the caches, and the unit that puts
them back; filled in when this program is printed for a box, so that they stand in one place."""


class Refused(Exception):
    """What a caller asked for is not allowed here; says what and why."""


class Failed(Exception):
    """A program that we ran has failed; its words were printed by itself."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


# --- what may stand where: pure ------------------------------------------------------------------------------------

_UNIT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9:_.@-]{0,200}\.service")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,200}")
_WORD = re.compile(r"[A-Za-z0-9_./:=,+@~-]+")
_PATH = re.compile(r"(?:/[A-Za-z0-9_.@+=,:~-]+)+")
_TAG = re.compile(r"[bw]-[0-9a-f]{10}")
_SECONDS = re.compile(r"[0-9]{1,7}(?:\.[0-9]{1,6})?")
_VARIABLE = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\`$]|\\["\\`$])*)"\n')
_ARGUMENT = re.compile(r'([A-Za-z0-9_./:=,+@^%${}\[\]~-]+)|"((?:[^"\\]|\\["\\])*)"')
_PREFIXES = "-@:+!"
_NO_COMMANDS = ("ExecPaths", "ExecSearchPath")
_LINES = ("ExecCondition", "ExecStartPre", "ExecStart", "ExecStartPost", "ExecReload", "ExecStop", "ExecStopPost")
_PYTHON = re.compile(r"python[0-9.]*")
_PYTHON_FLAG = re.compile(r"-[bBdEiIOPqsSuvx]+|-[XW][A-Za-z0-9_=.:-]*")
# Programs that start another one, and what of their own may stand before it: flags, and numbers of CPUs and nodes.
_FLAG = re.compile(r"--?[A-Za-z0-9,=:+-]*|[0-9+][0-9A-Za-z,:+-]*|all|[0L]")
_LAUNCHERS = {
    **dict.fromkeys(("numactl", "taskset", "nice", "chrt", "stdbuf"), _FLAG),
    "env": re.compile(r"-i?|[A-Za-z_][A-Za-z0-9_]*=.*"),
}

_FIXED = {
    "Restart=no",
    "KillMode=control-group",
    "SendSIGKILL=yes",
    "TimeoutStartSec=infinity",
    "StandardOutput=journal",
    "StandardError=journal",
    "LogRateLimitIntervalSec=0",
}

# A variable of these names makes a process load, or start, what it names.
_LOADS = re.compile(
    r"LD_\w*|DYLD_\w*|GCONV_PATH|LOCPATH|NLSPATH|GLIBC_TUNABLES|MALLOC_\w*"
    r"|PATH|HOME|SHELL|ENV|IFS|PS4|CDPATH|BASH\w*|PROMPT_COMMAND|PERL\w*|RUBY\w*|NODE_\w*|GIT_\w*|JAVA_\w*|_JAVA_\w*"
    r"|PYTHON\w*|VIRTUAL_ENV|CONDA_\w*|PIP_\w*|UV_\w*|CC|CXX|CPP|LD|CUDACXX|NVCC\w*|\w*CFLAGS|\w*LDFLAGS|CXXFLAGS"
    r"|CUDA_HOME|CUDA_PATH|ROCM_HOME|ROCM_PATH|\w*PTXAS\w*|TRITON_\w*(?:PATH|PLUGIN\w*|OVERRIDE\w*)|TORCH_\w*(?:PATH|LIB\w*)"
    r"|\w*PLUGINS?|\w*_PLUGINS?_\w*|\w*PRELOAD\w*|\w*INJECTION\w*|\w*_SO_PATH|\w*_LIBRARY(?:_PATH)?|OMP_TOOL\w*"
    r"|VLLM_\w*(?:_CLS|_CLASS|_MODULE|_PLUGIN\w*|_SO\w*)|HF_HOME|HF_MODULES_CACHE|HF_ENDPOINT|TORCH_HOME|XDG_\w*"
    r"|\w*_MODULES?_(?:PATH|DIR)|\w*BREAKPOINT\w*|\w*STARTUP\w*|SSL_\w*|OPENSSL_\w*|REQUESTS_CA_BUNDLE|CURL_\w*"
    # Compilers, and where they and the linker look; what the kernel's loader of modules is told.
    r"|HOSTCC|HOSTCXX|CUDAHOSTCXX|\w*_NVCC\w*|GCC_EXEC_PREFIX|COMPILER_PATH|LIBRARY_PATH|MODPROBE_OPTIONS"
    r"|CPATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|OBJC_INCLUDE_PATH"
    # Files and classes that a library of an engine's loads, or that say what to load.
    r"|TRITON_CACHE_MANAGER|CUTE_DSL_LIBS|NCCL_CONF_FILE|FI_PROVIDER_PATH|OCL_ICD_\w*|MPLBACKEND"
    r"|VLLM_LOGGING_CONFIG_PATH|RAY_\w*_HOOK|RAY_USER_SETUP_FUNCTION"
)
_NO_LOADERS = {
    "VLLM_ENABLE_STARTUP_PLAN",
    *("PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE"),
}
# And a variable of these says where code is kept that it made itself: it must lie where caches may lie.
_CACHES = re.compile(
    r"\w*_CACHE(?:_DIR|_ROOT|_PATH)?|TMPDIR|TEMP|TMP|TRITON_HOME|TORCH_EXTENSIONS_DIR|FLASHINFER_WORKSPACE_BASE"
    r"|TRITON_(?:DUMP|OVERRIDE)_DIR|\w*_WORKSPACE\w*"
)


def check_unit(name: str) -> str:
    """The name of a unit that may be asked for."""
    if not _UNIT.fullmatch(name) or ".." in name:
        raise Refused(f"{name!r} is no unit's name that is accepted here: letters, digits, `:_.@-`, and `.service`")
    return name


def below(path: str, roots: tuple[str, ...]) -> bool:
    """Whether a path lies at or below one of the roots, by its words alone."""
    plain = bool(_PATH.fullmatch(path)) and not {".", ".."} & set(path.split("/"))
    return plain and any(path == root or path.startswith(root + "/") for root in roots)


def may_clear(path: str) -> bool:
    """Whether a directory of this name may be named by a configuration."""
    return below(path, (path,)) and path.count("/") > 1


def loads_code(name: str) -> bool:
    """Whether a variable of this name can make a process load code."""
    return name not in _NO_LOADERS and _LOADS.fullmatch(name) is not None


def check_drop_in(text: str, unit: str, caches: tuple[str, ...]) -> str:
    """The program of a drop-in that is, line by line, one of Coldboot's."""
    if not text.endswith("\n") or any((char < " " and char != "\n") or char == "\x7f" for char in text):
        raise Refused("the drop-in: lines of plain text are accepted")
    section, starts = "", []
    for line in text[:-1].split("\n"):
        if line.startswith("# ") and not line.endswith("\\"):
            continue
        if (section, line) in (("", "[Unit]"), ("[Unit]", "[Service]"), ("", "[Service]")):
            section = line
        elif section == "[Unit]" and line == "StartLimitIntervalSec=0":
            continue
        elif section == "[Service]" and line.startswith("ExecStart="):
            starts.append(line[len("ExecStart=") :])
        elif section != "[Service]" or not _settles(line, unit, caches):
            raise Refused(f"the drop-in: a line that is not Coldboot's: {line[:200]!r}")
    program, _, rest = (starts[1] if len(starts) == 2 else "").partition(" ")
    if len(starts) != 2 or starts[0] or rest != f"${ARGS}" or not _WORD.fullmatch(program) or program[0] in _PREFIXES:
        raise Refused(f"the drop-in: `ExecStart=`, then `ExecStart=PROGRAM ${ARGS}` is accepted")
    return program


def _settles(line: str, unit: str, caches: tuple[str, ...]) -> bool:
    key, _, value = line.partition("=")
    if key == "TimeoutStopSec":
        return _SECONDS.fullmatch(value) is not None
    if key == "EnvironmentFile":
        return value == f"{UNITS}/{unit}.d/{VARIABLES}"
    if key == "UnsetEnvironment":
        return _NAME.fullmatch(value) is not None
    if key == "ReadWritePaths":
        return value.startswith("-") and below(value[1:], caches)
    return line in _FIXED


def read_variables(text: str) -> dict[str, str]:
    """The variables of a file that systemd reads the same way: each is `NAME="value"`, and nothing else is there."""
    found, at = {}, 0
    while at < len(text):
        line = _VARIABLE.match(text, at)
        if line is None:
            raise Refused(f'the variables: something that is no NAME="value" at {text[at : at + 80]!r}')
        found[line.group(1)] = re.sub(r"\\(.)", r"\1", line.group(2))
        at = line.end()
    if any((char < " " and char not in "\t\n") or char == "\x7f" for value in found.values() for char in value):
        raise Refused("the variables: control characters")
    return found


def check_variables(
    found: dict[str, str], allowed: tuple[str, ...], caches: tuple[str, ...], own: tuple[str, ...] = ()
) -> None:
    """Refuses variables that can load code, that the unit's `own` commands name, and caches that lie elsewhere.

    What is `allowed` by name may be any of these.
    """
    for name, value in found.items():
        if name in allowed:
            continue
        if name in own:
            raise Refused(f"{name} is named by the unit's own commands; `env {name}` in its configuration allows it")
        if name == ARGS:
            continue
        if _CACHES.fullmatch(name):
            if not below(value, caches):
                raise Refused(f"{name} names {value[:200]!r}, which is below no `cache` of this unit's configuration")
        elif loads_code(name):
            raise Refused(f"{name} can load code; `env {name}` in this unit's configuration allows it")


def read_arguments(text: str) -> tuple[str, ...]:
    """The words into which systemd splits the variable with the arguments."""
    words, at = [], 0
    while at < len(text):
        word = _ARGUMENT.match(text, at)
        if word is None or text[word.end() : word.end() + 1] not in ("", " "):
            raise Refused(f"the arguments: words in Coldboot's quoting are accepted, not {text[at : at + 80]!r}")
        words.append(word.group(1) or re.sub(r"\\(.)", r"\1", word.group(2), flags=re.DOTALL))
        at = word.end() + 1
    return tuple(words)


def head(words: tuple[str, ...]) -> tuple[str, ...]:
    """What of a command decides which program runs: `python -m module`, `vllm serve` or a script, with what is before.

    Empty when no such program is recognised: where a flag of a wrapper comes first, what follows it may name another
    program, and we do not guess.
    """
    odd = next((index for index, word in enumerate(words) if not _WORD.fullmatch(word)), len(words))
    plain, at = words[:odd], 0
    while at < len(plain) and os.path.basename(plain[at]) in _LAUNCHERS:
        own = _LAUNCHERS[os.path.basename(plain[at])]
        at += 1
        while at < len(plain) and own.fullmatch(plain[at]):
            at += 1
    return plain[: _program_end(plain, at)]


def _program_end(words: tuple[str, ...], at: int) -> int:
    """Where the words end that name the program which begins here; 0 when it is none that we know."""
    name = os.path.basename(words[at]) if at < len(words) else ""
    if name == "vllm":
        return at + 2 if words[at + 1 : at + 2] == ("serve",) else 0
    if name.endswith(".py"):
        return at + 1
    if not _PYTHON.fullmatch(name):
        return 0
    at += 1
    while at < len(words) and _PYTHON_FLAG.fullmatch(words[at]):
        at += 2 if words[at] in ("-X", "-W") else 1
    if words[at : at + 1] == ("-m",):
        return at + 2 if at + 1 < len(words) else 0
    return at + 1 if at < len(words) and words[at][0] != "-" and words[at].endswith(".py") else 0


def check_command(words: tuple[str, ...], heads: tuple[tuple[str, ...], ...]) -> None:
    """Refuses a command that does not begin as one of these do, word by word; an empty one is none."""
    known = tuple(each for each in heads if each)
    if not known:
        raise Refused(
            "the unit's program cannot be told from its command: neither `python -m MODULE` nor a .py script nor "
            "`vllm serve` is where a program begins; `program` and the beginning of the command, as far as nobody "
            "may change it, in its configuration says it"
        )
    if not any(words[: len(each)] == each for each in known):
        shown = " or ".join(" ".join(each) for each in known)
        raise Refused(
            f"{' '.join(words[:4])!r} is not the unit's program ({shown}); `program` in its configuration adds one"
        )


def installed_head(texts: tuple[str, ...]) -> tuple[str, ...]:
    """The head of the command that a unit file and its drop-ins set; empty when it is not written plainly."""
    command = ([""] + [value for key, value in service_lines(texts) if key == "ExecStart"])[-1]
    return head(tuple(command.lstrip(_PREFIXES.replace("@", "")).split()))


def _logical_lines(text: str) -> list[str]:
    """Lines with what continues them; comments are skipped before that, also those that end in a backslash."""
    found, joined = [], ""
    for raw in re.split(r"\r\n|\n\r|[\n\r\0]", text.lstrip("\ufeff")):
        if raw.strip()[:1] in ("#", ";"):
            continue
        joined += raw
        if (len(joined) - len(joined.rstrip("\\"))) % 2:
            joined = joined[:-1] + " "
            continue
        found.append(joined.strip())
        joined = ""
    return [*found, joined.strip()]


def service_lines(texts: tuple[str, ...]) -> list[tuple[str, str]]:
    """Keys and values of the [Service] of a unit file and its drop-ins, in the order in which systemd reads them."""
    found = []
    for text in texts:
        section = ""
        for line in _logical_lines(text):
            key, equals, value = line.partition("=")
            if line.startswith("["):
                section = line
            elif section == "[Service]" and equals:
                found.append((key.strip(), value.strip()))
    return found


def _commands(texts: tuple[str, ...]) -> list[tuple[str, str]]:
    """The lines of commands that hold: an empty one takes those of its key before it away."""
    kept: list[tuple[str, str]] = []
    for key, value in service_lines(texts):
        if key.startswith("Exec") and key not in _NO_COMMANDS:
            kept = [*kept, (key, value)] if value else [each for each in kept if each[0] != key]
    return kept


def privileged_lines(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Commands of a unit that run with more rights than its user has, and would be given a caller's variables."""
    commands = _commands(texts)
    only = [value for key, value in service_lines(texts) if key == "PermissionsStartOnly" and value]
    others = only and only[-1].lower() not in ("no", "n", "false", "f", "off", "0")
    return tuple(
        f"{key}={value}"
        for key, value in commands
        if (others and key != "ExecStart")
        # A line may hold several commands, each with its own prefixes; quotes may stand around the word with them.
        or any(re.match(r"[\"']*[-@:|]*(?:[+!]|\\)", one) for one in re.split(r"(?:^|\s);\s+", value))
    )


def privileged_words(unit: str, line: str) -> str:
    """Why a unit with such a command is refused, and what to do."""
    return (
        f"{unit} has a command with more rights than its user, which would be given the caller's variables: "
        f"{line[:200]!r}; run it as the unit's user, or from a unit of its own (Requires= and After=); "
        f"`root yes` in {unit}.conf allows it, and then the callers may be root"
    )


def mentioned(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Variables that a unit's own commands name: by systemd, or by a shell that they start (`$$NAME`)."""
    names = {name for _, value in _commands(texts) for name in re.findall(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)", value)}
    return tuple(sorted(names))


def filled(template: str, values: dict[str, str]) -> str:
    """A template with its `__NAME__` filled in."""
    return re.sub(r"__([A-Z_]+?)__", lambda match: values[match.group(1)], template)


# --- the configuration ---------------------------------------------------------------------------------------------


class Conf:
    """What root allows for one unit."""

    def __init__(self, unit: str, text: str) -> None:
        """Reads the words of a configuration."""
        self.unit = unit
        words = ("login", "cache", "clear", "program", "env", "root")
        said: dict[str, list[str]] = {word: [] for word in words}
        for line in text.split("\n"):
            word, _, value = line.strip().partition(" ")
            if not word or word.startswith("#"):
                continue
            if word not in said or not value.strip():
                raise Refused(f"{unit}.conf: {line.strip()[:100]!r}; {', '.join(said)} and a value are accepted")
            said[word].append(value.strip())
        self.logins = tuple(said["login"])
        self.caches = tuple(path.rstrip("/") for path in said["cache"])
        self.clears = tuple(path.rstrip("/") for path in said["clear"])
        self.programs = tuple(tuple(value.split()) for value in said["program"])
        self.env = tuple(said["env"])
        self.root = said["root"] == ["yes"]
        wrong = [path for path in (*self.caches, *self.clears) if not may_clear(path)]
        wrong += [name for name in self.env if not _NAME.fullmatch(name)]
        wrong += [words[0] for words in self.programs if not _WORD.fullmatch(words[0]) or words[0][0] in _PREFIXES]
        if wrong:
            raise Refused(f"{unit}.conf: {wrong[0]!r} cannot be allowed")


def configured(unit: str) -> Conf:
    """The configuration of a unit, if only root can have written it."""
    folder = os.open(CONFIG, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    _refuse_foreign(CONFIG, folder)
    try:
        file = os.open(f"{unit}.conf", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        raise Refused(f"there is no {CONFIG}/{unit}.conf: this unit is none of ours") from None
    _refuse_foreign(f"{CONFIG}/{unit}.conf", file)
    with open(file, encoding="utf-8") as opened:
        return Conf(unit, opened.read(LIMIT))


def _refuse_foreign(path: str, descriptor: int) -> None:
    info = os.fstat(descriptor)
    regular = stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)
    if not regular or info.st_uid != 0 or info.st_mode & 0o022:
        raise Refused(f"{path} could have been written by others than root")


def caller() -> tuple[str, int]:
    """Who asks: the login that sudo names, or root itself."""
    number = int(os.environ.get("SUDO_UID") or os.getuid())
    return pwd.getpwuid(number).pw_name, number


# --- programs that we run --------------------------------------------------------------------------------------------


def run(*argv: str, may_fail: bool = False) -> int:
    """Runs one program to its end; its words go where ours go."""
    pid = os.posix_spawnp(argv[0], argv, os.environ)
    status = os.waitpid(pid, 0)[1]
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    if code and not may_fail:
        raise Failed(code)
    return code


def quiet(*argv: str) -> None:
    """Runs one program of which it does not matter whether there was anything to do."""
    null = os.open("/dev/null", os.O_WRONLY)
    actions = [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
    os.waitpid(os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions), 0)
    os.close(null)


def ask(*argv: str) -> str:
    """What one program says."""
    reading, writing = os.pipe()
    pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1)])
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    if os.waitpid(pid, 0)[1]:
        raise Failed(1)
    return said.decode("utf-8", "replace")


def properties(unit: str, *names: str) -> dict[str, str]:
    """Properties of a unit, as systemd tells them."""
    wanted = [word for name in names for word in ("-p", name)]
    found: dict[str, str] = {}
    for line in ask("systemctl", "show", "--no-pager", *wanted, "--", unit).splitlines():
        name, equals, value = line.partition("=")
        # A property with several commands is said on a line for each.
        found[name] = f"{found[name]}\n{value}" if name in found and equals else value
    return found


def given() -> str:
    """Standard input, as far as it is acceptable."""
    with open(0, "rb", closefd=False) as pipe:
        data = pipe.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise Refused(f"more than {LIMIT} bytes on standard input")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("standard input is no UTF-8") from None


# --- files that we write ---------------------------------------------------------------------------------------------


def folder(path: str, *, make: bool = False) -> int:
    """A directory of root's own, entered step by step, never through a link."""
    at = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    for name in path.strip("/").split("/"):
        if make:
            try:
                os.mkdir(name, 0o755, dir_fd=at)
            except FileExistsError:
                pass
        step = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
        os.close(at)
        at = step
    _refuse_foreign(path, at)
    return at


def put(path: str, text: str, mode: int = 0o644, owner: int = 0) -> None:
    """A file of this text, whole or not at all; whoever reads it sees no half of it."""
    where, name = os.path.split(path)
    at = folder(where, make=True)
    new = f".{name}.new"
    remove(at, new)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=at)
    with open(file, "w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fchmod(file, mode)
        os.fchown(file, owner, -1)
    os.rename(new, name, src_dir_fd=at, dst_dir_fd=at)
    os.close(at)


def remove(at: int, name: str) -> None:
    """A file away, if it is there."""
    try:
        os.unlink(name, dir_fd=at)
    except FileNotFoundError:
        pass


def drop(path: str, names: tuple[str, ...] | None = None) -> None:
    """These files of a folder away (None: all of them), and the folder when it is empty then."""
    try:
        at = folder(path)
    except FileNotFoundError:
        return
    for name in os.listdir(at) if names is None else names:
        remove(at, name)
    os.close(at)
    try:
        os.rmdir(path)
    except OSError:
        pass


# --- the verbs -------------------------------------------------------------------------------------------------------


class Unit:
    """One unit, and what may be done with it."""

    def __init__(self, conf: Conf, owner: int) -> None:
        """`owner`: the number of the login that calls."""
        self.conf = conf
        self.name = conf.unit
        self.owner = owner
        self._shown: dict[str, str] = {}
        self._texts: tuple[str, ...] | None = None
        self.place = f"{UNITS}/{self.name}.d"
        self.ours = f"{OURS}/{self.name}"
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", self.name[: -len(".service")])
        self.stem = f"coldboot-restore-{plain}"
        self.guard = f"coldboot-caches-{plain}.service"

    def shown(self) -> dict[str, str]:
        """What systemd says of it, asked once."""
        if not self._shown:
            asked = ("LoadState", "User", "DynamicUser", "FragmentPath", "DropInPaths")
            self._shown = properties(self.name, *asked, *(f"{line}Ex" for line in _LINES))
        return self._shown

    def user(self) -> pwd.struct_passwd:
        """The service's own user."""
        shown = self.shown()
        if shown.get("LoadState") != "loaded":
            raise Refused(f"there is no unit {self.name}")
        if shown.get("DynamicUser") == "yes":
            raise Refused(f"{self.name} has DynamicUser=yes: there is no user of its own")
        name = shown.get("User") or "root"
        try:
            found = pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
        except KeyError:
            raise Refused(f"{self.name} runs as {name}, whom this box does not know") from None
        if found.pw_uid == 0 and not self.conf.root:
            raise Refused(
                f"{self.name} runs as root: who sets its flags is root; `root yes` in {self.name}.conf allows it"
            )
        return found

    def texts(self) -> tuple[str, ...]:
        """The unit file and its drop-ins without ours, read once."""
        if self._texts is None:
            shown = self.shown()
            drop_ins = [path for path in shown.get("DropInPaths", "").split() if path != f"{self.place}/{DROP_IN}"]
            read = []
            for path in (shown.get("FragmentPath", ""), *drop_ins):
                with open(path, encoding="utf-8", errors="replace") as file:
                    read.append(file.read(LIMIT))
            self._texts = tuple(read)
        return self._texts

    def refuse_privileged(self) -> None:
        """Refuses a unit whose own commands have more rights than its user: our variables are theirs, too."""
        if self.conf.root:
            return
        shown = self.shown()
        found = privileged_lines(self.texts())
        # What systemd has loaded, in its own words; the files are what it reads next.
        found += tuple(
            line
            for line in _LINES
            if re.search(r" ; flags=[^;]*\b(?:privileged|no-setuid|ambient)\b", shown.get(line + "Ex", ""))
        )
        if found:
            raise Refused(privileged_words(self.name, found[0]))

    def heads(self) -> tuple[tuple[str, ...], ...]:
        """How a command of this unit may begin."""
        return (*self.conf.programs, installed_head(self.texts()))

    # each verb: what is left of the words is what it may be given

    def install(self) -> None:
        """Our drop-in and its variables."""
        drop_in, _, variables = given().partition(CUT)
        self.user()
        program = check_drop_in(drop_in, self.name, self.conf.caches)
        self._write_variables(program, variables)
        put(f"{self.place}/{DROP_IN}", drop_in)
        run("systemctl", "daemon-reload")

    def arguments(self) -> None:
        """The variables of the next start alone, for the drop-in that stands."""
        self.user()
        at = folder(self.place)
        with open(os.open(DROP_IN, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=at), encoding="utf-8") as file:
            program = check_drop_in(file.read(LIMIT), self.name, self.conf.caches)
        os.close(at)
        self._write_variables(program, given())

    def _write_variables(self, program: str, text: str) -> None:
        variables = read_variables(text)
        if ARGS not in variables:
            raise Refused(f"the variables: {ARGS} is not among them")
        self.refuse_privileged()
        check_variables(variables, self.conf.env, self.conf.caches, mentioned(self.texts()))
        check_command((program, *read_arguments(variables[ARGS])), self.heads())
        put(f"{self.place}/{VARIABLES}", text, mode=0o600)

    def start(self) -> None:
        """Starts it, without waiting."""
        run("systemctl", "start", "--no-block", "--", self.name)

    def stop(self) -> None:
        """Stops it politely."""
        run("systemctl", "stop", "--", self.name)

    def kill(self) -> None:
        """Kills all of its processes."""
        quiet("systemctl", "kill", "-s", "KILL", "--", self.name)
        self.stop()

    def restore(self, how: str = "") -> None:
        """Our drop-in away; what runs under it is a variant and is killed."""
        self.kill()
        drop(self.place, (DROP_IN, VARIABLES))
        run("systemctl", "daemon-reload")
        quiet("systemctl", "reset-failed", "--", self.name)
        if how == "start":
            self.start()

    def arm(self, seconds: str, was: str) -> None:
        """The restore that the box does by itself when the heartbeat is older than this."""
        texts = self.dead_man(float(seconds), active=was == "active")
        with open("/proc/uptime", encoding="utf-8") as file:
            up = file.read().split()[0]
        put(f"{self.ours}/heart", f"{up}\n", owner=self.owner)
        put(f"{self.ours}/restore", texts["restore"])
        put(f"{UNITS}/{self.stem}.service", texts["service"])
        put(f"{UNITS}/{self.stem}.timer", texts["timer"])
        run("systemctl", "daemon-reload")
        run("systemctl", "restart", "--", f"{self.stem}.timer")

    def dead_man(self, limit_s: float, *, active: bool) -> dict[str, str]:
        """The texts of that restore."""
        values = {
            "UNIT": self.name,
            "ACTIVE": str(int(active)),
            "SCOPE": "",
            "HEART": f"{self.ours}/heart",
            "LIMIT": str(max(1, int(-(-limit_s // 1)))),
            "DROP_IN": f"{self.place}/{DROP_IN}",
            "OURS": f"{self.place}/{DROP_IN} {self.place}/{VARIABLES}",
            "DIR": self.place,
            "RUN": self.ours,
            "UNITS": f"{UNITS}/{self.stem}.service {UNITS}/{self.stem}.timer",
            "TIMER": f"{self.stem}.timer",
            "ASIDE": f"{ON_DISK}/{self.guard}",
            "PUT_BACK": self.guard,
            "SWEEP": "\n".join(self._sweeps()) or ":",
            "SCRIPT": f"{self.ours}/restore",
            "EVERY": f"{max(1.0, min(30.0, limit_s / 6)):g}",
        }
        return {name: filled(TEMPLATES[name], values) for name in ("restore", "service", "timer")}

    def _sweeps(self) -> list[str]:
        """Commands that take cold caches away, wherever they may lie; they touch nothing that is not Coldboot's."""
        own = self.name[: -len(".service")].replace(":", "_")
        places = [place for root in self.conf.caches for place in (root, f"{root}/{own}")]
        return [f"echo root={place} | {HERE} {self.name} caches sweep" for place in places]

    def disarm(self) -> None:
        """That away again."""
        quiet("systemctl", "stop", "--", f"{self.stem}.timer", f"{self.stem}.service")
        at = folder(UNITS)
        remove(at, f"{self.stem}.service")
        remove(at, f"{self.stem}.timer")
        os.close(at)
        drop(self.ours)
        run("systemctl", "daemon-reload")

    def environment(self) -> None:
        """Of the main process's variables, those that are as a caller has set them."""
        at = folder(self.place)
        with open(os.open(VARIABLES, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=at), encoding="utf-8") as file:
            told = {f"{name}={value}".encode() for name, value in read_variables(file.read(LIMIT)).items()}
        pid = int(properties(self.name, "MainPID").get("MainPID") or 0)
        if pid:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                entries = environ.read().split(b"\0")
            # Only what the caller has said itself: what else is in there may be production's secret.
            sys.stdout.buffer.write(b"".join(entry + b"\0" for entry in entries if entry in told))

    def caches(self, what: str) -> None:
        """One of the scripts of the caches, as the service's own user, in a folder that was entered without a link."""
        values = self.cache_values(what, given())
        user = self.user()
        script = TEMPLATES["caches-" + what]
        become(user)
        # Who asks for the room there is told at once what each boot would be told.
        there = self._enter(values["root"], make=what in ("cold", "warm"))
        if what != "free" and not there:
            return
        told = values | {"home": user.pw_dir, "HOME": user.pw_dir}
        if what != "free":
            told["root"] = "."
        shell(script, told)

    def cache_values(self, what: str, text: str) -> dict[str, str]:
        """What a script of the caches is told: checked, and no code."""
        if "caches-" + what not in TEMPLATES:
            raise Refused(f"caches {what!r}: {', '.join(sorted(TEMPLATES))} are known")
        values: dict[str, str] = {}
        for line in filter(None, text.split("\n")):
            name, _, value = line.partition("=")
            if name == "copy":
                values["copies"] = values.get("copies", "") + value + "\n"
            else:
                values[name] = value
        check_caches(values, self.conf.caches)
        return values

    def _enter(self, path: str, *, make: bool) -> bool:
        """Goes into the folder of the caches, as whom we are now; False: it is not there."""
        root = next(each for each in self.conf.caches if below(path, (each,)))
        at = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        depth = len(root.strip("/").split("/"))
        for index, name in enumerate(path.strip("/").split("/")):
            if make:
                try:
                    os.mkdir(name, 0o700, dir_fd=at)
                except OSError:
                    pass
            # A link that root has put on the way to the allowed place is root's own wish; any other is refused.
            follow = index < depth and _roots_link(name, at)
            try:
                step = os.open(name, os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW), dir_fd=at)
            except FileNotFoundError:
                if make:
                    raise Refused(f"{path} cannot be made as the service's user") from None
                return False
            except OSError as error:
                raise Refused(f"{path}: {name!r} on the way: {error.strerror}, or a link") from None
            os.close(at)
            at = step
        os.fchdir(at)
        return True

    def clear(self, what: str) -> None:
        """The unit's own caches, set aside by its own user; root has only the unit that puts them back."""
        path = f"{ON_DISK}/{self.guard}"
        if what == "back":
            if os.path.exists(path):
                run("systemctl", "start", "--", self.guard)
            return
        own, precious = read_clear(given(), self.conf)
        user = self.user()
        paths = [line.split("\t")[0] for line in own]
        if what == "guard":
            listed = self._listed(path, user.pw_name)
            # What lies in another one comes after it: it can only be put back once that one is.
            put(path, self.guard_text(tuple(sorted({*listed, *paths})), user.pw_name))
            run("systemctl", "enable", "--quiet", "--", self.guard)
            return
        become(user)
        if what == "empty":
            for each in paths:
                refuse_links(each)
        told = {
            "own": "\n".join(own),
            # What root has named exactly needs no other bounds than that no link leads out of it.
            "roots": "\n".join(sorted({"/" + each.split("/")[1] for each in paths})),
            "precious": "\n".join((*(user.pw_dir + each for each in AT_HOME), *precious)),
            "pattern": self.name,
            "guard": path,
            "link": f"{ON_DISK}/{self.name}.wants/{self.guard}",
            "HOME": user.pw_dir,
        }
        shell(TEMPLATES["clear-" + what], told)

    def guard_text(self, paths: tuple[str, ...], owner: str) -> str:
        """The unit that puts these directories back."""
        values = {
            "UNIT": self.name,
            "GUARD": self.guard,
            "OWNER": owner,
            "DROP_IN": f"{self.place}/{DROP_IN}",
            "MOUNTS": "\n".join(f"RequiresMountsFor={os.path.dirname(each)}" for each in paths),
            "DIRECTORIES": " ".join(paths),
        }
        return filled(TEMPLATES["clear-unit"], values)

    def _listed(self, path: str, owner: str) -> tuple[str, ...]:
        """What the unit on the disk puts back already; none where it is not there."""
        at = folder(ON_DISK)
        try:
            file = os.open(self.guard, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=at)
        except FileNotFoundError:
            return ()
        finally:
            os.close(at)
        _refuse_foreign(path, file)
        with open(file, encoding="utf-8") as opened:
            text = opened.read(LIMIT)
        found = listed_in(text)
        if self.guard_text(found, owner) != text:
            raise Refused(f"{path} is not as it is written here; `systemctl start {self.guard}` puts back and ends it")
        return found


def become(user: pwd.struct_passwd) -> None:
    """Gives up root for good."""
    os.initgroups(user.pw_name, user.pw_gid)
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)


def shell(script: str, told: dict[str, str]) -> None:
    """Becomes a shell with a script of our own, which is told what it needs in variables."""
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.execve("/bin/sh", ("sh", "-c", script), os.environ | told)


def refuse_links(path: str) -> None:
    """Refuses a path with a link on its way, or at its end; what is not there yet is none."""
    at = os.open("/", os.O_PATH | os.O_DIRECTORY)
    for name in path.strip("/").split("/"):
        try:
            step = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
        except FileNotFoundError:
            break
        except OSError as error:
            raise Refused(f"{path}: {name!r} on the way: {error.strerror}, or a link") from None
        os.close(at)
        at = step
    os.close(at)


def read_clear(text: str, conf: Conf) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The directories that a caller names, each with the names below it that are carried over; and what none may hold.

    A directory is one that the configuration names, letter by letter.
    """
    said: dict[str, list[str]] = {"own": [], "precious": []}
    for line in filter(None, text.split("\n")):
        word, _, value = line.partition("=")
        if word not in said or "\0" in value:
            raise Refused(f"clear: {line[:100]!r}; `own` and `precious` are accepted")
        said[word].append(value)
    if not said["own"]:
        raise Refused("clear: no directory is named")
    for value in said["own"]:
        path, *carried = value.split("\t")
        if path not in conf.clears:
            raise Refused(f"clear: {path[:200]!r} is not named by `clear` in {conf.unit}.conf")
        if not all(below("/" + name, ("",)) for name in carried):
            raise Refused(f"clear: {value[:200]!r} carries what is no plain name")
    return tuple(said["own"]), tuple(said["precious"])


def listed_in(text: str) -> tuple[str, ...]:
    """The directories at the end of the command that puts back; they are of letters that need no quoting."""
    words = (re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE) or [""])[0].split(" ")
    first = next((index for index in range(len(words), 0, -1) if not _PATH.fullmatch(words[index - 1])), 0)
    return tuple(words[first:])


def check_caches(values: dict[str, str], roots: tuple[str, ...]) -> None:
    """Refuses words for a script of the caches that are none of Coldboot's."""
    for name, value in values.items():
        if not _is_cache_word(name, value, roots):
            raise Refused(f"caches: {name[:40]!r} may not be {value[:200]!r}")
    if "root" not in values:
        raise Refused("caches: `root` is not said")


def _is_copy(line: str) -> bool:
    source, _, target = line.partition("\t")
    return (source.startswith("/") or below("/" + source, ("",))) and below("/" + target, ("",))


def _is_cache_word(name: str, value: str, roots: tuple[str, ...]) -> bool:
    if name == "root":
        return below(value, roots)
    if name == "tag":
        return _TAG.fullmatch(value) is not None
    if name == "names":
        return all(below("/" + part, ("",)) for part in value.split(" "))
    return name == "copies" and all(_is_copy(line) for line in value[:-1].split("\n"))


def _roots_link(name: str, at: int) -> bool:
    try:
        info = os.stat(name, dir_fd=at, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISLNK(info.st_mode) and info.st_uid == 0


# verb: the method, and what each further word may be
VERBS: dict[str, tuple[str, ...]] = {
    "install": (),
    "arguments": (),
    "start": (),
    "stop": (),
    "kill": (),
    "restore": ("start|",),
    "arm": (_SECONDS.pattern, "active|inactive"),
    "disarm": (),
    "environment": (),
    "caches": ("[a-z]+",),
    "clear": ("check|guard|empty|left|free|back",),
}


def version(login: str) -> None:
    """What is installed here, and what this login may do with it."""
    import hashlib  # noqa: PLC0415 - the one verb that needs it; every start counts in a boot

    with open(__file__, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    print(f"coldboot-box {VERSION}\nsha256 {digest}")
    names = sorted(name[: -len(".conf")] for name in os.listdir(CONFIG) if name.endswith(".conf"))
    for conf in map(configured, filter(_UNIT.fullmatch, names)):
        if login != "root" and login not in conf.logins:
            continue
        print(f"unit {conf.unit}")
        for word, values in (("cache", conf.caches), ("clear", conf.clears), ("env", conf.env)):
            print("".join(f"{word} {value}\n" for value in values), end="")
        print("".join(f"program {' '.join(words)}\n" for words in conf.programs), end="")
        print("root yes\n" if conf.root else "", end="")


def main(words: list[str]) -> int:
    """One call: who asks, for which unit, for what."""
    login, number = caller()
    if words == ["version"]:
        version(login)
        return 0
    if len(words) < 2 or words[1] not in VERBS:
        print(f"coldboot-box: UNIT and one of {', '.join(VERBS)}; or `version`", file=sys.stderr)
        return USAGE
    conf = configured(check_unit(words[0]))
    if number != 0 and login not in conf.logins:
        raise Refused(f"{login} may not: `login {login}` is not in {CONFIG}/{conf.unit}.conf")
    wanted, further = VERBS[words[1]], words[2:]
    optional = sum(pattern.endswith("|") for pattern in wanted)
    fits = all(re.fullmatch(pattern, word) for pattern, word in zip(wanted, further))  # noqa: B905 - 3.10
    if not len(wanted) - optional <= len(further) <= len(wanted) or not fits:
        print(f"coldboot-box: {words[1]}: {' '.join(wanted) or 'nothing'} is accepted after it", file=sys.stderr)
        return USAGE
    getattr(Unit(conf, number), words[1])(*further)
    return 0


def guarded(words: list[str]) -> int:
    """`main` with an environment of our own; every failure is one line."""
    if os.geteuid() != 0:
        print("coldboot-box: sudo runs this", file=sys.stderr)
        return REFUSED
    kept = {name: os.environ[name] for name in ("SUDO_UID",) if name in os.environ}
    os.environ.clear()
    os.environ.update({"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", **kept})
    os.umask(0o022)
    os.chdir("/")
    try:
        return main(words)
    except Refused as why:
        print(f"coldboot-box: refused: {why}", file=sys.stderr)
        return REFUSED
    except Failed as why:
        return why.status
    except (OSError, ValueError, KeyError) as error:
        print(f"coldboot-box: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(guarded(sys.argv[1:]))
