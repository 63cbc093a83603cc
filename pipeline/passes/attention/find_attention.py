"""Find attention in a graph: softmaxes of a product of two activations, multiplied by a third."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from relaxtune.pipeline.passes.attention.head_layout import (
    Heads,
    Planes,
    Reading,
    head_counts,
    heads_of,
    inverse,
    planes_of,
    readings_of,
)
from relaxtune.pipeline.passes.attention.remove_nan_guards import guarded_by
from relaxtune.pipeline.passes.attention.scores import NotAttentionError, Scores, ScoreStep, scores_of
from relaxtune.pipeline.passes.attention.strided_view import is_view
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import HALVES, dtype_of, is_op
from relaxtune.pipeline.passes.kit.sizes import Size, quotient, sizes_of

# Ways tried of reading three operands, the furthest back first.
_READINGS_MAX = 64


@dataclass(frozen=True)
class Attention:
    """An attention of a graph; its sizes and its scale are those of `schedules.functions.attention.AttentionSpec`."""

    result: relax.Var  # The variable that the attention's output takes the place of.
    path: tuple[relax.Var, ...]  # The variables that it computes, in order.
    dtype: str  # Of operands and result.
    batch: Size
    heads: int
    queries: Size
    keys: Size
    head_dim: int
    value_dim: int
    scale: float
    query: Heads
    key: Heads
    value: Heads
    output: Heads  # Its base is `result`.
    steps: tuple[ScoreStep, ...]  # Masks and biases.
    guarded: bool  # Whether rows that see no key become zeros.


def is_weighting(softmax: relax.Var, graph: Graph) -> bool:
    """Return whether a softmax's result is, cast and moved at most, an operand of a matmul."""
    waiting = [softmax]
    for _ in range(8):
        waiting = [reader for var in waiting for reader in graph.readers(var) if reader != var]
        if any(is_op(graph.value(var), "matmul") for var in waiting):
            return True
        waiting = [var for var in waiting if is_op(graph.value(var), "astype", "where", "reshape", "permute_dims")]
    return False


def match_attention(softmax: relax.Var, graph: Graph) -> Attention:
    """Return the attention around a softmax.

    Raises `NotAttentionError`: it is not one that a kernel can make, and why.
    """
    call = graph.values[softmax]
    rank = len(sizes_of(softmax) or ())
    if not rank:
        raise NotAttentionError("its scores have an unknown shape")
    if int(call.attrs.axis) not in (-1, rank - 1):
        raise NotAttentionError(f"its softmax is over axis {int(call.attrs.axis)} of {rank}, expected the last")
    scores = scores_of(call.args[0], graph)
    weights, guarded = _weights(softmax, graph)
    weighted = graph.values[weights[-1]]
    query, key_transposed = graph.values[scores.product].args
    value = weighted.args[1]
    if len({dtype_of(arg) for arg in (query, key_transposed, value, weighted.args[0])}) != 1:
        raise NotAttentionError("its operands have different dtypes")
    dtype = dtype_of(query)
    if dtype not in HALVES:
        raise NotAttentionError(f"its operands are {dtype or 'of unknown dtype'}, expected {' or '.join(HALVES)}")
    chain = _moves(weights[-1], dtype, graph)
    result = chain[-1] if chain else weights[-1]
    return _laid_out(scores, weights, (query, key_transposed, value), chain, result, guarded, graph)


def _weights(softmax: relax.Var, graph: Graph) -> tuple[list[relax.Var], bool]:
    """Return the variables from the softmax to its product with the values, and whether a guard stands between."""
    path, guarded = [softmax], False
    while True:
        last = path[-1]
        readers = list(dict.fromkeys(graph.readers(last)))
        guard = next((reader for reader in readers if guarded_by(graph.value(reader), graph) == last), None)
        if guard is not None and all(reader == guard or is_op(graph.value(reader), "isnan") for reader in readers):
            path.append(guard)
            guarded = True
            continue
        if len(readers) != 1 or readers[0] == last:
            raise NotAttentionError(f"its weights have {len(readers)} readers, expected one")
        value = graph.value(readers[0])
        if is_op(value, "matmul") and value.args[0] == last:
            return [*path, readers[0]], guarded
        regrouped = is_op(value, "reshape", "expand_dims", "squeeze") and (
            (sizes_of(readers[0]) or ())[-2:] == (sizes_of(last) or ())[-2:]
        )
        if not is_op(value, "astype") and not regrouped:
            raise NotAttentionError("its weights are not multiplied by values")
        path.append(readers[0])


