from __future__ import annotations

import ml_dtypes
import numpy as np

from relaxtune.pipeline.onnx_runtime.shared_arrays import SharedArrays, read_arrays


def test_arrays_are_read_as_they_were_written_and_writing_to_them_changes_no_other() -> None:
    given = {
        "": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "a/b": np.asarray(True),
        "half": np.full((3, 1), 0.5, np.float16),
        "none": np.zeros((0, 4), np.int64),
        "brain": np.asarray([1.5, -2.0], ml_dtypes.bfloat16),
    }
    shared = SharedArrays(given.items())
    first, second = read_arrays(shared.where), read_arrays(shared.where)
    shared.close()
    for name, array in given.items():
        assert first[name].dtype == array.dtype
        np.testing.assert_array_equal(first[name], array)
    first["half"][:] = 0
    np.testing.assert_array_equal(second["half"], given["half"])


def test_nothing_is_shared_where_there_is_nothing() -> None:
    assert read_arrays(SharedArrays([]).where) == {}
    (empty,) = read_arrays(SharedArrays([("x", np.zeros((2, 0), np.float32))]).where).values()
    assert empty.shape == (2, 0)
