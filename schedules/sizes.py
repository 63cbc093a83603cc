"""Sizes of axes that may be symbolic: what is known of them, and their text in an attribute of a function."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import tvm_ffi
from tvm import te, tirx
from tvm.ir import Range
from tvm.sym import Analyzer

from relaxtune.polynomials import Computed, Polynomial

# A number, or an expression of variables that the shapes of parameters define.
Size: TypeAlias = "int | tirx.Expr"

_OPERATORS: Mapping[type[ast.operator], Callable[[Size, Size], Size]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def variables_of(shapes: Iterable[Iterable[Size]]) -> dict[str, tirx.Var]:
    """Return the variables in some shapes by name."""
    axes = [size for shape in shapes for size in shape if not isinstance(size, int)]
    return {str(var.name): var for axis in axes for var in tirx.analysis.undefined_vars(axis)}


def simplify(size: Size) -> Size:
    """Return a size in its simplest form; a number as `int`."""
    if isinstance(size, int):
        return size
    found = Analyzer().simplify(size)
    return int(found) if isinstance(found, tirx.IntImm) else found


def polynomial_of(
    size: Size, computed: Callable[[str, Polynomial, Polynomial], Polynomial | None] | None = None
) -> Polynomial | None:
    """Return a size as a polynomial over the names of axes, None where it is none.

    `computed` returns what a quotient ("//") or the smaller of two sizes ("min") is; without it, these are none.
    """
    if isinstance(size, int | tirx.IntImm):
        return Polynomial.number(int(size))
    if isinstance(size, tirx.Var):
        return Polynomial.symbol(str(size.name))
    if not isinstance(size, tirx.Add | tirx.Sub | tirx.Mul | tirx.FloorDiv | tirx.Min):
        return None
    left, right = polynomial_of(size.a, computed), polynomial_of(size.b, computed)
    if left is None or right is None:
        return None
    match size:
        case tirx.Add():
            return left + right
        case tirx.Sub():
            return left - right
        case tirx.Mul():
            return left * right
    return None if computed is None else computed("//" if isinstance(size, tirx.FloorDiv) else "min", left, right)


def size_text(size: Size) -> int | str:
    """Return a symbolic size as text, a sum of products such as "64 * past + 64"; a number is itself.

    Raises `ValueError`: it is made of more than sums, differences, products and quotients.
    """
    return _text(_known(size))


def _text(size: Polynomial) -> int | str:
    if size.value is not None:
        return size.value
    terms = sorted((sorted(map(_name, names)), factor) for names, factor in size.terms)
    return " + ".join(" * ".join([str(factor), *names]) for names, factor in terms)


def _name(name: str) -> str:
    return f"(({_text(name.left)}) // {_text(name.right)})" if isinstance(name, Computed) else name


def parse_size(text: int | str, variables: Mapping[str, Size]) -> Size:
    """Return the size that `size_text` wrote, with the given values of its names.

    Raises `KeyError`: it holds a name that no variable has; `SyntaxError`: it is not a text of `size_text`.
    """
    return text if isinstance(text, int) else _evaluated(ast.parse(text, mode="eval").body, variables)


def _evaluated(node: ast.expr, variables: Mapping[str, Size]) -> Size:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_evaluated(node.left, variables), _evaluated(node.right, variables))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand, variables)
    if isinstance(node, ast.Name):
        return variables[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise SyntaxError(f"{ast.unparse(node)!r} is no size")


def is_positive(size: Size) -> bool:
    """Whether a size is surely above 0, given that each variable in it is."""
    known = _known(size)
    # Each variable is 1 and something.
    more = {name: Polynomial.symbol(name) + (0 if isinstance(name, Computed) else 1) for name in known.names}
    shifted = known.substitute(more)
    return dict(shifted.terms).get((), 0) > 0 and shifted.is_positive


def are_equal(left: Size, right: Size) -> bool:
    """Whether two sizes are surely equal."""
    return _known(left) == _known(right)


def is_multiple(size: Size, of: int) -> bool:
    """Whether a size is surely a multiple of a number."""
    return all(factor % of == 0 for _, factor in _known(size).terms)


def _known(size: Size) -> Polynomial:
    """Return a size as a polynomial, in which quotients stay as they are written."""
    found = polynomial_of(size, lambda kind, *of: Polynomial.symbol(Computed(kind, *of)) if kind == "//" else None)
    if found is None:
        raise ValueError(f"the size {size} is no sum, product or quotient of axes")
    return found


def largest_size(size: tirx.Expr, maxima: Mapping[str, int]) -> int | None:
    """Return a size where every axis that it is made of is the largest; None where one has no maximum."""

    def largest(var: tirx.Var) -> tirx.Expr:
        return tirx.IntImm("int64", maxima[var.name]) if var.name in maxima else var

    number = Analyzer().simplify(tvm_ffi.structural_map(size, (tirx.Var, largest)))
    return int(number) if isinstance(number, tirx.IntImm) else None


def element_at(
    tensor: te.Tensor | tirx.Var, shape: Sequence[Size], flat: tirx.Expr, bounds: Mapping[tirx.Var, Size]
) -> tirx.Expr:
    """Return the element of a tensor at a row-major position, made of variables from 0 up to some bounds."""
    analyzer = Analyzer()
    for var, size in bounds.items():
        analyzer.bind(var, Range(0, size))
    axes = [int(axis) if isinstance(axis, tirx.IntImm) else axis for axis in shape]
    inner = [math.prod(axes[place + 1 :]) for place in range(len(axes))]
    return tensor[tuple(analyzer.simplify(flat // step % axis) for step, axis in zip(inner, axes, strict=True))]
