"""The note that travels with a candidate from the tuner to the process that measures it.

MetaSchedule's builder and runner interfaces carry a module and the shapes of its arguments, no more. What else the
measuring process must know rides on an attribute of the PrimFunc; the builder takes it off and writes it as JSON beside
the artifact, where the runner finds it, on this machine or another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tvm

from relaxtune.pipeline.validate.tolerances import KernelTolerance

_ATTR = "relaxtune.note"


@dataclass(frozen=True)
class CandidateNote:
    """What the measuring process must know of a candidate.

    Attributes
    ----------
    workload
        Workload hash: candidates of one workload share arguments, reference and the best time so far.
    index_ranges
        Parameter position (as text) -> exclusive upper bound of its integers.
    outputs
        Positions of the parameters that the kernel writes.
    reference
        Shared object that computes the same on the CPU, or on the device where `reference_on_device`; None compares
        nothing.
    host_reference
        Shared object that computes the same on the CPU, where `reference` does so on the device: who differs from what
        the device made is compared with what the CPU makes. None where there is none.
    best_s
        Best seconds of the workload known when the candidate was handed in; None when nothing was.
    masks
        Position (as text) of a mask of padding -> the number that hides nothing, of which it is full while a candidate
        is timed, as it mostly is in use; candidates are compared on random ones.
    partial_sums
        Position (as text) of partial sums of rows (`schedules.tir.row_norm`) -> position of the rows, of which
        they are computed: random ones would be of no rows at all, with variances near and below zero.
    column_sums
        Position (as text) of sums of a matrix's columns -> position of the matrix, and the axis that is summed over.
    rtol, atol, accumulated, steps
        Largest accepted difference, see `pipeline.validate.tolerances.KernelTolerance`.
    own_tolerances
        Position (as text) of an output -> the fields of a tolerance of its own.
    """

    workload: str
    index_ranges: Mapping[str, int]
    outputs: tuple[int, ...]
    reference: str | None = None
    reference_on_device: bool = False
    host_reference: str | None = None
    best_s: float | None = None
    rtol: float = 0.0
    atol: float = 0.0
    accumulated: float = 0.0
    steps: float = 0.0
    masks: Mapping[str, int] = field(default_factory=dict)
    partial_sums: Mapping[str, int] = field(default_factory=dict)
    column_sums: Mapping[str, Sequence[int]] = field(default_factory=dict)
    own_tolerances: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def tolerance_of(self, output: int) -> KernelTolerance:
        """Return the largest accepted difference of the output at a position."""
        own = self.own_tolerances.get(str(output))
        if own is None:
            return KernelTolerance(self.rtol, self.atol, self.accumulated, steps=self.steps)
        return KernelTolerance(own["rtol"], own["atol"], own["accumulated"], int(own["quantities"]))


def attach_note(mod: tvm.ir.IRModule, note: CandidateNote) -> tvm.ir.IRModule:
    """Return the module with the note on its `main`."""
    return tvm.ir.IRModule({**_functions(mod), "main": mod["main"].with_attr(_ATTR, json.dumps(asdict(note)))})


def take_note(mod: tvm.ir.IRModule) -> tuple[tvm.ir.IRModule, dict[str, object] | None]:
    """Return the module without its note, and the note's fields; None when it has none."""
    attrs = mod["main"].attrs
    if not attrs or _ATTR not in attrs:
        return mod, None
    note = dict(json.loads(str(attrs[_ATTR])))
    return tvm.ir.IRModule({**_functions(mod), "main": mod["main"].without_attr(_ATTR)}), note


def read_note(artifact_path: str) -> CandidateNote | None:
    """Return the note beside an artifact, or None when there is none."""
    path = Path(artifact_path).with_suffix(".json")
    if not path.exists():
        return None
    fields = json.loads(path.read_text())
    return CandidateNote(**{**fields, "outputs": tuple(fields["outputs"])})


def _functions(mod: tvm.ir.IRModule) -> dict[str, tvm.ir.BaseFunc]:
    return {var.name_hint: func for var, func in mod.functions.items()}
