"""Sizes that every call of a model keeps, and sizes that checks at run time have held so far.

Three facts about sizes are known while a graph is converted:

- *limits*: differences of axes that no call lets be negative (`models.axes.relations`);
- *broadcasts*: a size known when the model runs, beside a size of the graph. A mixture of experts cuts its tokens into
  one part an expert, and joins the parts again: as many rows as there were, but the graph knows them as a sum of sizes.
  Multiplied by a tensor of 24 rows, they are 24, which a check holds at run time. A Slice clips its bounds to its
  input: all frames but the last of `n` are `min(max(n - 1, 0), n)`. Added to `n - 1` frames, they are `n - 1`;
- *quotients* that such a check holds to a number: `height // 14` patches beside a table of positions. An exporter gives
  images any size, and adds positions for 16 x 16 patches: all other sizes are refused when the model runs. The graph
  after that check has the number in the place of the quotient.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm_ffi import structural_equal

from relaxtune.models.spec import AxisRelation
from relaxtune.polynomials import Computed, Polynomial, compute, read_size
from relaxtune.schedules.sizes import Size, polynomial_of, simplify
from relaxtune.schedules.tir.expressions import dtype_of, find_all

BROADCASTING = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "And", "Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater",
     "GreaterOrEqual", "Where"}
)  # fmt: skip


class KnownSizes:
    """Known sizes at one place of a graph.

    Parameters
    ----------
    axes
        Names of the axes of the model's inputs: other names are of sizes known when the model runs.
    relations
        Of the axes.
    """

    def __init__(self, axes: frozenset[str] = frozenset(), relations: Sequence[AxisRelation] = ()) -> None:
        self._axes = axes
        # Differences that are never negative.
        self._gaps = [Polynomial()]
        for one in relations:
            left, right = read_size(one.axis), read_size(one.size)
            if left is not None and right is not None:
                gap = left - right
                self._gaps += [gap, 0 - gap] if one.sign == "=" else [gap if one.sign == ">=" else 0 - gap]
        self._numbers: dict[str, Polynomial] = {}
        self._cast: dict[relax.Var, relax.Var] = {}

    def copy(self) -> KnownSizes:
        """Return what is known by now, to be added to apart."""
        copy = KnownSizes(self._axes)
        copy._gaps, copy._numbers = self._gaps, dict(self._numbers)
        return copy

    def holds(self, gap: Size) -> bool:
        """Return whether a difference of sizes is 0 or more in every call, at sight or by one of the limits."""
        gap = simplify(gap)
        if is_never_negative(gap):
            return True
        known = polynomial_of(gap, compute)
        return known is not None and any(_is_size(known - one) for one in self._gaps)

    def broadcast(self, builder: relax.BlockBuilder, inputs: Sequence[tvm.ir.Expr | None]) -> list[tvm.ir.Expr | None]:
        """Return operands of a broadcast in which a computed size beside one of the graph's above one is that one.

        A size that is the name of one size known when the model runs may be one, and stays; `2*batch*sequence` may not.
        """
        shapes = [
            list(expr.ty.shape) if expr is not None and isinstance(getattr(expr.ty, "shape", None), relax.ShapeExpr)
            else None
            for expr in inputs
        ]  # fmt: skip
        known: dict[int, tirx.Expr] = {}
        for shape in shapes:
            for place, size in enumerate(reversed(shape or [])):
                number = isinstance(size, tirx.IntImm) and int(size) > 1
                first = place not in known or _is_clipped(known[place], size)
                if number or (first and _is_computed(size) and self.is_of_inputs(size)):
                    known[place] = size
        checked = list(inputs)
        for index, (expr, shape) in enumerate(zip(inputs, shapes, strict=True)):
            if shape is None or expr is None:
                continue
            sizes = [
                known[place] if place in known and self._gives_way(size, known[place]) else size
                for place, size in enumerate(reversed(shape))
            ][::-1]
            if any(one is not other for one, other in zip(sizes, shape, strict=True)):
                checked[index] = builder.match_cast(expr, relax.TensorType(sizes, expr.ty.dtype))
                for size, number in zip(shape, sizes, strict=True):
                    self.learn(size, number)
        return checked

    def joined(
        self, builder: relax.BlockBuilder, inputs: Sequence[tvm.ir.Expr | None], axis: int
    ) -> list[tvm.ir.Expr | None]:
        """Return operands of a Concat in which sizes that have to be equal are one; a call checks what is not known."""
        given = [expr for expr in inputs if expr is not None and isinstance(expr.ty, relax.TensorType)]
        if len(given) < len(inputs) or not all(isinstance(expr.ty.shape, relax.ShapeExpr) for expr in given):
            return list(inputs)
        shapes = [list(expr.ty.shape) for expr in given]
        if len({len(shape) for shape in shapes}) != 1:
            return list(inputs)
        joined = axis % len(shapes[0])
        for place, column in enumerate(zip(*shapes, strict=True)):
            # A number says most, then what is shortest.
            known = min(column, key=lambda size: (not isinstance(size, tirx.IntImm), len(str(size))))
            for shape, size in zip(shapes, column, strict=True):
                if place != joined and _is_computed(size) and not _is_zero(size - known):
                    self.learn(size, known)
                    shape[place] = known
        return [
            expr if all(map(structural_equal, shape, expr.ty.shape))
            else builder.match_cast(expr, relax.TensorType(shape, expr.ty.dtype))
            for expr, shape in zip(given, shapes, strict=True)
        ]  # fmt: skip

    def learn(self, size: tirx.Expr, number: tirx.Expr) -> None:
        """Remember what a size says that is checked to be a number, if a quotient is all that is unknown in it."""
        known = polynomial_of(size, compute)
        if known is None or not isinstance(number, tirx.IntImm) or not known.is_positive or len(known.names) != 1:
            return
        (name,), wanted = known.names, int(number)

        def at(value: int) -> int:
            return known.substitute({name: Polynomial.number(value)}).value or 0

        value = bisect_left(range(wanted + 1), wanted, key=at)
        if isinstance(name, Computed) and name.operator == "//" and at(value) == wanted:
            self._numbers[name] = Polynomial.number(value)
            self._cast.clear()

    def of(self, builder: relax.BlockBuilder, expr: tvm.ir.Expr | None) -> tvm.ir.Expr | None:
        """Return a shape value, or a tensor, in sizes as they are known by now; a tensor is checked to have them.

        A condition on sizes stays.
        """
        if not self._numbers or expr is None:
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
            cast = expr if same else builder.match_cast(expr, relax.TensorType(new, expr.ty.dtype))
            self._cast[expr] = cast
        return self._cast[expr]

    def _size(self, size: tirx.Expr) -> tirx.Expr:
        put = tvm_ffi.structural_map(size, (tirx.FloorDiv, self._number), order="post")
        return size if put.same_as(size) else tirx.IntImm("int64", 0) + simplify(put)

    def _number(self, division: tirx.FloorDiv) -> tirx.Expr:
        known = polynomial_of(division, compute)
        value = None if known is None else known.substitute(self._numbers).value
        return division if value is None else tirx.IntImm("int64", value)

    def is_of_inputs(self, size: tirx.Expr) -> bool:
        """Return whether a size is computed of axes of the model's inputs alone."""
        return {str(var.name) for var in tirx.analysis.undefined_vars(size)} <= self._axes

    def _gives_way(self, size: tirx.Expr, known: tirx.Expr) -> bool:
        """Return whether a size is another one: a number if computed, a computed one if known later."""
        later = isinstance(known, tirx.IntImm) or not self.is_of_inputs(size)
        return _is_computed(size) and (later or _is_clipped(size, known))


