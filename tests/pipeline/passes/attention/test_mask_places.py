"""Masks that attention reads out of less than they are: a table of distances, the windows of one image."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from tvm import relax

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.passes.attention import kernel as attention_kernel, recognise_attention
from relaxtune.pipeline.passes.attention.kernel_mask import Masking
from relaxtune.pipeline.passes.attention.read_mask import Condition
from relaxtune.pipeline.passes.symbolic import functions_of_positions
from relaxtune.schedules.functions.attention import AttentionSpec, ScoreBias, spec_of
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import make_model, run_reference
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, run_lowered
from tests.pipeline.passes.symbolic.test_tabulate_positions import NODE, NUMBERS, counted, random_of, relative_bias

FP16 = LoweringOptions(precision="fp16")
WINDOWS, TOKENS = 4, 9
PLACES = np.random.default_rng(3)
PROJECTION = {"projection": PLACES.standard_normal((8, 8)).astype("float32")}


@pytest.fixture
def any_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recognise attention for a CPU too."""
    monkeypatch.setattr(recognise_attention, "has_template", lambda _target: True)
    monkeypatch.setattr(attention_kernel, "template_refusal", lambda _func, _target: None)


def spec_in(lowered: LoweredModule) -> AttentionSpec:
    (spec,) = [spec for name in lowered.kernels if (spec := spec_of(lowered.mod[name])) is not None]
    return spec


def attention(scores: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes around some that make `scores` of `products`, of q, k and v [batch, heads, length, 8]."""
    return [
        NODE("Transpose", ["k"], ["k_turned"], perm=[0, 1, 3, 2]),
        NODE("MatMul", ["q", "k_turned"], ["products"]),
        *scores,
        NODE("Softmax", ["scores"], ["weights"], axis=-1),
        NODE("MatMul", ["weights", "v"], ["values"]),
        NODE("MatMul", ["values", "projection"], ["weighted"]),
    ]


def of_distances(*, causal: bool) -> OnnxModel:
    """T5's decoder, where a query sees no later key, or its encoder without a mask."""
    nodes, constants = relative_bias("q")
    seen = [
        NODE("LessOrEqual", ["keys", "queries"], ["sees"]),
        NODE("Where", ["sees", "bias", "hidden"], ["masked"]),
        NODE("Add", ["products", "masked"], ["scores"]),
    ]
    shape = ("float32", ("batch", 2, "length", 8))
    model = [*nodes, *attention(seen if causal else [NODE("Add", ["products", "bias"], ["scores"])])]
    constants["hidden"] = np.array(np.finfo("float32").min)
    return make_model(model, dict.fromkeys("qkv", shape), {"weighted": shape}, constants | PROJECTION)


def of_one_query() -> OnnxModel:
    """T5's decode step: the distances of the keys of a cache from the token behind them."""
    _, constants = relative_bias("k")
    nodes = [
        *counted("k", "n2", "places"),
        NODE("Shape", ["k"], ["k_sizes"]),
        NODE("Gather", ["k_sizes", "n2"], ["k_length"]),
        NODE("Sub", ["k_length", "n1"], ["last"]),
        NODE("Sub", ["last", "places"], ["distance"]),
        NODE("Cast", ["distance"], ["real"], to=onnx.TensorProto.FLOAT),
        NODE("Add", ["real", "quarter"], ["more"]),
        NODE("Log", ["more"], ["log"]),
        NODE("Cast", ["log"], ["whole"], to=onnx.TensorProto.INT64),
        NODE("Min", ["whole", "seven"], ["bucket"]),
        NODE("Gather", ["weight", "bucket"], ["looked_up"]),
        NODE("Transpose", ["looked_up"], ["turned"], perm=[1, 0]),
        NODE("Unsqueeze", ["turned", "v1"], ["bias"]),
    ]
    one, cache = (("float32", ("batch", 2, length, 8)) for length in (1, "past"))
    model = [*nodes, *attention([NODE("Add", ["products", "bias"], ["scores"])])]
    return make_model(model, {"q": one, "k": cache, "v": cache}, {"weighted": one}, constants | PROJECTION)


def of_windows(*, apart: bool) -> OnnxModel:
    """Swin: the windows of an image have a bias, and each its own mask, added with the images as an axis or not."""
    mask = np.where(PLACES.random((1, WINDOWS, 1, TOKENS, TOKENS)) < 0.3, -100.0, 0.0).astype("float32")
    bias = PLACES.standard_normal((1, 2, TOKENS, TOKENS)).astype("float32")
    constants = {**NUMBERS, **PROJECTION, "mask": mask, "bias": bias, "rest": np.array([WINDOWS, 1, TOKENS, TOKENS])}
    constants |= {"flat": np.array([-1, 1, TOKENS, TOKENS]), "together": np.array([-1, 2, TOKENS, TOKENS])}
    constants |= {"tokens": np.array([-1, 2, TOKENS, 8]), "split": np.array([-1, WINDOWS, 2, TOKENS, TOKENS])}
    joined = [
        NODE("Shape", ["x"], ["sizes"]),
        NODE("Gather", ["sizes", "v0"], ["images"]),
        NODE("Concat", ["images", "rest"], ["copies"], axis=0),
        NODE("Expand", ["mask", "copies"], ["of_all"]),
        NODE("Reshape", ["of_all", "flat"], ["of_windows"]),
        NODE("Add", ["bias", "of_windows"], ["both"]),
        NODE("Add", ["products", "both"], ["scores"]),
    ]
    by_image = [
        NODE("Reshape", ["products", "split"], ["by_image"]),
        NODE("Add", ["by_image", "mask"], ["masked"]),
        NODE("Reshape", ["masked", "together"], ["scores"]),
    ]
    nodes = [NODE("Reshape", ["x", "tokens"], [name]) for name in "qkv"]
    shape = ("float32", ("batch", WINDOWS, 2, TOKENS, 8))
    output = ("float32", ("windows", 2, TOKENS, 8))
    return make_model(
        [*nodes, *attention(by_image if apart else joined)], {"x": shape}, {"weighted": output}, constants
    )


@pytest.mark.quick_cases("64-True", "40-False")
@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("positions", [64, 40])
def test_distances_are_read_along_the_diagonals_of_their_table(
    causal: bool, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions_of_positions, "POSITIONS", positions)
    model = of_distances(causal=causal)
    lowered = lower(import_model(model), LLVM, FP16)
    spec, places = spec_in(lowered), 2 * positions - 1
    assert spec.causal == causal
    assert spec.bias == ScoreBias(3, "add", 0, places, -1, 1, offset=positions - 1, limit=places - 1)
    assert not any("table" in name for name in lowered.kernels)
    for length in (1, 9, 70):
        feeds = random_of(**dict.fromkeys("qkv", (2, 2, length, 8)))
        assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 2e-2)


