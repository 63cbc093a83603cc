"""Latency over the sizes of calls: an artifact with symbolic axes, others of its model, and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relaxtune.models import OnnxModel
from relaxtune.models.axis_profile import sizes_within
from relaxtune.models.inputs import unpadded_inputs
from relaxtune.models.size_histogram import SizePoint
from relaxtune.pipeline.artifact.runtime import Module
from relaxtune.pipeline.bench.measure import (
    ORT_ARM,
    Arm,
    BenchmarkReport,
    measure,
    module_arm,
    onnxruntime_arms,
    run_conditions,
)
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.threads import configure_threads


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


def measure_lengths(
    artifacts: Mapping[str, Module],
    model: OnnxModel,
    points: Sequence[SizePoint],
    *,
    against: frozenset[str] = frozenset({ORT_ARM}),
    runs: int,
    warmup: int,
    seed: int = 0,
) -> LengthsReport:
    """Return the latency of artifacts and peers at each point, where all take turns.

    Parameters
    ----------
    artifacts : mapping of str to Module
        By the names of their arms, the first with symbolic axes. One with buckets takes and returns host arrays, as it
        pads there; the others' inputs are on their device before the clock starts.
    model : OnnxModel
        With symbolic axes.

    Raises
    ------
    UsageError
        `against` names something unknown, or the first artifact takes no more of an axis than a point has.
    """
    unknown = against - {ORT_ARM}
    if unknown:
        raise UsageError(f"cannot measure against {', '.join(sorted(unknown))}; expected {ORT_ARM}")
    threads = configure_threads()
    first = next(iter(artifacts.values()))
    measured = []
    for point in points:
        for axis, size in point.sizes:
            most = first.manifest.maxima.get(axis)
            if most is not None and size > most:
                raise UsageError(f"the lengths have {axis}={size}, the artifact was compiled for {most} at most")
        inputs = unpadded_inputs(model, seed=seed, dims=sizes_within(model, first.manifest.maxima, dict(point.sizes)))
        arms: dict[str, Arm] = {name: _arm(one, inputs) for name, one in artifacts.items() if _takes(one, inputs)}
        if ORT_ARM in against:
            arms |= onnxruntime_arms(model, inputs, first.manifest.target.kind, threads=threads)
        measured.append((point, measure(arms, runs=runs, warmup=warmup, conditions=run_conditions(first))))
    return LengthsReport(tuple(measured))


def _takes(module: Module, inputs: Mapping[str, np.ndarray]) -> bool:
    """Whether an artifact's sizes are those of the inputs, or open."""
    return all(
        isinstance(axis, str) or axis == size
        for spec in module.inputs
        for axis, size in zip(spec.shape, inputs[spec.name].shape, strict=True)
    )


def _arm(module: Module, inputs: Mapping[str, np.ndarray]) -> Arm:
    if module.manifest.buckets is None:
        return module_arm(module, inputs)

    def run() -> None:
        module.run(inputs)

    return run
