"""Pass: kernels made of sizes alone stay out of the groups that are fused."""

from __future__ import annotations

import tvm
from tvm import tirx

from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.tir.functions import is_buffer

# `OpPatternKind::kOpaque` of TVM: fuses with nothing.
_OPAQUE = 8


def keep_sizes_apart(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with functions that read no tensor and are given sizes as numbers marked as opaque.

    Such a function writes a shape as a tensor. In a group without an input that has the same symbolic axis, the size
    becomes a parameter of the fused function beside an output of that size, which defines it a second time, and
    TVM refuses the function.
    """
    result = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc) and _made_of_sizes(func):
            result[name] = func.with_attr("op_pattern", _OPAQUE)
    return result


def _made_of_sizes(func: tirx.PrimFunc) -> bool:
    buffers = [param for param in func.params if is_buffer(param)]
    return len(buffers) == 1 and len(func.params) > 1
