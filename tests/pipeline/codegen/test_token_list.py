"""The tokens of a mask as loops of the host list them, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from relaxtune.models.unpadding import Unpadding
from relaxtune.pipeline.codegen.token_list import listed_tokens
from tests.token_lists import token_lists


@pytest.mark.parametrize("dtype", ["int64", "bool", "float32"])
@pytest.mark.parametrize("kept", [(), (0,), (0, -1)])
def test_lists_are_those_of_numpy(kept: tuple[int, ...], dtype: str) -> None:
    rng, unpadding = np.random.default_rng(0), Unpadding("mask", kept, 8, ())
    for rows, places, share in ((1, 1, 1.0), (3, 7, 0.5), (5, 16, 0.2), (2, 4, 0.0)):
        mask = (rng.random((rows, places)) < share).astype(dtype)
        for found, expected in zip(listed_tokens(unpadding, mask), token_lists(unpadding, mask), strict=True):
            np.testing.assert_array_equal(found, expected)
