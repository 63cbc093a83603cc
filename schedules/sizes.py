"""Sizes of axes that may be symbolic: what is known of them, and their text in an attribute of a function."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, product
from typing import TypeAlias

import tvm_ffi
from tvm import tirx
from tvm.sym import Analyzer

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


def size_text(size: Size) -> int | str:
    """Return a symbolic size as text, a sum of products such as "64 * past + 64"; a number is itself.

    Raises
    ------
    ValueError
        It is made of more than sums, differences, products and quotients.
    """
    terms = _terms(size)
    if not any(terms):
        return terms.get((), 0)
    return " + ".join(" * ".join([str(factor), *names]) for names, factor in sorted(terms.items()))


def parse_size(text: int | str, variables: Mapping[str, Size]) -> Size:
    """Return the size that `size_text` wrote, with the given values of its names.

    Raises
    ------
    KeyError
        It holds a name that no variable has.
    SyntaxError
        It is not a text of `size_text`.
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
    terms: Counter[tuple[str, ...]] = Counter()
    for names, factor in _terms(size).items():
        # Each variable is 1 and something: the product is the sum over all choices of one or the other.
        for count in range(len(names) + 1):
            for chosen in combinations(names, count):
                if all(name.isidentifier() or name in chosen for name in names):
                    terms[chosen] += factor
    return terms[()] > 0 and all(factor >= 0 for factor in terms.values())


def are_equal(left: Size, right: Size) -> bool:
    """Whether two sizes are surely equal."""
    return _terms(left) == _terms(right)


def is_multiple(size: Size, of: int) -> bool:
    """Whether a size is surely a multiple of a number."""
    return all(factor % of == 0 for factor in _terms(size).values())


def _terms(size: Size) -> dict[tuple[str, ...], int]:
    """Return a size as a sum of products: sorted names -> factor, none of them 0."""
    if isinstance(size, int | tirx.IntImm):
        return {(): int(size)} if int(size) else {}
    if isinstance(size, tirx.Var):
        return {(str(size.name),): 1}
    if isinstance(size, tirx.FloorDiv):
        return {(f"(({size_text(size.a)}) // {size_text(size.b)})",): 1}
    if type(size) not in (tirx.Mul, tirx.Add, tirx.Sub):
        raise ValueError(f"the size {size} is no sum, product or quotient of axes")
    total: Counter[tuple[str, ...]] = Counter()
    if isinstance(size, tirx.Mul):
        for (names, factor), (more, by) in product(_terms(size.a).items(), _terms(size.b).items()):
            total[tuple(sorted((*names, *more)))] += factor * by
    else:
        sign = -1 if isinstance(size, tirx.Sub) else 1
        total.update(_terms(size.a))
        total.update({names: sign * factor for names, factor in _terms(size.b).items()})
    return {names: factor for names, factor in total.items() if factor}


def largest_size(size: tirx.Expr, maxima: Mapping[str, int]) -> int | None:
    """Return a size where every axis that it is made of is the largest; None where one has no maximum."""

    def largest(var: tirx.Var) -> tirx.Expr:
        return tirx.IntImm("int64", maxima[var.name]) if var.name in maxima else var

    number = Analyzer().simplify(tvm_ffi.structural_map(size, (tirx.Var, largest)))
    return int(number) if isinstance(number, tirx.IntImm) else None
