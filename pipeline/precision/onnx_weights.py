"""Which constant an ONNX matmul multiplies by, and a copy of a graph whose matmuls multiply by quantised ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import onnx
from onnx import numpy_helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer.normalise import node_label
from relaxtune.pipeline.precision.quantise import quantise

_MATMULS = ("MatMul", "Gemm")
# What may stand between an initialiser and a matmul.
_COPIES = ("Cast", "Identity")


class MatmulWeights:
    """The constant right operands of a model's matmuls, by the name that the importer gives each node."""

    def __init__(self, model: OnnxModel) -> None:
        self._model = model
        graph = model.proto.graph
        self._nodes: dict[str, onnx.NodeProto] = {}
        for node in graph.node:
            self._nodes.setdefault(label_of(node), node)
        self._producers = {output: node for node in graph.node for output in node.output}
        self._shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}

    def is_matmul(self, name: str) -> bool:
        """Whether a node of this name is a matmul."""
        node = self._nodes.get(name)
        return node is not None and node.op_type in _MATMULS

    def shape(self, name: str) -> tuple[int, int] | None:
        """Return [K, N] of the constant that a matmul multiplies by from the right, None where there is none."""
        found = self._find(name)
        if found is None:
            return None
        source, turned = found
        shape = self._shapes[source] if source in self._shapes else tuple(self._constant(source).shape)
        if len(shape) != 2:
            return None
        return (shape[1], shape[0]) if turned else (shape[0], shape[1])

    def array(self, name: str) -> np.ndarray:
        """Return the constant [K, N] of a matmul that has one."""
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        source, turned = found
        array = self._model.array(source) if source in self._shapes else self._constant(source)
        return array.T if turned else array

    def is_turned(self, name: str) -> bool:
        """Whether the node itself reads its operand as [N, K]."""
        return _integer(self._nodes[name], "transB") == 1

    def _find(self, name: str) -> tuple[str, bool] | None:
        """Return the constant's name, and whether it is stored as [N, K]."""
        node = self._nodes.get(name)
        if node is None or node.op_type not in _MATMULS or _real(node, "alpha", 1.0) != 1.0:
            return None
        source, turned = node.input[1], _integer(node, "transB") == 1
        while source not in self._shapes:
            producer = self._producers.get(source)
            if producer is None:
                return None
            if producer.op_type == "Constant":
                return (source, turned) if _tensor_of(producer) is not None else None
            if producer.op_type == "Transpose":
                turned = not turned
            elif producer.op_type not in _COPIES:
                return None
            source = producer.input[0]
        return source, turned

    def _constant(self, source: str) -> np.ndarray:
        tensor = _tensor_of(self._producers[source])
        assert tensor is not None
        array: np.ndarray = numpy_helper.to_array(tensor)
        return array


def with_quantised_weights(model: OnnxModel, nodes: Iterable[str], bits: int, group_size: int) -> OnnxModel:
    """Return the model with the weights of some matmuls replaced by what their quantised form stands for.

    Each weight is first rounded to float16, as the pass that quantises finds it.

    `nodes`: names of matmuls whose right operand is constant.
    """
    weights = MatmulWeights(model)
    proto = onnx.ModelProto()
    proto.CopyFrom(model.inline_proto())
    wanted = dict.fromkeys(nodes)
    for node in proto.graph.node:
        label = label_of(node)
        if label not in wanted:
            continue
        array = weights.array(label)
        rounded = quantise(array.astype(np.float16), bits, group_size).dequantised().astype(array.dtype)
        if weights.is_turned(label):
            rounded = rounded.T
        name = f"{label}__quantised"
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(rounded, order="C"), name))
        node.input[1] = name
    return replace(model, proto=proto, data_dir=None)


def label_of(node: onnx.NodeProto) -> str:
    """Return what source maps call a node: its name, or what it writes."""
    return node_label(node.name, list(node.output), node.op_type)


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    return next((attribute for attribute in node.attribute if attribute.name == name), None)


def _integer(node: onnx.NodeProto, name: str) -> int:
    attribute = _attribute(node, name)
    return 0 if attribute is None else int(attribute.i)


def _real(node: onnx.NodeProto, name: str, default: float) -> float:
    attribute = _attribute(node, name)
    return default if attribute is None else float(attribute.f)


def _tensor_of(node: onnx.NodeProto) -> onnx.TensorProto | None:
    attribute = _attribute(node, "value")
    return None if attribute is None else attribute.t
