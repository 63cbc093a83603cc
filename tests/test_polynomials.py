from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from relaxtune.models.dims import evaluate_dim
from relaxtune.polynomials import Polynomial, quotient, read_size, smaller

BATCH, PAST, SEQUENCE = map(Polynomial.symbol, ("batch", "past", "sequence"))


def test_numbers_mix_with_names() -> None:
    assert BATCH + BATCH + Polynomial.number(1) == 2 * BATCH + 1
    assert Polynomial.number(1) - BATCH == 1 - BATCH
    assert BATCH - BATCH == 0
    assert (BATCH + 3) - BATCH == 3
    assert hash((BATCH + 3) - BATCH) == hash(3)
    assert BATCH not in (1, 0, SEQUENCE)


@pytest.mark.parametrize("divisor", [BATCH, PAST + 1, PAST + SEQUENCE, 64 * (PAST + 1), BATCH * (SEQUENCE + PAST) * 3])
@pytest.mark.parametrize("quotient", [Polynomial.number(12), BATCH, PAST + 1, 2 * SEQUENCE * BATCH + PAST])
def test_a_product_divides_by_its_factors(quotient: Polynomial, divisor: Polynomial) -> None:
    assert (quotient * divisor).divided(divisor) == quotient
    assert (quotient * divisor + 1).divided(divisor) is None


def test_nothing_divides_by_zero() -> None:
    assert BATCH.divided(Polynomial.number(0)) is None


NUMBERS = st.integers(0, 12).map(Polynomial.number)
SIZES = st.recursive(
    NUMBERS | st.sampled_from((BATCH, PAST, SEQUENCE)),
    lambda part: st.one_of(
        st.builds(lambda a, b: a + b, part, part), st.builds(lambda a, b: a * b, part, part),
        st.builds(smaller, part, part),
        st.builds(lambda a, n: quotient(a, Polynomial.number(n)), part, st.integers(1, 9)),
    ), max_leaves=6,
)  # fmt: skip


@given(size=SIZES, at=st.tuples(*[st.integers(0, 40)] * 3))
def test_text_of_a_size_is_read_as_the_same_size(size: Polynomial, at: tuple[int, int, int]) -> None:
    sizes = dict(zip(("batch", "past", "sequence"), at, strict=True))
    number = size.substitute({name: Polynomial.number(one) for name, one in sizes.items()}).value
    again = read_size(str(size))
    assert again is not None
    assert evaluate_dim(str(size), sizes) == evaluate_dim(str(again), sizes) == number


@given(above=SIZES, below=st.integers(1, 9), at=st.integers(0, 40))
def test_quotients_are_rounded_down(above: Polynomial, below: int, at: int) -> None:
    sizes = {"batch": at, "past": 3, "sequence": 5}
    whole = evaluate_dim(str(above), sizes)
    assert isinstance(whole, int)
    assert evaluate_dim(str(quotient(above, Polynomial.number(below))), sizes) == whole // below


def test_terms_that_a_number_divides_are_no_part_of_a_quotient() -> None:
    assert str(quotient(PAST - 14, Polynomial.number(14)) + 1) == "(past // 14)"
    assert quotient(4 * BATCH + 3, Polynomial.number(2)) == 2 * BATCH + 1
    assert smaller(PAST + 1, PAST) == PAST
    assert str(smaller(PAST, Polynomial.number(16))) == "min(past, 16)"
    assert quotient(PAST, Polynomial.number(2)).axes == {"past"}


@pytest.mark.parametrize("text", ["n %", "floor(n)", "n.size", "2.5", "a b"])
def test_other_text_is_no_size(text: str) -> None:
    assert read_size(text) is None
