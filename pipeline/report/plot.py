"""The plots of a report as inline SVG: bars of shares and of peers, and the roofline."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relaxtune.pipeline.report.ceilings import Ceilings
from relaxtune.pipeline.report.kernel import CONTRACTIONS, Bottleneck, KernelRow
from relaxtune.tuning_db.questions.artifacts import ArmSummary

COLOURS = {
    Bottleneck.COMPUTE: "#2b6cb0",
    Bottleneck.BANDWIDTH: "#2f855a",
    Bottleneck.LATENCY: "#c05621",
    Bottleneck.LAUNCH: "#9b2c2c",
    None: "#718096",
}
_BARS = 14
_ROW, _LEFT, _WIDTH = 22, 330, 1000
_PLOT_HEIGHT, _MARGIN, _BELOW = 400, 90, 60
_GRID = "#e2e8f0"
_OWN = "#2b6cb0"


def shares(rows: Sequence[KernelRow]) -> str:
    """Return bars of the kernels that take the most time, coloured by bottleneck; empty when no time is known."""
    timed = [row for row in rows if row.share]
    if not timed:
        return ""
    shown, rest = timed[:_BARS], timed[_BARS:]
    lines = [_share_bar(row.name, row.share or 0.0, row.bottleneck, _bar_title(row)) for row in shown]
    if rest:
        lines.append(_share_bar(f"{len(rest)} more", sum(row.share or 0.0 for row in rest), None, ""))
    return _bars(lines, "share of the kernels' time")


def latencies(arms: Sequence[ArmSummary]) -> str:
    """Return bars of the arms of benchmarks; empty without any. Arms of one device ran alternately."""
    several = len({arm.device_name for arm in arms}) > 1
    return _bars(
        [
            _Bar(
                f"{arm.arm}, {arm.device_name}" if several else arm.arm,
                arm.latency_us,
                _OWN if arm.arm.startswith("relaxtune") else COLOURS[None],
                f"{arm.latency_us / 1e3:.4g} ms",
                f"{arm.arm} on {arm.device_name}, {arm.created_at:%Y-%m-%d %H:%M} UTC",
            )
            for arm in arms
        ],
        "latency of the whole model",
    )


@dataclass(frozen=True)
class _Bar:
    name: str
    value: float
    colour: str
    told: str
    title: str


def _share_bar(name: str, share: float, bottleneck: Bottleneck | None, title: str) -> _Bar:
    return _Bar(name, share, COLOURS[bottleneck], f"{share:.1%}", title)


def _bars(lines: Sequence[_Bar], label: str) -> str:
    if not lines:
        return ""
    scale = (_WIDTH - _LEFT - 90) / max(line.value for line in lines)
    parts = []
    for index, line in enumerate(lines):
        y, wide = index * _ROW, line.value * scale
        parts.append(
            f'<g><title>{html.escape(line.title)}</title><text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">'
            f'{html.escape(_short(line.name))}</text><rect x="{_LEFT}" y="{y + 3}" width="{max(1.0, wide):.1f}" '
            f'height="{_ROW - 7}" fill="{line.colour}"/><text x="{_LEFT + wide + 6:.1f}" y="{y + 15}">'
            f"{line.told}</text></g>"
        )
    return _svg(_WIDTH, len(lines) * _ROW + 4, "".join(parts), label)


def roofline(rows: Sequence[KernelRow], ceilings: Ceilings | None) -> str:
    """Return kernels by arithmetic intensity and rate under the device's roofs; empty without a bandwidth ceiling."""
    points = [row for row in rows if row.flops and row.bytes and row.flops_per_s]
    if ceilings is None or not ceilings.bytes_per_s or not points:
        return ""
    roofs = {
        dtype: peak
        for dtype, peak in ceilings.flops_per_s.items()
        if any(row.dtype == dtype and row.family in CONTRACTIONS for row in points)
    }
    intensities = [_intensity(row) for row in points]
    rates = [row.flops_per_s or 1.0 for row in points]
    bandwidth = ceilings.bytes_per_s
    across = _decades([*intensities, *(peak / bandwidth for peak in roofs.values())])
    plane = _Plane(across, _decades([*rates, *roofs.values(), across[0] * bandwidth]))
    parts = [_axes(plane), *_roofs(plane, bandwidth, roofs)]
    for row in points:
        radius = 3 + 14 * math.sqrt(row.share or 0.0)
        parts.append(
            f'<circle cx="{plane.x(_intensity(row)):.1f}" cy="{plane.y(row.flops_per_s or 1.0):.1f}" '
            f'r="{radius:.1f}" fill="{COLOURS[row.bottleneck]}" fill-opacity="0.6">'
            f"<title>{html.escape(_bar_title(row))}</title></circle>"
        )
    return _svg(_WIDTH, _PLOT_HEIGHT, "".join(parts), "rate against arithmetic intensity, FLOP per byte")


