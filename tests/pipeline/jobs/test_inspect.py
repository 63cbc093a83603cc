"""`relaxtune inspect`: what a model needs and would become, or everything that stops its import."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax, te, tirx

from relaxtune.models import load_model
from relaxtune.pipeline.artifact.compile import check_plan, compile_module
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.importer.nearest import nearest_supported
from relaxtune.pipeline.importer.unsupported import find_unsupported
from relaxtune.pipeline.jobs.inspect import inspect_model, measure_cache
from relaxtune.pipeline.passes.kit.ir import bindings_of, main_of, with_main
from relaxtune.pipeline.prepare import ModelRequest, prepare_model


def write_model(folder: Path, nodes: list[onnx.NodeProto], domains: tuple[str, ...] = ()) -> Path:
    graph = helper.make_graph(
        nodes,
        "case",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", 4))],
        [
            numpy_helper.from_array(np.ones((4, 4), "float32"), "w"),
            numpy_helper.from_array(np.ones(4, "float16"), "h"),
            numpy_helper.from_array(np.array([1]), "axes"),
        ],
    )
    opsets = [helper.make_opsetid("", 18), *(helper.make_opsetid(domain, 1) for domain in domains)]
    path = folder / "case.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """Two nodes without a converter, one whose converter refuses it, one behind an unknown type."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="first"),
        helper.make_node("Wobble", ["a", "h"], ["b"], name="odd", domain="com.example"),
        helper.make_node("Relu", ["b"], ["c"], name="behind"),
        helper.make_node("Cast", ["a"], ["i"], name="whole", to=TensorProto.INT64),
        helper.make_node("ReduceMax", ["i"], ["j"], name="size", keepdims=0),
        helper.make_node("Unsqueeze", ["j", "axes_0"], ["k"], name="vector"),
        helper.make_node("Slice", ["a", "k", "far", "axes"], ["d"], name="cut"),
        helper.make_node("SkipLayerNorm", ["a", "a"], ["e"], name="near", domain="com.microsoft"),
        helper.make_node("Identity", ["a"], ["y"], name="last"),
        helper.make_node("Constant", [], ["axes_0"], name="zero", value_ints=[0]),
        helper.make_node("Constant", [], ["far"], name="far", value_ints=[4]),
    ]
    ordered = [*nodes[-2:], *nodes[:-2]]
    path = write_model(tmp_path, ordered, ("com.example", "com.microsoft"))
    model = onnx.load(path)
    for name in ("c", "d", "e"):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ("batch", f"{name}_width")))
    onnx.save(model, path)
    return path


def test_every_node_that_stops_the_import_is_listed(blocked: Path) -> None:
    survey = find_unsupported(load_model(blocked, any_operator=True))
    found = {node.nodes: node for node in survey.unsupported}
    assert set(found) == {("odd",), ("cut",), ("near",)}
    odd = found[("odd",)]
    assert (odd.domain, odd.operator, odd.opset, odd.reason) == ("com.example", "Wobble", 1, "no converter")
    # The identity behind it was dropped: `a` bears the name of the output.
    assert odd.inputs == ("y: float32[batch x 4]", "h: float16[4] constant")
    assert "starts" in found[("cut",)].reason
    assert found[("near",)].nearest == "com.microsoft.SkipLayerNormalization"
    assert survey.not_looked_at == 1


def test_the_command_shows_them_and_exits_1(blocked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(blocked), "--target", "llvm", "--format", "json"])
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert ended.value.code == 1
    assert {node["operator"] for node in data["unsupported"]} == {"Wobble", "Slice", "SkipLayerNorm"}
    assert data["tasks"] == []
    assert "3 nodes cannot be imported" in captured.err
    assert "--shape" in captured.err


def test_nothing_stops_a_model_that_imports() -> None:
    survey = find_unsupported(load_model("bert-tiny", shapes={"input_ids": [1, 16]}))
    assert (survey.unsupported, survey.not_looked_at) == ((), 0)


