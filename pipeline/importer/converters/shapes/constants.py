"""`Constant` nodes that normalisation leaves: those whose value is an output of the model."""

from __future__ import annotations

import numpy as np
import onnx
import tvm
from onnx import numpy_helper

from relaxtune.pipeline.importer.converter_input import ConverterInput, constant, converts

_DTYPES = {"value_float": "float32", "value_floats": "float32", "value_int": "int64", "value_ints": "int64"}


@converts("Constant")
def convert_constant(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return the value of any numeric attribute; TVM's converter knows `value` only. None for strings and sparse."""
    ((name, value),) = node.attributes.items()
    if isinstance(value, onnx.TensorProto):
        return constant(numpy_helper.to_array(value))
    return constant(np.array(value, _DTYPES[name])) if name in _DTYPES else None
