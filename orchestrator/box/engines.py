"""What is special to one server: launch flags, readiness, caches, and the lines that say how fast it thinks it is.

A variant says only what differs from production. `compose` applies it to production's own argument vector and gives
back either the launch or every problem that it found; it does no input or output. Facts about vLLM are of 0.26.0, with
the spellings of 0.10 to 0.32 where they differ.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Literal, Protocol, runtime_checkable

from orchestrator.records import Timeline

CacheProof = Literal["compiled", "loaded", "mixed", "no_compile", "unknown"]

REHEARSAL_MODULE = "orchestrator.rehearsal"


@runtime_checkable
class Change(Protocol):
    """What one variant changes (`matrix.Variant` has it). `None` as a value of `set` or `env` takes it away."""

    @property
    def name(self) -> str:
        """The variant's name."""

    @property
    def set(self) -> Mapping[str, object]:
        """Flags without dashes, and their values."""

    @property
    def unset(self) -> Sequence[str]:
        """Flags to leave out; each must be there."""

    @property
    def env(self) -> Mapping[str, str | None]:
        """Environment variables."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One command to run: what the service manager is given.

    `port` is where it listens, `model` the name under which it serves, `api_key` what it asks of its clients.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    unset_env: tuple[str, ...]
    port: int
    model: str
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a variant cannot be launched; `key` is its place below the variant in matrix.yaml."""

    key: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds one prompt and one batch, tokens and sequences; None where the flags do not say."""

    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None


@dataclass(frozen=True, slots=True)
class Carried:
    """What is no compile cache and is copied from production's caches into the cold ones.

    `source` is relative to the home of the service's user unless one of `variables` (the first that is set wins, with
    its own suffix) says where that cache lives; `target` is relative to the cold root.
    """

    source: str
    target: str
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class OwnCache:
    """One cache directory where a unit's environment puts it; `carried` below it is no compile cache."""

    path: str
    carried: tuple[str, ...] = ()


class Engine(Protocol):
    """One kind of server."""

    @property
    def name(self) -> str:
        """Its key in `ENGINES`."""

    @property
    def rehearsal(self) -> bool:
        """Whether nothing measured on it says anything about a real engine."""

    @property
    def health_path(self) -> str:
        """Answers 200 once it serves."""

    @property
    def metrics_path(self) -> str:
        """Prometheus text."""

    @property
    def carried(self) -> tuple[Carried, ...]:
        """What cold caches take over."""

    @property
    def socket_limit(self) -> int | None:
        """The longest TMPDIR, bytes, in which it can still make its sockets."""

    def compose(
        self,
        base_argv: Sequence[str],
        variant: Change,
        *,
        host: str | None,
        port: int | None,
        program: Sequence[str] | None = None,
    ) -> Launch | tuple[Problem, ...]:
        """Applies a variant to production's command; host and port None leave production's."""

    def changes(self, base_argv: Sequence[str], launch: Launch) -> int:
        """How many flags differ from production's; host and port do not count."""

    def cold_env(self, root: str) -> dict[str, str]:
        """The environment that puts every cache of the engine below `root`."""

    def own_caches(self, env: Mapping[str, str], *, home: str, user: str) -> tuple[OwnCache, ...]:
        """Where the engine keeps its caches when a service's user runs it with this environment."""

    def cache_proof(self, timeline: Timeline, launch: Launch | None = None) -> CacheProof:
        """What the engine's own log says about its caches."""

    def limits(self, argv: Sequence[str]) -> Limits:
        """What the flags say about the size of prompts and batches."""

    def served_model(self, argv: Sequence[str]) -> str:
        """The name under which a command serves its model; empty when the command names none."""

    def headroom_tokens(self, launch: Launch, timeline: Timeline, *, output_tokens: int, at_least: int = 0) -> int:
        """The length of the prompt that fills a whole prefill batch, or of `at_least` so many tokens, if it may be."""

    def logger_tokens_per_s(self, message: str) -> float | None:
        """The generation throughput that a log line claims, tok/s; None for any other line."""

    def own_env(self, *, state: str, time_scale: float | None) -> dict[str, str]:
        """Environment that the engine itself needs to run under us."""


