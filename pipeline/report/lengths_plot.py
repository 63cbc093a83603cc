"""The plot of latency, and of throughput, over sizes: a line for each arm, both axes logarithmic, as inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from relaxtune.models.size_histogram import SizePoint
from relaxtune.pipeline.bench.lengths import LengthsReport, median_ms, rows_per_s
from relaxtune.pipeline.bench.measure import BenchmarkReport

_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b7791f", "#718096")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 460, 80, 150, 50, 60


def lengths_plot(report: LengthsReport, title: str, *, rows: bool = False) -> str:
    """Return the plot of a report as an SVG file's text.

    The axis with the most different sizes goes to the right; each set of the others' sizes is a line of its own. `rows`
    adds a second panel: rows of the batch a second.
    """
    panels = [_panel(report, lambda point, one, arm: median_ms(one, arm), "ms", 0, legend=True)]
    if rows:
        panels.append(_panel(report, rows_per_s, "rows/s", _HEIGHT - _TOP // 2, legend=False))
    height = _HEIGHT + (len(panels) - 1) * (_HEIGHT - _TOP // 2)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{_text(_LEFT, 24, title, size=16)}{''.join(panels)}</svg>\n"
    )


def _panel(
    report: LengthsReport,
    value_of: Callable[[SizePoint, BenchmarkReport, str], float | None],
    unit: str,
    down: int,
    *,
    legend: bool,
) -> str:
    """Return one panel, a line for each arm, moved `down` by so much."""
    points = [point for point, _ in report.points]
    axis = max((name for name, _ in points[0].sizes), key=lambda name: len({dict(one.sizes)[name] for one in points}))
    values = {
        (point, arm): value
        for point, one in report.points
        for arm in report.arms
        if (value := value_of(point, one, arm)) is not None
    }
    across = _span([dict(point.sizes)[axis] for point in points])
    up = _span(list(values.values()))

    def x(size: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(size / across[0]) / math.log(across[1] / across[0])

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * math.log(value / up[0]) / math.log(up[1] / up[0])

    parts = []
    for size in _ticks(*across):
        parts.append(_line([(x(size), _TOP), (x(size), _HEIGHT - _BOTTOM)], "#e2e8f0", 1))
        parts.append(_text(x(size), _HEIGHT - _BOTTOM + 18, f"{size:g}", anchor="middle"))
    for tick in _ticks(*up):
        parts.append(_line([(_LEFT, y(tick)), (_WIDTH - _RIGHT, y(tick))], "#e2e8f0", 1))
        parts.append(_text(_LEFT - 8, y(tick) + 4, f"{tick:g}", anchor="end"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, axis, anchor="middle"))
    parts.append(_text(_LEFT - 8, _TOP - 12, unit, anchor="end"))
    for place, arm in enumerate(report.arms):
        colour = _COLOURS[place % len(_COLOURS)]
        if legend:
            level = _TOP + 22 * place
            parts.append(_line([(_WIDTH - _RIGHT + 16, level), (_WIDTH - _RIGHT + 36, level)], colour, 2))
            parts.append(_text(_WIDTH - _RIGHT + 42, level + 4, arm))
        for rest in dict.fromkeys(_others(point, axis) for point in points):
            drawn = [
                (x(dict(point.sizes)[axis]), y(values[point, arm]))
                for point in points
                if _others(point, axis) == rest and (point, arm) in values
            ]
            parts.append(_line(drawn, colour, 2))
            parts += [f'<circle cx="{at:.1f}" cy="{up_to:.1f}" r="3" fill="{colour}"/>' for at, up_to in drawn]
            if drawn and rest and place == 0:
                parts.append(_text(drawn[0][0] + 6, drawn[0][1] + 16, rest))
    return f'<g transform="translate(0 {down})">{"".join(parts)}</g>'


def _others(point: SizePoint, axis: str) -> str:
    return " ".join(f"{name}={size}" for name, size in point.sizes if name != axis)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return ends of a logarithmic axis with some space beside the values."""
    low, high = min(values), max(values)
    return low / 1.15, high * 1.15


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two: powers of two over short spans, of ten with 2 and 5 between over long ones."""
    steps = (1, 2, 5) if high / low > 4 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for decade in decades for step in steps if low <= (tick := step * 10.0**decade) <= high]


def _line(points: Sequence[tuple[float, float]], colour: str, width: int) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(text)}</text>'
