from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.norms import fuse_norms
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.schedules.registry import list_candidates
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.matmul import recognise_matmul
from relaxtune.tuning_db.records import Route
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.attention_forms import Form
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, run_lowered, small_model

FP16 = LoweringOptions(precision="fp16")
OFF = LoweringOptions(precision="fp16", disabled_passes=frozenset({"fuse_norms"}))
ROWS, HIDDEN, WIDE = (2, 3), 32, 64


@pytest.fixture
def any_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make for a CPU what is made for Hopper, to run it here."""
    monkeypatch.setattr(LoweringState, "launches_cost", True)
    monkeypatch.setattr(fuse_norms, "template_refusal", lambda _func, _target: None)


def notes_of(lowered: LoweredModule) -> tuple[str, ...]:
    return next(report.notes for report in lowered.reports if report.name == "fuse_norms")


def kernels(lowered: LoweredModule) -> int:
    return sum(map(len, lowered.kernels.values()))


@pytest.mark.quick_cases("rounded-llama-tiny-4", "half-bert-tiny-3")
@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize(("name", "fused"), [("bert-tiny", 3), ("gpt2-tiny", 4), ("llama-tiny", 4), ("vit-tiny", 3)])
@pytest.mark.parametrize("graph", ["rounded", "half"])
def test_fuse_norms_agrees_with_onnx_runtime_and_saves_a_kernel_a_norm(name: str, fused: int, graph: str) -> None:
    model = small_model(name, precision="fp16" if graph == "half" else None)
    on, off = (
        lower(import_model(model), LLVM, LoweringOptions(None if graph == "half" else "fp16", disabled_passes=passes))
        for passes in (frozenset[str](), frozenset({"fuse_norms"}))
    )
    if graph == "rounded":
        assert notes_of(on) == (f"{fused} norms in the matmuls around them",)
    assert kernels(off) - kernels(on) == int(notes_of(on)[0].split()[0])
    feeds = random_inputs(model, seed=0)
    assert_agrees(run_lowered(on, feeds), run_reference(model, feeds), 2e-2)


@pytest.mark.quick_cases("llama-tiny-4")
@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize(("name", "fused"), [("bert-tiny", 3), ("llama-tiny", 4)])
def test_fuse_norms_takes_as_many_norms_of_symbolic_rows(name: str, fused: int) -> None:
    model = load_model(name, shapes={spec.name: spec.shape for spec in get_preset(name).inputs})
    on = lower(import_model(model), LLVM, FP16)
    assert notes_of(on) == (f"{fused} norms in the matmuls around them",)
    feeds = random_inputs(model, seed=0, dims={"batch": 2, "sequence": 7})
    assert_agrees(run_lowered(on, feeds), run_reference(model, feeds), 2e-2)


def layer(
    f: Form, x: str, *, gamma: Sequence[float] | None = None, offset: float = 0.0, hidden: int = HIDDEN
) -> tuple[str, str]:
    """Return rows that a matmul writes, and their layer norm."""
    rows = f.op("Add", f.op("MatMul", x, f.weight(hidden, hidden)), f.weight(hidden) + offset)
    scale = np.asarray(gamma if gamma is not None else 1 + f.weight(hidden))
    return rows, f.op("LayerNormalization", rows, scale, f.weight(hidden), axis=-1, epsilon=1e-5)


def post_norm(rows: Sequence[int | str] = ROWS, hidden: int = HIDDEN, **options: object) -> OnnxModel:
    """Return x1 = norm(x P + p); x1 V + v; and the sum with x1, as in BERT."""
    f = Form()
    _, normed = layer(f, f.x(*rows, hidden), hidden=hidden, **options)
    up = f.op("Relu", f.linear(normed, hidden, WIDE))
    return f.model(f.op("Add", f.linear(up, WIDE, hidden), normed), (*rows, hidden))


def feeds(*shape: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal(shape or (*ROWS, HIDDEN)).astype("float32")}


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize("hidden", [16, 48, 80])
def test_norms_of_narrow_rows_of_any_number_agree(hidden: int) -> None:
    """Of 16 or 48 columns there is no wide group; before, norms of a symbolic number of them stayed apart."""
    model = post_norm(("batch", 3), hidden)
    lowered = lower(import_model(model), LLVM, FP16)
    assert notes_of(lowered) == ("1 norms in the matmuls around them",)
    for batch in (1, 2, 300):
        x = feeds(batch, 3, hidden)
        assert_agrees(run_lowered(lowered, x), run_reference(model, x), 2e-2)


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80"])
@pytest.mark.parametrize("hidden", [16, 48, 368])
def test_narrow_rows_of_any_number_have_no_more_kernels_than_few(target: str, hidden: int) -> None:
    known, symbolic = (
        lower(import_model(post_norm((batch, 3), hidden)), resolve_target(target).target, FP16)
        for batch in (2, "batch")
    )
    assert notes_of(symbolic) == notes_of(known) == ("1 norms in the matmuls around them",)
    assert kernels(symbolic) == kernels(known)


@pytest.mark.parametrize(("batch", "fused"), [(2, 1), (200, 0), ("batch", 0)])
def test_long_rows_of_narrow_groups_keep_their_norm_where_they_may_be_many(batch: int | str, fused: int) -> None:
    model = post_norm((batch, 3), 528)
    lowered = lower(import_model(model), resolve_target("cuda:sm_90a").target, FP16)
    assert len(notes_of(lowered)) == fused


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize("offset", [0.0, 30.0], ids=["centred rows", "rows far from zero"])
def test_fuse_norms_agrees_when_the_mean_is_large_as_without_it(offset: float) -> None:
    model = post_norm(offset=offset)
    right = run_reference(model, feeds())[0]
    on, off = (run_lowered(lower(import_model(model), LLVM, options), feeds())[0] for options in (FP16, OFF))
    errors = [np.abs(found - right).max() for found in (on, off)]
    assert errors[0] < 2 * errors[1] + 1e-3


@pytest.mark.usefixtures("any_target")
def test_statistics_are_written_once_and_read_where_the_norm_was_added() -> None:
    lowered = lower(import_model(post_norm()), LLVM, FP16)
    found = [recognise_matmul(lowered.mod[name]) for name in lowered.kernels]
    matmuls = [one for one in found if isinstance(one, MatmulFunction)]
    assert [one.partials is not None for one in matmuls] == [True, False, False]
    assert [one.norm is not None and one.norm.output is not None for one in matmuls] == [False, True, False]
    assert len(lowered.kernels) == 4, "the input's rounding, three matmuls"


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize("case", ["result", "before", "overflow", "shared", "no matmul before"])
def test_fuse_norms_leaves_a_norm_that_others_need(case: str) -> None:
    f = Form()
    x = f.x(*ROWS, HIDDEN)
    gamma = [6e4] * HIDDEN if case == "overflow" else None
    _, normed = layer(f, x, gamma=gamma) if case != "no matmul before" else (x, normed_input(f, x))
    extra: dict[str, tuple[int, ...]] = {}
    if case == "before":
        # Added before anything multiplies it: nobody has the statistics yet.
        first = f.op("Add", f.linear(x, HIDDEN, HIDDEN), normed)
        result = f.op("Add", f.linear(f.op("Relu", first), HIDDEN, HIDDEN), f.linear(normed, HIDDEN, HIDDEN))
        extra = {first: (*ROWS, HIDDEN)}
    elif case == "overflow":
        result = f.op("MatMul", normed, 8 * f.weight(HIDDEN, HIDDEN))
    elif case == "shared":
        weight = f.constant(f.weight(HIDDEN, HIDDEN))
        result = f.op("Add", f.op("Relu", f.op("MatMul", normed, weight)), f.op("MatMul", f.op("Tanh", x), weight))
    else:
        result = f.linear(normed, HIDDEN, HIDDEN)
        extra = {normed: (*ROWS, HIDDEN)} if case == "result" else {}
    model = f.model(result, (*ROWS, HIDDEN), **extra)
    lowered = lower(import_model(model), LLVM, FP16)
    assert notes_of(lowered) == ()
    if case != "overflow":
        assert_agrees(run_lowered(lowered, feeds()), run_reference(model, feeds()), 2e-2)


def normed_input(f: Form, x: str) -> str:
    return f.op("LayerNormalization", f.op("Tanh", x), 1 + f.weight(HIDDEN), f.weight(HIDDEN), axis=-1)


@pytest.mark.quick_cases("cuda:sm_90a")
@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80", "cuda:sm_120"])
def test_fuse_norms_leaves_five_launches_a_layer_of_bert(target: str) -> None:
    shapes = {spec.name: (1, 24) for spec in get_preset("bert-tiny").inputs}
    graph = import_model(load_model("bert-tiny", shapes=shapes))
    on, off = (lower(graph, resolve_target(target).target, options) for options in (FP16, OFF))
    assert kernels(off) - kernels(on) == 3
    nodes = {node for name in on.kernels for call in on.kernels[name] for node in call.onnx_nodes}
    assert nodes == {node for name in off.kernels for call in off.kernels[name] for node in call.onnx_nodes}


@pytest.mark.parametrize(("text", "template"), [("cuda:sm_90a", "gemm_sm90"), ("cuda:sm_80", "gemv_stream")])
def test_fuse_norms_takes_norms_of_few_rows_into_the_matmuls_that_are_made_first(text: str, template: str) -> None:
    target = resolve_target(text)
    lowered = lower(import_model(small_model("llama-tiny-decode")), target.target, FP16)
    assert notes_of(lowered) == ("4 norms in the matmuls around them",)
    normed = [name for name in lowered.kernels if name.endswith("_norms")]
    assert {list_candidates(lowered.mod[name], target)[0][0].template for name in normed} == {template}


@pytest.mark.parametrize("rows", [4, 16, 17])
def test_fuse_norms_takes_norms_of_several_sequences_on_mma_sync(rows: int) -> None:
    model = small_model("llama-tiny-decode", batch=rows)
    lowered = lower(import_model(model), resolve_target("cuda:sm_80").target, FP16)
    assert any(name.endswith("_norms") for name in lowered.kernels)


def test_fuse_norms_is_off_where_templates_are() -> None:
    request = ModelRequest(
        "bert-tiny", target="cuda:sm_90a", lowering=FP16, routes=frozenset({Route.METASCHEDULE, Route.FALLBACK})
    )
    assert not any(name.endswith("_norms") for name in prepare_model(request).lowered.kernels)


@pytest.mark.parametrize("target", ["llvm", "cuda:sm_75"])
def test_fuse_norms_does_nothing_where_no_template_makes_it(target: str) -> None:
    lowered = lower(import_model(small_model("bert-tiny")), resolve_target(target).target, FP16)
    assert notes_of(lowered) == ()
