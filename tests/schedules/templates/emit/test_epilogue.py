"""The float32 form of epilogues that were written in half precision."""

from __future__ import annotations

import pytest
from tvm import tirx

from relaxtune.schedules.templates.emit.epilogue import in_float32
from relaxtune.schedules.templates.emit.fast_math import fast_gelu

SUM = tirx.Var("accumulator", "float32")


def biased(dtype: str) -> tirx.Expr:
    """Return a sum with a bias, as graphs in half precision have it."""
    return tirx.Cast(dtype, SUM) + tirx.Var("bias", dtype)


def gelu(dtype: str) -> tirx.Expr:
    """Return gelu as it is legalised in half precision: erf alone is computed in float32."""
    x, half = biased(dtype), tirx.FloatImm(dtype, 0.5)
    power = tirx.erf(tirx.Cast("float32", x * tirx.FloatImm(dtype, 0.5**0.5)))
    return x * (half + tirx.Cast(dtype, power) * half)


def gelu_tanh(dtype: str) -> tirx.Expr:
    x, root = biased(dtype), tirx.FloatImm(dtype, 0.7978845608)
    one, cubic = tirx.FloatImm(dtype, 1.0), tirx.FloatImm(dtype, 0.044715)
    return tirx.FloatImm(dtype, 0.5) * x * (one + tirx.tanh(root * x * (one + cubic * x * x)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", [gelu, gelu_tanh])
def test_gelu_of_halves_is_rounded_once_and_takes_its_fast_form(form, dtype: str) -> None:
    wide = in_float32(form(dtype))
    assert isinstance(wide, tirx.Cast)
    assert str(wide.ty.dtype) == dtype
    assert isinstance(wide.value, tirx.Mul)
    # Left in half precision: the rounding at the end, and the bias as it is stored.
    assert wide.script().count(f'"{dtype}"') + wide.script().count(f"T.{dtype}") == 1
    assert "relaxtune_gelu" in fast_gelu(wide.value).script()


@pytest.mark.parametrize(
    "value",
    [
        biased("float16"),
        biased("float16") * tirx.FloatImm("float16", 0.5),
        tirx.erf(SUM) * SUM,
        tirx.Cast("float16", SUM),
        tirx.tanh(biased("float16")) + tirx.round(biased("float16")),
        tirx.tanh(biased("float16")) + tirx.Cast("float16", tirx.Cast("int32", biased("float16"))),
    ],
)
def test_values_without_functions_of_float32_and_with_jumps_are_left(value: tirx.Expr) -> None:
    assert in_float32(value).same_as(value)


def test_choices_keep_their_conditions() -> None:
    x = biased("float16")
    value = tirx.Select(x > tirx.FloatImm("float16", 0.0), x, tirx.exp(x) - tirx.FloatImm("float16", 1.0))
    wide = in_float32(value)
    assert isinstance(wide, tirx.Cast)
    assert isinstance(wide.value, tirx.Select)
    assert str(wide.value.true_value.ty.dtype) == "float32"
    assert str(wide.value.condition.ty.dtype) == "bool"
