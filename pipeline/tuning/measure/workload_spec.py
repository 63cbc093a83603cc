"""What is known of a workload where its candidates are measured: arguments, reference, tolerances."""

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
    """A compiled kernel: a shared object with the function `main`.

    Attributes
    ----------
    content
        Its bytes, or the URI where they lie; a path is a file of the machine that built it.
    sha256
        Of its bytes, in hexadecimal digits.
    resources
        What its kernels take of a GPU, told by the compiler.
    """

    content: bytes | str
    sha256: str
    resources: Resources = NO_RESOURCES


@dataclass(frozen=True)
class WorkloadSpec:
    """What the candidates of one workload are called and compared with.

    Attributes
    ----------
    workload
        Workload hash: candidates of one workload share arguments, reference and the best time so far.
    arguments
        Shape and dtype of every parameter.
    outputs
        Positions of the parameters that the kernel writes.
    index_ranges
        Parameter position -> exclusive upper bound of its integers.
    reference
        Computes the same on the CPU, or on the device where `reference_on_device`; None compares nothing.
    host_reference
        Computes the same on the CPU, where `reference` does so on the device. It decides about candidates that differ
        from what the device computed. None where there is none.
    best_s
        Best seconds of the workload when the candidate was submitted; None when nothing was measured.
    masks
        Position (as text) of a padding mask -> the number that hides nothing. The mask is full of it while a candidate
        is timed, as it mostly is in use; candidates are compared on random masks.
    partial_sums
        Position (as text) of partial sums of rows (`schedules.tir.row_norm`) -> position of the rows that they are
        computed from. Random sums would belong to no rows: their variances are near and below zero.
    column_sums
        Position (as text) of sums of a matrix's columns -> position of the matrix, and the axis that is summed over.
    tolerance, own_tolerances
        Largest accepted difference of an output; those of some outputs, by position, are their own.
    """

    workload: str
    arguments: tuple[ArgumentSpec, ...]
    outputs: tuple[int, ...]
    index_ranges: Mapping[int, int] = field(default_factory=dict)
    reference: BuiltArtifact | None = None
    reference_on_device: bool = False
    host_reference: BuiltArtifact | None = None
    best_s: float | None = None
    tolerance: KernelTolerance = field(kw_only=True)
    masks: Mapping[str, int] = field(default_factory=dict)
    partial_sums: Mapping[str, int] = field(default_factory=dict)
    column_sums: Mapping[str, Sequence[int]] = field(default_factory=dict)
    own_tolerances: Mapping[int, KernelTolerance] = field(default_factory=dict)

    def tolerance_of(self, output: int) -> KernelTolerance:
        """Return the largest accepted difference of the output at a position."""
        return self.own_tolerances.get(output, self.tolerance)
