"""`run_gate`: whether an artifact may take the place of a baseline, by everything that can be known on this device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from relaxtune.models.axis_profile import sizes_within
from relaxtune.models.buckets import read_sizes
from relaxtune.models.inputs import unpadded_inputs
from relaxtune.pipeline.artifact.calls.tensor_checks import check_inputs
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import Arm, module_arm, run_conditions
from relaxtune.pipeline.environment import user_here
from relaxtune.pipeline.errors import GateRefusedError, UsageError
from relaxtune.pipeline.gate.checks import (
    Check,
    Verdict,
    check_compile_time,
    check_drift,
    check_latency,
    check_memory,
    check_size,
    check_validation,
    drift_tolerance,
)
from relaxtune.pipeline.gate.latency import LatencyComparison, LatencyLimit, compare_latency
from relaxtune.pipeline.job_outcomes import artifact_of
from relaxtune.pipeline.validate.builds import Arrays, compare_builds, reference_model
from relaxtune.pipeline.validate.padding_trials import route_sizes
from relaxtune.pipeline.validate.tolerances import Tolerance
from relaxtune.tuning_db.gates import record_gate
from relaxtune.tuning_db.store import TuningDatabase

# Sets of sizes of recorded calls that are timed.
_SIZES_MAX = 4


@dataclass(frozen=True)
class GateLimits:
    """What a new build may cost; None for what is told only.

    Attributes
    ----------
    latency
        See `LatencyLimit`.
    size, memory, compile_time
        By which share each may grow.
    tolerance
        What outputs may differ by; None takes what both builds may be off by.
    exact
        Whether all bits must be the same.
    strict
        Whether a latency that noise hides is a no.
    """

    latency: LatencyLimit = field(default_factory=LatencyLimit)
    size: float | None = 0.05
    memory: float | None = 0.05
    compile_time: float | None = None
    tolerance: Tolerance | None = None
    exact: bool = False
    strict: bool = False


@dataclass(frozen=True)
class GateReport:
    """What a gate found.

    Attributes
    ----------
    new, baseline
        What was compared, as the caller named it.
    checks
        One line each.
    latencies
        The comparisons behind the latency lines, by shape bucket; "" without buckets.
    conditions
        What the latencies are true for.
    """

    new: str
    baseline: str
    model: str
    checks: tuple[Check, ...]
    latencies: Mapping[str, LatencyComparison]
    conditions: Mapping[str, str]
    strict: bool

    @property
    def refusals(self) -> tuple[Check, ...]:
        """The checks that say no."""
        bad = {Verdict.NO, Verdict.UNDECIDED} if self.strict else {Verdict.NO}
        return tuple(check for check in self.checks if check.verdict in bad)

    @property
    def passed(self) -> bool:
        """Whether no check says no."""
        return not self.refusals

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON data, raw latencies included."""
        return {**asdict(self), "passed": self.passed}

    def summary(self) -> dict[str, object]:
        """Return the report without its latencies, as plain JSON data."""
        return {**self.to_json(), "latencies": {}}

    def raise_if_refused(self) -> None:
        """Raise where the gate says no.

        Raises
        ------
        GateRefusedError
            Names the checks.
        """
        if not self.passed:
            reasons = "; ".join(f"{check.name} {check.change} ({check.reason})" for check in self.refusals)
            raise GateRefusedError(f"{self.new} may not take the place of {self.baseline}: {reasons}")


