from __future__ import annotations

import pytest

from relaxtune.models.axes.polynomials import Polynomial

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
