"""What the GPUs did in the windows: how busy, how hot, and whether something held their clocks down. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import mean

from orchestrator.records import CacheState, GpuUse, Level
from orchestrator.report import words
from orchestrator.report.model import Section, Table, Trials

# Nothing holds a clock down on a GPU that has nothing to do.
_IDLE = "gpu_idle"
_COLUMNS = (
    "GPU",
    "boots",
    "busy",
    "memory MiB",
    "SM MHz",
    "lowest",
    "memory MHz",
    "W",
    "limit W",
    "°C",
    "clock held down by",
)


def section(good: Trials) -> Section | None:
    """One row for each cell and GPU; None where no trial told of a GPU."""
    cells: dict[tuple[str, CacheState, Level, int], list[GpuUse]] = defaultdict(list)
    for (variant, cache, level), found in good.items():
        for trial in found:
            for gpu in trial.gpu or ():
                cells[variant, cache, level, gpu.index].append(gpu)
    if not cells:
        return None
    several = len({cache for _, cache, *_ in cells}) > 1
    rows = tuple(
        (words.clean(variant) + (f" ({cache})" if several else ""), str(level), str(index), *_row(uses))
        for (variant, cache, level, index), uses in sorted(cells.items())
    )
    columns = ("variant", words.level_column(level for _, _, level, _ in cells), *_COLUMNS)
    table = Table("GPUs in the windows", columns, rows, numeric=frozenset(range(1, len(columns) - 1)), folded=True)
    sentences = (
        "Sampled twice a second: means over the boots, and the most memory, the lowest clock, the highest temperature.",
        _held([gpu for uses in cells.values() for gpu in uses]),
    )
    return Section("gpus", "What the GPUs did", sentences, (table,))


def _row(uses: Sequence[GpuUse]) -> tuple[str, ...]:
    def of(best: Callable[[Iterable[float]], float], read: Callable[[GpuUse], float | None]) -> float | None:
        told = [value for gpu in uses if (value := read(gpu)) is not None]
        return best(told) if told else None

    busy = of(mean, lambda gpu: gpu.utilisation_mean_percent)
    return (
        str(len(uses)),
        words.ABSENT if busy is None else words.percent(busy / 100),
        words.number(of(max, lambda gpu: gpu.memory_used_max_mib), 0),
        words.number(of(mean, lambda gpu: gpu.sm_clock_mean_mhz), 0),
        words.number(of(min, lambda gpu: gpu.sm_clock_min_mhz), 0),
        words.number(of(min, lambda gpu: gpu.memory_clock_mhz), 0),
        words.number(of(mean, lambda gpu: gpu.power_mean_w), 0),
        words.number(of(max, lambda gpu: gpu.power_limit_w), 0),
        words.number(of(max, lambda gpu: gpu.temperature_max_c), 0),
        _reasons(uses),
    )


def _reasons(uses: Sequence[GpuUse]) -> str:
    """Each reason with its highest share of a window's samples."""
    if all(gpu.throttle is None for gpu in uses):
        return words.ABSENT
    most: dict[str, float] = {}
    for gpu in uses:
        for name, share in (gpu.throttle or {}).items():
            if name != _IDLE:
                most[name] = max(share, most.get(name, 0.0))
    return ", ".join(f"{words.clean(name)} {words.percent(share)}" for name, share in sorted(most.items())) or "nothing"


def _held(uses: Sequence[GpuUse]) -> str:
    told = [gpu for gpu in uses if gpu.throttle is not None]
    if not told:
        return "These GPUs do not say what holds their clocks down."
    held = [gpu for gpu in told if set(gpu.throttle or ()) - {_IDLE}]
    if not held:
        return f"Nothing held a clock down in any of {words.plural(len(told), 'window')}."
    return (
        f"Something held a clock down in {len(held)} of {words.plural(len(told), 'window')}: the share is that of the "
        "samples in the worst one. At a power limit a rate follows the limit and the cooling; windows slowed down by "
        "heat or by the hardware are measured again and are in no number."
    )
