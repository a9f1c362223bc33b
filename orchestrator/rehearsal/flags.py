"""vLLM's command line as the rehearsal engine understands it.

The names and kinds of all 274 options stand in ``data/flags.txt``, taken from the usage text of vLLM 0.26.0, which is
what an unknown flag prints (``data/usage.txt``).  Parsed by hand because building argparse's parser for them costs more
CPU than the rest of a boot; the rules are those of argparse and of vLLM's subclass of it: ``--a b``, ``--a=b``,
``--a_b``, unique prefixes, ``--no-a``, lists, dotted keys of JSON options, ``-O2``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.rehearsal.personality import Personality

_DATA = Path(__file__).with_name("data")

ALIASES: Mapping[str, str] = {
    "-O": "--optimization-level",
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-ep": "--enable-expert-parallel",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpr": "--data-parallel-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
    "-ac": "--attention-config",
}
_INTS = frozenset(
    [
        "port",
        "tensor-parallel-size",
        "pipeline-parallel-size",
        "data-parallel-size",
        "max-num-seqs",
        "seed",
        "block-size",
        "num-gpu-blocks-override",
        "spec-tokens",
        "max-cudagraph-capture-size",
        "optimization-level",
        "shutdown-timeout",
        "stream-interval",
        "max-logprobs",
        "api-server-count",
        "cudagraph-capture-sizes",
        "max-log-len",
    ]
)
_SIZES = frozenset(["max-model-len", "max-num-batched-tokens", "kv-cache-memory-bytes", "max-num-scheduled-tokens"])
_FLOATS = frozenset(["gpu-memory-utilization", "cpu-offload-gb", "kv-offloading-size"])
_JSON = re.compile(r".*-(config|kwargs)$|^hf-overrides$|^limit-mm-per-prompt$|^reasoning-config$")
_NOT_JSON = frozenset({"config", "generation-config"})
_NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$")
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)([kKmMgGtT])$")


class UsageError(Exception):
    """The command line is not one of vLLM's: usage on stderr, exit status 2."""


class ConfigError(Exception):
    """The command line parses but makes no configuration: a traceback that ends with a ValueError, exit status 1."""


@dataclass(frozen=True)
class Settings:
    """What the engine needs of the command line; ``non_default`` is all of it, as vLLM logs it."""

    model: str
    served_names: tuple[str, ...]
    host: str | None
    port: int
    tensor_parallel_size: int
    gpu_memory_utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    prefix_caching: bool
    compiles: bool
    captures: bool
    capture_sizes: tuple[int, ...]
    max_capture_size: int | None
    spec_method: str | None
    spec_model: str | None
    spec_tokens: int
    seed: int
    load_format: str
    api_keys: tuple[str, ...]
    log_stats: bool
    access_log: bool
    quiet_endpoints: tuple[str, ...]
    uvicorn_level: str
    shutdown_timeout_s: int
    force_usage: bool
    prompt_details: bool
    uds: str | None
    non_default: Mapping[str, Any] = field(default_factory=dict)


def usage() -> str:
    """The usage text of vLLM 0.26.0."""
    return (_DATA / "usage.txt").read_text(encoding="utf-8")


def _kinds() -> dict[str, str]:
    lines = (_DATA / "flags.txt").read_text(encoding="utf-8").split("\n")
    return {name: kind for kind, name in (line.split() for line in lines if line)}


def _size(text: str) -> int:
    """An integer with vLLM's suffixes: k, m, g, t decimal, K, M, G, T binary."""
    match = _SIZE.match(text)
    if not match:
        return int(text)
    unit = match.group(2)
    power = "kmgt".index(unit.lower()) + 1
    base = 1000 if unit.islower() else 1024
    return int(float(match.group(1)) * base**power)


def _converter(name: str) -> tuple[str, Callable[[str], Any]]:
    if name in _INTS:
        return "int", int
    if name in _SIZES:
        return "human_readable_int", _size
    if name in _FLOATS:
        return "float", float
    if _JSON.match(name) and name not in _NOT_JSON:
        return "loads", json.loads
    return "str", str


def _convert(name: str, text: str) -> Any:
    kind, convert = _converter(name)
    try:
        return convert(text)
    except ValueError:
        raise UsageError(f"argument --{name}: invalid {kind} value: {text!r}") from None


