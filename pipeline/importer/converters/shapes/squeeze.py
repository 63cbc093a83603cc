"""Squeeze of axes whose sizes a call decides."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from relaxtune.pipeline.importer.converter_input import (
    ConverterInput,
    constant_value,
    converts,
    has_known_sizes,
    sizes_of,
)


@converts("Squeeze")
def convert_squeeze(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return a tensor without axes that a call is checked to have one place in; TVM has axes of known size."""
    data, listed = node.input(0), node.attributes.get("axes")
    given = None if node.optional(1) is None else constant_value(node.input(1))
    if not has_known_sizes(data) or (listed is None and given is None):
        return None
    sizes = list(sizes_of(data))
    axes = sorted(int(axis) % len(sizes) for axis in (given if given is not None else listed))  # type: ignore[union-attr]
    symbolic = [axis for axis in axes if not isinstance(sizes[axis], tirx.IntImm)]
    if not symbolic:
        return None
    one = tirx.IntImm("int64", 1)
    for axis in symbolic:
        node.sizes.learn(sizes[axis], one)
        sizes[axis] = one
    return relax.op.squeeze(node.builder.match_cast(data, relax.TensorType(sizes, data.ty.dtype)), axes)
