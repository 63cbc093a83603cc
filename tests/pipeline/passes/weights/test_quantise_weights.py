"""Weights of 4 and 8 bits: which matmuls get them, and that kernels with a schedule compute what they stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from onnx import helper
from tvm import tirx
from tvm_ffi import structural_map

from relaxtune.models import OnnxModel, load_model
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.precision.calibration import StaticScales, graph_key
from relaxtune.pipeline.precision.onnx_weights import with_quantised_weights
from relaxtune.pipeline.precision.policy import named_policy, policy_entry
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.schedules.functions.float8 import FLOAT8, float8_of, number_of
from relaxtune.schedules.registry import list_candidates, table_of
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.matmul_by_rows import recognise_matmul_by_rows
from relaxtune.schedules.tir.epilogue import MatmulFunction
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.pass_cases import LLVM, make_onnx, run_lowered, small_model

HOPPER = resolve_target("cuda:sm_90a").target


def lowered(name: str, precision: str, target=LLVM, **options: object) -> LoweredModule:
    return lower(import_model(small_model(name)), target, LoweringOptions(precision=precision, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [("bert-tiny", "w8a16"), ("t5-tiny", "w8a16"), ("gpt2-tiny", "w4a16"), ("llama-tiny-decode", "w4a16")],
)
def test_artifact_computes_what_its_quantised_weights_stand_for(name: str, precision: str, tmp_path: Path) -> None:
    request = ModelRequest(
        name, {"input_ids": (1, 1 if "decode" in name else 12)}, "llvm", LoweringOptions(precision=precision)
    )
    result = compile_model(request, tmp_path / "out", samples=2)
    assert result.validation is not None
    assert result.validation.passed, result.validation.outputs
    entry = result.manifest.policy
    assert entry is not None
    assert entry.weights == {"w8a16": "uint8", "w4a16": "uint4"}[precision]
    assert entry.quantised_nodes
    drift = result.validation.drift
    assert drift is not None
    # The price of 4 bits is seen beside the original and not in the validation.
    least = min(one.row_cosine_mean or 0.0 for one in drift.outputs)
    assert least < (0.9999999 if precision == "w8a16" else 0.999)
    assert least > (0.999 if precision == "w8a16" else 0.85)


def test_weights_are_stored_packed() -> None:
    sizes = {
        precision: sum(array.nbytes for array in lowered("llama-tiny", precision).weights.values() if array.ndim > 1)
        for precision in ("fp16", "w8a16", "w4a16")
    }
    table = 1024 * 128 * 4
    halves = sizes["fp16"] - table
    assert sizes["w8a16"] - table == pytest.approx(halves * (8 + 16 / 128) / 16, rel=0.02)
    assert sizes["w4a16"] - table == pytest.approx(halves * (4 + 16 / 128) / 16, rel=0.02)


def test_the_pass_can_be_switched_off() -> None:
    module = lowered("llama-tiny", "w4a16", disabled_passes=frozenset({"quantise_weights"}))
    assert not module.quantised_nodes
    assert not any(array.dtype == np.uint8 for array in module.weights.values())


def test_group_size_is_what_was_asked_for() -> None:
    def groups(group_size: int) -> set[int]:
        module = lowered("bert-tiny", "w8a16", group_size=group_size)
        return {array.shape[1] for array in module.weights.values() if array.dtype == np.float16 and array.ndim == 3}

    # K is 128 and 512.
    assert groups(32) == {4, 16}
    assert groups(0) == {1}


def test_few_rows_on_a_gpu_dequantise_in_the_matmul() -> None:
    module = lowered("llama-tiny-decode", "w4a16", HOPPER)
    matmuls = [task for task in extract_tasks([module]) if task.family == "matmul"]
    assert matmuls
    for task in matmuls:
        found = recognise_matmul_by_rows(task.mod["main"])
        assert isinstance(found, MatmulFunction), (task.name, found)
        assert found.stored is not None
        assert found.stored.bits == 4


def test_many_rows_on_a_gpu_have_a_kernel_that_dequantises_and_store_bytes() -> None:
    module = lowered("gpt2-tiny", "w4a16", HOPPER)
    # 12 rows of the tiny model are few; 64 are not.
    assert not any("dequantise" in name for name in module.kernels)
    model = load_model("gpt2-tiny", shapes={"input_ids": (1, 64), "attention_mask": (1, 64)})
    module = lower(import_model(model), HOPPER, LoweringOptions(precision="w4a16"))
    calls = sum(len(calls) for name, calls in module.kernels.items() if name.startswith("dequantise"))
    assert calls == len(module.quantised_nodes)
    assert sum(array.dtype == np.uint8 for array in module.weights.values()) == calls


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_many_rows_dequantise_in_the_matmul_where_it_is_by_mma_sync(arch: str) -> None:
    model = load_model("gpt2-tiny", shapes={"input_ids": (1, 64), "attention_mask": (1, 64)})
    target = resolve_target(f"cuda:{arch}")
    module = lower(import_model(model), target.target, LoweringOptions(precision="w4a16"))
    assert not any("dequantise" in name for name in module.kernels)
    matmuls = [task for task in extract_tasks([module]) if "quantised_matmul" in task.name]
    assert matmuls
    for task in matmuls:
        found, refused = list_candidates(task.mod["main"], target)
        assert found, refused
        assert found[0].template == "gemm_sm80"


def test_rows_beyond_what_a_kernel_should_dequantise_have_a_kernel_for_it() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 32)).astype("float32")
    for rows, apart in ((128, False), (129, True)):
        graph = import_model(product(weight, rows=rows))
        module = lower(graph, resolve_target("cuda:sm_80").target, LoweringOptions(precision="w8a16"))
        assert any("dequantise" in name for name in module.kernels) == apart


@pytest.mark.slow
def test_workloads_of_different_precisions_are_different_tasks() -> None:
    def keys(precision: str) -> set[str]:
        return {
            task.signature
            for task in extract_tasks([lowered("llama-tiny-decode", precision, HOPPER)])
            if task.family == "matmul"
        }

    found = [keys(precision) for precision in ("fp16", "bf16", "w8a16", "w4a16")]
    assert all(found)
    assert sum(map(len, found)) == len(set().union(*found))


def test_tables_and_products_of_activations_are_not_quantised() -> None:
    module = lowered("bert-tiny", "w4a16")
    assert all("MatMul" in name or "Gemm" in name for name in module.quantised_nodes)
    tables = [array for array in module.weights.values() if array.shape == (1024, 128)]
    assert [array.dtype for array in tables] == [np.float32]


def test_a_graph_in_half_precision_is_quantised_too() -> None:
    model = small_model("llama-tiny-decode", precision="fp16")
    module = lower(import_model(model), HOPPER, LoweringOptions(precision="w8a16"))
    assert module.quantised_nodes


def product(weight: np.ndarray, node: str = "", rows: int = 2) -> OnnxModel:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name=node)]
    k, columns = weight.shape
    return make_onnx(nodes, {"x": ("float", [rows, k])}, {"y": ("float", [rows, columns])}, {"w": weight})


def test_matmul_without_a_name_is_quantised() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 32)).astype("float32")
    done = lower(import_model(product(weight)), LLVM, LoweringOptions(precision="w8a16"))
    assert done.quantised_nodes == ("MatMul->y",)
    x = {"x": np.ones((2, 64), "float32")}
    policy = policy_entry(named_policy("w8a16"), product(weight), {}, done.quantised_nodes, "float32")
    quantised = with_quantised_weights(product(weight), policy)
    np.testing.assert_allclose(run_lowered(done, x)[0], run_reference(quantised, x)[0], rtol=0.05, atol=0.05)


def test_weights_too_small_for_a_scale_in_half_stay_in_half(caplog: pytest.LogCaptureFixture) -> None:
    weight = np.full((64, 32), 1e-6, "float32")
    done = lower(import_model(product(weight, "tiny")), LLVM, LoweringOptions(precision="w4a16"))
    assert done.quantised_nodes == ()
    assert "w4a16 quantises no weight" in caplog.text
    (got,) = run_lowered(done, {"x": np.ones((2, 64), "float32")})
    np.testing.assert_allclose(got, np.full((2, 32), 64e-6), rtol=0.1)


def feed_forward(rows: int | str) -> OnnxModel:
    rng = np.random.default_rng(6)
    constants = {name: rng.standard_normal(shape).astype("float32") * 0.1 for name, shape in FEED_FORWARD.items()}
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["a"], name="up"),
        helper.make_node("Add", ["a", "bias"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "down"], ["y"], name="down"),
        helper.make_node("MatMul", ["x", "narrow"], ["z"], name="narrow"),
    ]
    shapes = {"y": ("float", [2, rows, 256]), "z": ("float", [2, rows, 2])}
    return make_onnx(nodes, {"x": ("float", [2, rows, 256])}, shapes, constants)


FEED_FORWARD = {"up": (256, 512), "bias": (512,), "down": (512, 256), "narrow": (256, 2)}


def with_exact_casts(module: LoweredModule) -> LoweredModule:
    """Return a module for a GPU with the casts to and from float8 as that makes them, for a CPU."""

    def exact(cast: tirx.Cast) -> tirx.Expr:
        if str(cast.ty.dtype) == FLOAT8:
            return float8_of(cast.value)
        return number_of(cast.value) if str(cast.value.ty.dtype) == FLOAT8 else cast

    functions = {
        var: func.with_body(structural_map(func.body, [(tirx.Cast, exact)]))
        if isinstance(func, tirx.PrimFunc)
        else func
        for var, func in module.mod.functions_items()
    }
    return replace(module, mod=tvm.IRModule(functions, attrs=module.mod.attrs))


def test_matmuls_of_float8_compute_what_rows_and_columns_stand_for() -> None:
    model = feed_forward(24)
    module = lower(import_model(model), HOPPER, LoweringOptions(precision="fp8"))
    assert (module.quantised_nodes, module.float_nodes) == (("down", "up"), ("narrow",))
    makers = [list_candidates(module.mod[name], resolve_target("cuda:sm_90a"))[0][0] for name in module.kernels]
    assert sorted(type(one).__name__ for one in makers).count("RowsParameters") == 2
    x = {"x": np.random.default_rng(7).standard_normal((2, 24, 256)).astype("float32")}
    x["x"][0, 0] = 0.0
    policy = policy_entry(named_policy("fp8"), model, {}, module.quantised_nodes, "float32")
    got, exact = run_lowered(with_exact_casts(module), x)[0], run_reference(model, x)[0]
    want = run_reference(with_quantised_weights(model, policy), x)[0]
    # Halves before a tie of float8 take the other side: few of them.
    assert np.sqrt(np.mean((got - want) ** 2)) < 0.02 * want.std()
    assert 0.02 * want.std() < np.sqrt(np.mean((got - exact) ** 2)) < 0.06 * want.std()


def test_static_scales_are_of_the_record_and_in_the_epilogue_of_the_producer() -> None:
    model = feed_forward(24)
    x = {"x": np.random.default_rng(7).standard_normal((2, 24, 256)).astype("float32")}
    # Of "x" a tenth of the elements is clipped.
    scales = StaticScales("record", graph_key(model), {"x": 1.6 / 448, "c": 4.0 / 448, "unread": 1.0})
    module = lower(import_model(model), HOPPER, LoweringOptions(precision="fp8", calibration=scales))
    assert module.static == replace(scales, scales={"c": 4.0 / 448, "x": 1.6 / 448})
    up, *_ = (module.mod[name] for name in module.kernels if "relu" in name)
    assert str(up.params[-1].ty.dtype) == FLOAT8
    makers = [type(list_candidates(module.mod[name], resolve_target("cuda:sm_90a"))[0][0]) for name in module.kernels]
    assert [one.__name__ for one in makers].count("RowsParameters") == 0
    policy = policy_entry(named_policy("fp8"), model, {}, module.quantised_nodes, "float32", static=module.static)
    got, exact = run_lowered(with_exact_casts(module), x)[0], run_reference(model, x)[0]
    want = run_reference(with_quantised_weights(model, policy), x)[0]
    assert np.sqrt(np.mean((got - want) ** 2)) < 0.02 * want.std()
    assert np.sqrt(np.mean((got - exact) ** 2)) > 0.06 * want.std()


def test_a_tensor_without_a_range_keeps_scales_of_rows() -> None:
    scales = StaticScales("record", "", {"c": 4.0 / 448})
    module = lower(import_model(feed_forward(24)), HOPPER, LoweringOptions(precision="fp8", calibration=scales))
    assert module.static == scales
    (report,) = (one for one in module.reports if one.name == "quantise_weights")
    assert any("the record has no range of x" in note for note in report.notes)
    assert sum("quantise_rows" in name for name in module.kernels) == 1


@pytest.mark.parametrize(
    ("target", "rows", "note"),
    [
        ("llvm", 24, "all matmuls stay in float16: the target has no tensor cores of float8"),
        ("cuda:sm_80", 24, "all matmuls stay in float16: the target has no tensor cores of float8"),
        ("cuda:sm_90a", 4, "8 rows are too few to be quantised"),
    ],
)
def test_matmuls_without_float8_stay_in_half_with_a_reason(target: str, rows: int, note: str) -> None:
    options = LoweringOptions(precision="fp8")
    module = lower(import_model(feed_forward(rows)), resolve_target(target).target, options)
    assert module.quantised_nodes == ()
    (report,) = (one for one in module.reports if one.name == "quantise_weights")
    assert any(note in one for one in report.notes)


def test_kernels_of_float8_with_symbolic_rows_have_tables() -> None:
    module = lower(import_model(feed_forward("n")), HOPPER, LoweringOptions(precision="fp8"))
    assert module.quantised_nodes == ("down", "up")
    tables = [table_of(module.mod[name], resolve_target("cuda:sm_90a")) for name in module.kernels]
    assert None not in tables
