"""Real exports and zoo models through the importer: numbers, names, the way back to the nodes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper
from tvm import relax

from relaxtune.models import load_model
from relaxtune.pipeline.importer import ImportedGraph, import_model
from relaxtune.pipeline.passes import lower
from tests.pipeline.importer.onnx_cases import (
    ASSETS,
    assert_agrees,
    binding_names,
    float_tensor,
    make_model,
    random_feeds,
)

EXPORTS = sorted(path.name for path in ASSETS.glob("*.onnx"))


@pytest.mark.parametrize("file", EXPORTS)
def test_real_export_agrees_with_onnx_runtime(file: str) -> None:
    model = load_model(ASSETS / file)
    graph = assert_agrees(model, random_feeds(model), tolerance=1e-4)
    assert (graph.inputs, graph.outputs, graph.source_sha256) == (model.inputs, model.outputs, model.sha256)
    assert graph.model is model


@pytest.mark.parametrize("file", EXPORTS)
def test_every_binding_leads_back_to_nodes_of_the_users_graph(file: str) -> None:
    model = load_model(ASSETS / file)
    graph = import_model(model)
    names = {node.name for node in model.proto.graph.node}
    assert set(binding_names(graph)) == set(graph.source_map)
    for binding, nodes in graph.source_map.items():
        assert nodes, binding
        assert set(nodes) <= names, binding


@pytest.mark.parametrize("file", EXPORTS)
def test_every_matmul_node_is_in_the_map_under_its_own_name(file: str) -> None:
    model = load_model(ASSETS / file)
    mapped = {node for nodes in import_model(model).source_map.values() for node in nodes}
    matmuls = {node.name for node in model.proto.graph.node if node.op_type in ("MatMul", "Gemm")}
    assert len(matmuls) >= 8
    assert matmuls <= mapped


@pytest.mark.parametrize("file", EXPORTS)
def test_import_prints_and_warns_nothing(file: str, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_model(load_model(ASSETS / file))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.fixture(scope="module")
def bert() -> ImportedGraph:
    return import_model(load_model("bert-tiny", shapes={"input_ids": [1, 16]}))


def test_binding_names_survive_legalisation_and_fusion(bert: ImportedGraph) -> None:
    passes = [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
    ]
    mod = tvm.ir.transform.Sequential(passes)(bert.mod)
    fused = {
        gv.name_hint: [binding.var.name for block in function.body.blocks for binding in block.bindings]
        for gv, function in mod.functions_items()
        if isinstance(function, relax.Function) and gv.name_hint != "main"
    }
    assert len(fused) >= 5
    for function, names in fused.items():
        assert any(bert.source_map.get(name) for name in names), function


def test_every_kernel_of_bert_leads_back_to_its_nodes_after_lowering(bert: ImportedGraph) -> None:
    lowered = lower(bert, tvm.target.Target("llvm"))
    calls = [call for calls in lowered.kernels.values() for call in calls]
    assert calls
    assert all(call.onnx_nodes for call in calls)
    reached = {node for call in calls for node in call.onnx_nodes}
    assert {node.name for node in bert.model.proto.graph.node if node.op_type == "MatMul"} <= reached


@pytest.mark.quick_cases("gpt2-tiny-decode", "vit-tiny")
@pytest.mark.parametrize("name", ["gpt2-tiny-decode", "llama-tiny", "vit-tiny", "whisper-tiny"])
def test_zoo_model_imports_and_agrees(name: str) -> None:
    model = load_model(name)
    assert_agrees(model, random_feeds(model), tolerance=1e-4)


@pytest.mark.quick_cases("bert-tiny")
@pytest.mark.parametrize("name", ["bert-tiny", "llama-tiny", "t5-tiny"])
def test_zoo_model_with_symbolic_axes_agrees_at_several_sizes(name: str) -> None:
    model = load_model(name, shapes={"input_ids": ["batch", "seq"]})
    graph = import_model(model)
    assert isinstance(graph.mod["main"].params[0].ty.shape.values[1], tvm.tirx.Var)
    assert_agrees(model, random_feeds(model, {"batch": 2, "seq": 7}), tolerance=1e-4)


def test_decode_step_with_a_cache_of_symbolic_length_agrees() -> None:
    model = load_model("llama-tiny-decode", shapes={"past_key_values.0.key": ["batch", 2, "past", 32]})
    sizes = {"batch": 2, "past": 9, "past + 1": 10}
    assert_agrees(model, random_feeds(model, sizes), tolerance=1e-4)


def test_parameters_keep_the_order_of_the_inputs_when_names_are_no_identifiers() -> None:
    model = make_model(
        [helper.make_node("Sub", ["input.1", "0/b"], ["y:0"])],
        {"0/b": ("float32", (2,)), "input.1": ("float32", (2,))},
        {"y:0": ("float32", (2,))},
    )
    graph = assert_agrees(model, {"input.1": np.array([5, 7], "float32"), "0/b": np.array([1, 2], "float32")})
    assert [spec.name for spec in graph.inputs] == ["0/b", "input.1"]


def test_weights_listed_among_the_inputs_are_constants() -> None:
    model = make_model(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        {"x": ("float32", (2,))},
        {"y": ("float32", (2,))},
        {"w": np.array([1, 2], "float32")},
    )
    model.proto.graph.input.append(helper.make_tensor_value_info("w", 1, [2]))
    assert len(import_model(model).mod["main"].params) == 1


def test_weights_kept_in_a_file_are_read_and_folded(tmp_path: Path) -> None:
    weight = np.arange(6, dtype="float32").reshape(2, 3)
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"]),
        helper.make_node("MatMul", ["x", "t"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["y"]),
    ]
    inline = make_model(nodes, {"x": ("float32", (1, 3))}, {"y": ("float32", (1, 3))}, {"w": weight})
    proto = onnx.ModelProto()
    proto.CopyFrom(inline.proto)
    (tmp_path / "weights.bin").write_bytes(b"\0" * 64 + weight.tobytes())
    (tensor,) = proto.graph.initializer
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "64"), ("length", str(weight.nbytes))):
        tensor.external_data.add(key=key, value=value)
    model = replace(inline, proto=proto, data_dir=tmp_path)
    assert_agrees(model, {"x": np.array([[1, 2, 3]], "float32")})


def test_several_outputs_come_back_in_order_and_their_tuple_leads_to_all_nodes() -> None:
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b"], name="cut", axis=0, num_outputs=2),
        helper.make_node("Neg", ["b"], ["c"], name="minus"),
    ]
    model = make_model(nodes, {"x": ("float32", (4,))}, {"c": ("float32", (2,)), "a": ("float32", (2,))})
    graph = assert_agrees(model, {"x": np.arange(4, dtype="float32")})
    assert graph.source_map[binding_names(graph)[-1]] == ("minus", "cut")


def test_branches_import_and_lead_back_to_the_if_node() -> None:
    def branch(op_type: str) -> object:
        return helper.make_graph(
            [helper.make_node(op_type, ["x"], ["o"])], "b", [], [helper.make_tensor_value_info("o", 1, [2])]
        )

    model = make_model(
        [helper.make_node("If", ["c"], ["y"], name="choose", then_branch=branch("Neg"), else_branch=branch("Abs"))],
        {"c": ("bool", ()), "x": ("float32", (2,))},
        {"y": ("float32", (2,))},
    )
    graph = assert_agrees(model, {"c": np.array(True), "x": np.array([1, -2], "float32")})
    assert ("choose",) in graph.source_map.values()


def test_model_whose_output_is_an_input_or_a_constant_imports() -> None:
    nodes = [
        helper.make_node("Identity", ["x"], ["y"]),
        helper.make_node("Constant", [], ["z"], value_floats=[1.0]),
        helper.make_node("Constant", [], ["i"], value_int=3),
        helper.make_node("Constant", [], ["t"], value=float_tensor([2.0])),
    ]
    outputs = {"y": ("float32", (2,)), "z": ("float32", (1,)), "i": ("int64", ()), "t": ("float32", (1,))}
    model = make_model(nodes, {"x": ("float32", (2,))}, outputs)
    assert_agrees(model, {"x": np.array([1, 2], "float32")})


def test_output_of_another_rank_than_a_file_states_has_its_own() -> None:
    """As files of recognised text state two axes where the graph gives three; ONNX Runtime warns and goes on."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Concat", ["one", "shape"], ["longer"], axis=0),
        helper.make_node("Reshape", ["x", "longer"], ["y"]),
    ]
    model = make_model(
        nodes, {"x": ("float32", ["n", 4])}, {"y": ("float32", ["n", "m"])}, {"one": np.array([1])}
    )  # fmt: skip
    graph = assert_agrees(model, {"x": np.ones((3, 4), "float32")})
    assert [spec.shape for spec in graph.outputs] == [(1, "y_1", 4)]
