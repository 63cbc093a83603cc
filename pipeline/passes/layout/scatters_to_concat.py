"""Pass: slices written into a tensor, which exporters scatter, are parts of a concatenation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, equal_axes, is_constant, is_op, shape_of
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState


@dataclass(frozen=True)
class _Rows:
    """Rows `start` to `stop` of a tensor."""

    source: tvm.ir.Expr
    start: int
    stop: int

    def cut(self, start: int, stop: int) -> _Rows | None:
        """Return some of these rows, counted from the first of them; None for none."""
        first, last = self.start + max(start, 0), self.start + min(stop, self.stop - self.start)
        return _Rows(self.source, first, last) if first < last else None

    @property
    def are_whole(self) -> bool:
        """Whether these are all rows of the tensor."""
        return self.start == 0 and self.stop == _row_count(self.source)


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
        if _written_rows(binding.value, graph) is not None and (parts := _parts(binding.var, graph)) is not None
    }
    if not found:
        return mod
    state.note(f"{len(found)} scatters are concatenations")
    return replace_found(mod, state, found, lambda new, binding, parts: _joined(new, binding.var, parts, graph))


def _written_rows(value: tvm.ir.Expr | None, graph: Graph) -> tuple[int, int] | None:
    """Return the first row that a scatter writes, and the one after the last; None for any other expression."""
    if not is_op(value, "scatter_nd") or str(value.attrs.reduction) != "update":
        return None
    data, indices, updates = shape_of(value.args[0]), _known(value.args[1], graph), shape_of(value.args[2])
    if data is None or updates is None or indices is None or indices.ndim != 2 or indices.shape[1:] != (1,):
        return None
    if not indices.size:
        return None
    places = indices[:, 0]
    start, stop = int(places[0]), int(places[0]) + len(places)
    if not np.array_equal(places, np.arange(start, stop)) or not equal_axes(data[1:], updates[1:]):
        return None
    rows = _row_count(value.args[0])
    return (start, stop) if rows is not None and 0 <= start < stop <= rows else None


def _known(expr: tvm.ir.Expr, graph: Graph) -> np.ndarray | None:
    """Return the elements of a tensor that are known, as of indices of which none is counted from the end."""
    if is_constant(expr):
        return array_of(expr)
    value = graph.value(expr)
    if not is_op(value, "where") or not is_constant(value.args[0]):
        return None
    condition = array_of(value.args[0])
    uniform = condition.size > 0 and bool((condition == condition.flat[0]).all())
    found = _known(value.args[1 if condition.flat[0] else 2], graph) if uniform else None
    return found if found is not None and found.shape == condition.shape else None


def _parts(expr: tvm.ir.Expr, graph: Graph) -> tuple[_Rows, ...] | None:
    """Return what the rows of a tensor are, in their order."""
    expr = _unturned(expr, graph)
    value = graph.value(expr)
    written = _written_rows(value, graph)
    if written is None or not isinstance(value, relax.Call):
        count = _row_count(expr)
        return None if count is None else (_Rows(expr, 0, count),)
    below = _parts(value.args[0], graph)
    if below is None:
        return None
    start, stop = written
    before: list[_Rows] = []
    after: list[_Rows] = []
    first = 0
    for rows in below:
        before += [part for part in [rows.cut(0, start - first)] if part]
        after += [part for part in [rows.cut(stop - first, rows.stop - rows.start)] if part]
        first += rows.stop - rows.start
    return (*before, _Rows(value.args[2], 0, stop - start), *after)


def _unturned(expr: tvm.ir.Expr, graph: Graph) -> tvm.ir.Expr:
    """Return what a transpose that moves nothing is of; `simplify_views` leaves one of two that undo each other."""
    value = graph.value(expr)
    if not is_op(value, "permute_dims") or not value.attrs.axes:
        return expr
    axes = [int(axis) for axis in value.attrs.axes]
    return value.args[0] if axes == list(range(len(axes))) else expr


def _joined(new: Rewriter, var: relax.Var, parts: tuple[_Rows, ...], graph: Graph) -> tvm.ir.Expr:
    values = [graph.value(part.source) for part in parts if part.are_whole]
    moved = [value for value in values if is_op(value, "permute_dims") and value.attrs.axes]
    axes = {tuple(map(int, value.attrs.axes)) for value in moved}
    if len(moved) == len(parts) and len(axes) == 1:
        (order,) = axes
        inner = relax.op.concat([new.of(value.args[0]) for value in moved], order[0])
        return relax.op.permute_dims(new.extra(f"{var.name}__joined", inner, [var]), order)
    pieces = [new.of(part.source) if part.are_whole else _slice(new, var, part) for part in parts]
    return relax.op.concat(pieces, 0) if len(pieces) > 1 else pieces[0]


def _slice(new: Rewriter, var: relax.Var, part: _Rows) -> relax.Var:
    rows = relax.op.strided_slice(new.of(part.source), [0], [part.start], [part.stop], assume_inbound=True)
    return new.extra(f"{var.name}__rows_{part.start}", rows, [var])


def _row_count(expr: tvm.ir.Expr) -> int | None:
    shape = shape_of(expr)
    return int(shape[0]) if shape and isinstance(shape[0], tirx.IntImm) else None
