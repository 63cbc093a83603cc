from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from relaxtune.models import load_model
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower, lowering_steps, plan_memory_passes
from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, main_of
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.lowered_zoo import (
    FP32_TOLERANCE,
    graph_of_zoo,
    lowered_of,
    model_of,
    reference_of,
    report_of,
    run_lowered,
)
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, feeds_of, graph_of, small_model

TINY = (
    "bert-tiny",
    "gpt2-tiny",
    "gpt2-tiny-decode",
    "llama-tiny",
    "llama-tiny-decode",
    "vit-tiny",
    "t5-tiny",
)
OPTIONAL = tuple(step.name for step in lowering_steps() if not step.required)
# Half precision against float32: about 2^-11 per rounding, over some twenty roundings in two layers.
FP16_TOLERANCE = 2e-2


@pytest.mark.quick_cases("bert-tiny", "gpt2-tiny-decode", "llama-tiny")
@pytest.mark.parametrize("name", TINY)
def test_lower_agrees_with_onnx_runtime_when_every_pass_is_on(name: str) -> None:
    feeds, expected = reference_of(name)
    assert_agrees(run_lowered(lowered_of(name), feeds), expected, FP32_TOLERANCE)


@pytest.mark.quick_cases(
    "recognise_norms",
    "recognise_activations",
    "fold_constants",
    "gathers_to_views",
    "simplify_views",
    "combine_matmuls",
    "recognise_rotary",
    "recognise_attention",
    "pack_weights",
    "fold_legalised_constants",
    "fuse_operations",
    "reshapes_to_views",
)
@pytest.mark.parametrize("disabled", OPTIONAL)
def test_lower_agrees_with_onnx_runtime_when_one_pass_is_off(disabled: str) -> None:
    feeds, expected = reference_of("llama-tiny")
    lowered = lower(graph_of_zoo("llama-tiny"), LLVM, LoweringOptions(disabled_passes=frozenset({disabled})))
    report = report_of(lowered, disabled)
    assert not report.enabled
    assert report.seconds == 0.0
    assert_agrees(run_lowered(lowered, feeds), expected, FP32_TOLERANCE)


@pytest.mark.quick_cases("gpt2-tiny")
@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-tiny"])
def test_lower_agrees_with_onnx_runtime_when_every_optional_pass_is_off(name: str) -> None:
    feeds, expected = reference_of(name)
    lowered = lower(graph_of_zoo(name), LLVM, LoweringOptions(disabled_passes=frozenset(OPTIONAL)))
    assert_agrees(run_lowered(lowered, feeds), expected, FP32_TOLERANCE)


@pytest.mark.quick_cases("llama-tiny")
@pytest.mark.parametrize("name", ["bert-tiny", "llama-tiny", "gpt2-tiny-decode"])
def test_lower_stays_near_onnx_runtime_when_precision_is_fp16(name: str) -> None:
    feeds, expected = reference_of(name)
    lowered = lower(graph_of_zoo(name), LLVM, LoweringOptions(precision="fp16"))
    assert_agrees(run_lowered(lowered, feeds), expected, FP16_TOLERANCE)
    halves = [weight for weight in lowered.weights.values() if weight.dtype == np.float16 and weight.ndim == 2]
    assert len(halves) >= 8


@pytest.mark.parametrize("name", ["llama-tiny"])
def test_lower_agrees_with_onnx_runtime_when_graph_is_half_precision(name: str) -> None:
    model = small_model(name, precision="fp16")
    feeds = feeds_of(model)
    lowered = lower(import_model(model), LLVM)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), FP16_TOLERANCE)
    assert "accumulate in float32" in report_of(lowered, "accumulate_in_float32").notes[0]


def test_lower_keeps_symbolic_axes_when_graph_has_them() -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    model = load_model("bert-tiny", shapes={name: ("batch", "sequence") for name in names})
    lowered = lower(import_model(model), LLVM)
    small, large = feeds_of(model, batch=1, sequence=5), feeds_of(model, batch=2, sequence=11)
    for feeds in (small, large):
        assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), FP32_TOLERANCE)


