"""Shape buckets: which a call goes to, how it is padded, and what is cut from its outputs."""

from __future__ import annotations

import numpy as np
import pytest

from relaxtune.models import TensorSpec
from relaxtune.models.buckets import (
    Bucket,
    Side,
    bucket_shapes,
    choose_bucket,
    cut_outputs,
    list_sides,
    make_buckets,
    pad_inputs,
    parse_bucket,
    read_sizes,
    unknown_axes,
)
from relaxtune.models.errors import ModelShapeError
from relaxtune.models.loading import open_axes

IDS = TensorSpec("ids", "int64", ("batch", "sequence"))
MASK = TensorSpec("mask", "int64", ("batch", "past + 1"))
CACHE = TensorSpec("cache", "float32", ("batch", 2, "past", 4))


def test_parse_bucket_gives_the_axis_and_its_sizes_in_order() -> None:
    assert parse_bucket("sequence=256, 128,128") == ("sequence", (128, 256))


@pytest.mark.parametrize("text", ["128", "sequence=", "sequence=0", "sequence=a", "=128", "a b=1"])
def test_parse_bucket_refuses_other_forms(text: str) -> None:
    with pytest.raises(ModelShapeError, match="AXIS=SIZE"):
        parse_bucket(text)


def test_make_buckets_combines_the_axes_and_puts_the_smallest_first() -> None:
    buckets = make_buckets({"batch": (8, 1), "sequence": (16,)}, [IDS])
    assert [bucket.name for bucket in buckets] == ["batch=1,sequence=16", "batch=8,sequence=16"]


def test_make_buckets_refuses_an_axis_that_the_inputs_do_not_have() -> None:
    with pytest.raises(ModelShapeError, match="expected one of batch, sequence"):
        make_buckets({"length": (16,)}, [IDS])


def test_shapes_of_a_bucket_compute_what_depends_on_its_axes() -> None:
    shapes = bucket_shapes([MASK, CACHE], Bucket((("past", 15),)))
    assert shapes == {"mask": ("batch", 16), "cache": ("batch", 2, 15, 4)}


def test_sizes_of_a_call_are_those_of_its_named_axes() -> None:
    assert read_sizes({"mask": (3, 8), "cache": (3, 2, 7, 4)}, [MASK, CACHE]) == {"batch": 3, "past": 7}


@pytest.mark.parametrize(
    ("sizes", "paddable", "expected"),
    [
        ({"batch": 1, "sequence": 16}, {}, (0, False)),
        ({"batch": 1, "sequence": 15}, {}, None),
        ({"batch": 1, "sequence": 15}, {"sequence": Side.RIGHT}, (0, True)),
        ({"batch": 1, "sequence": 17}, {"sequence": Side.RIGHT}, (1, True)),
        ({"batch": 2, "sequence": 16}, {"sequence": Side.RIGHT}, None),
        ({"batch": 2, "sequence": 16}, {"batch": Side.RIGHT}, (2, True)),
        ({"batch": 2, "sequence": 33}, {"batch": Side.RIGHT, "sequence": Side.RIGHT}, None),
    ],
)
def test_a_call_goes_to_the_smallest_bucket_that_it_fits(
    sizes: dict[str, int], paddable: dict[str, Side], expected: tuple[int, bool] | None
) -> None:
    buckets = make_buckets({"batch": (1, 4), "sequence": (16, 32)}, [IDS])
    assert [b.name for b in buckets][2] == "batch=4,sequence=16"
    assert choose_bucket(buckets, sizes, paddable) == expected


def test_padding_repeats_rows_and_fills_the_other_axes() -> None:
    ids = np.array([[5, 6], [7, 8]])
    padded = pad_inputs({"ids": ids}, [IDS], {"batch": 3, "sequence": 4}, {"sequence": Side.RIGHT}, {"ids": 1.0})
    np.testing.assert_array_equal(padded["ids"], [[5, 6, 1, 1], [7, 8, 1, 1], [7, 8, 1, 1]])


def test_padding_before_goes_for_axes_made_of_the_padded_one() -> None:
    inputs = {"mask": np.ones((1, 3), "int64"), "cache": np.ones((1, 2, 2, 4), "float32")}
    sides, fills = {"past": Side.LEFT}, {"mask": 0.0, "cache": 0.0}
    padded = pad_inputs(inputs, [MASK, CACHE], {"batch": 1, "past": 4}, sides, fills)
    np.testing.assert_array_equal(padded["mask"], [[0, 0, 1, 1, 1]])
    assert padded["cache"].shape == (1, 2, 4, 4)
    assert padded["cache"][0, 0, :, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("side", "kept"), [(Side.RIGHT, [0, 1]), (Side.LEFT, [2, 3])])
def test_outputs_lose_what_padding_added(side: Side, kept: list[int]) -> None:
    spec = TensorSpec("y", "int64", ("batch", "sequence", 1))
    got = cut_outputs({"y": np.arange(4).reshape(1, 4, 1)}, [spec], {"batch": 1, "sequence": 2}, {"sequence": side})
    assert got["y"].reshape(-1).tolist() == kept


def test_an_axis_with_something_after_it_is_padded_before_only() -> None:
    assert list_sides("past", [MASK, CACHE]) == (Side.LEFT,)
    assert list_sides("sequence", [IDS]) == (Side.RIGHT, Side.LEFT)
    assert list_sides("batch", [IDS]) == (Side.RIGHT,)


def test_axes_of_outputs_that_no_input_decides_are_named() -> None:
    outputs = [TensorSpec("y", "float32", ("batch", "unk__1")), TensorSpec("z", "float32", ("past + 1",))]
    assert unknown_axes(outputs, ["batch", "past"]) == ["y: unk__1"]


def test_axes_of_a_zoo_model_are_opened_and_a_file_is_left_alone() -> None:
    assert open_axes("bert-tiny", ("sequence",), {}) == {"input_ids": [1, "sequence"]}
    assert open_axes("bert-tiny", ("sequence",), {"input_ids": (2, "sequence")}) == {"input_ids": (2, "sequence")}
    assert open_axes("some/model.onnx", ("sequence",), {}) == {}
