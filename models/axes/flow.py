"""Facts of a graph about the sizes of its symbolic axes: shapes and small integer tensors, followed node by node.

onnx's own shape inference loses sums (`past + sequence` becomes an unknown) and does not compare: it is used for the
operators that have no rule here. Two facts are collected on the way:

- *equal*: sizes that meet in a broadcast, a Concat beside its axis, a contraction or a Reshape;
- *at least*: an axis that is cut or indexed up to a size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import checker, defs, helper, inliner, numpy_helper, shape_inference

from relaxtune.models.axes.attention_rules import CACHED_ATTENTION
from relaxtune.models.axes.facts import INTEGERS, ONE, UNKNOWN, ZERO, AxisFacts, Known, Shape, known_constant
from relaxtune.models.axes.rules import MOVES, RULES, moved
from relaxtune.models.onnx_model import SHAPE_ELEMENTS_MAX, is_short, light_copy, result_of
from relaxtune.polynomials import Polynomial


class AxisFlow(AxisFacts):
    """Follows the sizes of a graph; afterwards `solved` and `at_least` hold what it found."""

    def __init__(self, model: onnx.ModelProto) -> None:
        """Follow the graph."""
        super().__init__({name: place for place, name in enumerate(input_symbols(model))})
        tables = {tensor.name for tensor in model.graph.initializer}
        model = _typed(model)
        graph = model.graph
        self._opsets = {entry.domain: int(entry.version) for entry in model.opset_import}
        self._opset_imports = list(model.opset_import)
        self._types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)}
        self.tables = tables
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self._types |= {name: tensor.data_type for name, tensor in self.constants.items()}
        self._known: dict[str, Known] = {}
        for tensor in graph.initializer:
            self._known[tensor.name] = known_constant(tensor)
        for value in graph.input:
            if value.name not in self.constants:
                self._known[value.name] = self._input(value)
        for node in graph.node:
            self._follow(node)

    def _input(self, value: onnx.ValueInfoProto) -> Known:
        """Return what is known of an input; an integer, or a row of them, gets a symbol for what it is at most."""
        shape = tuple(map(self._size, dims_of(value)))
        if value.type.tensor_type.elem_type not in INTEGERS or len(shape) > 1:
            return Known(shape)
        largest = (Polynomial.symbol(value_symbol(value.name)),)
        return Known(shape, largest if shape in ((), (ONE,)) else None, largest)

    def _follow(self, node: onnx.NodeProto) -> None:
        outputs = self._follow_branches(node) if node.op_type == "If" else self._folded(node)
        rule = RULES.get(node.op_type)
        inputs = [self._known.get(name, UNKNOWN) for name in node.input]
        try:
            outputs = outputs if rule is None or outputs is not None else rule(self, node, inputs)
        except (IndexError, TypeError, ValueError, AttributeError):  # a rule met a form it does not know
            outputs = None
        if outputs is None:
            outputs = self._infer(node, inputs)
        if node.op_type in MOVES and inputs and outputs:
            outputs = [Known(outputs[0].shape, outputs[0].data or moved(node, inputs), inputs[0].top)]
        for name, known in zip(node.output, outputs, strict=False):
            if name:
                self._known[name] = known

    def _folded(self, node: onnx.NodeProto) -> list[Known] | None:
        """Return the result of a node over small constants, and keep it as one: PyTorch computes paddings so."""
        if not node.input or len(node.output) != 1 or not all(name in self.constants for name in node.input):
            return None
        if any(int(np.prod(self.constants[name].dims)) > SHAPE_ELEMENTS_MAX for name in node.input):
            return None
        try:
            feeds = {name: numpy_helper.to_array(self.constants[name]) for name in node.input}
            result = result_of(node, feeds, self._opsets)
        except Exception:  # onnx's reference raises every kind of exception for what it does not know
            return None
        if result.size > SHAPE_ELEMENTS_MAX:
            return None
        self.constants[node.output[0]] = tensor = numpy_helper.from_array(result, node.output[0])
        return [known_constant(tensor)]

    def _follow_branches(self, node: onnx.NodeProto) -> list[Known] | None:
        """Follow what the branches ask of sizes; what they find equal holds where they are run, or both are.

        Return the shapes of the results, where those of the branches are equal.
        """
        chosen = self._chosen(node)
        if chosen is not None:
            self.constants |= {tensor.name: tensor for tensor in chosen.initializer}
            self._known |= {tensor.name: known_constant(tensor) for tensor in chosen.initializer}
            for inner in chosen.node:
                self._follow(inner)
            return [self._known.get(value.name, UNKNOWN) for value in chosen.output]
        results: list[list[Shape | None]] = []
        answers: list[dict[str, Polynomial]] = []
        for branch in (item.g for item in sorted(node.attribute, key=lambda item: item.name, reverse=True)):
            known, solved, constants = dict(self._known), dict(self.solved), dict(self.constants)
            self.constants |= {tensor.name: tensor for tensor in branch.initializer}
            self._known |= {tensor.name: known_constant(tensor) for tensor in branch.initializer}
            first, equal = len(self.at_least), len(self.equal)
            for inner in branch.node:
                self._follow(inner)
            # The condition is known on the device alone, so that calls which run the other branch keep these, too.
            where = f" in a branch of If {node.name or node.output[0]!r}"
            self.at_least[first:] = [
                (self.resolve(size), self.resolve(least), label + where) for size, least, label in self.at_least[first:]
            ]
            results.append([self._known.get(value.name, UNKNOWN).shape for value in branch.output])
            if not answers:
                self.usual += self.equal[equal:]
            del self.equal[equal:]
            answers.append(self.solved)
            self._known, self.solved, self.constants = known, solved, constants
        self.solved |= {
            name: size for name, size in answers[0].items() if all(size == one.get(name) for one in answers)
        }
        same = len(results) == 2 and results[0] == results[1] and None not in results[0]
        return [Known(shape) for shape in results[0]] if same else None

    def _chosen(self, node: onnx.NodeProto) -> onnx.GraphProto | None:
        """Return the one branch that calls run: by a condition that is known, or a squeeze of an axis of one place."""
        branches = {item.name: item.g for item in node.attribute}
        known = self._known.get(node.input[0], UNKNOWN).data
        if known is not None and known[0].value is not None:
            return branches["then_branch" if known[0].value else "else_branch"]
        operators = [
            [one.op_type for one in branches[name].node if one.op_type not in ("Constant", "Identity")]
            for name in ("then_branch", "else_branch")
        ]
        return branches["then_branch"] if operators == [["Squeeze"], []] else None

    def _infer(self, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known]:
        """Return the shapes that onnx infers for one node, sizes in and out as text."""
        by_text: dict[str, Polynomial] = {}
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, onnx.TensorProto] = {}
        for name, known in zip(node.input, inputs, strict=True):
            if not name:
                continue
            sizes = None if known.shape is None else [self.resolve(size) for size in known.shape]
            by_text |= {str(size): size for size in sizes or () if size.value is None}
            dims = None if sizes is None else [str(size) if size.value is None else size.value for size in sizes]
            if name in self.constants:
                data[name] = self.constants[name]
                self._types[name] = data[name].data_type
            types[name] = helper.make_tensor_type_proto(self._types.get(name, onnx.TensorProto.FLOAT), dims)
        try:
            schema = defs.get_schema(node.op_type, self._opsets.get(node.domain, 1), node.domain)
            found = shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=self._opset_imports)
        except (
            checker.ValidationError, defs.SchemaError, shape_inference.InferenceError, RuntimeError, ValueError
        ):  # fmt: skip
            found = {}
        self._types |= {name: kind.tensor_type.elem_type for name, kind in found.items() if name not in self._types}
        return [
            Known(tuple(self._size(dim, by_text) for dim in _dims(found[name])))
            if name in found and found[name].tensor_type.HasField("shape")
            else UNKNOWN
            for name in node.output
        ]

    def _size(self, dim: int | str, by_text: Mapping[str, Polynomial] | None = None) -> Polynomial:
        if isinstance(dim, int):
            return Polynomial.number(dim)
        return parse_size(dim) if by_text is None else by_text.get(dim) or self.new_symbol()


def input_symbols(model: onnx.ModelProto) -> list[str]:
    """Return the names in the sizes of the inputs, in their order."""
    weights = {tensor.name for tensor in model.graph.initializer}
    dims = [dim for value in model.graph.input if value.name not in weights for dim in dims_of(value)]
    return list(dict.fromkeys(name for dim in dims if isinstance(dim, str) for name in parse_size(dim).names))


def nodes_of(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph and of its functions."""
    yield from model.graph.node
    for function in model.functions:
        yield from function.node