@dataclass(frozen=True)
class _Plane:
    """Two logarithmic axes on the plot."""

    across: tuple[float, float]
    up: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.across
        return _MARGIN + (_WIDTH - 2 * _MARGIN) * math.log(value / low) / math.log(high / low)

    def y(self, value: float) -> float:
        low, high = self.up
        return _PLOT_HEIGHT - _BELOW - (_PLOT_HEIGHT - 1.5 * _BELOW) * math.log(value / low) / math.log(high / low)


def _roofs(plane: _Plane, bandwidth: float, peaks: Mapping[str, float]) -> list[str]:
    left, right = plane.across
    highest = max(peaks.values(), default=plane.up[1])
    knee = min(right, highest / bandwidth)
    parts = [
        _line(plane.x(left), plane.y(left * bandwidth), plane.x(knee), plane.y(knee * bandwidth)),
        _text(plane.x(left) + 6, plane.y(left * bandwidth) - 26, f"{bandwidth / 1e9:,.0f} GB/s"),
    ]
    for dtype, peak in peaks.items():
        parts.append(_line(plane.x(peak / bandwidth), plane.y(peak), plane.x(right), plane.y(peak)))
        parts.append(_text(plane.x(right) - 4, plane.y(peak) - 6, f"{dtype} {_rate(peak)}", anchor="end"))
    return parts


def _axes(plane: _Plane) -> str:
    (left, right), (low, high) = plane.across, plane.up
    parts = []
    for exponent in range(round(math.log10(left)), round(math.log10(right)) + 1):
        at = plane.x(10.0**exponent)
        parts.append(_line(at, plane.y(low), at, plane.y(high), _GRID))
        parts.append(_text(at, _PLOT_HEIGHT - _BELOW + 18, f"{10.0**exponent:g}", anchor="middle"))
    for exponent in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at = plane.y(10.0**exponent)
        parts.append(_line(plane.x(left), at, plane.x(right), at, _GRID))
        parts.append(_text(_MARGIN - 6, at + 4, _rate(10.0**exponent), anchor="end"))
    parts.append(_text(_WIDTH / 2, _PLOT_HEIGHT - 14, "FLOP per byte", anchor="middle"))
    return "".join(parts)


def _bar_title(row: KernelRow) -> str:
    time = f"{row.time_us:.2f} us x {row.calls}" if row.time_us else "no time"
    rates = [
        f"{_rate(row.flops_per_s)}" if row.flops_per_s else "",
        f"{row.bytes_per_s / 1e9:,.0f} GB/s" if row.bytes_per_s else "",
    ]
    return ", ".join([row.name, row.route, time, *(rate for rate in rates if rate), row.bottleneck or ""])


def _intensity(row: KernelRow) -> float:
    return (row.flops or 1.0) / (row.bytes or 1.0)


def _decades(values: Sequence[float]) -> tuple[float, float]:
    low = 10.0 ** math.floor(math.log10(min(values)))
    high = 10.0 ** math.ceil(math.log10(max(values) * 1.01))
    return low, high


def _rate(value: float) -> str:
    for unit, size in (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value:.3g} FLOP/s"


def _short(name: str) -> str:
    return name if len(name) <= 46 else f"{name[:43]}..."


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#1a202c") -> str:
    kind = ' class="grid"' if colour == _GRID else ""
    return f'<line{kind} x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(width: int, height: int, body: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )
