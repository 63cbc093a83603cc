from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.passes.kit.sizes import Shape, group_axes
from relaxtune.polynomials import Polynomial
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import make_model, run_reference
from tests.pipeline.passes.attention.test_symbolic_attention import SIZES, symbolic_model
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, compiled, run_compiled, run_lowered, small_model

B, S = Polynomial.symbol("batch"), Polynomial.symbol("sequence")


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [
        ((B, S, 128), (B, S, 2, 64), [((0,), (0,)), ((1,), (1,)), ((2,), (2, 3))]),
        ((B, S, 2, 64), (B, S, 128), [((0,), (0,)), ((1,), (1,)), ((2, 3), (2,))]),
        ((B, S, 8), (B * S, 8), [((0, 1), (0,)), ((2,), (1,))]),
        ((B * 4, S), (B, 4, 1, S), [((0,), (0, 1)), ((1,), (3,))]),
        ((B, 6, S), (B, S, 3, 2), [((0,), (0,)), ((1, 2), (1, 2, 3))]),
        ((B, S), (B, S + 1), None),
        ((B, S), (S, B), [((0, 1), (0, 1))]),
    ],
)
def test_group_axes_finds_the_smallest_groups(before: Shape, after: Shape, groups: object) -> None:
    assert group_axes(before, after) == groups


def test_a_slice_from_a_symbolic_place_on_is_part_of_what_reads_it() -> None:
    nodes = [
        helper.make_node("Shape", ["past"], ["sizes"]),
        helper.make_node("Slice", ["sizes", "v1", "v2"], ["length"]),
        helper.make_node("Sigmoid", ["x"], ["half"]),
        helper.make_node("Slice", ["half", "length", "last", "v1"], ["cut"]),
        helper.make_node("Mul", ["cut", "new"], ["y"]),
    ]
    constants = {"v1": np.array([1]), "v2": np.array([2]), "last": np.array([2**62])}
    inputs: dict[str, tuple[str, tuple[object, ...]]] = {
        "x": ("float32", ("batch", "past + count", 3)),
        "past": ("float32", ("batch", "past", 3)),
        "new": ("float32", ("batch", "count", 3)),
    }
    model = make_model(nodes, inputs, {"y": ("float32", ("batch", "count", 3))}, constants)
    lowered = lower(import_model(model), LLVM)
    assert sum(map(len, lowered.kernels.values())) == 1
    for past, count in ((0, 1), (3, 1), (2, 4)):
        x = np.random.default_rng(0).standard_normal((2, past + count, 3)).astype("float32")
        feeds = {"x": x, "past": x[:, :past], "new": x[:, past:]}
        assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-6)


@pytest.mark.quick_cases("bert-tiny")
@pytest.mark.parametrize("name", ["bert-tiny", "llama-tiny", "gpt2-tiny-decode"])
def test_symbolic_graph_has_no_more_kernels_than_the_static_one(name: str) -> None:
    """Attention of symbolic lengths is one kernel on a CPU, which outweighs a mask that is a constant otherwise."""
    lowered = lower(import_model(symbolic_model(name)), LLVM)
    static = lower(import_model(small_model(name)), LLVM)
    assert sum(map(len, lowered.kernels.values())) <= sum(map(len, static.kernels.values()))
    machine = compiled(lowered)
    for sizes in SIZES:
        model = lowered.graph.model
        feeds = random_inputs(model, seed=2, dims=sizes)
        assert_agrees(run_compiled(machine, lowered, feeds), run_reference(model, feeds), 1e-4)


@pytest.mark.quick_cases("bert-tiny-0", "llama-tiny-decode-0")
@pytest.mark.parametrize(
    ("name", "more"), [("bert-tiny", 0), ("vit-tiny", 0), ("llama-tiny", 2), ("llama-tiny-decode", 0)]
)
def test_symbolic_graph_has_few_kernels_on_hopper(name: str, more: int) -> None:
    """All is found as in the static graph, where rotations of few rows are part of the matmul: one a layer more."""
    target, options = resolve_target("cuda:sm_90a").target, LoweringOptions(precision="fp16")
    symbolic, static = (
        lower(import_model(model), target, options) for model in (symbolic_model(name), small_model(name))
    )
    kernels, expected = (sum(map(len, lowered.kernels.values())) for lowered in (symbolic, static))
    assert kernels <= expected + more, list(symbolic.kernels)
