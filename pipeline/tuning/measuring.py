"""What is asked of a measuring process and what it answers; the process itself is `pipeline.tuning.measure_worker`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.tuning.arguments import ArgumentSpec
from pipeline.tuning.note import CandidateNote
from pipeline.tuning.timing import MeasureOptions


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
    """Make the reference outputs that a measurement of this kind will need."""

    measurement: MeasureRequest


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
    """Return where the reference outputs for one seed are kept, or None when nothing is compared."""
    if request.note is None or request.note.reference is None:
        return None
    return Path(f"{request.note.reference}.{seed}.pickle")


def check_seeds(request: MeasureRequest) -> tuple[int, int]:
    """Return the seeds of the values a candidate is timed with, and of those a new best is checked with besides."""
    return request.seed, request.seed + 1
