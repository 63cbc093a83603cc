"""Small readers of Relax IR that several passes share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard

import numpy as np
import tvm
from tvm import relax, tirx
from tvm_ffi import structural_equal

from relaxtune.pipeline.importer.converter_input import array_in_place, tensor_in_place

MAIN = "main"
HALVES = ("float16", "bfloat16")
# Operators whose result has one element for each element of their operands, broadcast.
ELEMENTWISE = (
    *("add", "subtract", "multiply", "divide", "power", "maximum", "minimum"),
    *("negative", "abs", "exp", "log", "sqrt", "rsqrt", "square", "tanh", "sigmoid", "erf", "astype", "clip"),
    *("nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.relu", "nn.leakyrelu", "nn.softplus"),
)


def main_of(mod: tvm.ir.IRModule) -> relax.Function:
    """Return the Relax function `main`."""
    function: relax.Function = mod[MAIN]
    return function


def with_functions(
    mod: tvm.ir.IRModule, functions: Mapping[tvm.ir.GlobalVar, tirx.PrimFunc | relax.Function]
) -> tvm.ir.IRModule:
    """Return `mod` with some functions replaced."""
    return tvm.ir.IRModule({**dict(mod.functions_items()), **functions}, attrs=mod.attrs, global_infos=mod.global_infos)


def with_main(mod: tvm.ir.IRModule, function: relax.Function) -> tvm.ir.IRModule:
    """Return `mod` with another `main`; bindings without a reader are dropped."""
    return with_functions(mod, {mod.get_global_var(MAIN): relax.analysis.remove_all_unused(function)})


def bindings_of(function: relax.Function) -> Iterator[relax.Binding]:
    """Yield the bindings of a function's own blocks, in execution order (nested `If` bodies are not entered)."""
    body = function.body
    if isinstance(body, relax.SeqExpr):
        for block in body.blocks:
            # A slice is a list. TVM's own iteration over an array takes three times as long.
            yield from block.bindings[:]


def binding_count(mod: tvm.ir.IRModule) -> int:
    """Return how many bindings `main` has."""
    body = main_of(mod).body
    return sum(len(block.bindings) for block in body.blocks) if isinstance(body, relax.SeqExpr) else 0


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
    return expr.args[0] if is_op(expr, "call_tir") and isinstance(expr.args[0], tvm.ir.GlobalVar) else None


def is_constant(expr: tvm.ir.Expr) -> bool:
    """Return whether `expr` is a tensor constant."""
    return isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.ty, relax.TensorType)


def array_of(constant: tvm.ir.Expr) -> np.ndarray:
    """Return a tensor constant's data as an array, to read."""
    return array_in_place(constant.value)


def constant_of(array: np.ndarray) -> tvm.ir.Expr:
    """Return an array as a constant of its dtype."""
    return relax.const(tensor_in_place(array))


def is_filled(array: np.ndarray) -> bool:
    """Return whether an array has elements, and they are all equal."""
    # Most weights differ in their first elements.
    return array.size > 0 and all((part == array.flat[0]).all() for part in (array.reshape(-1)[:64], array))


def number_of(expr: tvm.ir.Expr, other: tvm.ir.Expr) -> float | None:
    """Return the number that a constant is to each element of the other operand of an elementwise operation.

    None where its elements differ, and where it would broadcast `other` to another shape: the operation is then not
    one of `other` and a number.
    """
    own, shape = (static_shape(expr), shape_of(other)) if is_constant(expr) else (None, None)
    if own is None or (own and (shape is None or len(own) > len(shape))):
        return None
    pairs = zip(own[::-1], (shape or [])[::-1], strict=False)
    if any(size != 1 and not (isinstance(axis, tirx.IntImm) and int(axis) == size) for size, axis in pairs):
        return None
    array = array_of(expr)
    return float(array.flat[0]) if is_filled(array) else None


def either_way(call: relax.Call) -> tuple[tuple[tvm.ir.Expr, tvm.ir.Expr], tuple[tvm.ir.Expr, tvm.ir.Expr]]:
    """Return the operands of a commutative operation in both orders."""
    left, right = call.args
    return (left, right), (right, left)


def numbers_beside(call: relax.Call) -> list[tuple[tvm.ir.Expr, float]]:
    """Return the readings of a call of two operands as (tensor, number); a quotient or difference has one at most."""
    orders = either_way(call) if is_op(call, "add", "multiply", "maximum") else either_way(call)[:1]
    return [(data, number) for data, other in orders if (number := number_of(other, data)) is not None]