class _Parser:
    """One pass over an argument list."""

    def __init__(self, arguments: list[str]) -> None:
        self.kinds = _kinds()
        self.rest = arguments[::-1]
        self.values: dict[str, Any] = {}
        self.unknown: list[str] = []

    def run(self) -> dict[str, Any]:
        while self.rest:
            token = self.rest.pop()
            if token.startswith("-") and len(token) > 1 and not _NUMBER.match(token):
                self._option(token)
            elif "model-tag" not in self.values:
                self.values["model-tag"] = token
            else:
                self.unknown.append(token)
        if self.unknown:
            raise UsageError(f"unrecognized arguments: {' '.join(self.unknown)}")
        return self.values

    def _option(self, token: str) -> None:
        name, equals, value = token.partition("=")
        if token.startswith("-O") and not token.startswith("-O.") and len(token) > 2:
            name, equals, value = "-O", "=", token[2:].lstrip("=")
        name, _, dotted = name.partition(".")
        name = ALIASES.get(name, name)
        name = self._resolve(name.replace("_", "-")) if name.startswith("--") else ""
        if not name:
            self.unknown.append(token)
            return
        given = value if equals else None
        if dotted:
            self._dotted(name, dotted, given)
        elif name.startswith("no-") and name not in self.kinds:
            self._refuse_value(name, given)
            self.values[name[3:]] = False
        else:
            self._known(name, given)

    def _known(self, name: str, given: str | None) -> None:
        kind = self.kinds[name]
        if kind in {"bool", "flag"}:
            self._refuse_value(name, given)
            self.values[name] = True
        elif kind == "many":
            texts = [given] if given is not None else self._list(name)
            self.values[name] = [_convert(name, text) for text in texts]
        else:
            text = given if given is not None else self._value()
            if text is None and kind != "optional":
                raise UsageError(f"argument --{name}: expected one argument")
            self.values[name] = _convert(name, text) if text is not None else None

    def _dotted(self, name: str, dotted: str, given: str | None) -> None:
        text = given if given is not None else self._value()
        target = self.values.setdefault(name, {})
        *parents, last = dotted.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
        try:
            target[last] = json.loads(text) if text is not None else True
        except json.JSONDecodeError:
            target[last] = text

    def _resolve(self, name: str) -> str:
        bare = name[2:]
        if bare in self.kinds or (bare.startswith("no-") and self.kinds.get(bare[3:]) == "bool"):
            return bare
        options = [*self.kinds, *(f"no-{key}" for key, kind in self.kinds.items() if kind == "bool")]
        matches = [option for option in options if option.startswith(bare)]
        if len(matches) > 1:
            raise UsageError(f"ambiguous option: {name} could match {', '.join(f'--{m}' for m in matches)}")
        return matches[0] if matches else ""

    def _value(self) -> str | None:
        if self.rest and (not self.rest[-1].startswith("-") or self.rest[-1] == "-" or _NUMBER.match(self.rest[-1])):
            return self.rest.pop()
        return None

    def _list(self, name: str) -> list[str]:
        texts = []
        while (text := self._value()) is not None:
            texts.append(text)
        if not texts:
            raise UsageError(f"argument --{name}: expected at least one argument")
        return texts

    @staticmethod
    def _refuse_value(name: str, given: str | None) -> None:
        if given is not None:
            raise UsageError(f"argument --{name}: ignored explicit argument {given!r}")


