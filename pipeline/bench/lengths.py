"""Latency over the sizes of calls: an artifact with symbolic axes, others of its model, and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relaxtune.models import OnnxModel
from relaxtune.models.axis_profile import sizes_within
from relaxtune.models.inputs import unpadded_inputs
from relaxtune.models.size_histogram import SizePoint
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import BenchmarkReport
from relaxtune.pipeline.bench.request import BenchRequest
from relaxtune.pipeline.bench.side_by_side import LoadedArtifact, side_by_side
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.pages.charts import Line, lines


@dataclass(frozen=True)
class LengthsReport:
    """The arms' latencies at each point; a static artifact has an arm where it takes the sizes."""

    points: tuple[tuple[SizePoint, BenchmarkReport], ...]

    @property
    def arms(self) -> tuple[str, ...]:
        """The names of all arms, in their order."""
        return tuple(dict.fromkeys(arm.name for _, report in self.points for arm in report.arms))

    def mean_ms(self, arm: str) -> float | None:
        """Return the mean of an arm's medians, weighted by the calls; None where it does not take all sizes."""
        medians = [median_ms(report, arm) for _, report in self.points]
        known = [(point.count, median) for (point, _), median in zip(self.points, medians, strict=True) if median]
        if len(known) < len(medians):
            return None
        return sum(count * median for count, median in known) / sum(count for count, _ in known)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON data, raw values included."""
        points = [
            {"sizes": dict(point.sizes), "count": point.count, "report": report.to_json()}
            for point, report in self.points
        ]
        return {"points": points, "mean_ms": {arm: self.mean_ms(arm) for arm in self.arms}}


def median_ms(report: BenchmarkReport, name: str) -> float | None:
    """Return the median of an arm, None where the report does not have it."""
    return next((arm.median_ms for arm in report.arms if arm.name == name), None)


def rows_per_s(point: SizePoint, report: BenchmarkReport, name: str) -> float | None:
    """Return how many rows of the batch an arm computes in a second, all callers together; the point's size is that."""
    arm = next((arm for arm in report.arms if arm.name == name), None)
    return None if arm is None else arm.calls_per_s * point.sizes[0][1]


def lengths_chart(report: LengthsReport, title: str, *, rows: bool = False) -> str:
    """Return a report as an SVG file's text.

    The axis with the most different sizes goes to the right; each set of the others' sizes is a line of its own. `rows`
    adds a second panel: rows of the batch a second.
    """
    points = [point for point, _ in report.points]
    axis = max((name for name, _ in points[0].sizes), key=lambda name: len({dict(one.sizes)[name] for one in points}))
    panels = {"ms": _lines(report, axis, lambda _, one, arm: median_ms(one, arm))}
    if rows:
        panels["rows/s"] = _lines(report, axis, rows_per_s)
    return str(lines(panels, axis, title))


def _lines(
    report: LengthsReport, axis: str, value_of: Callable[[SizePoint, BenchmarkReport, str], float | None]
) -> list[Line]:
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for arm in report.arms:
        for point, one in report.points:
            value = value_of(point, one, arm)
            rest = " ".join(f"{name}={size}" for name, size in point.sizes if name != axis)
            if value is not None:
                found.setdefault((arm, rest), []).append((dict(point.sizes)[axis], value))
    # One note for a set of sizes: at the first arm's line.
    return [Line(arm, points, rest if arm == report.arms[0] else "") for (arm, rest), points in found.items()]


def measure_lengths(
    artifacts: Mapping[str, LoadedArtifact], model: OnnxModel, points: Sequence[SizePoint], request: BenchRequest
) -> LengthsReport:
    """Return the latency of artifacts and peers at each point, where all take turns.

    `artifacts`: by the names of their arms, the first with symbolic axes. An artifact with buckets takes and returns
    host arrays, as it pads there; the others' inputs are on their device before the clock starts. `model`: with
    symbolic axes. `request`: peers and how long; its `dims` are sizes of axes that the points leave open.
    Raises `UsageError`: the first artifact takes no more of an axis than a point has.
    """
    first = next(iter(artifacts.values()))
    maxima = first.module.manifest.maxima
    for axis, size in (pair for point in points for pair in point.sizes):
        if size > maxima.get(axis, size):
            raise UsageError(f"the lengths have {axis}={size}, the artifact was compiled for {maxima[axis]} at most")
    measured = []
    with side_by_side(first, model, request) as peers:
        for point in points:
            dims = sizes_within(model, maxima, {**request.dims, **dict(point.sizes)})
            inputs = unpadded_inputs(model, seed=request.seed, dims=dims)
            taking = {name: one for name, one in artifacts.items() if _takes(one.module, inputs)}
            measured.append((point, peers.measure(taking, inputs)))
    return LengthsReport(tuple(measured))


def _takes(module: Module, inputs: Mapping[str, np.ndarray]) -> bool:
    """Whether an artifact's sizes are those of the inputs, or open."""
    return all(
        isinstance(axis, str) or axis == size
        for spec in module.inputs
        for axis, size in zip(spec.shape, inputs[spec.name].shape, strict=True)
    )
