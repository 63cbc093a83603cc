"""Pass: reshapes, transposes, casts and arithmetic that change nothing, or that one of them can do."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm_ffi import structural_equal

from relaxtune.pipeline.passes.kit.ir import (
    array_of,
    dtype_of,
    emit_named,
    is_constant,
    is_op,
    rewrite_main,
    scalar_of,
    shape_of,
    static_shape,
)
from relaxtune.pipeline.passes.kit.state import LoweringState

_MOVES = ("reshape", "permute_dims", "expand_dims", "squeeze", "broadcast_to", "strided_slice")
_NEUTRAL = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "divide": 1.0}


def simplify_views(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with chains of reshapes and of transposes as one each, and without operations that change nothing.

    Nothing is changed by a reshape, broadcast or cast to what the tensor is, a transpose in the old order, `x + 0`,
    `x - 0`, `x * 1`, `x / 1`; `split` and `take` of one position become slices, which fuse into their readers. Matmuls
    of [1, S, H] by [H, N] keep their three axes: the schedules treat an axis of length one as no axis.
    """
    return rewrite_main(mod, _Simplify(state))


@mutator
class _Simplify(PyExprMutator):  # type: ignore[misc]
    def __init__(self, state: LoweringState) -> None:
        super().__init__()
        self._state = state
        self._splits: dict[relax.Var, relax.Call] = {}

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, value = binding.var, binding.value
        if is_op(value, "split") and _split_points(value) is not None:
            self._splits[var] = value  # `emit_named` of each part makes the split itself dead
        new = self._simplified(var, value)
        if new is None:
            super().visit_var_binding_(binding)
        elif isinstance(new, relax.Var) and isinstance(var, relax.DataflowVar):
            self.set_var_remap(var, new)
        else:
            emit_named(self, var, new)

    def _simplified(self, var: relax.Var, value: tvm.ir.Expr) -> tvm.ir.Expr | None:
        """Return a simpler expression of the new function, None when there is none."""
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self._splits:
            return self._slice(self._splits[value.tuple_value], int(value.index))
        if not isinstance(value, relax.Call):
            return None
        kept = self._unchanged(value)
        if kept is not None:
            return self.visit_expr(kept)
        if is_op(value, "take"):
            return self._row(value)
        if not is_op(value, "reshape", "permute_dims"):
            return None
        data = self.visit_expr(value.args[0])
        inner = self.lookup_binding(data) if isinstance(data, relax.Var) else None
        if is_op(inner, value.op.name.removeprefix("relax.")):
            self._state.sources[var.name] = self._state.nodes_of([data.name, var.name])
        if is_op(value, "reshape") and is_op(inner, "reshape"):
            return relax.op.reshape(inner.args[0], self.visit_expr(value.args[1]))
        if is_op(value, "permute_dims") and is_op(inner, "permute_dims"):
            outer_axes, inner_axes = _axes(value), _axes(inner)
            return relax.op.permute_dims(inner.args[0], [inner_axes[axis] for axis in outer_axes])
        return None

    def _unchanged(self, value: relax.Call) -> tvm.ir.Expr | None:
        """Return the operand that `value` is equal to, None when there is none."""
        if is_op(value, *_NEUTRAL):
            neutral = _NEUTRAL[value.op.name.removeprefix("relax.")]
            left, right = value.args
            if scalar_of(right) == neutral and _same_type(left, value):
                return left
            if is_op(value, "add", "multiply") and scalar_of(left) == neutral and _same_type(right, value):
                return right
            return None
        if is_op(value, "permute_dims"):
            return value.args[0] if _axes(value) == sorted(_axes(value)) else None
        if is_op(value, *_MOVES, "astype") and _same_type(value.args[0], value):
            strided = is_op(value, "strided_slice") and len(value.args) > 4
            return None if strided else value.args[0]
        return None

    def _row(self, take: relax.Call) -> tvm.ir.Expr | None:
        """Return `x[..., i, ...]` for a number i as a slice."""
        data, index = take.args
        shape = shape_of(data)
        if take.attrs.axis is None or not is_constant(index) or static_shape(index) != () or shape is None:
            return None
        axis, at = int(take.attrs.axis) % len(shape), int(array_of(index))
        if not isinstance(shape[axis], tvm.tirx.IntImm) or not 0 <= at < int(shape[axis]):
            return None
        row = relax.op.strided_slice(self.visit_expr(data), [axis], [at], [at + 1], assume_inbound=True)
        return relax.op.squeeze(self.builder_.emit(row), [axis])

    def _slice(self, split: relax.Call, index: int) -> tvm.ir.Expr:
        data = self.visit_expr(split.args[0])
        ends = _split_points(split) or []
        axis = int(split.attrs.axis) % int(data.ty.ndim)
        start = ends[index - 1] if index else 0
        if index < len(ends):
            return relax.op.strided_slice(data, [axis], [start], [ends[index]], assume_inbound=True)
        return relax.op.strided_slice(data, [axis], [start], [data.ty.shape.values[axis]], assume_inbound=True)


def _split_points(split: relax.Call) -> list[int] | None:
    """Return where the parts of a split after the first start, None when it depends on a symbolic axis."""
    sections = split.attrs.indices_or_sections
    if not isinstance(sections, int | tvm.tirx.IntImm):
        return [int(point) for point in sections]
    shape = shape_of(split.args[0])
    length = shape[int(split.attrs.axis)] if shape is not None else None
    if not isinstance(length, tvm.tirx.IntImm):
        return None
    step = -(-int(length) // int(sections))
    return list(range(step, int(length), step))


def _axes(call: relax.Call) -> list[int]:
    """Return the axes of a transpose; none given means reversed."""
    ndim = int(call.args[0].ty.ndim)
    axes = call.attrs.axes
    return list(range(ndim))[::-1] if axes is None else [int(axis) % ndim for axis in axes]


def _same_type(old: tvm.ir.Expr, new: tvm.ir.Expr) -> bool:
    """Return whether two tensors have one known shape and dtype."""
    old_shape, new_shape = shape_of(old), shape_of(new)
    if old_shape is None or new_shape is None or len(old_shape) != len(new_shape) or dtype_of(old) != dtype_of(new):
        return False
    return isinstance(old, relax.Var) and all(structural_equal(a, b) for a, b in zip(old_shape, new_shape, strict=True))
