"""A graph that is being drawn: its nodes, constants and inputs, and the model that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models import OnnxModel, TensorSpec

Shape = tuple[int, ...]
# A model and one input for it.
Drawn = tuple[OnnxModel, dict[str, np.ndarray]]
_DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int64": TensorProto.INT64}


@dataclass
class Drawing:
    """A graph that is being drawn.

    Attributes
    ----------
    symbolic
        Whether axis 0 of every input is `batch`.
    shapes
        Of the float tensors so far.
    inputs
        What a run feeds.
    """

    rng: np.random.Generator
    symbolic: bool
    shapes: dict[str, Shape] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: dict[str, np.ndarray] = field(default_factory=dict)

    def input(self, array: np.ndarray) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = array
        return name

    def fed(self, *shape: int) -> str:
        """Return an input of random numbers."""
        return self.input(self.rng.standard_normal(shape).astype("float32"))

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def floats(self, *shape: int) -> str:
        return self.constant(self.rng.standard_normal(shape).astype("float32"))

    def node(self, operator: str, *inputs: str, **attributes: object) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=f"n{len(self.nodes)}", **attributes))
        return name

    def keep(self, name: str, shape: Shape) -> None:
        self.shapes[name] = shape

    def pick(self, least: int = 1) -> tuple[str, Shape]:
        """Return a tensor of at least so many axes, the newest most often."""
        fit = [item for item in self.shapes.items() if len(item[1]) >= least]
        if not fit:
            raise LookupError
        return fit[-1] if self.rng.random() < 0.7 else fit[self.rng.integers(len(fit))]

    def axis(self, shape: Shape) -> int:
        """Return an axis; never the first of a symbolic graph."""
        first = 1 if self.symbolic and len(shape) > 1 else 0
        return int(self.rng.integers(first, len(shape)))

    def broadcastable(self, shape: Shape) -> Shape:
        """Return a shape that is broadcast to another one, some of its axes 1 or left out."""
        start = int(self.rng.integers(1 if self.symbolic else 0, len(shape) + 1))
        return tuple(1 if self.rng.random() < 0.3 else size for size in shape[start:])

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def choice(self, *items: object) -> object:
        return items[self.rng.integers(len(items))]

    def number(self, value: float, *shape: int) -> str:
        """Return a constant of one value."""
        return self.constant(np.full(shape, value, "float32"))

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, "int64"))

    def model(self, name: str, *outputs: tuple[str, Shape]) -> OnnxModel:
        """Return the model that gives these outputs, their shapes beside them."""
        last = [output for output, _ in outputs]
        inputs = {name: (str(array.dtype), array.shape) for name, array in self.inputs.items()}
        results = {output: ("float32", shape) for output, shape in outputs}
        graph = helper.make_graph(
            nodes_for(last, self.nodes),
            name,
            [self._value(name, *given) for name, given in inputs.items()],
            [self._value(name, *given) for name, given in results.items()],
            [numpy_helper.from_array(np.asarray(array), name) for name, array in self.constants.items()],
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        specs = [
            tuple(TensorSpec(name, dtype, self._axes(shape)) for name, (dtype, shape) in values.items())
            for values in (inputs, results)
        ]
        return OnnxModel(name, proto, None, "0" * 64, specs[0], specs[1])

    def _axes(self, shape: Shape) -> tuple[int | str, ...]:
        return ("batch", *shape[1:]) if self.symbolic else shape

    def _value(self, name: str, dtype: str, shape: Shape) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, _DTYPES[dtype], list(self._axes(shape)))


def nodes_for(outputs: Sequence[str], nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes that outputs need; ONNX Runtime 1.32 refuses some graphs with nodes that nothing reads."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if needed & set(node.output):
            needed.update(node.input)
            needed.update(name for one in node.attribute for inner in one.g.node for name in inner.input)
            kept.append(node)
    return kept[::-1]
