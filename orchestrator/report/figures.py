"""The charts of a report: which there are, and what each draws. `canvas` puts them on paper and into pages.

A figure is one or more panels: a PNG holds all of them, a page gets one SVG a panel, so that a phone can stack them.
Variants differ by marker as well as by colour.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from orchestrator.records import CacheState, Level, Quantiles, TrialEnded
from orchestrator.report import boots as boot_room
from orchestrator.report import canvas, memory, trials, words
from orchestrator.report.canvas import Ink, Panel
from orchestrator.report.model import MOST_POINTS, BootView, CellView, FigureName, Point, VariantView, View

NAME_LIMIT = 22
MOST_BARS = 60
T = TypeVar("T")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "h")
_HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----")


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure, ready to be drawn as often as wanted."""

    name: FigureName
    title: str
    panels: tuple[Panel, ...]
    rehearsal: bool

    def png(self) -> bytes:
        """As a PNG file."""
        return canvas.png(self.panels, self.title, rehearsal=self.rehearsal)

    def svgs(self) -> tuple[str, ...]:
        """As SVG elements, one a panel."""
        return canvas.svgs(self.panels, self.name, rehearsal=self.rehearsal)


def chart(view: View, name: FigureName) -> Chart:
    """One figure; without panels where the view has no data for it."""
    section = next((one for one in view.sections if one.figure == name), None)
    title = f"{view.verdicts.experiment}: {section.title.lower() if section is not None else name}"
    return Chart(name, title, tuple(FIGURES[name](view)), view.rehearsal)


def charts(view: View) -> tuple[Chart, ...]:
    """The figures that this view has data for, in the order of its sections."""
    wanted = [section.figure for section in view.sections if section.figure is not None]
    return tuple(one for one in (chart(view, name) for name in wanted) if one.panels)


# --- how a variant looks --------------------------------------------------------------------------------------------


def colour(variant: VariantView, ink: Ink) -> str:
    """A variant's colour: by its place in the file, so that it never changes with the ranking."""
    return ink.series[variant.index % len(ink.series)]


def marker(variant: VariantView) -> str:
    """A variant's marker shape; colours repeat after seven variants, markers after nine, pairs after 63."""
    return _MARKERS[variant.index % len(_MARKERS)]


def dashes(variant: VariantView) -> Any:
    """A rejected variant's line is broken; matplotlib's name or pattern for it."""
    return (0, (4, 2)) if variant.verdict.verdict == "REJECTED" else "solid"


def name_shown(text: str) -> str:
    """A foreign name as a label: harmless, not too long, and without mathematics."""
    # A dollar sign would start matplotlib's own mathematics.
    return words.clean(text, NAME_LIMIT).replace("$", r"\$")


def _cells(view: View, cache: CacheState, length: int | None) -> list[tuple[VariantView, list[CellView]]]:
    """Each variant's cells in one cache state with prompts of one length."""
    where = (cache, length)
    return [
        (one, [cell for cell in one.cells if (cell.verdict.cache, cell.verdict.level.input_tokens) == where])
        for one in view.variants
    ]


def _titled(view: View, title: str, cache: CacheState, length: int | None) -> str:
    """A panel's title; cache state and prompt length are named where there are several."""
    prompts = "" if length is None else f"prompts of {length} tokens"
    return ", ".join(part for part in (title, prompts, cache if len(view.caches) > 1 else "") if part)


# --- boots as points ------------------------------------------------------------------------------------------------


def _boots(view: View) -> list[Panel]:
    panels = []
    for cache in view.caches:
        for level in view.levels:
            rows = [
                (variant, cell)
                for variant, cells in _cells(view, cache, level.input_tokens)
                for cell in cells
                if cell.verdict.level == level
            ]
            if not rows:
                continue
            title = _titled(view, words.plural(level.concurrency, "stream"), cache, level.input_tokens)

            def draw(ax: Axes, ink: Ink, rows: list[tuple[VariantView, CellView]] = rows) -> None:
                _draw_boots(ax, ink, rows)

            panels.append(Panel(title, 4.3, 0.9 + 0.36 * len(rows), draw))
    return panels


