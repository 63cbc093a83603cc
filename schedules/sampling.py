"""The function that samples tokens, made for a target."""

from __future__ import annotations

from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.sampling import sampling_loops
from relaxtune.schedules.functions.sampling import SamplingSpec
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.sampling import sampling_kernel


def sampling_function(spec: SamplingSpec, target: ResolvedTarget) -> PrimFunc:
    """Return the scheduled function with the parameters `spec.inputs` and `spec.outputs`."""
    return sampling_kernel(spec, target) if target.kind == "cuda" else sampling_loops(spec)
