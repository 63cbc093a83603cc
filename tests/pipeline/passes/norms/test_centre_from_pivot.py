"""Rows of equal numbers have no deviation, and other rows are as right as before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import helper
from tvm import relax, tirx

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.schedules.fallback import fallback_with_rules
from tests.pipeline.importer.onnx_cases import make_model
from tests.pipeline.passes.pass_cases import graph_of, run_lowered
from tests.unoptimised import LLVM, UNOPTIMISED

_WIDTH = 768
Build = Callable[[relax.BlockBuilder, relax.Var], relax.Expr]


def _layer_norm(_builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    dtype = str(x.ty.dtype)
    gamma, beta = (relax.const(np.full(_WIDTH, number, dtype), dtype) for number in (2.0, 0.5))
    return relax.op.nn.layer_norm(x, gamma, beta, axes=[-1], epsilon=1e-5)


def _norm_of_columns(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    """Return a norm over an axis that is not the last, times 2 plus 0.5, which stays single steps."""
    dtype = str(x.ty.dtype)
    mean = builder.emit(relax.op.mean(x, [1], keepdims=True))
    apart = builder.emit(relax.op.subtract(x, mean))
    square = builder.emit(relax.op.mean(builder.emit(relax.op.multiply(apart, apart)), [1], keepdims=True))
    root = builder.emit(relax.op.sqrt(builder.emit(relax.op.add(square, relax.const(1e-5, dtype)))))
    normed = builder.emit(relax.op.divide(apart, root))
    return relax.op.add(builder.emit(relax.op.multiply(normed, relax.const(2.0, dtype))), relax.const(0.5, dtype))


# The graph, the shape, and the axis it is normed over.
NORMS: dict[str, tuple[Build, tuple[int, ...], int]] = {
    "layer norm": (_layer_norm, (4, _WIDTH), 1),
    "columns": (_norm_of_columns, (3, _WIDTH, 4), 1),
}


def _normed(build: Build, x: np.ndarray, shape: tuple[object, ...] | None = None) -> np.ndarray:
    lowered = lower(graph_of(build, {"x": (shape or x.shape, str(x.dtype))}), LLVM, LoweringOptions())
    (got,) = run_lowered(lowered, {"x": x}, UNOPTIMISED)
    return got


def _exact(x: np.ndarray, axis: int) -> np.ndarray:
    apart = x.astype("float64") - x.mean(axis, keepdims=True, dtype="float64")
    return 2 * apart / np.sqrt((apart * apart).mean(axis, keepdims=True) + 1e-5) + 0.5


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_equal_numbers_have_no_deviation(dtype: str) -> None:
    rows = np.broadcast_to(np.array([10.1, 0.3, -7777.7, 0], dtype)[:, None], (4, _WIDTH))
    assert (_normed(_layer_norm, np.ascontiguousarray(rows)) == 0.5).all()


@pytest.mark.parametrize("case", NORMS)
def test_norm_is_right_wherever_a_row_lies(case: str) -> None:
    build, shape, axis = NORMS[case]
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    x[0] = 10.1
    x[1] += 100
    # An element that may be the pivot, far from the mean.
    x[(2, *(0 for _ in shape[1:]))] = 3000
    got = _normed(build, x)
    assert (got[0] == 0.5).all()
    np.testing.assert_allclose(got, _exact(x, axis), rtol=0, atol=5e-5)


def test_norm_of_rows_of_symbolic_length() -> None:
    def build(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        mean = builder.emit(relax.op.mean(x, [-1], keepdims=True))
        return relax.op.subtract(x, mean)

    shape = (tirx.Var("rows", "int64"), tirx.Var("length", "int64"))
    lowered = lower(graph_of(build, {"x": (shape, "float32")}), LLVM, LoweringOptions())
    (got,) = run_lowered(lowered, {"x": np.full((2, _WIDTH), 10.1, "float32")}, UNOPTIMISED)
    assert (got == 0).all()
    (got,) = run_lowered(lowered, {"x": np.zeros((3, 0), "float32")}, UNOPTIMISED)
    assert got.shape == (3, 0)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 1.5e38])
def test_elements_that_are_no_ordinary_numbers_give_what_they_gave(number: float) -> None:
    def build(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        mean = builder.emit(relax.op.mean(x, [-1], keepdims=True))
        return relax.op.subtract(x, mean)

    x = np.ones((2, 4), "float32")
    x[0] = number, 1, number, -2e38
    with np.errstate(invalid="ignore", over="ignore"):
        want = x - x.mean(-1, keepdims=True)
    np.testing.assert_allclose(_normed(build, x), want, rtol=1e-6)


def _channels(op: str, opset: int, **attributes: object) -> OnnxModel:
    shape = (2, 8, 12, 8)
    node = helper.make_node(op, ["x", "scale", "bias"], ["y"], **attributes)
    constants = {"scale": np.full(8, 2, "float32"), "bias": np.full(8, 0.5, "float32")}
    value = {"x": ("float32", shape)}, {"y": ("float32", shape)}
    return make_model([node], *value, constants, opset=opset)


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (_channels("GroupNormalization", 21, num_groups=2), 2),
        (_channels("InstanceNormalization", 18), 8),
    ],
    ids=["groups", "instances"],
)
def test_norm_of_channels_is_right_wherever_they_lie(model: OnnxModel, groups: int) -> None:
    x = np.random.default_rng(0).normal(size=(2, 8, 12, 8)).astype("float32")
    x[0] = 10.1
    x[1] += 100
    lowered = lower(import_model(model), LLVM, LoweringOptions())
    (got,) = run_lowered(lowered, {"x": x}, UNOPTIMISED)
    assert (got[0] == 0.5).all()
    want = _exact(x.reshape(2, groups, -1), 2).reshape(x.shape)
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-5)


def test_norm_keeps_the_schedule_of_rows() -> None:
    build, shape, _ = NORMS["layer norm"]
    lowered = lower(graph_of(build, {"x": (shape, "float32")}), LLVM, LoweringOptions())
    scheduled, rules = fallback_with_rules(lowered.mod, LLVM)
    assert list(rules.values()) == ["cpu-reduction"]
    # Both sums of a row have a partial sum a lane.
    assert str(scheduled).count('_rf_update")') == 2
