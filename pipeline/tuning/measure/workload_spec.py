"""A workload where its candidates are measured: arguments, reference, tolerances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relaxtune.pipeline.tuning.measure.resources import NO_RESOURCES, Resources

if TYPE_CHECKING:
    from relaxtune.pipeline.tuning.measure.arguments import ArgumentSpec
    from relaxtune.pipeline.validate.tolerances import KernelTolerance


@dataclass(frozen=True)
class BuiltArtifact:
    """A compiled kernel: a shared object with the function `main`."""

    # The path of a file of the machine that built it, or its bytes, packed (`measure.backend.pack`).
    content: bytes | str
    sha256: str  # Of its bytes, in hexadecimal digits.
    resources: Resources = NO_RESOURCES  # Of its kernels on a GPU, from the compiler.


@dataclass(frozen=True)
class WorkloadSpec:
    """Arguments and reference of the candidates of one workload."""

    workload: str  # Workload hash: candidates of one workload share arguments, reference and the best time so far.
    arguments: tuple[ArgumentSpec, ...]  # Shape and dtype of every parameter.
    outputs: tuple[int, ...]  # Positions of the parameters that the kernel writes.
    # Parameter position -> exclusive upper bound of its integers.
    index_ranges: Mapping[int, int] = field(default_factory=dict)
    # Computes the same on the CPU, or on the device where `reference_on_device`; None compares nothing.
    reference: BuiltArtifact | None = None
    reference_on_device: bool = False
    # Computes the same on the CPU, where `reference` does so on the device. It decides about candidates that differ
    # from what the device computed. None where there is none.
    host_reference: BuiltArtifact | None = None
    # Best seconds of the workload when the candidate was submitted; None when nothing was measured.
    best_s: float | None = None
    # Largest accepted difference of an output; those of some outputs, by position, are their own.
    tolerance: KernelTolerance = field(kw_only=True)
    # Position (as text) of a padding mask -> the number that hides nothing. The mask is full of it while a candidate is
    # timed, as it mostly is in use; candidates are compared on random masks.
    masks: Mapping[str, int] = field(default_factory=dict)
    # Position (as text) of partial sums of rows (`schedules.tir.row_norm`) -> position of the rows that they are
    # computed from. Random sums would belong to no rows: their variances are near and below zero.
    partial_sums: Mapping[str, int] = field(default_factory=dict)
    # Position (as text) of sums of a matrix's columns -> position of the matrix, and the axis that is summed over.
    column_sums: Mapping[str, Sequence[int]] = field(default_factory=dict)
    own_tolerances: Mapping[int, KernelTolerance] = field(default_factory=dict)

    def tolerance_of(self, output: int) -> KernelTolerance:
        """Return the largest accepted difference of the output at a position."""
        return self.own_tolerances.get(output, self.tolerance)