# --- flags ---------------------------------------------------------------------------------------------------------

_SHORT = {
    "O": "optimization-level",
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dpn": "data-parallel-rank",
    "dpr": "data-parallel-start-rank",
    "dpl": "data-parallel-size-local",
    "dpa": "data-parallel-address",
    "dpp": "data-parallel-rpc-port",
    "dpb": "data-parallel-backend",
    "dph": "data-parallel-hybrid-lb",
    "dpe": "data-parallel-external-lb",
    "dcp": "decode-context-parallel-size",
    "pcp": "prefill-context-parallel-size",
    "ep": "enable-expert-parallel",
    "asc": "api-server-count",
    "q": "quantization",
    "sc": "speculative-config",
    "cc": "compilation-config",
    "ac": "attention-config",
    "n": "nnodes",
    "r": "node-rank",
}
_SPELLINGS = {"kv-cache-memory": "kv-cache-memory-bytes"}
_NUMBER = re.compile(r"-(?:\d|\.\d)")
_SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a command line: its canonical name, its words as given, and its values.

    `name` has no dashes in front, `-` for `_`, and no `no-`: `--no-x` is `x` with `negated`.
    """

    name: str
    words: tuple[str, ...]
    values: tuple[str, ...]
    negated: bool = False

    @property
    def meaning(self) -> tuple[bool, tuple[str, ...]]:
        """Equal for two spellings of the same thing."""
        return self.negated, self.values


def canonical(name: str) -> tuple[str, bool]:
    """The name by which a flag is known, whatever its spelling, and whether it was the `no-` form.

    >>> canonical("--enable_prefix_caching"), canonical("-tp"), canonical("no-async-scheduling")
    (('enable-prefix-caching', False), ('tensor-parallel-size', False), ('async-scheduling', True))
    """
    bare = name.lstrip("-")
    head, dot, rest = bare.partition(".")
    if not name.startswith("--"):
        head = _SHORT.get(head, head)
    head = head.replace("_", "-")
    negated = head.startswith("no-")
    head = head.removeprefix("no-")
    return _SPELLINGS.get(head, head) + dot + rest, negated


def is_place(name: str) -> bool:
    """Whether a flag says where the server listens, which is no part of what is compared."""
    return name in _PLACE or name.startswith("ssl-")


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not _NUMBER.match(word)


def parse_flags(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[Flag, ...]]:
    """Take a command line apart: the positional words before the first flag, and the flags in order.

    Everything up to the next flag belongs to a flag; `--a=b` is `--a b`, `-O2` is `-O 2`.
    """
    at = next((index for index, word in enumerate(words) if _is_flag(word)), len(words))
    flags: list[Flag] = []
    for word in words[at:]:
        if _is_flag(word):
            spelled, equals, value = word.partition("=")
            if (level := re.fullmatch(r"-O(\d)", word)) is not None:
                spelled, equals, value = "-O", "=", level.group(1)
            name, negated = canonical(spelled)
            flags.append(Flag(name, (word,), (value,) if equals else (), negated))
        else:
            last = flags[-1]
            flags[-1] = replace(last, words=(*last.words, word), values=(*last.values, word))
    return tuple(words[:at]), tuple(flags)


def split_program(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Cut a server's command into what runs and what it is told: `python -m module` and its kin belong to the program.

    >>> split_program(("/v/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"))
    (('/v/bin/python', '-m', 'vllm.entrypoints.openai.api_server'), ('--model', 'm'))
    """
    end = next((index for index, word in enumerate(argv) if _is_flag(word)), len(argv))
    for index, word in enumerate(argv):
        name = PurePosixPath(word).name
        following = argv[index + 1] if index + 1 < len(argv) else ""
        module = following.startswith("vllm.") or following == REHEARSAL_MODULE or _python_before(argv, index)
        if (word == "-m" and module) or (name == "vllm" and following == "serve"):
            end = index + 2
        elif name.endswith(".py") and index <= end:
            end = index + 1
        else:
            continue
        break
    return tuple(argv[:end]), tuple(argv[end:])


