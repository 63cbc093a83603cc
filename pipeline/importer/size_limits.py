"""Sizes that every call keeps: the limits of a model's axes, as the importer's expressions."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import tirx

from relaxtune.models.axes.polynomials import Polynomial, quotient, read_size, smaller
from relaxtune.models.spec import AxisRelation


class SizeLimits:
    """The differences of sizes that calls keep from being negative."""

    def __init__(self, relations: Sequence[AxisRelation]) -> None:
        self._gaps: list[Polynomial] = []
        for one in relations:
            left, right = read_size(one.axis), read_size(one.size)
            if left is not None and right is not None:
                gap = left - right
                self._gaps += [gap, 0 - gap] if one.sign == "=" else [gap if one.sign == ">=" else 0 - gap]

    def keep(self, gap: tvm.ir.Expr | int) -> bool:
        """Return whether a difference of sizes is 0 or more in every call, by one of the limits."""
        known = polynomial_of(gap)
        return known is not None and any((known - one).is_positive for one in (Polynomial(), *self._gaps))


def polynomial_of(size: tvm.ir.Expr | int) -> Polynomial | None:
    """Return a size as a polynomial over the names of axes; None where it is no sum, product, quotient or minimum."""
    if isinstance(size, int | tirx.IntImm):
        return Polynomial.number(int(size))
    if isinstance(size, tirx.Var):
        return Polynomial.symbol(str(size.name))
    if not isinstance(size, tirx.Add | tirx.Sub | tirx.Mul | tirx.FloorDiv | tirx.Min):
        return None
    left, right = polynomial_of(size.a), polynomial_of(size.b)
    if left is None or right is None:
        return None
    match size:
        case tirx.Add():
            return left + right
        case tirx.Sub():
            return left - right
        case tirx.Mul():
            return left * right
        case tirx.FloorDiv():
            return quotient(left, right)
    return smaller(left, right)
