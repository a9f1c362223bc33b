"""The constants of the rehearsal box, read from ``personality.toml``."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_FILE = Path(__file__).with_name("personality.toml")


@dataclass(frozen=True)
class Memory:
    """MiB per card, except where a name says otherwise."""

    total_mib: float
    outside_mib: float
    other_process_mib: float
    weights_mib: float
    activation_cold_mib: float
    activation_loaded_mib: float
    kv_bytes_per_token: int
    graph_mib: float
    graph_pool_mib: float
    warmup_mib: float
    triton_cold_mib: float
    triton_warm_mib: float
    prefill_mib_per_1024: float
    draft_mib_per_row: float
    refuse_factor: float


@dataclass(frozen=True)
class Tactics:
    """Two kernels for wide verify batches, one picked per boot."""

    tile_rows: int
    seed: int
    fused_share: float
    split_share: float


@dataclass(frozen=True)
class Speed:
    """Milliseconds of an engine step and the acceptance of drafts."""

    step_ms: float
    draft_ms: float
    row_ms: float
    pass_ms: float
    pass_stream_ms: float
    eager_factor: float
    no_graph_factor: float
    join_ms: float
    prefill_ms_per_token: float
    pad_rows: int
    thrash_step_ms: float
    retry_ms: float
    refuse_ms: float
    boot_sd: float
    accept_first: float
    accept_next: float


@dataclass(frozen=True)
class Boot:
    """Seconds of each boot phase at time scale 1."""

    import_api_s: float
    inspect_s: float
    import_engine_s: float
    distributed_s: float
    weights_s: float
    model_s: float
    dynamo_cold_s: float
    dynamo_warm_s: float
    inductor_s: float
    save_s: float
    load_s: float
    profile_s: float
    graph_s: float
    autotune_s: float
    triton_cold_s: float
    triton_warm_s: float
    finish_s: float
    api_s: float
    first_stall_s: float
    first_stall_warm_s: float


@dataclass(frozen=True)
class Server:
    """Seconds of the API server's own habits."""

    stats_interval_s: float
    stats_floor_s: float
    health_grace_s: float
    death_exit_s: float
    watchdog_s: float
    ready_timeout_s: float
    keep_alive_s: float
    stop_s: float
    orphan_s: float


@dataclass(frozen=True)
class Personality:
    """Everything that the rehearsal engine does not take from its flags."""

    engine_version: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    architecture: str
    draft_architecture: str
    memory: Memory
    tactics: Tactics
    speed: Speed
    boot: Boot
    server: Server


def load(path: Path | None = None) -> Personality:
    """Reads a personality.

    Args:
        path: A TOML file; its keys replace those of the shipped one.  ``None`` takes the file that
            ``COLDBOOT_REHEARSAL_PERSONALITY`` names, if any.

    Raises:
        TypeError: A key is not known.
        OSError: The file cannot be read.
    """
    data = tomllib.loads(DEFAULT_FILE.read_text(encoding="utf-8"))
    name = os.environ.get("COLDBOOT_REHEARSAL_PERSONALITY")
    override = path or (Path(name) if name else None)
    if override is not None:
        _merge(data, tomllib.loads(override.read_text(encoding="utf-8")))
    return Personality(
        **{
            **data,
            "memory": Memory(**data["memory"]),
            "tactics": Tactics(**data["tactics"]),
            "speed": Speed(**data["speed"]),
            "boot": Boot(**data["boot"]),
            "server": Server(**data["server"]),
        }
    )


def _merge(base: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
