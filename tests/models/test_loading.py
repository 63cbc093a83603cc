"""Loading a user's file, pinning its shapes, and writing models."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import relaxtune.models.checks
import relaxtune.models.external_data
import relaxtune.models.onnx_model
from relaxtune.models import OnnxModel, TensorSpec, get_preset, load_model, random_inputs, save_model
from relaxtune.models.errors import ExternalDataError, ModelError, ModelFileError, UnsupportedModelError

FLOAT = TensorProto.FLOAT


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 1 MB stand for protobuf's 2 GiB; `test_llama_1b_...` crosses the real one."""
    monkeypatch.setattr(relaxtune.models.onnx_model, "PROTOBUF_LIMIT_BYTES", 2**20)
    monkeypatch.setattr(relaxtune.models.external_data, "PROTOBUF_LIMIT_BYTES", 2**20)


def save_symbolic(tmp_path: Path, name: str) -> tuple[OnnxModel, Path]:
    model = load_model(name, shapes={spec.name: spec.shape for spec in get_preset(name).inputs})
    return model, save_model(model, tmp_path / f"{name}.onnx")


def test_saved_model_loads_with_the_same_signature_and_hash(tmp_path: Path) -> None:
    model, path = save_symbolic(tmp_path, "gpt2-tiny-decode")
    loaded = load_model(path)
    assert loaded.sha256 == model.sha256
    assert (loaded.inputs, loaded.outputs) == (model.inputs, model.outputs)
    assert (loaded.name, loaded.path, loaded.data_dir) == ("gpt2-tiny-decode", path, None)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_zoo_name_wins_and_paths_need_a_suffix_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = save_symbolic(tmp_path, "vit-tiny")
    path.rename(tmp_path / "bert-tiny")
    monkeypatch.chdir(tmp_path)
    assert load_model("bert-tiny").inputs[0].name == "input_ids"
    assert load_model("./bert-tiny").inputs[0].name == "pixel_values"
    (tmp_path / "bert-tiny").rename(tmp_path / "mine")
    assert load_model("mine").inputs[0].name == "pixel_values"


def test_one_override_pins_every_axis_of_the_name(tmp_path: Path) -> None:
    _, path = save_symbolic(tmp_path, "bert-tiny")
    symbolic, pinned = load_model(path), load_model(path, shapes={"input_ids": (2, 7)})
    assert [spec.shape for spec in pinned.inputs] == [(2, 7)] * 3
    assert [spec.shape for spec in pinned.outputs] == [(2, 7, 128), (2, 128)]
    assert pinned.sha256 != symbolic.sha256
    inner = {value.name: value.type.tensor_type.shape.dim for value in pinned.proto.graph.value_info}
    assert not {dim.dim_param for dims in inner.values() for dim in dims} & {"batch", "sequence"}
    inputs = random_inputs(pinned, seed=0)
    for got, expected in zip(run(pinned, inputs), run(symbolic, inputs), strict=True):
        np.testing.assert_allclose(got, expected, atol=5e-6)


def test_pinned_name_reaches_expressions_and_zoo_agrees(tmp_path: Path) -> None:
    _, path = save_symbolic(tmp_path, "llama-tiny-decode")
    shapes = {"past_key_values.0.key": (1, 2, 9, 32)}
    from_file, from_zoo = load_model(path, shapes=shapes), load_model("llama-tiny-decode", shapes=shapes)
    assert from_file.inputs == from_zoo.inputs
    assert from_file.outputs == from_zoo.outputs
    assert dict((spec.name, spec.shape) for spec in from_file.inputs)["attention_mask"] == (1, 10)
    # The expression itself can be given, and binds the name in it.
    by_mask = load_model(path, shapes={"attention_mask": (1, 10)})
    assert by_mask.inputs == from_file.inputs


def test_axis_can_be_renamed(tmp_path: Path) -> None:
    _, path = save_symbolic(tmp_path, "bert-tiny")
    assert load_model(path, shapes={"input_ids": ("n", "sequence")}).outputs[0].shape == ("n", "sequence", 128)


