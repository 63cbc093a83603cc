"""Small readers of Relax IR that several passes share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

MAIN = "main"
HALVES = ("float16", "bfloat16")


def main_of(mod: tvm.ir.IRModule) -> relax.Function:
    """Return the Relax function `main`."""
    function: relax.Function = mod[MAIN]
    return function


def with_main(mod: tvm.ir.IRModule, function: relax.Function) -> tvm.ir.IRModule:
    """Return `mod` with another `main`; bindings nobody reads are dropped."""
    result = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    result[result.get_global_var(MAIN)] = relax.analysis.remove_all_unused(function)
    return result


def rewrite_main(mod: tvm.ir.IRModule, mutator: PyExprMutator) -> tvm.ir.IRModule:
    """Return `mod` with `main` rewritten by `mutator` and bindings nobody reads dropped.

    A mutator that makes PrimFuncs is constructed over `mod`, so that its builder holds both.
    """
    function: relax.Function = mutator.visit_expr(main_of(mod))
    made = mutator.builder_.get()
    return with_main(made if len(made.functions) else mod, function)


def bindings_of(function: relax.Function) -> Iterator[relax.Binding]:
    """Yield the bindings of a function's own blocks, in execution order (nested `If` bodies are not entered)."""
    body = function.body
    if isinstance(body, relax.SeqExpr):
        for block in body.blocks:
            yield from block.bindings


def binding_count(mod: tvm.ir.IRModule) -> int:
    """Return how many bindings `main` has."""
    return sum(1 for _ in bindings_of(main_of(mod)))


def values_of(function: relax.Function) -> dict[relax.Var, tvm.ir.Expr]:
    """Return variable -> value it is bound to."""
    return {b.var: b.value for b in bindings_of(function) if isinstance(b, relax.VarBinding)}


def users_of(function: relax.Function) -> dict[relax.Var, list[relax.Var]]:
    """Return variable -> variables whose bindings read it; the function's result counts as a reader of its own."""
    users: dict[relax.Var, list[relax.Var]] = {}
    for binding in bindings_of(function):
        for used in relax.analysis.free_vars(binding.value):
            users.setdefault(used, []).append(binding.var)
    for used in relax.analysis.free_vars(function.body.body):
        users.setdefault(used, []).append(used)
    return users


def is_op(expr: tvm.ir.Expr | None, *names: str) -> TypeGuard[relax.Call]:
    """Return whether `expr` is a call of one of the named Relax operators (without the leading `relax.`)."""
    return (
        isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name.removeprefix("relax.") in names
    )


def called_function(expr: tvm.ir.Expr) -> tvm.ir.GlobalVar | None:
    """Return the PrimFunc a `call_tir` calls, or None for any other expression."""
    if is_op(expr, "call_tir") and isinstance(expr.args[0], tvm.ir.GlobalVar):
        return expr.args[0]
    return None


def is_constant(expr: tvm.ir.Expr) -> bool:
    """Return whether `expr` is a tensor constant."""
    return isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.ty, relax.TensorType)


def array_of(constant: tvm.ir.Expr) -> np.ndarray:
    """Return a tensor constant's data as an array."""
    array: np.ndarray = constant.value.numpy()
    return array


def scalar_of(expr: tvm.ir.Expr) -> float | None:
    """Return the value of a constant all of whose elements are equal, or None."""
    if not is_constant(expr):
        return None
    array = array_of(expr).astype("float64")
    if array.size == 0 or not (array == array.flat[0]).all():
        return None
    return float(array.flat[0])


def multiplies_by_matrix(expr: tvm.ir.Expr | None) -> TypeGuard[relax.Call]:
    """Return whether `expr` is a matmul of rows by a constant matrix, both of known rank."""
    if not is_op(expr, "matmul") or not is_constant(expr.args[1]):
        return False
    left, right = shape_of(expr.args[0]), static_shape(expr.args[1])
    return left is not None and len(left) >= 2 and right is not None and len(right) == 2


def static_shape(expr: tvm.ir.Expr) -> tuple[int, ...] | None:
    """Return the shape of a tensor when every axis is a number, or None."""
    shape = shape_of(expr)
    if shape is None or not all(isinstance(axis, tvm.tirx.IntImm) for axis in shape):
        return None
    return tuple(int(axis) for axis in shape)


def shape_of(expr: tvm.ir.Expr) -> list[tvm.tirx.Expr] | None:
    """Return the axes of a tensor of known rank and shape, symbolic ones included, or None."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    return list(ty.shape.values)


def dtype_of(expr: tvm.ir.Expr) -> str:
    """Return a tensor's dtype name, or "" when it is not a tensor of known dtype."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or ty.dtype is None:
        return ""
    return str(ty.dtype)


def constants_in(expr: tvm.ir.Expr) -> list[tvm.ir.Expr]:
    """Return the tensor constants inside `expr`, each once."""
    found: list[tvm.ir.Expr] = []
    relax.analysis.post_order_visit(expr, lambda e: found.append(e) if is_constant(e) else None)
    return found


def emit_named(mutator: PyExprMutator, var: relax.Var, value: tvm.ir.Expr) -> relax.Var:
    """Bind `value` under the name and kind of `var` (whose type may differ), let uses of `var` follow, return it."""
    value = mutator.builder_.normalize(value)
    kind = relax.DataflowVar if isinstance(var, relax.DataflowVar) else relax.Var
    new = kind(var.name, value.ty)
    mutator.builder_.emit_normalized(relax.VarBinding(new, value))
    mutator.set_var_remap(var, new)
    return new


def emit_extra(mutator: PyExprMutator, name: str, value: tvm.ir.Expr) -> relax.Var:
    """Bind `value` to a new variable of a dataflow block under the given, unused name."""
    value = mutator.builder_.normalize(value)
    new = relax.DataflowVar(name, value.ty)
    mutator.builder_.emit_normalized(relax.VarBinding(new, value))
    return new


def constant_dtypes(mod: tvm.ir.IRModule) -> set[str]:
    """Return the dtypes of the tensor constants that `main` reads."""
    return {dtype_of(constant) for binding in bindings_of(main_of(mod)) for constant in constants_in(binding.value)}
