"""Tile and OneHot with symbolic sizes, or with values that are computed."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.importer.converter_input import ConverterInput, constant, constant_value, converts, sizes_of
from relaxtune.pipeline.importer.shape_values import size_list
from relaxtune.schedules.sizes import simplify


@converts("Tile")
def convert_tile(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return a tensor repeated along its axes, where a size or a number of repeats is symbolic.

    TVM knows the shape of the result at run time only, where repeats are symbolic, and no operator after it can be
    compiled then. Where sizes are, its kernel fuses with nothing.
    """
    data, repeats = node.input(0), size_list(node.input(1))
    known = repeats is not None and all(isinstance(times, int) for times in repeats)
    if repeats is None or (known and not isinstance(data.ty.shape, relax.ShapeExpr)):
        return None
    sizes = sizes_of(data)
    if known and all(isinstance(size, tirx.IntImm) for size in sizes):
        return None
    pairs = list(zip(repeats, sizes, strict=True))
    apart = relax.op.reshape(data, relax.ShapeExpr([item for size in sizes for item in (1, size)]))
    stretched = relax.op.broadcast_to(apart, relax.ShapeExpr([item for pair in pairs for item in pair]))
    return relax.op.reshape(stretched, relax.ShapeExpr([simplify(times * size) for times, size in pairs]))


@converts("OneHot")
def convert_one_hot(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return the second of two values where the place along a new axis is the index, the first everywhere else.

    A negative index counts from the end; one outside of [-depth, depth) has no place, as ONNX has it. TVM takes
    constant depths and values only.
    """
    value = constant_value(node.input(1))  # Of any number type.
    depths = size_list(node.input(1) if value is None else constant(value.astype("int64")))
    if depths is None:
        return None
    depth = depths[0]
    rank = len(sizes_of(node.input(0)))
    axis = node.integer("axis", -1) % (rank + 1)
    # Indices may be of any number type; a cast cuts off what is no integer, as ONNX Runtime does.
    indices = relax.op.astype(node.input(0), "int64")
    from_end = relax.op.add(indices, relax.op.full([1] * rank, _scalar(depth), "int64"))
    indices = relax.op.where(relax.op.less(indices, relax.const(0, "int64")), from_end, indices)
    places = relax.op.reshape(
        relax.op.arange(0, depth, 1, "int64"), relax.ShapeExpr([depth if i == axis else 1 for i in range(rank + 1)])
    )
    hit = relax.op.equal(relax.op.expand_dims(indices, axis), places)
    off, on = (relax.op.squeeze(relax.op.strided_slice(node.input(2), [0], [i], [i + 1]), [0]) for i in (0, 1))
    return relax.op.where(hit, on, off)


def _scalar(size: tvm.ir.Expr | int) -> tvm.ir.Expr:
    return (
        relax.const(size, "int64")
        if isinstance(size, int)
        else relax.op.reshape(relax.op.shape_to_tensor(relax.ShapeExpr([size])), [])
    )