def test_defaults_of_the_zoo_are_batch_1_sequence_128() -> None:
    assert load_model("t5-tiny").inputs[0].shape == (1, 128)
    assert load_model("llama-tiny-decode").inputs[1].shape == (1, 128)
    assert load_model("bert-tiny", shapes={"attention_mask": (4, 9)}).inputs[2].shape == (4, 9)


def test_precision_leaves_a_file_as_it_is(tmp_path: Path) -> None:
    _, path = save_symbolic(tmp_path, "t5-tiny")
    assert load_model(path, precision="fp16").sha256 == load_model(path).sha256


def test_unnamed_axes_get_names_and_can_be_pinned(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, FLOAT, [None, 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    assert load_model(path).inputs == (TensorSpec("x", "float32", ("x_0", 4)),)
    pinned = load_model(path, shapes={"x": (3, 4)})
    assert (pinned.inputs[0].shape, pinned.outputs[0].shape) == ((3, 4), (3, 4))


def test_weights_that_are_also_inputs_are_no_inputs(tmp_path: Path) -> None:
    # Files of IR version 3 list every initializer among the inputs.
    weight = numpy_helper.from_array(np.ones((400, 4), np.float32), "w")
    values = [helper.make_tensor_value_info(n, FLOAT, s) for n, s in (("x", [2, 400]), ("w", [400, 4]), ("y", [2, 4]))]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", values[:2], values[2:], [weight])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=3), path)
    assert [spec.name for spec in load_model(path).inputs] == ["x"]


def test_output_without_a_shape_is_inferred(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", FLOAT, None)],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    assert load_model(path).outputs == (TensorSpec("y", "float32", ("n", 4)),)


def test_contrib_operators_and_functions_pass_through(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("FastGelu", ["x"], ["h"], domain="com.microsoft", name="fused"),
        helper.make_node("Twice", ["h"], ["y"], domain="local", name="call"),
    ]
    values = [helper.make_tensor_value_info(name, FLOAT, ["n", 4]) for name in "xy"]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("local", 1)]
    body = [helper.make_node("Add", ["a", "a"], ["b"])]
    twice = helper.make_function("local", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 18)])
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=opsets, functions=[twice], ir_version=8)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    loaded = load_model(path)
    assert [node.op_type for node in loaded.proto.graph.node] == ["FastGelu", "Twice"]
    assert loaded.outputs[0].shape == ("n", 4)


def test_subgraph_axes_are_pinned(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["t"])], "b", [], [helper.make_tensor_value_info("t", FLOAT, ["n", 4])]
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    inputs = [
        helper.make_tensor_value_info("x", FLOAT, ["n", 4]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", FLOAT, ["n", 4])])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    loaded = load_model(path, shapes={"x": (3, 4)})
    inner = loaded.proto.graph.node[0].attribute[0].g.output[0].type.tensor_type.shape
    assert [dim.dim_value for dim in inner.dim] == [3, 4]
    assert loaded.outputs[0].shape == (3, 4)


def test_hash_covers_weights_kept_as_typed_lists(tmp_path: Path) -> None:
    hashes = []
    for value in (1.0, 2.0):
        weight = helper.make_tensor("w", FLOAT, [4], [value] * 4)
        values = [helper.make_tensor_value_info(name, FLOAT, [4]) for name in "xy"]
        graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", values[:1], values[1:], [weight])
        path = tmp_path / "m.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
        hashes.append(load_model(path).sha256)
    assert hashes[0] != hashes[1]


def test_newer_opset_is_taken_with_a_message_that_names_what_changed(tmp_path, monkeypatch, caplog) -> None:
    values = [helper.make_tensor_value_info(name, FLOAT, [2]) for name in "xyz"]
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Shape", ["y"], ["s"])]
    nodes.append(helper.make_node("Expand", ["y", "s"], ["z"]))
    graph = helper.make_graph(nodes, "g", values[:1], values[2:])
    path = tmp_path / "newer.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=10), path)
    caplog.set_level("INFO", logger="relaxtune")
    load_model(path)
    assert not caplog.messages
    monkeypatch.setattr(relaxtune.models.checks, "TESTED_OPSET", 24)  # as if opset 25 came out tomorrow
    load_model(path)
    assert caplog.messages == [
        "the model declares opset 25, relaxtune is tested up to 24; operators that changed since: Shape"
    ]


def test_dtype_of_tomorrow_is_a_message(tmp_path) -> None:
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Relu", ["x"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", FLOAT, [1])],
            [helper.make_tensor_value_info("y", FLOAT, [1])],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
    )
    unknown = max(TensorProto.DataType.values()) + 9
    model.graph.input[0].type.tensor_type.elem_type = unknown
    onnx.save(model, tmp_path / "input.onnx")
    with pytest.raises(UnsupportedModelError, match=rf"input 'x' has element type {unknown}, .*expected one of"):
        load_model(tmp_path / "input.onnx")
    model.graph.input[0].type.tensor_type.elem_type = FLOAT
    model.graph.initializer.add(name="w", data_type=unknown, dims=[1], raw_data=bytes(1))
    onnx.save(model, tmp_path / "weight.onnx")
    with pytest.raises(ModelError, match="'w'"):
        load_model(tmp_path / "weight.onnx")