def _python_before(argv: Sequence[str], index: int) -> bool:
    """Whether `-m` at `index` is an interpreter's, with nothing but its own short options between."""
    before = [word for word in argv[:index] if not re.fullmatch(r"-[bBdEiIOPqsSuvx]+", word)]
    return bool(before) and re.fullmatch(r"(?:python|pypy)[\d.]*", PurePosixPath(before[-1]).name) is not None


def spell(name: str, value: object) -> tuple[str, ...]:
    """The words that set a flag: true is bare, false is `--no-…`, a list several values, a mapping JSON.

    >>> spell("cudagraph-capture-sizes", [1, 2, 4]), spell("enable-prefix-caching", False)
    (('--cudagraph-capture-sizes', '1', '2', '4'), ('--no-enable-prefix-caching',))
    """
    flag, negated = canonical(name)
    if isinstance(value, bool):
        return (f"--{flag}",) if value is not negated else (f"--no-{flag}",)
    flag = f"--no-{flag}" if negated else f"--{flag}"
    texts = [_text(item) for item in value] if isinstance(value, list) else [_text(value)]
    if len(texts) == 1 and _is_flag(texts[0]):
        return (f"{flag}={texts[0]}",)
    return (flag, *texts)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def is_rehearsal(argv: Sequence[str]) -> bool:
    """Whether a command runs the rehearsal engine, whoever configured it."""
    return any(REHEARSAL_MODULE in word for word in argv)


# --- vLLM ----------------------------------------------------------------------------------------------------------

