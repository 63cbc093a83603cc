"""Requests to a measuring process (`tuning.local.measure_worker`) and its replies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec


@dataclass(frozen=True)
class MeasureRequest:
    """The file of a candidate, what it computes, and how to time it."""

    artifact: str
    device: str
    spec: WorkloadSpec
    options: MeasureOptions
    seed: int


@dataclass(frozen=True)
class WarmRequest:
    """Set a device up, before there is anything to measure."""

    device: str
    options: MeasureOptions


@dataclass(frozen=True)
class ReferenceRequest:
    """Compute the reference outputs that a measurement needs; with `on_host` on the CPU, after an appeal."""

    measurement: MeasureRequest
    on_host: bool = False


@dataclass(frozen=True)
class CompareRequest:
    """Check candidates of one workload again and time them alternately, `rounds` latencies each."""

    measurements: tuple[MeasureRequest, ...]
    rounds: int


@dataclass(frozen=True)
class MeasureReply:
    """Raw seconds of one run each (empty when the result was wrong), and what differs from the reference, if any."""

    seconds: tuple[float, ...]
    mismatch: str | None


@dataclass(frozen=True)
class CompareReply:
    """A reply for each candidate compared, in order."""

    replies: tuple[MeasureReply, ...]


def reference_file(request: MeasureRequest, seed: int) -> Path | None:
    """Return where the reference outputs for one seed are kept, or None when nothing is compared.

    The CPU's outputs count once a candidate has appealed from the device's.
    """
    on_host = host_reference_file(request, seed)
    if on_host is not None and on_host.exists():
        return on_host
    return None if request.spec.reference is None else outputs_file(request.spec.reference, seed)


def outputs_file(reference: BuiltArtifact, seed: int) -> Path:
    """Return where the outputs that a reference computes for one seed are kept."""
    return Path(f"{reference.content!s}.{seed}.pickle")


def host_reference_file(request: MeasureRequest, seed: int) -> Path | None:
    """Return where the CPU's outputs are kept once a candidate has appealed; None where it cannot appeal."""
    return None if request.spec.host_reference is None else outputs_file(request.spec.host_reference, seed)


def may_appeal(request: MeasureRequest) -> bool:
    """Whether a candidate is compared with what the device computed, and the CPU can still be asked."""
    files = [host_reference_file(request, seed) for seed in check_seeds(request)]
    return any(path is not None and not path.exists() for path in files)


def check_seeds(request: MeasureRequest) -> tuple[int, int]:
    """Return the seed of the values that a candidate is timed with, and of those that a new best is checked with."""
    return request.seed, request.seed + 1
