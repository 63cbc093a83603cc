"""Operators that make tensors from shapes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tvm
from tvm import relax

from pipeline.importer.converters.base import Converter, ConverterInput, constant, constant_value, tensor_attribute


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
    if not isinstance(shape, relax.ShapeExpr):
        shape = relax.op.tensor_to_shape(shape)
    return relax.op.full(shape, constant(fill), str(fill.dtype))


SHAPE_CONVERTERS: Mapping[tuple[str, str], Converter] = {("", "ConstantOfShape"): convert_constant_of_shape}
