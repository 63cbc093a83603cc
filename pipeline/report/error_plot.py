"""The plot of a validation's errors: a histogram for each output, in units of what its elements may be off."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

_BAR_WIDTH, _HEIGHT, _LEFT, _LABEL = 44, 60, 220, 18
_WITHIN, _BEYOND = "#2f855a", "#c53030"


def error_histograms(validation: Mapping[str, Any]) -> str:
    """Return the histograms of a stored validation as inline SVG; empty for one that has none."""
    outputs = [output for output in validation.get("outputs", ()) if output.get("histogram", {}).get("counts")]
    if not outputs:
        return ""
    rows = [_row(output, index) for index, output in enumerate(outputs)]
    edges = outputs[0]["histogram"]["edges"]
    width = _LEFT + (len(edges) + 1) * _BAR_WIDTH
    height = len(rows) * (_HEIGHT + _LABEL) + _LABEL
    labels = "".join(
        f'<text x="{_LEFT + (index + 0.5) * _BAR_WIDTH:.0f}" y="{height - 4}" text-anchor="middle">{label}</text>'
        for index, label in enumerate([*(f"{edge:g}" for edge in edges), "more"])
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" style="max-width:{width}px">'
        f"<title>errors over tolerance, elements on a logarithmic scale</title>{''.join(rows)}{labels}</svg>"
    )


def _row(output: Mapping[str, Any], index: int) -> str:
    edges, counts = output["histogram"]["edges"], output["histogram"]["counts"]
    bottom = index * (_HEIGHT + _LABEL) + _HEIGHT
    top = math.log1p(max(counts))
    bars = []
    for place, count in enumerate(counts):
        tall = _HEIGHT * math.log1p(count) / top if count else 0.0
        colour = _WITHIN if place < len(edges) and edges[place] <= 1 else _BEYOND
        bars.append(
            f'<rect x="{_LEFT + place * _BAR_WIDTH + 2}" y="{bottom - tall:.1f}" width="{_BAR_WIDTH - 4}" '
            f'height="{tall:.1f}" fill="{colour}"><title>{count} elements {_range(edges, place)}</title></rect>'
        )
    factor = output.get("worst", {}).get("required_factor")
    needed = "no tolerance would do" if factor is None else f"needs {factor:.3g} of the tolerance"
    name = f'<text x="0" y="{bottom - 20}">{html.escape(str(output["name"]))}</text>'
    return f'<g>{name}<text x="0" y="{bottom}">{needed}</text>{"".join(bars)}</g>'


def _range(edges: Sequence[float], place: int) -> str:
    if place == len(edges):
        return f"off by more than {edges[-1]:g} of what is allowed, or not finite"
    if place == 0:
        return "equal"
    return f"off by {edges[place - 1]:g} to {edges[place]:g} of what is allowed"
