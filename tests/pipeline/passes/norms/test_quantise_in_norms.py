"""Kernels of norms that write their rows in float8 too."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
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


@pytest.mark.parametrize(("rows", "residual"), [(24, False), (24, True), ("n", True)])
def test_a_norm_writes_float8_bit_for_bit_as_a_kernel_of_its_own_would(rows: int | str, residual: bool) -> None:
    graph = import_model(block(rows, residual=residual))
    joined = lower(graph, HOPPER, LoweringOptions(precision="fp8"))
    apart = lower(graph, HOPPER, LoweringOptions(precision="fp8", disabled_passes=frozenset({"quantise_in_norms"})))
    assert len(joined.kernels) == len(apart.kernels) - 1
    name = next(name for name in joined.kernels if name.endswith("_quantised"))
    if rows == 24:
        # The row in 16 bits is a result where something else reads it.
        assert len(joined.mod[name].params) == 3 + (3 if residual else 2)
        (first, *_), *_ = list_candidates(joined.mod[name], resolve_target("cuda:sm_90a"))
        assert isinstance(first, RowsParameters)
    x = {"x": np.random.default_rng(5).standard_normal((2, 24, 256)).astype("float32")}
    x["x"][0, 0] = 0.0
    (got,), (want,) = (run_lowered(with_exact_casts(one), x) for one in (joined, apart))
    np.testing.assert_array_equal(got, want)
