"""Pass: the new keys and values of a layer go into their caches by one kernel, from where another kernel wrote them."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from relaxtune.pipeline.passes.attention.append_caches import bind_all
from relaxtune.pipeline.passes.attention.head_layout import readings_of
from relaxtune.pipeline.passes.attention.strided_view import StridedView
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import dtype_of, is_op, shape_of
from relaxtune.pipeline.passes.kit.rewrite import Done, Rewriter, replace_found
from relaxtune.pipeline.passes.kit.sizes import Symbols, sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.functions.generation_state import WRITES_CACHES, Source, write_caches
from relaxtune.schedules.tir.expressions import used_vars


@dataclass(frozen=True)
class _Write:
    """A cache that new tokens are written into, and what they are a view [S, B, H, D] of."""

    result: relax.Var
    cache: relax.Var
    position: relax.Var
    base: relax.Var
    view: StridedView


def write_together(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with the writes of two caches in turn as one kernel that reads the new parts where they lie.

    ::

        key = write(key cache, view(qkv)); value = write(value cache, view(qkv))   ->   key, value = write(..., qkv)
    """
    graph = Graph(mod)
    order = graph.order
    writes = [write for binding in graph.bindings if (write := _write(binding, graph)) is not None]
    made: dict[relax.Var, tuple[_Write, ...]] = {}
    gone: dict[relax.Var, None] = {}
    while writes:
        first, *rest = writes
        second = rest[0] if rest else None
        readers = graph.readers(first.result)
        joins = (
            second is not None
            and first.view.shape == second.view.shape
            and first.position == second.position
            and all(order.get(reader, len(order)) > order[second.result] for reader in readers)
        )
        group = (first, second) if joins and second is not None else (first,)
        made[group[-1].result] = group
        gone |= dict.fromkeys(one.result for one in group[:-1])
        writes = writes[len(group) :]
    return replace_found(mod, state, {**gone, **made}, _emit, "kernels write caches")


def writes_caches(expr: tvm.ir.Expr, graph: Graph) -> bool:
    """Return whether a tensor is a cache that a step has written."""
    value = graph.value(expr)
    value = graph.value(value.tuple_value) if isinstance(value, relax.TupleGetItem) else value
    return is_op(value, "call_tir_inplace") and WRITES_CACHES in (graph.mod[value.args[0]].attrs or {})


def _write(binding: relax.Binding, graph: Graph) -> _Write | None:
    if not writes_caches(binding.var, graph) or not is_op(binding.value, "call_tir_inplace"):
        return None
    cache, new, position = binding.value.args[1].fields
    for reading in readings_of(new, graph, scaled=False):
        if isinstance(reading.base, relax.Var) and all(len(axis) < 2 for axis in reading.view.axes):
            return _Write(binding.var, cache, position, reading.base, reading.view)
    return None


def _emit(new: Rewriter, _binding: relax.VarBinding, group: tuple[_Write, ...]) -> tvm.ir.Expr | Done:
    tensors = [tensor for one in group for tensor in (one.base, one.cache)]
    symbols = Symbols(var for tensor in tensors for axis in shape_of(tensor) or () for var in used_vars(axis))
    sources = []
    for one in group:
        strides = symbols.shape([axis[0][1] if axis else 0 for axis in one.view.axes])
        offset, shape = symbols.expression(one.view.offset), symbols.shape(sizes_of(one.base) or ())
        sources.append(Source(shape, dtype_of(one.base), offset, strides))
    caches = [new.of(one.cache) for one in group]
    shapes = [symbols.shape(sizes_of(one.cache) or ()) for one in group]
    func = write_caches(shapes, [dtype_of(one) for one in caches], symbols.shape(group[0].view.shape), sources)
    operands = relax.Tuple([*caches, *(new.of(one.base) for one in group), new.of(group[0].position)])
    name, types = new.function(func, "write_caches"), [one.ty for one in caches]
    if len(group) == 1:
        return relax.op.call_tir_inplace(name, operands, 0, types[0])
    return bind_all(new, [one.result for one in group], relax.op.call_tir_inplace(name, operands, [0, 1], types))
