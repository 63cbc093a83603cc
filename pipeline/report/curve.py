"""The plot of values over time as steps: what was the best so far, as inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 260, 90, 20, 26, 40
_TICKS = 4


def step_curve(points: Sequence[tuple[float, float]], across: str, up: str) -> str:
    """Return the plot; empty with fewer than two points.

    Parameters
    ----------
    points : sequence of (float, float)
        In the order of the first number, which goes to the right.
    across, up : str
        What the numbers are, with their units.
    """
    if len(points) < 2:
        return ""
    (left, _), (right, _) = points[0], points[-1]
    low, high = (bound(value for _, value in points) for bound in (min, max))
    wide, tall = (right - left) or 1.0, (high - low) or high or 1.0

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - left) / wide

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / tall

    path = f"M{x(left):.1f} {y(points[0][1]):.1f}" + "".join(f"H{x(at):.1f}V{y(value):.1f}" for at, value in points[1:])
    parts = [f'<path d="{path}" fill="none" stroke="#2b6cb0" stroke-width="2"/>']
    for number in range(_TICKS + 1):
        part = number / _TICKS
        # The last one ends with the plot: it may be wide.
        anchor = "end" if number == _TICKS else "middle"
        parts.append(_text(x(left + part * wide), _HEIGHT - _BOTTOM + 16, _number(left + part * wide, wide), anchor))
        parts.append(_text(_LEFT - 8, y(low + part * tall) + 4, _number(low + part * tall, tall), "end"))
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, across, "middle"))
    parts.append(_text(8, 12, up, "start"))
    label = html.escape(f"{up} over {across}")
    body = "".join(parts)
    return f'<svg class="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{body}</svg>'


def _number(value: float, span: float) -> str:
    """Return a number of an axis, with as many digits as tell it from the next one."""
    return f"{value:,.{max(0, 1 - math.floor(math.log10(span / _TICKS)))}f}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
