"""A chain of quantisers is cut before TVM's simplifier takes minutes over it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, main_of
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
