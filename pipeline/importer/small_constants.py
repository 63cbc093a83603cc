"""Nodes whose inputs turn out to be small integer constants during the conversion, computed on the spot.

Most are folded on the ONNX graph before. What is left comes from sizes that only the conversion knows, such as the
width of a tensor whose other axes are symbolic, and ends up where TVM needs a number: repeats, depths, split sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import tvm
from onnx.reference import ReferenceEvaluator

from relaxtune.pipeline.importer.converter_input import constant, constant_value

_MAX_ELEMENTS = 64
# What sizes are computed with. onnx's reference is wrong for others (GatherElements of indices of another width).
_OPERATORS = frozenset(
    {
        *("Abs", "Add", "And", "Cast", "Ceil", "Concat", "Div", "Equal", "Expand", "Floor", "Gather", "Greater"),
        *("GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Range"),
        *("ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Sign", "Slice", "Squeeze", "Sub", "Sum"),
        *("OneHot", "Tile", "Transpose", "Unsqueeze", "Where"),
    }
)


def fold_small_constants(node: onnx.NodeProto, inputs: Sequence[tvm.ir.Expr | None], opset: int) -> tvm.ir.Expr | None:
    """Return the value of a node of the main domain over small integer constants, or None for any other node.

    Inputs and results are integers or booleans of 64 elements at most.
    """
    if node.op_type not in _OPERATORS or not inputs:
        return None
    feeds: dict[str, np.ndarray] = {}
    for name, item in zip(node.input, inputs, strict=True):
        value = None if item is None else constant_value(item)
        if item is not None and (value is None or not _is_small(value)):
            return None
        if value is not None:
            feeds[name] = value
    imports = [onnx.helper.make_opsetid("", opset)]
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    alone.domain = ""
    graph = onnx.helper.make_graph(
        [alone],
        "constants",
        [onnx.helper.make_tensor_value_info(name, _element_type(value), value.shape) for name, value in feeds.items()],
        [onnx.ValueInfoProto(name=node.output[0])],
    )
    model = onnx.helper.make_model(graph, opset_imports=imports)
    (result,) = ReferenceEvaluator(model).run(None, feeds)
    folded = np.asarray(result)
    return constant(folded) if _is_small(folded) else None


def _is_small(value: np.ndarray) -> bool:
    return value.dtype.kind in "biu" and value.size <= _MAX_ELEMENTS


def _element_type(value: np.ndarray) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