def parse(arguments: list[str], personality: Personality, environ: Mapping[str, str]) -> Settings:
    """Reads a vLLM command line.

    Args:
        arguments: What stands behind the program.
        personality: Defaults that vLLM would take from the model and the card.
        environ: The environment (``VLLM_API_KEY``).

    Raises:
        UsageError: As argparse would refuse it (exit status 2).
        ConfigError: As vLLM's configuration would refuse it (exit status 1).
    """
    values = _Parser(arguments).run()
    method, spec_model, spec_tokens = _speculation(values)
    compilation = values.get("compilation-config") or {}
    if not isinstance(compilation, dict):
        raise UsageError("argument --compilation-config/-cc: expected a JSON object")
    eager = bool(values.get("enforce-eager")) or values.get("optimization-level") == 0
    model = values.get("model-tag") or values.get("model") or "Qwen/Qwen3-0.6B"
    max_len = values.get("max-model-len")
    settings = Settings(
        model=model,
        served_names=tuple(values.get("served-model-name") or (model,)),
        host=values.get("host"),
        port=values.get("port", 8000),
        tensor_parallel_size=values.get("tensor-parallel-size", 1),
        gpu_memory_utilization=values.get("gpu-memory-utilization", 0.92),
        max_model_len=max_len if max_len not in {None, -1} else personality.max_model_len,
        max_num_seqs=values.get("max-num-seqs", personality.max_num_seqs),
        max_num_batched_tokens=values.get("max-num-batched-tokens", personality.max_num_batched_tokens),
        block_size=values.get("block-size") or personality.block_size,
        dtype={"auto": "bfloat16", "half": "float16", "float": "float32"}.get(
            values.get("dtype", "auto"), values.get("dtype", "auto")
        ),
        quantization=values.get("quantization"),
        kv_cache_dtype=values.get("kv-cache-dtype", "auto"),
        kv_cache_memory_bytes=values.get("kv-cache-memory-bytes"),
        num_gpu_blocks_override=values.get("num-gpu-blocks-override"),
        prefix_caching=values.get("enable-prefix-caching", True),
        compiles=not eager and compilation.get("mode", 3) != 0,
        captures=not eager and str(compilation.get("cudagraph_mode", "")).upper() != "NONE",
        capture_sizes=tuple(values.get("cudagraph-capture-sizes") or compilation.get("cudagraph_capture_sizes") or ()),
        max_capture_size=values.get("max-cudagraph-capture-size") or compilation.get("max_cudagraph_capture_size"),
        spec_method=method,
        spec_model=spec_model,
        spec_tokens=spec_tokens,
        seed=values.get("seed", 0),
        load_format=values.get("load-format", "auto"),
        api_keys=tuple(values.get("api-key") or ([environ["VLLM_API_KEY"]] if environ.get("VLLM_API_KEY") else [])),
        log_stats=not values.get("disable-log-stats", False),
        access_log=not values.get("disable-uvicorn-access-log", False),
        quiet_endpoints=tuple(filter(None, (values.get("disable-access-log-for-endpoints") or "").split(","))),
        uvicorn_level=values.get("uvicorn-log-level", "info"),
        shutdown_timeout_s=values.get("shutdown-timeout", 0),
        force_usage=values.get("enable-force-include-usage", False),
        prompt_details=values.get("enable-prompt-tokens-details", False),
        uds=values.get("uds"),
        non_default={key.replace("-", "_"): value for key, value in values.items()},
    )
    _check(settings, personality)
    return settings


def _speculation(values: dict[str, Any]) -> tuple[str | None, str | None, int]:
    """Method, draft model and number of draft tokens; 0 tokens without speculation."""
    config = values.get("speculative-config") or {}
    if not isinstance(config, dict):
        raise UsageError("argument --speculative-config/-sc: expected a JSON object")
    merged = dict(config)
    for flag, key in (("spec-method", "method"), ("spec-model", "model"), ("spec-tokens", "num_speculative_tokens")):
        if flag not in values:
            continue
        if key in config:
            raise ConfigError(f"Cannot set both --{flag} and --speculative-config.{key}.")
        merged[key] = values[flag]
    if not merged:
        return None, None, 0
    tokens = merged.get("num_speculative_tokens")
    tokens = 1 if tokens is None else tokens
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(
            f"1 validation error for SpeculativeConfig\nnum_speculative_tokens\n"
            f"  Input should be greater than 0 [type=greater_than, input_value={tokens!r}]"
        )
    method = merged.get("method")
    model = merged.get("model")
    if method is None and model is None:
        raise ConfigError("num_speculative_tokens was provided but without speculative model.")
    method = str(method or "draft_model")
    return ("mtp" if method.endswith("_mtp") else method), model, tokens


def _check(settings: Settings, personality: Personality) -> None:
    if not 0.0 < settings.gpu_memory_utilization <= 1.0:
        raise ConfigError(
            "1 validation error for CacheConfig\ngpu_memory_utilization\n"
            f"  Input should be greater than 0 and at most 1 [input_value={settings.gpu_memory_utilization}]"
        )
    if settings.max_model_len > personality.max_model_len:
        raise ConfigError(
            f"User-specified max_model_len ({settings.max_model_len}) is greater than the derived max_model_len "
            f"(max_position_embeddings={personality.max_model_len}). To allow overriding this maximum, set the env "
            "var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1."
        )
    for name in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(settings, name)}.")
