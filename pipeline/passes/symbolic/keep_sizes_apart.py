"""Pass: kernels made of sizes alone stay out of groups that would define a size twice."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, main_of, shape_of
from relaxtune.pipeline.passes.kit.rewrite import OPAQUE, pattern_of, with_opaque_calls
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.tir.blocks import is_buffer


def keep_sizes_apart(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with calls that read no tensor and are given sizes as numbers as opaque ones where they must be.

    Such a function writes a shape as a tensor. In a fused function the size becomes a parameter. Beside an axis that
    only the fused function's output has, such as that of positions, TVM (0.27) refuses the function: the size of the
    axis is a parameter, too, and defined a second time by the output. So a call stays apart where anything that could
    be in its group has such an axis, and nothing that is between the two reads a tensor with it. Several readers share
    it then.
    """
    apart: set[relax.Var] = set()
    # For each tensor, what could be in one group with it: calls with sizes, each with the axes that inputs of the group
    # have if both are in it, and axes that no input of the group has.
    groups: dict[relax.Var, tuple[dict[relax.Var, set[tirx.Var]], set[tirx.Var]]] = {}
    for binding in bindings_of(main_of(mod)):
        called = called_function(binding.value)
        if called is None or pattern_of(mod[called]) == OPAQUE:
            continue
        tensors = [one for one in binding.value.args[1].fields if isinstance(one, relax.Var)]
        read = set[tirx.Var]().union(*(_axes(one) - groups.get(one, ({}, set()))[1] for one in tensors))
        new = _axes(binding.var).difference(*map(_axes, tensors))
        buffers = [param for param in mod[called].params if is_buffer(param)]
        sized = {binding.var: read} if (len(buffers) == 1 and len(mod[called].params) > 1) else {}
        for before, unread in (groups[one] for one in tensors if one in groups):
            new |= unread
            for var, axes in before.items():
                sized[var] = sized.get(var, axes | read) & (axes | read)
        groups[binding.var] = sized, new
        apart |= {var for var, axes in sized.items() if new - axes}
    return with_opaque_calls(mod, state, apart)


def _axes(tensor: relax.Var) -> set[tirx.Var]:
    """Return the sizes that a tensor defines: its axes that are one symbol."""
    return {axis for axis in shape_of(tensor) or () if isinstance(axis, tirx.Var)}
