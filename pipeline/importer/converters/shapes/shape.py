"""Operators that make tensors from shapes, and those whose shape operand may hold symbolic sizes.

Each leaves the plain static case to TVM's converter by returning None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax.frontend.onnx import onnx_frontend

from relaxtune.models.dims import TO_THE_END, reaches_the_end
from relaxtune.pipeline.importer.converter_input import (
    ConverterInput,
    constant,
    constant_value,
    converts,
    sizes_of,
    static_size,
    tensor_attribute,
)
from relaxtune.pipeline.importer.shape_values import as_tensor, onnx_slice, size_list
from relaxtune.pipeline.importer.sizes import KnownSizes, is_never_negative, is_shape_value, with_axes
from relaxtune.schedules.sizes import Size, simplify


@converts("Shape")
def convert_shape(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return the sizes of a tensor as a shape value, cut by `start` and `end`."""
    shape = node.input(0).ty.shape
    if not isinstance(shape, relax.ShapeExpr):
        return None
    values = list(shape.values)
    return relax.ShapeExpr(values[node.integer("start", 0) : node.integer("end", len(values))])


@converts("Size")
def convert_size(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return the number of elements of a tensor of known sizes."""
    shape = node.input(0).ty.shape
    return None if not isinstance(shape, relax.ShapeExpr) else _product(list(shape.values))


@converts("ConstantOfShape")
def convert_constant_of_shape(node: ConverterInput) -> tvm.ir.Expr:
    """Return a tensor of one repeated value.

    TVM broadcasts the attribute, which is a tensor of one element, to the shape; that is refused for a scalar shape,
    and the shape it folds is only the one-dimensional one.
    """
    fill = tensor_attribute(node.attributes["value"]) if "value" in node.attributes else np.zeros(1, "float32")
    fill = fill.reshape(())
    shape = node.input(0)
    sizes = constant_value(shape)
    if sizes is not None:
        return constant(np.full([int(size) for size in sizes], fill))
    if isinstance(shape.ty, relax.TensorType):
        shape = relax.op.tensor_to_shape(shape)
    if isinstance(shape, relax.ShapeExpr) and fill.dtype.kind == "f" and not np.isfinite(fill):
        # TVM fails to lower a `full` of infinities.
        return relax.op.broadcast_to(constant(fill), shape)
    return relax.op.full(shape, constant(fill), str(fill.dtype))


@converts("Reshape")
def convert_reshape(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return a tensor in a shape with symbolic sizes; 0 copies a size of the input, -1 is what is left."""
    data, shape = node.input(0), node.input(1)
    if constant_value(shape) is None and isinstance(shape.ty, relax.TensorType):
        raise ValueError("input 1 (shape): expected a constant or sizes, got values known at run time only")
    if not isinstance(shape, relax.ShapeExpr) or not isinstance(data.ty.shape, relax.ShapeExpr):
        return None
    old = list(data.ty.shape.values)
    new = size_list(shape) or []
    if node.integer("allowzero", 0) == 0:
        new = [old[i] if isinstance(size, int) and size == 0 else size for i, size in enumerate(new)]
    rest = [i for i, size in enumerate(new) if isinstance(size, int) and size == -1]
    if rest:
        new[rest[0]] = _what_is_left(old, [size for place, size in enumerate(new) if place != rest[0]])
    return relax.op.reshape(data, relax.ShapeExpr(new))


@converts("Expand")
def convert_expand(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return a tensor stretched to a shape where a size on either side is symbolic; a 1 on either side gives way.

    Two sizes of which one is symbolic and both may be above 1 have to be equal when the model runs; it is checked
    then. One may be 1 as well, which no kernel for the other knows.
    """
    data, target = node.input(0), size_list(node.input(1))
    if target is None:
        return _expand_at_run_time(node, data)
    if not isinstance(data.ty.shape, relax.ShapeExpr):
        return None
    sizes = [simplify(size) for size in data.ty.shape.values]
    if all(isinstance(size, int) for size in (*sizes, *target)) and 0 not in target:  # TVM refuses a size of 0.
        return None
    rank = max(len(sizes), len(target))
    old = [1] * (rank - len(sizes)) + sizes
    new = [1] * (rank - len(target)) + target
    pairs = list(zip(old, new, strict=True))
    result = [before if _is_one_at_most(after) else after for before, after in pairs]
    taken = [
        before if _is_one_at_most(before) or _is_one_at_most(after) or _is_zero(before - after) else after
        for before, after in pairs
    ][rank - len(sizes) :]
    if any(one is not other for one, other in zip(taken, sizes, strict=True)):
        data = node.builder.match_cast(data, relax.TensorType(taken, data.ty.dtype))
    return relax.op.broadcast_to(data, relax.ShapeExpr(result))


def _expand_at_run_time(node: ConverterInput, data: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return a tensor stretched to a shape that is computed when the model runs, along its axes of one place.

    A check holds every other axis to its size: a kernel would read behind it.
    """
    emit, sizes = node.builder.emit, sizes_of(data)
    target = node.input(1)
    if isinstance(target.ty, relax.ShapeType):
        target = as_tensor(node.builder, target)
    rank = static_size(target, 0)
    if rank < len(sizes):
        msg = f"input 1 (shape) of {rank} sizes: expected at least {len(sizes)}, as many as the tensor has axes"
        raise ValueError(msg)
    own = emit(relax.op.shape_to_tensor(relax.ShapeExpr([1] * (rank - len(sizes)) + sizes)))
    wanted = emit(relax.op.tensor_to_shape(emit(relax.op.maximum(target, own))))
    old = [tirx.IntImm("int64", 1)] * (rank - len(sizes)) + sizes
    new = [tirx.Var(f"expanded_{axis}", "int64") if _is_one_at_most(simplify(size)) else size
           for axis, size in enumerate(old)]  # fmt: skip
    node.builder.match_cast(wanted, relax.ShapeType(new))
    return relax.op.broadcast_to(data, relax.ShapeExpr(new))


@converts("Slice")
def convert_slice(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return a slice with a symbolic start or end and steps of one.

    TVM assumes such bounds to be inside the axis, which is wrong for the ends torch writes: negative, or "to the end".
    """
    data = node.input(0)
    if "starts" in node.attributes:  # until opset 9
        written = (node.attributes.get(name) for name in ("starts", "ends", "axes"))
        inputs = [data, *(None if one is None else constant(np.array(one, "int64")) for one in written)]
        cut = convert_slice(replace(node, inputs=tuple(inputs), attributes={}))
        stock = onnx_frontend._get_convert_map()["Slice"].get_converter(13)
        return stock(node.builder, [*inputs, None], {}, [{}, {}]) if cut is None else cut
    _check_bounds(node)
    starts, ends = size_list(node.input(1)), size_list(node.input(2))
    axes = size_list(node.optional(3)) if node.optional(3) is not None else list(range(len(starts or [])))
    steps = size_list(node.optional(4)) if node.optional(4) is not None else [1] * len(starts or [])
    if starts is None or ends is None or axes is None or steps is None:
        return None
    numbers = [int(axis) % data.ty.ndim for axis in axes]
    sizes = [simplify(size) for size in sizes_of(data)]
    sizes = [sizes[axis] for axis in numbers]
    if all(isinstance(item, int) for item in (*starts, *ends, *steps, *sizes)):
        taken = [onnx_slice(*item) for item in zip(sizes, starts, ends, steps, strict=True)]
        return _constant_slice(data, numbers, taken)
    if _is_backwards(starts, ends, steps):
        # TVM multiplies the end, -2^63 or near it, with the step: beyond what it can count to.
        for axis in numbers[:-1]:
            data = node.builder.emit(relax.op.flip(data, axis))
        return relax.op.flip(data, numbers[-1])
    computed = not all(isinstance(bound, int) for bound in (*starts, *ends, *steps))
    strided = any(step != 1 for step in steps)
    if strided and computed and not all(isinstance(step, int) and step > 0 for step in steps):
        raise ValueError("input 4 (steps): expected numbers above 0 where a start or an end is computed")
    if min(steps) > 0 and ((strided and computed) or any(map(_may_be_empty, sizes, starts, ends))):
        kept = _kept(node.sizes, sizes, starts, ends)
        return relax.op.strided_slice(data, numbers, *kept, steps, assume_inbound=True)
    if strided:
        return None
    cut = [
        place
        for place, (axis, start, end) in enumerate(zip(numbers, starts, ends, strict=True))
        if not _is_whole(data, axis, start, end)
    ]
    if not cut:
        return data
    given = len(cut) == len(numbers) and not any(is_shape_value(item) for item in node.inputs[1:])
    numbers, sizes, starts, ends = ([items[place] for place in cut] for items in (numbers, sizes, starts, ends))
    inside = _inside_all(node.sizes, sizes, starts, ends)
    if inside is not None:
        return relax.op.strided_slice(data, numbers, *inside, [1] * len(numbers), assume_inbound=True)
    if given:
        return None
    bounds = [*starts, *ends]
    if all(isinstance(item, int) for item in (*bounds, *sizes)):
        return _constant_slice(data, numbers, [onnx_slice(*item, 1) for item in zip(sizes, starts, ends, strict=True)])
    if all(isinstance(item, int) for item in bounds):
        return relax.op.strided_slice(data, numbers, starts, ends)
    kept = _kept(node.sizes, sizes, starts, ends)
    return relax.op.strided_slice(data, numbers, *kept, [1] * len(numbers), assume_inbound=True)


@converts("Split")
def convert_split(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return the parts of an axis whose size is symbolic and those of the parts are not; they are checked to fit."""
    data, given = node.input(0), node.attributes.get("split", node.optional(1))
    parts = given if isinstance(given, list) else size_list(given)
    axis, sizes = node.integer("axis", 0) % data.ty.ndim, list(sizes_of(data))
    if not parts or isinstance(sizes[axis], tirx.IntImm) or not all(isinstance(part, int) for part in parts):
        return None
    ends = [int(end) for end in np.cumsum(parts)]
    sizes[axis] = tirx.IntImm("int64", ends[-1])
    data = node.builder.match_cast(data, relax.TensorType(sizes, data.ty.dtype))
    return relax.op.split(data, ends[:-1], axis)


def _kept(
    known: KnownSizes, sizes: Sequence[Size], starts: Sequence[Size], ends: Sequence[Size]
) -> tuple[list[Size], list[Size]]:
    """Return the bounds of a slice counted from the front; those that may lie outside of an axis are clipped to it."""

    def inside(bound: Size, size: Size) -> Size:
        place = _bound(bound, size)
        kept = known.holds(place) and known.holds(size - place)
        return place if kept else _clipped(place, size, negative=not isinstance(bound, int))

    begin, end = (list(map(inside, bounds, sizes)) for bounds in (starts, ends))
    pairs = zip(begin, end, strict=True)
    return begin, [last if known.holds(last - first) else simplify(tirx.max(first, last)) for first, last in pairs]


def _clipped(place: Size, size: Size, *, negative: bool) -> Size:
    """Return a place inside of an axis; where `negative`, one below 0 counts from the end."""
    zero, place = tirx.const(0, "int64"), tirx.const(0, "int64") + place
    if is_never_negative(place):
        return simplify(tirx.min(place, size))
    if negative:
        place = tirx.Select(place < zero, place + size, place)
    return simplify(tirx.max(zero, tirx.min(place, size)))


def _is_whole(data: tvm.ir.Expr, axis: int, start: Size, end: Size) -> bool:
    """Whether a slice in steps of one takes all of an axis."""
    if start != 0 or not isinstance(end, int):
        return False
    sizes = [simplify(size) for size in sizes_of(data)]
    own = sizes.pop(axis)
    return end >= own if isinstance(own, int) else reaches_the_end(end, [one for one in sizes if isinstance(one, int)])


def _inside_all(
    known: KnownSizes, sizes: Sequence[Size], starts: Sequence[Size], ends: Sequence[Size]
) -> tuple[list[Size], list[Size]] | None:
    """Return bounds that are numbers, counted from the front; None where one may lie outside a symbolic axis.

    TVM's own form has the least and the most of each, which hides that a size is another one.
    """
    if all(isinstance(size, int) for size in sizes):
        return None
    begin: list[Size] = []
    end: list[Size] = []
    for size, start, stop in zip(sizes, starts, ends, strict=True):
        first, last = _inside(known, start, size), _inside(known, stop, size)
        if first is None or last is None or not known.holds(last - first):
            return None
        begin.append(first)
        end.append(last)
    return begin, end


def _inside(known: KnownSizes, bound: Size, size: Size) -> Size | None:
    """Return a bound given as a number, counted from the front; None where it may lie outside the axis."""
    if not isinstance(bound, int):
        return None
    if bound >= TO_THE_END:
        return size
    front = bound if bound >= 0 else simplify(size + bound)
    return front if known.holds(size - bound if bound >= 0 else front) else None


def _may_be_empty(size: Size, start: Size, stop: Size) -> bool:
    """Whether the end of a slice of a symbolic axis, both bounds given as numbers, may come before its start."""
    if isinstance(size, int) or not isinstance(start, int) or not isinstance(stop, int):
        return False
    if (start < 0) == (stop < 0):
        return stop < start
    return start > 0 if stop < 0 else stop < TO_THE_END


def _is_one_at_most(size: Size) -> bool:
    """Whether a size is surely not above 1: it gives way in a broadcast. No size of a file is 0 here."""
    return size == 1 if isinstance(size, int) else bool(with_axes(size).const_int_bound(size).max_value <= 1)


def _constant_slice(data: tvm.ir.Expr, axes: list[int], taken: list[range]) -> tvm.ir.Expr:
    # TVM counts a negative end from the end of the axis; the place before the first is one further.
    taken = [one or range(0) for one in taken]
    ends = [one.stop if one.stop >= 0 else -static_size(data, axis) - 1 for axis, one in zip(axes, taken, strict=True)]
    return relax.op.strided_slice(data, axes, [one.start for one in taken], ends, [one.step for one in taken])


def _is_backwards(starts: Sequence[Size], ends: Sequence[Size], steps: Sequence[Size]) -> bool:
    """Whether a slice takes its axes from the last element to the first."""
    return (
        all(isinstance(bound, int) for bound in (*starts, *ends, *steps))
        and all(start == -1 or start >= TO_THE_END for start in starts)
        and all(end <= -TO_THE_END for end in ends)
        and set(steps) == {-1}
    )


def _check_bounds(node: ConverterInput) -> None:
    names = ("data", "starts", "ends", "axes", "steps")
    for place in range(1, len(node.inputs)):
        item = node.optional(place)
        if item is not None and constant_value(item) is None and not is_shape_value(item):
            msg = f"input {place} ({names[place]}): expected a constant or sizes, got values known at run time only"
            raise ValueError(msg)


@converts("Range")
def convert_range(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return int64 numbers between two bounds, where at least one bound is symbolic."""
    if not any(is_shape_value(item) for item in node.inputs):
        return None
    bounds = [size_list(item) for item in node.inputs]
    if any(bound is None or len(bound) != 1 for bound in bounds):
        return None
    start, limit, delta = (bound[0] for bound in bounds if bound is not None)
    return relax.op.arange(start, limit, delta, "int64")


def _bound(value: Size, size: tvm.ir.Expr) -> Size:
    if not isinstance(value, int):
        return value
    if value >= TO_THE_END:
        return size
    return simplify(size + value) if value < 0 else value


def _what_is_left(sizes: list[Size], known: list[Size]) -> Size:
    """Return the product of sizes divided by the product of others, equal sizes taken out first.

    TVM does not see that `batch * (past + new) // (past + new)` is `batch`, and its code generator fails on the rest.
    """
    above, below = list(sizes), []
    for size in known:
        same = next((place for place, one in enumerate(above) if _is_zero(one - size)), None)
        if same is None:
            below.append(size)
        else:
            del above[same]
    return simplify(tirx.floordiv(_product(above), _product(below)))


def _is_zero(difference: Size) -> bool:
    left = simplify(difference)
    return isinstance(left, int) and left == 0


def _product(sizes: list[Size]) -> tvm.ir.Expr:
    return tvm.sym.Analyzer().simplify(math.prod(sizes, start=tirx.IntImm("int64", 1)))
