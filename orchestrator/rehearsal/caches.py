"""The caches on disk that make a boot cold or warm: compiled graphs, Triton kernels, model infos.

Three states, as on a real card: a first boot compiles everything; a second one loads the compiled graphs but compiles
its Triton kernels again, because the first wrote them below its own compile cache unless ``TRITON_CACHE_DIR`` is set;
from the third on everything is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.rehearsal.flags import Settings
from orchestrator.rehearsal.memory import capture_sizes

_HASHED_SPECULATION = frozenset({"eagle3", "dflash", "dspark", "extract_hidden_states"})
_NOT_HASHED = (
    "VLLM_CACHE_ROOT",
    "VLLM_PORT",
    "VLLM_LOGGING_",
    "VLLM_LOG_STATS_INTERVAL",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_ENABLE_STARTUP_PLAN",
    "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",
    "VLLM_TUNED_CONFIG_FOLDER",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    "VLLM_WORKER_MULTIPROC_METHOD",
)


@dataclass(frozen=True)
class Caches:
    """Where one boot looks and writes.

    Attributes:
        root: vLLM's cache root.
        short_hash: Ten hex digits of the compile cache folder.
        aot_hash: Sixty-four hex digits of the ahead-of-time artefact.
        kernels: Folder of the hand-written Triton kernels' binaries that this boot looks into.
        loaded: Compiled graphs are there for every rank.
        kernels_loaded: Triton kernels are there.
    """

    root: Path
    short_hash: str
    aot_hash: str
    kernels: Path
    loaded: bool
    kernels_loaded: bool

    def rank_folder(self, rank: int) -> Path:
        """The Inductor artefacts of a rank."""
        return self.root / "torch_compile_cache" / self.short_hash / f"rank_{rank}_0" / "backbone"

    def artefact(self, rank: int) -> Path:
        """The ahead-of-time artefact of a rank."""
        return self.root / "torch_compile_cache" / "torch_aot_compile" / self.aot_hash / f"rank_{rank}_0" / "model"


def cache_root(environ: Mapping[str, str]) -> Path:
    """``VLLM_CACHE_ROOT``, else below ``XDG_CACHE_HOME``, else below ``~/.cache``."""
    if environ.get("VLLM_CACHE_ROOT"):
        return Path(environ["VLLM_CACHE_ROOT"]).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm"


def look(settings: Settings, version: str, environ: Mapping[str, str]) -> Caches:
    """What is on disk for a configuration before this boot compiles anything."""
    root = cache_root(environ)
    digest = hashlib.sha256(repr(_factors(settings, version, environ)).encode()).hexdigest()
    aot = hashlib.sha256(digest.encode()).hexdigest()
    artefacts = root / "torch_compile_cache" / "torch_aot_compile" / aot
    loaded = settings.compiles and all(
        (artefacts / f"rank_{rank}_0" / "model").is_file() for rank in range(settings.tensor_parallel_size)
    )
    given = environ.get("TRITON_CACHE_DIR")
    if given:
        kernels = Path(given).expanduser()
    elif settings.compiles and not loaded:
        kernels = artefacts / "inductor_cache" / "triton" / "0"
    else:
        kernels = Path.home() / ".triton" / "cache"
    kernels = kernels / hashlib.sha256(f"{digest}{settings.spec_tokens}".encode()).hexdigest()[:52].upper()
    return Caches(root, digest[:10], aot, kernels, loaded, (kernels / "_rejection_kernel.json").is_file())


def save_graphs(caches: Caches, settings: Settings) -> None:
    """Writes what a cold compile leaves behind.

    Raises:
        OSError: The cache cannot be written.
    """
    span = f"1_{settings.max_num_batched_tokens}"
    for rank in range(settings.tensor_parallel_size):
        folder = caches.rank_folder(rank)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "vllm_compile_cache.py").write_text(f"{{('compile_range', '{span}', 0): 'inductor_standalone'}}\n")
        (folder / "computation_graph.py").write_text("# rehearsal: no graph was compiled\n")
        (folder / "cache_key_factors.json").write_text(json.dumps({"model": settings.model, "rehearsal": True}))
        (folder / f"artifact_compile_range_{span}_subgraph_0").write_bytes(b"rehearsal\n" * 64)
        artefact = caches.artefact(rank)
        artefact.parent.mkdir(parents=True, exist_ok=True)
        artefact.write_bytes(b"rehearsal\n" * 64)
    configs = caches.artefact(0).parent.parent / "inductor_cache" / "ey"
    configs.mkdir(parents=True, exist_ok=True)
    (configs / f"{caches.aot_hash[:52]}.best_config").write_text(json.dumps({"num_warps": 8, "num_stages": 1}))


def save_kernels(caches: Caches) -> None:
    """Writes what compiling the hand-written Triton kernels leaves behind.

    Raises:
        OSError: The cache cannot be written.
    """
    caches.kernels.mkdir(parents=True, exist_ok=True)
    for name in ("_rejection_kernel", "_resample_kernel", "_temperature_kernel"):
        (caches.kernels / f"{name}.json").write_text(json.dumps({"name": name, "rehearsal": True}))


def model_info(root: Path, architecture: str) -> Path:
    """The file that spares the inspection of an architecture."""
    return root / "modelinfos" / f"vllm-model_executor-models-qwen3_5-{architecture}.json"


def save_model_info(path: Path, architecture: str) -> None:
    """Writes the result of an inspection.

    Raises:
        OSError: The cache cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"architecture": architecture, "is_text_generation_model": True, "rehearsal": True}))


def _factors(settings: Settings, version: str, environ: Mapping[str, str]) -> tuple[object, ...]:
    hashed = sorted(
        (name, value)
        for name, value in environ.items()
        if name.startswith("VLLM_") and not name.startswith(_NOT_HASHED)
    )
    speculation = settings.spec_method if settings.spec_method in _HASHED_SPECULATION else None
    return (
        version,
        settings.model,
        settings.dtype,
        settings.quantization,
        settings.kv_cache_dtype,
        settings.max_model_len,
        settings.block_size,
        settings.tensor_parallel_size,
        settings.max_num_batched_tokens,
        capture_sizes(settings),
        speculation,
        hashed,
    )
