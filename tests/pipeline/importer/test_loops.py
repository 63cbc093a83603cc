"""`Loop` and `Scan` whose iterations are known when the model is imported, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer import import_model
from tests.pipeline.importer.onnx_cases import assert_agrees, make_model

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def _value(name: str, kind: int, shape: list[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _loop(count: str, condition: str, ends: list[onnx.NodeProto]) -> OnnxModel:
    """x, times a in each iteration; the number of the iteration and the product are kept."""
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["v", "a"], ["v2"]),
            helper.make_node("Cast", ["i"], ["number"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["v2", "number"], ["kept"]),
            *ends,
        ],
        "body",
        [_value("i", TensorProto.INT64, []), _value("c", TensorProto.BOOL, []), _value("v", 1, ["n", 4])],
        [_value("c2", TensorProto.BOOL, []), _value("v2", 1, ["n", 4]), _value("kept", 1, ["n", 4])],
    )
    return make_model(
        [helper.make_node("Loop", [count, condition, "x"], ["y", "all"], body=body)],
        {"x": ("float32", ["n", 4])},
        {"y": ("float32", ["n", 4]), "all": ("float32", ["k", "n", 4])},
        {"count": np.array(3), "yes": np.array(True), "a": np.float32(1.5), "two": np.array(2)},
    )


def test_loop_of_known_length_is_written_out() -> None:
    model = _loop("count", "yes", [helper.make_node("Identity", ["c"], ["c2"])])
    assert_agrees(model, {"x": X})


def test_loop_ends_where_its_condition_does() -> None:
    model = _loop("", "yes", [helper.make_node("Less", ["i", "two"], ["c2"])])
    assert_agrees(model, {"x": X})


def test_loop_of_a_length_known_in_a_call_is_refused() -> None:
    ends = [
        helper.make_node("ReduceSum", ["v2"], ["sum"], keepdims=0),
        helper.make_node("Less", ["sum", "a"], ["c2"]),
    ]
    with pytest.raises(ImportFailedError, match="condition of the loop: expected a constant"):
        import_model(_loop("count", "yes", ends))


@pytest.mark.parametrize("direction", [0, 1])
def test_scan_of_known_size_is_written_out(direction: int) -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "part"], ["s2"]), helper.make_node("Mul", ["s2", "part"], ["out"])],
        "body",
        [_value("s", 1, [3]), _value("part", 1, [3])],
        [_value("s2", 1, [3]), _value("out", 1, [3])],
    )
    node = helper.make_node(
        "Scan", ["zero", "x"], ["last", "all"], body=body, num_scan_inputs=1, scan_input_axes=[1],
        scan_input_directions=[direction], scan_output_axes=[1], scan_output_directions=[direction],
    )  # fmt: skip
    model = make_model(
        [node],
        {"x": ("float32", [3, 4])},
        {"last": ("float32", [3]), "all": ("float32", [3, 4])},
        {"zero": np.zeros(3, np.float32)},
    )
    assert_agrees(model, {"x": X})