def multiplies_by_matrix(expr: tvm.ir.Expr | None) -> TypeGuard[relax.Call]:
    """Return whether `expr` is a matmul of rows by a constant matrix, both of known rank."""
    if not is_op(expr, "matmul") or not is_constant(expr.args[1]):
        return False
    left, right = shape_of(expr.args[0]), static_shape(expr.args[1])
    return left is not None and len(left) >= 2 and right is not None and len(right) == 2


def static_shape(expr: tvm.ir.Expr) -> tuple[int, ...] | None:
    """Return the shape of a tensor when every axis is a number, or None."""
    shape = shape_of(expr)
    if shape is None or not all(isinstance(axis, tirx.IntImm) for axis in shape):
        return None
    return tuple(int(axis) for axis in shape)


def shape_of(expr: tvm.ir.Expr) -> list[tirx.Expr] | None:
    """Return the axes of a tensor of known rank and shape, symbolic ones included, or None."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    return ty.shape.values[:]  # type: ignore[no-any-return]


def same_shape(left: tvm.ir.Expr, right: tvm.ir.Expr) -> bool:
    """Return whether two tensors are known to have one shape, symbolic axes included."""
    return equal_axes(shape_of(left), shape_of(right))


def equal_axes(left: Sequence[tirx.Expr] | None, right: Sequence[tirx.Expr] | None) -> bool:
    """Return whether two shapes are known and equal."""
    if left is None or right is None or len(left) != len(right):
        return False
    return all(structural_equal(a, b) for a, b in zip(left, right, strict=True))


def longest_row_axis(expr: tvm.ir.Expr) -> int | None:
    """Return the longest of the axes before the last, None when one is symbolic."""
    rows = (shape_of(expr) or [])[:-1]
    known = [int(axis) for axis in rows if isinstance(axis, tirx.IntImm)]
    return max(known) if known and len(known) == len(rows) else None


def row_count(expr: tvm.ir.Expr) -> int | None:
    """Return the product of the axes before the last, None when one is symbolic."""
    rows = (shape_of(expr) or [])[:-1]
    return math.prod(map(int, rows)) if all(isinstance(axis, tirx.IntImm) for axis in rows) else None


def dtype_of(expr: tvm.ir.Expr) -> str:
    """Return a tensor's dtype name, or "" when it is not a tensor of known dtype."""
    ty = expr.ty
    return "" if not isinstance(ty, relax.TensorType) or ty.dtype is None else str(ty.dtype)


def transposed_axes(call: relax.Call) -> list[int]:
    """Return the axes of a transpose in their new order; none given means reversed."""
    rank, axes = int(call.args[0].ty.ndim), call.attrs.axes
    return list(range(rank))[::-1] if axes is None else [int(axis) % rank for axis in axes]


def constants_in(expr: tvm.ir.Expr) -> list[tvm.ir.Expr]:
    """Return the tensor constants inside `expr`, each once."""
    found: list[tvm.ir.Expr] = []
    relax.analysis.post_order_visit(expr, lambda e: found.append(e) if is_constant(e) else None)
    return found


Key = str | tuple["Key", ...]


def key_of(expr: tvm.ir.Expr, env: Mapping[relax.Var, Key]) -> Key:
    """Return a hashable identity of an expression: operator, attributes, operands; variables are named by `env`.

    Constants of one element are equal by value, others only when they are one object.
    """
    if isinstance(expr, relax.Var):
        return env.get(expr, f"var:{expr.name}")
    if isinstance(expr, tvm.ir.GlobalVar):
        return f"global:{expr.name_hint}"
    if isinstance(expr, tvm.ir.GenericConst):
        shape = static_shape(expr)
        return f"scalar:{expr.ty}:{array_of(expr).tobytes().hex()}" if shape in ((), (1,)) else f"const:{hash(expr)}"
    if isinstance(expr, relax.Call):
        op = expr.op.name if isinstance(expr.op, tvm.ir.Op) else key_of(expr.op, env)
        return ("call", op, *(key_of(arg, env) for arg in expr.args), str(expr.attrs) if expr.attrs is not None else "")
    if isinstance(expr, relax.Tuple):
        return ("tuple", *(key_of(item, env) for item in expr.fields))
    if isinstance(expr, relax.TupleGetItem):
        return ("item", key_of(expr.tuple_value, env), str(expr.index))
    return str(expr)