def _draw_boots(ax: Axes, ink: Ink, rows: Sequence[tuple[VariantView, CellView]]) -> None:
    values = [point.value for _, cell in rows for point in cell.points if point.value is not None]
    most = max(values, default=1.0)
    if not values:
        ax.set_xticks([])
    ax.set_xlim(0, most * 1.16)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(range(len(rows)), [name_shown(variant.verdict.name) for variant, _ in rows], color=ink.text)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")
    ax.set_xlabel("tok/s (each mark is one boot)")
    for row, (variant, cell) in enumerate(rows):
        _draw_cell(ax, ink, row, variant, cell)


def _draw_cell(ax: Axes, ink: Ink, row: int, variant: VariantView, cell: CellView) -> None:
    most = ax.get_xlim()[1]
    paint, shape = colour(variant, ink), marker(variant)
    refuted = cell.verdict.reproducibility == "DOES_NOT_REPRODUCE"
    spots = [point for point in cell.points if point.value is not None]
    # Boots stand a little apart, the first on top, so that equal ones can be counted.
    apart = 0.34 / max(1, len(cell.points) - 1)
    offset = {point.boot: (place - (len(cell.points) - 1) / 2) * apart for place, point in enumerate(cell.points)}
    if cell.verdict.interval is not None:
        low, high = cell.verdict.interval
        ax.plot([low, high], [row, row], color=paint, linewidth=5, alpha=0.28, solid_capstyle="butt", zorder=2)
    if refuted and len(spots) > 1:
        seen = [point.value for point in spots if point.value is not None]
        ax.plot([min(seen), max(seen)], [row, row], color=paint, linewidth=0.9, linestyle=(0, (2, 2)), zorder=2)
        ax.annotate(
            f"× {max(seen) / min(seen):.1f} apart",
            (max(seen), row),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color=ink.warn,
        )
    marked = _thinned(spots, _value)
    ax.plot(
        [_value(point) for point in marked],
        [row + offset[point.boot] for point in marked],
        marker=shape,
        markersize=5.5,
        markerfacecolor="none" if refuted else paint,
        markeredgecolor=paint,
        markeredgewidth=1.3,
        linestyle="none",
        zorder=3,
    )
    lost = [point for point in cell.points if point.status in ("died", "failed")]
    if lost:
        word = "died" if all(point.status == "died" for point in lost) else "failed"
        # Where boots have values the note goes to the right end, so that it covers none of them.
        place, align = (most * 0.01, "left") if not spots else (most, "right")
        ax.text(
            place,
            row,
            f"✕ {len(lost)} of {len(cell.points)} {word}",
            va="center",
            ha=align,
            fontsize=7.5,
            color=ink.warn,
        )
    elif not spots:
        ax.text(most * 0.01, row, "no value", va="center", fontsize=7.5, color=ink.muted)


def _value(point: Point) -> float:
    return point.value or 0.0


# --- against concurrency --------------------------------------------------------------------------------------------


def _levels(ax: Axes, levels: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(levels), [str(level) for level in levels])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("concurrent streams")
    ax.grid(axis="both")


def _legend(ax: Axes, ink: Ink, handles: Sequence[Line2D | Patch], columns: int = 3) -> None:
    if handles:
        ax.legend(
            handles=list(handles),
            loc="upper center",
            bbox_to_anchor=(0.5, -0.17),
            ncols=columns,
            labelcolor=ink.text,
            handlelength=1.6,
            columnspacing=1.2,
        )


def _throughput(view: View) -> list[Panel]:
    panels = []
    for cache, length in itertools.product(view.caches, view.lengths):
        every = _cells(view, cache, length)
        cells = [(variant, mine) for variant, mine in every if any(_valued(cell) for cell in mine)]
        if not cells:
            continue

        def draw(ax: Axes, ink: Ink, cells: list[tuple[VariantView, list[CellView]]] = cells) -> None:
            _draw_throughput(ax, ink, cells, view.concurrency)

        panels.append(Panel(_titled(view, "", cache, length), 4.5, 3.5, draw))
    return panels


def _valued(cell: CellView) -> bool:
    return any(point.value is not None for point in cell.points)


