"""The function that samples tokens, made for a target."""

from __future__ import annotations

from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.sampling import sampling_loops
from relaxtune.schedules.errors import TargetError
from relaxtune.schedules.functions.sampling import SamplingSpec
from relaxtune.schedules.targets import ResolvedTarget


def sampling_function(spec: SamplingSpec, target: ResolvedTarget) -> PrimFunc:
    """Return the scheduled function with the parameters `spec.inputs` and `spec.outputs`.

    Raises
    ------
    TargetError
        The target is no CPU.
    """
    if target.kind != "llvm":
        raise TargetError(f"tokens are sampled on CPUs alone, got {target.kind}; compile for llvm.")
    return sampling_loops(spec)
