from __future__ import annotations

from tvm import tirx

from relaxtune.schedules.tir.expressions import rebuild


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
