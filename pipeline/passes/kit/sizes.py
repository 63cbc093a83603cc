"""Sizes of axes that passes calculate with: numbers, and polynomials over the names of symbolic axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.ir import shape_of
from relaxtune.polynomials import Polynomial
from relaxtune.schedules.sizes import polynomial_of

# A number is always an `int`, or equal to one; arithmetic may mix both kinds.
Size: TypeAlias = "int | Polynomial"
Shape: TypeAlias = "tuple[Size, ...]"
# Numbers of axes before and after, of one group of axes.
Groups = list[tuple[tuple[int, ...], tuple[int, ...]]]


def sizes_of(expr: tvm.ir.Expr) -> Shape | None:
    """Return the shape of a tensor; None where an axis is not known, or is no sum of products of axes."""
    shape = shape_of(expr)
    sizes = None if shape is None else [size_of(axis) for axis in shape]
    return None if sizes is None or None in sizes else tuple(size for size in sizes if size is not None)


def size_of(axis: tirx.Expr) -> Size | None:
    """Return an axis as a size, None where it is no sum of products of axes."""
    if isinstance(axis, int | tirx.IntImm):
        return int(axis)
    size = polynomial_of(axis)
    return None if size is None else plain(size)


def listed_sizes(expr: tvm.ir.Expr) -> list[Size] | None:
    """Return the numbers and sizes of a tuple, None when one is not known."""
    found = [size_of(field) for field in expr.fields] if isinstance(expr, relax.Tuple) else [None]
    return None if None in found else [size for size in found if size is not None]


def plain(size: Size) -> Size:
    """Return a size, as an `int` where it is a number."""
    return size if isinstance(size, int) or size.value is None else size.value


def quotient(size: Size, by: Size) -> Size | None:
    """Return how often one size is in another, None where it does not divide it."""
    if by == 0:
        return None
    if isinstance(size, int) and isinstance(by, int):
        return size // by if size % by == 0 else None
    whole, part = (Polynomial.number(one) if isinstance(one, int) else one for one in (size, by))
    found = whole.divided(part)
    return None if found is None else plain(found)


def fits(part: Size, size: Size) -> bool:
    """Return whether one size is surely no larger than another, given that no axis is negative."""
    rest = plain(size - part)
    return rest >= 0 if isinstance(rest, int) else rest.is_positive


def order(size: Size) -> tuple[int, int]:
    """Return a key by which divisors come before what they divide."""
    if isinstance(size, int):
        return 0, size
    names, factor = size.leading if size.terms else ((), 0)
    return len(names), factor


def group_axes(before: Shape, after: Shape) -> Groups | None:
    """Return which axes become which, in the smallest groups; None where the sizes do not tell.

    Axes of size 1 are in no group.
    """
    left = [axis for axis, size in enumerate(before) if size != 1]
    right = [axis for axis, size in enumerate(after) if size != 1]
    groups: Groups = []
    while left and right:
        found = next(
            (
                (many, more)
                for total in range(2, len(left) + len(right) + 1)
                for many in range(1, min(total, len(left) + 1))
                if 0 < (more := total - many) <= len(right)
                and math.prod(before[axis] for axis in left[:many]) == math.prod(after[axis] for axis in right[:more])
            ),
            None,
        )
        if found is None:
            return None
        groups.append((tuple(left[: found[0]]), tuple(right[: found[1]])))
        left, right = left[found[0] :], right[found[1] :]
    return None if left or right else groups


class Symbols:
    """The variables of symbolic axes, of `main` say, to write sizes as expressions."""

    def __init__(self, variables: Iterable[tirx.Var]) -> None:
        self._variables: dict[str, tirx.Var] = {}
        ambiguous = set()
        for var in variables:
            if not self._variables.setdefault(str(var.name), var).same_as(var):
                ambiguous.add(str(var.name))
        for name in ambiguous:
            del self._variables[name]

    def knows(self, *sizes: Size) -> bool:
        """Return whether every name in some sizes is the name of one axis."""
        return all(name in self._variables for size in sizes if not isinstance(size, int) for name in size.names)

    def expression(self, size: Size) -> int | tirx.Expr:
        """Return a size as a number or an expression; every name has to be known."""
        if isinstance(size, int):
            return size
        total: tirx.Expr = tirx.IntImm("int64", 0)
        for names, factor in sorted(size.terms, key=lambda term: -len(term[0])):
            product: tirx.Expr | None = None
            for name in names:
                product = self._variables[name] if product is None else product * self._variables[name]
            number = tirx.IntImm("int64", factor)
            total = total + (number if product is None else product if factor == 1 else product * number)
        return total

    def shape(self, sizes: Sequence[Size]) -> tuple[int | tirx.Expr, ...]:
        """Return a shape of sizes as numbers and expressions."""
        return tuple(map(self.expression, sizes))
