"""The memory ledger of one card: what fits, what thrashes, what is refused, what kills.

All amounts are MiB on one card.  Budgeted by ``gpu_memory_utilization``: weights, the profiled activation peak, the KV
cache (which takes what is left).  Not budgeted, and therefore out of the headroom above the utilisation: the CUDA
context, captured graphs (the V2 runner estimates them as nothing), Triton's kernels, draft workspaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from orchestrator.rehearsal.flags import Settings
from orchestrator.rehearsal.personality import Memory, Tactics

MIB = 1024 * 1024
GIB_IN_MIB = 1024.0
_LARGEST_SIZE = 512


class Tactic(Enum):
    """How a wide verify batch is computed; ``SINGLE`` where one tile is enough and there is no choice."""

    SINGLE = "single"
    FUSED = "fused"
    SPLIT = "split"


class Fit(Enum):
    """What a decode batch of a given size does to the headroom."""

    FITS = "fits"
    THRASHES = "thrashes"
    REFUSED = "refused"


def default_capture_sizes(largest: int) -> tuple[int, ...]:
    """Default graph sizes of vLLM up to ``largest``: 1, 2, 4, then by 8 to 256, then by 16 to 512."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, _LARGEST_SIZE + 1, 16)]
    return tuple(size for size in sizes if size <= largest)


def capture_sizes(settings: Settings) -> tuple[int, ...]:
    """Batch sizes (rows) that get a piecewise graph; empty when nothing is captured."""
    if not settings.captures:
        return ()
    if settings.capture_sizes:
        return tuple(sorted(set(settings.capture_sizes)))
    width = 1 + settings.spec_tokens
    largest = settings.max_capture_size or min(2 * settings.max_num_seqs * width, _LARGEST_SIZE)
    return default_capture_sizes(min(largest, _LARGEST_SIZE))


def decode_sizes(settings: Settings) -> tuple[int, ...]:
    """Batch sizes with a full graph for uniform decode: whole requests of 1 + k rows each."""
    width = 1 + settings.spec_tokens
    limit = min(settings.max_num_seqs * width, _LARGEST_SIZE)
    return tuple(size for size in capture_sizes(settings) if size % width == 0 and size <= limit)


@dataclass(frozen=True)
class Ledger:
    """One boot's memory on one card.

    Attributes:
        requested: What ``gpu_memory_utilization`` asks for.
        free_at_start: Free memory when the worker looks, its own context already there.
        weights: Weights of this rank.
        activation: Profiled peak.
        kv: KV cache; negative when nothing is left.
        kv_tokens: Tokens that fit into it.
        headroom: Free after KV allocation.
        graphs: What the captured decode graphs take from the headroom.
        spare: Headroom after capture.
    """

    requested: float
    free_at_start: float
    weights: float
    activation: float
    kv: float
    kv_tokens: int
    kv_token_bytes: float
    headroom: float
    graphs: float
    spare: float
    sizes: tuple[int, ...]
    decode: tuple[int, ...]
    draft_mib_per_row: float
    refuse_factor: float
    share: float
    spec_tokens: int

    def padded(self, rows: int) -> int:
        """Rows of the next captured size; the rows themselves beyond the last one or without graphs."""
        return next((size for size in self.sizes if size >= rows), rows)

    def draft_demand(self, streams: int) -> float:
        """Draft workspace of a step in which ``streams`` requests decode."""
        if not self.spec_tokens or not streams:
            return 0.0
        rows = self.padded(streams * (1 + self.spec_tokens))
        return self.draft_mib_per_row * self.spec_tokens * rows * self.share

    def fit(self, streams: int) -> Fit:
        """Whether a decode batch of ``streams`` requests fits."""
        demand = self.draft_demand(streams)
        if demand <= self.spare or demand == 0.0:
            return Fit.FITS
        return Fit.THRASHES if demand <= self.refuse_factor * self.spare else Fit.REFUSED


def make_ledger(settings: Settings, memory: Memory, tactics: Tactics, *, loaded: bool, tactic: Tactic) -> Ledger:
    """Adds up a boot.

    Args:
        settings: The flags.
        memory: The card and the model.
        tactics: What each kernel choice needs.
        loaded: Compiled code came from the cache.
        tactic: The kernel that this boot picked.
    """
    requested = memory.total_mib * settings.gpu_memory_utilization
    weights = memory.weights_mib / settings.tensor_parallel_size
    activation = memory.activation_loaded_mib if loaded else memory.activation_cold_mib
    width = 0.5 if settings.kv_cache_dtype.startswith("fp8") else 1.0
    token_bytes = memory.kv_bytes_per_token * width / settings.tensor_parallel_size
    if settings.kv_cache_memory_bytes is None:
        kv = requested - weights - activation
    else:
        kv = settings.kv_cache_memory_bytes / MIB
    tokens = max(int(kv * MIB / token_bytes) // settings.block_size * settings.block_size, 0)
    if settings.num_gpu_blocks_override is not None:
        tokens = settings.num_gpu_blocks_override * settings.block_size
        kv = tokens * token_bytes / MIB
    free = memory.total_mib - memory.outside_mib - memory.other_process_mib
    headroom = free - weights - activation - kv
    sizes = capture_sizes(settings)
    decode = decode_sizes(settings)
    graphs = memory.graph_mib * len(decode)
    share = {Tactic.SINGLE: 1.0, Tactic.FUSED: tactics.fused_share, Tactic.SPLIT: tactics.split_share}[tactic]
    return Ledger(
        requested=requested,
        free_at_start=free,
        weights=weights,
        activation=activation,
        kv=kv,
        kv_tokens=tokens,
        kv_token_bytes=token_bytes,
        headroom=headroom,
        graphs=graphs,
        spare=headroom - graphs,
        sizes=sizes,
        decode=decode,
        draft_mib_per_row=memory.draft_mib_per_row,
        refuse_factor=memory.refuse_factor,
        share=share,
        spec_tokens=settings.spec_tokens,
    )
