"""GPU memory of each boot: what the engine took of a card, and what was left for everything else.

All on the card that had least. Weights, KV cache and graphs are the engine's own lines; what was free before the start
is nvidia-smi's, and so is the fullest moment of the trials. The rest (activations, workspaces, the CUDA context, and
what nobody uses) is what a boot dies of when it is too small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.records import CampaignStarted
from orchestrator.report import words
from orchestrator.report.model import BootView, Section, Table

MIB_PER_GIB = 1024
GROUPS = ("weights", "KV cache", "graphs", "else, in use", "free at the fullest", "else, used or free")
TITLE = "Memory headroom of each boot"
# Two boots whose KV caches differ by no more than this got the same one.
SAME_KV = 0.001


@dataclass(frozen=True, slots=True)
class Memory:
    """One boot's card in GiB: `free` before the start, `least_free` at the fullest moment; None where nothing told."""

    boot: BootView
    free: float
    weights: float | None
    kv: float | None
    graphs: float | None
    kv_tokens: int | None
    least_free: float | None

    @property
    def rest(self) -> float:
        """What weights, KV cache and graphs left; below 0 where the engine asked for more than there was."""
        return self.free - sum(part or 0.0 for part in (self.weights, self.kv, self.graphs))

    @property
    def parts(self) -> tuple[float, ...]:
        """The card in the order of `GROUPS`; the parts are never negative."""
        taken = tuple(max(0.0, part or 0.0) for part in (self.weights, self.kv, self.graphs))
        rest = max(0.0, self.free - sum(taken))
        if self.least_free is None:
            return (*taken, 0.0, 0.0, rest)
        free = min(rest, max(0.0, self.least_free))
        return (*taken, rest - free, free, 0.0)


def of(boots: Sequence[BootView]) -> tuple[Memory, ...]:
    """The boots that count and whose card was seen before their start, in order."""
    return tuple(one for boot in boots if boot.counted and (one := _of(boot)) is not None)


def _of(boot: BootView) -> Memory | None:
    facts = next((step.facts for step in reversed(boot.steps) if step.name == "clean_slate"), {})
    free, idle = _cards(facts.get("free_mib")), _cards(facts.get("gpu_idle_mib"))
    if not free:
        return None
    line = boot.answer.timeline if boot.answer is not None else None
    left = [
        free[use.index] + (idle[use.index] if use.index < len(idle) else 0.0) - use.memory_used_max_mib
        for trial in boot.trials
        for use in trial.gpu or ()
        if use.memory_used_max_mib is not None and use.index < len(free)
    ]
    return Memory(
        boot=boot,
        free=min(free) / MIB_PER_GIB,
        weights=line.weights_gib if line is not None else None,
        kv=line.kv_gib if line is not None else None,
        graphs=line.graph_capture_gib if line is not None else None,
        kv_tokens=line.kv_tokens if line is not None else None,
        least_free=min(left) / MIB_PER_GIB if left else None,
    )


def _cards(value: object) -> list[float]:
    """One number a card; nothing where a card did not tell."""
    if not isinstance(value, list | tuple):
        return []
    found = [float(one) for one in value if isinstance(one, int | float)]
    return found if len(found) == len(value) else []


def section(boots: Sequence[BootView], started: Sequence[CampaignStarted]) -> Section | None:
    """What each boot left of its card; without tables where no card was seen, and None where nothing was recorded."""
    found = of(boots)
    if not found:
        return Section("memory", TITLE, ("no GPU's memory was seen before a boot",)) if started else None
    columns = (
        *("boot", "outcome", "free before", "weights", "KV cache", "KV tokens", "graphs"),
        *("everything else", "least free under load"),
    )
    table = Table(
        "GiB of the card that had least",
        columns,
        tuple(_row(one) for one in found),
        numeric=frozenset(range(2, len(columns))),
        code=frozenset({0}),
        folded=True,
    )
    return Section("memory", TITLE, tuple(_sentences(found)), (table,), figure="memory")


def _row(one: Memory) -> tuple[str, ...]:
    kv = words.ABSENT if one.kv_tokens is None else _grouped(one.kv_tokens)
    parts = (words.number(part, 2) for part in (one.weights, one.kv))
    rest = (words.number(part, 2) for part in (one.graphs, one.rest, one.least_free))
    return (one.boot.name, one.boot.outcome, words.number(one.free, 2), *parts, kv, *rest)


def _grouped(count: int) -> str:
    return f"{count:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def _sentences(found: Sequence[Memory]) -> Iterator[str]:
    yield (
        "A boot needs room beside weights, KV cache and graphs: for activations, for kernels that load at their first "
        "use, and for the CUDA context."
    )
    tight = min(found, key=lambda one: one.rest)
    ended = "" if tight.boot.outcome == "completed" else f", which ended as {tight.boot.outcome}"
    share = f"{words.number(tight.rest, 2)} of {words.number(tight.free, 2)} GiB"
    yield f"Least of it had {tight.boot.name}: {share}{ended}."
    seen = [one for one in found if one.least_free is not None]
    if seen:
        full = min(seen, key=lambda one: one.least_free or 0.0)
        yield (
            f"At the fullest moment of its trials {full.boot.name} had {words.number(full.least_free, 2)} GiB free, "
            f"the least of {words.plural(len(seen), 'boot')}."
        )
    yield from _kv_sentences(found)


def _kv_sentences(found: Sequence[Memory]) -> Iterator[str]:
    """Whether the boots of a variant got the same KV cache: a smaller one is a slower boot under load."""
    by_variant: dict[str, list[int]] = defaultdict(list)
    for one in found:
        if one.kv_tokens:
            by_variant[f"{words.clean(one.boot.variant)}{_state(one.boot)}"].append(one.kv_tokens)
    several = {name: counts for name, counts in by_variant.items() if len(counts) > 1}
    apart = {name: counts for name, counts in several.items() if max(counts) > min(counts) * (1 + SAME_KV)}
    for name, counts in apart.items():
        share = words.percent(max(counts) / min(counts) - 1, 1)
        span = f"{_grouped(min(counts))} to {_grouped(max(counts))}"
        yield f"The KV cache of {name} is not the same on every boot: {span} tokens, {share} apart."
    if several and not apart:
        yield "Each variant got the same KV cache on each of its boots."


def _state(boot: BootView) -> str:
    return "" if boot.cache == "cold" else f" ({boot.cache})"