def test_lower_gives_twelve_kernels_a_layer_when_model_is_bert() -> None:
    calls = Counter({name: len(found) for name, found in lowered_of("bert-tiny").kernels.items()})
    a_layer = sum(
        1
        for found in lowered_of("bert-tiny").kernels.values()
        for call in found
        if any(node.startswith("/encoder/layer.0/") for node in call.onnx_nodes)
    )
    assert a_layer == 12
    assert calls["layer_norm"] == 5
    assert calls["softmax"] == 2
    epilogues = {"fused_packed_matmul_add_gelu", "fused_packed_matmul_add_add"}
    assert epilogues <= {"".join(c for c in name if not c.isdigit()) for name in calls}


@pytest.mark.parametrize("name", TINY)
def test_kernels_cover_every_matmul_and_every_call_of_main(name: str) -> None:
    lowered = lowered_of(name)
    covered = {node for found in lowered.kernels.values() for call in found for node in call.onnx_nodes}
    matmuls = {node.name for node in model_of(name).proto.graph.node if node.op_type in ("MatMul", "Gemm", "Conv")}
    assert matmuls
    assert matmuls <= covered
    called = [(b.var.name, called_function(b.value)) for b in bindings_of(main_of(lowered.mod))]
    expected = {binding: callee.name_hint for binding, callee in called if callee is not None}
    found = {call.binding: kernel for kernel, calls in lowered.kernels.items() for call in calls}
    assert found == expected
    assert all(call.onnx_nodes for calls in lowered.kernels.values() for call in calls)


def test_kernels_name_the_nodes_of_each_layer_when_functions_are_shared() -> None:
    calls = lowered_of("bert-tiny").kernels["softmax"]
    assert [call.onnx_nodes for call in calls] == [(f"/encoder/layer.{layer}/attention/Softmax",) for layer in range(2)]


def test_combined_projection_names_all_three_nodes() -> None:
    nodes = next(
        call.onnx_nodes
        for found in lowered_of("bert-tiny").kernels.values()
        for call in found
        if "/encoder/layer.0/attention/query/MatMul" in call.onnx_nodes
    )
    assert {f"/encoder/layer.0/attention/{part}/MatMul" for part in ("query", "key", "value")} <= set(nodes)


def test_reports_follow_the_list_in_order_and_count_what_was_done() -> None:
    lowered = lowered_of("llama-tiny")
    assert [(r.phase, r.name) for r in lowered.reports] == [(s.phase, s.name) for s in lowering_steps()]
    phases = [report.phase for report in lowered.reports]
    assert phases == sorted(phases)
    assert report_of(lowered, "recognise_norms").bindings_removed > 0
    assert "combined" in report_of(lowered, "combine_matmuls").notes[0]
    assert all(report.seconds > 0 for report in lowered.reports)


def test_lower_writes_ir_of_each_phase_when_asked(tmp_path: Path) -> None:
    lower(graph_of_zoo("t5-tiny"), LLVM, LoweringOptions(dump_dir=tmp_path / "ir"))
    names = sorted(path.name for path in (tmp_path / "ir").iterdir())
    assert names == [
        "00-canonicalise.py",
        "01-fold-constants.py",
        "02-remove-dead-code.py",
        "03-precision.py",
        "04-pattern-rewrites.py",
        "05-legalise.py",
        "06-fuse.py",
    ]
    assert "R.nn.rms_norm" in (tmp_path / "ir" / "00-canonicalise.py").read_text()
    assert "R.call_tir(cls.fused_" in (tmp_path / "ir" / "06-fuse.py").read_text()


def test_lower_refuses_unknown_pass_and_lists_the_names() -> None:
    with pytest.raises(UsageError, match=r"no pass is called 'fuse_everything'.*combine_matmuls") as caught:
        lower(graph_of_zoo("t5-tiny"), LLVM, LoweringOptions(disabled_passes=frozenset({"fuse_everything"})))
    assert "legalise_operators" not in str(caught.value)


