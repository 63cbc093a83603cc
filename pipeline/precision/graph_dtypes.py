"""Float dtypes of an ONNX graph: stored, and computed in."""

from __future__ import annotations

import numpy as np
import onnx

from relaxtune.models import OnnxModel

HALF_TYPES = frozenset({onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
HALF_NAMES = frozenset({"float16", "bfloat16"})
_QUANTISERS = frozenset({"QuantizeLinear", "QAttention", "QGemm"})


def computes_in_half(model: OnnxModel) -> bool:
    """Whether any weight, input or output of the model is float16 or bfloat16."""
    signature = {spec.dtype for spec in (*model.inputs, *model.outputs)}
    return bool(signature & HALF_NAMES) or any(t.data_type in HALF_TYPES for t in model.proto.graph.initializer)


def rounds_to_integers(model: OnnxModel) -> bool:
    """Whether the graph quantises activations: a value beside a tie then takes one step or the other."""
    return any(
        node.op_type in _QUANTISERS or node.op_type.startswith(("QLinear", "DynamicQuantize"))
        for node in model.proto.graph.node
    )


def compute_dtype(model: OnnxModel) -> str:
    """Return the graph's float dtype: its weights', by most bytes, or its outputs' where it has no weights."""
    sizes: dict[str, int] = {}
    for tensor in model.proto.graph.initializer:
        name = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}.get(tensor.data_type)
        if name:
            sizes[name] = sizes.get(name, 0) + int(np.prod(tensor.dims, dtype=np.int64))
    if sizes:
        return max(sizes, key=lambda name: sizes[name])
    return next((spec.dtype for spec in model.outputs if "float" in spec.dtype), "float32")
