"""Recognise a function without matmuls: elementwise blocks and reductions over rows, as FuseTIR leaves them.

::

    for i, k:                                    result_0[i]  = sum_k f32(X[i * 768 + k])
        total[i] += f32(X[i, k])
    for i:                                  ->
        mean[i] = total[i] / 768
    for i, k:                                    Y[i * 768 + k] = f16(f32(X[i * 768 + k]) - result_0[i] / 768)
        Y[i, k] = f16(f32(X[i, k]) - mean[i])

Every block that is no reduction is inlined. The reductions are left, in an order in which each needs only
those before it, and the outputs; both are expressions over the axes of one space, in which every tensor is loaded by
one flat index. All reductions are over the last axis of that space, the columns. A function without reductions has
the axes of its output. Neighbouring axes that no load tells apart are one axis, axes of one element are none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad
from tvm.sym import Analyzer, detect_linear_equation
from tvm_ffi import StructuralKey

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.tir.blocks import Block, Size, plain_blocks, position_of, same_sizes, shape_of, static_shape
from relaxtune.schedules.tir.expressions import (
    UnsupportedExpressionError,
    constant_value,
    depends_on,
    dtype_of,
    find_all,
    is_branch,
    list_loads,
    ranged_analyzer,
    rebuild,
    rebuild_branch,
    substitute,
    tree_size,
)

# Inlining repeats what is used twice; a compiler finds the repetitions of small trees.
_NODES_MAX = 600
# Positions of the last block's idle threads are counted too.
_ELEMENTS_MAX = 2**31 - 2**16
_FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Axis:
    """An axis of the space: its variable (int64) and its size, an expression where symbolic."""

    var: tirx.Var
    size: Size


@dataclass(frozen=True)
class Reduction:
    """`result = combine(start, every element of a row)` in float32; `combine` is sum (with start 0), max or min."""

    combine: str
    start: float
    element: tirx.Expr
    result: tirx.Var


@dataclass(frozen=True)
class Output:
    """The value that a parameter gets: an element at every place of the space, or with `per_row` one for every row."""

    param: int
    value: tirx.Expr
    per_row: bool


@dataclass(frozen=True)
class Dataflow:
    """The computation of a function.

    `axes` are the space, row-major; with reductions the last one is the columns. Loads in `reductions` and `outputs`
    are of the one-dimensional buffers in `flat`, which has the position of the parameter that each stands for; results
    of reductions are variables. Where the number of rows of the output is symbolic, `planned` is the number that a
    kernel is to be good for; 0 where it is known.
    """

    axes: tuple[Axis, ...]
    reductions: tuple[Reduction, ...]
    outputs: tuple[Output, ...]
    flat: Mapping[tirx.Var, int]
    planned: int = 0

    @property
    def columns(self) -> Axis:
        """The last axis."""
        return self.axes[-1]

    @property
    def rows(self) -> Size:
        """Number of rows: the product of the other axes."""
        return math.prod(axis.size for axis in self.axes[:-1])

    def expressions(self) -> tuple[tirx.Expr, ...]:
        """Return all elements of reductions and values of outputs."""
        return (*(one.element for one in self.reductions), *(one.value for one in self.outputs))

    def analyzer(self) -> Analyzer:
        """Return an analyzer that knows the axes' ranges."""
        return ranged_analyzer((axis.var, axis.size) for axis in self.axes)


def recognise_dataflow(func: tirx.PrimFunc, *, symbolic: bool = False) -> Dataflow | Refusal:
    """Return what a function computes, or why it is not made of rows and elements.

    With `symbolic`, axes other than the columns of reductions may have a symbolic size. Whether a tensor has more
    elements than 32 bits count is then known only when the kernel is called.
    """
    blocks = plain_blocks(func, symbolic=symbolic)
    if isinstance(blocks, Refusal):
        return blocks
    if any(math.prod(static_shape(param) or ()) > _ELEMENTS_MAX for param in func.params):
        return Refusal(f"a tensor has more than {_ELEMENTS_MAX} elements, the kernel counts in 32 bits")
    try:
        flow = _merge_axes(_Reader(func, blocks).read())
        for expr in flow.expressions():
            _refuse_wide_places(expr)
    except UnsupportedExpressionError as reason:
        return Refusal(str(reason))
    return flow


