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


def softmaxes_without_mask(graph: Graph, decoder: Decoder, total: tirx.Var, model: str) -> set[relax.Var]:
    """Return the softmaxes over all places of the caches that nothing masks: they would see places without a token.

    Raises
    ------
    NoDecoderError
        The places are mixed without a softmax, so that no mask would hide any.
    """

    def has_places(expr: tvm.ir.Expr) -> bool:
        return any(used.same_as(total) for axis in shape_of(expr) or () for used in used_vars(axis))

    caches = {cache.grown for cache in decoder.caches}
    for binding in graph.bindings:
        value = binding.value
        if is_op(value, "matmul") and has_places(value.args[0]) and _last_has(value.args[0], total):
            behind = _behind(value.args[0], graph, has_places)
            if not any(is_op(graph.value(var), "nn.softmax") for var in behind):
                raise NoDecoderError(model, f"{binding.var.name} mixes the places of a cache without a softmax")
    found = set()
    for binding in graph.bindings:
        if not is_op(binding.value, "nn.softmax") or not _last_has(binding.var, total):
            continue
        scores = [var for var in _behind(binding.value.args[0], graph, has_places) if var not in caches]
        if not any(var == decoder.mask or _compares(graph.value(var)) for var in scores):
            found.add(binding.var)
    return found


def _compares(value: tvm.ir.Expr | None) -> bool:
    """Whether places are compared with one another, and not with a number, as indices are."""
    return is_op(value, *_COMPARISONS) and not any(map(is_constant, value.args))


def _last_has(expr: tvm.ir.Expr, total: tirx.Var) -> bool:
    shape = shape_of(expr) or []
    return any(used.same_as(total) for axis in shape[-1:] for used in used_vars(axis))


def _behind(expr: tvm.ir.Expr, graph: Graph, has_places: Callable[[tvm.ir.Expr], bool]) -> Iterator[relax.Var]:
    """Give the tensors with places of caches that another one is computed from."""
    seen: set[relax.Var] = set()
    todo = [expr]
    while todo:
        var = todo.pop()
        if isinstance(var, relax.Var) and var not in seen and has_places(var):
            seen.add(var)
            yield var
            value = graph.value(var)
            todo += [] if value is None else list(relax.analysis.free_vars(value))
