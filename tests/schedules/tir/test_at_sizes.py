"""Functions of symbolic sizes at one set of them."""

from __future__ import annotations

from tvm import te, tirx

from relaxtune.schedules.tir.blocks import shape_of
from relaxtune.schedules.tir.symbolic_sizes import at_sizes

PAST = tirx.Var("past", "int64")


def appended(*shapes: tuple[tirx.Expr | int, ...]) -> tirx.PrimFunc:
    """Return a function of tensors of the given shapes that copies the first rows of the last one."""
    tensors = [te.placeholder(shape, "float32", name=f"x{number}") for number, shape in enumerate(shapes)]
    copied = te.compute((1, 4), lambda i, j: tensors[-1][i, j], name="copied")
    return te.create_prim_func([*tensors, copied], index_dtype_override="int64")


def test_sizes_that_follow_from_another_are_numbers_too() -> None:
    func = at_sizes(appended((PAST, 4), (PAST + 1, 4)), {"past": 7, "batch": 2})
    assert func is not None
    assert [shape_of(param) for param in func.params] == [(7, 4), (8, 4), (1, 4)]


def test_none_when_a_variable_has_no_size_or_is_no_size_alone() -> None:
    assert at_sizes(appended((PAST, 4)), {"batch": 2}) is None
    assert at_sizes(appended((PAST + 1, 4)), {"past": 7}) is None