@pytest.mark.usefixtures("any_target")
def test_distances_of_one_query_are_read_from_a_place_that_a_call_knows() -> None:
    model = of_one_query()
    lowered = lower(import_model(model), LLVM, FP16)
    bias = spec_in(lowered).bias
    assert bias is not None
    assert (bias.query_stride, abs(int(bias.key_stride)), bias.limit > 0) == (0, 1, True)
    assert not any("table" in name for name in lowered.kernels)
    for past in (1, 9, 70):
        shapes = {"q": (2, 2, 1, 8)} | dict.fromkeys("kv", (2, 2, past, 8))
        feeds = random_of(**shapes)
        assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 2e-2)


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize("apart", [True, False])
def test_masks_of_windows_are_not_repeated_for_each_image(apart: bool) -> None:
    model = of_windows(apart=apart)
    lowered = lower(import_model(model), LLVM, FP16)
    bias = spec_in(lowered).bias
    assert bias is not None
    assert (bias.period, bias.head_stride) == (WINDOWS, 0 if apart else TOKENS * TOKENS)
    assert not any("broadcast" in name or "add" in name for name in lowered.kernels)
    for images in (1, 3):
        feeds = random_of(x=(images, WINDOWS, 2, TOKENS, 8))
        assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 2e-2)


@pytest.mark.quick_cases("model0")
@pytest.mark.parametrize("model", [of_distances(causal=True), of_one_query(), of_windows(apart=False)])
def test_templates_take_masks_where_they_lie(model: OnnxModel) -> None:
    lowered = lower(import_model(model), resolve_target("cuda:sm_90a").target, FP16)
    bias = spec_in(lowered).bias
    assert bias is not None
    assert bias != replace(bias, offset=0, limit=0, period=0)


def test_masks_that_are_the_same_view_are_one_tensor() -> None:
    """Layers that share a mask have it made once, though each takes its own view of it."""

    def key(mask: relax.Var) -> tuple[object, ...]:
        view = relax.BlockBuilder().normalize(relax.op.reshape(mask, relax.ShapeExpr([WINDOWS, 1, TOKENS, TOKENS])))
        return Masking(addends=((view, 1.0),), conditions=(Condition(view),)).key()

    mask, other = (relax.Var("mask", relax.TensorType((1, WINDOWS, TOKENS, TOKENS), "float32")) for _ in range(2))
    assert key(mask) == key(mask)
    assert key(mask) != key(other)