@pytest.mark.usefixtures("low_limit")
def test_model_above_the_limit_is_saved_beside_and_stays_external(tmp_path: Path) -> None:
    model = load_model("bert-tiny", shapes={"input_ids": (2, 9)})
    assert not model.fits_protobuf
    with pytest.raises(ModelFileError, match=r"'bert-tiny' has 0\.00 GiB of weights .*limit 2 GiB.*save_model"):
        model.serialize()
    path = save_model(model, tmp_path / "big.onnx")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["big.onnx", "big.onnx.data"]
    onnx.checker.check_model(str(path), full_check=True)
    loaded = load_model(path)
    assert loaded.data_dir == tmp_path
    assert loaded.sha256 == model.sha256
    assert loaded.weight_bytes == model.weight_bytes
    assert all(np.array_equal(value, model.array(name)) for name, value in loaded.arrays())
    outside = [t.data_type for t in loaded.proto.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    # Positions are inline: their range bounds sizes.
    assert outside == [FLOAT] * 17
    inline = loaded.inline_proto()
    assert not any(t.data_location == TensorProto.EXTERNAL for t in inline.graph.initializer)
    # A loaded external model can be saved again, elsewhere.
    other = tmp_path / "other"
    other.mkdir()
    copy = load_model(save_model(loaded, other / "copy.onnx"))
    assert copy.sha256 == model.sha256
    inputs = random_inputs(model, seed=0)
    by_path = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, inputs)
    by_bytes = ort.InferenceSession(inline.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, inputs)
    np.testing.assert_array_equal(by_path[0], by_bytes[0])


def test_large_external_weights_of_a_small_model_stay_outside_and_are_aligned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model("bert-tiny")
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    monkeypatch.setattr(relaxtune.models.external_data, "LARGE_BYTES", 2**16)
    loaded = load_model(tmp_path / "m.onnx")
    outside = [t.name for t in loaded.proto.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    assert (loaded.data_dir, loaded.sha256) == (tmp_path, model.sha256)
    assert "embeddings.word_embeddings.weight" in outside
    assert len(outside) < len(loaded.proto.graph.initializer)
    for name in outside:
        assert np.array_equal(loaded.array(name), model.array(name))
        assert loaded.array(name).ctypes.data % relaxtune.models.onnx_model.ALIGNMENT_BYTES == 0


@pytest.mark.usefixtures("low_limit")
def test_external_file_that_changes_after_loading_is_noticed(tmp_path: Path) -> None:
    path = save_model(load_model("bert-tiny"), tmp_path / "big.onnx")
    loaded = load_model(path)
    name = "embeddings.word_embeddings.weight"
    data = path.with_name("big.onnx.data")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ExternalDataError, match=f"tensor '{name}' in .* ends early: expected 524288 bytes"):
        loaded.array(name)
    data.unlink()
    with pytest.raises(ExternalDataError, match=f"tensor '{name}' cannot be read from .*No such file"):
        loaded.array(name)
    with pytest.raises(ExternalDataError, match="is external but its model has no folder"):
        dataclasses.replace(loaded, data_dir=None).array(name)


