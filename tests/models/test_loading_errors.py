"""Every way a user's file can be wrong: the error's leaf and its message."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models import load_model
from relaxtune.models.errors import (
    ExternalDataError,
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


# Graphs that break a rule.


def cycle() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Add", ["x", "c"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="second"),
        helper.make_node("Relu", ["b"], ["c"], name="third"),
        helper.make_node("Relu", ["c"], ["y"], name="fourth"),
    ]
    return graph_model(nodes)


def if_with_unknown_name() -> onnx.ModelProto:
    branch = helper.make_graph([relu("nowhere", "t", "inside")], "branch", [], [tensor("t")])
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=branch, else_branch=branch)
    return graph_model([node], inputs=[tensor("x"), tensor("c", [], TensorProto.BOOL)])


def no_opset() -> onnx.ModelProto:
    model = graph_model([relu()])
    del model.opset_import[:]
    return model


def two_opsets() -> onnx.ModelProto:
    model = graph_model([relu()])
    model.opset_import.append(helper.make_opsetid("ai.onnx", 17))
    return model


def no_output() -> onnx.ModelProto:
    model = graph_model([relu()])
    del model.graph.output[:]
    return model


def untyped_input() -> onnx.ModelProto:
    model = graph_model([relu()])
    model.graph.input[0].ClearField("type")
    return model


def unranked_input() -> onnx.ModelProto:
    model = graph_model([relu()])
    model.graph.input[0].type.tensor_type.ClearField("shape")
    return model


def unranked_output() -> onnx.ModelProto:
    model = graph_model([helper.make_node("Mystery", ["x"], ["y"], domain="com.microsoft", name="fused")])
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def sequence_input() -> onnx.ModelProto:
    value = helper.make_tensor_sequence_value_info("x", FLOAT, None)
    return graph_model([helper.make_node("SequenceLength", ["x"], ["y"])], inputs=[value])


def custom_domain() -> onnx.ModelProto:
    model = graph_model([helper.make_node("Secret", ["x"], ["y"], domain="org.example", name="mine")])
    model.opset_import.append(helper.make_opsetid("org.example", 1))
    return model


def ml_without_opset() -> onnx.ModelProto:
    return graph_model([helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", name="scale")])


def weight(name: str = "w", shape: tuple[int, ...] = (4, 4)) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def short_weight() -> onnx.ModelProto:
    broken = weight()
    broken.raw_data = broken.raw_data[:-8]
    return graph_model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[broken])


def negative_weight() -> onnx.ModelProto:
    broken = weight()
    broken.dims[0] = -4
    return graph_model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[broken])


def string_weight() -> onnx.ModelProto:
    broken = helper.make_tensor("w", TensorProto.STRING, [1], [b"a"])
    return graph_model([relu()], weights=[broken])


def missing_attribute() -> onnx.ModelProto:
    return graph_model([helper.make_node("Concat", ["x", "x"], ["y"], name="cat")])


@pytest.mark.parametrize(
    ("make", "leaf", "message"),
    [
        (cycle, InvalidModelError, r"graph 'g' has a cycle: .*first \(Add\).*second \(Relu\).*; break it"),
        (lambda: graph_model([relu("z")]), InvalidModelError, r"node relu \(Relu\) reads 'z', which no input, init"),
        (if_with_unknown_name, InvalidModelError, r"node inside \(Relu\) reads 'nowhere'.*graph 'branch' defines"),
        (lambda: graph_model([relu("x", "h")]), InvalidModelError, "output 'y' of graph 'g' is produced by no node"),
        (
            lambda: graph_model([relu(), relu()]),
            InvalidModelError,
            "tensor 'y' is defined twice, .*outputs of node relu",
        ),
        (
            lambda: graph_model([relu()], inputs=[tensor("x"), tensor("x")]),
            InvalidModelError,
            "tensor 'x' is defined twice, the second time by inputs of graph 'g'",
        ),
        (
            lambda: graph_model([relu()], weights=[weight(), weight()]),
            InvalidModelError,
            "tensor 'w' is defined twice, .*initializers of graph 'g'; rename one",
        ),
        (
            lambda: graph_model([relu()], weights=[weight("x"), weight("x")]),
            InvalidModelError,
            "tensor 'x' is defined twice, by two initializers of graph 'g'",
        ),
        (no_opset, InvalidModelError, "declares no opset for the standard domain"),
        (two_opsets, InvalidModelError, "declares an opset twice"),
        (no_output, InvalidModelError, "graph 'g' has no output"),
        (untyped_input, InvalidModelError, "input 'x' has no type; declare its dtype and shape"),
        (short_weight, InvalidModelError, r"initializer 'w' holds 56 bytes, but FLOAT \[4, 4\] takes 64"),
        (negative_weight, InvalidModelError, r"initializer 'w' has the dims \[-4, 4\]"),
        (string_weight, InvalidModelError, "initializer 'w' has the dtype STRING, expected numbers or bool"),
        (missing_attribute, InvalidModelError, "graph 'g' is not valid ONNX: .*axis.*fix the export"),
        (ml_without_opset, InvalidModelError, r"node scale \(Scaler\) is of the domain 'ai.onnx.ml', but .* no opset"),
        (lambda: graph_model([relu()], ir_version=2), InvalidModelError, r"IR version 2, expected 3 to \d+"),
        (lambda: graph_model([relu()], ir_version=99), UnsupportedModelError, r"IR version 99, .*up to \d+"),
        (
            lambda: graph_model([relu()], opset=999),
            UnsupportedModelError,
            r"opset 999, .*1 to \d+; export it with opset_v",
        ),
        (lambda: graph_model([relu()], opset=-1), UnsupportedModelError, "declares opset -1"),
        (
            lambda: graph_model([helper.make_node("Rleu", ["x"], ["y"], name="typo")]),
            UnsupportedModelError,
            r"node typo \(Rleu\) is an unknown operator in opset 18 of the domain 'ai.onnx'; it is no standard ONNX",
        ),
        (
            lambda: graph_model([helper.make_node("Swish", ["x"], ["y"], name="new")]),
            UnsupportedModelError,
            r"node new \(Swish\) is an unknown operator in opset 18 .* it exists in opset 24: export the model with",
        ),
        (custom_domain, UnsupportedModelError, r"node mine \(Secret\) is of the domain 'org.example', .*com.microsoft"),
        (sequence_input, UnsupportedModelError, "input 'x' is a sequence, expected a tensor"),
        (unranked_input, UnsupportedModelError, "input 'x' has no shape, not even a rank"),
        (unranked_output, UnsupportedModelError, "output 'y' has no shape, not even a rank"),
        (
            lambda: graph_model([relu()], inputs=[tensor("x", None, TensorProto.STRING)]),
            UnsupportedModelError,
            "input 'x' has element type STRING, which is not supported; expected one of bfloat16, bool.*tokenising",
        ),
        (
            lambda: graph_model([relu()], inputs=[tensor("x", None, 77)]),
            UnsupportedModelError,
            "input 'x' has element type 77",
        ),
        (lambda: graph_model([relu()], inputs=[tensor("x", [0, 4])]), ModelShapeError, "axis 0 of input 'x' is 0, exp"),
        (lambda: graph_model([relu()], inputs=[tensor("x", [2, -1])]), ModelShapeError, "axis 1 of input 'x' is -1"),
        (lambda: graph_model([relu()], outputs=[tensor("y", [0, 4])]), ModelShapeError, "axis 0 of output 'y' is 0"),
        (
            lambda: graph_model([relu()], outputs=[tensor("y", None, TensorProto.INT64)]),
            InvalidModelError,
            "graph 'g' has types or shapes that do not agree: .*fix the export",
        ),
        (
            lambda: graph_model(
                [helper.make_node("Add", ["x", "i"], ["y"], name="mixed")],
                inputs=[tensor("x"), tensor("i", None, TensorProto.INT64)],
            ),
            InvalidModelError,
            "types or shapes that do not agree: .*Add",
        ),
        (
            lambda: graph_model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[weight(shape=(5, 4))]),
            InvalidModelError,
            "types or shapes that do not agree: .*MatMul",
        ),
    ],
)
def test_graph_that_breaks_a_rule_is_refused(
    tmp_path: Path, make: Callable[[], onnx.ModelProto], leaf: type[ModelError], message: str
) -> None:
    path = write(tmp_path, make())
    with pytest.raises(leaf, match=message) as caught:
        load_model(path)
    assert type(caught.value) is leaf
    assert os.listdir(tmp_path) == ["model.onnx"]


# Weights outside the file.


def external_model(tmp_path: Path, location: str, *, offset: str | None = "0", length: str | None = "64") -> Path:
    outside = TensorProto(name="w", data_type=FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            outside.external_data.add(key=key, value=value)
    folder = tmp_path / "model"
    folder.mkdir()
    return write(folder, graph_model([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[outside]))


def test_external_data_is_read_and_hashed_like_inline_data(tmp_path: Path) -> None:
    path = external_model(tmp_path, "w.bin")
    (path.parent / "w.bin").write_bytes(np.arange(16, dtype=np.float32).tobytes())
    model = load_model(path)
    np.testing.assert_array_equal(model.array("w"), np.arange(16, dtype=np.float32).reshape(4, 4))
    inline = graph_model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        weights=[numpy_helper.from_array(np.arange(16, dtype=np.float32).reshape(4, 4), "w")],
    )
    assert model.sha256 == load_model(write(tmp_path, inline)).sha256
    (path.parent / "w.bin").write_bytes(np.ones(16, dtype=np.float32).tobytes())
    assert load_model(path).sha256 != model.sha256


def test_external_data_in_a_subfolder_at_an_offset_is_read(tmp_path: Path) -> None:
    path = external_model(tmp_path, "weights/w.bin", offset="8")
    (path.parent / "weights").mkdir()
    (path.parent / "weights" / "w.bin").write_bytes(bytes(8) + np.full(16, 3, np.float32).tobytes() + bytes(8))
    assert (load_model(path).array("w") == 3).all()


@pytest.mark.parametrize(
    ("location", "offset", "length", "file_bytes", "message"),
    [
        ("w.bin", "0", "64", None, r"tensor 'w' is missing: .*w\.bin .*copy the file beside the model"),
        ("w.bin", "0", "64", 60, r"is truncated: FLOAT \[4, 4\] takes 64 bytes from offset 0, the file has 60 there"),
        ("w.bin", "40", "64", 64, "is truncated: .* from offset 40, the file has 24 there"),
        ("w.bin", "400", "64", 64, "from offset 400, the file has 0 there"),
        ("w.bin", "0", "60", 64, r"says it is 60 bytes, but FLOAT \[4, 4\] takes 64"),
        ("w.bin", "0", "128", 128, r"says it is 128 bytes, but FLOAT \[4, 4\] takes 64"),
        ("w.bin", None, None, 72, "is larger than the tensor: .* takes 64 bytes, the file has 72"),
        ("w.bin", "-8", "64", 64, "has the offset '-8'; expected a number"),
        ("w.bin", "0", "lots", 64, "has the length 'lots'; expected a number"),
        (
            "/etc/hostname",
            "0",
            "64",
            None,
            "has the absolute path '/etc/hostname'; external data must lie in the model",
        ),
        ("C:\\weights\\w.bin", "0", "64", None, "has the absolute path"),
        ("../w.bin", "0", "64", None, r"escapes the model's folder with '\.\./w\.bin'"),
        ("a/../../w.bin", "0", "64", None, "escapes the model's folder with"),
        ("..\\w.bin", "0", "64", None, "escapes the model's folder with"),
        ("", "0", "64", None, "has no location"),
        (".", "0", "64", None, "is not a regular file"),
    ],
)
def test_bad_external_data_is_refused(
    tmp_path: Path, location: str, offset: str | None, length: str | None, file_bytes: int | None, message: str
) -> None:
    path = external_model(tmp_path, location, offset=offset, length=length)
    (tmp_path / "w.bin").write_bytes(bytes(64))
    if file_bytes is not None:
        (path.parent / location).write_bytes(bytes(file_bytes))
    with pytest.raises(ExternalDataError, match=message):
        load_model(path)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_link_out_of_the_folder_is_refused(tmp_path: Path, kind: str) -> None:
    path = external_model(tmp_path, "w.bin" if kind == "file" else "inner/w.bin")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "w.bin").write_bytes(bytes(64))
    if kind == "file":
        (path.parent / "w.bin").symlink_to(outside / "w.bin")
    else:
        (path.parent / "inner").symlink_to(outside)
    with pytest.raises(
        ExternalDataError, match=r"escapes the model's folder: .* is a link to .*copy the file itself \(cp -L"
    ):
        load_model(path)


def test_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    path = external_model(tmp_path, "w.bin")
    (path.parent / "real.bin").write_bytes(bytes(64))
    (path.parent / "w.bin").symlink_to("real.bin")
    assert (load_model(path).array("w") == 0).all()


def test_link_loop_is_refused(tmp_path: Path) -> None:
    path = external_model(tmp_path, "w.bin")
    (path.parent / "w.bin").symlink_to("w.bin")
    with pytest.raises(ExternalDataError, match="is missing"):
        load_model(path)


def test_negative_external_dims_are_refused(tmp_path: Path) -> None:
    path = external_model(tmp_path, "w.bin")
    model = onnx.ModelProto.FromString(path.read_bytes())
    model.graph.initializer[0].dims[0] = -4
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExternalDataError, match=r"tensor 'w' has dtype FLOAT and dims \[-4, 4\]"):
        load_model(path)


def test_external_data_of_attributes_and_subgraphs_is_checked(tmp_path: Path) -> None:
    value = TensorProto(name="c", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    value.external_data.add(key="location", value="../c.bin")
    constant = helper.make_node("Constant", [], ["t"], name="constant")
    constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(value)
    branch = helper.make_graph([constant], "branch", [], [tensor("t", [4])])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    model = graph_model([node], inputs=[tensor("c", [], TensorProto.BOOL)], outputs=[tensor("y", [4])])
    with pytest.raises(ExternalDataError, match="tensor 'c' escapes"):
        load_model(write(tmp_path, model))
    for branch_attribute in model.graph.node[0].attribute:
        branch_attribute.g.node[0].attribute[0].t.external_data[0].value = "c.bin"
    (tmp_path / "c.bin").write_bytes(np.full(4, 2, np.float32).tobytes())
    loaded = load_model(write(tmp_path, model))
    inner = loaded.proto.graph.node[0].attribute[0].g.node[0].attribute[0].t
    assert (numpy_helper.to_array(inner) == 2).all()


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
