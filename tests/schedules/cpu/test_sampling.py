"""Sampling on a CPU against the reference in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relaxtune.schedules.functions import sampling as rules
from relaxtune.schedules.targets import resolve_target
from tests.schedules import sampling_cases as cases
from tests.schedules.sampling_reference import mass


@pytest.fixture(scope="module")
def run() -> cases.Run:
    return cases.built(resolve_target("llvm"), tvm.cpu())


@pytest.mark.quick_cases("7")
@pytest.mark.parametrize("vocabulary", [7, 500])
def test_each_filter_keeps_the_references_set(run: cases.Run, vocabulary: int) -> None:
    cases.check_sets(run, vocabulary)


@pytest.mark.quick_cases("1-2-float32", "7-60-float16", "1000-60-float32", "1000-60-bfloat16")
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("vocabulary", "rows"), [(1, 2), (7, 60), (1000, 60), (50257, 12), (128256, 6)])
def test_random_rows_with_all_inputs_give_the_references_tokens(
    run: cases.Run, vocabulary: int, rows: int, dtype: str
) -> None:
    cases.check_rows(run, cases.random_rows(np.random.default_rng(vocabulary), vocabulary, rows, dtype), dtype)


def test_draws_are_distributed_as_the_kept_probabilities(run: cases.Run) -> None:
    cases.check_distribution(run)


def test_extreme_logits_and_masks(run: cases.Run) -> None:
    cases.check_extremes(run)


def test_token_of_a_row_depends_on_no_other(run: cases.Run) -> None:
    cases.check_steadiness(run, 9001)


def test_mass_is_the_exponential() -> None:
    d = -np.linspace(0, 40, 100_001).astype("float32")
    exact = np.exp(d.astype("float64")) * 2.0**rules.MASS_BITS
    assert mass(np.zeros(1, "float32")) == 2**rules.MASS_BITS
    np.testing.assert_allclose(mass(d), exact, rtol=2e-7, atol=0.51)
