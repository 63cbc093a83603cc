"""Look into expressions, and rebuild them node by node where a rewrite changes dtypes or depends on a node's place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, Range
from tvm.ir.expr import TensorLoad
from tvm.sym import Analyzer

BINARY = (
    tirx.Add,
    tirx.Sub,
    tirx.Mul,
    tirx.Div,
    tirx.Mod,
    tirx.FloorDiv,
    tirx.FloorMod,
    tirx.Min,
    tirx.Max,
    tirx.EQ,
    tirx.NE,
    tirx.LT,
    tirx.LE,
    tirx.GT,
    tirx.GE,
    tirx.And,
    tirx.Or,
    tirx.BitwiseAnd,
    tirx.RShift,
)
Node = TypeVar("Node")

IF_THEN_ELSE = "prim.if_then_else"
# Calls without side effects that CUDA has for float32.
MATH_CALLS = frozenset(
    f"tirx.{name}"
    for name in (
        "exp", "exp2", "exp10", "log", "log10", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "sin", "cos", "tan",
        "sinh", "cosh", "asin", "acos", "atan", "atan2", "pow", "floor", "round", "nearbyint", "trunc", "fabs", "fmod",
        "isnan", "isinf", "isfinite",
    )
) | {"prim.ceil", "prim.log2"}  # fmt: skip


class UnsupportedExpressionError(Exception):
    """An expression, or what is done with it, is outside what a template makes; the message says why."""


def dtype_of(expr: tirx.Expr) -> str:
    """Return the dtype of an expression."""
    return str(expr.ty.dtype)


def rebuild(expr: tirx.Expr, visit: Callable[[tirx.Expr], tirx.Expr]) -> tirx.Expr:
    """Return a node with its operands replaced by what `visit` makes of them, in their own dtypes.

    Raises `UnsupportedExpressionError`: the node is of a kind that no template makes (a call with side effects, a
    vector, a tensor's address).
    """
    if isinstance(expr, (tirx.Var, tirx.IntImm, tirx.FloatImm)):
        return expr
    if isinstance(expr, BINARY):
        return type(expr)(*_of_one_width(visit(expr.a), visit(expr.b)))
    if isinstance(expr, tirx.Not):
        return tirx.Not(visit(expr.a))
    if isinstance(expr, tirx.Cast):
        return tirx.Cast(dtype_of(expr), visit(expr.value))
    if isinstance(expr, tirx.Select):
        return tirx.Select(visit(expr.condition), visit(expr.true_value), visit(expr.false_value))
    if isinstance(expr, TensorLoad):
        return expr.source[tuple(visit(index) for index in expr.indices)]
    if isinstance(expr, Call) and (call_name(expr) in MATH_CALLS or call_name(expr) == IF_THEN_ELSE):
        return Call(expr.op, [visit(argument) for argument in expr.args], ret_ty=expr.ty)
    name = call_name(expr) if isinstance(expr, Call) else type(expr).__name__
    raise UnsupportedExpressionError(f"it computes {name}, which no row or elementwise template makes")


def _of_one_width(left: tirx.Expr, right: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
    """Return two operands; of integers that differ in width, a number takes the other's, else the narrow one grows."""
    for number, other in ((left, right), (right, left)):
        dtypes = {dtype_of(number), dtype_of(other)}
        if isinstance(number, tirx.IntImm) and dtypes == {"int32", "int64"} and not isinstance(other, tirx.IntImm):
            wide = tirx.IntImm(dtype_of(other), int(number))
            return (wide, other) if number is left else (other, wide)
    if {dtype_of(left), dtype_of(right)} == {"int32", "int64"}:
        left, right = (one if dtype_of(one) == "int64" else tirx.Cast("int64", one) for one in (left, right))
    return left, right


def is_branch(expr: tirx.Expr) -> bool:
    """Whether an expression is a choice that evaluates only the chosen side."""
    return isinstance(expr, Call) and call_name(expr) == IF_THEN_ELSE


def rebuild_branch(expr: Call, visit: Callable[[tirx.Expr], tirx.Expr], analyzer: Analyzer) -> tirx.Expr:
    """Return a branch with its operands replaced; while `visit` sees a side, the analyzer knows what leads there."""
    condition = visit(expr.args[0])
    sides = []
    otherwise = analyzer.simplify(tirx.Not(condition))
    for known, side in ((condition, expr.args[1]), (otherwise, expr.args[2])):
        with analyzer.constraint_scope(known):
            sides.append(visit(side))
    return Call(expr.op, [condition, *sides], ret_ty=expr.ty)


def call_name(call: Call) -> str:
    """Return the name of a call's operator."""
    return str(getattr(call.op, "name", "a call of a function"))


def find_all(node: tirx.Expr | tirx.Stmt, kind: type[Node]) -> list[Node]:
    """Return the nodes of a kind in an expression or statement, outer ones before those inside them."""
    found: list[Node] = []
    tvm_ffi.structural_walk(node, (kind, found.append), order="pre")
    return found


def list_loads(expr: tirx.Expr) -> list[TensorLoad]:
    """Return the loads in an expression, loads inside the indices of other loads included."""
    return find_all(expr, TensorLoad)


def call_names(node: tirx.Expr | tirx.Stmt) -> set[str]:
    """Return the names of the operators called in an expression or statement: `tirx.exp`."""
    return {call_name(call) for call in find_all(node, Call)}


def used_vars(expr: tirx.Expr) -> set[tirx.Var]:
    """Return the variables of an expression."""
    return set(find_all(expr, tirx.Var))


def depends_on(expr: tirx.Expr, variables: Iterable[tirx.Var]) -> bool:
    """Whether any of some variables stands in an expression."""
    wanted = list(variables)
    return any(var.same_as(other) for var in find_all(expr, tirx.Var) for other in wanted)


def without_casts(expr: tirx.Expr) -> tirx.Expr:
    """Return what an expression casts, casts of casts included."""
    while isinstance(expr, tirx.Cast):
        expr = expr.value
    return expr


def constant_value(value: tirx.Expr) -> int | float | None:
    """Return the number that an expression is, None when it is none."""
    simple = Analyzer().simplify(value)
    return simple.value if isinstance(simple, (tirx.IntImm, tirx.FloatImm)) else None


def is_zero(expr: tirx.Expr) -> bool:
    """Whether an expression is the constant 0."""
    return isinstance(expr, tirx.IntImm) and int(expr) == 0


def substitute(expr: tirx.Expr, values: Mapping[tirx.Var, tirx.Expr]) -> tirx.Expr:
    """Return the expression with variables replaced."""
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda var: values.get(var, var)))


def tree_size(expr: tirx.Expr) -> int:
    """Return the nodes of an expression's tree."""
    return len(find_all(expr, Expr))


def ranged_analyzer(sizes: Iterable[tuple[tirx.Var, int]]) -> Analyzer:
    """Return an analyzer that knows each variable to be from 0 up to its size."""
    analyzer = Analyzer()
    for var, size in sizes:
        analyzer.bind(var, Range(0, size))
    return analyzer
