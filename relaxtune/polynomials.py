"""Sizes of axes as polynomials with whole coefficients over names: `past + sequence`, `2 * heads * width`.

A quotient rounded down and the smaller of two sizes are names too, which know what they are computed from.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Self

Monomial = tuple[str, ...]

# More than any exporter writes; products and remainders of a hostile text would grow without end.
_TERMS_MAX, _TEXT_MAX = 64, 1000


class Computed(str):
    """The name of a size that is no polynomial: `((n + 1) // 2)`, or `min(n, 512)`."""

    operator: str  # "//" or "min".
    # The sizes that it is computed from.
    left: Polynomial
    right: Polynomial

    def __new__(cls, operator: str, left: Polynomial, right: Polynomial) -> Self:
        """Return the name, which is its text."""
        above, below = f"({left})" if len(left.terms) > 1 else left, f"({right})" if " " in str(right) else right
        name = super().__new__(cls, f"min({left}, {right})" if operator == "min" else f"({above} // {below})")
        name.operator, name.left, name.right = operator, left, right
        return name

    def at(self, sizes: Mapping[str, int]) -> int | None:
        """Return the number that it is, as `Polynomial.at`."""
        left, right = self.left.at(sizes), self.right.at(sizes)
        if left is None or right is None or (self.operator == "//" and right == 0):
            return None
        return left // right if self.operator == "//" else min(left, right)


@dataclass(frozen=True, eq=False)
class Polynomial:
    """A sum of products; `terms` holds (sorted names, coefficient) without zeros, sorted."""

    terms: tuple[tuple[Monomial, int], ...] = ()

    @classmethod
    def number(cls, value: int) -> Self:
        """Return a constant."""
        return cls((((), value),) if value else ())

    @classmethod
    def symbol(cls, name: str) -> Self:
        """Return the polynomial of one name."""
        return cls((((name,), 1),))

    @classmethod
    def _of(cls, terms: Iterable[tuple[Monomial, int]]) -> Self:
        total: dict[Monomial, int] = {}
        for names, factor in terms:
            total[names] = total.get(names, 0) + factor
        return cls(tuple(sorted((names, factor) for names, factor in total.items() if factor)))

    def _read(self, other: Self | int) -> Self:
        return self.number(other) if isinstance(other, int) else other

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same size; a constant equals its number."""
        return (
            self.value == other
            if isinstance(other, int)
            else isinstance(other, Polynomial) and self.terms == other.terms
        )

    def __hash__(self) -> int:
        """Return a hash that a constant shares with its number."""
        return hash(self.terms if self.value is None else self.value)

    def __add__(self, other: Self | int) -> Self:
        """Return the sum."""
        return self._of((*self.terms, *self._read(other).terms))

    def __sub__(self, other: Self | int) -> Self:
        """Return the difference."""
        return self._of((*self.terms, *((names, -factor) for names, factor in self._read(other).terms)))

    def __mul__(self, other: Self | int) -> Self:
        """Return the product."""
        return self._of((tuple(sorted((*a, *b))), x * y) for a, x in self.terms for b, y in self._read(other).terms)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: int) -> Self:
        """Return the difference of a number and this."""
        return self._read(other) - self

    @property
    def value(self) -> int | None:
        """The number it is, None where a name is left."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def names(self) -> tuple[str, ...]:
        """The names in it."""
        return tuple(dict.fromkeys(name for names, _ in self.terms for name in names))

    @property
    def axes(self) -> frozenset[str]:
        """The names in it that are not computed, those of computed names included."""
        return frozenset().union(
            *(name.left.axes | name.right.axes if isinstance(name, Computed) else {name} for name in self.names)
        )

    @property
    def leading(self) -> tuple[Monomial, int]:
        """The product of most names; of two polynomials, their product has the product of both."""
        return max(self.terms, key=lambda term: (len(term[0]), term[0]))

    @property
    def is_positive(self) -> bool:
        """Whether no coefficient is negative: sizes in, a size out."""
        return all(factor > 0 for _, factor in self.terms)

    def substitute(self, values: Mapping[str, Polynomial]) -> Polynomial:
        """Return the polynomial with names replaced."""
        put = {name: _put(name, values) for name in self.names}
        if all(size == Polynomial.symbol(name) for name, size in put.items()):
            return self
        result = Polynomial()
        for names, factor in self.terms:
            product = Polynomial.number(factor)
            for name in names:
                product *= put[name]
            result += product
        return result

    def at(self, sizes: Mapping[str, int]) -> int | None:
        """Return the number that it is where names have these sizes; None where one is missing, or a divisor is 0."""
        total = 0
        for names, factor in self.terms:
            for name in names:
                size = name.at(sizes) if isinstance(name, Computed) else sizes.get(name)
                if size is None:
                    return None
                factor *= size
            total += factor
        return total

    def divided(self, divisor: Self) -> Self | None:
        """Return the quotient, None where it is no polynomial of whole coefficients."""
        if not divisor.terms:
            return None
        below, number = divisor.leading
        rest, result = self, self.number(0)
        while rest.terms:
            names, factor = rest.leading
            left = list(names)
            for name in below:
                if name not in left:
                    return None
                left.remove(name)
            if factor % number:
                return None
            step = self._of([(tuple(left), factor // number)])
            result, rest = result + step, rest - step * divisor
        return result

    def solved_for(self, name: str) -> Self | None:
        """Return what a name is where this is zero; None where it stands in a product, or with a factor."""
        own = [(names, factor) for names, factor in self.terms if name in names]
        if len(own) != 1 or own[0][0] != (name,) or abs(own[0][1]) != 1:
            return None
        rest = self._of((names, -factor) for names, factor in self.terms if names != (name,))
        return rest if own[0][1] == 1 else self._of((names, -factor) for names, factor in rest.terms)

    def __str__(self) -> str:
        """Return it as a dimension: names first, the number last."""
        parts = []
        for names, factor in (*(term for term in self.terms if term[0]), *(term for term in self.terms if not term[0])):
            sign = "-" if factor < 0 else "+"
            size = [str(abs(factor))] if abs(factor) != 1 or not names else []
            parts.append(f"{sign} {' * '.join([*size, *names])}")
        return " ".join(parts).removeprefix("+ ") or "0"


def _put(name: str, values: Mapping[str, Polynomial]) -> Polynomial:
    if name in values or not isinstance(name, Computed):
        return values.get(name, Polynomial.symbol(name))
    return compute(name.operator, name.left.substitute(values), name.right.substitute(values))


def compute(operator: str, left: Polynomial, right: Polynomial) -> Polynomial:
    """Return a quotient rounded down ("//"), or the smaller of two sizes ("min")."""
    return smaller(left, right) if operator == "min" else quotient(left, right)


def quotient(above: Polynomial, below: Polynomial) -> Polynomial:
    """Return a quotient of sizes, rounded down; the terms that a number divides are taken out."""
    exact, number = above.divided(below), below.value
    if exact is not None:
        return exact
    if number is not None and number > 0:
        parts = [Polynomial(((names, factor // number),)) for names, factor in above.terms
                 if factor % number == 0 or (not names and factor // number)]  # fmt: skip
        whole = sum(parts, Polynomial())
        rest = above - whole * number
        return whole if rest.value is not None else whole + Polynomial.symbol(Computed("//", rest, below))
    return Polynomial.symbol(Computed("//", above, below))


def smaller(left: Polynomial, right: Polynomial) -> Polynomial:
    """Return the smaller of two sizes."""
    if (right - left).is_positive:
        return left
    return right if (left - right).is_positive else Polynomial.symbol(Computed("min", left, right))


@lru_cache(maxsize=1024)
def read_size(text: str) -> Polynomial | None:
    """Return what the text of a polynomial says; None for another text."""
    try:
        return _read(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _read(node: ast.expr) -> Polynomial:
    size = _computed(node)
    if len(size.terms) > _TERMS_MAX or any(len(name) > _TEXT_MAX for name in size.names):
        raise ValueError
    return size


def _computed(node: ast.expr) -> Polynomial:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return Polynomial.number(value)
        case ast.Name(id=name):
            return Polynomial.symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return 0 - _read(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _read(left) + _read(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _read(left) - _read(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _read(left) * _read(right)
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return quotient(_read(left), _read(right))
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            above, below = _read(left), _read(right)
            if not below.terms:
                raise ValueError
            return above - quotient(above, below) * below
        case ast.Call(func=ast.Name(id="min"), args=[first, *others]):
            return reduce(smaller, map(_read, others), _read(first))
    raise ValueError
