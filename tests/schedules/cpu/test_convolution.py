from __future__ import annotations

import pytest

from relaxtune.schedules.fallback import apply_fallback
from tests.schedules.kernel_cases import conv1d_case, conv2d_case, host, loop_kinds, run


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ((2, 3, 32, 48, 8, 8, 0), "cpu-convolution"),
        ((1, 3, 33, 16, 3, 2, 1), "cpu-convolution"),
        ((1, 5, 16, 7, 3, 1, 1), "cpu-convolution"),
        ((1, 3, 17, 17, 3, 1, 1), "cpu-reduction"),
    ],
)
def test_conv2d_matches_numpy_when_strided_padded_or_odd(shape, rule):
    assert run(conv2d_case(*shape)) == rule


@pytest.mark.parametrize("shape", [(1, 8, 300, 32, 3, 1, 1), (1, 8, 301, 32, 3, 2, 1), (2, 7, 33, 5, 3, 1, 1)])
def test_conv1d_matches_numpy_when_strided_padded_or_odd(shape):
    run(conv1d_case(*shape))


def test_conv1d_matches_numpy_when_grouped():
    # No axis is of the filters alone; positions fill whole vectors of any processor, or of none.
    assert run(conv1d_case(1, 16, 64, 32, 3, 1, 1, groups=4)) == "cpu-convolution"
    assert run(conv1d_case(1, 16, 41, 32, 3, 1, 1, groups=4)) != "cpu-convolution"


def test_convolution_uses_cores_vectors_and_registers_when_filters_fill_vectors():
    module = apply_fallback(conv2d_case(1, 3, 32, 48, 8, 8, 0).module, host().target)
    assert loop_kinds(module) >= {"parallel", "vectorized", "unrolled"}
