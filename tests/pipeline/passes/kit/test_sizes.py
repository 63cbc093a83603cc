from __future__ import annotations

import pytest
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.sizes import Size, Symbols, fits, order, quotient, size_of, sizes_of
from relaxtune.polynomials import Polynomial

B, S = Polynomial.symbol("b"), Polynomial.symbol("s")
b, s = tirx.Var("b", "int64"), tirx.Var("s", "int64")


@pytest.mark.parametrize(
    ("axis", "size"), [(tirx.IntImm("int64", 3), 3), (b * s + 2, B * S + 2), (b * 2 - b - b, 0), (s, S)]
)
def test_size_of_an_axis_is_a_sum_of_products(axis: tirx.Expr, size: Size) -> None:
    assert size_of(axis) == size


def test_an_axis_that_is_divided_has_no_size() -> None:
    assert size_of(tirx.floordiv(s, 2)) is None
    assert sizes_of(relax.Var("x", relax.TensorType([b, tirx.floordiv(s, 2)], "float32"))) is None
    assert sizes_of(relax.Var("x", relax.TensorType([b, 4], "float32"))) == (B, 4)


@pytest.mark.parametrize(
    ("size", "by", "expected"),
    [(12, 4, 3), (12, 5, None), (B * S * 4, S * 2, B * 2), (B * S, B + 1, None), (B * S, B * S, 1), (B, 0, None)],
)
def test_quotient_is_exact_or_none(size: Size, by: Size, expected: Size | None) -> None:
    assert quotient(size, by) == expected


def test_fits_holds_for_every_axis_that_is_not_negative() -> None:
    assert fits(3, 4)
    assert not fits(4, 3)
    assert fits(S, S * 2)
    assert fits(S, S + B)
    assert not fits(S, B)


def test_divisors_come_first() -> None:
    assert sorted([B * S, S * 4, 8, S, 2], key=order) == [2, 8, S, S * 4, B * S]


def test_symbols_write_what_they_know() -> None:
    symbols = Symbols([b, s])
    assert symbols.knows(B * S, 3)
    assert not symbols.knows(Polynomial.symbol("other"))
    assert size_of(symbols.expression(B * S * 3 + S - 1)) == B * S * 3 + S - 1
    assert symbols.expression(7) == 7


def test_a_name_of_two_axes_is_known_to_nothing() -> None:
    assert not Symbols([b, tirx.Var("b", "int64")]).knows(B)
