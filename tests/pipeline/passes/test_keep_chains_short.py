"""A chain of quantisers is cut before TVM's simplifier takes minutes over it."""

from __future__ import annotations

import numpy as np
from onnx import helper

from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, main_of
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
