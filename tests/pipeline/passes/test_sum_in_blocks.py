"""Long rows are added up in parts."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.schedules.fallback import fallback_with_rules
from tests.pipeline.passes.pass_cases import graph_of, run_lowered
from tests.unoptimised import LLVM, UNOPTIMISED

_ROW = 16384
_NORM = relax.op.nn


def _layer_norm(x: relax.Expr) -> relax.Expr:
    ones, zeros = relax.const(np.ones(_ROW, "float32")), relax.const(np.zeros(_ROW, "float32"))
    return _NORM.layer_norm(x, ones, zeros, axes=[-1], epsilon=1e-5)


def _deviation(x: np.ndarray) -> np.ndarray:
    return x - x.mean(-1, keepdims=True)


# Shape, spread of the terms, the graph, and NumPy's in float64.
CASES: dict[str, tuple[tuple[int, ...], float, Callable[[relax.Expr], relax.Expr], Callable[[np.ndarray], object]]] = {
    "layer norm": (
        (2, _ROW),
        100.0,
        _layer_norm,
        lambda x: _deviation(x) / np.sqrt(x.var(-1, keepdims=True) + 1e-5),
    ),
    "rms norm": (
        (2, _ROW),
        1e-3,
        lambda x: _NORM.rms_norm(x, relax.const(np.ones(_ROW, "float32")), axes=[-1], epsilon=1e-5),
        lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5),
    ),
    "softmax": (
        (2, _ROW),
        1e-3,
        lambda x: relax.op.multiply(_NORM.softmax(x, axis=-1), relax.const(float(_ROW), "float32")),
        lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True) * _ROW,
    ),
    "sum of columns": ((_ROW, 3), 1e-3, lambda x: relax.op.sum(x, axis=0), lambda x: x.sum(0)),
    "mean of pictures": ((2, 128, 128), 1e-3, lambda x: relax.op.mean(x, axis=[1, 2]), lambda x: x.mean((1, 2))),
    "norm of all": (
        (16, 4, 16, 16),
        1e-3,
        lambda x: relax.op.sqrt(relax.op.sum(relax.op.multiply(x, x))),
        lambda x: np.sqrt((x * x).sum()),
    ),
    "variance of all": ((16, 4, 16, 16), 100.0, lambda x: relax.op.variance(x), np.var),
    "first and last": ((64, 3, 256), 1e-3, lambda x: relax.op.sum(x, axis=[0, 2]), lambda x: x.sum((0, 2))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_long_sum_loses_no_digits(case):
    shape, spread, build, exact = CASES[case]
    x = 1 + np.linspace(0, spread, math.prod(shape), dtype="float32").reshape(shape)
    lowered = lower(graph_of(lambda builder, x: build(x), {"x": (shape, "float32")}), LLVM, LoweringOptions())
    (got,) = run_lowered(lowered, {"x": x}, UNOPTIMISED)
    np.testing.assert_allclose(got, exact(x.astype("float64")), rtol=1e-5, atol=1e-5)
    _, rules = fallback_with_rules(lowered.mod, LLVM)
    assert not {"cpu-plain", "cpu-generic"} & set(rules.values()) or not got.shape
