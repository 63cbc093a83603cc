"""Pass: the keys and values of a decode step join their caches in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax, te, tirx

from relaxtune.pipeline.passes.attention.head_layout import readings_of
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import called_function, dtype_of, is_op
from relaxtune.pipeline.passes.kit.rewrite import DONE, OPAQUE, Done, Rewriter, replace_found
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, Symbols, size_of, sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.functions.attention import spec_of
from relaxtune.schedules.sizes import element_at
from relaxtune.schedules.tir.expressions import used_vars


@dataclass(frozen=True)
class Grown:
    """`concat(past, new)` along an axis, as the tensors `results` of some dtypes; `new` is a view of `base`."""

    results: tuple[relax.Var, ...]
    shape: Shape
    axis: int
    past: relax.Var
    base: relax.Var
    offset: Size
    strides: tuple[Size, ...]


def append_caches(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with the two concatenations of an attention's keys and values as one kernel.

    ::

        key = concat(past_key, view(k)); value = concat(past_value, view(v))
                                            ->   key, value[, rounded key, rounded value] = append(...)

    A cache that is a result in float32 is read rounded by attention; the rounded copy is written beside it instead
    of being made from it. On CUDA.
    """
    if not state.launches_cost:
        return mod
    graph = Graph(mod)
    order = graph.order
    # Each pair is made where the last of its results was.
    made: dict[relax.Var, tuple[Grown, Grown]] = {}
    for binding in graph.bindings:
        if (pair := caches_of(binding.value, graph)) is not None:
            results = results_of(pair)
            last = max(results, key=order.__getitem__)
            # Nothing else may read any of the results before.
            readers = [reader for var in results for reader in graph.readers(var) if reader not in results]
            if all(order[reader] > order[last] for reader in readers):
                made[last] = pair
    if not made:
        return mod
    state.note(f"{len(made)} pairs of caches grow in one kernel each")
    gone = {var: None for pair in made.values() for var in results_of(pair)}
    return replace_found(mod, state, {**gone, **made}, _emit)


def results_of(pair: tuple[Grown, Grown]) -> list[relax.Var]:
    """Return the results of keys, then those of values."""
    return [var for grown in pair for var in grown.results]


def caches_of(call: tvm.ir.Expr, graph: Graph) -> tuple[Grown, Grown] | None:
    """Return the caches of an attention that both grow in this graph, to as many positions."""
    callee = called_function(call)
    spec = spec_of(graph.mod[callee]) if callee is not None and isinstance(graph.mod[callee], tirx.PrimFunc) else None
    if spec is None or spec.key.param == spec.value.param or spec.growth is not None:
        return None
    operands = call.args[1].fields
    key, value = (_grown(operands[layout.param], graph) for layout in (spec.key, spec.value))
    if key is None or value is None or (key.shape[:-1], key.axis) != (value.shape[:-1], value.axis):
        return None
    return (key, value) if key.results[0] != value.results[0] else None


def _grown(operand: tvm.ir.Expr, graph: Graph) -> Grown | None:
    results = graph.behind(operand, "astype")[1::-1]
    value = graph.value(results[0]) if results else None
    if not is_op(value, "concat") or not isinstance(value.args[0], relax.Tuple):
        return None
    fields, shape = list(value.args[0].fields), sizes_of(results[0])
    if len(fields) != 2 or shape is None or not isinstance(fields[0], relax.Var) or sizes_of(fields[0]) is None:
        return None
    for reading in readings_of(fields[1], graph, scaled=False):
        axes = reading.view.axes
        same = dtype_of(reading.base) == dtype_of(results[0])
        if isinstance(reading.base, relax.Var) and same and all(len(axis) < 2 for axis in axes):
            strides = tuple(axis[0][1] if axis else 0 for axis in axes)
            axis = int(value.attrs.axis) % len(shape)
            return Grown(tuple(results), shape, axis, fields[0], reading.base, reading.view.offset, strides)
    return None


def _emit(new: Rewriter, _binding: relax.VarBinding, pair: tuple[Grown, Grown]) -> Done:
    args = [new.of(arg) for grown in pair for arg in (grown.past, grown.base)]
    return bind_all(new, results_of(pair), new.kernel(_append(pair), *args, name="append", op_pattern=OPAQUE))


def bind_all(new: Rewriter, results: Sequence[relax.Var], call: relax.Call) -> Done:
    """Bind variables to the results of one call."""
    made = new.extra(f"{results[0].name}__appended", call, results)
    for index, var in enumerate(results):
        new.name(var, relax.TupleGetItem(made, index))
        new.state.sources[var.name] = ()
    return DONE


def _append(pair: tuple[Grown, Grown]) -> Callable[..., list[te.Tensor]]:
    """Return the tensor expressions of all results: past and base of the keys, then those of the values, come in."""
    dtypes = [[dtype_of(var) for var in grown.results] for grown in pair]

    def compute(*tensors: te.Tensor) -> list[te.Tensor]:
        return [
            _appended(grown, tensors[2 * number], tensors[2 * number + 1], dtype)
            for number, grown in enumerate(pair)
            for dtype in dtypes[number]
        ]

    return compute


def _appended(grown: Grown, past: te.Tensor, base: te.Tensor, dtype: str) -> te.Tensor:
    before, size = past.shape[grown.axis], size_of(past.shape[grown.axis])
    one = size is not None and grown.shape[grown.axis] - size == 1
    symbols = Symbols(var for tensor in (past, base) for axis in tensor.shape for var in used_vars(axis))
    shape, (offset, *strides) = symbols.shape(grown.shape), symbols.shape((grown.offset, *grown.strides))

    def element(*index: tirx.Var) -> tirx.Expr:
        place = [*index]
        place[grown.axis] = tirx.IntImm("int64", 0) if one else index[grown.axis] - before
        flat = sum((at * stride for at, stride in zip(place, strides, strict=True)), start=offset)
        new = element_at(base, base.shape, flat, dict(zip(index, shape, strict=True)))
        return tirx.if_then_else(index[grown.axis] < before, past(*index), new).astype(dtype)

    return te.compute(shape, element, name="append")