def test_model_whose_memory_cannot_be_planned_is_refused_as_compile_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inspect accepted gpt-oss, which compile then refused: kernels read a size before its definition."""
    nodes = [
        helper.make_node("ReduceSum", ["counts"], ["count"], keepdims=0),
        helper.make_node("Range", ["zero", "count", "one"], ["places"]),
        helper.make_node("Neg", ["places"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "case",
        [helper.make_tensor_value_info("counts", TensorProto.INT64, [3])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, ["n"])],
        [numpy_helper.from_array(np.array(value), name) for name, value in (("zero", 0), ("one", 1))],
    )
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "case.onnx")
    prepared = prepare_model(ModelRequest(tmp_path / "case.onnx", target="llvm"))
    check_plan(prepared.lowered, prepared.target)
    main = main_of(prepared.lowered.mod)
    sizes = [binding for binding in bindings_of(main) if isinstance(binding, relax.MatchCast)]
    rest = [binding for binding in bindings_of(main) if not isinstance(binding, relax.MatchCast)]
    body = relax.SeqExpr([relax.DataflowBlock([*rest, *sizes])], main.body.body)
    late = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    lowered = replace(prepared.lowered, mod=with_main(prepared.lowered.mod, late))
    monkeypatch.setattr("relaxtune.pipeline.jobs.inspect.prepare_model", lambda _: replace(prepared, lowered=lowered))
    with pytest.raises(LoweringError, match=r"memory of case for llvm .* cannot be planned"):
        inspect_model(prepared.request)
    with pytest.raises(LoweringError, match=r"memory of case for llvm .* cannot be planned"):
        compile_module(lowered, (), prepared.target)


def test_model_whose_kernels_have_no_code_is_refused_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inspect said nothing against what compile refused in the code generator."""
    prepared = prepare_model(
        ModelRequest(write_model(tmp_path, [helper.make_node("Neg", ["x"], ["y"])]), target="llvm")
    )
    # An intrinsic of GPUs, which LLVM has no code for on a CPU.
    x = te.placeholder((tirx.Var("batch", "int64"), 4), "float32", name="x")
    y = te.compute(x.shape, lambda *at: tirx.call_intrin("float32", "tirx.ptx.wgmma_wait_group", x(*at)))
    mod = prepared.lowered.mod.clone()
    mod.update_func(mod.get_global_var("tir_negative"), te.create_prim_func([x, y]))
    faulty = replace(prepared, lowered=replace(prepared.lowered, mod=mod))
    monkeypatch.setattr("relaxtune.pipeline.jobs.inspect.prepare_model", lambda _: faulty)
    assert not inspect_model(prepared.request).code
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", str(prepared.request.source)])
    assert "add --code to try" in capsys.readouterr().out
    with pytest.raises(LoweringError):
        inspect_model(prepared.request, code=True)
    with pytest.raises(SystemExit, match="1"):
        main(["inspect", str(prepared.request.source), "--code"])


def test_inspection_sums_tasks_parameters_and_the_cache() -> None:
    inspection = inspect_model(ModelRequest("gpt2-tiny-decode", target="llvm"))
    assert inspection.opsets["ai.onnx"] >= 17
    assert inspection.flops == sum(task.weight * task.flops for task in inspection.tasks) > 0
    assert inspection.bytes == sum(task.weight * task.bytes for task in inspection.tasks) > 0
    assert {task.family for task in inspection.tasks} >= {"matmul", "norm", "softmax"}
    model = load_model("gpt2-tiny-decode")
    assert sum(item.bytes for item in inspection.parameters) == model.weight_bytes
    # Two layers, keys and values, 2 heads of 64, float32.
    cache = inspection.cache
    assert cache is not None
    assert (cache.length, cache.bytes_per_token, cache.bytes) == (127, 2 * 2 * 2 * 64 * 4, 127 * 2048)
    assert len(cache.inputs) == 4


def test_a_cache_of_symbolic_length_has_bytes_a_token_only() -> None:
    model = load_model("llama-tiny-decode", shapes={"past_key_values.0.key": ["batch", 2, "past", 32]})
    cache = measure_cache(model)
    assert cache is not None
    assert (cache.length, cache.bytes_per_token, cache.bytes) == ("past", 2 * 2 * 2 * 32 * 4, None)


def test_a_model_without_a_cache_has_none() -> None:
    assert measure_cache(load_model("bert-tiny")) is None


def test_the_command_prints_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path, [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")])
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(path), "--target", "llvm", "--shape", "x=2x4"])
    out = capsys.readouterr().out
    assert not ended.value.code
    for part in ("x: float32[2x4]", "4 float16 in 1 tensors", "matmul", "tasks for llvm"):
        assert part in out
    assert re.search(r"one inference: [1-9][\d,]* FLOPs", out)


def test_the_command_says_so_when_no_kernel_can_be_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path, [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")])
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(path), "--target", "llvm", "--shape", "x=rowsx4"])
    out = capsys.readouterr().out
    assert not ended.value.code
    assert re.search(r"no tasks for llvm.*: no kernel can be tuned", out)
    assert "1 kernels are not counted, since the sizes of rows are known at run time only; --dim rows=SIZE" in out
    assert "FLOPs" not in out


@pytest.mark.parametrize(
    ("domain", "operator", "reason", "nearest"),
    [
        ("com.example", "FastGelu", "no converter", "com.microsoft.FastGelu"),
        ("com.example", "LayerNormalisation", "no converter", "ai.onnx.LayerNormalization"),
        ("", "AffineGridd", "no converter", "ai.onnx.AffineGrid"),
        ("", "Celu", "no converter", "the operators that ONNX defines Celu by"),
        ("", "Slice", "ValueError: starts", "ai.onnx.Slice in another form"),
        ("com.example", "Qx", "no converter", "standard operators"),
    ],
)
def test_nearest_supported_thing(domain: str, operator: str, reason: str, nearest: str) -> None:
    node = helper.make_node(operator, ["x"], ["y"], domain=domain)
    assert nearest_supported(node, reason).startswith(nearest)


def test_relations_between_axes_are_listed(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Concat", ["old", "new"], ["both"], axis=0),
        helper.make_node("Add", ["both", "mask"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, (f"{name}_rows", 4)) for name in ("old", "new", "mask")
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ("rows", 4))
    proto = helper.make_model(
        helper.make_graph(nodes, "case", inputs, [output]), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    onnx.save(proto, tmp_path / "case.onnx")
    found = inspect_model(ModelRequest(tmp_path / "case.onnx", target="llvm"))
    assert found.relations == ("mask_rows (mask[0]) = new_rows + old_rows",)
