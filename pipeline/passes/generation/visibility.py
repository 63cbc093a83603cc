"""Softmaxes of a decoder that hide the places behind its tokens by themselves, with a mask or by causality."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.generation.caches import Decoder, NoDecoderError
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import is_constant, is_op, shape_of
from relaxtune.schedules.tir.expressions import used_vars

_COMPARISONS = ("less", "less_equal", "greater", "greater_equal")
_LAST = slice(-1, None)


def softmaxes_without_mask(graph: Graph, decoder: Decoder, total: tirx.Var, model: str) -> set[relax.Var]:
    """Return the softmaxes over all places of the caches that nothing masks: they would see places without a token.

    Raises
    ------
    NoDecoderError
        The places are mixed without a softmax, so that no mask would hide any.
    """

    def has_places(expr: tvm.ir.Expr, axes: slice = slice(None)) -> bool:
        return any(used.same_as(total) for axis in (shape_of(expr) or [])[axes] for used in used_vars(axis))

    caches = {cache.grown for cache in decoder.caches}
    for binding in graph.bindings:
        value = binding.value
        if is_op(value, "matmul") and has_places(value.args[0], _LAST):
            behind = computed_from(value.args[0], graph, has_places)
            if not any(is_op(graph.value(var), "nn.softmax") for var in behind):
                raise NoDecoderError(model, f"{binding.var.name} mixes the places of a cache without a softmax")
    found = set()
    for binding in graph.bindings:
        if not is_op(binding.value, "nn.softmax") or not has_places(binding.var, _LAST):
            continue
        scores = [var for var in computed_from(binding.value.args[0], graph, has_places) if var not in caches]
        values = {var: graph.value(var) for var in scores}
        # Places compared with one another hide some, and not those compared with a number, as indices are.
        compared = (is_op(one, *_COMPARISONS) and not any(map(is_constant, one.args)) for one in values.values())
        if decoder.mask not in values and not any(compared):
            found.add(binding.var)
    return found


def computed_from(
    expr: tvm.ir.Expr, graph: Graph, follows: Callable[[tvm.ir.Expr], bool] = lambda _: True
) -> Iterator[relax.Var]:
    """Give a tensor, and those that it is computed from, back to the ones that are not to be followed."""
    seen: set[relax.Var] = set()
    todo = [expr]
    while todo:
        var = todo.pop()
        if isinstance(var, relax.Var) and var not in seen and follows(var):
            seen.add(var)
            yield var
            value = graph.value(var)
            todo += [] if value is None else list(relax.analysis.free_vars(value))