_PLACE = frozenset({"host", "port", "uds"})
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_CONTAINERS = frozenset({"docker", "podman", "nerdctl", "singularity", "apptainer", "enroot", "srun"})
_LOGGER = re.compile(r"Avg generation throughput: (\d+(?:\.\d+)?) tokens/s")
_DEFAULT_PORT = 8000
_DEFAULT_BATCH = 2048
_TEMPLATE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM's OpenAI-compatible server, by `vllm serve` or by its module."""

    name: str = "vllm"
    rehearsal: bool = False
    health_path: str = "/health"
    metrics_path: str = "/metrics"
    program: tuple[str, ...] | None = None
    # The engine's sockets are `<TMPDIR>/<uuid4>`, and a socket's path has at most 107 bytes.
    socket_limit: int | None = 107 - 37
    carried: tuple[Carried, ...] = (
        # Which classes a model file holds: 25 s of a boot that no cache state is about.
        Carried(
            ".cache/vllm/modelinfos",
            "vllm/modelinfos",
            (("VLLM_CACHE_ROOT", "modelinfos"), ("XDG_CACHE_HOME", "vllm/modelinfos")),
        ),
        # Kernels that were downloaded, not compiled.
        Carried(
            ".cache/flashinfer/cubins",
            "flashinfer/.cache/flashinfer/cubins",
            (("FLASHINFER_CUBIN_DIR", ""), ("FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer/cubins")),
        ),
    )

    def compose(
        self,
        base_argv: Sequence[str],
        variant: Change,
        *,
        host: str | None,
        port: int | None,
        program: Sequence[str] | None = None,
    ) -> Launch | tuple[Problem, ...]:
        """See `Engine.compose`."""
        problems = list(_base_problems(base_argv))
        if problems:
            return tuple(problems)
        runs, told = split_program(base_argv)
        replacement = tuple(program) if program else self.program
        positional, flags = parse_flags(told)
        if replacement is not None:
            # Another program knows `--model`, not the positional word of `vllm serve`.
            flags = (*(Flag("model", ("--model", word), (word,)) for word in positional[:1]), *flags)
            runs, positional = replacement, ()
        problems += _variant_problems(variant, flags, isolated=port is not None)
        if problems:
            return tuple(problems)
        flags = _applied(flags, variant)
        if host is not None or port is not None:
            flags = tuple(flag for flag in flags if not is_place(flag.name))
            flags += tuple(_flag(spell(*pair)) for pair in (("host", host), ("port", port)) if pair[1] is not None)
        model = _model(positional, flags)
        if model is None:
            return (Problem((), "the command names no model: neither --model nor `vllm serve MODEL`"),)
        env = {name: value for name, value in variant.env.items() if value is not None}
        return Launch(
            argv=(*runs, *positional, *(word for flag in flags for word in flag.words)),
            env={"NO_COLOR": "1", "PYTHONUNBUFFERED": "1", **env},
            unset_env=tuple(name for name, value in variant.env.items() if value is None),
            port=_port(flags),
            model=model,
            api_key=_one(flags, "api-key"),
        )

    def changes(self, base_argv: Sequence[str], launch: Launch) -> int:
        """See `Engine.changes`. A flag that is added, left out or has another value is one change."""
        was, now = (_meanings(argv) for argv in (base_argv, launch.argv))
        return sum(was.get(name) != now.get(name) for name in was.keys() | now.keys())

    def cold_env(self, root: str) -> dict[str, str]:
        """See `Engine.cold_env`. HOME and XDG_CACHE_HOME stay: vLLM hashes them, and weights live below."""
        return {
            "VLLM_CACHE_ROOT": f"{root}/vllm",
            "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": f"{root}/vllm/flashinfer_autotune_cache",
            "TORCHINDUCTOR_CACHE_DIR": f"{root}/inductor",
            "TORCH_EXTENSIONS_DIR": f"{root}/torch_extensions",
            "TRITON_HOME": f"{root}/triton_home",
            "TRITON_CACHE_DIR": f"{root}/triton",
            "FLASHINFER_WORKSPACE_BASE": f"{root}/flashinfer",
            "DG_JIT_CACHE_DIR": f"{root}/deep_gemm",
            "TILELANG_CACHE_DIR": f"{root}/tilelang",
            "CUTE_DSL_CACHE_DIR": f"{root}/cute",
            "CUDA_CACHE_PATH": f"{root}/nv",
            "TMPDIR": f"{root}/tmp",  # noqa: S108 - below a root of our own
        }

    def own_caches(self, env: Mapping[str, str], *, home: str, user: str) -> tuple[OwnCache, ...]:
        """See `Engine.own_caches`. The defaults are of vLLM 0.26.0 and the packages that it brings along."""
        home = env.get("HOME") or home
        xdg = env.get("XDG_CACHE_HOME") or f"{home}/.cache"
        tmp = env.get("TMPDIR") or "/tmp"  # noqa: S108 - what Python's tempfile takes without it
        user = env.get("LOGNAME") or env.get("USER") or user
        found = {
            "VLLM_CACHE_ROOT": OwnCache(f"{xdg}/vllm", ("modelinfos",)),
            "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": None,
            "TORCHINDUCTOR_CACHE_DIR": OwnCache(f"{tmp}/torchinductor_{user}"),
            "TORCH_EXTENSIONS_DIR": OwnCache(f"{xdg}/torch_extensions"),
            "TRITON_CACHE_DIR": OwnCache(f"{env.get('TRITON_HOME') or home}/.triton/cache"),
            "FLASHINFER_WORKSPACE_BASE": OwnCache(f"{home}/.cache/flashinfer", ("cubins",)),
            "DG_JIT_CACHE_DIR": None,
            "TILELANG_CACHE_DIR": OwnCache(f"{home}/.tilelang/cache"),
            "CUTE_DSL_CACHE_DIR": OwnCache(f"{tmp}/{user}/cutlass_python_cache"),
            "CUDA_CACHE_PATH": OwnCache(f"{home}/.nv/ComputeCache"),
        }
        below = {"FLASHINFER_WORKSPACE_BASE": "/.cache/flashinfer"}
        own = []
        for name, default in found.items():
            given = env.get(name, "")
            carried = default.carried if default is not None else ()
            if given:
                path = re.sub(r"^~(?=/)", home, given).rstrip("/") + below.get(name, "")
                own.append(OwnCache(path, carried))
            elif default is not None:
                own.append(default)
        return tuple(own)

    def cache_proof(self, timeline: Timeline, launch: Launch | None = None) -> CacheProof:
        """See `Engine.cache_proof`. Silence of an engine that was told not to compile is `no_compile`."""
        if timeline.compile_state == "unknown" and launch is not None and _compiles_nothing(launch.argv):
            return "no_compile"
        return timeline.compile_state

    def limits(self, argv: Sequence[str]) -> Limits:
        """See `Engine.limits`."""
        _, flags = parse_flags(split_program(argv)[1])
        return Limits(
            max_num_batched_tokens=_size(_one(flags, "max-num-batched-tokens")),
            max_model_len=_size(_one(flags, "max-model-len")),
            max_num_seqs=_size(_one(flags, "max-num-seqs")),
        )

    def served_model(self, argv: Sequence[str]) -> str:
        """See `Engine.served_model`."""
        return _model(*parse_flags(split_program(argv)[1])) or ""

    def headroom_tokens(self, launch: Launch, timeline: Timeline, *, output_tokens: int, at_least: int = 0) -> int:
        """See `Engine.headroom_tokens`. The engine's own word on its batch goes before the flag."""
        limits = self.limits(launch.argv)
        batch = timeline.num_batched_tokens or limits.max_num_batched_tokens or _DEFAULT_BATCH
        wanted = max(batch, at_least)
        if limits.max_model_len is None:
            return wanted
        return max(1, min(wanted, limits.max_model_len - output_tokens - _TEMPLATE_TOKENS))

    def logger_tokens_per_s(self, message: str) -> float | None:
        """See `Engine.logger_tokens_per_s`."""
        found = _LOGGER.search(message)
        return None if found is None else float(found.group(1))

    def own_env(self, *, state: str, time_scale: float | None) -> dict[str, str]:  # noqa: ARG002 - the rehearsal's
        """See `Engine.own_env`."""
        return {}


