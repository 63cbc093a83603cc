"""Bounds by signed ranks: the tables' values, coverage for scatter of several shapes, and too few values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from relaxtune.pipeline.experiment.experiment import centre


def test_bounds_are_the_pairwise_means_that_the_exact_distribution_names() -> None:
    """Ten values at 2.5 %: the table's critical value is 8, so the bounds are the 9th mean from each end."""
    values = [1.0, 2.5, 3.1, 4.7, 5.2, 6.9, 7.3, 8.8, 9.4, 12.0]
    means = sorted((a + b) / 2 for n, a in enumerate(values) for b in values[n:])
    bounds = centre(values, doubt=0.025)
    assert (bounds.least, bounds.most) == (means[8], means[-9])
    assert bounds.estimate == pytest.approx(np.median(means))


def test_bounds_agree_with_the_test_of_scipy() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        values = rng.normal(0.3, 1, 15)
        refuted = stats.wilcoxon(values, alternative="greater", method="exact").pvalue <= 0.05
        assert refuted == (centre(values, doubt=0.05).least > 0)


@pytest.mark.parametrize("shape", ["normal", "student", "uniform"])
def test_bounds_hold_the_centre_as_often_as_they_say(shape: str) -> None:
    rng = np.random.default_rng(0)
    draw = {
        "normal": lambda: rng.normal(2, 1, 16),
        "student": lambda: 2 + rng.standard_t(2, 16),
        "uniform": lambda: rng.uniform(1, 3, 16),
    }[shape]
    wrong = np.mean(
        [bounds.least > 2 or bounds.most < 2 for bounds in (centre(draw(), doubt=0.05) for _ in range(2000))]
    )
    assert 0.07 < wrong < 0.12


def test_too_few_values_bound_nothing() -> None:
    bounds = centre([0.1, 0.2, 0.3], doubt=0.05)
    assert (bounds.least, bounds.most) == (-math.inf, math.inf)
    assert bounds.estimate == pytest.approx(0.2)
