"""Pass: slices written into a tensor, which exporters scatter, are parts of a concatenation."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, equal_axes, is_constant, is_op, shape_of, transposed_axes
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState

# Rows of a tensor, from one up to another.
_Rows: TypeAlias = tuple[tvm.ir.Expr, int, int]


def scatters_to_concat(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with rows that are scattered to constant, consecutive places as parts of a concatenation.

    ::

        x[..., :n] = a; x[..., n:] = b      exported as ScatterND of transposed a and b      ->   concat(a, b)

    The keys of multi-head latent attention are written so. Rows that are overwritten are left out. A transpose that all
    parts have stands behind the concatenation, where attention reads through it.
    """
    graph = Graph(mod)
    found = {
        binding.var: parts
        for binding in graph.bindings
        if _written_rows(binding.value) is not None and (parts := _parts(binding.var, graph)) is not None
    }

    def joined(new: Rewriter, binding: relax.VarBinding, parts: tuple[_Rows, ...]) -> tvm.ir.Expr:
        return _joined(new, binding.var, parts, graph)

    return replace_found(mod, state, found, joined, "scatters are concatenations")


def _written_rows(value: tvm.ir.Expr | None) -> tuple[int, int] | None:
    """Return the first row that a scatter writes, and the one after the last; None for any other expression."""
    if not is_op(value, "scatter_nd") or str(value.attrs.reduction) != "update":
        return None
    data, updates = shape_of(value.args[0]), shape_of(value.args[2])
    indices = array_of(value.args[1]) if is_constant(value.args[1]) else None
    if data is None or updates is None or indices is None or not indices.size or indices.shape[1:] != (1,):
        return None
    places = indices[:, 0]
    start, stop = int(places[0]), int(places[0]) + len(places)
    if not np.array_equal(places, np.arange(start, stop)) or not equal_axes(data[1:], updates[1:]):
        return None
    rows = _row_count(value.args[0])
    return (start, stop) if rows is not None and 0 <= start < stop <= rows else None


def _parts(expr: tvm.ir.Expr, graph: Graph) -> tuple[_Rows, ...] | None:
    """Return what the rows of a tensor are, in their order."""
    value = graph.value(expr)
    if is_op(value, "permute_dims") and transposed_axes(value) == sorted(transposed_axes(value)):
        # `simplify_views` leaves a transpose that moves nothing of two that undo each other.
        expr, value = value.args[0], graph.value(value.args[0])
    written = _written_rows(value)
    if written is None or not isinstance(value, relax.Call):
        count = _row_count(expr)
        return None if count is None else ((expr, 0, count),)
    below = _parts(value.args[0], graph)
    if below is None:
        return None
    start, stop = written
    before: list[_Rows] = []
    after: list[_Rows] = []
    place = 0
    for source, first, last in below:
        # Where the tensor's row `start`, and `stop`, is in the source.
        left, right = start - place + first, stop - place + first
        before += [(source, first, min(left, last))] if first < left else []
        after += [(source, max(right, first), last)] if right < last else []
        place += last - first
    return (*before, (value.args[2], 0, stop - start), *after)


def _joined(new: Rewriter, var: relax.Var, parts: tuple[_Rows, ...], graph: Graph) -> tvm.ir.Expr:
    whole = [source for source, first, last in parts if (first, last) == (0, _row_count(source))]
    moved = [value for value in map(graph.value, whole) if is_op(value, "permute_dims") and value.attrs.axes]
    axes = {tuple(map(int, value.attrs.axes)) for value in moved}
    if len(moved) == len(parts) and len(axes) == 1:
        (order,) = axes
        inner = relax.op.concat([new.of(value.args[0]) for value in moved], order[0])
        return relax.op.permute_dims(new.extra(f"{var.name}__joined", inner, [var]), order)
    pieces = []
    for source, first, last in parts:
        piece = new.of(source)
        if source not in whole:
            rows = relax.op.strided_slice(piece, [0], [first], [last], assume_inbound=True)
            piece = new.extra(f"{var.name}__rows_{first}", rows, [var])
        pieces.append(piece)
    return relax.op.concat(pieces, 0) if len(pieces) > 1 else pieces[0]


def _row_count(expr: tvm.ir.Expr) -> int | None:
    shape = shape_of(expr)
    return int(shape[0]) if shape and isinstance(shape[0], tirx.IntImm) else None
