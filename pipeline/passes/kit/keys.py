"""Identities of expressions, to find equal ones."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import array_of, static_shape

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
