from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tvm import te, topi

from relaxtune.schedules.fallback import apply_fallback
from tests.schedules.kernel_cases import Case, host, loop_kinds, prim_func, rows_case, run

KINDS = ["softmax", "layer_norm", "rms_norm", "sum", "max"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 7), (5, 100), (17, 33), (1, 1000), (197, 64), (64, 197)])
def test_row_reduction_matches_numpy_when_length_is_odd(kind, rows, length):
    assert run(rows_case(kind, rows, length)) == "cpu-reduction"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("symbolic", ["r", "l", "rl"])
def test_row_reduction_matches_numpy_when_axes_are_symbolic(kind, symbolic):
    for rows, length in ((6, 50), (1, 16), (3, 5)):
        # A symbolic length has whole vectors and a rest; sums and maxima alone stay reductions.
        expected = "cpu-any-size-rows" if "l" in symbolic and kind not in ("sum", "max") else "cpu-reduction"
        assert run(rows_case(kind, rows, length, symbolic)) == expected


@given(rows=st.integers(1, 20), length=st.integers(1, 90), kind=st.sampled_from(KINDS))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_row_reduction_matches_numpy_when_shapes_are_drawn(rows, length, kind):
    run(rows_case(kind, rows, length))


def test_softmax_uses_cores_and_vectors_when_rows_are_many():
    module = apply_fallback(rows_case("softmax", 512, 128).module, host().target)
    assert loop_kinds(module) >= {"parallel", "vectorized"}


def test_softmax_gives_zero_weight_when_the_mask_is_minus_infinity():
    case = rows_case("softmax", 4, 37)
    case.inputs[0][:, 20:] = -np.inf
    shifted = np.exp(case.inputs[0] - case.inputs[0].max(-1, keepdims=True))
    case.expected = [shifted / shifted.sum(-1, keepdims=True)]
    run(case)


def test_softmax_keeps_nan_when_the_input_has_one():
    case = rows_case("softmax", 2, 40)
    case.inputs[0][1, 3] = np.nan
    case.expected[0][1, :] = np.nan
    run(case)


def test_column_sum_matches_numpy_when_the_reduced_axis_is_not_the_last():
    run(rows_case("sum_columns", 33, 50))
    run(rows_case("sum_columns", 300, 500))


def test_argmax_matches_numpy_when_it_falls_to_the_generic_rule():
    a = te.placeholder((9, 50), "float32", name="A")
    x = np.random.default_rng(0).standard_normal((9, 50)).astype("float32")
    case = Case(prim_func([a, topi.argmax(a, 1)]), [x], [x.argmax(1).astype("int32")])
    assert run(case) == "cpu-generic"


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((8, 8), 0), ((2, 4, 16, 16), -2), ((16, 16, 16), 1), ((16, 16, 16), 0), ((8, 8), 1)],
)
def test_softmax_matches_numpy_when_the_reduced_axis_is_as_long_as_a_kept_one(shape, axis):
    x = te.placeholder(shape, "float32", name="x")
    data = np.random.default_rng(0).standard_normal(shape).astype("float32")
    want = np.exp(data) / np.exp(data).sum(axis, keepdims=True)
    run(Case(prim_func([x, topi.nn.softmax(x, axis)]), [data], [want]))