def _moves(product: relax.Var, dtype: str, graph: Graph) -> list[relax.Var]:
    """Return the casts and moves after the product with the values, as far as they have no other readers."""
    chain: list[relax.Var] = []
    current = product
    while True:
        reader = graph.only_reader(current)
        if reader is None:
            break
        value = graph.value(reader)
        narrows = is_op(value, "astype") and dtype_of(reader) == dtype
        # An operation that leaves elements out does not move the whole tensor.
        moves = is_view(value) and math.prod(sizes_of(reader) or (0,)) == math.prod(sizes_of(current) or ())
        if not narrows and not moves:
            break
        chain.append(reader)
        current = reader
    # The result is of the operands' dtype: moves after the last cast or before it, none without a cast.
    while chain and dtype_of(chain[-1]) != dtype:
        chain.pop()
    if dtype_of(chain[-1] if chain else product) != dtype:
        raise NotAttentionError(f"its result is not rounded to {dtype}")
    return chain


def _laid_out(
    scores: Scores,
    weights: Sequence[relax.Var],
    operands: tuple[tvm.ir.Expr, tvm.ir.Expr, tvm.ir.Expr],
    chain: Sequence[relax.Var],
    result: relax.Var,
    guarded: bool,
    graph: Graph,
) -> Attention:
    first, second, shape = (sizes_of(var) for var in (scores.product, weights[-1], result))
    if first is None or second is None or shape is None:
        raise NotAttentionError("its shape is not known")
    (*leading, queries, keys), (*outer, _, value_dim) = first, second
    if len(first) < 3 or math.prod(leading) != math.prod(outer):
        raise NotAttentionError(f"its products have the shapes {first} and {second}, expected leading axes")
    head_dim = (sizes_of(operands[0]) or (0,))[-1]
    if not isinstance(head_dim, int) or not isinstance(value_dim, int):
        raise NotAttentionError(f"its heads are {head_dim} and {value_dim} wide, expected numbers")
    back = inverse([graph.values[var] for var in chain], second, shape)
    if back is None:
        raise NotAttentionError("its result is moved in a way that no strides describe")
    output = planes_of(back, outer)
    roles = ("query", "key", "value")
    planes: list[list[tuple[Reading, Planes]]] = []
    for role, operand in zip(roles, operands, strict=True):
        own = outer if role == "value" else leading
        found = [
            (reading, plane)
            for reading in readings_of(operand, graph, scaled=role != "value")
            if isinstance(reading.base, relax.Var)
            and (plane := planes_of(reading.view, own, transposed=role == "key")) is not None
        ]
        if not found:
            raise NotAttentionError(f"the rows of its {role} heads do not lie together")
        planes.append(found)
    if output is None:
        raise NotAttentionError("the rows of its result do not lie together")
    for query, key, value in itertools.islice(itertools.product(*planes), _READINGS_MAX):
        tensors = [*((reading.base, plane) for reading, plane in (query, key, value)), (result, output)]
        for count in head_counts(leading, [plane for _, plane in tensors]):
            matched = (
                heads_of(*tensor, count, shared=shared)
                for tensor, shared in zip(tensors, (False, True, True, False), strict=True)
            )
            heads = [one for one in matched if one is not None]
            if len(heads) == len(tensors) and heads[1].count == heads[2].count:
                return Attention(
                    result=result,
                    path=(*scores.path, *weights, *chain),
                    dtype=dtype_of(result),
                    batch=quotient(output.count, count) or 1,
                    heads=count,
                    queries=queries,
                    keys=keys,
                    head_dim=head_dim,
                    value_dim=value_dim,
                    scale=scores.scale * query[0].scale * key[0].scale,
                    query=heads[0],
                    key=heads[1],
                    value=heads[2],
                    output=heads[3],
                    steps=scores.steps,
                    guarded=guarded,
                )
    raise NotAttentionError("its heads lie in a way that no strides describe")
