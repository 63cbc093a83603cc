"""Pass: what is gathered place by place, each place once and in order, is the tensor itself.

`transformers` writes a mask of padding as `mask[rows, places]`, with index tensors made of ranges: what is gathered is
the mask itself, its axes moved. The index tensors are followed back to where they count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, is_constant, is_op, number_of, shape_of
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, plain, size_of, sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.symbolic.symbolic_moves import group_axes

# How much an index grows along each axis of its tensor; it begins with 0.
_Steps: TypeAlias = "tuple[Size, ...]"
# Axes of the indices along which rows and places grow; None where there is one.
_Axes: TypeAlias = "tuple[int | None, int | None]"
_DEPTH_MAX = 24


def gathers_to_views(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with gathers that read each place of [rows, places, ...] once as views.

    ::

        take(reshape(data, [rows * places]), row * places + place)   ->   reshape(data)
        gather_nd(data, [row, place])                                ->   reshape(data)

    Places that the indices name several times along an axis, all of them, are a broadcast.
    """
    graph = Graph(mod)
    found: dict[relax.Var, tuple[tvm.ir.Expr, _Axes]] = {}
    for binding in graph.bindings:
        data = _data_of(binding.value, graph)
        sizes = None if data is None else sizes_of(data)
        if data is None or sizes is None or len(sizes) < 2:
            continue
        axes = _gathered_axes(binding.value, graph, (sizes[0], sizes[1]))
        if axes is not None:
            found[binding.var] = data, axes
    if not found:
        return mod
    state.note(f"{len(found)} gathers are views")
    return replace_found(mod, state, found, lambda new, binding, of: _view(new, binding, *of))


def _data_of(value: tvm.ir.Expr, graph: Graph) -> tvm.ir.Expr | None:
    """Return the tensor [rows, places, ...] of which a call may gather."""
    if is_op(value, "gather_nd"):
        return value.args[0] if int(value.attrs.batch_dims) == 0 else None
    if not is_op(value, "take") or value.attrs.axis is None or int(value.attrs.axis) != 0:
        return None
    flat = graph.value(value.args[0])
    if not is_op(flat, "reshape"):
        return None
    inner, outer = sizes_of(flat.args[0]), sizes_of(flat)
    if inner is None or outer is None or _without_ones(inner[2:]) != _without_ones(outer[1:]):
        return None
    return flat.args[0]


def _without_ones(shape: Shape) -> list[Size]:
    return [size for size in shape if size != 1]


def _view(new: Rewriter, binding: relax.VarBinding, data: tvm.ir.Expr, axes: _Axes) -> tvm.ir.Expr:
    shape, index = shape_of(binding.var) or [], shape_of(binding.value.args[1]) or []
    placed = len(index) - (0 if is_op(binding.value, "take") else 1)
    spread = [axis for axis in range(placed) if axis not in axes and size_of(shape[axis]) != 1]
    value, (rows, places) = new.of(data), axes
    if rows is not None and places is not None and rows > places:
        value = new.emit(relax.op.permute_dims(value, [1, 0, *range(2, len(shape_of(data) or ()))]))
    once = [tirx.IntImm("int64", 1) if axis in spread else size for axis, size in enumerate(shape)]
    view = relax.op.reshape(value, relax.ShapeExpr(once))
    return relax.op.broadcast_to(new.emit(view), relax.ShapeExpr(shape)) if spread else view


def _gathered_axes(call: tvm.ir.Expr, graph: Graph, sizes: tuple[Size, Size]) -> _Axes | None:
    """Return which axes of a gather's indices are rows and places, where it reads each place of [rows, places] once.

    None for an axis of one row or place; None alone for any other gather.
    """
    steps: list[_Steps | None]
    if is_op(call, "take"):
        index = call.args[1]
        found = _steps(index, graph) if (sizes_of(call.args[0]) or (0,))[0] == sizes[0] * sizes[1] else None
        axes = None if found is None else _placed(found, sizes_of(index) or (), (sizes[1], 1), sizes)
        return None if axes is None else (axes[0], axes[1])
    indices = _without_wrap(call.args[1], graph)
    shape = sizes_of(indices) or ()
    if is_constant(indices) and shape[-1:] == (2,):
        steps = [_of_array(array_of(indices)[..., part]) for part in range(2)]
    else:
        value = graph.value(indices)
        parts = list(value.args[0].fields) if is_op(value, "concat") and isinstance(value.args[0], relax.Tuple) else []
        steps = [None if found is None else found[:-1] for found in (_steps(part, graph) for part in parts)]
    if len(steps) != 2 or (sizes_of(call.args[0]) or ())[:2] != sizes:
        return None
    rows, places = (
        None if found is None else _placed(found, shape[:-1], (1,), sizes[part : part + 1])
        for part, found in enumerate(steps)
    )
    return None if rows is None or places is None else (rows[0], places[0])


