"""Pass: find GELU and SiLU that the exporter wrote out in small steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import dtype_of, either_way, is_op, number_of, numbers_beside, same_shape
from relaxtune.pipeline.passes.kit.rewrite import replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState

# (data, steps in between) of a match.
Match = tuple[relax.Var, tuple[relax.Var, ...]]

# The rounding of constants by exporters: to the tensor's dtype, or to six digits (1.41421).
_RELATIVE = {"float16": 2**-10, "bfloat16": 2**-7}
_RELATIVE_FLOAT = 1e-5
_DEPTH_MAX = 5


def recognise_activations(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with written-out activations as one operator each.

    ::

        0.5 x (1 + erf(x / sqrt 2))                              nn.gelu
        0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))        nn.gelu_tanh
        x sigmoid(x)                                             nn.silu

    They fuse into the matmul before them either way; as one operator an epilogue has a name (`fused_matmul_add_gelu`).
    The result has the shape of x: constants that broadcast it are not those of an activation.
    """
    graph = Graph(mod)
    found: dict[relax.Var, Callable[[tvm.ir.Expr], tvm.ir.Expr]] = {}
    data_of: dict[relax.Var, relax.Var] = {}
    for binding in graph.bindings:
        for make, match in _ACTIVATIONS.items():
            matched = match(binding.value, graph)
            if matched is not None and same_shape(binding.var, matched[0]):
                data_of[binding.var], steps = matched
                found[binding.var] = make
                state.sources[binding.var.name] = state.nodes_of(var.name for var in (*steps, binding.var))
                break
    return replace_found(mod, state, found, lambda new, binding, make: make(new.of(data_of[binding.var])))


def _factors(expr: tvm.ir.Expr, graph: Graph, depth: int = 0) -> tuple[float, list[tvm.ir.Expr], list[relax.Var]]:
    """Return (constant, other factors, steps) of a product in any order, quotients by constants included."""
    value = graph.value(expr) if depth else expr
    steps = [expr] if isinstance(expr, relax.Var) and depth else []
    if depth < _DEPTH_MAX and is_op(value, "multiply", "divide"):
        for data, number in numbers_beside(value):
            factor, left, inner = _factors(data, graph, depth + 1)
            return (factor * number if is_op(value, "multiply") else factor / number), left, [*steps, *inner]
    if depth < _DEPTH_MAX and is_op(value, "multiply"):
        (a, left, s), (b, right, t) = (_factors(arg, graph, depth + 1) for arg in value.args)
        return a * b, [*left, *right], [*steps, *s, *t]
    return 1.0, [expr], []


def _near(number: float, expected: float, like: tvm.ir.Expr) -> bool:
    return abs(number - expected) <= _RELATIVE.get(dtype_of(like), _RELATIVE_FLOAT) * expected


def _half_of(
    value: tvm.ir.Expr, graph: Graph, function: str, scale: float
) -> tuple[relax.Var, tvm.ir.Expr, tuple[relax.Var, ...]] | None:
    """Match `0.5 * x * (1 + function(scale * u))`; return x, u and the steps between."""
    if not is_op(value, "multiply"):
        return None
    constant, factors, steps = _factors(value, graph)
    if len(factors) != 2 or not _near(constant, 0.5, value):
        return None
    for data, gate in (factors, factors[::-1]):
        total = graph.value(gate)
        ones = [one for one, number in numbers_beside(total) if number == 1.0] if is_op(total, "add") else []
        call = graph.value(ones[0]) if ones else None
        if isinstance(data, relax.Var) and is_op(call, function):
            found, inner, more = _factors(graph.value(call.args[0]), graph)
            if len(inner) == 1 and _near(found, scale, data):
                return data, inner[0], (*steps, gate, ones[0], call.args[0], *more)
    return None


def _gelu(value: tvm.ir.Expr, graph: Graph) -> Match | None:
    found = _half_of(value, graph, "erf", math.sqrt(0.5))
    return (found[0], found[2]) if found is not None and found[1] == found[0] else None


def _gelu_tanh(value: tvm.ir.Expr, graph: Graph) -> Match | None:
    data, inner, steps = _half_of(value, graph, "tanh", math.sqrt(2 / math.pi)) or (None, None, ())
    total = graph.value(inner)
    if data is not None and is_op(total, "add"):
        for plain, cubic in either_way(total):
            if plain == data and (cube := _cube_of(cubic, data, graph)) is not None:
                return data, (*steps, inner, *cube)
    return None


def _cube_of(expr: tvm.ir.Expr, data: relax.Var, graph: Graph) -> tuple[relax.Var, ...] | None:
    """Return the steps of `0.044715 x^3`, None for anything else."""
    if not isinstance(expr, relax.Var):
        return None
    constant, factors, steps = _factors(graph.value(expr), graph)
    if not _near(constant, 0.044715, data):
        return None
    power = 0
    for factor in factors:
        call = graph.value(factor)
        if factor == data:
            power += 1
        elif is_op(call, "power") and call.args[0] == data and number_of(call.args[1], data) in (2.0, 3.0):
            power += int(number_of(call.args[1], data) or 0)
            steps = [*steps, factor]
        else:
            return None
    return (expr, *steps) if power == 3 else None


def _silu(value: tvm.ir.Expr, graph: Graph) -> Match | None:
    if is_op(value, "multiply"):
        for data, gate in either_way(value):
            call = graph.value(gate)
            if isinstance(data, relax.Var) and is_op(call, "sigmoid") and call.args[0] == data:
                return data, (gate,)
    return None


_ACTIVATIONS: Mapping[Callable[[tvm.ir.Expr], tvm.ir.Expr], Callable[[tvm.ir.Expr, Graph], Match | None]] = {
    relax.op.nn.gelu: _gelu,
    relax.op.nn.gelu_tanh: _gelu_tanh,
    relax.op.nn.silu: _silu,
}