def _draw_throughput(
    ax: Axes, ink: Ink, cells: Sequence[tuple[VariantView, list[CellView]]], levels: Sequence[int]
) -> None:
    handles = []
    for variant, mine in cells:
        paint, shape = colour(variant, ink), marker(variant)
        rejected = variant.verdict.verdict == "REJECTED"
        line = dashes(variant)
        by_level = {cell.verdict.concurrency: cell for cell in mine}
        # A level without an estimate breaks the line: nothing is drawn through it.
        y = [by_level[level].verdict.estimate if level in by_level else None for level in levels]
        ax.plot(
            list(levels),
            [math.nan if value is None else value for value in y],
            color=paint,
            marker=shape,
            markersize=5.5,
            linestyle=line,
            linewidth=1.6,
            zorder=3,
        )
        for cell in mine:
            if cell.verdict.interval is not None:
                low, high = cell.verdict.interval
                level = cell.verdict.concurrency
                ax.plot(
                    [level, level], [low, high], color=paint, linewidth=4, alpha=0.25, solid_capstyle="butt", zorder=2
                )
            if cell.verdict.reproducibility == "DOES_NOT_REPRODUCE":
                spots = _thinned([point.value for point in cell.points if point.value is not None], float)
                ax.plot(
                    [cell.verdict.concurrency] * len(spots),
                    spots,
                    marker=shape,
                    markersize=5.5,
                    markerfacecolor="none",
                    markeredgecolor=paint,
                    markeredgewidth=1.3,
                    linestyle="none",
                    zorder=4,
                )
        name = name_shown(variant.verdict.name) + (" (rejected)" if rejected else "")
        # As it is drawn: a line between estimates that stand beside each other, open marks where there is none at all.
        joined = any(None not in pair for pair in itertools.pairwise(y))
        style: dict[str, Any] = {"linestyle": line if joined else "none"}
        if all(value is None for value in y):
            style["markerfacecolor"] = "none"
        handles.append(Line2D([], [], color=paint, marker=shape, markersize=5.5, label=name, **style))
    values = [point.value for _, mine in cells for cell in mine for point in cell.points if point.value is not None]
    highs = [cell.verdict.interval[1] for _, mine in cells for cell in mine if cell.verdict.interval is not None]
    # An interval of two boots may reach to the sky: it may take a third of the height, and no more.
    most = max(values, default=1.0)
    ax.set_ylim(0, min(max([most, *highs]) * 1.05, most * 1.5))
    _levels(ax, levels)
    ax.set_ylabel("tok/s, all streams together")
    _legend(ax, ink, handles)


def _log_where_wide(ax: Axes, values: Sequence[float]) -> str:
    """From 0, or logarithmic where the largest value would press all others onto the axis; what the label adds."""
    if min(values) > 0 and max(values) > 8 * min(values):
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        return ", log scale"
    ax.set_ylim(0, max(values) * 1.1 or 1)
    return ""


@dataclass(frozen=True, slots=True)
class Curve:
    """One variant against concurrency: streams → one value a boot, and the streams at which its boots disagree."""

    variant: VariantView
    boots: Mapping[int, tuple[float, ...]]
    refuted: frozenset[int]


def _latency(view: View) -> list[Panel]:
    def panel(
        title: str, cache: CacheState, length: int | None, read: Callable[[TrialEnded], Quantiles]
    ) -> Panel | None:
        curves = []
        for variant, cells in _cells(view, cache, length):
            name = variant.verdict.name
            boots = {
                streams: values
                for streams in view.concurrency
                if (values := _medians_of(view.good.get((name, cache, Level(streams, length)), ()), read))
            }
            refuted = (
                cell.verdict.concurrency for cell in cells if cell.verdict.reproducibility == "DOES_NOT_REPRODUCE"
            )
            if boots:
                curves.append(Curve(variant, boots, frozenset(refuted)))

        def draw(ax: Axes, ink: Ink) -> None:
            _legend(ax, ink, [_draw_curve(ax, ink, curve, view.concurrency) for curve in curves])
            scale = _log_where_wide(
                ax, [value for curve in curves for values in curve.boots.values() for value in values]
            )
            _levels(ax, view.concurrency)
            ax.set_ylabel(f"ms, median request{scale}")

        return Panel(_titled(view, title, cache, length), 4.3, 3.2, draw) if curves else None

    panels = (
        panel(title, cache, length, read)
        for cache, length in itertools.product(view.caches, view.lengths)
        for title, read in (
            ("time to first token", lambda trial: trial.ttft_ms),
            ("time between chunks", lambda trial: trial.itl_ms),
        )
    )
    return [one for one in panels if one is not None]


