"""The checks of a gate, latency aside: validation, drift, size, memory, compile time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.gate.latency import LatencyComparison, Speed
from relaxtune.pipeline.validate.comparison import Comparison
from relaxtune.pipeline.validate.tolerances import Tolerance


class Verdict(StrEnum):
    """The outcome of a check; a gate says no where any check does."""

    YES = "yes"
    NO = "no"
    UNDECIDED = "undecided"
    # There is no limit, or no number to hold against it.
    NO_LIMIT = "no limit"


@dataclass(frozen=True)
class Check:
    """One line of a gate."""

    name: str  # `latency`, `drift`, ...; with the shape bucket behind it where there are several.
    verdict: Verdict
    # The finding, in words; "" where there is nothing to say.
    baseline: str
    new: str
    change: str
    limit: str  # The limit in words; "" without one.
    reason: str  # Why it says what it says.


def check_latency(found: LatencyComparison, route: str) -> Check:
    """Return the check of a route's latency; undecided where noise hides it."""
    limit = found.limit
    bounds = "no bounds" if found.least is None or found.most is None else f"{found.least:+.2%} to {found.most:+.2%}"
    seen = "" if found.detectable is None else f"; a slowdown of {found.detectable:.2%} would have shown"
    reason = (
        f"{found.runs} runs of each in {found.blocks} blocks, {found.loadings} loadings, {found.seconds:.1f} s: "
        f"{bounds} at alpha {limit.alpha:g}{seen}"
    )
    return Check(
        name=f"latency {route}".strip(),
        verdict={Speed.WITHIN: Verdict.YES, Speed.SLOWER: Verdict.NO, Speed.UNDECIDED: Verdict.UNDECIDED}[found.speed],
        baseline=f"{found.baseline.median_ms:.4g} ms",
        new=f"{found.new.median_ms:.4g} ms",
        change=f"{found.slowdown:+.2%}",
        limit=f"at most {limit.max_slowdown:+.2%}",
        reason=reason,
    )


def check_validation(new: Manifest) -> Check:
    """Return whether the new artifact agreed with ONNX Runtime when it was last compared."""
    report = new.validation
    if report is None:
        verdict, reason = Verdict.NO, "it was not compared with ONNX Runtime yet: run `relaxtune validate` on it"
    elif report.get("passed") is True:
        verdict, reason = Verdict.YES, f"{report.get('samples')} samples, reference {report.get('reference')}"
    else:
        verdict, reason = Verdict.NO, "it disagrees with ONNX Runtime: see `relaxtune validate`"
    return Check("validation", verdict, "", "passed" if verdict is Verdict.YES else "not passed", "", "passed", reason)


def check_drift(found: Comparison) -> Check:
    """Return the check of the outputs on the same inputs."""
    worst = min(found.outputs, key=lambda output: (output.passed, output.identical))
    reasons = [f"{output.name}: {output.reason}" for output in found.outputs if not output.passed]
    return Check(
        name="drift",
        verdict=Verdict.NO_LIMIT if not found.limit else Verdict.YES if found.passed else Verdict.NO,
        baseline="",
        new=f"{worst.identical:.2%} same bits",
        change=f"max abs {max(output.max_abs for output in found.outputs):.3g}",
        limit=found.limit,
        reason="; ".join(reasons) or f"{len(found.outputs)} outputs",
    )


def drift_tolerance(baseline: Manifest, new: Manifest) -> Tolerance | None:
    """Return the allowed difference of two artifacts of one model: the sum of both tolerances.

    None where they are of two models, or one was never validated.
    """
    if baseline.model_sha256 != new.model_sha256:
        return None
    total = Tolerance(0.0, 0.0)
    for manifest in (baseline, new):
        stated = (manifest.validation or {}).get("tolerance")
        if not isinstance(stated, Mapping):
            return None
        total = Tolerance(total.rtol + float(stated["rtol"]), total.atol + float(stated["atol"]))
    return total


def check_size(baseline: Manifest, new: Manifest, most: float | None) -> Check:
    """Return whether the files together grew by more than a share."""
    sizes = [sum(entry.bytes for entry in manifest.files.values()) for manifest in (baseline, new)]
    return _check_growth("size", sizes[0], sizes[1], most, _bytes)


def check_memory(baseline: Manifest, new: Manifest, most: float | None) -> Check:
    """Return whether planned storage and weights together grew by more than a share."""
    sizes = [
        None if manifest.memory is None else manifest.memory.weights_bytes + (manifest.memory.planned_bytes or 0)
        for manifest in (baseline, new)
    ]
    if sizes[0] is None or sizes[1] is None:
        return Check("memory", Verdict.NO_LIMIT, "", "", "", "", "a manifest does not state its memory")
    planned = [one.memory is not None and one.memory.planned_bytes is not None for one in (baseline, new)]
    if planned[0] != planned[1]:
        reason = "only one artifact has a memory plan, so memory is not compared"
        return Check("memory", Verdict.NO_LIMIT, _bytes(sizes[0]), _bytes(sizes[1]), "", "", reason)
    return _check_growth("memory", sizes[0], sizes[1], most, _bytes)


def check_compile_time(baseline: Manifest, new: Manifest, most: float | None) -> Check:
    """Return whether compiling took longer by more than a share; the manifests do not say on which machine."""
    seconds = [sum(manifest.compile_seconds.values()) for manifest in (baseline, new)]
    return _check_growth("compile time", seconds[0], seconds[1], most, lambda value: f"{value:.1f} s")


def _check_growth(name: str, before: float, after: float, most: float | None, text: Callable[[float], str]) -> Check:
    growth = after / before - 1 if before else 0.0 if not after else float("inf")
    within = most is None or growth <= most
    return Check(
        name=name,
        verdict=Verdict.NO_LIMIT if most is None else Verdict.YES if within else Verdict.NO,
        baseline=text(before),
        new=text(after),
        change=f"{growth:+.2%}",
        limit="" if most is None else f"at most {most:+.2%}",
        reason="" if within else f"it grew by {growth:.2%}",
    )


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB"
