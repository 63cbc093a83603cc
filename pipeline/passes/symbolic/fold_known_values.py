"""Pass: what is the same at all sizes is not computed."""

from __future__ import annotations

import math
from dataclasses import replace

import tvm
from tvm import relax
from tvm_ffi import structural_equal

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, either_way, is_constant, is_op, shape_of
from relaxtune.pipeline.passes.kit.known_values import KnownValues
from relaxtune.pipeline.passes.kit.rewrite import rewrite
from relaxtune.pipeline.passes.kit.sizes import fits, sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.symbolic.intervals import Interval, interval_after, interval_of

_ANY = Interval(-math.inf, math.inf, settled=False)
_COMPARISONS = ("less", "less_equal", "greater", "greater_equal")
# Operation -> the second operand that leaves the first one as it is.
_NEUTRAL = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "divide": 1.0}
_SUMS = ("add", "subtract")
_FOLLOWED = (*_SUMS, "broadcast_to", "expand_dims", "permute_dims", "reshape", "squeeze")


def fold_known_values(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` without operations whose result at all sizes is an operand, or one known row, broadcast.

    Such are `logical_and` with what is true, `logical_or` with what is false, `where` by what is known, sums with 0,
    products with 1, comparisons with a number that tell what a `where` has chosen by positions, or are the same for all
    that is copied of constants, and `take` of a constant by indices that are one number. Of static sizes most are
    folded. Of symbolic ones exporters leave the causal mask of a decode step's one token, which hides nothing, the
    question whether a constant mask of each image does, and the token types of a model called without any. A `take` of
    joined tables whose indices are all in the first one reads that.
    """
    count = 0
    while kept := _known_values(Graph(mod)):
        count += len(kept)
        mod = rewrite(mod, state, lambda new, binding: new.of(kept[binding.var]) if binding.var in kept else None)
    if count:
        state.note(f"{count} values are the same at all sizes")
    return mod


def _known_values(graph: Graph) -> dict[relax.Var, tvm.ir.Expr]:
    """Return what is not computed, with what it is."""
    kept: dict[relax.Var, tvm.ir.Expr] = {}
    for binding in graph.bindings:
        value, shape = binding.value, shape_of(binding.var)
        if not isinstance(value, relax.Call) or shape is None:
            continue
        same = [*_choices(value, graph), *_row_looked_up(value, graph.known)]
        fitting = [one for one in same if structural_equal(one.ty, binding.var.ty)]
        joined = _in_first(value, graph)
        if fitting:
            kept[binding.var] = fitting[0]
        # A mask is read in its own shape.
        elif same and not is_op(value, "logical_and", "logical_or"):
            kept[binding.var] = relax.op.broadcast_to(same[0], relax.ShapeExpr(shape))
        elif joined is not None:
            kept[binding.var] = joined
    return kept


def _choices(value: relax.Call, graph: Graph) -> list[tvm.ir.Expr]:
    """Return the operands that an operation gives as they are, shapes aside."""
    known = graph.known
    if is_op(value, "logical_and", "logical_or"):
        neutral = is_op(value, "logical_and")
        return [data for condition, data in either_way(value) if known.of(condition) == neutral]
    if is_op(value, "where") and (condition := known.of(value.args[0])) is not None:
        return [value.args[1 if condition else 2]]
    if is_op(value, *_NEUTRAL):
        orders = either_way(value) if is_op(value, "add", "multiply") else either_way(value)[:1]
        return [data for data, other in orders if known.of(other) == _NEUTRAL[value.op.name.removeprefix("relax.")]]
    if is_op(value, *_COMPARISONS):
        found = interval_after(value, [_interval(one, graph) for one in value.args])
        if found is not None and found.low == found.high:
            return [relax.const(bool(found.low), "bool")]
    if is_op(value, "greater") and is_op(where := graph.value(value.args[0]), "where"):
        chosen, other, least = (_interval(one, graph) for one in (*where.args[1:], value.args[1]))
        known_choice = chosen.low > least.high and other.high <= least.low
        return [where.args[0]] if known_choice and _reads_no_input(where.args[0], graph) else []
    return []


def _reads_no_input(expr: tvm.ir.Expr, graph: Graph) -> bool:
    """Return whether a tensor is computed of sizes alone: what reads it computes it, where others would be kept."""
    inputs, waiting, seen = set(graph.main.params), [expr], set[tvm.ir.Expr]()
    while waiting:
        one = waiting.pop()
        if one in inputs:
            return False
        read = relax.analysis.free_vars(graph.values.get(one, one))
        waiting += [var for var in read if var not in seen]
        seen.update(read)
    return True


def _interval(expr: tvm.ir.Expr, graph: Graph) -> Interval:
    """Return between which numbers a tensor of constants, moved, looked up or added, is."""
    if is_constant(expr):
        found = interval_of(expr)
        # Not settled: what is computed of it is rounded.
        return _ANY if found is None or math.isnan(found.low) else replace(found, settled=False)
    value = graph.value(expr)
    if is_op(value, "take"):
        return interval_after(value, [_interval(value.args[0], graph), _ANY]) or _ANY
    if not is_op(value, *_FOLLOWED) or (is_op(value, *_SUMS) and "float" not in dtype_of(value)):
        return _ANY
    operands = [_interval(one, graph) for one in (value.args if is_op(value, *_SUMS) else value.args[:1])]
    return interval_after(value, operands) or _ANY


def _row_looked_up(value: relax.Call, known: KnownValues) -> list[tvm.ir.Expr]:
    """Return the row that a look-up gives at each place."""
    if not is_op(value, "take") or value.attrs.axis is None or int(value.attrs.axis) != 0:
        return []
    index = known.of(value.args[1]) if is_constant(value.args[0]) and not is_constant(value.args[1]) else None
    if index is None or not 0 <= int(index) < len(table := array_of(value.args[0])):
        return []
    return [relax.const(table[int(index)], dtype_of(value))]


def _in_first(value: relax.Call, graph: Graph) -> tvm.ir.Expr | None:
    """Return a look-up in joined tables as one in the first, where that has all the places.

    Exporters join cosines and sines of positions to as many zeros as a cache has more places.
    """
    joined = graph.value(value.args[0]) if is_op(value, "take") and value.attrs.axis is not None else None
    if not is_op(joined, "concat") or not isinstance(joined.args[0], relax.Tuple):
        return None
    if int(joined.attrs.axis) != 0 or int(value.attrs.axis) != 0:
        return None
    first, bounds = joined.args[0].fields[0], graph.known.bounds_of(value.args[1])
    sizes = sizes_of(first)
    if sizes is None or bounds is None or not fits(0, bounds[0]) or not fits(bounds[1] + 1, sizes[0]):
        return None
    return relax.Call(value.op, [first, value.args[1]], value.attrs)
