"""Tile and OneHot with symbolic sizes, and small integers that only the conversion knows."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from tests.pipeline.importer.onnx_cases import assert_agrees, make_model

NODE = helper.make_node
FIRST, LAST = {"first": np.array([0])}, {"last": np.array([1])}


@pytest.mark.parametrize("rows", [1, 3])
def test_tile_agrees_when_its_repeats_are_sizes(rows: int) -> None:
    model = make_model(
        [
            NODE("Shape", ["x"], ["sizes"]),
            NODE("Gather", ["sizes", "first"], ["rows"]),
            NODE("Concat", ["rows", "two"], ["repeats"], axis=0),
            NODE("Tile", ["table", "repeats"], ["tiled"]),
            NODE("MatMul", ["tiled", "weight"], ["y"]),
        ],
        {"x": ("float32", ("rows", 4)), "table": ("float32", (3, 2))},
        {"y": ("float32", ("tiled_rows", 5))},
        {**FIRST, "two": np.array([2]), "weight": np.ones((4, 5), "float32")},
    )
    table = np.random.default_rng(0).standard_normal((3, 2)).astype("float32")
    assert_agrees(model, {"x": np.zeros((rows, 4), "float32"), "table": table})


@pytest.mark.parametrize("repeats", [[1, 2, 1], [3, 1, 2]])
def test_tile_of_a_symbolic_size_agrees(repeats: list[int]) -> None:
    model = make_model(
        [
            NODE("Sigmoid", ["x"], ["half"]),
            NODE("Tile", ["half", "repeats"], ["tiled"]),
            NODE("Tanh", ["tiled"], ["y"]),
        ],
        {"x": ("float32", ("rows", 2, 3))},
        {"y": ("float32", ("tiled_rows", 2 * repeats[1], 3 * repeats[2]))},
        {"repeats": np.array(repeats)},
    )
    for rows in (1, 4):
        assert_agrees(model, {"x": np.random.default_rng(0).standard_normal((rows, 2, 3)).astype("float32")})


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("depth", [4, "columns"])
def test_one_hot_agrees_when_values_are_computed(axis: int, depth: int | str) -> None:
    columns = 5
    size = depth if isinstance(depth, int) else columns
    shape = [2, 3]
    shape.insert(axis % 3, size)
    symbolic: list[int | str] = [depth if place == axis % 3 else item for place, item in enumerate(shape)]
    given = {"four": np.array(4)} if depth == 4 else LAST
    model = make_model(
        [
            NODE("Shape", ["x"], ["sizes"]),
            *([] if depth == 4 else [NODE("Gather", ["sizes", "last"], ["depth"])]),
            NODE("Concat", ["off", "on"], ["values"], axis=0),
            NODE("OneHot", ["indices", "four" if depth == 4 else "depth", "values"], ["y"], axis=axis),
        ],
        {
            "x": ("float32", (2, "columns")),
            "indices": ("int64", (2, 3)),
            "off": ("float32", (1,)),
            "on": ("float32", (1,)),
        },
        {"y": ("float32", symbolic)},
        given,
    )
    feeds = {
        "x": np.zeros((2, columns), "float32"),
        # Negative ones count from the end; 9 has no place.
        "indices": np.array([[0, -1, 3], [9, 2, -size]]),
        "off": np.array([0.25], "float32"),
        "on": np.array([-3.0], "float32"),
    }
    assert_agrees(model, feeds)


def test_small_integers_known_at_conversion_become_constants() -> None:
    # The last size of a tensor whose first is symbolic, through operators that shape arithmetic does not know.
    model = make_model(
        [
            NODE("Shape", ["x"], ["sizes"]),
            NODE("Gather", ["sizes", "last"], ["width"]),
            NODE("Concat", ["one", "width"], ["pair"], axis=0),
            NODE("OneHot", ["one", "three", "pair"], ["hot"]),
            NODE("Squeeze", ["hot", "zero"], ["repeats"]),
            NODE("Tile", ["table", "repeats"], ["y"]),
        ],
        {"x": ("float32", ("rows", 4)), "table": ("float32", (2, 1, 3))},
        {"y": ("float32", (2, 4, 3))},
        {**LAST, "one": np.array([1]), "three": np.array(3), "zero": np.array([0])},
    )
    table = np.random.default_rng(0).standard_normal((2, 1, 3)).astype("float32")
    graph = assert_agrees(model, {"x": np.zeros((2, 4), "float32"), "table": table})
    assert "shape_to_tensor" not in graph.mod.script()
