"""onnx's own checker and strict shape inference, run on the graph without its large weights."""

from __future__ import annotations

import onnx
from onnx import checker, helper, shape_inference

from models.checks import check_ranks
from models.errors import InvalidModelError
from models.hashing import without_weights
from models.spec import element_type_name, is_numeric, tensor_bytes

# Shapes, axes and scalars feed shape inference; a larger tensor is a weight and only its type matters.
_CONSTANT_BYTES = 1024


def check_and_infer(model: onnx.ModelProto) -> None:
    """Run the full checker and strict shape inference, and write the inferred shapes into the model.

    Raises
    ------
    InvalidModelError
        onnx's checker refuses the graph, or types and shapes do not agree.
    """
    light = _light_copy(model)
    if any(not value.type.tensor_type.HasField("shape") for value in light.graph.output):
        # The checker wants every output's shape; files that leave it to the reader are common, and it can be inferred.
        try:
            guessed = shape_inference.infer_shapes(light)
        except (shape_inference.InferenceError, ValueError, RuntimeError) as e:
            msg = f"the shapes of the outputs of graph {model.graph.name!r} cannot be inferred: {_first_lines(e)}"
            raise InvalidModelError(msg) from e
        check_ranks(guessed.graph.output)
        del light.graph.output[:]
        light.graph.output.extend(guessed.graph.output)
    try:
        checker.check_model(light, full_check=False)
    except (checker.ValidationError, ValueError) as e:
        msg = f"the graph {model.graph.name!r} is not valid ONNX: {_first_lines(e)}; fix the export"
        raise InvalidModelError(msg) from e
    try:
        inferred = shape_inference.infer_shapes(light, check_type=True, strict_mode=True, data_prop=True)
    except (shape_inference.InferenceError, ValueError, RuntimeError) as e:
        msg = f"the graph {model.graph.name!r} has types or shapes that do not agree: {_first_lines(e)}; fix the export"
        raise InvalidModelError(msg) from e
    for field in ("output", "value_info"):
        values = getattr(model.graph, field)
        del values[:]
        values.extend(getattr(inferred.graph, field))
    check_ranks(model.graph.output)


def _light_copy(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with every large initializer as a typed input of the graph, so that no weight is copied."""
    light = without_weights(model)
    declared = {value.name for value in light.graph.input}
    for tensor in model.graph.initializer:
        _check_payload(tensor)
        if tensor_bytes(tensor) <= _CONSTANT_BYTES:
            light.graph.initializer.append(tensor)
        elif tensor.name not in declared:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return light


def _check_payload(tensor: onnx.TensorProto) -> None:
    """Check what the checker would say of an inline weight: the bytes are those of its dtype and dims."""
    what = f"initializer {tensor.name!r}"
    if any(dim < 0 for dim in tensor.dims):
        msg = f"{what} has the dims {list(tensor.dims)}, expected 0 or more"
        raise InvalidModelError(msg)
    if not is_numeric(tensor.data_type):
        msg = f"{what} has the dtype {element_type_name(tensor.data_type)}, expected numbers or bool"
        raise InvalidModelError(msg)
    expected = tensor_bytes(tensor)
    if tensor.HasField("raw_data") and len(tensor.raw_data) != expected:
        name = onnx.TensorProto.DataType.Name(tensor.data_type)
        msg = (
            f"{what} holds {len(tensor.raw_data)} bytes, but {name} {list(tensor.dims)} takes {expected}; "
            f"the file is damaged, export or copy it again"
        )
        raise InvalidModelError(msg)


def _first_lines(error: Exception) -> str:
    """Return the message of an onnx error on one line."""
    return " ".join(str(error).split())[:800]
