"""Pass: kernels made of sizes alone stay out of groups that would define a size twice."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, main_of, shape_of, with_functions
from relaxtune.pipeline.passes.kit.rewrite import OPAQUE, pattern_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.tir.blocks import is_buffer


def keep_sizes_apart(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with functions that read no tensor and are given sizes as numbers marked as opaque where they must.

    Such a function writes a shape as a tensor. In a fused function the size becomes a parameter. Beside an axis that
    only the fused function's output has, such as that of positions, TVM (0.27) refuses the function: the size of the
    axis is a parameter, too, and defined a second time by the output. So the function stays apart where anything that
    could be in its group has such an axis.
    """
    apart: set[tvm.ir.GlobalVar] = set()
    # For each tensor, what could be in one group with it: functions of sizes, and axes that no input of the group has.
    groups: dict[relax.Var, tuple[set[tvm.ir.GlobalVar], set[tirx.Var]]] = {}
    for binding in bindings_of(main_of(mod)):
        called = called_function(binding.value)
        if called is None or pattern_of(mod[called]) == OPAQUE:
            continue
        tensors = [one for one in binding.value.args[1].fields if isinstance(one, relax.Var)]
        before = [groups[one] for one in tensors if one in groups]
        names = {called} if _made_of_sizes(mod[called]) else set()
        names = names.union(*(group[0] for group in before))
        new = _axes(binding.var).difference(*map(_axes, tensors)).union(*(group[1] for group in before))
        groups[binding.var] = names, new
        if new:
            apart |= names
    return with_functions(mod, {name: mod[name].with_attr("op_pattern", OPAQUE) for name in apart})


def _axes(tensor: relax.Var) -> set[tirx.Var]:
    """Return the sizes that a tensor defines: its axes that are one symbol."""
    return {axis for axis in shape_of(tensor) or () if isinstance(axis, tirx.Var)}


def _made_of_sizes(func: tirx.PrimFunc) -> bool:
    buffers = [param for param in func.params if is_buffer(param)]
    return len(buffers) == 1 and len(func.params) > 1
