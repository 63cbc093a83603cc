"""Charts of every page, as SVG drawn by matplotlib: bars, curves, lines over sizes, the roofline, histograms.

Text stays text and has no colour of its own, so that a page's style (a dark one, too) decides. A chart fetches nothing.
"""

from __future__ import annotations

import io
import math
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from relaxtune.pipeline.printable import printable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

#: Colours that stand apart on white and on black.
PALETTE = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b7791f", "#718096")
_LINE, _WITHIN, _BEYOND = "#a0aec0", "#2f855a", "#c53030"
_NAME_LENGTH = 46
_WIDTH = 9
# Settings of matplotlib are those of the process, and the dashboard draws in several threads.
_LOCK = threading.Lock()
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "relaxtune",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": _LINE,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _LINE,
    "grid.alpha": 0.3,
    # A dollar in a name is a dollar.
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Bar:
    """One bar: its name, length, colour, the text behind it, and the text that a pointer over it shows."""

    name: str
    value: float
    label: str
    colour: str = PALETTE[0]
    title: str = ""


@dataclass(frozen=True)
class Point:
    """One kernel of a roofline: FLOP per byte, FLOP/s, its share of the time, colour and title."""

    intensity: float
    rate: float
    share: float
    colour: str
    title: str


@dataclass(frozen=True)
class Line:
    """One line over sizes: the name of its arm, and points of a size and a value."""

    name: str
    points: Sequence[tuple[float, float]]
    note: str = ""


def bars(rows: Sequence[Bar], label: str) -> Markup:
    """Return horizontal bars from above; empty without any."""
    if not rows:
        return Markup()
    with _drawing(0.25 * len(rows) + 0.15, label) as drawing:
        axes = drawing.axes
        axes.set_axis_off()
        axes.set(xlim=(0, 1.15 * max(row.value for row in rows)), ylim=(len(rows) - 0.4, -0.6))
        for place, row in enumerate(rows):
            (bar,) = axes.barh(place, row.value, height=0.65, color=row.colour)
            drawing.entitle(bar, row.title or row.name)
            axes.annotate(row.label, (row.value, place), (4, 0), textcoords="offset points", va="center")
            name = row.name if len(row.name) <= _NAME_LENGTH else f"{row.name[: _NAME_LENGTH - 3]}..."
            axes.annotate(name, (0, place), (-6, 0), textcoords="offset points", va="center", ha="right")
    return drawing.svg


def curve(points: Sequence[tuple[float, float]], across: str, up: str) -> Markup:
    """Return values over time as steps; empty with fewer than two points."""
    if len(points) < 2:
        return Markup()
    with _drawing(2.6, f"{up} over {across}") as drawing:
        axes = drawing.axes
        axes.step(*zip(*points, strict=True), where="post", color=PALETTE[0], linewidth=2)
        axes.set(xlabel=across, ylabel=up)
        axes.grid(axis="y")
    return drawing.svg


def roofline(points: Sequence[Point], bytes_per_s: float, peaks: Mapping[str, float]) -> Markup:
    """Return kernels by arithmetic intensity and rate under a device's roofs (FLOP/s by dtype)."""
    with _drawing(4, "rate against arithmetic intensity, FLOP per byte") as drawing:
        axes = drawing.axes
        axes.set(xscale="log", yscale="log", xlabel="FLOP per byte")
        knees = [peak / bytes_per_s for peak in peaks.values()]
        left = 0.5 * min([point.intensity for point in points] + knees)
        right = 2 * max([point.intensity for point in points] + knees)
        top = max(knees, default=right)
        axes.plot([left, top], [left * bytes_per_s, top * bytes_per_s], color=_LINE)
        axes.annotate(f"{bytes_per_s / 1e9:,.0f} GB/s", (left, left * bytes_per_s), (6, 12), textcoords="offset points")
        for dtype, peak in peaks.items():
            axes.plot([peak / bytes_per_s, right], [peak, peak], color=_LINE)
            named = f"{dtype} {rate(peak)}"
            axes.annotate(named, (right, peak), (0, 3), textcoords="offset points", ha="right")
        for point in points:
            size = (4 + 18 * math.sqrt(point.share)) ** 2
            dot = axes.scatter([point.intensity], [point.rate], s=size, color=point.colour, alpha=0.6, linewidths=0)
            drawing.entitle(dot, point.title)
        axes.yaxis.set_major_formatter(lambda value, _: rate(value))
        axes.grid()
    return drawing.svg


