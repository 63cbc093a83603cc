"""Quotients of axes that a check at run time holds to a number: `height // 14` patches beside a table of positions.

An exporter gives images any size, and adds positions for 16 x 16 patches: all other sizes are refused when the model
runs. What comes after that check has the number in the place of the quotient.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm_ffi import structural_equal

from relaxtune.pipeline.importer.shape_values import is_shape_value, simplify
from relaxtune.schedules.tir.expressions import dtype_of, find_all, substitute


class LearnedSizes:
    """What checks have said so far of quotients of axes."""

    def __init__(self, builder: relax.BlockBuilder) -> None:
        self._builder = builder
        self._known: list[tuple[tirx.FloorDiv, tirx.IntImm]] = []
        self._cast: dict[relax.Var, relax.Var] = {}

    def copy(self) -> LearnedSizes:
        """Return what is known by now, to be learned further apart."""
        made = LearnedSizes(self._builder)
        made._known = list(self._known)
        return made

    def learn(self, given: Sequence[tvm.ir.Expr | None], checked: Sequence[tvm.ir.Expr | None]) -> None:
        """Remember what operands say that were checked to have known sizes."""
        for before, after in zip(given, checked, strict=True):
            if before is None or after is None or before is after:
                continue
            for size, number in zip(before.ty.shape.values, after.ty.shape.values, strict=True):
                found = _solved(size, int(number)) if isinstance(number, tirx.IntImm) else None
                if found is not None:
                    self._known.append(found)
                    self._cast.clear()

    def of(self, expr: tvm.ir.Expr | None) -> tvm.ir.Expr | None:
        """Return a shape value, or a tensor, in sizes as they are known by now; a tensor is checked to have them.

        A condition on sizes stays.
        """
        if not self._known or expr is None:
            return expr
        if isinstance(expr, relax.ShapeExpr):
            return relax.ShapeExpr([self._size(size) for size in expr.values])
        if is_shape_value(expr):
            return expr if dtype_of(expr) == "bool" else self._size(expr)
        if not isinstance(expr, relax.Var) or not isinstance(getattr(expr.ty, "shape", None), relax.ShapeExpr):
            return expr
        if expr not in self._cast:
            old = list(expr.ty.shape.values)
            new = [self._size(size) for size in old]
            same = all(one is other for one, other in zip(old, new, strict=True))
            cast = expr if same else self._builder.match_cast(expr, relax.TensorType(new, expr.ty.dtype))
            self._cast[expr] = cast
        return self._cast[expr]

    def _size(self, size: tirx.Expr) -> tirx.Expr:
        put = tvm_ffi.structural_map(size, (tirx.FloorDiv, self._number), order="post")
        return size if put.same_as(size) else tirx.IntImm("int64", 0) + simplify(put)

    def _number(self, quotient: tirx.FloorDiv) -> tirx.Expr:
        return next((number for of, number in self._known if structural_equal(of, quotient)), quotient)


def _solved(size: tirx.Expr, number: int) -> tuple[tirx.FloorDiv, tirx.IntImm] | None:
    """Return the quotient that is the only unknown of a size, and what it is where that is a number; None otherwise."""
    quotients = find_all(size, tirx.FloorDiv)
    if not quotients:
        return None
    first, unknown = quotients[0], tirx.Var("unknown", "int64")
    rest = tvm_ffi.structural_map(
        size, (tirx.FloorDiv, lambda one: unknown if structural_equal(one, first) else one), order="pre"
    )
    if not all(_grows(part, unknown) for part in find_all(rest, tirx.Expr)):
        return None

    def at(value: int) -> int:
        return int(simplify(substitute(rest, {unknown: tirx.IntImm("int64", value)})))

    value = bisect_left(range(number + 1), number, key=at)
    return (first, tirx.IntImm("int64", value)) if at(value) == number else None


def _grows(part: tirx.Expr, unknown: tirx.Var) -> bool:
    """Whether a part of a size grows with the one unknown: sums and products of it and of what is not negative."""
    if isinstance(part, tirx.Var):
        return bool(part.same_as(unknown))
    return isinstance(part, tirx.Add | tirx.Mul) or (isinstance(part, tirx.IntImm) and int(part) > 0)
