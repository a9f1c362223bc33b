"""The bandwidth wall: how far a cell is from the rate at which the weights could be read at all.

A decode step reads every weight once, whatever the number of streams, so one GPU makes at most bandwidth ÷ bytes of
weights steps per second; each step gives every stream A tokens. The model is for dense weights: a mixture of experts
reads only a part of them, and KV cache traffic is left out, so the wall is an upper bound for dense models alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.records import CacheState, CampaignStarted, Level
from orchestrator.report import trials, words
from orchestrator.report.model import BootView, Section, Table, VariantView

# GB/s of one card, from NVIDIA's data sheets; the name as nvidia-smi tells it, without "NVIDIA".
BANDWIDTH_GB_S: Mapping[str, float] = {
    r"GeForce RTX 3090": 936,
    r"GeForce RTX 3090 Ti": 1008,
    r"GeForce RTX 4090": 1008,
    r"GeForce RTX 5090": 1792,
    r"RTX A6000": 768,
    r"RTX 6000 Ada Generation": 960,
    r"Tesla T4": 320,
    r"L4": 300,
    r"L40S?": 864,
    r"A10G?": 600,
    r"A40": 696,
    r"A100-(?:SXM4|PCIE)-40GB": 1555,
    r"A100 80GB PCIe": 1935,
    r"A100-SXM4-80GB": 2039,
    r"H100 PCIe": 2039,
    r"H100 80GB HBM3": 3350,
    r"H200": 4800,
    r"B200": 8000,
}


def bandwidth(gpus: str | None) -> float | None:
    """GB/s of one card of `2 × NVIDIA GeForce RTX 3090`; None for an unknown card or for several kinds."""
    name = re.sub(r"^\d+ × ", "", gpus or "").removeprefix("NVIDIA ").strip()
    return next((rate for pattern, rate in BANDWIDTH_GB_S.items() if re.fullmatch(pattern, name)), None)


def section(
    variants: Sequence[VariantView], boots: Sequence[BootView], started: Sequence[CampaignStarted]
) -> Section | None:
    """Each cell's share of the wall, with the inputs; says what is missing where it cannot be computed."""
    if not started:
        return None
    gpus = started[-1].fingerprint.get("gpus")
    rate = bandwidth(gpus)
    weights = _weights_gib(boots)
    if rate is None or not weights:
        known = "the box names no GPU" if gpus is None else f"no bandwidth is known for {words.clean(gpus)}"
        missing = known if rate is None else "the engine's log does not say how much memory the weights take"
        return Section("wall", "The bandwidth wall", (f"Not computed: {missing}.",))
    found = walls(variants, boots, started)
    rows = [row for variant in variants for row in _rows(variant, found, rate, weights)]
    if not rows:
        return None
    card = words.clean(gpus or "")
    formula = "Wall = bandwidth ÷ weights × tokens per step × streams"
    inputs = f"{rate:g} GB/s a card ({card}; data sheet), and the weights that one card holds, from the engine's log"
    limits = (
        "It is one for dense weights without KV cache traffic; a share far below it is no proof that more is possible."
    )
    sentences = (f"{formula}, with {inputs}.", limits)
    at = words.level_column(cell.verdict.level for variant in variants for cell in variant.cells)
    columns = ("variant", at, "weights a card", "steps/s at most", "tokens a step", "wall", "boots", "share")
    table = Table("tok/s against the wall", columns, tuple(rows), numeric=frozenset(range(1, len(columns))))
    return Section("wall", "The bandwidth wall", (*sentences, _nearest(variants, found)), (table,), figure="wall")


@dataclass(frozen=True, slots=True)
class Wall:
    """The wall of one cell in tok/s, and the tokens that one step gave a stream in it."""

    tokens_per_s: float
    tokens_per_step: float


Walls = Mapping[tuple[str, CacheState, Level], Wall]


def walls(variants: Sequence[VariantView], boots: Sequence[BootView], started: Sequence[CampaignStarted]) -> Walls:
    """Variant, cache state and level → its wall; empty where bandwidth or weights are not known."""
    rate = bandwidth(started[-1].fingerprint.get("gpus")) if started else None
    weights = _weights_gib(boots)
    if rate is None:
        return {}
    tokens: dict[tuple[str, CacheState, Level], list[float]] = {}
    for trial in trials.good(boots):
        if (given := trials.tokens_per_step(trial)) is not None:
            tokens.setdefault((trial.variant, trial.cache, trial.level), []).append(given)
    found = {}
    for variant in variants:
        name = variant.verdict.name
        for cell in variant.cells:
            key = name, cell.verdict.cache, cell.verdict.level
            if name in weights and key in tokens:
                middle = median(tokens[key])
                found[key] = Wall(steps_per_s(rate, weights[name]) * middle * key[2].concurrency, middle)
    return found


def steps_per_s(rate: float, weights_gib: float) -> float:
    """How often a second the weights of a card can be read: GB/s ÷ GiB."""
    return rate * 1e9 / (weights_gib * 2**30)


def _nearest(variants: Sequence[VariantView], found: Walls) -> str:
    shares = [
        (point.value / wall.tokens_per_s, variant.verdict.name, str(cell.verdict.level))
        for variant in variants
        for cell in variant.cells
        if (wall := found.get((variant.verdict.name, cell.verdict.cache, cell.verdict.level))) is not None
        for point in cell.points
        if point.value is not None
    ]
    share, name, level = max(shares)
    return f"Nearest to it comes {words.clean(name)} at {level}: {words.percent(share)}."


def _weights_gib(boots: Sequence[BootView]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for boot in boots:
        line = boot.answer.timeline if boot.answer is not None else None
        if line is not None and line.weights_gib:
            found.setdefault(boot.variant, []).append(line.weights_gib)
    return {variant: median(values) for variant, values in found.items()}


def _rows(variant: VariantView, found: Walls, rate: float, weights: Mapping[str, float]) -> list[tuple[str, ...]]:
    name = variant.verdict.name
    rows: list[tuple[str, ...]] = []
    for cell in variant.cells:
        wall = found.get((name, cell.verdict.cache, cell.verdict.level))
        values = [point.value for point in cell.points if point.value is not None]
        if not values or wall is None:
            continue
        low, high = min(values) / wall.tokens_per_s, max(values) / wall.tokens_per_s
        share = f"{high:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
        rows.append(
            (
                words.clean(name),
                str(cell.verdict.level),
                f"{weights[name]:.2f} GiB",
                f"{steps_per_s(rate, weights[name]):.1f}",
                f"{wall.tokens_per_step:.2f}",
                words.number(wall.tokens_per_s),
                str(len(values)),
                share.replace("%", " %"),
            )
        )
    return rows
