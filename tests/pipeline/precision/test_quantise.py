from __future__ import annotations

import numpy as np
import pytest

from relaxtune.pipeline.precision.quantise import group_of, packed_panels, packed_rows, quantise

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("k", "columns", "group"), [(256, 40, 128), (256, 2050, 32), (200, 16, 64), (96, 7, 0)])
def test_every_weight_is_within_a_step_of_its_group(bits: int, k: int, columns: int, group: int) -> None:
    weight = RNG.standard_normal((k, columns)).astype(np.float32)
    matrix = quantise(weight, bits, group)
    assert matrix.levels.shape == (columns, k)
    assert matrix.scales.shape == (columns, -(-k // group_of(k, group)))
    assert matrix.scales.dtype == np.float16
    step = np.repeat(np.abs(matrix.scales.astype(np.float32)), matrix.group, axis=1)[:, :k].T
    error = np.abs(matrix.dequantised() - weight)
    # Half a step; of 4 bits, a whole one where the largest weight of the other sign has no level of its own. The
    # scale's rounding to float16 (2**-11) adds up over the levels.
    assert (error <= step * (1.0 + 8 / 2048 if bits == 4 else 0.5 + 127 / 2048)).all()
    assert np.mean(error / step) < 0.3


def test_the_largest_weight_of_four_bits_is_hit_and_all_levels_serve() -> None:
    weight = np.linspace(-1, 0.875, 16, dtype=np.float32)[:, None].repeat(2, axis=0)
    matrix = quantise(weight, 4, 0)
    assert set(matrix.levels[0]) == set(range(16))
    np.testing.assert_allclose(matrix.dequantised(), weight, atol=1e-3)


def test_a_group_of_zeros_stays_zero() -> None:
    weight = np.zeros((64, 3), np.float16)
    weight[32:, 0] = 0.5
    for bits in (4, 8):
        found = quantise(weight, bits, 32).dequantised()
        assert (found[:32] == 0).all()
        np.testing.assert_allclose(found[32:, 0], 0.5, rtol=1e-3)


def test_two_levels_share_a_byte_the_even_one_in_the_lower_half() -> None:
    matrix = quantise(RNG.standard_normal((8, 3)).astype(np.float32), 4, 0)
    packed = packed_rows(matrix)
    assert packed.shape == (3, 4)
    np.testing.assert_array_equal(packed & 15, matrix.levels[:, ::2])
    np.testing.assert_array_equal(packed >> 4, matrix.levels[:, 1::2])


def test_panels_hold_the_same_bytes_and_zero_scales_after_the_last_column() -> None:
    matrix = quantise(RNG.standard_normal((64, 10)).astype(np.float32), 8, 32)
    packed, scales = packed_panels(matrix, 8)
    assert packed.shape == (2, 64, 8)
    assert scales.shape == (2, 2, 8)
    np.testing.assert_array_equal(packed[1, :, 1], matrix.levels[9])
    np.testing.assert_array_equal(scales[0, :, 3], matrix.scales[3])
    assert (scales[1, :, 2:] == 0).all()
