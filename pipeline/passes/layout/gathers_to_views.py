"""Pass: what is gathered place by place, each place once and in order, is the tensor itself.

`transformers` writes a mask of padding as `mask[rows, places]`, with index tensors made of ranges: what is gathered is
the mask itself, its axes moved. The index tensors are followed back to where they count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, is_constant, is_op, shape_of
from relaxtune.pipeline.passes.kit.known_values import Count, count_of_array
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, size_of, sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState

# Axes of the indices along which rows and places grow; None where there is one.
_Axes: TypeAlias = "tuple[int | None, int | None]"


def gathers_to_views(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with gathers that read each place of [rows, places, ...] once as views.

    ::

        take(reshape(data, [rows * places]), row * places + place)   ->   reshape(data)
        gather_nd(data, [row, place])                                ->   reshape(data)

    Places that the indices name several times along an axis, all of them, are a broadcast. What `gather_elements` reads
    in the order of its own axis is the tensor: ONNX Runtime's attention places the keys of each row so in its cache.
    """
    graph = Graph(mod)
    found: dict[relax.Var, tuple[tvm.ir.Expr, _Axes | None]] = {}
    for binding in graph.bindings:
        if _gathers_itself(binding.value, graph):
            found[binding.var] = binding.value.args[0], None
            continue
        data = _data_of(binding.value, graph)
        sizes = None if data is None else sizes_of(data)
        if data is None or sizes is None or len(sizes) < 2:
            continue
        axes = _gathered_axes(binding.value, graph, (sizes[0], sizes[1]))
        if axes is not None:
            found[binding.var] = data, axes
    return replace_found(mod, state, found, lambda new, binding, of: _view(new, binding, *of), "gathers are views")


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


def _gathers_itself(value: tvm.ir.Expr, graph: Graph) -> bool:
    """Return whether a call gathers each element of a tensor at its own place."""
    sizes = sizes_of(value.args[0]) if is_op(value, "gather_elements") else None
    if sizes is None or sizes != sizes_of(value.args[1]):
        return False
    steps = [0] * len(sizes)
    steps[int(value.attrs.axis)] = 0 if sizes[int(value.attrs.axis)] == 1 else 1
    return graph.known.count_of(value.args[1]) == Count(0, tuple(steps))


def _view(new: Rewriter, binding: relax.VarBinding, data: tvm.ir.Expr, axes: _Axes | None) -> tvm.ir.Expr:
    if axes is None:
        return new.of(data)
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
    if is_op(call, "take"):
        index = call.args[1]
        found = graph.known.count_of(index) if (sizes_of(call.args[0]) or (0,))[0] == sizes[0] * sizes[1] else None
        axes = None if found is None else _placed(found, sizes_of(index) or (), (sizes[1], 1), sizes)
        return None if axes is None else (axes[0], axes[1])
    # An index that counts up from 0 is never negative.
    indices, _ = graph.unwrapped(call.args[1]) or (call.args[1], None)
    shape = sizes_of(indices) or ()
    if is_constant(indices) and shape[-1:] == (2,):
        parts = [count_of_array(array_of(indices)[..., part : part + 1]) for part in range(2)]
    else:
        value = graph.value(indices)
        fields = value.args[0].fields if is_op(value, "concat") and isinstance(value.args[0], relax.Tuple) else []
        parts = [graph.known.count_of(part) for part in fields]
    if len(parts) != 2 or (sizes_of(call.args[0]) or ())[:2] != sizes:
        return None
    rows, places = (
        None if found is None else _placed(found, shape[:-1], (1,), sizes[part : part + 1])
        for part, found in enumerate(parts)
    )
    return None if rows is None or places is None else (rows[0], places[0])


def _placed(count: Count, shape: Shape, wanted: Sequence[Size], sizes: Sequence[Size]) -> tuple[int | None, ...] | None:
    """Return the axes along which an index grows from 0 by some steps, as far as some sizes; None for any other."""
    grows = {axis: step for axis, step in enumerate(count.steps) if step != 0}
    if count.start != 0:
        return None
    found: list[int | None] = []
    for step, size in zip(wanted, sizes, strict=True):
        axis = next((at for at, own in grows.items() if own == step and shape[at] == size), None)
        if axis is None and size != 1:
            return None
        if axis is not None:
            del grows[axis]
        found.append(axis)
    return None if grows else tuple(found)