def lengths_given(model: onnx.ModelProto) -> dict[str, Polynomial]:
    """Return input of integers -> what it has to be: attention computes with it as the number of keys."""
    if not any(node.op_type == CACHED_ATTENTION for node in nodes_of(model)):
        return {}
    flow = AxisFlow(model)
    found = {value.name: flow.resolve(Polynomial.symbol(value_symbol(value.name))) for value in model.graph.input}
    return {name: size for name, size in found.items() if not any(part.startswith("?") for part in size.names)}


def value_symbol(name: str) -> str:
    """Return the symbol of the largest integer in an input of integers."""
    return f"?{name}"


def dims_of(value: onnx.ValueInfoProto) -> list[int | str]:
    """Return the sizes of an input; an axis without a name gets `<tensor>_<axis>`, as in its signature."""
    dims = _dims(value.type)
    return [dim if dim != "" else f"{value.name}_{axis}" for axis, dim in enumerate(dims)]


def parse_size(text: str) -> Polynomial:
    """Return a sum such as `past + sequence + 1` as a polynomial; any other text is one name."""
    parts = [part.strip() for part in text.split("+")]
    if all(part.isidentifier() or part.isdecimal() for part in parts):
        total = ZERO
        for part in parts:
            total += Polynomial.number(int(part)) if part.isdecimal() else Polynomial.symbol(part)
        return total
    return Polynomial.symbol(text)


def _dims(kind: onnx.TypeProto) -> list[int | str]:
    dims = kind.tensor_type.shape.dim
    return [int(dim.dim_value) if dim.HasField("dim_value") else str(dim.dim_param) for dim in dims]


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with functions inlined, the types of its values, and its small constants only."""
    light = light_copy(model, is_short)
    if light.functions:
        light = inliner.inline_local_functions(light)
    return shape_inference.infer_shapes(light)