class _Reader:
    """Inlines the blocks of one function."""

    def __init__(self, func: tirx.PrimFunc, blocks: Sequence[Block]) -> None:
        self._func = func
        self._blocks = {block.store.buffer: block for block in blocks}
        self._flat: dict[tirx.Var, tuple[int, tirx.Var]] = {}
        self._found: dict[tuple[str, float, StructuralKey], Reduction] = {}
        self._columns: Axis | None = None
        if len(self._blocks) != len(blocks):
            raise UnsupportedExpressionError("a buffer is written by two blocks")

    def read(self) -> Dataflow:
        func = self._func
        written = [position for buffer in self._blocks if (position := position_of(func, buffer)) is not None]
        largest = _largest([shape_of(func.params[position]) or () for position in written])
        reductions = [block for block in self._blocks.values() if block.reduced]
        if any(None in block.extents[len(block.spatial) :] for block in reductions):
            raise UnsupportedExpressionError("it reduces over rows of a symbolic size")
        reduced = {extent for block in reductions for extent in block.reduced_sizes}
        if len(reduced) > 1:
            raise UnsupportedExpressionError(f"its reductions are over rows of different sizes: {sorted(reduced)}")
        axes = [Axis(tirx.Var(f"a{index}", "int64"), size) for index, size in enumerate(largest)]
        per_row = False
        if reduced:
            (length,) = reduced
            rows = [math.prod(block.sizes[: len(block.spatial)]) for block in reductions if block.init is not None]
            if not rows or not all(_equal(count, rows[0]) for count in rows):
                raise UnsupportedExpressionError(f"its reductions have different numbers of rows: {rows}")
            per_row = _equal(math.prod(largest), rows[0]) and length > 1
            if per_row:
                axes.append(Axis(tirx.Var("column", "int64"), length))
            elif not axes or not same_sizes([axes[-1].size], [length]):
                raise UnsupportedExpressionError(f"it reduces over {length} elements, its output's rows are others")
            self._columns = axes[-1]
        inner = axes[:-1] if per_row else axes
        # An output of one element has no axes; the space has one.
        axes = axes or [Axis(tirx.Var("a", "int64"), 1)]
        self._analyzer = ranged_analyzer((axis.var, axis.size) for axis in axes)
        outputs = []
        for position in written:
            shape, places = shape_of(func.params[position]), [axis.var for axis in inner]
            same = same_sizes(shape, largest)
            # With reductions, one number for each row of the others.
            if not same and (not reduced or per_row or not same_sizes(shape, (*largest[:-1], 1))):
                raise UnsupportedExpressionError(f"its outputs differ in shape: {shape} and {largest}")
            value = self._value(func.params[position], places if same else [*places[:-1], tirx.IntImm("int64", 0)])
            outputs.append(Output(position, value, per_row or not same))
        flow = Dataflow(
            tuple(axes),
            tuple(self._found.values()),
            tuple(outputs),
            {flat: position for position, flat in self._flat.values()},
        )
        size = sum(tree_size(expr) for expr in flow.expressions())
        if size > _NODES_MAX:
            raise UnsupportedExpressionError(f"it has {size} operations when inlined, more than {_NODES_MAX}")
        return flow

    def _value(self, buffer: tirx.Var, indices: Sequence[tirx.Expr]) -> tirx.Expr:
        """Return the element of a buffer as an expression over the axes, loads of parameters and reductions."""
        block = self._blocks.get(buffer)
        if block is None:
            return self._load(buffer, indices)
        store, at = block.store, dict[tirx.Var, tirx.Expr]()
        for written, wanted in zip(store.indices, indices, strict=True):
            if isinstance(written, tirx.Var):
                at[written] = wanted
            elif constant_value(written) != 0:
                raise UnsupportedExpressionError(f"block {block.name} writes a rearranged output")
        if block.init is not None:
            return self._reduction(block, at)
        if not block.is_spatial:
            raise UnsupportedExpressionError(f"block {block.name} is neither elementwise nor a reduction")
        # A tensor without axes is written by a block of one axis, of one place.
        if not same_sizes(block.sizes, shape_of(buffer) or (1,)):
            raise UnsupportedExpressionError(f"block {block.name} writes a part of its output")
        return self._expand(store.value, at)

    def _expand(self, expr: tirx.Expr, at: Mapping[tirx.Var, tirx.Expr]) -> tirx.Expr:
        if isinstance(expr, TensorLoad):
            return self._value(expr.source, [self._analyzer.simplify(self._expand(one, at)) for one in expr.indices])
        if isinstance(expr, tirx.Var):
            return at.get(expr, expr)
        if is_branch(expr):
            return rebuild_branch(expr, lambda operand: self._expand(operand, at), self._analyzer)
        return rebuild(expr, lambda operand: self._expand(operand, at))

    def _load(self, buffer: tirx.Var, indices: Sequence[tirx.Expr]) -> tirx.Expr:
        shape, position = shape_of(buffer), position_of(self._func, buffer)
        if shape is None or position is None:
            raise UnsupportedExpressionError(f"it reads {buffer.name}, which nothing computes before it")
        if buffer not in self._flat:
            elements = math.prod(shape)
            size = max(1, elements) if isinstance(elements, int) else elements
            flat = tirx.decl_buffer((size,), dtype_of(buffer), buffer.name)
            self._flat[buffer] = position, flat
        index: tirx.Expr = tirx.IntImm("int64", 0)
        for size, one in zip(shape, indices, strict=True):
            index = index * size + (one if dtype_of(one) == "int64" else tirx.Cast("int64", one))
        return self._flat[buffer][1][self._analyzer.simplify(index)]

    def _reduction(self, block: Block, at: Mapping[tirx.Var, tirx.Expr]) -> tirx.Expr:
        """Return the variable of a reduction at some row, which is noted when it is new."""
        columns, name, store = self._columns, block.name, block.store
        if columns is None or any(depends_on(index, [columns.var]) for index in at.values()):
            raise UnsupportedExpressionError(f"the reduction {name} is read at another row than is written")
        combine, start, element = _combined(block)
        dtype = dtype_of(store.buffer)
        if dtype not in _FLOATS:
            raise UnsupportedExpressionError(f"the reduction {name} is of {dtype}, expected {', '.join(_FLOATS)}")
        if len(block.reduced) != 1:
            raise UnsupportedExpressionError(f"the reduction {name} is over {len(block.reduced)} axes, expected one")
        first: dict[tirx.Var, tirx.Expr] = {axis: tirx.IntImm("int64", 0) for axis in block.axes}
        expanded = self._expand(element, {**first, **at, block.reduced[0]: columns.var})
        key = combine, start, StructuralKey(expanded)
        if key not in self._found:
            result = tirx.Var(f"result_{len(self._found)}", "float32")
            self._found[key] = Reduction(combine, start, expanded, result)
        result = self._found[key].result
        return result if dtype == "float32" else tirx.Cast(dtype, result)


