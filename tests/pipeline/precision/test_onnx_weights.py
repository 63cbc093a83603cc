from __future__ import annotations

from dataclasses import replace

import numpy as np
from onnx import helper, numpy_helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.precision.onnx_weights import MatmulWeights, with_quantised_weights
from relaxtune.pipeline.precision.policy import named_policy, policy_entry
from relaxtune.pipeline.precision.quantise import quantise, quantise_float8
from relaxtune.schedules.functions.float8 import float8_array
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.pass_cases import make_onnx

RNG = np.random.default_rng(0)
W = RNG.standard_normal((64, 32)).astype(np.float32)
X = RNG.standard_normal((3, 64)).astype(np.float32)


def graph() -> OnnxModel:
    """Return matmuls by the same matrix in every way that exporters write, and one of two activations."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="plain"),
        helper.make_node("Gemm", ["x", "turned"], ["b"], name="gemm", transB=1),
        helper.make_node("Gemm", ["x", "w"], ["scaled"], name="scaled", alpha=0.5),
        helper.make_node("Transpose", ["turned"], ["again"], name="transpose", perm=[1, 0]),
        helper.make_node("MatMul", ["x", "again"], ["c"], name="transposed"),
        helper.make_node("Constant", [], ["held"], name="constant", value=numpy_helper.from_array(W)),
        helper.make_node("MatMul", ["x", "held"], ["d"], name="of_constant"),
        helper.make_node("Transpose", ["x"], ["xt"], name="turn", perm=[1, 0]),
        helper.make_node("MatMul", ["x", "xt"], ["e"], name="dynamic"),
    ]
    outputs = {name: ("float", [3, 32]) for name in ("a", "b", "c", "d", "scaled")}
    return make_onnx(
        nodes, {"x": ("float", [3, 64])}, {**outputs, "e": ("float", [3, 3])}, {"w": W, "turned": W.T.copy()}
    )


def test_the_constant_of_a_matmul_is_found_through_transposes_and_constants() -> None:
    weights = MatmulWeights(graph())
    for name in ("plain", "gemm", "transposed", "of_constant"):
        assert weights.shape(name) == (64, 32), name
        np.testing.assert_array_equal(weights.array(name), W)
    for name in ("scaled", "dynamic", "transpose", "nowhere"):
        assert weights.shape(name) is None, name
    assert weights.is_matmul("dynamic")
    assert not weights.is_matmul("turn")


def test_only_the_named_matmuls_multiply_by_quantised_weights() -> None:
    model = graph()
    nodes = ("plain", "gemm", "transposed", "of_constant")
    made = with_quantised_weights(model, policy_entry(named_policy("w4a16", 32), model, {}, nodes, "float32"))
    rounded = X @ quantise(W.astype(np.float16), 4, 32).dequantised()
    a, b, c, d, scaled, e = run_reference(replace(made, sha256="1"), {"x": X})
    for got in (a, b, c, d):
        np.testing.assert_allclose(got, rounded, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scaled, 0.5 * X @ W, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(e, X @ X.T, rtol=1e-5, atol=1e-5)
    assert np.abs(a - X @ W).max() > 0.1
    assert "plain__quantised" not in {tensor.name for tensor in model.proto.graph.initializer}


def test_fp8_rounds_rows_of_activations_too() -> None:
    model, rng = graph(), np.random.default_rng(4)
    x = (rng.standard_normal((3, 64)) * np.array([[1e-3], [1.0], [300.0]])).astype("float32")
    x[0, :4] = [0.0, 1e-6, 2e-6, -1e-5]
    made = with_quantised_weights(model, policy_entry(named_policy("fp8"), model, {}, ("plain",), "float32"))
    assert with_quantised_weights(model, None) is model
    levels, scales = quantise_float8(W.astype(np.float16))
    steps = np.abs(x).max(axis=1, keepdims=True) * np.float32(1 / 448)
    rows = float8_array(x / steps).astype("float32") * steps
    got, *others = run_reference(replace(made, sha256="2"), {"x": x})
    np.testing.assert_allclose(got, rows @ (levels.astype("float32") * scales[:, None]).T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(others[0], x @ W, rtol=1e-4, atol=1e-4)