@dataclass(frozen=True, slots=True)
class Rehearsal(Vllm):
    """The embedded stand-in: vLLM's flags, log lines and metrics, and nothing that speaks of a real engine."""

    name: str = "rehearsal"
    rehearsal: bool = True
    program: tuple[str, ...] | None = (sys.executable, "-m", REHEARSAL_MODULE)
    socket_limit: int | None = None

    def own_env(self, *, state: str, time_scale: float | None) -> dict[str, str]:
        """See `Engine.own_env`: where the boot counter lives, and how much the boot phases are shortened."""
        env = {"COLDBOOT_REHEARSAL_STATE": state}
        return env if time_scale is None else env | {"COLDBOOT_REHEARSAL_TIME_SCALE": f"{time_scale:g}"}


ENGINES: dict[str, Engine] = {"vllm": Vllm(), "rehearsal": Rehearsal()}


def _base_problems(argv: Sequence[str]) -> Iterator[Problem]:
    if not argv:
        yield Problem((), "production's command is empty")
        return
    runs, told = split_program(argv)
    shells = [word for word in runs if PurePosixPath(word).name in _SHELLS]
    if shells:
        yield Problem(
            (),
            f"ExecStart runs a shell ({shells[0]}), whose flags cannot be changed one by one: "
            "give the box `unit_file:` with the engine's own command",
        )
    elif containers := [word for word in runs if PurePosixPath(word).name in _CONTAINERS]:
        yield Problem(
            (),
            f"ExecStart runs {PurePosixPath(containers[0]).name}: its container gets neither our environment (so no "
            "boot would be cold) nor the unit's control group; run the engine itself from the unit",
        )
    elif told and not _is_flag(told[0]) and len(parse_flags(told)[0]) > 1:
        yield Problem((), f"words without a flag before the first flag: {' '.join(parse_flags(told)[0])}")


