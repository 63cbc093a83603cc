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

    @property
    def seeds(self) -> tuple[int, int]:
        """The seed of the values that a candidate is timed with, and of those that a new best is checked with."""
        return self.seed, self.seed + 1

    def reference_file(self, seed: int) -> Path | None:
        """Return the file of the reference outputs for a seed, None where nothing is compared.

        The CPU's outputs count once they were computed for a candidate that differed from the device's.
        """
        host, spec = self.spec.host_reference, self.spec
        if host is not None and outputs_file(host, seed).exists():
            return outputs_file(host, seed)
        return None if spec.reference is None else outputs_file(spec.reference, seed)

    @property
    def may_appeal(self) -> bool:
        """Whether the reference is the device's, and the CPU may compute another one."""
        host = self.spec.host_reference
        return host is not None and not all(outputs_file(host, seed).exists() for seed in self.seeds)


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


def outputs_file(reference: BuiltArtifact, seed: int) -> Path:
    """Return the file of the outputs that a reference computes for a seed."""
    return Path(f"{reference.content!s}.{seed}.pickle")