def _wall(view: View) -> list[Panel]:
    """Each boot's share of its cell's wall."""
    panels = []
    for cache in view.caches:
        for length in view.lengths:
            curves = []
            for variant, mine in _cells(view, cache, length):
                shares = {
                    cell.verdict.concurrency: tuple(
                        100 * point.value / wall for point in cell.points if point.value is not None
                    )
                    for cell in mine
                    if (wall := view.walls.get((variant.verdict.name, cache, cell.verdict.level))) and _valued(cell)
                }
                refuted = (
                    cell.verdict.concurrency for cell in mine if cell.verdict.reproducibility == "DOES_NOT_REPRODUCE"
                )
                if shares:
                    curves.append(Curve(variant, shares, frozenset(refuted)))

            def draw(ax: Axes, ink: Ink, curves: Sequence[Curve] = tuple(curves)) -> None:
                _legend(ax, ink, [_draw_curve(ax, ink, curve, view.concurrency) for curve in curves])
                ax.axhline(100, color=ink.text, linewidth=1.2)
                ax.set_ylim(
                    0, max(105.0, *(value * 1.05 for one in curves for many in one.boots.values() for value in many))
                )
                ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
                _levels(ax, view.concurrency)
                ax.set_ylabel("of the wall")

            if curves:
                panels.append(Panel(_titled(view, "", cache, length), 4.5, 3.0, draw))
    return panels


def _medians_of(found: Sequence[TrialEnded], read: Callable[[TrialEnded], Quantiles]) -> tuple[float, ...]:
    return tuple(value for trial in found if (value := read(trial).p50) is not None)


def _thinned(values: Sequence[T], rank: Callable[[T], float]) -> Sequence[T]:
    """At most `MOST_POINTS` of them, evenly by rank, the ends among them."""
    if len(values) <= MOST_POINTS:
        return values
    ranked, last = sorted(values, key=rank), len(values) - 1
    return [ranked[round(place * last / (MOST_POINTS - 1))] for place in range(MOST_POINTS)]


def _draw_curve(ax: Axes, ink: Ink, curve: Curve, levels: Sequence[int]) -> Line2D:
    """A line through the medians of the boots that agree; where they do not, each boot alone. Returns its legend."""
    paint, shape, line = colour(curve.variant, ink), marker(curve.variant), dashes(curve.variant)
    middles = [
        median(curve.boots[level]) if level in curve.boots and level not in curve.refuted else math.nan
        for level in levels
    ]
    ax.plot(list(levels), middles, color=paint, linewidth=1.4, linestyle=line, zorder=2)
    for agreed in (True, False):
        spots = [
            (level, value)
            for level, values in curve.boots.items()
            if (level not in curve.refuted) == agreed
            for value in _thinned(values, float)
        ]
        ax.plot(
            [level for level, _ in spots],
            [value for _, value in spots],
            marker=shape,
            markersize=5.0,
            markerfacecolor=paint if agreed else "none",
            markeredgecolor=paint,
            markeredgewidth=1.2,
            linestyle="none",
            zorder=3,
        )
    name = name_shown(curve.variant.verdict.name)
    whole = curve.refuted >= set(curve.boots)
    style: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "none"} if whole else {"linestyle": line}
    return Line2D([], [], label=name, color=paint, marker=shape, markersize=5.0, **style)


# --- where the time of a boot went ----------------------------------------------------------------------------------

