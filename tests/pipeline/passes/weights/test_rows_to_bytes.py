"""Precision int8 of float graphs: which matmuls are quantised, what they compute, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from relaxtune.models import OnnxModel, load_model
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.precision.onnx_weights import with_quantised_weights
from relaxtune.pipeline.precision.policy import named_policy, policy_entry
from relaxtune.pipeline.precision.quantise import quantise_to_int8
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.pass_cases import make_onnx, run_lowered, small_model
from tests.schedules.cpu.any_size.test_byte_matmul import needs_words

WORDS = resolve_target('{"kind": "llvm", "mcpu": "cascadelake"}').target
NO_WORDS = resolve_target('{"kind": "llvm", "mcpu": "skylake-avx512"}').target
RNG = np.random.default_rng(3)


def lowered(model: OnnxModel, target=WORDS, **options: object) -> LoweredModule:
    return lower(import_model(model), target, LoweringOptions("int8", **options))


def two_layers(k: int = 64, inner: int = 128, out: int = 8) -> OnnxModel:
    arrays = {
        "first": RNG.normal(0, 0.1, (k, inner)).astype("float32"),
        "second": RNG.normal(0, 0.1, (inner, 64)).astype("float32"),
        "head": RNG.normal(0, 0.1, (64, out)).astype("float32"),
        "bias": RNG.normal(0, 0.1, out).astype("float32"),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"], name="up"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "second"], ["s"], name="down"),
        helper.make_node("Tanh", ["s"], ["t"], name="tanh"),
        helper.make_node("MatMul", ["t", "head"], ["u"], name="scores"),
        helper.make_node("Add", ["u", "bias"], ["y"], name="shift"),
    ]
    return make_onnx(nodes, {"x": ("float", [1, 9, k])}, {"y": ("float", [1, 9, out])}, arrays)


def test_weights_are_int8_and_heads_stay_floats_with_a_reason() -> None:
    module = lowered(two_layers())
    assert module.quantised_nodes == ("down", "up")
    assert module.float_nodes == ("scores",)
    assert "output" in module.float_reasons["scores"]
    assert sum(one.nbytes for one in module.weights.values() if one.dtype == np.int8) == 64 * 128 + 128 * 64
    assert sum(one.size for one in module.weights.values() if one.dtype == np.float32) < 64 * 64


def test_results_are_the_reference_s_with_the_same_weights_and_rows() -> None:
    model = two_layers()
    module = lowered(model)
    x = RNG.normal(0, 2, (1, 9, 64)).astype("float32")
    policy = named_policy("int8").of_rows()
    entry = policy_entry(policy, model, {}, module.quantised_nodes, "float32", module.float_nodes, module.float_reasons)
    rounded = run_reference(with_quantised_weights(model, entry), {"x": x})
    (got,) = run_lowered(module, {"x": x})
    np.testing.assert_allclose(got, rounded[0], rtol=1e-4, atol=1e-4)
    plain = run_reference(model, {"x": x})[0]
    assert 0 < np.abs(got - plain).max() < 0.05 * np.abs(plain).max()


def test_weights_are_scaled_by_column() -> None:
    weight = RNG.normal(0, 1, (40, 6)).astype("float32") * np.array([1, 10, 0, 1e-3, 5, 2], "float32")
    levels, scales = quantise_to_int8(weight)
    assert (np.abs(levels).max(axis=0) == [127, 127, 0, 127, 127, 127]).all()
    assert (np.abs(levels * scales - weight) <= scales * 0.5001).all()


def test_one_kernel_quantises_the_rows_that_several_matmuls_read() -> None:
    module = lowered(small_model("bert-tiny"))
    calls = [call for name, found in module.kernels.items() if "quantise_rows" in name for call in found]
    # Of each of two layers: the input, attention's result, and both of the feed-forward's.
    assert len(calls) == 2 * 4
    assert len(module.quantised_nodes) == 2 * 6


@needs_words
@pytest.mark.slow
def test_an_artifact_passes_its_validation_and_says_what_it_holds(tmp_path: Path) -> None:
    request = ModelRequest("bert-tiny", {"input_ids": (1, 24)}, "llvm", LoweringOptions("int8"))
    result = compile_model(request, tmp_path / "out", samples=2)
    assert result.validation is not None
    assert result.validation.passed, result.validation.outputs
    manifest = json.loads((result.directory / "manifest.json").read_text())
    assert manifest["policy"]["activations"] == "uint8"
    assert set(manifest["policy"]["float_reasons"]) == set(manifest["policy"]["float_nodes"])
    assert "quantised as int8" in manifest["validation"]["reference"]


def test_an_int8_graph_reads_uint8_on_such_a_processor(tmp_path: Path) -> None:
    from tests.pipeline.passes.precision.test_integer_matmuls import quantised_matmul

    model = quantised_matmul(tmp_path, "int8", "int8", columns=True, zero=False)
    module = lowered(model)
    assert not module.rows_to_bytes
    assert any(array.ndim == 4 and array.dtype == np.int8 for array in module.weights.values())
    x = RNG.normal(0, 2, [int(size) for size in model.inputs[0].shape]).astype("float32")
    (got,) = run_lowered(module, {"x": x})
    want = run_reference(model, {"x": x})[0]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6 * float(np.abs(want).max()))


@pytest.mark.parametrize(
    ("target", "says"),
    [(NO_WORDS, "avx512vnni and avxvnni.*--target"), (resolve_target("cuda:sm_90a").target, "for CPUs only.*fp8")],
)
def test_a_target_that_gains_nothing_is_refused(target, says: str) -> None:
    with pytest.raises(UsageError, match=f"(?s)none of its matmuls reads 8-bit activations.*{says}"):
        lowered(two_layers(), target)


@pytest.mark.parametrize(("k", "inner"), [(66, 128), (32, 128), (64, 48)])
def test_matrices_that_gain_nothing_stay_floats_with_a_reason(k: int, inner: int) -> None:
    model = two_layers(k, inner)
    if inner == 48:
        with pytest.raises(UsageError, match="choose another precision"):
            lowered(model)
        return
    module = lowered(model)
    assert module.quantised_nodes == ("down",)
    assert "multiple of 4" in module.float_reasons["up"]


def test_a_graph_in_half_precision_is_refused() -> None:
    with pytest.raises(UsageError, match="none of float32"):
        lowered(load_model("bert-tiny:fp16", shapes={"input_ids": [1, 12]}))


def test_switched_off_weights_stay_floats() -> None:
    module = lowered(two_layers(), disabled_passes=frozenset({"quantise_weights"}))
    assert not module.quantised_nodes
    assert not any(array.dtype == np.int8 for array in module.weights.values())
