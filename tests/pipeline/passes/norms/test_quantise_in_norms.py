"""Kernels of norms that write their rows in float8 too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.precision.calibration import StaticScales
from relaxtune.schedules.registry import list_candidates
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.rows.kernel import RowsParameters
from tests.pipeline.passes.pass_cases import make_onnx, run_lowered
from tests.pipeline.passes.weights.test_quantise_weights import HOPPER, with_exact_casts


def block(rows: int | str, *, residual: bool) -> OnnxModel:
    """Return a norm, a matmul of its rows and, with `residual`, a sum with them."""
    rng = np.random.default_rng(3)
    constants = {
        name: rng.standard_normal(shape).astype("float32") * 0.1
        for name, shape in {"scale": (256,), "shift": (256,), "w": (256, 256)}.items()
    }
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale", "shift"], ["n"], axis=-1),
        helper.make_node("MatMul", ["n", "w"], ["y" if not residual else "m"], name="w"),
        *([helper.make_node("Add", ["m", "n"], ["y"])] if residual else []),
    ]
    shape = ("float", [2, rows, 256])
    return make_onnx(nodes, {"x": shape}, {"y": shape}, constants)


STATIC = StaticScales("record", "", {"n": 2.0 / 448})


@pytest.mark.parametrize(
    ("rows", "residual", "scales"),
    [
        (24, False, None),
        (24, True, None),
        ("n", True, None),
        (24, False, STATIC),
        (24, True, STATIC),
        ("n", True, STATIC),
    ],
)
def test_a_norm_writes_float8_bit_for_bit_as_a_kernel_of_its_own_would(
    rows: int | str, residual: bool, scales: StaticScales | None
) -> None:
    graph = import_model(block(rows, residual=residual))
    options = LoweringOptions(precision="fp8", calibration=scales)
    joined = lower(graph, HOPPER, options)
    apart = lower(graph, HOPPER, replace(options, disabled_passes=frozenset({"quantise_in_norms"})))
    name = next(name for name in joined.kernels if "layer_norm" in name)
    if scales is None or residual:
        assert len(joined.kernels) == len(apart.kernels) - 1
        assert name.endswith("_quantised")
    else:
        # Fusion puts an elementwise function behind its only producer.
        assert list(joined.kernels) == list(apart.kernels)
        assert name.endswith("_quantise_columns")
    if rows == 24:
        # The row in 16 bits is a result where something else reads it.
        results = 2 if scales is None else 1
        assert len(joined.mod[name].params) == 3 + (scales is not None) + results + residual
        (first, *_), *_ = list_candidates(joined.mod[name], resolve_target("cuda:sm_90a"))
        assert isinstance(first, RowsParameters)
    x = {"x": np.random.default_rng(5).standard_normal((2, 24, 256)).astype("float32")}
    x["x"][0, 0] = 0.0
    (got,), (want,) = (run_lowered(with_exact_casts(one), x) for one in (joined, apart))
    np.testing.assert_array_equal(got, want)
