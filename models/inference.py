"""onnx's own checker and strict shape inference, run on the graph without its large weights.

Functions that call functions twice each double the nodes at every level: a file of a few kilobytes can stand for more
nodes than memory holds. onnx's shape inference follows every call, and no signal is seen meanwhile.
So the nodes are counted first.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import onnx
from onnx import checker, helper, shape_inference

from relaxtune.models.axes.windows import check_windows
from relaxtune.models.checks import RUNTIME_OPERATORS, check_ranks
from relaxtune.models.errors import InvalidModelError, ModelShapeError, UnsupportedModelError
from relaxtune.models.onnx_model import element_type_name, is_numeric, light_copy, tensor_bytes

# Shapes, axes and scalars feed shape inference; a larger tensor is a weight and only its type matters.
_CONSTANT_BYTES = 1024
_MAX_DIM = 2**31
# onnx 1.23 takes 0.4 us for each element of a vector it propagates: this is 0.4 s.
_MAX_PROPAGATED = 2**20
# Ten times the largest exports; onnx takes a second for so many.
NODES_MAX = 100_000
# Exporters nest functions as modules are nested. onnx follows a call on the processor's stack.
DEPTH_MAX = 100

_Key = tuple[str, str, str]


def check_expansion(model: onnx.ModelProto) -> None:
    """Check that a graph stays of a size that can be compiled when its functions are written out.

    Raises `UnsupportedModelError`: it has too many nodes then, or functions are nested too deeply; `InvalidModelError`:
    a function calls itself.
    """
    bodies = {(one.domain, one.name, one.overload): one.node for one in model.functions}
    known: dict[_Key, tuple[int, int]] = {}

    def count(nodes: Iterable[onnx.NodeProto], calls: tuple[_Key, ...]) -> tuple[int, int]:
        """Return how many nodes these stand for, and how deeply calls are nested in them."""
        total = depth = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            parts = [count(graph.node, calls) for one in node.attribute for graph in (one.g, *one.graphs)]
            parts.append(called(key, calls) if key in bodies else (1, 0))
            total += sum(number for number, _ in parts)
            depth = max(depth, *(level for _, level in parts))
            if total > NODES_MAX:
                written = " when its functions are written out" if bodies else ""
                raise UnsupportedModelError(
                    f"the graph {model.graph.name!r} has more than {NODES_MAX:,} nodes{written}, expected at most so "
                    "many; export fewer layers, or a part of the model"
                )
        return total, depth

    def called(key: _Key, calls: tuple[_Key, ...]) -> tuple[int, int]:
        path = (*calls, key)
        if key in calls:
            raise InvalidModelError(f"function {key[1]!r} calls itself ({_path(path)}): ONNX has no loops of calls")
        if key not in known and len(path) <= DEPTH_MAX:
            total, depth = count(bodies[key], path)
            known[key] = total, depth + 1
        if len(path) > DEPTH_MAX or len(calls) + known[key][1] > DEPTH_MAX:
            raise UnsupportedModelError(
                f"functions are nested more than {DEPTH_MAX} deep ({_path(path[:3])} -> ...); inline them "
                "(onnx.inliner.inline_local_functions), or export the model without functions"
            )
        return known[key]

    count(model.graph.node, ())


def _path(calls: Iterable[_Key]) -> str:
    return " -> ".join(name for _, name, _ in calls)


def check_and_infer(model: onnx.ModelProto) -> None:
    """Run the full checker and strict shape inference, and write the inferred shapes into the model.

    Raises `InvalidModelError`: onnx's checker refuses the graph, or types and shapes do not agree; `ModelShapeError`: a
    tensor inside the graph is larger than any machine's memory, or a pooling larger than its input.
    """
    light = _light_copy(model)
    if any(not value.type.tensor_type.HasField("shape") for value in light.graph.output):
        # The checker wants every output's shape; files that leave it to the reader are common, and it can be inferred.
        guessed = _infer(light, strict=False, data_prop=False)
        _check_outputs(guessed.graph)
        del light.graph.output[:]
        light.graph.output.extend(guessed.graph.output)
    try:
        checker.check_model(light, full_check=False)
    except (checker.ValidationError, ValueError) as e:
        msg = f"the graph {model.graph.name!r} is not valid ONNX: {_first_lines(e)}; fix the export"
        raise InvalidModelError(msg) from e
    try:
        inferred = _infer(light, strict=True, data_prop=False)
    except InvalidModelError:
        _drop_stale_types(light)
        inferred = _infer(light, strict=True, data_prop=False)
    _check_sizes(inferred.graph)
    # Data propagation would follow a vector of millions of elements one by one, as a hostile file may have.
    shapes = (value.type.tensor_type.shape.dim for value in inferred.graph.value_info)
    if not any(len(dims) == 1 and dims[0].dim_value > _MAX_PROPAGATED for dims in shapes):
        # onnx may follow the elements of small tensors wrongly, and then refuses a graph that it took without.
        with suppress(InvalidModelError):
            inferred = _infer(light, strict=True, data_prop=True)
    for stated, value in zip(model.graph.output, inferred.graph.output, strict=True):
        # The importer replaces a shape that is stale.
        if value.type.tensor_type.HasField("shape") or not stated.type.tensor_type.HasField("shape"):
            stated.CopyFrom(value)
    del model.graph.value_info[:]
    model.graph.value_info.extend(inferred.graph.value_info)
    _check_outputs(model.graph)


def _check_outputs(graph: onnx.GraphProto) -> None:
    # An output without places is told by the window that leaves none, if there is one.
    check_windows(graph)
    check_ranks(graph.output)


def _drop_stale_types(light: onnx.ModelProto) -> None:
    """Remove the types of values and the shapes of outputs, other than those of operators that onnx does not know.

    Tools that rewrite a graph leave stale types behind; ONNX Runtime warns of them and goes on with its own.
    """
    unknown = {name for node in light.graph.node if node.domain not in ("", "ai.onnx") for name in node.output}
    kept = [value for value in light.graph.value_info if value.name in unknown]
    del light.graph.value_info[:]
    light.graph.value_info.extend(kept)
    for value in light.graph.output:
        if value.name not in unknown:
            value.type.tensor_type.ClearField("shape")


def _infer(light: onnx.ModelProto, *, strict: bool, data_prop: bool) -> onnx.ModelProto:
    try:
        return shape_inference.infer_shapes(light, check_type=strict, strict_mode=strict, data_prop=data_prop)
    except (shape_inference.InferenceError, ValueError, RuntimeError) as e:
        msg = f"the graph {light.graph.name!r} has types or shapes that do not agree: {_first_lines(e)}; fix the export"
        raise InvalidModelError(msg) from e


def _check_sizes(graph: onnx.GraphProto) -> None:
    for value in (*graph.output, *graph.value_info):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_value > _MAX_DIM:
                raise ModelShapeError(
                    f"axis {axis} of tensor {value.name!r} is {dim.dim_value}, expected at most {_MAX_DIM}; "
                    f"no machine holds it: fix the shape that the graph computes"
                )


def _light_copy(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with every large initializer as a typed input of the graph, so that no weight is copied."""
    for tensor in model.graph.initializer:
        _check_payload(tensor)
    light = light_copy(model, lambda tensor: tensor_bytes(tensor) <= _CONSTANT_BYTES)
    for place, node in enumerate(light.graph.node):
        if node.op_type in RUNTIME_OPERATORS and not node.domain:
            # onnx does not know it; its result has its input's type.
            light.graph.node[place].CopyFrom(helper.make_node("Identity", node.input[:1], node.output[:1], node.name))
    return light


def _check_payload(tensor: onnx.TensorProto) -> None:
    """Check what the checker would say of an inline weight: the bytes are those of its dtype and dims."""
    what = f"initializer {tensor.name!r}"
    if any(dim < 0 for dim in tensor.dims):
        raise InvalidModelError(f"{what} has the dims {list(tensor.dims)}, expected 0 or more")
    if not is_numeric(tensor.data_type):
        raise InvalidModelError(f"{what} has the dtype {element_type_name(tensor.data_type)}, expected numbers or bool")
    expected = tensor_bytes(tensor)
    if tensor.HasField("raw_data") and len(tensor.raw_data) != expected:
        name = onnx.TensorProto.DataType.Name(tensor.data_type)
        raise InvalidModelError(
            f"{what} holds {len(tensor.raw_data)} bytes, but {name} {list(tensor.dims)} takes {expected}; "
            f"the file is damaged, export or copy it again"
        )


def _first_lines(error: Exception) -> str:
    """Return the message of an onnx error on one line."""
    return " ".join(str(error).split())[:800]
