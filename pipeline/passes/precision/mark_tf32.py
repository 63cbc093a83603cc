"""Pass: tell kernels whose float32 matmul may multiply in tf32, under precision "tf32"."""

from __future__ import annotations

import tvm
from tvm import tirx

from relaxtune.pipeline.passes.kit.ir import with_functions
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.marks import TF32_ATTR
from relaxtune.schedules.search.tensor_tile import has_tensor_tiles, multiplies_float32


def mark_tf32(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with an attribute on the PrimFuncs that tensor cores may multiply in tf32.

    Only after `round_to_tf32`, for CUDA targets that have tf32, and matmuls of float32 that the search has a space for:
    to be marked tells a task apart from the same one in float32, whose records must not serve it, nor its records that.
    Tensor cores read 19 bits of an operand; what the rounding pass has not seen would be truncated.
    """
    if not state.tf32 or not has_tensor_tiles(state.target):
        return mod
    marked = {
        var: func.with_attr(TF32_ATTR, True)
        for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and multiplies_float32(func)
    }
    state.note(f"{len(marked)} kernels may multiply in tf32")
    return with_functions(mod, marked)
