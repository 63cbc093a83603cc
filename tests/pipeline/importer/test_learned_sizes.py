"""Quotients of axes that a check holds to a number: patches of an image beside a table of positions."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from onnx import helper
from tvm import relax, tirx

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.importer.sizes import KnownSizes
from tests.pipeline.importer.onnx_cases import assert_agrees, make_model, random_feeds, run_relax

SIDE, OTHER = tirx.Var("side", "int64"), tirx.Var("other", "int64")
QUOTIENT = SIDE // 8
BUILDER = relax.BlockBuilder()


def patches_with_positions() -> OnnxModel:
    """Return attention over the patches of an image of any side, of which 3 x 3 and one token more have positions.

    What comes after the positions takes the number of tokens from sizes of the image again.
    """
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["patches"], kernel_shape=[4, 4], strides=[4, 4]),
        helper.make_node("Shape", ["patches"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "two"], ["side"]),
        helper.make_node("Mul", ["side", "side"], ["count"]),
        helper.make_node("Add", ["count", "one"], ["tokens"]),
        helper.make_node("Reshape", ["patches", "flat"], ["columns"]),
        helper.make_node("Transpose", ["columns"], ["rows"], perm=[0, 2, 1]),
        helper.make_node("Concat", ["token", "rows"], ["all"], axis=1),
        helper.make_node("Add", ["all", "positions"], ["placed"]),
        # Two heads of as many columns as are left, as an exporter writes them.
        helper.make_node("Unsqueeze", ["tokens", "zero"], ["tokens_1"]),
        helper.make_node("Concat", ["ones", "tokens_1", "heads"], ["split"], axis=0),
        helper.make_node("Reshape", ["placed", "split"], ["by_head"]),
        helper.make_node("Range", ["none", "tokens", "one"], ["numbers"]),
        helper.make_node("Cast", ["numbers"], ["places"], to=1),
        helper.make_node("Reshape", ["places", "as_rows"], ["place_rows"]),
        helper.make_node("Add", ["by_head", "place_rows"], ["y"]),
        # A tensor from before the check, of which the number is not in its type yet.
        helper.make_node("Neg", ["patches"], ["z"]),
    ]
    rng = np.random.default_rng(0)
    constants = {
        **{"two": np.array(2), "one": np.array(1), "none": np.array(0), "zero": np.array([0])},
        **{"flat": np.array([0, 6, -1]), "ones": np.array([1]), "heads": np.array([2, -1])},
        "as_rows": np.array([1, -1, 1, 1]),
        "token": rng.standard_normal((1, 1, 6)).astype("float32"),
        "kernel": rng.standard_normal((6, 1, 4, 4)).astype("float32"),
        "positions": rng.standard_normal((1, 10, 6)).astype("float32"),
    }
    outputs = {"y": ("float32", (1, 10, 2, 3)), "z": ("float32", (1, 6, "rows", "columns"))}
    return make_model(nodes, {"x": ("float32", (1, 1, "pixels", "pixels"))}, outputs, constants)


@pytest.mark.parametrize("pixels", [12, 15])
def test_sizes_after_a_check_are_numbers_and_results_agree(pixels: int) -> None:
    model = patches_with_positions()
    graph = assert_agrees(model, random_feeds(model, {"pixels": pixels}))
    placed, others = graph.mod["main"].ret_ty.fields
    # Before, the first was [1, q * q + 1, 2, 60 // (q * q * 2 + 2)] with q = pixels // 4.
    assert [int(size) for size in placed.shape] == [1, 10, 2, 3]
    assert [int(size) for size in others.shape] == [1, 6, 3, 3]


@pytest.mark.parametrize("pixels", [8, 16])
def test_images_of_another_number_of_patches_are_refused_when_the_model_runs(pixels: int) -> None:
    model = patches_with_positions()
    with pytest.raises(RuntimeError, match="mismatch to specified constant"):
        run_relax(import_model(model), random_feeds(model, {"pixels": pixels}))


def tensor(*shape: object) -> relax.Var:
    return relax.Var("x", relax.TensorType(list(shape), "float32"))


def learnt(before: tirx.Expr, after: int) -> KnownSizes:
    """Return what is known after a check of one axis."""
    sizes = KnownSizes()
    sizes.learn(before, tirx.IntImm("int64", after))
    return sizes


@pytest.mark.parametrize(
    ("size", "number", "quotient"),
    [
        (QUOTIENT * QUOTIENT + 1, 17, 4),
        (QUOTIENT * 3, 12, 4),
        (QUOTIENT * QUOTIENT * 2 + QUOTIENT, 21, 3),
        (QUOTIENT * QUOTIENT + 1, 18, None),  # No side has 17 patches.
        (QUOTIENT * (OTHER // 8), 16, None),  # Two unknowns.
        (QUOTIENT * OTHER, 16, None),
        (10 - QUOTIENT, 4, None),  # Not known to grow with the quotient.
        (SIDE * 2, 16, None),  # No quotient.
    ],
)
def test_a_quotient_is_known_where_it_is_all_that_a_size_is_made_of(
    size: tirx.Expr, number: int, quotient: int | None
) -> None:
    found = learnt(size, number).of(BUILDER, QUOTIENT * 5)
    assert found is not None
    if quotient is None:
        tvm.ir.assert_structural_equal(found, QUOTIENT * 5)
    else:
        assert int(found) == quotient * 5


def test_shapes_and_sizes_have_the_number_and_what_is_not_of_it_stays() -> None:
    sizes = learnt(QUOTIENT * QUOTIENT + 1, 17)
    shape = sizes.of(BUILDER, relax.ShapeExpr([SIDE, QUOTIENT, 544 // (QUOTIENT * QUOTIENT * 8 + 8)]))
    assert isinstance(shape, relax.ShapeExpr)
    assert shape.values[0].same_as(SIDE)
    assert [int(size) for size in list(shape.values)[1:]] == [4, 4]
    other = tensor(SIDE, OTHER // 8)
    assert sizes.of(BUILDER, other).same_as(other)
    condition = QUOTIENT > 3
    assert sizes.of(BUILDER, condition).same_as(condition)
    assert sizes.of(BUILDER, None) is None
