"""Pass: kernels made of sizes alone stay out of the groups that are fused."""

from __future__ import annotations

import tvm
from tvm import tirx

from relaxtune.pipeline.passes.kit.ir import with_functions
from relaxtune.pipeline.passes.kit.rewrite import OPAQUE
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.tir.blocks import is_buffer


def keep_sizes_apart(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with functions that read no tensor and are given sizes as numbers marked as opaque.

    Such a function writes a shape as a tensor. In a group without an input that has the same symbolic axis, the size
    becomes a parameter of the fused function beside an output of that size, which defines it a second time, and
    TVM refuses the function.
    """
    made_of_sizes = {
        name: func.with_attr("op_pattern", OPAQUE)
        for name, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and _made_of_sizes(func)
    }
    return with_functions(mod, made_of_sizes)


def _made_of_sizes(func: tirx.PrimFunc) -> bool:
    buffers = [param for param in func.params if is_buffer(param)]
    return len(buffers) == 1 and len(func.params) > 1