def with_multiple_columns(flow: Dataflow, of: int) -> Dataflow:
    """Return the function for calls whose symbolic number of columns is a multiple of a number: its axes show that."""
    size = flow.columns.size
    whole = size // of * of
    # Of a product, the axes that it is made of are not known to be multiples.
    values = {size: whole} if isinstance(size, tirx.Var) else {}
    axes = tuple(replace(axis, size=substitute(axis.size, values)) for axis in flow.axes[:-1])
    return _with_axes(flow, (*axes, replace(flow.columns, size=whole)), values)


def _largest(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    """Return the shape of most elements; a symbolic one is refused beside another."""
    shapes = [shape for shape in shapes if not shape or not same_sizes(shape[-1:], (1,))] or shapes
    if all(same_sizes(shape, shapes[0]) for shape in shapes):
        return shapes[0]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        raise UnsupportedExpressionError("its outputs differ in shape, and are symbolic")
    return max(shapes, key=math.prod)


def _equal(left: Size, right: Size) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return bool(Analyzer().can_prove_equal(left, right))


def _combined(block: Block) -> tuple[str, float, tirx.Expr]:
    """Return how a reduction combines its elements, what it starts from, and the element."""
    store, start = block.store, None if block.init is None else constant_value(block.init.value)
    for combine, node in (("sum", tirx.Add), ("max", tirx.Max), ("min", tirx.Min)):
        if not isinstance(store.value, node) or start is None or (combine == "sum" and start != 0):
            continue
        left, right = store.value.a, store.value.b
        if isinstance(left, TensorLoad) and left.source.same_as(store.buffer):
            return combine, float(start), right
    raise UnsupportedExpressionError(f"block {block.name} is no sum from 0, maximum or minimum")


def _merge_axes(flow: Dataflow) -> Dataflow:
    """Return the function over fewer axes, where the loads allow it."""
    kept = [axis for axis in flow.axes[:-1] if not same_sizes([axis.size], [1])] + [flow.axes[-1]]
    gone = {axis.var: tirx.IntImm("int64", 0) for axis in flow.axes if axis not in kept}
    flow = _with_axes(flow, tuple(kept), gone)
    position = 0
    while position + 1 < len(flow.axes):
        outer, inner = flow.axes[position : position + 2]
        is_columns = position + 2 == len(flow.axes) and bool(flow.reductions)
        if is_columns or not _are_one(flow, outer, inner):
            position += 1
            continue
        merged = Axis(tirx.Var("a", "int64"), outer.size * inner.size)
        values = {outer.var: tirx.IntImm("int64", 0), inner.var: merged.var}
        flow = _with_axes(flow, (*flow.axes[:position], merged, *flow.axes[position + 2 :]), values)
        # The axis before may now merge with the merged one.
        position = max(0, position - 1)
    return flow


def _refuse_wide_places(expr: tirx.Expr) -> None:
    """Raise where an index, or the condition of a branch, has a constant of more than 32 bits."""
    places: list[tirx.Expr] = [load.indices[0] for load in list_loads(expr)]
    places += [call.args[0] for call in find_all(expr, Call) if is_branch(call)]
    for constant in (one for place in places for one in find_all(place, tirx.IntImm)):
        if abs(int(constant.value)) > _ELEMENTS_MAX:
            raise UnsupportedExpressionError(
                f"an index has the constant {constant.value}, the kernel counts in 32 bits"
            )


def _are_one(flow: Dataflow, outer: Axis, inner: Axis) -> bool:
    """Whether all that is computed depends on two neighbouring axes as on one of their joint size."""
    for expr in flow.expressions():
        if depends_on(without_loads(expr)[0], [outer.var, inner.var]):
            return False
        for load in list_loads(expr):
            index, _ = without_loads(load.indices[0])
            found = detect_linear_equation(index, [outer.var, inner.var])
            if not found:
                return False
            if not _equal(found[0], found[1] * inner.size):
                return False
    return True


def without_loads(expr: tirx.Expr) -> tuple[tirx.Expr, dict[tirx.Var, TensorLoad]]:
    """Return an expression with a variable in the place of every outermost load, equal loads alike, and the loads."""
    variables: dict[StructuralKey, tirx.Var] = {}
    loads: dict[tirx.Var, TensorLoad] = {}

    def visit(node: tirx.Expr) -> tirx.Expr:
        if not isinstance(node, TensorLoad):
            return rebuild(node, visit)
        key = StructuralKey(node)
        if key not in variables:
            variables[key] = tirx.Var(f"loaded_{len(loads)}", dtype_of(node))
            loads[variables[key]] = node
        return variables[key]

    return visit(expr), loads


def _with_axes(flow: Dataflow, axes: tuple[Axis, ...], values: Mapping[tirx.Var, tirx.Expr]) -> Dataflow:
    """Return the function with variables replaced and the indices of loads simplified."""
    analyzer = ranged_analyzer((axis.var, axis.size) for axis in axes)

    def visit(node: tirx.Expr) -> tirx.Expr:
        if isinstance(node, TensorLoad):
            return node.source[analyzer.simplify(visit(node.indices[0]))]
        return rebuild_branch(node, visit, analyzer) if is_branch(node) else rebuild(node, visit)

    def renew(expr: tirx.Expr) -> tirx.Expr:
        return visit(substitute(expr, values))

    return replace(
        flow,
        axes=axes,
        reductions=tuple(replace(one, element=renew(one.element)) for one in flow.reductions),
        outputs=tuple(replace(one, value=renew(one.value)) for one in flow.outputs),
    )
