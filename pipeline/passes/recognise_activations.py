"""Pass: find GELU and SiLU that the exporter wrote out in small steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relaxtune.pipeline.passes.kit.ir import bindings_of, emit_named, is_op, main_of, rewrite_main, scalar_of, values_of
from relaxtune.pipeline.passes.kit.state import LoweringState

Values = Mapping[relax.Var, tvm.ir.Expr]
# (data, steps in between) of a match.
Match = tuple[relax.Var, tuple[relax.Var, ...]]

_RELATIVE = 1e-4  # exporters round the constants to the tensor's dtype, half precision included


def recognise_activations(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with written-out activations as one operator each.

    ::

        0.5 x (1 + erf(x / sqrt 2))                              nn.gelu
        0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))        nn.gelu_tanh
        x sigmoid(x)                                             nn.silu

    They fuse into the matmul before them either way; as one operator an epilogue has a name (`fused_matmul_add_gelu`).
    """
    main = main_of(mod)
    values = values_of(main)
    found: dict[relax.Var, tuple[str, Match]] = {}
    for binding in bindings_of(main):
        for name, match in (("nn.gelu", _gelu), ("nn.gelu_tanh", _gelu_tanh), ("nn.silu", _silu)):
            matched = match(binding.value, values)
            if matched is not None and binding.var not in found:
                found[binding.var] = (name, matched)
    if not found:
        return mod
    for var, (_, (_, steps)) in found.items():
        state.sources[var.name] = state.nodes_of([*(step.name for step in steps), var.name])
    return rewrite_main(mod, _Replace(found))


_MAKE: Mapping[str, Callable[[tvm.ir.Expr], tvm.ir.Expr]] = {
    "nn.gelu": relax.op.nn.gelu,
    "nn.gelu_tanh": relax.op.nn.gelu_tanh,
    "nn.silu": relax.op.nn.silu,
}


@mutator
class _Replace(PyExprMutator):  # type: ignore[misc]
    def __init__(self, found: Mapping[relax.Var, tuple[str, Match]]) -> None:
        super().__init__()
        self._found = found

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self._found:
            super().visit_var_binding_(binding)
            return
        name, (data, _) = self._found[binding.var]
        emit_named(self, binding.var, _MAKE[name](self.visit_expr(data)))


def _factors(expr: tvm.ir.Expr, values: Values, depth: int = 0) -> tuple[float, list[tvm.ir.Expr], list[relax.Var]]:
    """Return (constant, other factors, steps) of a product in any order, quotients by constants included."""
    value = values.get(expr) if isinstance(expr, relax.Var) and depth else expr
    steps = [expr] if isinstance(expr, relax.Var) and depth else []
    if (constant := scalar_of(expr)) is not None:
        return constant, [], []
    if depth < 5 and is_op(value, "multiply"):
        (a, left, s), (b, right, t) = (_factors(arg, values, depth + 1) for arg in value.args)
        return a * b, [*left, *right], [*steps, *s, *t]
    if depth < 5 and is_op(value, "divide") and (divisor := scalar_of(value.args[1])):
        a, left, s = _factors(value.args[0], values, depth + 1)
        return a / divisor, left, [*steps, *s]
    return 1.0, [expr], []


def _near(value: float, expected: float) -> bool:
    return abs(value - expected) <= _RELATIVE * abs(expected) * (10 if abs(expected) < 1 else 1)


def _var(expr: tvm.ir.Expr) -> relax.Var | None:
    return expr if isinstance(expr, relax.Var) else None


def _same(expr: tvm.ir.Expr | None, var: relax.Var) -> bool:
    return isinstance(expr, relax.Var) and expr == var


def _half_of(value: tvm.ir.Expr, values: Values) -> tuple[relax.Var, relax.Var, list[relax.Var]] | None:
    """Match `0.5 * x * (1 + u)`; return x, the variable holding 1 + u, and the steps between."""
    if not is_op(value, "multiply"):
        return None
    constant, factors, steps = _factors(value, values)
    if len(factors) != 2 or not _near(constant, 0.5):
        return None
    for data, gate in (factors, factors[::-1]):
        if _var(data) is not None and is_op(values.get(_var(gate)), "add") and _inner_of_gate(gate, values) is not None:
            return data, gate, steps
    return None


def _inner_of_gate(gate: relax.Var, values: Values) -> relax.Var | None:
    """Return u when `gate` is `1 + u`."""
    left, right = values[gate].args
    for one, inner in ((left, right), (right, left)):
        if scalar_of(one) == 1.0:
            return _var(inner)
    return None


def _gelu(value: tvm.ir.Expr, values: Values) -> Match | None:
    parts = _half_of(value, values)
    if parts is None:
        return None
    data, gate, steps = parts
    inner = _inner_of_gate(gate, values)
    call = values.get(inner)
    if inner is None or not is_op(call, "erf"):
        return None
    scale, factors, more = _factors(values.get(_var(call.args[0])), values)
    if len(factors) != 1 or not _same(factors[0], data) or not _near(scale, 0.5**0.5):
        return None
    return data, (*steps, gate, inner, call.args[0], *more)


def _gelu_tanh(value: tvm.ir.Expr, values: Values) -> Match | None:
    parts = _half_of(value, values)
    if parts is None:
        return None
    data, gate, steps = parts
    inner = _inner_of_gate(gate, values)
    call = values.get(inner)
    if inner is None or not is_op(call, "tanh"):
        return None
    scale, factors, more = _factors(values.get(_var(call.args[0])), values)
    if len(factors) != 1 or not _near(scale, (2 / 3.141592653589793) ** 0.5):
        return None
    total = values.get(_var(factors[0]))
    if not is_op(total, "add"):
        return None
    for plain, cubic in (tuple(total.args), tuple(total.args)[::-1]):
        if _same(plain, data) and (cube := _cube_of(cubic, data, values)) is not None:
            return data, (*steps, gate, inner, call.args[0], *more, factors[0], *cube)
    return None


def _cube_of(expr: tvm.ir.Expr, data: relax.Var, values: Values) -> tuple[relax.Var, ...] | None:
    """Return the steps of `0.044715 x^3`, None for anything else."""
    constant, factors, steps = _factors(values.get(_var(expr)), values)
    if not _near(constant, 0.044715):
        return None
    power = 0
    for factor in factors:
        call = values.get(_var(factor))
        if _same(factor, data):
            power += 1
        elif is_op(call, "power") and _same(call.args[0], data) and scalar_of(call.args[1]) in (2.0, 3.0):
            power += int(scalar_of(call.args[1]) or 0)
            steps = [*steps, factor]
        else:
            return None
    return (expr, *steps) if power == 3 else None


def _silu(value: tvm.ir.Expr, values: Values) -> Match | None:
    if not is_op(value, "multiply"):
        return None
    for data, gate in (tuple(value.args), tuple(value.args)[::-1]):
        call = values.get(_var(gate))
        if _var(data) is not None and is_op(call, "sigmoid") and _same(call.args[0], data):
            return data, (gate,)
    return None
