"""Windows of poolings and convolutions have room at the sizes that are drawn, and too small ones are an error."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from relaxtune.models import axis_sizes, load_model
from relaxtune.models.axes.windows import least_sizes
from relaxtune.models.axis_profile import sizes_within
from relaxtune.models.errors import ModelShapeError

FREE = ["batch", 2, "height", "width"]


def saved(folder: Path, shape: list[int | str], *, halvings: int = 0, op: str = "MaxPool", **given: object) -> Path:
    """Save convolutions that halve both axes so often, and a pooling or convolution of windows of 2 x 3."""
    weight = numpy_helper.from_array(np.ones((2, 2, 3, 3), "float32"), "w")
    last = numpy_helper.from_array(np.ones((2, 2, 2, 3), "float32"), "last")
    nodes = [
        helper.make_node("Conv", [f"x{n}", "w"], [f"x{n + 1}"], pads=[1] * 4, strides=[2, 2]) for n in range(halvings)
    ]
    inputs = [f"x{halvings}", *(["last"] if op == "Conv" else [])]
    window = {} if op == "Conv" else {"kernel_shape": [2, 3]}
    nodes.append(helper.make_node(op, inputs, ["y"], name="the_last", **window, **given))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4)],
        [weight, last],
    )
    path = folder / "windows.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool", "Conv"])
def test_sizes_grow_until_a_window_has_room(tmp_path: Path, op: str) -> None:
    model = load_model(saved(tmp_path, FREE, halvings=5, op=op))
    # 16 places are 1 after five strides, and 64 are 2.
    assert axis_sizes(model) == {"batch": 2, "height": 64, "width": 128}
    assert axis_sizes(model, {"height": 40}) == {"batch": 2, "height": 40, "width": 128}


def test_sizes_stay_small_where_windows_have_room(tmp_path: Path) -> None:
    assert axis_sizes(load_model(saved(tmp_path, FREE))) == {"batch": 2, "height": 16, "width": 16}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"MaxPool node 'the_last' slides a window over 2 places of axis 3 .* at least 3; give the model larger"),
        ({"pads": [0, 0, 0, 1]}, None),
        ({"auto_pad": "SAME_UPPER"}, None),
        ({"ceil_mode": 1}, "over 2 places of axis 3"),
        # The output's size is rounded up: one place is left.
        ({"ceil_mode": 1, "strides": [1, 2]}, None),
        ({"pads": [0, 0, 0, 1], "dilations": [3, 1]}, "over 3 places of axis 2 .* at least 4"),
        ({"op": "Conv"}, "Conv node 'the_last' slides a window over 2 places of axis 3"),
    ],
)
def test_a_window_without_room_is_refused(tmp_path: Path, given: dict[str, object], message: str | None) -> None:
    path = saved(tmp_path, [1, 2, 3, 2], **given)  # type: ignore[arg-type]
    if message is None:
        load_model(path)
        return
    with pytest.raises(ModelShapeError, match=message):
        load_model(path)


def test_sizes_that_are_asked_for_are_refused_where_a_window_has_no_room(tmp_path: Path) -> None:
    model = load_model(saved(tmp_path, FREE, halvings=2))
    assert sizes_within(model, {"height": 8})["height"] == 8
    with pytest.raises(ModelShapeError, match=r"over 1 places of axis 2 .* with the sizes .*height=4"):
        sizes_within(model, {}, {"height": 4})
    with pytest.raises(ModelShapeError, match="height=4"):
        sizes_within(model, {"height": 4})


@pytest.mark.parametrize("op", ["MaxPool", "Conv"])
def test_least_sizes_are_those_that_onnx_runtime_takes(tmp_path: Path, op: str) -> None:
    path = saved(tmp_path, FREE, halvings=2, op=op)
    least = least_sizes(load_model(path).proto, ["batch", "height", "width"])
    assert least == {"height": 5, "width": 9}
    session = onnxruntime.InferenceSession(path)

    def places(height: int, width: int) -> int:
        return int(session.run(None, {"x0": np.ones((1, 2, height, width), "float32")})[0].size)

    assert places(5, 9) == 2
    for sizes in ((4, 9), (5, 8)):
        # A pooling leaves nothing, a convolution is an error.
        with contextlib.suppress(InvalidArgument):
            assert places(*sizes) == 0


def test_no_least_size_is_above_one_without_windows_or_with_padding_around(tmp_path: Path) -> None:
    assert least_sizes(load_model("bert-tiny").proto, ["sequence"]) == {}
    padded = load_model(saved(tmp_path, FREE, pads=[1, 1, 1, 1]))
    assert least_sizes(padded.proto, ["batch", "height", "width"]) == {}