def test_lower_refuses_to_switch_off_a_required_pass_with_the_reason() -> None:
    with pytest.raises(UsageError, match="'legalise_operators' cannot be switched off: the code generator"):
        lower(graph_of_zoo("t5-tiny"), LLVM, LoweringOptions(disabled_passes=frozenset({"legalise_operators"})))


def test_lower_refuses_unknown_precision_and_lists_the_accepted() -> None:
    with pytest.raises(UsageError, match=r"unknown precision 'int3'; expected fp32, tf32, fp16"):
        lower(graph_of_zoo("t5-tiny"), LLVM, LoweringOptions(precision="int3"))


def test_precision_passes_are_those_that_make_the_precision() -> None:
    expected = {"integer_matmuls", "compute_in_half_precision", "round_to_tf32", "quantise_weights"}
    assert {step.name for step in lowering_steps() if step.makes_precision} == expected


def test_plan_memory_ends_the_list_and_captures_graphs_only_on_cuda() -> None:
    def names(target: tvm.target.Target, cuda_graph: bool) -> list[str]:
        return [str(step.info.name) for step in plan_memory_passes(target, cuda_graph)]

    cuda = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
    assert "RewriteCUDAGraph" in names(cuda, True)
    assert "RewriteCUDAGraph" not in names(cuda, False)
    assert "RewriteCUDAGraph" not in names(LLVM, True)
    assert names(LLVM, False).index("StaticPlanBlockMemory") < names(LLVM, False).index("VMShapeLower")


def test_lower_leaves_the_imported_module_as_it_was() -> None:
    graph = graph_of_zoo("bert-tiny")
    before = graph.mod.script()
    lower(graph, LLVM, LoweringOptions(precision="fp16"))
    assert graph.mod.script() == before
    assert isinstance(main_of(graph.mod), relax.Function)


def test_kernels_name_every_node_when_equal_operations_of_symbolic_size_are_grouped_apart() -> None:
    def build(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        (n,) = x.ty.shape.values
        wide = builder.emit(relax.op.expand_dims(builder.emit(relax.op.arange(0, n, 1, "int64"), "columns"), 0), "wide")
        rows = builder.emit(relax.op.arange(0, n, 1, "int64"), "rows")
        tall = builder.emit(relax.op.expand_dims(rows, 1), "tall")
        flat = builder.emit(relax.op.expand_dims(rows, 0), "flat")
        difference = builder.emit(relax.op.subtract(flat, tall), "difference")
        distance = builder.emit(relax.op.abs(difference), "distance")
        total = builder.emit(relax.op.add(builder.emit(relax.op.add(distance, wide), "shifted"), distance), "total")
        signed = builder.emit(relax.op.sum(builder.emit(relax.op.astype(difference, "float32"), "cast"), [1]), "signed")
        return relax.op.add(signed, relax.op.sum(builder.emit(relax.op.astype(total, "float32"), "cast2"), [1]))

    graph = graph_of(build, {"x": ((tvm.tirx.Var("n", "int64"),), "float32")})
    # Positions that are counted where they are read are named there.
    disabled = frozenset({"merge_common_subexpressions", "repeat_positions"})
    lowered = lower(graph, LLVM, LoweringOptions(disabled_passes=disabled))
    named = [node for calls in lowered.kernels.values() for call in calls for node in call.onnx_nodes]
    assert all(call.onnx_nodes for calls in lowered.kernels.values() for call in calls)
    assert {"node_distance", "node_rows", "node_columns", "node_cast", "node_difference", "node_shifted"} <= set(named)
    assert len(named) == len(set(named))


def test_each_pass_lies_in_the_file_of_its_name() -> None:
    sisters = {"mark_tf32": "round_to_tf32"}
    for step in lowering_steps():
        *_, file = step.run.__module__.split(".")
        if file != "order":  # TVM's own
            assert sisters.get(step.run.__name__, step.run.__name__) == file
            assert sisters.get(step.name, step.name) in (file, "fold_legalised_constants")
