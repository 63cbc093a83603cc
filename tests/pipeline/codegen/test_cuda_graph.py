from __future__ import annotations

import numpy as np
import pytest
import tvm
from onnx import helper
from tvm import relax

from relaxtune.models import OnnxModel, load_model
from relaxtune.pipeline.artifact.compile import _plan_memory, compile_module
from relaxtune.pipeline.codegen.cuda_graph import capture_whole_function, computes_sizes
from relaxtune.pipeline.codegen.finish import pass_context
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.module import LoweredModule, LoweringOptions
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from tests.pipeline.importer.onnx_cases import make_model


@pytest.fixture(scope="module")
def target() -> ResolvedTarget:
    return resolve_target("cuda:sm_90a")


@pytest.fixture(scope="module")
def lowered_cuda(bert_tiny: OnnxModel, target: ResolvedTarget) -> LoweredModule:
    return lower(import_model(bert_tiny), target.target)


def planned(mod: tvm.ir.IRModule, target: ResolvedTarget) -> tvm.ir.IRModule:
    with pass_context(True), target.target:
        return _plan_memory(mod, target, True, "case")[0]


def kernels_of(mod: tvm.ir.IRModule, function: str) -> list[str]:
    """Return the names of the PrimFuncs that a Relax function calls, in order."""
    primitive = {str(var.name_hint) for var, f in mod.functions_items() if isinstance(f, tvm.tirx.PrimFunc)}
    found: list[str] = []

    def visit(node: object) -> None:
        if isinstance(node, tvm.ir.Call) and isinstance(node.op, tvm.ir.GlobalVar):
            found.append(str(node.op.name_hint))

    relax.analysis.post_order_visit(mod[function], visit)
    return [name for name in found if name in primitive]


@pytest.mark.parametrize("appending", ["attention", "one kernel"])
def test_all_kernels_of_a_decode_step_are_inside_one_graph(target: ResolvedTarget, appending: str) -> None:
    model = load_model("gpt2-tiny-decode", shapes={"attention_mask": (1, 8)}, precision="fp16")
    disabled = frozenset({"append_in_attention"} if appending == "one kernel" else ())
    lowered = lower(import_model(model), target.target, LoweringOptions(disabled_passes=disabled))
    assert any(name.startswith("append") for name in lowered.kernels) == (appending == "one kernel")
    mod = planned(capture_whole_function(lowered.mod, len(lowered.graph.inputs)), target)
    (captured,) = [str(v.name_hint) for v in mod.get_global_vars() if "cuda_graph_capture" in str(v.name_hint)]
    assert len(kernels_of(mod, captured)) == sum(map(len, lowered.kernels.values()))
    assert kernels_of(mod, "main") == []


def test_a_form_without_graphs_inside_is_beside_an_entry_that_has_some(target: ResolvedTarget) -> None:
    """The runtime captures whole calls, and no graph can be launched while another one is captured."""
    nodes = [helper.make_node("Softmax", [a], [b]) for a, b in (("k", "a"), ("a", "b"), ("b", "c"))]
    nodes.append(helper.make_node("Add", ["x", "c"], ["y"]))
    rows = ("float32", ("n", 64))
    model = make_model(nodes, {"x": rows, "k": ("float32", (1, 64))}, {"y": rows}, {})
    lowered = lower(import_model(model), target.target)
    mod = planned(capture_whole_function(lowered.mod, len(lowered.graph.inputs)), target)
    (region,) = [str(v.name_hint) for v in mod.get_global_vars() if "cuda_graph_capture" in str(v.name_hint)]
    assert "run_or_capture" in mod["main"].script()
    assert "run_or_capture" not in mod["main_whole"].script()
    assert kernels_of(mod, region)
    assert {*kernels_of(mod, region), *kernels_of(mod, "main")} >= set(lowered.kernels)


def test_all_kernels_are_inside_one_graph(lowered_cuda: LoweredModule, target: ResolvedTarget) -> None:
    calls = sum(map(len, lowered_cuda.kernels.values()))
    mod = planned(capture_whole_function(lowered_cuda.mod, len(lowered_cuda.graph.inputs)), target)
    captured = [str(v.name_hint) for v in mod.get_global_vars() if "cuda_graph_capture" in str(v.name_hint)]
    assert len(captured) == 1
    assert len(kernels_of(mod, captured[0])) == calls
    assert kernels_of(mod, "main") == []
    assert "builtin.alloc_tensor" not in mod["main"].script()


def test_the_rewrite_captures_more_than_tvm_does_by_itself(lowered_cuda: LoweredModule, target: ResolvedTarget) -> None:
    mod = planned(lowered_cuda.mod, target)
    inside = [
        name
        for var in mod.get_global_vars()
        if "cuda_graph_capture" in str(var.name_hint)
        for name in kernels_of(mod, str(var.name_hint))
    ]
    assert len(inside) < sum(map(len, lowered_cuda.kernels.values()))


def test_the_signature_stays(lowered_cuda: LoweredModule) -> None:
    before = lowered_cuda.mod["main"]
    after = capture_whole_function(lowered_cuda.mod, len(lowered_cuda.graph.inputs))["main"]
    assert [p.name for p in after.params] == [p.name for p in before.params]
    tvm.ir.assert_structural_equal(after.ret_ty, before.ret_ty)
    assert int(after.attrs["num_input"]) == 0


def test_symbolic_inputs_stay_with_the_caller(target: ResolvedTarget) -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    model = load_model("bert-tiny", shapes=dict.fromkeys(names, ("batch", 16)))
    lowered = lower(import_model(model), target.target)
    mod = capture_whole_function(lowered.mod, len(lowered.graph.inputs))
    assert int(mod["main"].attrs["num_input"]) == len(lowered.graph.inputs)
    assert kernels_of(planned(mod, target), "main")


@pytest.mark.parametrize("size", [4, "n"])
def test_a_module_that_reads_sizes_from_the_device_has_no_graph(target: ResolvedTarget, size: int | str) -> None:
    """Mixtures of experts read how many tokens an expert has: captured, the kernels behind had no size."""
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["count"], keepdims=0),
        helper.make_node("Range", ["zero", "count", "one"], ["places"]),
        helper.make_node("Mul", ["places", "places"], ["y"]),
    ]
    constants = {"zero": np.array(0), "one": np.array(1)}
    model = make_model(nodes, {"x": ("int64", (size,))}, {"y": ("int64", ("m",))}, constants)
    lowered = lower(import_model(model), target.target)
    assert computes_sizes(lowered.mod)
    compiled = compile_module(lowered, (), target)
    assert not compiled.cuda_graph


def test_sizes_of_inputs_are_not_read_from_the_device(lowered_cuda: LoweredModule) -> None:
    assert not computes_sizes(lowered_cuda.mod)