def _placed(
    steps: _Steps, shape: Shape, wanted: Sequence[Size], sizes: Sequence[Size]
) -> tuple[int | None, ...] | None:
    """Return the axes along which an index grows by some steps, as far as some sizes; None where it grows otherwise."""
    grows = {axis: step for axis, step in enumerate(steps) if step != 0 and shape[axis] != 1}
    found: list[int | None] = []
    for step, size in zip(wanted, sizes, strict=True):
        axis = next((at for at, own in grows.items() if own == step and shape[at] == size), None)
        if axis is None and size != 1:
            return None
        if axis is not None:
            del grows[axis]
        found.append(axis)
    return None if grows else tuple(found)


def _without_wrap(expr: tvm.ir.Expr, graph: Graph) -> tvm.ir.Expr:
    """Return x of `where(x < 0, x + size, x)`: an index that counts up from 0 is never negative."""
    value = graph.value(expr)
    if not is_op(value, "where"):
        return expr
    condition, _, plain = value.args
    test = graph.value(condition)
    below = is_op(test, "less") and test.args[0] == plain and number_of(test.args[1], plain) == 0.0
    return plain if below else expr


def _steps(expr: tvm.ir.Expr, graph: Graph, depth: int = 0) -> _Steps | None:
    expr = _without_wrap(expr, graph)
    if is_constant(expr):
        return _of_array(array_of(expr))
    value, shape = graph.value(expr), sizes_of(expr)
    if not isinstance(value, relax.Call) or shape is None or depth == _DEPTH_MAX:
        return None
    if is_op(value, "arange"):
        start, _, step = (size_of(one) if isinstance(one, tirx.Expr) else None for one in value.args[:3])
        return (1,) if start == 0 and step == 1 else None
    if is_op(value, "multiply"):
        for index, factor in (value.args, value.args[::-1]):
            found, by = _steps(index, graph, depth + 1), _size_of_tensor(factor, graph)
            if found is not None and by is not None:
                return (*[0] * (len(shape) - len(found)), *(step * by for step in found))
        return None
    if is_op(value, "add"):
        parts = [_steps(one, graph, depth + 1) for one in value.args]
        if any(one is None for one in parts):
            return None
        wide = [(*[0] * (len(shape) - len(one)), *one) for one in parts if one is not None]
        return tuple(a + b for a, b in zip(*wide, strict=True))
    if not is_op(value, "expand_dims", "squeeze", "reshape", "broadcast_to", "astype"):
        return None
    inner, before = _steps(value.args[0], graph, depth + 1), sizes_of(value.args[0])
    if inner is None or before is None:
        return None
    if is_op(value, "broadcast_to"):
        return (
            *[0] * (len(shape) - len(inner)),
            *(0 if size == 1 else step for step, size in zip(inner, before, strict=True)),
        )
    groups = group_axes(before, shape)
    if groups is None or any(len(inputs) > 1 for inputs, _ in groups):
        return None
    grown: list[Size] = [0] * len(shape)
    for (axis,), outputs in groups:
        for place, output in enumerate(outputs):
            grown[output] = plain(inner[axis] * math.prod(shape[other] for other in outputs[place + 1 :]))
    return tuple(grown)


def _of_array(array: np.ndarray) -> _Steps | None:
    """Return how a constant counts up from 0 along its axes, None where it does not."""
    if array.dtype.kind not in "iu" or array.size == 0:
        return None
    origin = (0,) * array.ndim
    steps = tuple(
        int(array[(*origin[:axis], 1, *origin[axis + 1 :])]) if size > 1 else 0 for axis, size in enumerate(array.shape)
    )
    grid = np.indices(array.shape)
    expected = sum((grid[axis] * step for axis, step in enumerate(steps)), np.zeros(array.shape, array.dtype))
    return steps if min(steps, default=0) >= 0 and np.array_equal(array, expected) else None


def _size_of_tensor(expr: tvm.ir.Expr, graph: Graph) -> Size | None:
    """Return the size that a tensor of one number holds."""
    if is_constant(expr):
        array = array_of(expr)
        return int(array.flat[0]) if array.size == 1 and array.dtype.kind in "iu" else None
    value = graph.value(expr)
    while is_op(value, "reshape", "expand_dims", "squeeze", "astype"):
        value = graph.value(value.args[0])
    shape = value.args[0] if is_op(value, "shape_to_tensor") else None
    sizes = list(shape.values) if isinstance(shape, relax.ShapeExpr) else []
    return size_of(sizes[0]) if len(sizes) == 1 else None
