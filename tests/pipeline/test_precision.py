"""Precisions end to end on a CPU: what they do to results, what is stated, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from relaxtune.models import load_model
from relaxtune.pipeline.artifact.manifest import parse_manifest
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.jobs.values import CompileResult
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.passes.precision.round_to_tf32 import tf32_array
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.passes.pass_cases import LLVM, small_model
from tests.unoptimised import UNOPTIMISED_TEXT


def compiled(name: str, precision: str | None, tmp_path: Path) -> CompileResult:
    request = ModelRequest(name, {"input_ids": (1, 12)}, UNOPTIMISED_TEXT, LoweringOptions(precision=precision))
    return compile_model(request, tmp_path / f"{name}-{precision}", samples=2)


@pytest.mark.quick_cases("llama-tiny-tf32", "bert-tiny-bf16")
@pytest.mark.parametrize(("name", "precision"), [("llama-tiny", "tf32"), ("bert-tiny", "bf16"), ("llama-tiny", "bf16")])
def test_a_precision_is_right_and_has_an_effect(name: str, precision: str, tmp_path: Path) -> None:
    result = compiled(name, precision, tmp_path)
    assert result.validation is not None
    assert result.validation.passed, result.validation.outputs
    drift = result.validation.drift
    assert drift is not None
    assert drift.precision == precision
    errors = [one.max_rel for one in drift.outputs]
    # Float32 alone drifts by 1e-6; a label without effect would, too.
    least, most = (1e-4, 0.02) if precision == "tf32" else (2e-3, 0.15)
    assert all(least < error < most for error in errors), errors


@pytest.mark.quick_cases("bert-tiny-outliers-fp16", "llama-tiny-outliers-w4a16")
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("bert-tiny-outliers", "fp16"),
        ("llama-tiny-outliers", "fp16"),
        ("bert-tiny-outliers", "w8a16"),
        ("llama-tiny-outliers", "w4a16"),
    ],
)
def test_outliers_whose_squares_overflow_half_precision_stay_finite(name: str, precision: str, tmp_path: Path) -> None:
    result = compiled(name, precision, tmp_path)
    assert result.validation is not None
    assert result.validation.passed, result.validation.outputs
    drift = result.validation.drift
    assert drift is not None
    assert not any(one.broken for one in drift.outputs)
    assert all((one.row_cosine_mean or 0.0) > (0.999 if precision != "w4a16" else 0.9) for one in drift.outputs)


def test_the_manifest_states_policy_and_drift(tmp_path: Path) -> None:
    result = compiled("llama-tiny", "w8a16", tmp_path)
    text = (result.directory / "manifest.json").read_text()
    manifest = parse_manifest(text, "here")
    assert manifest.policy is not None
    assert (manifest.policy.name, manifest.policy.weights, manifest.policy.kv_cache) == ("w8a16", "uint8", "none")
    assert "/lm_head/MatMul" in manifest.policy.quantised_nodes
    validation = json.loads(text)["validation"]
    assert "weights quantised as w8a16 does" in validation["reference"]
    assert "quantised" not in validation["drift"]["original"]
    (source,) = validation["drift"]["data"]
    assert source["name"] == "random inputs, seed 0"
    assert len(source["sha256"]) == 64
    assert manifest.precision == "w8a16"


def test_fp32_is_what_a_float32_graph_has_anyway(tmp_path: Path) -> None:
    graph = import_model(small_model("bert-tiny"))
    plain, named = (lower(graph, LLVM, LoweringOptions(precision=precision)) for precision in (None, "fp32"))
    assert plain.mod.script() == named.mod.script()


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_a_graph_in_half_precision_is_not_made_wider(precision: str) -> None:
    graph = import_model(small_model("llama-tiny", precision="fp16"))
    with pytest.raises(UsageError, match="its weights are float16"):
        lower(graph, LLVM, LoweringOptions(precision=precision))


def test_tf32_keeps_ten_bits_rounded_to_even() -> None:
    one = np.float32(1.0)
    step = np.float32(2.0**-10)
    given = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, -(1 + 2**-12), 3e38, np.inf, -np.inf, 0.0, -0.0])
    expected = np.array([one, one + 2 * step, one + step, -one, 3e38, np.inf, -np.inf, 0.0, -0.0], np.float32)
    got = tf32_array(given.astype(np.float32))
    np.testing.assert_allclose(got, expected, rtol=5e-4)
    np.testing.assert_array_equal(got[[0, 1, 2, 3, 5, 6, 7, 8]], expected[[0, 1, 2, 3, 5, 6, 7, 8]])
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(tf32_array(nans)).all()
    assert (got[:5].view(np.uint32) & 0x1FFF == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["tf32", "w4a16"])
def test_a_precision_compiles_for_a_gpu_that_is_not_here(precision: str, tmp_path: Path) -> None:
    request = ModelRequest(
        "gpt2-tiny", {"input_ids": (1, 32), "attention_mask": (1, 32)}, "cuda:sm_90a", LoweringOptions(precision)
    )
    result = compile_model(request, tmp_path / "out", samples=0)
    assert result.manifest.launches
    routes = {kernel.function.split("_")[0]: kernel.route for kernel in result.manifest.kernels}
    if precision == "w4a16":
        assert routes["dequantise"] == "template"


def test_a_graph_in_bfloat16_compiles_and_agrees_with_its_float32_form(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def weight(name: str, array: np.ndarray) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(array.astype(ml_dtypes.bfloat16), name)

    def value(name: str, columns: int) -> onnx.ValueInfoProto:
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.BFLOAT16, [4, columns])

    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["product"], name="matmul"),
        onnx.helper.make_node("LayerNormalization", ["product", "gain", "bias"], ["normed"], name="norm", axis=-1),
        onnx.helper.make_node("Softmax", ["normed"], ["weights"], name="softmax"),
        onnx.helper.make_node("MatMul", ["weights", "v"], ["y"], name="values"),
    ]
    weights = [
        weight("w", rng.standard_normal((64, 64))),
        weight("gain", np.ones(64)),
        weight("bias", rng.standard_normal(64)),
        weight("v", rng.standard_normal((64, 32))),
    ]
    graph = onnx.helper.make_graph(nodes, "narrow", [value("x", 64)], [value("y", 32)], weights)
    path = tmp_path / "narrow.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9), path)
    result = compile_model(ModelRequest(path, target=UNOPTIMISED_TEXT), tmp_path / "out", samples=2)
    assert result.validation is not None
    assert result.validation.passed, result.validation.outputs
    assert result.manifest.policy is not None
    assert (result.manifest.policy.name, result.manifest.policy.weights) == ("as given", "bfloat16")


def test_bfloat16_has_the_templates_of_float16_on_hopper() -> None:
    model = load_model("bert-tiny", shapes=dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (1, 64)))
    graph, target = import_model(model), resolve_target("cuda:sm_90a").target
    kernels = [
        sorted(len(calls) for calls in lower(graph, target, LoweringOptions(precision=precision)).kernels.values())
        for precision in ("fp16", "bf16")
    ]
    assert kernels[0] == kernels[1]
