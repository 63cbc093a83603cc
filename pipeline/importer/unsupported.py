"""`find_unsupported`: every node that stops the import, all at once.

The graph is converted node by node as for an import. Where a node fails, its outputs get values of the types that
shape inference found, and the conversion goes on. Nodes behind an output of unknown type are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import tvm
from onnx import helper
from tvm import relax, tirx

from relaxtune.models import OnnxModel
from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer.errors import has_converter, operator_version, reason_of, value_types
from relaxtune.pipeline.importer.frontend import NodeByNodeImporter
from relaxtune.pipeline.importer.nearest import nearest_supported
from relaxtune.pipeline.importer.normalise import NormalisedGraph, normalise
from relaxtune.pipeline.importer.quiet import quiet_libraries


@dataclass(frozen=True)
class UnsupportedNode:
    """A node that cannot be imported."""

    # The operator; `opset` is the model's version of the domain, None where the model does not say.
    domain: str
    operator: str
    opset: int | None
    nodes: tuple[str, ...]  # Names of the nodes of the user's graph that it stands for.
    inputs: tuple[str, ...]  # `name: dtype[shape]` of each input.
    reason: str  # Why: no converter, or what its converter said.
    nearest: str  # The nearest thing that is supported, or how to go on.


@dataclass(frozen=True)
class ImportSurvey:
    """Nodes that stop an import, and the number of nodes behind them that could not be checked."""

    unsupported: tuple[UnsupportedNode, ...]
    not_looked_at: int


def find_unsupported(model: OnnxModel) -> ImportSurvey:
    """Return every node that stops the import of a model; none means that it imports."""
    graph = normalise(model.proto, model.data_dir)
    with quiet_libraries():
        survey = _SurveyingImporter(model, graph)
        try:
            survey.from_onnx(graph.proto.graph, graph.opset)
        except MemoryError:
            raise
        except Exception:
            # An output of the graph that was not looked at has no value; what led to it is in the list.
            if not survey.found:
                raise
    return ImportSurvey(tuple(survey.found), survey.not_looked_at)


class _SurveyingImporter(NodeByNodeImporter):
    """Notes nodes that fail instead of raising."""

    def __init__(self, model: OnnxModel, graph: NormalisedGraph) -> None:
        super().__init__(model, graph)
        self.found: list[UnsupportedNode] = []
        self.not_looked_at = 0
        self._described = value_types(graph.proto.graph)
        self._infos = {info.name: info for info in (*graph.proto.graph.value_info, *graph.proto.graph.output)}

    def _construct_nodes(self, graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if any(name and name not in self._nodes for name in node.input):
                self.not_looked_at += 1
                continue
            reason = self._failure(node)
            if reason is not None:
                self.found.append(self._describe(node, reason))
                self._stand_in(node)

    def _failure(self, node: onnx.NodeProto) -> str | None:
        """Convert a node and return why that failed, or None."""
        if not has_converter(node):
            return "no converter"
        try:
            self._construct(node)
        except MemoryError:
            raise
        except ImportFailedError as e:  # inside a branch
            return reason_of(e.__cause__ or e)
        except Exception as e:  # TVM's converters raise every kind of exception
            return reason_of(e, self._without_sizes(node))
        return None

    def _describe(self, node: onnx.NodeProto, reason: str) -> UnsupportedNode:
        domain, opset = operator_version(node, self._graph)
        inputs = tuple(f"{name or '(left out)'}: {self._described.get(name, 'unknown')}" for name in node.input)
        names = tuple(self._graph.sources.get(node.name, (node.name,)))
        return UnsupportedNode(domain, node.op_type, opset, names, inputs, reason, nearest_supported(node, reason))

    def _stand_in(self, node: onnx.NodeProto) -> None:
        """Give each output of known type a variable, so that the nodes behind it are looked at too."""
        sizes = (
            size for value in self._inputs.values() if isinstance(value, relax.Var) for size in value.ty.shape.values
        )
        symbols = {size.name: size for size in sizes if isinstance(size, tirx.Var)}
        for name in node.output:
            value_type = _relax_type(self._infos.get(name), symbols)
            if name and value_type is not None:
                self._nodes[name] = relax.Var(f"stand_in_{len(self._nodes)}", value_type)


def _relax_type(info: onnx.ValueInfoProto | None, symbols: Mapping[str, tvm.ir.Expr]) -> relax.TensorType | None:
    """Return the type of a value, None where a size is neither a number nor the name of an input's."""
    if info is None or not info.type.HasField("tensor_type") or not info.type.tensor_type.HasField("shape"):
        return None
    shape: list[tvm.ir.Expr | int] = []
    for axis in info.type.tensor_type.shape.dim:
        if axis.HasField("dim_value"):
            shape.append(int(axis.dim_value))
        elif axis.dim_param in symbols:
            shape.append(symbols[axis.dim_param])
        else:
            return None
    return relax.TensorType(shape, str(helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)))
