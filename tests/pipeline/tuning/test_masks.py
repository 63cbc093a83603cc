"""Masks of padding while candidates are timed: they hide nothing; other masks keep their random values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relaxtune.pipeline.tuning.measure.arguments import hiding_nothing
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.tir.dependent_arguments import padding_masks
from tests.schedules.attention_cases import PLAIN, AttentionCase


@pytest.mark.parametrize(
    ("case", "masks"),
    [
        (PLAIN, {}),
        (replace(PLAIN, bias=("add", "float32", (1, 1, 1, 8))), {"3": 0}),
        (replace(PLAIN, bias=("keep", "bool", (1, 1, 1, 8))), {"3": 1}),
        (replace(PLAIN, bias=("add", "float32", (1, 2, 8, 8))), {}),
        (replace(PLAIN, bias=("add", "float32", (1, 2, 1, 8))), {}),
    ],
    ids=["no mask", "added", "kept", "relative bias", "linear bias"],
)
def test_masks_of_padding_are_found_with_the_number_that_hides_nothing(
    case: AttentionCase, masks: dict[str, int]
) -> None:
    assert padding_masks(attention_function(*case.made())) == masks


def test_only_masks_are_replaced_and_the_arrays_stay_as_they_are() -> None:
    arrays = [np.arange(3.0), np.array([True, False]), np.array([0.5, -0.5], "float16")]
    found = hiding_nothing(arrays, {"1": 1, "2": 0})
    assert found[0] is arrays[0]
    assert found[1].dtype == bool
    assert found[1].all()
    np.testing.assert_array_equal(found[2], np.zeros(2, "float16"))
    np.testing.assert_array_equal(arrays[1], [True, False])
