"""Pass: look-ups of rows (embeddings), and of elements, in a form that fuses with what is around them."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, te, tirx

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import is_op, same_shape, shape_of
from relaxtune.pipeline.passes.kit.rewrite import INJECTIVE, Rewriter, replace_found
from relaxtune.pipeline.passes.kit.sizes import size_of, sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState


def gather_rows(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with `take(table, ids, axis=0)` as a PrimFunc that counts as injective.

    ::

        ids' = where(ids < 0, ids + V, ids); words = take(table, ids')     ->   one kernel with the sums behind it
        hidden = words + take(types, ...) + positions

    TVM counts a gather as opaque, so every look-up was two kernels, and their sum another. Indices count from the end
    where they are negative, and are kept within the table, as before. A table has rows of one axis, or of none; how
    many there are may be symbolic (the tokens of an expert). `gather_elements` (the relative positions of DeBERTa) and
    `gather_nd` by tuples of one index are such look-ups, too. On CUDA.
    """
    if not state.launches_cost:
        return mod
    graph = Graph(mod)
    found: dict[relax.Var, tuple[tvm.ir.Expr, bool]] = {}
    for binding in graph.bindings:
        value = binding.value
        if is_op(value, "gather_elements"):
            found[binding.var] = value.args[1], False
            continue
        if not _gathers_rows(value):
            continue
        plain = _unwrapped(value, graph)
        found[binding.var] = (value.args[1] if plain is None else plain, plain is not None)
        if plain is not None:
            state.sources[binding.var.name] = state.nodes_of([value.args[1].name, binding.var.name])

    def gather(new: Rewriter, binding: relax.VarBinding, found: tuple[tvm.ir.Expr, bool]) -> tvm.ir.Expr:
        value, (ids, wrap) = binding.value, found
        if is_op(value, "gather_elements"):
            compute = _elements(int(value.attrs.axis))
        else:
            compute = _rows(wrap, in_tuples=is_op(value, "gather_nd"))
        return new.kernel(compute, new.of(value.args[0]), new.of(ids), name="gather", op_pattern=INJECTIVE)

    return replace_found(mod, state, found, gather)


def _gathers_rows(value: tvm.ir.Expr) -> bool:
    """Return whether a call gathers rows of a table, or elements of a list, by indices or by tuples of one index."""
    if not is_op(value, "take", "gather_nd") or not isinstance(value.args[1], relax.Var):
        return False
    table, ids = shape_of(value.args[0]), shape_of(value.args[1])
    if table is None or not 0 < len(table) <= 2 or not ids:
        return False
    if is_op(value, "take"):
        return value.attrs.axis is not None and int(value.attrs.axis) == 0
    return size_of(ids[-1]) == 1 and not int(value.attrs.batch_dims)


def _unwrapped(call: relax.Call, graph: Graph) -> relax.Var | None:
    """Return x when a table of `rows` rows is read at `where(x < 0, x + rows, x)`."""
    table, ids = call.args
    plain, added = graph.unwrapped(ids) or (None, None)
    if not isinstance(plain, relax.Var) or not same_shape(ids, plain):
        return None
    rows = (sizes_of(table) or (None,))[0]
    return plain if graph.known.bounds_of(added) == (rows, rows) else None


def _elements(axis: int) -> Callable[[te.Tensor, te.Tensor], te.Tensor]:
    """Return the tensor expression of data by indices along an axis, at the same place along the others."""

    def compute(data: te.Tensor, ids: te.Tensor) -> te.Tensor:
        along = axis % len(data.shape)

        def element(*index: tirx.Var) -> tirx.Expr:
            return data(*index[:along], ids(*index), *index[along + 1 :])

        return te.compute(ids.shape, element, name="gather_elements")

    return compute


def _rows(wrap: bool, *, in_tuples: bool) -> Callable[[te.Tensor, te.Tensor], te.Tensor]:
    """Return the tensor expression of `table[ids]`; with `wrap`, negative indices count from the end."""

    def compute(table: te.Tensor, ids: te.Tensor) -> te.Tensor:
        rows = tirx.Cast(ids.dtype, table.shape[0])
        places = ids.shape[:-1] if in_tuples else ids.shape

        def element(*index: tirx.Var) -> tirx.Expr:
            at = ids(*index[: len(places)], *([0] if in_tuples else []))
            if wrap:
                # Each use of `at` is written out with all that it is computed of.
                at = at + tirx.if_then_else(at < 0, rows, tirx.const(0, ids.dtype))
            return table(tirx.max(tirx.min(at, rows - 1), tirx.const(0, ids.dtype)), *index[len(places) :])

        return te.compute((*places, *table.shape[1:]), element, name="gather")

    return compute
