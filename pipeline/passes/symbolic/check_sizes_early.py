"""Pass: checks of sizes before tensors are moved and joined, not after."""

from __future__ import annotations

from typing import TypeAlias

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import dtype_of, equal_axes, is_op, shape_of
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState

Axes: TypeAlias = "list[tirx.Expr]"
# A tensor, and the axes that it has to have.
Part: TypeAlias = "tuple[tvm.ir.Expr, Axes]"


def check_sizes_early(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with checks of what a transpose or a concatenation gives as checks of what it is given.

    ::

        x = concat(token, permute_dims(patches));  y = match_cast(x, [batch, 17, width])
        ->   p = match_cast(patches, [batch, width, 16]);  y = concat(token, permute_dims(p))

    Nothing fuses over a check: what follows, such as the sum with positions, is one kernel with the concatenation then.
    A check stays where a result is read otherwise, too, where more than one part of a concatenation has no known size,
    and where it defines a size.
    """
    graph = Graph(mod)
    wanted: dict[relax.Var, Axes] = {}
    moved: dict[relax.Var, list[Part]] = {}
    for binding in reversed(graph.bindings):
        if isinstance(binding, relax.MatchCast):
            parts = _checks(binding)
        else:
            parts = _parts(binding.value, wanted[binding.var]) if binding.var in wanted else []
            if parts:
                moved[binding.var] = parts
        for part, sizes in parts:
            if graph.only_reader(part) is not None and not equal_axes(shape_of(part), sizes):
                wanted[part] = sizes
    if not moved:
        return mod
    state.note(f"{len(moved)} moved or joined tensors are checked before")

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        if binding.var not in moved:
            return None
        value, operands = binding.value, [_checked(new, *part) for part in moved[binding.var]]
        return relax.Call(value.op, [relax.Tuple(operands) if is_op(value, "concat") else operands[0]], value.attrs)

    return rewrite(mod, state, rule)


def _checks(binding: relax.MatchCast) -> list[Part]:
    """Return the tensor that is checked, and its axes; nothing where the check defines a size."""
    axes, known = shape_of(binding.var), set(relax.analysis.tir_vars_in_type(binding.value.ty))
    defines = not known.issuperset(relax.analysis.tir_vars_in_type(binding.var.ty))
    return [] if axes is None or defines else [(binding.value, axes)]


def _parts(value: tvm.ir.Expr, axes: Axes) -> list[Part]:
    """Return what is moved or joined, each with the axes that give those of the result; nothing for anything else."""
    if is_op(value, "permute_dims") and value.attrs.axes is not None:
        order = [int(axis) for axis in value.attrs.axes]
        return [(value.args[0], [axes[order.index(place)] for place in range(len(order))])]
    if not is_op(value, "concat") or not isinstance(value.args[0], relax.Tuple) or value.attrs.axis is None:
        return []
    parts, axis = list(value.args[0].fields), int(value.attrs.axis) % len(axes)
    shapes = [shape_of(part) for part in parts]
    sizes = [None if shape is None else shape[axis] for shape in shapes]
    known = [int(size) for size in sizes if isinstance(size, tirx.IntImm)]
    if None in shapes or not isinstance(axes[axis], tirx.IntImm) or len(known) + 1 < len(parts):
        return []
    rest = int(axes[axis]) - sum(known)
    if rest <= 0:
        return []
    own = [size if isinstance(size, tirx.IntImm) else tirx.IntImm("int64", rest) for size in sizes]
    return [(part, [*axes[:axis], size, *axes[axis + 1 :]]) for part, size in zip(parts, own, strict=True)]


def _checked(new: Rewriter, part: tvm.ir.Expr, axes: Axes) -> tvm.ir.Expr:
    given = new.of(part)
    same = equal_axes(shape_of(given), axes)
    return given if same else new.builder_.match_cast(given, relax.TensorType(axes, dtype_of(part)))
