"""Pass: reshapes, transposes and casts that change nothing, or that one of them can do."""

from __future__ import annotations

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import (
    array_of,
    dtype_of,
    is_constant,
    is_op,
    same_shape,
    shape_of,
    static_shape,
    transposed_axes,
)
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.sizes import group_axes, listed_sizes, sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState

_MOVES = ("reshape", "permute_dims", "expand_dims", "squeeze", "broadcast_to", "strided_slice")


def simplify_views(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with chains of reshapes and of transposes as one each, and without operations that change nothing.

    Nothing is changed by a reshape, broadcast or cast to what the tensor is, and by a transpose in the old order;
    `split` and `take` of one position become slices, which fuse into their readers. Axes that are merged, moved as one
    and taken apart are a transpose: torch writes keys of [B, H, S, D] so. Matmuls of [1, S, H] by [H, N] keep their
    three axes: the schedules treat an axis of length one as no axis.
    """
    splits: dict[relax.Var, relax.Call] = {}

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        var, value = binding.var, binding.value
        if is_op(value, "split") and _split_points(value) is not None:
            splits[var] = value  # its parts become slices, which leaves the split without a reader
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in splits:
            split, index = splits[value.tuple_value], int(value.index)
            data, axis = new.of(split.args[0]), int(split.attrs.axis) % int(split.args[0].ty.ndim)
            ends = [0, *(_split_points(split) or []), data.ty.shape.values[axis]]
            return relax.op.strided_slice(data, [axis], [ends[index]], [ends[index + 1]], assume_inbound=True)
        if not isinstance(value, relax.Call):
            return None
        kept = _unchanged(value)
        if kept is not None:
            return new.of(kept)
        if is_op(value, "take"):
            return _row(new, value)
        if not is_op(value, "reshape", "permute_dims"):
            return None
        data = new.of(value.args[0])
        inner = new.lookup_binding(data) if isinstance(data, relax.Var) else None
        if is_op(inner, value.op.name.removeprefix("relax.")):
            state.sources[var.name] = state.nodes_of([data.name, var.name])
        if is_op(value, "reshape") and is_op(inner, "reshape"):
            return relax.op.reshape(inner.args[0], new.of(value.args[1]))
        if is_op(value, "reshape") and is_op(inner, "permute_dims"):
            return _moved_as_one(new, value, inner)
        if is_op(value, "permute_dims") and is_op(inner, "permute_dims"):
            return _transposed(new, data, transposed_axes(value))
        return None

    return rewrite(mod, state, rule)


def _transposed(new: Rewriter, data: tvm.ir.Expr, axes: list[int]) -> tvm.ir.Expr:
    """Return a transpose of what may be one itself."""
    inner = new.lookup_binding(data) if isinstance(data, relax.Var) else None
    if not is_op(inner, "permute_dims"):
        return relax.op.permute_dims(data, axes)
    before = transposed_axes(inner)
    return relax.op.permute_dims(inner.args[0], [before[axis] for axis in axes])


def _moved_as_one(new: Rewriter, value: relax.Call, transpose: relax.Call) -> tvm.ir.Expr | None:
    """Return a reshape of a transpose of a reshape as one transpose, where the last one takes apart what is merged."""
    flat = transpose.args[0]
    merge = new.lookup_binding(flat) if isinstance(flat, relax.Var) else None
    if not is_op(merge, "reshape"):
        return None
    before, merged, after = sizes_of(merge.args[0]), sizes_of(flat), sizes_of(value)
    groups = None if before is None or merged is None else group_axes(before, merged)
    if groups is None or before is None or any(len(inner) != 1 for _, inner in groups):
        return None
    parts = {inner[0]: outer for outer, inner in groups}
    order = [axis for place in transposed_axes(transpose) for axis in parts.get(place, ())]
    if sorted(order) != list(range(len(before))) or tuple(before[axis] for axis in order) != after:
        return None
    return _transposed(new, merge.args[0], order)


def _unchanged(value: relax.Call) -> tvm.ir.Expr | None:
    """Return the operand that `value` is equal to, None when there is none."""
    if is_op(value, "permute_dims"):
        return value.args[0] if transposed_axes(value) == sorted(transposed_axes(value)) else None
    data = value.args[0] if is_op(value, *_MOVES, "astype") else None
    if isinstance(data, relax.Var) and dtype_of(data) == dtype_of(value) and same_shape(data, value):
        steps = listed_sizes(value.args[4]) if is_op(value, "strided_slice") and len(value.args) > 4 else []
        return data if steps is not None and all(step == 1 for step in steps) else None
    return None


def _row(new: Rewriter, take: relax.Call) -> tvm.ir.Expr | None:
    """Return `x[..., i, ...]` for a number i as a slice; of an axis of unknown size its first place alone is sure."""
    data, index = take.args
    shape = shape_of(data)
    if take.attrs.axis is None or not is_constant(index) or static_shape(index) != () or shape is None:
        return None
    axis, at = int(take.attrs.axis) % len(shape), int(array_of(index))
    known = int(shape[axis]) if isinstance(shape[axis], tvm.tirx.IntImm) else 1
    if not 0 <= at < known:
        return None
    row = relax.op.strided_slice(new.of(data), [axis], [at], [at + 1], assume_inbound=True)
    return relax.op.squeeze(new.emit(row), [axis])


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
