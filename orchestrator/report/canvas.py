"""How charts get onto paper and into pages: colours, PNG bytes, SVG text. Knows nothing of what is drawn.

matplotlib is used without pyplot and without a display. In SVG the colours are CSS variables, so that the page picks
them for light and dark; the palette is Okabe and Ito's, told apart by colour-blind people.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from orchestrator.report import words

DPI = 144


@dataclass(frozen=True, slots=True)
class Ink:
    """Colours of one rendering. `series` are the variants', cycled."""

    text: str
    muted: str
    grid: str
    paper: str
    warn: str
    series: tuple[str, ...]


LIGHT = Ink(
    text="#1b1f24",
    muted="#59636e",
    grid="#d8dee4",
    paper="#ffffff",
    warn="#b3261e",
    series=("#0072b2", "#d55e00", "#009e73", "#a6498a", "#8a6100", "#3a8fc4", "#444c56"),
)
DARK = Ink(
    text="#e6edf3",
    muted="#9aa4af",
    grid="#30363d",
    paper="#12161b",
    warn="#ff8f85",
    series=("#56b4e9", "#ff8a4c", "#2cc79a", "#e59bc5", "#f0b93a", "#a3d5f7", "#c5ccd3"),
)
# Colours that no palette has: `svgs` finds them in the finished SVG and puts the page's variables in their place.
_PLACEHOLDERS = Ink(
    text="#0a0b01",
    muted="#0a0b02",
    grid="#0a0b03",
    paper="#0a0b04",
    warn="#0a0b05",
    series=tuple(f"#0a0c{place:02x}" for place in range(len(LIGHT.series))),
)
VARIABLES: Mapping[str, str] = {
    _PLACEHOLDERS.text: "--ink",
    _PLACEHOLDERS.muted: "--muted",
    _PLACEHOLDERS.grid: "--grid",
    _PLACEHOLDERS.paper: "--paper",
    _PLACEHOLDERS.warn: "--warn",
    **{colour: f"--s{place}" for place, colour in enumerate(_PLACEHOLDERS.series)},
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes: its title, its size in inches, and what draws it."""

    title: str
    width: float
    height: float
    draw: Callable[[Axes, Ink], None]


# --- output ---------------------------------------------------------------------------------------------------------


def _style(ink: Ink) -> dict[Any, Any]:
    return {
        "font.size": 8.5,
        "font.family": "sans-serif",
        "svg.fonttype": "none",
        "svg.hashsalt": "coldboot",
        "text.color": ink.text,
        "axes.labelcolor": ink.muted,
        "axes.edgecolor": ink.grid,
        "axes.titlecolor": ink.text,
        "axes.titlesize": 9,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "xtick.color": ink.muted,
        "ytick.color": ink.muted,
        "grid.color": ink.grid,
        "grid.linewidth": 0.6,
        "hatch.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 8,
    }


def lay_out(panels: Sequence[Panel], columns: int, *, ink: Ink, title: str | None, rehearsal: bool) -> Figure:
    """Panels in a grid, with a title or without; stamped across when it is a rehearsal."""
    rows = math.ceil(len(panels) / columns)
    width = columns * max(panel.width for panel in panels)
    figure = Figure(
        figsize=(width, rows * max(panel.height for panel in panels) + (0.45 if title else 0)), layout="constrained"
    )
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, one in zip(panels, axes, strict=False):
        panel.draw(one, ink)
        if rehearsal:
            _stamp(one, panel, ink)
        if panel.title:
            one.set_title(panel.title)
    for one in axes[len(panels) :]:
        one.set_axis_off()
    if title is not None:
        stamp = f"   {words.REHEARSAL}" if rehearsal else ""
        figure.suptitle(
            f"{title}{stamp}",
            x=0.01,
            ha="left",
            fontweight="bold",
            fontsize=11,
            color=ink.warn if rehearsal else ink.text,
        )
    return figure


def _stamp(ax: Axes, panel: Panel, ink: Ink) -> None:
    """Across the axes, and behind all that is drawn in them: no label is covered."""
    ax.text(
        0.5,
        0.5,
        words.REHEARSAL,
        transform=ax.transAxes,
        ha="center",
        va="center",
        rotation=10,
        fontsize=min(52.0, panel.width * 9.3, panel.height * 15),
        fontweight="bold",
        color=ink.warn,
        alpha=0.11,
        zorder=-1,
        in_layout=False,
    )


def png(panels: Sequence[Panel], title: str, *, rehearsal: bool) -> bytes:
    """All panels of one figure on white paper, two in a row."""
    with mpl.rc_context(_style(LIGHT)):
        columns = 1 if len(panels) == 1 else 2
        figure = lay_out(panels, columns, ink=LIGHT, title=words.clean(title, 90), rehearsal=rehearsal)
        buffer = io.BytesIO()
        # The stamp also stands in the file itself, for those who crop.
        note = {"Software": "coldboot", "Comment": words.REHEARSAL if rehearsal else "measured"}
        figure.savefig(buffer, format="png", dpi=DPI, facecolor=LIGHT.paper, metadata=note)
    return buffer.getvalue()


def svgs(panels: Sequence[Panel], key: str, *, rehearsal: bool) -> tuple[str, ...]:
    """One SVG element a panel, ready to stand in a page: no prologue, ids of its own, colours as CSS variables."""
    found = []
    with mpl.rc_context(_style(_PLACEHOLDERS)):
        for place, panel in enumerate(panels):
            figure = lay_out([panel], 1, ink=_PLACEHOLDERS, title=None, rehearsal=rehearsal)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            label = f"{panel.title or key}{f' ({words.REHEARSAL})' if rehearsal else ''}"
            found.append(_inline(buffer.getvalue(), f"{key}{place}", label))
    return tuple(found)


def _inline(svg: str, key: str, label: str) -> str:
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(?::xlink)?="[^"]*"', "", svg).replace("xlink:href=", "href=")
    svg = re.sub(r'\b(id|href)="(#?)', rf'\1="\2{key}-', svg)
    svg = svg.replace("url(#", f"url(#{key}-")
    # The page's own face; sizes stay.
    svg = re.sub(r"font: (?:(\d{3}|bold) )?([\d.]+)px [^;\"]*", _font, svg)
    svg = re.sub(
        r'^<svg[^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{_attribute(label)}">', svg
    )
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return re.sub(r"\n\s*", "\n", svg)


def _font(match: re.Match[str]) -> str:
    weight = f"; font-weight: {match.group(1)}" if match.group(1) else ""
    return f"font-size: {match.group(2)}px{weight}"


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
