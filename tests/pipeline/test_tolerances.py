from __future__ import annotations

import numpy as np
import pytest

from pipeline.tolerances import EXACT, kernel_tolerance, model_tolerance, output_scale


@pytest.mark.parametrize(("storage", "accumulator"), [("float32", "float32"), ("float16", "float32")])
@pytest.mark.parametrize("k", [1, 64, 4096])
def test_a_kernel_tolerance_holds_rounding_and_catches_a_lost_term(storage: str, accumulator: str, k: int) -> None:
    rng = np.random.default_rng(k)
    a, b = rng.standard_normal((64, k)).astype(storage), rng.standard_normal((k, 64)).astype(storage)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    computed = (a.astype(accumulator) @ b.astype(accumulator)).astype(storage)
    tolerance = kernel_tolerance(storage, accumulator, k)
    allowed = tolerance.atol * output_scale(exact) + tolerance.rtol * np.abs(exact)
    assert np.all(np.abs(computed - exact) <= allowed)
    lost = exact - a[:, :1].astype(np.float64) @ b[:1].astype(np.float64)
    assert np.any(np.abs(lost - exact) > allowed)


def test_a_precision_asked_for_overrides_the_graph() -> None:
    assert model_tolerance("float32", "fp16") == model_tolerance("float16")
    assert model_tolerance("float32").rtol < model_tolerance("float16").rtol < model_tolerance("bfloat16").rtol
    assert model_tolerance("float64").rtol < model_tolerance("float32").rtol
    assert model_tolerance("int64") == EXACT
    assert kernel_tolerance("int32", "int32", 8) == EXACT


def test_the_scale_is_the_root_mean_square_and_at_least_one() -> None:
    assert output_scale(np.asarray([3.0, 4.0])) == pytest.approx(np.sqrt(12.5))
    assert output_scale(np.asarray([0.1, np.inf, np.nan])) == 1.0
    assert output_scale(np.asarray([100, 100])) == 1.0
    assert output_scale(np.zeros(0, np.float32)) == 1.0
