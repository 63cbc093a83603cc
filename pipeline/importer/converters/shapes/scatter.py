"""ScatterElements whose indices cover a part of the data, and ScatterND: TVM compares axes and sizes as written."""

from __future__ import annotations

from dataclasses import replace

import tvm
import tvm_ffi
from tvm import relax

from relaxtune.pipeline.importer.converter_input import Converter, ConverterInput, converts, dtype_of, sizes_of
from relaxtune.pipeline.importer.converters.shapes.gather import has_sizes, non_negative
from relaxtune.schedules.sizes import simplify


def convert_scatter_elements(node: ConverterInput) -> tvm.ir.Expr:
    """Return `data` with elements replaced, added, multiplied, or their minimum or maximum taken, along an axis.

    Beside the axis, indices may be shorter than the data: then the corner that they cover is cut out and put back.
    """
    data, indices, updates = (node.input(place) for place in range(3))
    axis = node.integer("axis", 0) % int(data.ty.ndim)
    reduction = str(node.attributes.get("reduction", "none")).replace("none", "update")
    shorter = [
        (place, covered, size)
        for place, (covered, size) in enumerate(zip(sizes_of(indices), sizes_of(data), strict=True))
        if place != axis and simplify(size - covered) != 0
    ]
    rests = []
    for place, covered, size in shorter:
        rests.append((place, _cut(node, data, place, covered, size)))
        data = _cut(node, data, place, 0, covered)
    result = node.builder.emit(relax.op.scatter_elements(data, indices, updates, axis, reduction))
    for place, rest in reversed(rests):
        result = node.builder.emit(relax.op.concat([result, rest], place))
    return result


def convert_scatter_nd(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return `data` with slices replaced, added, multiplied, or their minimum or maximum taken, at index tuples.

    Updates whose sizes are written otherwise than those of the indices (`b*s` beside `s*b`) are checked in a run.
    """
    data, indices, updates = (node.input(place) for place in range(3))
    if not (has_sizes(data) and has_sizes(indices)):
        return None
    depth = int(indices.ty.shape.values[-1])
    wanted = [*sizes_of(indices)[:-1], *sizes_of(data)[depth:]]
    if not has_sizes(updates) or not tvm_ffi.structural_equal(wanted, list(sizes_of(updates))):
        updates = node.builder.match_cast(updates, relax.TensorType(wanted, updates.ty.dtype))
    reduction = str(node.attributes.get("reduction", "none")).replace("none", "update")
    return relax.op.scatter_nd(data, non_negative(node, indices, data, list(range(depth))), updates, reduction)


def of_truth_values(convert: Converter) -> Converter:
    """Return a converter by which truth values are combined as bytes: a sum is an or, a product an and."""

    def converted(node: ConverterInput) -> tvm.ir.Expr | None:
        if dtype_of(node.input(0)) != "bool" or node.attributes.get("reduction", "none") == "none":
            return convert(node)
        emit = node.builder.emit
        data, indices, updates = (node.input(place) for place in range(3))
        wide = (emit(relax.op.astype(data, "int8")), indices, emit(relax.op.astype(updates, "int8")))
        # A sum of 256 of them would be 0.
        combine = "max" if node.attributes["reduction"] == "add" else node.attributes["reduction"]
        found = convert(replace(node, inputs=wide, attributes={**node.attributes, "reduction": combine}))
        return None if found is None else relax.op.astype(emit(found), "bool")

    return converted


def _cut(
    node: ConverterInput, data: tvm.ir.Expr, axis: int, begin: tvm.ir.Expr | int, end: tvm.ir.Expr | int
) -> tvm.ir.Expr:
    return node.builder.emit(relax.op.strided_slice(data, [axis], [begin], [end], assume_inbound=True))


converts("ScatterElements")(of_truth_values(convert_scatter_elements))
converts("ScatterND")(of_truth_values(convert_scatter_nd))