def run_gate(
    new: Path,
    baseline: Path,
    limits: GateLimits | None = None,
    *,
    source: str | Path | None = None,
    inputs: Arrays | Sequence[Arrays] | None = None,
    samples: int = 3,
    seed: int = 0,
    database: TuningDatabase | None = None,
) -> GateReport:
    """Return whether an artifact may take the place of another; both run here.

    Parameters
    ----------
    new, baseline : Path
        Artifacts with the same inputs and outputs.
    limits : GateLimits or None
        What the new one may cost.
    source : str, Path or None
        The ONNX model, for random inputs, where it is not where the new artifact says.
    inputs : mapping, sequence of mappings or None
        What both are run on, in place of random inputs: one call, or recorded ones. All are compared; of each of the
        four commonest sets of sizes, the first is timed.
    samples, seed : int
        Random inputs for the drift.
    database : TuningDatabase or None
        Open to write: where the report is kept without raw latencies, passed or refused, and both artifacts.

    Raises
    ------
    UsageError
        The two have other inputs or outputs, the model is another, or there is no call.
    ArtifactError, ModelError
        One of them, or the model, cannot be had here.
    """
    asked = limits or GateLimits()
    module, before = Module.load(new), Module.load(baseline)
    _require_same_signature(module.manifest, before.manifest, new, baseline)
    given = [inputs] if isinstance(inputs, Mapping) else inputs
    timed = _timed_inputs(module, before, source, seed) if given is None else _by_size(given, module)
    conditions = run_conditions(module)
    manifests = (before.manifest, module.manifest)
    del module, before
    exact = asked.exact
    tolerance = asked.tolerance or drift_tolerance(*manifests)
    comparison = compare_builds(
        baseline, new, inputs=given, source=source, samples=samples, seed=seed,
        exact=exact, tolerance=None if exact else tolerance,
    )  # fmt: skip
    # Routes share what may be wrong, and the time.
    share = replace(asked.latency, alpha=asked.latency.alpha / len(timed), seconds=asked.latency.seconds / len(timed))
    latencies = {
        route: compare_latency(lambda feed=feed: _load_arms(baseline, new, feed), share)  # type: ignore[misc]
        for route, feed in timed.items()
    }
    checks = (
        check_validation(manifests[1]),
        check_drift(comparison),
        *(check_latency(found, route) for route, found in latencies.items()),
        check_size(*manifests, asked.size),
        check_memory(*manifests, asked.memory),
        check_compile_time(*manifests, asked.compile_time),
    )
    report = GateReport(str(new), str(baseline), manifests[1].model, checks, latencies, conditions, asked.strict)
    if database is not None:
        compared = artifact_of(manifests[1], new), artifact_of(manifests[0], baseline)
        told = json.dumps(report.summary())
        record_gate(database, *compared, passed=report.passed, by=user_here(), report=told)
    return report


def _require_same_signature(new: Manifest, baseline: Manifest, place: Path, other: Path) -> None:
    for what, mine, theirs in (("inputs", new.inputs, baseline.inputs), ("outputs", new.outputs, baseline.outputs)):
        if mine != theirs:
            raise UsageError(
                f"{place} and {other} have other {what}: {', '.join(map(str, mine))} beside "
                f"{', '.join(map(str, theirs))}; a gate compares builds that callers can exchange"
            )


def _timed_inputs(module: Module, before: Module, source: str | Path | None, seed: int) -> dict[str, Arrays]:
    """Return what is timed, by shape bucket of the new artifact: random, with masks that hide nothing."""
    model = reference_model(module, source)
    maxima = {**before.manifest.maxima, **module.manifest.maxima}
    routes = route_sizes(module, model) or {"": {}}
    return {
        route: unpadded_inputs(model, seed=seed, dims=sizes_within(model, maxima, dims))
        for route, dims in routes.items()
    }


def _by_size(calls: Sequence[Arrays], module: Module) -> dict[str, Arrays]:
    """Return the first call of each of the commonest sets of sizes."""
    if not calls:
        raise UsageError("no recorded call is given; expected one .npz file at least")
    named: dict[str, list[Arrays]] = {}
    for call in calls:
        check_inputs(call, module.inputs, module.manifest)
        sizes = read_sizes({name: array.shape for name, array in call.items()}, module.inputs)
        named.setdefault(",".join(f"{axis}={size}" for axis, size in sizes.items()), []).append(call)
    commonest = sorted(named.items(), key=lambda item: -len(item[1]))[:_SIZES_MAX]
    return {name if len(commonest) > 1 else "": of_size[0] for name, of_size in commonest}


def _load_arms(baseline: Path, new: Path, inputs: Mapping[str, np.ndarray]) -> tuple[Arm, Arm]:
    # Their hashes were checked when they were loaded first.
    first, second = (module_arm(Module.load(place, verify=False), inputs) for place in (baseline, new))
    return first, second