def test_save_into_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"'vit-tiny' cannot be written to .*No such file.*choose another folder"):
        save_model(load_model("vit-tiny"), tmp_path / "absent" / "m.onnx")


def test_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.mkdir()
    with pytest.raises(ModelFileError, match="cannot be written"):
        save_model(load_model("vit-tiny"), path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.onnx"]
    assert path.is_dir()


@pytest.mark.slow
def test_llama_1b_crosses_the_real_limit(tmp_path: Path) -> None:
    model = load_model("llama-1b", precision="fp16", shapes={"input_ids": (1, 8)})
    assert not model.fits_protobuf
    path = save_model(model, tmp_path / "llama.onnx")
    onnx.checker.check_model(str(path), full_check=True)
    loaded = load_model(path)
    assert loaded.sha256 == model.sha256
    assert loaded.data_dir == tmp_path
    logits = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(
        None, random_inputs(loaded, seed=0)
    )
    assert np.isfinite(logits[0]).all()
    assert 0.3 < logits[0].astype(np.float32).std() < 3


def run(model: OnnxModel, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    return list(ort.InferenceSession(model.serialize(), providers=["CPUExecutionProvider"]).run(None, inputs))


def test_zoo_name_with_a_precision_is_the_graph_in_it_and_loads_again_by_its_name() -> None:
    model = load_model("bert-tiny:fp16", shapes={"input_ids": (1, 8)})
    assert model.outputs[0].dtype == "float16"
    assert load_model(model.name, shapes={"input_ids": (1, 8)}).sha256 == model.sha256
    with pytest.raises(UnsupportedModelError, match="precision 'fp8' is not known; expected one of fp32, fp16"):
        load_model("bert-tiny:fp8")


def save_nodes(path: Path, nodes: list[onnx.NodeProto], **stated: list[int | str]) -> Path:
    """Write x (a, 4) -> y with the weight w (4), and a type stated for each value named."""
    graph = helper.make_graph(
        nodes,
        "case",
        [helper.make_tensor_value_info("x", FLOAT, ["a", 4])],
        [helper.make_tensor_value_info("y", FLOAT, ["a", 4])],
        [numpy_helper.from_array(np.arange(1, 5, dtype="float32"), "w")],
        value_info=[helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in stated.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def run_file(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return what ONNX Runtime gives for the file as it is, and for the model as loaded."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    x = {"x": np.ones((2, 4), "float32")}
    sources = (path.read_bytes(), load_model(path).serialize())
    left, right = (ort.InferenceSession(source, options).run(None, x)[0] for source in sources)
    return left, right


def test_nodes_out_of_order_are_sorted_as_onnx_runtime_does(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["h"], ["y"]), helper.make_node("Mul", ["x", "w"], ["h"])]
    path = save_nodes(tmp_path / "late.onnx", nodes)
    np.testing.assert_array_equal(*run_file(path))
    assert [node.op_type for node in load_model(path).proto.graph.node] == ["Mul", "Relu"]


def test_stale_types_of_values_give_way_to_the_operators(tmp_path: Path) -> None:
    nodes = [helper.make_node("Mul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    path = save_nodes(tmp_path / "stale.onnx", nodes, h=["a", 7])
    np.testing.assert_array_equal(*run_file(path))
    (value,) = load_model(path).proto.graph.value_info
    assert (value.name, value.type.tensor_type.shape.dim[1].dim_value) == ("h", 4)


def test_sizes_that_a_file_calls_unknown_are_free_and_apart(tmp_path: Path) -> None:
    """As Paddle's exporter writes them; ONNX Runtime takes a negative size for an unknown one."""
    path = save_nodes(tmp_path / "unknown.onnx", [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=1)])
    proto = onnx.load(path)
    dims = [onnx.TensorShapeProto.Dimension(dim_value=-1), *2 * [onnx.TensorShapeProto.Dimension(dim_param="?")]]
    for value, kept in ((proto.graph.input[0], dims), (proto.graph.output[0], dims[:1])):
        shape = value.type.tensor_type.shape
        del shape.dim[:]
        shape.dim.extend(kept)
    del proto.graph.output[0].type.tensor_type.shape.dim[:]
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(proto, path)
    assert load_model(path).inputs[0].shape == ("x_0", "x_1", "x_2")
    assert load_model(path, shapes={"x": (2, 3, 5)}).inputs[0].shape == (2, 3, 5)


def test_stale_type_of_a_weight_gives_way_to_the_weight(tmp_path: Path) -> None:
    """As transformers' fusions state a scale of shape (1) as a scalar."""
    nodes = [helper.make_node("Mul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    path = save_nodes(tmp_path / "weight.onnx", nodes, w=[])
    np.testing.assert_array_equal(*run_file(path))


def test_norm_that_onnx_runtime_writes_into_the_standard_domain_is_loaded(tmp_path: Path) -> None:
    nodes = [helper.make_node("SimplifiedLayerNormalization", ["x", "w"], ["y"], axis=-1, epsilon=1e-5)]
    path = save_nodes(tmp_path / "fused.onnx", nodes)
    np.testing.assert_array_equal(*run_file(path))
    assert load_model(path).outputs[0].shape == ("a", 4)


def test_small_tensors_that_onnx_follows_wrongly_are_no_error(tmp_path: Path) -> None:
    """Its inference adds the elements of a column and of a row one by one."""
    nodes = [
        helper.make_node("Constant", [], ["column"], value_ints=[1, 2]),
        helper.make_node("Constant", [], ["row"], value_ints=[1, 2, 3, 4]),
        helper.make_node("Constant", [], ["axis"], value_ints=[1]),
        helper.make_node("Unsqueeze", ["column", "axis"], ["tall"]),
        helper.make_node("Add", ["tall", "row"], ["all"]),
        helper.make_node("Cast", ["all"], ["numbers"], to=FLOAT),
        helper.make_node("ReduceSum", ["numbers", "first"], ["sums"], keepdims=1),
        helper.make_node("Constant", [], ["first"], value_ints=[0]),
        helper.make_node("Mul", ["x", "sums"], ["y"]),
    ]
    np.testing.assert_array_equal(*run_file(save_nodes(tmp_path / "grid.onnx", nodes)))


def test_stale_type_behind_a_type_that_gives_way_gives_way_too(tmp_path: Path) -> None:
    """As quantisation tools leave the sizes of a graph whose input they made larger."""
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["h"]),
        helper.make_node("Sigmoid", ["h"], ["s"]),
        helper.make_node("Mul", ["h", "s"], ["m"]),
        helper.make_node("Relu", ["m"], ["y"]),
    ]
    path = save_nodes(tmp_path / "stale.onnx", nodes, h=["a", 9], s=["a", 7], m=["a", 8])
    np.testing.assert_array_equal(*run_file(path))


def test_names_of_axes_that_can_stand_in_no_size_get_underscores(tmp_path: Path) -> None:
    path = save_nodes(tmp_path / "dots.onnx", [helper.make_node("Relu", ["x"], ["y"])])
    proto = onnx.load(path)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "Dynamic.0"
    onnx.save(proto, path)
    model = load_model(path)
    assert (model.inputs[0].shape, model.outputs[0].shape) == (("Dynamic_0", 4), ("Dynamic_0", 4))


def test_name_of_an_input_that_tensorflow_made_up_is_kept(tmp_path: Path) -> None:
    path = save_nodes(tmp_path / "names.onnx", [helper.make_node("Relu", ["x"], ["y"])])
    proto = onnx.load(path)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "unk__616"
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(proto, path)
    model = load_model(path)
    assert (model.inputs[0].shape, model.outputs[0].shape) == (("unk__616", 4), ("y_0", 4))
    assert load_model(path, shapes={"unk__616": (3,)}).inputs[0].shape == (3, 4)
