"""Chains are cut that TVM's simplifier takes minutes over, or that end Python's stack."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import relaxtune
from relaxtune.models.onnx_model import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, main_of
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import make_model
from tests.pipeline.passes.pass_cases import UNOPTIMISED, run_lowered


def test_chain_of_quantisers_is_cut() -> None:
    count = 14
    nodes, name = [], "x"
    for place in range(count):
        nodes.append(helper.make_node("QuantizeLinear", [name, f"s{place}", "zero"], [f"q{place}"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"q{place}", f"s{place}", "zero"], [f"d{place}"]))
        name = f"d{place}"
    scales = {f"s{place}": np.array(0.0137 * 1.0713**place, "float32") for place in range(count)}
    model = make_model(
        nodes, {"x": ("float32", (3, 8))}, {name: ("float32", (3, 8))}, {**scales, "zero": np.array(3, "int8")}
    )
    lowered = lower(import_model(model), UNOPTIMISED)
    kernels = [b for b in bindings_of(main_of(lowered.mod)) if called_function(b.value) is not None]
    assert 2 <= len(kernels) <= 8
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 8)).astype("float32")}
    want = feeds["x"]
    for scale in scales.values():
        want = (np.clip(np.rint(want / scale) + 3, -128, 127) - 3).astype("float32") * scale
    np.testing.assert_allclose(run_lowered(lowered, feeds)[0], want, atol=1e-6)


@pytest.mark.parametrize(("target", "steps", "kernels"), [("llvm", 1, 1), ("llvm", 6, 12), ("cuda:sm_90a", 12, 4)])
def test_chain_that_reads_each_value_twice_is_cut(target: str, steps: int, kernels: int) -> None:
    """`x + tanh(x)` doubles what stands in a fused expression with every step, and twelve steps made 4,096 copies."""
    nodes, name = [], "x"
    for step in range(steps):
        nodes.append(helper.make_node("Tanh", [name], [f"t{step}"]))
        nodes.append(helper.make_node("Add", [name, f"t{step}"], [f"s{step}"]))
        name = f"s{step}"
    model = make_model(nodes, {"x": ("float32", (3, 8))}, {name: ("float32", (3, 8))})
    lowered = lower(import_model(model), resolve_target(target).target)
    calls = [b for b in bindings_of(main_of(lowered.mod)) if called_function(b.value) is not None]
    assert 1 <= len(calls) <= kernels
    assert (len(calls) > 1) == (steps > 1)
    if target == "llvm":
        want = x = np.random.default_rng(0).standard_normal((3, 8)).astype("float32")
        for _ in range(steps):
            want = want + np.tanh(want)
        np.testing.assert_allclose(run_lowered(lowered, {"x": x})[0], want, rtol=1e-5)


def chain(nodes: int, *operators: str) -> OnnxModel:
    """Return a chain of operators with one operand that take turns; a matmul ends what fuses."""
    names = ["x", *(f"t{place}" for place in range(nodes - 1)), "y"]
    made = [
        helper.make_node(
            operators[place % len(operators)],
            [names[place], *(["w"] if operators[place % len(operators)] == "MatMul" else [])],
            [names[place + 1]],
        )
        for place in range(nodes)
    ]
    weight = np.random.default_rng(0).standard_normal((16, 16)).astype("float32") / 4
    weights = {"w": weight} if "MatMul" in operators else {}
    return make_model(made, {"x": ("float32", (2, 16))}, {"y": ("float32", (2, 16))}, weights)


@pytest.mark.quick_cases("llvm")
@pytest.mark.parametrize("target", ["llvm", "cuda:sm_90a"])
def test_long_chain_of_one_operand_is_cut(target: str) -> None:
    lowered = lower(import_model(chain(600, "Sin", "Abs", "Neg")), resolve_target(target).target)
    apply_fallback(lowered.mod, resolve_target(target).target)
    calls = [b for b in bindings_of(main_of(lowered.mod)) if called_function(b.value) is not None]
    assert 600 / 48 <= len(calls) <= 600 / 24
    if target == "llvm":
        want = x = np.random.default_rng(0).standard_normal((2, 16)).astype("float32")
        for _ in range(200):
            want = -np.abs(np.sin(want))
        np.testing.assert_allclose(run_lowered(lowered, {"x": x})[0], want, rtol=1e-4)


def test_residual_stream_is_no_chain() -> None:
    layers, nodes, name = 100, [], "x"
    for layer in range(layers):
        out = "y" if layer == layers - 1 else f"x{layer}"
        nodes += [
            helper.make_node("Softmax", [name], [f"s{layer}"]),
            helper.make_node("MatMul", [f"s{layer}", "w"], [f"m{layer}"]),
            helper.make_node("Add", [name, f"m{layer}"], [out]),
        ]
        name = out
    weight = np.random.default_rng(0).standard_normal((16, 16)).astype("float32")
    model = make_model(nodes, {"x": ("float32", (2, 16))}, {"y": ("float32", (2, 16))}, {"w": weight})
    lowered = lower(import_model(model), resolve_target("cuda:sm_90a").target)
    calls = [b for b in bindings_of(main_of(lowered.mod)) if called_function(b.value) is not None]
    assert len(calls) == 2 * layers  # a softmax, and a matmul with its addition


@pytest.mark.slow
def test_model_of_ten_thousand_nodes_compiles(tmp_path: Path) -> None:
    model = chain(10_000, "Sin", "MatMul", "Abs", "Sigmoid", "Relu", "MatMul", "Softmax", "Neg")
    onnx.save(model.proto, tmp_path / "deep.onnx")
    relaxtune.compile(tmp_path / "deep.onnx", target="llvm", out=tmp_path / "deep.so")