def _variant_problems(variant: Change, flags: Sequence[Flag], *, isolated: bool) -> Iterator[Problem]:
    there = {flag.name for flag in flags}
    wanted: dict[str, str] = {}
    for name in variant.set:
        flag, _ = canonical(name)
        if flag in wanted:
            yield Problem(("set", name), f"--{flag} is set twice, as {wanted[flag]} and as {name}")
        wanted[flag] = name
        if isolated and flag in _PLACE:
            yield Problem(("set", name), f"--{flag} is ours while the box has `isolate: true`")
    for name in variant.unset:
        flag, _ = canonical(name)
        if flag in wanted:
            yield Problem(("unset",), f"--{flag} is both set and unset")
        elif flag not in there:
            near = difflib.get_close_matches(flag, there, n=1)
            guess = f" (did you mean {near[0]}?)" if near else ""
            present = ", ".join(sorted(there))
            yield Problem(("unset",), f"production has no flag --{flag} to unset{guess}; it has: {present}")


def _applied(flags: Sequence[Flag], variant: Change) -> tuple[Flag, ...]:
    """The flags with a variant's changes: in place of the first of the same name, or at the end."""
    gone = {canonical(name)[0] for name in (*variant.unset, *(k for k, v in variant.set.items() if v is None))}
    new = {canonical(name)[0]: _flag(spell(name, value)) for name, value in variant.set.items() if value is not None}
    out: list[Flag] = []
    for flag in flags:
        if flag.name in gone:
            continue
        if flag.name not in new:
            out.append(flag)
        elif new[flag.name] not in out:
            out.append(flag if flag.meaning == new[flag.name].meaning else new[flag.name])
    names = {flag.name for flag in out}
    return (*out, *(flag for name, flag in new.items() if name not in names))


def _flag(words: tuple[str, ...]) -> Flag:
    spelled, equals, value = words[0].partition("=")
    name, negated = canonical(spelled)
    return Flag(name, words, (value, *words[1:]) if equals else words[1:], negated)


def differences(base_argv: Sequence[str], argv: Sequence[str]) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """What a command changes in production's, but for its place: its own flags as words, and those it leaves out."""
    was, now = _meanings(base_argv), _meanings(argv)
    flags = parse_flags(split_program(argv)[1])[1]
    own = tuple(flag.words for flag in flags if not is_place(flag.name) and was.get(flag.name) != now.get(flag.name))
    return own, tuple(name for name in was if name not in now)


def _meanings(argv: Sequence[str]) -> dict[str, tuple[tuple[bool, tuple[str, ...]], ...]]:
    positional, flags = parse_flags(split_program(argv)[1])
    found: dict[str, tuple[tuple[bool, tuple[str, ...]], ...]] = {}
    for flag in (*(Flag("model", (word,), (word,)) for word in positional[:1]), *flags):
        if not is_place(flag.name):
            found[flag.name] = (*found.get(flag.name, ()), flag.meaning)
    return found


def _one(flags: Sequence[Flag], name: str) -> str | None:
    """The first value of the last flag of that name, as argparse takes it."""
    values = [flag.values[0] for flag in flags if flag.name == name and flag.values]
    return values[-1] if values else None


def _model(positional: Sequence[str], flags: Sequence[Flag]) -> str | None:
    return _one(flags, "served-model-name") or (positional[0] if positional else _one(flags, "model"))


def _port(flags: Sequence[Flag]) -> int:
    given = _one(flags, "port")
    return int(given) if given is not None and given.isdigit() else _DEFAULT_PORT


def _size(text: str | None) -> int | None:
    """Read a size as vLLM does: `8192`, `8k` (8000), `8K` (8192), `1.5m`; None for `auto`, -1 and anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text or "")
    return None if found is None else int(float(found.group(1)) * _SIZES.get(found.group(2), 1))


def _compiles_nothing(argv: Sequence[str]) -> bool:
    _, flags = parse_flags(split_program(argv)[1])
    eager = any(flag.name == "enforce-eager" and not flag.negated for flag in flags)
    return eager or _one(flags, "optimization-level") == "0"
