from __future__ import annotations

import tvm
from tvm import tirx

from relaxtune.schedules.templates.emit.epilogue import JUMPS
from relaxtune.schedules.tir.expressions import MATH_CALLS, call_name, rebuild


def test_functions_have_the_names_of_operators() -> None:
    """TVM (0.27) names some of them `prim.`: a kernel that rounds up was refused."""
    assert set(tvm.ir.Op.list_op_names()) >= MATH_CALLS
    x = tirx.Var("x", "float32")
    assert call_name(tirx.ceil(x)) in JUMPS
    assert call_name(tirx.log2(x)) in MATH_CALLS - JUMPS


def test_rebuild_takes_numbers_to_the_width_of_what_replaces_a_variable() -> None:
    narrow, wide = tirx.Var("narrow", "int32"), tirx.Var("wide", "int64")

    def visit(expr: tirx.Expr) -> tirx.Expr:
        return wide if expr.same_as(narrow) else rebuild(expr, visit)

    for made in (visit(narrow < 8), visit(8 - narrow), visit(narrow % 8 * 2)):
        assert str(made.a.ty.dtype) == str(made.b.ty.dtype) == "int64"
    assert str(visit(tirx.IntImm("int32", 8)).ty.dtype) == "int32"


def test_rebuild_widens_the_narrow_of_two_variables() -> None:
    first, second, wide = tirx.Var("first", "int32"), tirx.Var("second", "int32"), tirx.Var("wide", "int64")

    def visit(expr: tirx.Expr) -> tirx.Expr:
        return wide if expr.same_as(first) else rebuild(expr, visit)

    made = visit(first * second)
    assert str(made.a.ty.dtype) == str(made.b.ty.dtype) == "int64"
