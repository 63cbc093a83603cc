"""Pass: an attention over caches that grow writes the grown caches itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.attention.append_caches import Grown, bind_all, caches_of, results_of
from relaxtune.pipeline.passes.attention.kernel import param_shape, template_refusal
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import called_function, dtype_of, shape_of
from relaxtune.pipeline.passes.kit.rewrite import Done, Rewriter, replace_found
from relaxtune.pipeline.passes.kit.sizes import Shape, Size, Symbols, plain, size_of, sizes_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.functions.attention import (
    AttentionSpec,
    CacheGrowth,
    HeadLayout,
    Param,
    scalars_of,
    shapes_of,
    spec_of,
)
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.sizes import variables_of

# An attention with the caches that it writes: its result, keys and values; operands and scalars in order; function.
_Attention: TypeAlias = tuple[tuple[relax.Var, ...], tuple[tvm.ir.Expr, ...], tirx.PrimFunc]


def append_in_attention(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with the concatenations of an attention's keys and values as results of the attention.

    ::

        key = concat(past_key, view(k)); value = concat(past_value, view(v)); o = attention(q, key, value)
                                            ->   o, key, value = attention(q, past_key, k, past_value, v)

    The caches are then read once and written once. Where a template makes that, and nothing but the attention reads the
    grown caches before it.
    """
    if not state.launches_cost:
        return mod
    graph = Graph(mod)
    order = graph.order
    found: dict[relax.Var, _Attention] = {}
    for binding in graph.bindings:
        pair = caches_of(binding.value, graph)
        if pair is None or any(len(grown.results) > 1 for grown in pair):
            continue
        readers = [reader for var in results_of(pair) for reader in graph.readers(var)]
        if any(order.get(reader, len(order)) < order[binding.var] for reader in readers):
            continue
        made = _attention(mod, binding.var, binding.value, pair, graph.symbols)
        if made is None:
            continue
        reason = template_refusal(made[2], state.target)
        if reason is not None:
            state.note(f"caches not appended in attention at {binding.var.name}: {reason}")
            continue
        found[binding.var] = made
    if not found:
        return mod
    state.note(f"{len(found)} attentions append to their caches")
    gone = {cache: None for results, _, _ in found.values() for cache in results[1:]}
    return replace_found(mod, state, {**gone, **found}, _emit)


def _attention(
    mod: tvm.ir.IRModule, result: relax.Var, call: relax.Call, pair: tuple[Grown, Grown], symbols: Symbols
) -> _Attention | None:
    """Return the attention that writes a pair of caches, or None where they do not lie as it wants them."""
    spec = spec_of(mod[called_function(call)])
    assert spec is not None
    past, other = (sizes[grown.axis] if (sizes := sizes_of(grown.past)) else None for grown in pair)
    if past is None or past != other:
        return None
    layouts = [_grown_layouts(spec, role, grown) for role, grown in zip(("key", "value"), pair, strict=True)]
    given = list(call.args[1].fields)
    operands: list[tvm.ir.Expr] = []

    def position(expr: tvm.ir.Expr) -> int:
        if expr not in operands:
            operands.append(expr)
        return operands.index(expr)

    query = replace(spec.query, param=position(given[spec.query.param]))
    parts = []
    for grown, layout in zip(pair, layouts, strict=True):
        if layout is None:
            return None
        cache, new = (
            HeadLayout(0, *symbols.shape([plain(stride) for stride in (one.offset, *_strides(one))])) for one in layout
        )
        parts.append((replace(cache, param=position(grown.past)), replace(new, param=position(grown.base))))
    bias = None if spec.bias is None else replace(spec.bias, param=position(given[spec.bias.param]))
    results = (result, pair[0].results[0], pair[1].results[0])
    inputs, outputs = ([(param_shape(expr), dtype_of(expr)) for expr in exprs] for exprs in (operands, results))
    scalars = scalars_of(inputs, outputs[0][0])
    params: list[Param] = [*inputs, *scalars, *outputs]
    count = len(inputs) + len(scalars)
    growth = CacheGrowth(symbols.expression(past), parts[0][0], parts[1][0], parts[0][1], parts[1][1])
    appended = replace(
        spec,
        query=query,
        key=replace(spec.key, param=count + 1),
        value=replace(spec.value, param=count + 2),
        output=replace(spec.output, param=count),
        bias=bias,
        growth=growth,
    )
    # The variables of the function that is replaced may be others.
    appended = AttentionSpec.from_json(appended.to_json(), variables_of(shapes_of(params)))
    return results, (*operands, *scalars), attention_function(appended, params)


def _grown_layouts(spec: AttentionSpec, role: str, grown: Grown) -> tuple[HeadLayout, HeadLayout] | None:
    """Return where a cache's past and its new positions lie; None unless its axes are batch, heads, positions and d.

    Heads and positions may change places. Of an axis of size 1 any stride will do. Strides are those of passes.
    """
    layout, width = spec.layouts()[role], spec.width(role)
    sizes = tuple(map(size_of, (spec.batch, spec.kv_heads, spec.keys, width)))
    for axes in ((0, 1, 2, 3), (0, 2, 1, 3)):
        if tuple(grown.shape[axis] for axis in axes) != sizes or axes[2] != grown.axis:
            continue
        lies = zip(_strides(layout), _strides(_dense(grown.shape, axes)), (sizes[0], sizes[2], sizes[1]), strict=True)
        if size_of(layout.offset) != 0 or not all(size_of(got) == one or size == 1 for got, one, size in lies):
            continue
        before = sizes_of(grown.past)
        batch, head, position, unit = (grown.strides[axis] for axis in axes)
        if before is None or (unit != 1 and width > 1):
            return None
        return _dense(before, axes), HeadLayout(0, grown.offset, batch, position, head)
    return None


def _strides(layout: HeadLayout) -> tuple[Size, Size, Size]:
    return layout.batch_stride, layout.position_stride, layout.head_stride


def _dense(shape: Shape, axes: tuple[int, ...]) -> HeadLayout:
    """Return where the elements of a row-major tensor lie whose axes are batch, heads and positions, in some order."""
    strides: list[Size] = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return HeadLayout(0, 0, strides[axes[0]], strides[axes[2]], strides[axes[1]])


def _emit(new: Rewriter, _binding: relax.VarBinding, attention: _Attention) -> Done:
    results, operands, func = attention
    types = [relax.TensorType(shape_of(var), dtype_of(var)) for var in results]
    function = new.function(func.without_attr("global_symbol"), "attention")
    return bind_all(new, results, relax.call_tir(function, relax.Tuple(list(map(new.of, operands))), types))
