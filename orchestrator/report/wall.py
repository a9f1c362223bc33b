"""The bandwidth wall: how far a cell is from the rate at which the weights could be read at all.

A decode step reads every weight once, whatever the number of streams, so one GPU makes at most bandwidth ÷ bytes of
weights steps per second; each step gives every stream A tokens, and the streams share what was read. The model is for
dense weights: a mixture of experts reads only a part of them (`weights_gib` of the box says how much), and KV cache
traffic is left out, so the wall is an upper bound for dense models alone.

Sources: NVIDIA's data sheets and product briefs of each card ("Memory bandwidth"), checked against bus width × data
rate: 384 bit × 19.5 Gbit/s = 936 GB/s (RTX 3090), 5120 bit × 3.186 = 2039 (A100 80 GB SXM, H100 PCIe), 5120 bit × 5.23
= 3350 (H100 SXM). The names are those of nvidia-smi.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.records import CacheState, CampaignStarted, Level
from orchestrator.report import trials, words
from orchestrator.report.model import BootView, Section, Table, Trials, VariantView

# GB/s of one card; the name as nvidia-smi tells it, without "NVIDIA".
BANDWIDTH_GB_S: Mapping[str, float] = {
    r"GeForce RTX 3090": 936,
    r"GeForce RTX 3090 Ti": 1008,
    r"GeForce RTX 4090": 1008,
    r"GeForce RTX 5090": 1792,
    r"RTX A[56]000": 768,
    r"RTX 6000 Ada Generation": 960,
    r"RTX PRO 6000 Blackwell.*": 1792,
    r"Tesla V100-SXM2-(?:16|32)GB": 900,
    r"Tesla T4": 320,
    r"L4": 300,
    r"L40S?|L20": 864,
    r"A10G?": 600,
    r"A30": 933,
    r"A40": 696,
    r"A100-(?:SXM4|PCIE)-40GB": 1555,
    r"A100 80GB PCIe": 1935,
    r"A100-SXM4-80GB": 2039,
    r"H100 PCIe": 2039,
    r"H100 80GB HBM3": 3350,
    r"H100 NVL": 3938,
    r"H200(?: NVL)?": 4800,
    r"B200": 8000,
}


def bandwidth(gpus: str | None) -> float | None:
    """GB/s of one card of `2 × NVIDIA GeForce RTX 3090`; None for an unknown card or for several kinds."""
    name = re.sub(r"^\d+ × ", "", gpus or "").removeprefix("NVIDIA ").strip()
    return next((rate for pattern, rate in BANDWIDTH_GB_S.items() if re.fullmatch(pattern, name)), None)


def section(
    variants: Sequence[VariantView], boots: Sequence[BootView], good: Trials, started: Sequence[CampaignStarted]
) -> Section | None:
    """Each cell's share of the wall, with the inputs; says what is missing where it cannot be computed."""
    if not started:
        return None
    last = started[-1]
    gpus = last.fingerprint.get("gpus")
    rate = _rate(last)
    weights = _weights(boots, last)
    missing = _missing(gpus, rate, weights)
    if missing is not None or rate is None:
        return Section("wall", "The bandwidth wall", (f"Not computed: {missing}.",))
    found = walls(variants, boots, good, started)
    rows = [row for variant in variants for row in _rows(variant, found, rate, weights)]
    if not rows:
        return None
    card = "matrix.yaml" if last.memory_bandwidth_gb_s is not None else f"{words.clean(gpus or '')}; data sheet"
    sources = words.listing(dict.fromkeys(one.source for one in weights.values()))
    formula = "Wall = bandwidth ÷ weights × tokens per step × streams"
    inputs = f"{rate:g} GB/s a card ({card}), and the weights that one card reads in a step, from {sources}"
    sentences = (
        f"{formula}, with {inputs}.",
        "It is one for dense weights without KV cache traffic; a share far below it is no proof that more is possible.",
    )
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


def walls(
    variants: Sequence[VariantView], boots: Sequence[BootView], good: Trials, started: Sequence[CampaignStarted]
) -> Walls:
    """Variant, cache state and level → its wall; empty where bandwidth or weights are not known."""
    rate = _rate(started[-1]) if started else None
    if rate is None:
        return {}
    weights = _weights(boots, started[-1])
    found = {}
    for variant in variants:
        name = variant.verdict.name
        for cell in variant.cells:
            key = name, cell.verdict.cache, cell.verdict.level
            if name not in weights:
                continue
            tokens = [given for trial in good.get(key, ()) if (given := trials.tokens_per_step(trial)) is not None]
            if tokens:
                middle = median(tokens)
                found[key] = Wall(steps_per_s(rate, weights[name].gib) * middle * key[2].concurrency, middle)
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


def _rate(started: CampaignStarted) -> float | None:
    """GB/s of one card: what matrix.yaml says, else the table."""
    return started.memory_bandwidth_gb_s or bandwidth(started.fingerprint.get("gpus"))


@dataclass(frozen=True, slots=True)
class _Weights:
    """GiB of weights that one card reads in a step, and where that was learned."""

    gib: float
    source: str


def _missing(gpus: str | None, rate: float | None, weights: Mapping[str, _Weights]) -> str | None:
    """What the wall lacks, in words, with the key of matrix.yaml that would give it."""
    if rate is None and gpus is None:
        return "the box names no GPU"
    if rate is None:
        return f"no bandwidth is known for {words.clean(gpus or '')} (memory_bandwidth_gb_s of the box says it)"
    if not weights:
        return (
            "neither the engine's log nor a checkpoint tells the size of the weights (weights_gib of the box says it)"
        )
    return None


def _weights(boots: Sequence[BootView], started: CampaignStarted) -> dict[str, _Weights]:
    """By variant: what matrix.yaml says, else the engine's own line (median over boots), else the checkpoint."""
    found = {name: _Weights(gib, "the checkpoint's size") for name, gib in started.checkpoint_gib.items()}
    logged: dict[str, list[float]] = {}
    for boot in boots:
        line = boot.answer.timeline if boot.answer is not None else None
        if line is not None and line.weights_gib:
            logged.setdefault(boot.variant, []).append(line.weights_gib)
    found |= {name: _Weights(median(values), "the engine's log") for name, values in logged.items()}
    if started.weights_gib is not None:
        return {name: _Weights(started.weights_gib, "matrix.yaml") for name in {*found, *started.variants}}
    return found


def _rows(variant: VariantView, found: Walls, rate: float, weights: Mapping[str, _Weights]) -> list[tuple[str, ...]]:
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
                f"{weights[name].gib:.2f} GiB",
                f"{steps_per_s(rate, weights[name].gib):.1f}",
                f"{wall.tokens_per_step:.2f}",
                words.number(wall.tokens_per_s),
                str(len(values)),
                share.replace("%", " %"),
            )
        )
    return rows
