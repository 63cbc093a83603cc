"""Every tensor of an ONNX graph as ONNX Runtime computes it, and which node writes which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx

from relaxtune.models import OnnxModel
from relaxtune.pipeline.precision.onnx_weights import label_of
from relaxtune.pipeline.precision.policy import PolicyEntry
from relaxtune.pipeline.validate.reference import Reference

# Operators that hand their first input on in another shape: no kernel of ours, nothing that could go wrong in one.
VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
# Operators whose results are sizes or constants: they do not add to the depth of rounding.
_NO_ARITHMETIC = VIEWS | frozenset(
    {"Cast", "Concat", "Constant", "ConstantOfShape", "Expand", "Gather", "Shape", "Slice", "Split", "Transpose"}
)


@dataclass(frozen=True)
class OnnxNode:
    """A node of the user's graph: its label (as `source_map` has it), operator, inputs and outputs."""

    label: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class OnnxTensors:
    """The tensors of one run."""

    nodes: tuple[OnnxNode, ...]  # In the order of the graph, which is topological.
    # Tensor name -> what ONNX Runtime computed; inputs of the model included, constants not.
    values: Mapping[str, np.ndarray]
    outputs: tuple[str, ...]  # Names of the model's outputs.

    @cached_property
    def _writer(self) -> dict[str, OnnxNode]:
        return {name: node for node in self.nodes for name in node.outputs}

    @cached_property
    def _order(self) -> dict[str, int]:
        return {node.label: place for place, node in enumerate(self.nodes)}

    @cached_property
    def _depth(self) -> dict[str, int]:
        depth: dict[str, int] = {}
        for node in self.nodes:
            step = 0 if node.op_type in _NO_ARITHMETIC else 1
            level = step + max((depth.get(name, 0) for name in node.inputs), default=0)
            depth.update(dict.fromkeys(node.outputs, level))
        return depth

    @cached_property
    def _varying(self) -> set[str]:
        varying = {name for name in self.values if name not in self._writer}
        for node in self.nodes:
            if varying.intersection(node.inputs):
                varying.update(node.outputs)
        return varying

    def depth(self, tensor: str) -> int:
        """Return how many operators that round lie on the longest way from an input to a tensor."""
        return self._depth.get(tensor, 0)

    def writer(self, tensor: str) -> OnnxNode | None:
        """Return the node that writes a tensor; None for inputs and weights."""
        return self._writer.get(tensor)

    def order(self, tensor: str) -> int:
        """Return the place of a tensor's node in the graph; -1 for inputs and weights."""
        node = self._writer.get(tensor)
        return -1 if node is None else self._order[node.label]

    def written_by(self, labels: Iterable[str]) -> tuple[str, ...]:
        """Return the computed tensors that nodes write, the last node's first."""
        places = sorted({self._order[label] for label in labels if label in self._order}, reverse=True)
        return tuple(name for place in places for name in self.nodes[place].outputs if name in self.values)

    def makers(self, tensor: str) -> tuple[OnnxNode, ...]:
        """Return all nodes that a tensor depends on, its own among them, in the order of the graph."""
        return self._behind(tensor, lambda _: True)

    def constant_makers(self, tensor: str) -> tuple[OnnxNode, ...]:
        """Return the nodes that make a tensor that depends on no input of the model; none for any other tensor."""
        return () if tensor in self._varying else self.makers(tensor)

    def between(self, tensor: str, healthy: frozenset[str], constants: frozenset[str]) -> tuple[OnnxNode, ...]:
        """Return the nodes that make a tensor out of healthy ones, in order; views only if there is nothing else.

        Nodes that depend on no input of the model count only where their tensor is in `constants`.
        """

        def suspect(name: str) -> bool:
            return (name == tensor or name not in healthy) and (name in self._varying or name in constants)

        nodes = self._behind(tensor, suspect)
        return tuple(node for node in nodes if node.op_type not in VIEWS) or nodes

    def _behind(self, tensor: str, follow: Callable[[str], bool]) -> tuple[OnnxNode, ...]:
        """Return the nodes behind a tensor, through the tensors that `follow` accepts, in the order of the graph."""
        found: dict[str, OnnxNode] = {}
        waiting = [tensor]
        while waiting:
            name = waiting.pop()
            node = self._writer.get(name)
            if node is not None and node.label not in found and follow(name):
                found[node.label] = node
                waiting.extend(node.inputs)
        return tuple(sorted(found.values(), key=lambda node: self._order[node.label]))


def onnx_tensors(model: OnnxModel, inputs: Mapping[str, np.ndarray], policy: PolicyEntry | None = None) -> OnnxTensors:
    """Return every tensor of a model under ONNX Runtime, which computes half precision in float32.

    Weights that a policy has quantised are what they stand for, as in every reference (`pipeline.validate.reference`).

    Raises `PipelineError`: ONNX Runtime does not accept the model.
    """
    nodes = tuple(
        OnnxNode(label_of(one), one.op_type, tuple(one.input), tuple(one.output)) for one in model.proto.graph.node
    )
    outputs = tuple(spec.name for spec in model.outputs)
    inner = [name for node in nodes for name in node.outputs if name and name not in outputs]
    marked = onnx.ModelProto()
    marked.CopyFrom(model.proto)
    # ONNX Runtime infers the types of outputs that do not tell theirs.
    marked.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    specs = (*model.outputs, *(replace(model.outputs[0], name=name, dtype="float32", shape=()) for name in inner))
    values = Reference(replace(model, proto=marked, outputs=specs), policy=policy).run(inputs)
    return OnnxTensors(nodes, {**inputs, **values}, outputs)
