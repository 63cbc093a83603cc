"""What is asked of a measuring process and what it answers (`tuning.local.measure_worker`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relaxtune.pipeline.tuning.measure.arguments import ArgumentSpec
from relaxtune.pipeline.tuning.measure.notes import CandidateNote
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions


@dataclass(frozen=True)
class MeasureRequest:
    """An artifact, what it is called with, and how to time it."""

    artifact: str
    device: str
    arguments: tuple[ArgumentSpec, ...]
    note: CandidateNote | None
    options: MeasureOptions
    seed: int


@dataclass(frozen=True)
class WarmRequest:
    """Set a device up, before there is anything to measure."""

    device: str
    options: MeasureOptions


@dataclass(frozen=True)
class ReferenceRequest:
    """Make the reference outputs that a measurement of this kind will need; with `on_host` the CPU's, on appeal."""

    measurement: MeasureRequest
    on_host: bool = False


@dataclass(frozen=True)
class CompareRequest:
    """Check candidates of one workload once more and time them in turns, so many latencies each."""

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

    Where the device makes them, and the CPU did so too since a candidate appealed, it is the CPU's that count.
    """
    if request.note is None or request.note.reference is None:
        return None
    on_host = host_reference_file(request, seed)
    if on_host is not None and on_host.exists():
        return on_host
    return made_reference_file(request.note.reference, seed)


def made_reference_file(reference: str, seed: int) -> Path:
    """Return where the outputs that a shared object computes for one seed are kept."""
    return Path(f"{reference}.{seed}.pickle")


def host_reference_file(request: MeasureRequest, seed: int) -> Path | None:
    """Return where the CPU's outputs are kept, once a candidate has appealed from the device's; None without appeal."""
    if request.note is None or request.note.host_reference is None:
        return None
    return made_reference_file(request.note.host_reference, seed)


def may_appeal(request: MeasureRequest) -> bool:
    """Whether a candidate was compared with what the device made, and the CPU can still be asked."""
    files = [host_reference_file(request, seed) for seed in check_seeds(request)]
    return any(path is not None and not path.exists() for path in files)


def check_seeds(request: MeasureRequest) -> tuple[int, int]:
    """Return the seeds of the values a candidate is timed with, and of those a new best is checked with besides."""
    return request.seed, request.seed + 1
