"""TVM's ONNX frontend driven node by node: names that lead back to nodes, own converters, one kind of error."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import helper
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from relaxtune.models import OnnxModel
from relaxtune.models.dims import may_be_empty
from relaxtune.models.onnx_model import read_tensor
from relaxtune.models.spec import AxisRelation
from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer.converter_input import (
    constant,
    constant_value,
    has_known_sizes,
    static_size,
    tensor_in_place,
)
from relaxtune.pipeline.importer.converters import CONVERTERS, ConverterInput
from relaxtune.pipeline.importer.errors import conversion_failed, element_types, list_nodes
from relaxtune.pipeline.importer.normalise import NormalisedGraph
from relaxtune.pipeline.importer.shape_values import as_tensor, fold_shape_value, fold_small_constants, size_list
from relaxtune.pipeline.importer.sizes import BROADCASTING, KnownSizes, is_shape_value

# These converters return one value that happens to be a tuple; every other tuple is several ONNX outputs.
_SEQUENCE_OPERATORS = frozenset(
    {"Optional", "OptionalGetElement", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
     "ConcatFromSequence", "SplitToSequence"}
)  # fmt: skip
# Operator -> inputs where its converter, ours or TVM's, takes sizes; elsewhere sizes become an int64 tensor first.
_SIZE_OPERANDS: Mapping[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "OneHot": (1,),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (3,),
    "Slice": (1, 2, 3, 4),
    "Tile": (1,),
    "TopK": (1,),
}
# Integers of 2 and 4 bits are kept one a byte: their converters know the bounds (`ConverterInput.element_types`).
_HELD_IN_BYTES: Mapping[str, str] = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}

# A graph of loops grows with their iterations; TVM's passes take minutes for more.
_UNROLLED_MAX = 20_000


def identifier(name: str) -> str:
    """Return an ONNX node name as a Relax identifier: `/encoder/layer.0/MatMul` -> `encoder_layer_0_MatMul`."""
    text = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return text if text and not text[0].isdigit() else f"n_{text}" if text else "node"


class NodeByNodeImporter(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]
    """`ONNXGraphImporter` that emits the result of each node under a name made of the node's.

    After `from_onnx`, `marks` holds (binding name, node name) in the order the bindings were emitted; every binding
    between two marks was emitted while the second one's node was converted.
    """

    _nodes: dict[str, tvm.ir.Expr]

    def __init__(self, model: OnnxModel, graph: NormalisedGraph) -> None:
        # TVM takes a size of 0 in a file for an axis of unknown size.
        empty = {one.name: list(one.shape) for one in model.inputs if 0 in one.shape and one.is_static}
        super().__init__(shape_dict=empty, dtype_dict={}, keep_params_in_input=False, sanitize=True)
        self._model = model
        self._graph = graph
        axes = (axis for spec in model.inputs for axis in spec.shape if isinstance(axis, str))
        names = frozenset(name for axis in axes for name in re.findall(r"[A-Za-z_]\w*", axis))
        empty_axes = {axis for spec in model.inputs for place, axis in enumerate(spec.shape)
                      if may_be_empty(len(spec.shape), place)}  # fmt: skip
        filled = [AxisRelation(name, ">=", "1") for name in sorted(names) if name not in empty_axes]
        self._sizes = KnownSizes(names, (*model.relations, *filled))
        self.marks: list[tuple[str, str]] = []
        # Result of a comparison -> what it compares.
        self._equals: dict[str, Sequence[str]] = {}
        # Nodes of the bodies of loops that were converted, each as often as it runs.
        self._unrolled = 0
        self._results = frozenset(value.name for value in graph.proto.graph.output)
        self._read = set(self._results)
        self._read.update(name for node in list_nodes(graph.proto.graph) for name in node.input)
        self._element_types = element_types(graph.proto.graph)

    def from_onnx(self, graph: onnx.GraphProto, opset: int) -> tvm.ir.IRModule:
        """Return the module with the function `main`.

        Raises
        ------
        ImportFailedError
            A node could not be converted.
        """
        try:
            return super().from_onnx(graph, opset)
        except ImportFailedError:
            # The scopes left a block open; its builder would complain on stderr when it is collected.
            self.bb._end_block()
            raise

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        """Do nothing: `check_operators` saw the graph before, domains and versions included."""

    def _parse_array(self, tensor_proto: onnx.TensorProto) -> tvm.runtime.Tensor:
        array = read_tensor(tensor_proto, self._model.data_dir)
        held = _HELD_IN_BYTES.get(str(array.dtype))
        return tensor_in_place(array if held is None else array.astype(held))

    def _construct_nodes(self, graph: onnx.GraphProto) -> None:
        self._cast_multiples()
        for node in graph.node:
            self._construct_node(node)
        for name in self._results:
            # An artifact gives out tensors.
            if is_shape_value(self._nodes.get(name)):
                self._nodes[name] = self._as_tensor(self._nodes[name], narrow=self._is_narrow(name))

    def _cast_multiples(self) -> None:
        """Write axes of inputs that have to be multiples so: sizes computed of them are equal at sight then."""
        multiples = {one.axis: one.multiple for one in self._model.relations if one.multiple is not None}
        for spec in self._model.inputs:
            if multiples.keys() & set(spec.shape):
                given = self._nodes[spec.name]
                sizes = [
                    size // multiples[axis] * multiples[axis] if axis in multiples else size
                    for axis, size in zip(spec.shape, given.ty.shape.values, strict=True)
                ]
                self._nodes[spec.name] = self.bb.match_cast(given, relax.TensorType(sizes, given.ty.dtype))

    def _construct_node(self, node: onnx.NodeProto) -> None:
        try:
            self._construct(node)
        except (MemoryError, ImportFailedError):
            raise
        except Exception as e:  # TVM's converters raise every kind of exception; here it gets the node's name
            raise conversion_failed(self._model, self._graph, node, e, self._without_sizes(node)) from e

    def _without_sizes(self, node: onnx.NodeProto) -> list[str]:
        return [name for name in node.input if name and not has_known_sizes(self._nodes.get(name))]

    def _construct(self, node: onnx.NodeProto) -> None:
        if node.op_type in _WITH_GRAPHS and not _domain(node):
            _WITH_GRAPHS[node.op_type](self, node)
            return
        given = [self._sizes.of(self.bb, self._nodes[name]) if name else None for name in node.input]
        result = self._fold_sizes(node, given)
        if result is None:
            result = self._convert_node(node, given)
        if node.op_type == "Equal":
            self._equals[node.output[0]] = node.input
        fields = self._emit_result(node, result)
        if len(fields) < len(node.output):
            raise ValueError(f"the converter gave {len(fields)} outputs, the node has {len(node.output)}")
        for name, field in zip(node.output, fields, strict=False):
            self._nodes[name] = field

    def _construct_if(self, node: onnx.NodeProto) -> None:
        """Bind the result of a branch, whose nodes are converted as those outside are; one is run."""
        graphs = {item.name: item.g for item in node.attribute}
        known = constant_value(self._nodes[node.input[0]])
        if known is not None or self._chooses_rank(node.input[0], graphs):
            chosen = graphs["then_branch" if known is None or known.all() else "else_branch"]
            self._bind_results(node, self._construct_body(node, chosen, []))
            return
        branches = {name: self._branch(graph) for name, graph in graphs.items()}
        condition = self._as_tensor(self._nodes[node.input[0]], narrow=False)
        chosen = self.bb.emit(
            relax.If(condition, branches["then_branch"], branches["else_branch"]), name_hint=identifier(node.name)
        )
        many = len(node.output) > 1
        for place, name in enumerate(node.output):
            self._nodes[name] = self.bb.emit(relax.TupleGetItem(chosen, place)) if many else chosen
        self._mark_results(node)

    def _chooses_rank(self, condition: str, graphs: Mapping[str, onnx.GraphProto]) -> bool:
        """Return whether a branch squeezes an axis if it has one place, which the conversion of Squeeze checks.

        TorchScript writes `squeeze` of an axis of any size so. Readers of the result expect one rank.
        """
        sides = [size_list(self._nodes[name]) for name in self._equals.get(condition, ())]
        operators = [
            [one.op_type for one in graphs[branch].node if one.op_type not in ("Constant", "Identity")]
            for branch in ("then_branch", "else_branch")
        ]
        return None not in sides and [1] in sides and operators == [["Squeeze"], []]

    def _branch(self, graph: onnx.GraphProto) -> relax.SeqExpr:
        outer, sizes, marks = dict(self._nodes), self._sizes, self.marks
        # Facts from checks inside a branch hold in that branch only.
        self._sizes, self.marks = sizes.copy(), []
        self.bb._begin_binding_block()
        try:
            self._nodes |= {one.name: relax.const(self._parse_array(one)) for one in graph.initializer}
            for node in graph.node:
                self._construct_node(node)
            results = [self._as_tensor(self._nodes[one.name], narrow=self._is_narrow(one.name)) for one in graph.output]
        finally:
            block = self.bb._end_block()
            self._nodes, self._sizes, self.marks = outer, sizes, marks
        return relax.SeqExpr([block], results[0] if len(results) == 1 else relax.Tuple(results))

    def _construct_loop(self, node: onnx.NodeProto) -> None:
        """Convert the body of a `Loop` as often as it runs; how often must be known here."""
        body = next(item.g for item in node.attribute if item.name == "body")
        most, going = (None if not name else constant_value(self._nodes[name]) for name in (*node.input[:2], "")[:2])
        if most is None and node.input[0]:
            raise ValueError("input 0 (the number of iterations): expected a constant, got a value known at run time")
        count = None if most is None else int(most.reshape(()))
        held: list[tvm.ir.Expr] = [self._nodes[name] for name in node.input[2:]]
        scanned: list[list[tvm.ir.Expr]] = [[] for _ in body.output[1 + len(held) :]]
        going = np.array(True) if not node.input[1] else going
        done = 0
        while going is not None and going.all() and (count is None or done < count):
            given = [constant(np.array(done, "int64")), constant(np.array(True)), *held]
            condition, *results = self._construct_body(node, body, given)
            held, going, done = results[: len(held)], constant_value(condition), done + 1
            for kept, one in zip(scanned, results[len(held) :], strict=True):
                kept.append(self.bb.emit(relax.op.expand_dims(one, 0)))
        if going is None:
            raise ValueError("the condition of the loop: expected a constant, got a value known at run time")
        self._bind_results(node, [*held, *(self._joined(parts, 0) for parts in scanned)])

    def _construct_scan(self, node: onnx.NodeProto) -> None:
        """Convert the body of a `Scan` once for each place along the axis that it goes through, of known size."""
        attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        body, number = attributes["body"], int(attributes["num_scan_inputs"])
        first = len(node.input) - number
        held: list[tvm.ir.Expr] = [self._nodes[name] for name in node.input[:first]]
        read: list[tvm.ir.Expr] = [self._as_tensor(self._nodes[name], narrow=False) for name in node.input[first:]]
        outputs = len(body.output) - first
        axes_in, axes_out = (attributes.get(f"scan_{kind}_axes") for kind in ("input", "output"))
        backward_in, backward_out = (attributes.get(f"scan_{kind}_directions") for kind in ("input", "output"))
        axes_in = [axis % int(one.ty.ndim) for axis, one in zip(axes_in or [0] * number, read, strict=True)]
        steps = static_size(read[0], axes_in[0])
        scanned: list[list[tvm.ir.Expr]] = [[] for _ in range(outputs)]
        axes_out = axes_out or [0] * outputs
        for step in range(steps):
            slices = []
            for place, (one, axis) in enumerate(zip(read, axes_in, strict=True)):
                at = steps - 1 - step if backward_in and backward_in[place] else step
                slices.append(self.bb.emit(relax.op.take(one, constant(np.array(at, "int64")), axis)))
            results = self._construct_body(node, body, [*held, *slices])
            held = results[:first]
            for kept, one, axis in zip(scanned, results[first:], axes_out, strict=True):
                kept.append(self.bb.emit(relax.op.expand_dims(one, axis)))
        for place, parts in enumerate(scanned):
            if backward_out and backward_out[place]:
                parts.reverse()
        self._bind_results(node, [*held, *map(self._joined, scanned, axes_out)])

    def _construct_body(
        self, node: onnx.NodeProto, body: onnx.GraphProto, given: Sequence[tvm.ir.Expr]
    ) -> list[tvm.ir.Expr]:
        """Convert one iteration, and return its results."""
        outer = dict(self._nodes)
        self._unrolled += len(body.node)
        if self._unrolled > _UNROLLED_MAX:
            raise ValueError(f"its iterations have more than {_UNROLLED_MAX} nodes together, expected fewer")
        try:
            self._nodes |= {one.name: relax.const(self._parse_array(one)) for one in body.initializer}
            self._nodes |= {one.name: value for one, value in zip(body.input, given, strict=True)}
            for inner in body.node:
                self._construct_node(inner)
            narrow = [self._is_narrow(one.name) for one in body.output]
            return [
                self._as_tensor(self._nodes[one.name], narrow=one_is)
                for one, one_is in zip(body.output, narrow, strict=True)
            ]
        finally:
            self._nodes = outer

    def _joined(self, parts: Sequence[tvm.ir.Expr], axis: int) -> tvm.ir.Expr:
        if not parts:
            raise ValueError("no iteration runs; expected one at least where results of iterations are collected")
        return self.bb.emit(relax.op.concat(list(parts), axis))

    def _bind_results(self, node: onnx.NodeProto, results: Sequence[tvm.ir.Expr]) -> None:
        self._nodes |= {name: one for name, one in zip(node.output, results, strict=False) if name}
        self._mark_results(node)

    def _fold_sizes(self, node: onnx.NodeProto, inputs: list[tvm.ir.Expr | None]) -> tvm.ir.Expr | None:
        if _domain(node):
            return None
        folded = fold_shape_value(node.op_type, self._converter_input(node, inputs))
        if folded is not None and self._is_narrow(node.output[0]):
            value = constant_value(folded)
            if value is not None and value.dtype == np.int64:
                return constant(value.astype(np.int32))
        return fold_small_constants(node, inputs, self._graph.opset) if folded is None else folded

    def _convert_node(self, node: onnx.NodeProto, given: list[tvm.ir.Expr | None]) -> tvm.ir.Expr:
        sizes_at = () if _domain(node) else _SIZE_OPERANDS.get(node.op_type, ())
        inputs = onnx_frontend.onnx_input()
        for index, expr in enumerate(given):
            narrow = self._is_narrow(node.input[index])
            inputs.append(expr if index in sizes_at else self._as_tensor(expr, narrow=narrow))
        if not _domain(node) and node.op_type in BROADCASTING:
            inputs[:] = self._sizes.broadcast(self.bb, inputs)
        if not _domain(node) and node.op_type == "Concat":
            inputs[:] = self._sizes.joined(self.bb, inputs, next(int(item.i) for item in node.attribute))
        own = CONVERTERS.get((_domain(node), node.op_type))
        result = own(self._converter_input(node, inputs)) if own is not None else None
        if result is not None:
            return result if is_shape_value(result) else self.bb.normalize(result)
        # TVM's converters take vectors of sizes only.
        inputs[:] = [as_tensor(self.bb, one) if one is not None and tvm.ir.is_prim_expr(one) else one for one in inputs]
        attributes = self._parse_attr(node.attribute)
        attributes["tvm_custom"] = {"name": node.name, "num_outputs": len(node.output)}
        return self._convert_operator(node.op_type, inputs, attributes, self.opset)

    def _converter_input(self, node: onnx.NodeProto, inputs: list[tvm.ir.Expr | None]) -> ConverterInput:
        attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        decoded = {key: value.decode() if isinstance(value, bytes) else value for key, value in attributes.items()}
        types = tuple(self._element_types.get(name, 0) for name in node.input)
        outputs = tuple(name if name in self._read else "" for name in node.output)
        return ConverterInput(self.bb, tuple(inputs), decoded, self._graph.opset, outputs, types, self._sizes)

    def _as_tensor(self, expr: Any, *, narrow: bool) -> Any:
        is_shape_variable = isinstance(expr, relax.Var) and isinstance(expr.ty, relax.ShapeType)
        return as_tensor(self.bb, expr, narrow=narrow) if is_shape_variable or is_shape_value(expr) else expr

    def _is_narrow(self, name: str) -> bool:
        """Return whether the ONNX graph holds a value in 32 bits."""
        return bool(self._element_types.get(name) == onnx.TensorProto.INT32)

    def _emit_result(self, node: onnx.NodeProto, result: tvm.ir.Expr) -> list[tvm.ir.Expr]:
        """Bind what a converter returned under the node's name and return it as one expression an ONNX output."""
        hint = identifier(node.name)
        if node.op_type in _SEQUENCE_OPERATORS:
            return [result]
        if isinstance(result, relax.Tuple):
            return [self._emit(field, hint, node) for field in result.fields]
        if isinstance(result.ty, relax.TupleType):
            whole = self._emit(result, hint, node)
            return [self._emit(relax.TupleGetItem(whole, i), hint, node) for i in range(len(result.ty.fields))]
        return [self._emit(result, hint, node)]

    def _emit(self, expr: tvm.ir.Expr, hint: str, node: onnx.NodeProto) -> tvm.ir.Expr:
        """Bind a computation; constants, shapes and values that are bound already stay what they are."""
        if is_shape_value(expr):
            return expr
        if isinstance(expr, relax.Var):
            self.marks.append((expr.name, node.name))
            return expr
        if not isinstance(expr, tvm.ir.Call | relax.TupleGetItem):
            return expr
        var = self.bb.emit(expr, name_hint=hint)
        self.marks.append((var.name, node.name))
        return var

    def _mark_results(self, node: onnx.NodeProto) -> None:
        for name in node.output:
            value = self._nodes.get(name)
            if isinstance(value, relax.Var):
                self.marks.append((value.name, node.name))


# Operators whose graphs are converted with the one around them.
_WITH_GRAPHS: Mapping[str, Callable[[NodeByNodeImporter, onnx.NodeProto], None]] = {
    "If": NodeByNodeImporter._construct_if,
    "Loop": NodeByNodeImporter._construct_loop,
    "Scan": NodeByNodeImporter._construct_scan,
}


def _domain(node: onnx.NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else str(node.domain)
