"""Indices of 32 bits for functions whose loops TVM is to cut at their bound checks.

`LoopPartition` looks for the loop that its hint names. In a function with 64-bit indices, as Relax makes them, the pass
before it replaces every loop variable by a 32-bit one, the hint's own is forgotten, and nothing is cut: a vector loop
with a remainder then runs one lane at a time. With 32-bit indices from the start the hint holds.
"""

from __future__ import annotations

import math

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.tirx import PrimFunc

from relaxtune.schedules.cpu.base import PARTITION_HINT
from relaxtune.schedules.tir.blocks import static_shape
from relaxtune.schedules.tir.expressions import find_all

_ELEMENTS_MAX = 2**31 - 1


def narrow_partitioned(mod: IRModule) -> IRModule:
    """Return the scheduled module with 32-bit indices in the functions that ask for partitioned loops.

    Functions of symbolic shape, with 64-bit integer tensors, or with tensors that 32 bits cannot index stay as they
    are, and so does the module when there is nothing to narrow.
    """
    narrowed = {}
    for var, func in mod.functions_items():
        loops = find_all(func.body, tirx.For) if isinstance(func, PrimFunc) else []
        if any(PARTITION_HINT in loop.annotations for loop in loops) and all(map(_fits, func.params)):
            narrowed[var] = tvm.tirx.transform.ForceNarrowIndexToInt32()(IRModule({"main": func}))["main"]
    if not narrowed:
        return mod
    result = IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    for var, func in narrowed.items():
        result[var] = func
    return result


def _fits(param: tirx.Var) -> bool:
    shape = static_shape(param)
    return shape is not None and str(param.dtype) not in ("int64", "uint64") and math.prod(shape) <= _ELEMENTS_MAX
