"""Sizes written as tensors stay out of groups, where they would be defined twice."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import make_model, run_reference
from tests.pipeline.passes.pass_cases import assert_agrees, run_lowered

NODE = helper.make_node


def padding_of_a_step() -> OnnxModel:
    """How torch's dynamo exporter reads the mask of a decode step: by pairs of batch and position."""
    constants = {
        **{f"n{value}": np.array(value) for value in (0, 1, 2)},
        **{f"v{value}": np.array([value]) for value in (-1, 0, 1)},
        "columns": np.array([1, 2, 3]),
    }
    nodes = [
        NODE("Shape", ["past"], ["sizes"]),
        NODE("Gather", ["sizes", "n0"], ["batch"]),
        NODE("Gather", ["sizes", "n2"], ["length"]),
        NODE("Add", ["length", "n1"], ["total"]),
        NODE("Range", ["n0", "batch", "n1"], ["rows"]),
        NODE("Range", ["n0", "total", "n1"], ["places"]),
        NODE("Unsqueeze", ["rows", "columns"], ["row"]),
        NODE("Unsqueeze", ["places", "v0"], ["place"]),
        NODE("Unsqueeze", ["batch", "v0"], ["batch_vector"]),
        NODE("Unsqueeze", ["total", "v0"], ["total_vector"]),
        NODE("Concat", ["batch_vector", "v1", "v1", "total_vector"], ["shape"], axis=0),
        NODE("Expand", ["row", "shape"], ["all_rows"]),
        NODE("Expand", ["place", "shape"], ["all_places"]),
        NODE("Unsqueeze", ["all_rows", "v-1"], ["first"]),
        NODE("Unsqueeze", ["all_places", "v-1"], ["second"]),
        NODE("Concat", ["first", "second"], ["pairs"], axis=-1),
        NODE("GatherND", ["mask", "pairs"], ["y"]),
    ]
    return make_model(
        nodes,
        {"mask": ("int64", ("batch", "seen")), "past": ("float32", ("batch", 4, "length"))},
        {"y": ("int64", ("batch", 1, 1, "total"))},
        constants,
    )


def test_a_size_beside_an_output_of_that_size_agrees_with_onnx_runtime() -> None:
    model = padding_of_a_step()
    lowered = lower(import_model(model), resolve_target("llvm").target)
    for batch, length in ((1, 1), (3, 6)):
        mask = np.random.default_rng(0).integers(0, 2, (batch, length + 1))
        feeds = {"mask": mask, "past": np.zeros((batch, 4, length), "float32")}
        assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 0.0)


def test_without_the_pass_tvm_refuses_the_group() -> None:
    options = LoweringOptions(disabled_passes=frozenset({"keep_sizes_apart"}))
    with pytest.raises(LoweringError, match="fuse_tir"):
        lower(import_model(padding_of_a_step()), resolve_target("llvm").target, options)


def place_of_a_step(*, rows: bool) -> OnnxModel:
    """The angles of one token behind a cache, or with `rows` of several."""
    nodes = [
        NODE("Shape", ["past"], ["sizes"]),
        NODE("Gather", ["sizes", "v1"], ["length"]),
        NODE("Cast", ["length"], ["place"], to=1),
        NODE("Mul", ["place", "frequencies"], ["token"]),
    ]
    if rows:
        nodes += [
            NODE("Shape", ["ids"], ["two"]),
            NODE("Gather", ["two", "n1"], ["count"]),
            NODE("Range", ["n0", "count", "n1"], ["counted"]),
            NODE("Add", ["counted", "length"], ["places"]),
            NODE("Unsqueeze", ["places", "v1"], ["column"]),
            NODE("Cast", ["column"], ["floats"], to=1),
            NODE("Mul", ["floats", "frequencies"], ["angles"]),
        ]
    last = "angles" if rows else "token"
    nodes.append(NODE("Cos", [last], ["y"]))
    constants = {
        "v1": np.array([1]), "n0": np.array(0), "n1": np.array(1),
        "frequencies": np.array([1.0, 0.5, 0.25], "float32"),
    }  # fmt: skip
    inputs = {"ids": ("int64", ("batch", "tokens")), "past": ("float32", ("batch", "length", 4))}
    shape = ("tokens", 3) if rows else (3,)
    return make_model(nodes, inputs, {"y": ("float32", shape)}, constants)


def mask_of_heads() -> OnnxModel:
    """A causal mask behind a cache, beside what is computed of each head's row: Bloom's, by Optimum."""
    nodes = [
        NODE("Shape", ["past"], ["sizes"]),
        NODE("Gather", ["sizes", "n1"], ["length"]),
        NODE("Shape", ["ids"], ["two"]),
        NODE("Gather", ["two", "n1"], ["count"]),
        NODE("Add", ["length", "count"], ["total"]),
        NODE("Range", ["n0", "total", "n1"], ["keys"]),
        NODE("Range", ["n0", "count", "n1"], ["tokens"]),
        NODE("Add", ["tokens", "length"], ["places"]),
        NODE("Unsqueeze", ["places", "v1"], ["queries"]),
        NODE("LessOrEqual", ["keys", "queries"], ["before"]),
        NODE("Unsqueeze", ["mask", "columns"], ["kept"]),
        NODE("And", ["before", "kept"], ["seen"]),
        NODE("Where", ["seen", "zero", "hidden"], ["scores"]),
        NODE("Reshape", ["rows", "by_head"], ["of_heads"]),
        NODE("Add", ["of_heads", "scores"], ["y"]),
    ]
    constants = {
        "n0": np.array(0), "n1": np.array(1), "v1": np.array([1]), "columns": np.array([1, 2]),
        "by_head": np.array([-1, 2, 1, 1]), "zero": np.array(0.0, "float32"), "hidden": np.array(-9.0, "float32"),
    }  # fmt: skip
    inputs: dict[str, tuple[str, tuple[object, ...]]] = {
        "mask": ("bool", ("batch", "past + count")),
        "ids": ("int64", ("batch", "count")),
        "past": ("float32", ("batch", "past", 4)),
        "rows": ("float32", ("2*batch", 1)),
    }
    return make_model(nodes, inputs, {"y": ("float32", ("batch", 2, "count", "past + count"))}, constants)


def test_a_size_beside_a_count_of_no_input_is_a_kernel_of_its_own() -> None:
    model = mask_of_heads()
    lowered = lower(import_model(model), resolve_target("llvm").target)
    assert sum(map(len, lowered.kernels.values())) == 3
    generator = np.random.default_rng(0)
    for batch, past, count in ((1, 3, 1), (3, 2, 4)):
        feeds = {
            "mask": generator.random((batch, past + count)) > 0.5,
            "ids": np.zeros((batch, count), "int64"),
            "past": np.zeros((batch, past, 4), "float32"),
            "rows": generator.standard_normal((2 * batch, 1)).astype("float32"),
        }
        assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-6)


@pytest.mark.parametrize(("rows", "kernels"), [(False, 1), (True, 2)])
def test_a_size_is_part_of_the_kernel_that_reads_it_unless_an_axis_is_of_no_input(rows: bool, kernels: int) -> None:
    model = place_of_a_step(rows=rows)
    lowered = lower(import_model(model), resolve_target("llvm").target)
    assert sum(map(len, lowered.kernels.values())) == kernels
    for batch, length, tokens in ((1, 1, 1), (2, 6, 3)):
        feeds = {"ids": np.zeros((batch, tokens), "int64"), "past": np.zeros((batch, length, 4), "float32")}
        assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-6)
