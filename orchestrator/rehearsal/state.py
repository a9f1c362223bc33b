"""What the rehearsal engine remembers between boots: a boot counter per configuration."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
from pathlib import Path

from orchestrator.rehearsal.flags import Settings
from orchestrator.rehearsal.memory import Tactic


def state_dir() -> Path:
    """``COLDBOOT_REHEARSAL_STATE``, else below ``XDG_STATE_HOME``, else below ``~/.local/state``."""
    given = os.environ.get("COLDBOOT_REHEARSAL_STATE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "coldboot-rehearsal"


def configuration_digest(settings: Settings) -> str:
    """Sixteen hex digits over the flags that change speed or memory; ports, names and folders do not count."""
    parts = (
        settings.model,
        settings.dtype,
        settings.quantization,
        settings.kv_cache_dtype,
        settings.tensor_parallel_size,
        settings.gpu_memory_utilization,
        settings.max_model_len,
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        settings.compiles,
        settings.captures,
        settings.capture_sizes,
        settings.max_capture_size,
        settings.kv_cache_memory_bytes,
        settings.num_gpu_blocks_override,
        settings.prefix_caching,
        settings.spec_method,
        settings.spec_tokens,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def next_boot(digest: str, folder: Path | None = None) -> int:
    """Counts this boot of a configuration: 0 for the first.

    The counter file is locked while it is read and written, so that boots at the same time get different numbers.

    Raises:
        OSError: The folder cannot be made or written.
    """
    folder = folder or state_dir()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / f"boots-{digest}", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        text = os.read(descriptor, 32).strip()
        boot = int(text) if text.isdigit() else 0
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, b"%d\n" % (boot + 1))
    finally:
        os.close(descriptor)
    return boot


def pick(boot: int, width: int, tile_rows: int, seed: int) -> Tactic:
    """The kernel that a boot's autotuner takes.

    Up to ``tile_rows`` rows there is one candidate.  Beyond, two lie within the noise of their timings: the picks are
    seeded shuffles of pairs (one of each), so that any three boots in a row show both.
    """
    if width <= tile_rows:
        return Tactic.SINGLE
    pair, second = divmod(boot, 2)
    fused_first = hashlib.sha256(f"{seed}:{pair}".encode()).digest()[0] & 1
    return Tactic.FUSED if fused_first != second else Tactic.SPLIT


def boot_factor(digest: str, boot: int, seed: int, spread: float) -> float:
    """The step-time factor of a boot: mean 1, standard deviation ``spread``, uniform."""
    raw = hashlib.sha256(f"{seed}:{digest}:{boot}".encode()).digest()
    uniform = int.from_bytes(raw[:4], "big") / 2**32
    return 1.0 + spread * (uniform - 0.5) * math.sqrt(12.0)