def histograms(rows: Sequence[tuple[str, Sequence[int]]], edges: Sequence[float]) -> Markup:
    """Return counts of elements by error over tolerance, a row of bars for each output; the last count is beyond."""
    with _drawing(
        0.9 * len(rows) + 0.4, "errors over tolerance, elements on a logarithmic scale", len(rows)
    ) as drawing:
        every = drawing.every
        names = [*(f"{edge:g}" for edge in edges), "more"]
        colours = [_WITHIN if edge <= 1 else _BEYOND for edge in edges] + [_BEYOND]
        for axes, (name, counts) in zip(every, rows, strict=True):
            drawn = axes.bar(range(len(counts)), [math.log1p(count) for count in counts], color=colours)
            for place, (bar, count) in enumerate(zip(drawn, counts, strict=True)):
                drawing.entitle(bar, f"{count:,} elements, {_error_range(edges, place)}")
            axes.set(xticks=[], yticks=[])
            axes.spines["left"].set_visible(False)
            axes.set_title(name, loc="left", fontsize=9)
        every[-1].set_xticks(range(len(names)), names)
    return drawing.svg


def lines(panels: Mapping[str, Sequence[Line]], across: str, title: str) -> Markup:
    """Return one panel for each unit, a line for each arm, both axes logarithmic, on white: it goes into a file."""
    with _drawing(1 + 3.5 * len(panels), title, len(panels), "white") as drawing:
        every = drawing.every
        every[0].set_title(title, loc="left")
        for axes, (unit, drawn) in zip(every, panels.items(), strict=True):
            axes.set(xscale="log", yscale="log", ylabel=unit, xlabel=across)
            colours = dict(zip(dict.fromkeys(line.name for line in drawn), PALETTE * len(drawn), strict=False))
            for line in drawn:
                axes.plot(*zip(*line.points, strict=True), "o-", color=colours[line.name], markersize=4)
                if line.note:
                    axes.annotate(line.note, line.points[0], (6, -12), textcoords="offset points")
            sizes = sorted({size for line in drawn for size, _ in line.points})
            axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
            axes.minorticks_off()
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.grid()
            for name, colour in colours.items():
                axes.plot([], [], "o-", color=colour, label=name, markersize=4)
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return drawing.svg


def rate(value: float) -> str:
    """Return FLOP/s with a unit."""
    for unit, size in (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value:.3g} FLOP/s"


def _error_range(edges: Sequence[float], place: int) -> str:
    if place == len(edges):
        return f"off by more than {edges[-1]:g} of the tolerance, or not finite"
    return "equal" if place == 0 else f"off by {edges[place - 1]:g} to {edges[place]:g} of the tolerance"


class _Drawing:
    """Axes to draw on, from above; titles of artists, which matplotlib does not write; and at the end the SVG."""

    def __init__(self, axes: Sequence[Axes]) -> None:
        self.every, self.titles, self.svg = axes, list[str](), Markup()

    @property
    def axes(self) -> Axes:
        """The only axes."""
        return self.every[0]

    def entitle(self, artist: Artist, title: str) -> None:
        """Let a pointer over an artist show a title."""
        artist.set_gid(f"titled-{len(self.titles)}")
        self.titles.append(title)


@contextmanager
def _drawing(height: float, label: str, rows: int = 1, background: str = "none") -> Iterator[_Drawing]:
    """Give axes in rows, so many inches high together; the SVG is there after the block."""
    # Importing matplotlib takes 0.3 s, and most commands draw nothing.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with _LOCK, warnings.catch_warnings(), mpl.rc_context(_STYLE):
        # The font that measures text need not have what the browser's font has.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure = Figure((_WIDTH, height), layout="constrained", facecolor=background)
        drawing = _Drawing([*figure.subplots(rows, squeeze=False)[:, 0]])
        for axes in drawing.every:
            axes.set_facecolor("none")
        yield drawing
        written = io.StringIO()
        none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=none)
    text = printable(written.getvalue())
    text = text[text.index("<svg") :]
    head = f'<svg role="img" aria-label="{escape(printable(label))}" '
    text = re.sub(r"<svg (?=.*?viewBox)", head, text, count=1, flags=re.DOTALL)
    # It would be a style of the whole page.
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    for place, title in enumerate(drawing.titles):
        mark = f'id="titled-{place}">'
        text = text.replace(mark, f"{mark}<title>{escape(printable(title))}</title>", 1)
    # Several charts stand in one page, where an id may be there once.
    drawing.svg = Markup(
        re.sub(r' id="(titled|figure|axes|patch|text|line2d|matplotlib|xtick|ytick|legend|PathC)[^"]*"', "", text)
    )
