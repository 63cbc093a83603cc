"""The plain PrimFunc of an attention, a block a step: what a fallback schedules, and what templates are measured by.

Notation: see `schedules.functions.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import tvm
from tvm import te, tirx

from relaxtune.schedules.functions.attention import AttentionSpec, HeadLayout, Param
from relaxtune.schedules.functions.attention_checks import check_spec
from relaxtune.schedules.marks import ATTENTION_ATTR
from relaxtune.schedules.sizes import Size, are_equal, element_at

# TVM's OpPatternKind.kOpaque: fused with nothing.
_OPAQUE = 8
_MINUS_INFINITY = tirx.const(-math.inf, "float32")


def attention_function(spec: AttentionSpec, params: Sequence[Param]) -> tirx.PrimFunc:
    """Return the PrimFunc of an attention: one block a step, marked, fused with nothing.

    `spec`: what to compute.
    `params`: the inputs, those that `scalars_of` returns, then the output, whose every element must be one of O; then K
    and V, where they are written.
    Raises `AttentionError`: the specification and the parameters do not fit together.
    """
    check_spec(spec, params)
    own = len(params) - spec.outputs
    inputs = [
        param if isinstance(param, tirx.Var) else te.placeholder(*param, name=f"p{index}")
        for index, param in enumerate(params[:own])
    ]
    grown = _grown(spec, inputs, params) if spec.growth is not None else []
    # K and V follow the output among the parameters; nothing reads the output's place.
    tensors = [*inputs, *grown[:1], *grown]
    weights = _weights(spec, tensors)
    dims = (spec.batch, spec.heads, spec.queries, spec.value_dim)
    over = te.reduce_axis((0, spec.keys), name="j")
    total = te.compute(dims[:3], lambda b, h, i: te.sum(weights[b, h, i, over], axis=over), name="total")
    dtype = params[spec.value.param][1]
    last = te.reduce_axis((0, spec.keys), name="j")
    zero = tirx.const(0.0, "float32")

    def weigh(b: tirx.Var, h: tirx.Var, i: tirx.Var, d: tirx.Var) -> tirx.Expr:
        bounds = _bounds(spec, b=b, h=h, j=last.var) | {d: spec.value_dim}
        value = _element(tensors, spec.value, (b, last.var, h // spec.group, d), bounds)
        return te.sum(weights[b, h, i, last].astype(dtype).astype("float32") * value, axis=last)

    values = te.compute(dims, weigh, name="values")
    shape, output_dtype = params[own]

    def lay_out(*indices: tirx.Var) -> tirx.Expr:
        b, h, i, d = _position(spec.output, dims, indices, shape)
        weighed = values[b, h, i, d] / total[b, h, i]
        weighed = tirx.Select(total[b, h, i] == zero, zero, weighed) if spec.guarded else weighed
        return weighed.astype(output_dtype)

    output = te.compute(shape, lay_out, name="output")
    func = te.create_prim_func([*inputs, output, *grown])
    return func.with_attr(ATTENTION_ATTR, spec.to_json()).with_attr("op_pattern", _OPAQUE)


def _grown(spec: AttentionSpec, inputs: Sequence[te.Tensor], params: Sequence[Param]) -> list[te.Tensor]:
    """Return K and V as they are written."""
    growth = spec.growth
    assert growth is not None

    def grow(role: str, name: str, layout: HeadLayout, past: HeadLayout, new: HeadLayout) -> te.Tensor:
        shape, dtype = params[layout.param]
        sizes = (spec.batch, spec.kv_heads, spec.keys, spec.width(role))

        def element(*indices: tirx.Var) -> tirx.Expr:
            b, h, j, d = _position(layout, sizes, indices, shape)
            bounds = dict(zip(indices, shape, strict=True))
            one = are_equal(spec.keys - growth.past, 1)
            added = tirx.IntImm("int32", 0) if one else tirx.max(j - growth.past, 0)
            before = _flat(past, (b, tirx.min(j, growth.past - 1), h, d))
            after = _flat(new, (b, added, h, d))
            cache, part = inputs[past.param], inputs[new.param]
            of_cache, of_part = (
                element_at(one, one.shape, flat, bounds) for one, flat in ((cache, before), (part, after))
            )
            return tirx.if_then_else(j < growth.past, of_cache, of_part).astype(dtype)

        return te.compute(shape, element, name=name)

    return [
        grow("key", "keys", spec.key, growth.past_key, growth.new_key),
        grow("value", "values_grown", spec.value, growth.past_value, growth.new_value),
    ]


def _weights(spec: AttentionSpec, inputs: Sequence[te.Tensor]) -> te.Tensor:
    """Return exp(s - max s), float32 [batch, heads, queries, keys]; of a guarded row of -inf, 0."""
    over = te.reduce_axis((0, spec.head_dim), name="d")
    dims = (spec.batch, spec.heads, spec.queries, spec.keys)

    def multiply(b: tirx.Var, h: tirx.Var, i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        bounds = _bounds(spec, b=b, h=h, i=i, j=j, d=over.var)
        query = _element(inputs, spec.query, (b, i, h, over.var), bounds)
        return te.sum(query * _element(inputs, spec.key, (b, j, h // spec.group, over.var), bounds), axis=over)

    products = te.compute(dims, multiply, name="products")
    scores = te.compute(dims, lambda b, h, i, j: _score(spec, inputs, products, (b, h, i, j)), name="scores")
    last = te.reduce_axis((0, spec.keys), name="j")
    highest = te.compute(dims[:3], lambda b, h, i: te.max(scores[b, h, i, last], axis=last), name="highest")

    def weight(b: tirx.Var, h: tirx.Var, i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        most = highest[b, h, i]
        if spec.guarded:
            most = tirx.Select(most == _MINUS_INFINITY, tirx.const(0.0, "float32"), most)
        return te.exp(scores[b, h, i, j] - most)

    return te.compute(dims, weight, name="weights")


def _score(
    spec: AttentionSpec,
    inputs: Sequence[te.Tensor],
    products: te.Tensor,
    position: tuple[tirx.Var, tirx.Var, tirx.Var, tirx.Var],
) -> tirx.Expr:
    b, h, i, j = position
    score = products[b, h, i, j] * tirx.const(spec.scale, "float32")
    seen = []
    if spec.bias is not None:
        bias = spec.bias
        place = bias.place(i, j)
        if bias.limit:
            place = tirx.max(tirx.min(place, bias.limit), 0)
        given = inputs[bias.param]
        mask = element_at(given, given.shape, bias.row(b, h) + place, _bounds(spec, b=b, h=h, i=i, j=j))
        if bias.kind == "add":
            score = score + mask.astype("float32")
        else:
            seen.append(mask.astype("float32") != tirx.const(0.0, "float32"))
    if spec.spans is not None:
        first, end = (inputs[spec.spans][i, bound] for bound in range(2))
        seen += [first <= j, j < end]
    ahead = j - i - (spec.keys - spec.queries)
    if spec.causal:
        seen.append(ahead <= 0)
    if spec.window:
        seen.append(ahead > -spec.window)
        if not spec.causal:
            seen.append(ahead < spec.window)
    return score if not seen else tirx.Select(tirx.all(*seen), score, _MINUS_INFINITY)


def _element(
    inputs: Sequence[te.Tensor],
    layout: HeadLayout,
    position: tuple[tirx.Expr, tirx.Expr, tirx.Expr, tirx.Expr],
    bounds: Mapping[tirx.Var, Size],
) -> tirx.Expr:
    """Return Q, K or V at batch, position, head and d, as float32."""
    tensor = inputs[layout.param]
    return element_at(tensor, tensor.shape, _flat(layout, position), bounds).astype("float32")


def _flat(layout: HeadLayout, position: tuple[tirx.Expr, tirx.Expr, tirx.Expr, tirx.Expr]) -> tirx.Expr:
    """Return the row-major position of an element at batch, position, head and d."""
    b, i, h, d = position
    return layout.offset + b * layout.batch_stride + i * layout.position_stride + h * layout.head_stride + d


def _bounds(spec: AttentionSpec, **axes: tirx.Var) -> dict[tirx.Var, Size]:
    sizes = {"b": spec.batch, "h": spec.heads, "i": spec.queries, "j": spec.keys, "d": spec.head_dim}
    return {axis: sizes[name] for name, axis in axes.items()}


def _position(
    layout: HeadLayout, sizes: tuple[Size, int, Size, int], indices: Sequence[tirx.Var], shape: Sequence[Size]
) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr, tirx.Expr]:
    """Return batch, head, position and d of an element of a tensor that is all of a parameter."""
    batch, heads, positions, width = sizes
    analyzer = tvm.sym.Analyzer()
    flat: tirx.Expr = tirx.IntImm("int32", 0)
    for axis, (index, size) in enumerate(zip(indices, shape, strict=True)):
        analyzer.bind(index, tvm.ir.Range(0, size))
        flat = flat + index * math.prod(shape[axis + 1 :])

    def coordinate(stride: Size, extent: Size) -> tirx.Expr:
        return tirx.IntImm("int32", 0) if are_equal(extent, 1) else analyzer.simplify(flat // stride % extent)

    return (
        coordinate(layout.batch_stride, batch),
        coordinate(layout.head_stride, heads),
        coordinate(layout.position_stride, positions),
        coordinate(1, width),
    )