def with_axes(size: tvm.ir.Expr) -> tvm.sym.Analyzer:
    """Return an analyzer that knows of each axis in an expression that it is not negative."""
    analyzer = tvm.sym.Analyzer()
    for var in tirx.analysis.undefined_vars(size):
        analyzer.update(var, tvm.sym.ConstIntBound(0, tvm.sym.ConstIntBound.POS_INF))
    return analyzer


def is_never_negative(size: Size) -> bool:
    """Return whether a size is surely not negative, given that no axis is."""
    if isinstance(size, int):
        return size >= 0
    return bool(with_axes(size).can_prove(tirx.GE(size, tirx.IntImm("int64", 0))))


def is_shape_value(expr: tvm.ir.Expr | None) -> bool:
    """Return whether an expression stands for sizes instead of being a tensor."""
    return isinstance(expr, relax.ShapeExpr) or (expr is not None and bool(tvm.ir.is_prim_expr(expr)))


def size_text(size: Size) -> str:
    """Return a size as messages say it."""
    known = polynomial_of(size, compute)
    return "one that a call computes" if known is None else str(known)


def _is_clipped(size: tirx.Expr, plain: tirx.Expr) -> bool:
    """Return whether a size is another one clipped to bounds that it keeps, as it is the size of a tensor too."""
    if not find_all(size, tirx.Max) or structural_equal(size, plain):
        return False
    analyzer = tvm.sym.Analyzer()
    with analyzer.constraint_scope(tirx.GE(plain, tirx.IntImm("int64", 0))):
        return bool(analyzer.can_prove_equal(size, plain))


def _is_size(known: Polynomial) -> bool:
    """Return whether a polynomial is never negative, the names that are computed in it neither."""
    computed = (name for name in known.names if isinstance(name, Computed))
    return known.is_positive and all(_is_size(name.left) and _is_size(name.right) for name in computed)


def _is_zero(size: Size) -> bool:
    found = simplify(size)
    return isinstance(found, int) and found == 0


def _is_computed(size: tirx.Expr) -> bool:
    return not isinstance(size, tirx.IntImm | tirx.Var)
