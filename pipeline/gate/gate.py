"""`run_gate`: whether an artifact may take the place of a baseline, by everything that can be known on this device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from relaxtune.models.axis_profile import sizes_within
from relaxtune.models.buckets import read_sizes
from relaxtune.models.inputs import unpadded_inputs
from relaxtune.pipeline.artifact.calls.tensor_checks import check_inputs
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import Call
from relaxtune.pipeline.bench.tables import run_conditions
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
from relaxtune.pipeline.gate.latency import LatencyComparison, LatencyLimit, compare_latency, load_arms
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
    """The limits of a gate; None sets none."""

    latency: LatencyLimit = field(default_factory=LatencyLimit)  #: See `LatencyLimit`.
    #: By which share each may grow.
    size: float | None = 0.05
    memory: float | None = 0.05
    compile_time: float | None = None
    #: Allowed difference of the outputs; None takes the sum of both builds' tolerances.
    tolerance: Tolerance | None = None
    exact: bool = False  #: Whether all bits must be the same.
    strict: bool = False  #: Whether a latency that noise hides is a no.


@dataclass(frozen=True)
class GateReport:
    """Findings of a gate."""

    #: The artifacts, as the caller named them.
    new: str
    baseline: str
    model: str
    checks: tuple[Check, ...]  #: One line each.
    #: The comparisons behind the latency lines, by shape bucket; "" without buckets.
    latencies: Mapping[str, LatencyComparison]
    conditions: Mapping[str, str]  #: The conditions of the latencies.
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
        """Raise `GateRefusedError` with the checks that say no, if any does."""
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
    """Return whether an artifact may take the place of another; both run here, and have the same inputs and outputs.

    `source` is the ONNX model, for random inputs, where it is not where the new artifact says. `inputs` are in place of
    random ones: one call, or recorded ones. All are compared; of each of the four commonest sets of sizes, the first is
    timed. The drift takes `samples` random inputs. `database`, open to write, keeps the report without raw latencies,
    passed or refused, and both artifacts.

    Raises `UsageError`: the two have other inputs or outputs, the model is another, or there is no call;
    `ArtifactError`, `ModelError`: one of them, or the model, cannot be had here.
    """
    limits = limits or GateLimits()
    module, before = Module.load(new), Module.load(baseline)
    for what, mine, theirs in (("inputs", module.inputs, before.inputs), ("outputs", module.outputs, before.outputs)):
        if mine != theirs:
            raise UsageError(
                f"{new} and {baseline} have other {what}: {', '.join(map(str, mine))} and "
                f"{', '.join(map(str, theirs))}; a gate compares builds that callers can exchange"
            )
    given = [inputs] if isinstance(inputs, Mapping) else inputs
    timed: dict[str, Arrays]
    if given is None:
        # By shape bucket of the new artifact: random, with masks that hide nothing.
        model = reference_model(module, source)
        maxima = {**before.manifest.maxima, **module.manifest.maxima}
        timed = {
            route: unpadded_inputs(model, seed=seed, dims=sizes_within(model, maxima, dims))
            for route, dims in (route_sizes(module, model) or {"": {}}).items()
        }
    else:
        timed = _by_size(given, module)
    conditions = run_conditions(module)
    manifests = (before.manifest, module.manifest)
    del module, before
    comparison = compare_builds(
        baseline, new, inputs=given, source=source, samples=samples, seed=seed, exact=limits.exact,
        tolerance=None if limits.exact else limits.tolerance or drift_tolerance(*manifests),
    )  # fmt: skip
    # Routes share the probability of a false alarm, and the time.
    latency, count = limits.latency, len(timed)
    share = replace(latency, alpha=latency.alpha / count, seconds=latency.seconds / count)
    latencies = {
        route: compare_latency(partial(load_arms, baseline, new, [Call(feed)]), share) for route, feed in timed.items()
    }
    checks = (
        check_validation(manifests[1]),
        check_drift(comparison),
        *(check_latency(found, route) for route, found in latencies.items()),
        check_size(*manifests, limits.size),
        check_memory(*manifests, limits.memory),
        check_compile_time(*manifests, limits.compile_time),
    )
    report = GateReport(str(new), str(baseline), manifests[1].model, checks, latencies, conditions, limits.strict)
    if database is not None:
        compared = artifact_of(manifests[1], new), artifact_of(manifests[0], baseline)
        record_gate(database, *compared, passed=report.passed, by=user_here(), report=json.dumps(report.summary()))
    return report


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
