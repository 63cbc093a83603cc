"""Every way a user's file can be wrong: the error's leaf and its message."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models import load_model
from relaxtune.models.errors import (
    InvalidModelError,
    ModelError,
    ModelFileError,
    ModelShapeError,
    UnsupportedModelError,
)

FLOAT = TensorProto.FLOAT


def tensor(name: str, shape: list[int | str] | None = None, element_type: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element_type, ["batch", 4] if shape is None else shape)


def graph_model(
    nodes: list[onnx.NodeProto],
    *,
    inputs: list[onnx.ValueInfoProto] | None = None,
    outputs: list[onnx.ValueInfoProto] | None = None,
    weights: list[onnx.TensorProto] | None = None,
    opset: int = 18,
    ir_version: int = 8,
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs or [tensor("x")], outputs or [tensor("y")], weights or [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def relu(source: str = "x", target: str = "y", name: str = "relu") -> onnx.NodeProto:
    return helper.make_node("Relu", [source], [target], name=name)


def weight(name: str = "w", shape: tuple[int, ...] = (4, 4)) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def write(tmp_path: Path, model: onnx.ModelProto) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


# Files that are not models.


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no file .*absent\.onnx; expected an \.onnx file, or a zoo name"):
        load_model(tmp_path / "absent.onnx")


def test_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"is a directory; expected an \.onnx file"):
        load_model(str(tmp_path))


def test_fifo_is_refused_without_reading(tmp_path: Path) -> None:
    path = tmp_path / "pipe.onnx"
    os.mkfifo(path)
    with pytest.raises(ModelFileError, match="is not a regular file"):
        load_model(path)


def test_path_with_null_byte_is_refused() -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        load_model("a\0b.onnx")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, graph_model([relu()]))
    path.chmod(0)
    with pytest.raises(ModelFileError, match="cannot be read: Permission denied; check its permissions"):
        load_model(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty \(0 bytes\); export or copy"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer.*git lfs pull"),
        (b"this is no model at all, only text", "is not an ONNX model, or it is truncated"),
        (os.urandom(0) + b"\x08\x08", "holds no graph, so it is not an ONNX model"),
        (b"PK\x03\x04" + bytes(200), "not an ONNX model"),
    ],
)
def test_content_that_is_no_model_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        load_model(path)


def test_file_above_protobuf_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(
        ModelFileError, match=r"has 2147483648 bytes.*less than 2 GiB; save the model with external data"
    ):
        load_model(path)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.999])
def test_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    data = load_model("bert-tiny").serialize()
    path = tmp_path / "model.onnx"
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ModelFileError, match="is not an ONNX model, or it is truncated"):
        load_model(path)


# Shape overrides.


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"input": (1, 4)},
            r"model 'model.onnx' has no input and no symbolic axis 'input'; its inputs are x: float32\[batch x 4\]",
        ),
        ({"x": (1, 4, 1)}, r"shape of input 'x' has 3 axes, expected 2 as in x: float32\[batch x 4\]"),
        ({"x": (1, 5)}, r"axis 1 of input 'x' is static: expected 4 .* got 5"),
        ({"x": (1, "n")}, r"axis 1 of input 'x' is static: expected 4 .* got 'n'"),
        ({"x": (0, 4)}, "axis 0 of input 'x' is 0; expected a positive number or a name"),
        ({"x": (-2, 4)}, "axis 0 of input 'x' is -2"),
        ({"x": (True, 4)}, "axis 0 of input 'x' is True"),
        ({"x": ("", 4)}, "axis 0 of input 'x' is ''"),
        ({"x": (2, 4), "z": (3, 4)}, "dimension 'batch' .* is 2 by input 'x' and 3 by input 'z'; give one value"),
    ],
)
def test_bad_shape_override_is_refused(tmp_path: Path, shapes: dict[str, tuple[int | str, ...]], message: str) -> None:
    add = helper.make_node("Add", ["x", "z"], ["y"])
    path = write(tmp_path, graph_model([add], inputs=[tensor("x"), tensor("z")]))
    with pytest.raises(ModelShapeError, match=message):
        load_model(path, shapes=shapes)


def test_pinning_that_the_graph_cannot_take_is_refused(tmp_path: Path) -> None:
    add = helper.make_node("Add", ["x", "z"], ["y"])
    inputs = [tensor("x", ["n"]), tensor("z", ["m"])]
    path = write(tmp_path, graph_model([add], inputs=inputs, outputs=[tensor("y", ["n"])]))
    with pytest.raises(InvalidModelError, match="types or shapes that do not agree"):
        load_model(path, shapes={"x": (3,), "z": (4,)})


def test_zoo_limits_and_precision_are_checked() -> None:
    with pytest.raises(
        ModelShapeError, match="dimension 'sequence' of zoo model 'bert-tiny' is 513, expected at most 512"
    ):
        load_model("bert-tiny", shapes={"input_ids": (1, 513)})
    with pytest.raises(UnsupportedModelError, match="precision 'int3' is not known; expected one of fp32, fp16"):
        load_model("bert-tiny", precision="int3")
    with pytest.raises(ModelShapeError, match=r"axis 1 of input 'attention_mask' is 'past_sequence \+ 1', got 'n'"):
        load_model("gpt2-tiny-decode", shapes={"attention_mask": (1, "n")})


# Damaged bytes: whatever they say, the answer is a model or a ModelError.


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    data = graph_model([relu(name="relu")]).SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(data.replace(b"Relu", b"R\xfflu"))
    with pytest.raises(
        InvalidModelError, match=r"has a op_type that is not UTF-8 text: b'R.xfflu'; the file is damaged"
    ):
        load_model(path)


def test_unknown_element_type_of_a_weight_is_refused(tmp_path: Path) -> None:
    model = graph_model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[weight()])
    model.graph.initializer[0].data_type = 64
    with pytest.raises(InvalidModelError, match="initializer 'w' has the dtype 64, expected numbers or bool"):
        load_model(write(tmp_path, model))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_give_a_model_or_a_model_error(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="mm"),
        helper.make_node("Reshape", ["h", "s"], ["r"], name="reshape"),
        helper.make_node("Softmax", ["r"], ["y"], name="softmax", axis=-1),
    ]
    shape = numpy_helper.from_array(np.array([0, 4]), "s")
    data = bytearray(graph_model(nodes, weights=[weight(), shape]).SerializeToString())
    for place, value in flips:
        data[place % len(data)] = value
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    try:
        model = load_model(path)
    except ModelError:
        return
    assert model.outputs


@pytest.mark.timeout(20)
@pytest.mark.parametrize("size", [2**62, 10**9])
def test_computed_shape_too_large_to_follow_does_not_hang(tmp_path: Path, size: int) -> None:
    # onnx's data propagation would walk every element of the reshaped vector.
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Reshape", ["s", "huge"], ["r"]),
        helper.make_node("Equal", ["r", "r"], ["e"]),
        helper.make_node("Where", ["e", "r", "r"], ["w"]),
        helper.make_node("Expand", ["x", "w"], ["y"]),
    ]
    huge = numpy_helper.from_array(np.array([size]), "huge")
    path = write(tmp_path, graph_model(nodes, weights=[huge], outputs=[tensor("y", ["a", "b"])]))
    if size > 2**31:
        with pytest.raises(ModelShapeError, match=f"axis 0 of tensor 'r' is {size}, expected at most 2147483648"):
            load_model(path)
    else:
        assert load_model(path).outputs[0].shape == ("a", "b")
