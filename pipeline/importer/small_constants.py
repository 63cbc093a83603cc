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

from pipeline.importer.converters.base import constant, constant_value

_MAX_ELEMENTS = 64


def fold_small_constants(node: onnx.NodeProto, inputs: Sequence[tvm.ir.Expr | None], opset: int) -> tvm.ir.Expr | None:
    """Return the value of a node of the main domain over small integer constants, or None for any other node.

    Inputs and results are integers or booleans of 64 elements at most; the node has one output and no subgraph.
    """
    if not inputs or len(node.output) != 1 or any(attribute.HasField("g") for attribute in node.attribute):
        return None
    values = [None if item is None else constant_value(item) for item in inputs]
    given = [value for value, item in zip(values, inputs, strict=True) if item is not None]
    if not given or not all(value is not None and _is_small(value) for value in given):
        return None
    imports = [onnx.helper.make_opsetid("", opset)]
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    alone.domain = ""
    feeds = {name: value for name, value in zip(node.input, values, strict=True) if name}
    graph = onnx.helper.make_graph(
        [alone],
        "constants",
        [onnx.helper.make_tensor_value_info(name, _element_type(value), value.shape) for name, value in feeds.items()],
        [onnx.ValueInfoProto(name=node.output[0])],
    )
    model = onnx.helper.make_model(graph, opset_imports=imports)
    try:
        (result,) = ReferenceEvaluator(model).run(None, feeds)
    except NotImplementedError:
        return None
    value = np.asarray(result)
    return constant(value) if _is_small(value) else None


def _is_small(value: np.ndarray) -> bool:
    return value.dtype.kind in "biu" and value.size <= _MAX_ELEMENTS


def _element_type(value: np.ndarray) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
