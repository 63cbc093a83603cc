"""Attention over packed tokens, where padding is left out: each token sees those of its own row."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax

from relaxtune.models.unpadding import ROWS, SLOTS, SPANS
from relaxtune.pipeline.passes.attention.find_attention import Attention
from relaxtune.pipeline.passes.attention.head_layout import Heads
from relaxtune.pipeline.passes.attention.kernel import AttentionFunctions, AttentionKernel, kernel_of
from relaxtune.pipeline.passes.attention.kernel_mask import Masking
from relaxtune.pipeline.passes.attention.scores import NotAttentionError, ScoreStep
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import dtype_of, is_op
from relaxtune.pipeline.passes.kit.known_values import MASKED, KnownValues
from relaxtune.pipeline.passes.kit.sizes import sizes_of


def of_tokens(kernel: AttentionKernel, graph: Graph, functions: AttentionFunctions) -> AttentionKernel | None:
    """Return the kernel of an attention over packed tokens, None where it stays in the padded form.

    ::

        q, k, v = views of take(y, slots)           [B, S, ...]
        take(attention(q, k, v, mask), rows)   ->   attention(y, spans)     [tokens, ...]

    The mask has to hide padding and nothing else: `spans` takes its place.
    """
    inputs = {str(param.name): param for param in graph.main.params}
    attention, bias = kernel.attention, kernel.spec.bias
    if SPANS not in inputs or bias is None or not bias.of_padding:
        return None
    masks = {name: param for name, param in inputs.items() if sizes_of(param) == sizes_of(inputs[SLOTS])}
    del masks[SLOTS]
    if not any(all(_hides_padding(step, graph, mask) for step in attention.steps) for mask in masks.values()):
        return None
    packed = [_packed(heads, graph) for heads in (attention.query, attention.key, attention.value)]
    result = _result(attention, graph)
    if result is None or attention.queries != attention.keys:
        return None
    query, key, value = packed
    if query is None or key is None or value is None:
        return None
    (tokens,) = sizes_of(inputs[ROWS]) or (0,)
    found = replace(
        attention,
        result=result[-1],
        path=(*attention.path, *result[:-1]),
        batch=1,
        queries=tokens,
        keys=tokens,
        query=query,
        key=key,
        value=value,
        output=_of_one_batch(replace(attention.output, base=result[-1])),
        steps=(),
    )
    try:
        made = kernel_of(found, Masking(), graph.symbols, inputs[SPANS])
        functions.get(made)
    except NotAttentionError:
        return None
    return made


def _packed(heads: Heads, graph: Graph) -> Heads | None:
    """Return where the heads lie in the tokens that the padded form is gathered of."""
    value = graph.value(heads.base)
    while is_op(value, "reshape"):
        value = graph.value(value.args[0])
    if not is_op(value, "take") or not _is_flat(value.args[1], SLOTS, graph):
        return None
    return _of_one_batch(replace(heads, base=value.args[0]))


def _of_one_batch(heads: Heads) -> Heads:
    # The stride of an axis of size 1 does not matter; this one is as aligned as any other.
    return replace(heads, layout=replace(heads.layout, batch_stride=math.prod(sizes_of(heads.base) or (0,))))


def _result(attention: Attention, graph: Graph) -> list[relax.Var] | None:
    """Return the variables behind an attention's result, to the tokens that are gathered of it."""
    path = [attention.result]
    while (reader := graph.only_reader(path[-1])) is not None:
        path.append(reader)
        value = graph.value(reader)
        if is_op(value, "take") and _is_flat(value.args[1], ROWS, graph):
            return path
        if not is_op(value, "reshape"):
            break
    return None


def _is_flat(index: tvm.ir.Expr, name: str, graph: Graph) -> bool:
    """Return whether an index is an input of a name, flat or not."""
    value = graph.value(index)
    source = value.args[0] if is_op(value, "reshape") else index
    return isinstance(source, relax.Var) and source in graph.main.params and str(source.name) == name


def _hides_padding(step: ScoreStep, graph: Graph, mask: relax.Var) -> bool:
    """Return whether a mask hides the keys where an input is 0, and does nothing where it is 1."""
    hidden, seen = (
        KnownValues(graph.values, {mask: np.dtype(dtype_of(mask)).type(number)}).of(step.expr) for number in (0, 1)
    )
    if hidden is None or seen is None:
        return False
    if step.kind == "add":
        return bool(float(hidden) * step.factor <= MASKED and seen == 0)
    kept = (bool(hidden), bool(seen)) == ((False, True) if step.kind == "where" else (True, False))
    return kept and step.fill <= MASKED