GROUPS: Mapping[str, tuple[str, ...]] = {
    "clean, cold, render": ("clean_slate", "cold", "render"),
    "start to ready": ("start", "ready"),
    "first request": ("first_request",),
    "headroom, sanity": ("headroom", "sanity"),
    "trials": ("trials",),
    "stop": ("stop",),
}
PHASE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "imports, config": ("imports_s", "config_s"),
    "weights": ("weights_s",),
    "compile or load": ("compile_s",),
    "profiling, KV cache": ("profiling_s", "kv_cache_s"),
    "graph capture": ("graph_capture_s",),
    "warm-up": ("warmup_s",),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of several parts, seconds each, and what stands behind it; `bad` says that it tells of a failure."""

    label: str
    parts: tuple[float, ...]
    said: str = ""
    bad: bool = False


def _timeline(view: View) -> list[Panel]:
    shown = [boot for boot in view.boots if boot.steps]
    phased = [boot for boot in shown if boot.answer is not None and boot.answer.timeline is not None]
    panels = (
        _bars("steps", "seconds since the boot began", shown, GROUPS, _step_bar),
        _bars("start-up phases", "seconds, from the engine's own lines", phased, PHASE_GROUPS, _phase_bar),
    )
    return [panel for panel in panels if panel is not None]


def _step_bar(boot: BootView) -> Bar:
    spent = boot_room.step_seconds(boot)
    parts = tuple(sum(spent.get(name, 0.0) for name in names) for names in GROUPS.values())
    if boot.outcome == "completed":
        return Bar(boot.name, parts)
    step = boot.ended.step if boot.ended is not None else None
    return Bar(boot.name, parts, f"✕ {boot.outcome}{f' at {step}' if step else ''}", bad=True)


def _phase_bar(boot: BootView) -> Bar:
    timeline = boot.answer.timeline if boot.answer is not None else None
    parts = tuple(sum(getattr(timeline, name) or 0.0 for name in names) for names in PHASE_GROUPS.values())
    return Bar(boot.name, parts, timeline.compile_state if timeline is not None else "")


def _bars(
    title: str, axis: str, boots: Sequence[BootView], groups: Mapping[str, object], read: Callable[[BootView], Bar]
) -> Panel | None:
    if not boots:
        return None
    if len(boots) <= MOST_BARS:
        bars, what = [read(boot) for boot in boots], "of each boot"
    else:
        bars, what = _medians(boots, read), "of the median boot"

    def draw(ax: Axes, ink: Ink) -> None:
        for row, (bar, end) in enumerate(zip(bars, _stack(ax, ink, bars), strict=True)):
            paint = ink.warn if bar.bad else ink.muted
            if bar.said:
                ax.text(end, row, f" {bar.said}", va="center", fontsize=7, color=paint, zorder=3)
        _dress_bars(ax, ink, [bar.label for bar in bars], tuple(groups))
        ax.set_xlabel(axis)

    return Panel(f"{title} {what}", 4.6, 1.4 + 0.21 * len(bars), draw)


def _medians(boots: Sequence[BootView], read: Callable[[BootView], Bar]) -> list[Bar]:
    """One bar a variant, each part the median over its boots: more bars than anyone would read become few."""
    by_variant: dict[str, list[Bar]] = defaultdict(list)
    for boot in boots:
        if boot.counted:
            by_variant[boot.variant].append(read(boot))
    return [
        Bar(variant, tuple(median(values) for values in zip(*(bar.parts for bar in bars), strict=True)))
        for variant, bars in by_variant.items()
    ]


def _stack(ax: Axes, ink: Ink, bars: Sequence[Bar]) -> list[float]:
    """Bars of several parts, told apart by colour and hatching; returns where each ends."""
    left = [0.0] * len(bars)
    for place, widths in enumerate(zip(*(bar.parts for bar in bars), strict=True)):
        ax.barh(
            range(len(bars)),
            widths,
            left=left,
            height=0.7,
            color=ink.series[place],
            edgecolor=ink.paper,
            hatch=_HATCHES[place],
            linewidth=0.4,
            zorder=2,
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    return left


def _dress_bars(ax: Axes, ink: Ink, labels: Sequence[str], names: Sequence[str]) -> None:
    ax.set_yticks(range(len(labels)), [name_shown(label) for label in labels], color=ink.text, fontsize=7.5)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    # Room on the right for what stands behind the bars.
    ax.set_xlim(0, (ax.dataLim.x1 or 1.0) * 1.22)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")
    handles = [
        Patch(facecolor=ink.series[place], edgecolor=ink.paper, hatch=_HATCHES[place], label=name)
        for place, name in enumerate(names)
    ]
    # Points, not shares of the axes: the number of boots makes the axes higher, and the label stays where it is.
    drop = 30 / (72 * (0.4 + 0.21 * len(labels)))
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.45, -drop),
        ncols=3,
        labelcolor=ink.text,
        handlelength=1.8,
        columnspacing=1.0,
    )


def _memory(view: View) -> list[Panel]:
    found = {one.boot.name: one for one in memory.of(view.boots)}
    shown = [boot for boot in view.boots if boot.name in found]
    # Groups that no boot has would only fill the legend.
    present = [place for place in range(len(memory.GROUPS)) if any(one.parts[place] for one in found.values())]
    groups = {memory.GROUPS[place]: place for place in present}

    def bar(boot: BootView) -> Bar:
        one = found[boot.name]
        parts = tuple(one.parts[place] for place in present)
        left = f"{one.rest:.1f} left" if one.least_free is None else f"{one.least_free:.1f} free"
        if boot.outcome == "completed":
            return Bar(boot.name, parts, left)
        return Bar(boot.name, parts, f"{left} ✕ {boot.outcome}", bad=True)

    panel = _bars("one card", "GiB, of what was free before the boot", shown, groups, bar)
    return [panel] if panel is not None else []


# --- rulers and order -----------------------------------------------------------------------------------------------


def _rulers(view: View) -> list[Panel]:
    by_name = {variant.verdict.name: variant for variant in view.variants}
    shown = [one for one in view.rulers if one.variant in by_name]
    present = [ruler for ruler in trials.RULERS if any(getattr(one, ruler) is not None for one in shown)]
    if not present:
        return []

    def draw(ax: Axes, ink: Ink) -> None:
        names = list(dict.fromkeys(one.variant for one in shown))
        for place, ruler in enumerate(present):
            for one in shown:
                ratio = getattr(one, ruler)
                if ratio is None:
                    continue
                variant = by_name[one.variant]
                offset = (names.index(one.variant) - (len(names) - 1) / 2) * 0.7 / max(1, len(names))
                ax.plot(
                    [ratio],
                    [place + offset],
                    marker=marker(variant),
                    markersize=4.5,
                    color=colour(variant, ink),
                    linestyle="none",
                    zorder=3,
                )
        ax.axvline(1.0, color=ink.text, linewidth=1.0, zorder=2)
        ax.set_yticks(range(len(present)), present, color=ink.text)
        ax.set_ylim(len(present) - 0.45, -0.55)
        ax.set_xlim(left=0)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x")
        ax.set_xlabel(f"ruler ÷ counter (1 agrees; one mark a variant and {words.level_column(view.levels)})")
        handles = [
            Line2D(
                [],
                [],
                color=colour(by_name[name], ink),
                marker=marker(by_name[name]),
                linestyle="none",
                label=name_shown(name),
            )
            for name in names
        ]
        _legend(ax, ink, handles)

    return [Panel("", 4.5, 1.6 + 0.5 * len(present), draw)]


def _order(view: View) -> list[Panel]:
    found = boot_room.residuals(view.variants, view.boots)
    if not found:
        return []

    def draw(ax: Axes, ink: Ink) -> None:
        handles = []
        for variant in view.variants:
            line = found.get(variant.verdict.name)
            if not line:
                continue
            paint, shape = colour(variant, ink), marker(variant)
            marked = _thinned(line, lambda spot: spot[1])
            x, y = [place for place, _ in marked], [math.expm1(value) * 100 for _, value in marked]
            ax.plot(x, y, marker=shape, color=paint, markersize=5, linestyle="none", zorder=3)
            handles.append(
                Line2D([], [], color=paint, marker=shape, linestyle="none", label=name_shown(variant.verdict.name))
            )
        ax.axhline(0, color=ink.muted, linewidth=0.8)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g} %" if value else "0 %"))
        ax.grid(axis="both")
        ax.set_xlabel("position in the plan")
        ax.set_ylabel("difference from the cell's centre")
        _legend(ax, ink, handles)

    return [Panel("", 4.5, 3.0, draw)]


FIGURES: Mapping[FigureName, Callable[[View], list[Panel]]] = {
    "boots": _boots,
    "throughput": _throughput,
    "latency": _latency,
    "wall": _wall,
    "timeline": _timeline,
    "memory": _memory,
    "rulers": _rulers,
    "order": _order,
}
