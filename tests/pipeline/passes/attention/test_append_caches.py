from __future__ import annotations

import pytest

from relaxtune.models import OnnxModel
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import build_manifest
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.passes.attention import kernel as attention_kernel, recognise_attention
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.attention_forms import BATCH, HEADS, HIDDEN, LENGTH, SIZE, Form, cached
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, run_lowered, small_model

FP16 = LoweringOptions(precision="fp16")
HOPPER = resolve_target("cuda:sm_90a")
TOLERANCE = 2e-2


@pytest.fixture
def any_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make for a CPU what is made for Hopper, to run it here."""
    monkeypatch.setattr(LoweringState, "launches_cost", True)
    monkeypatch.setattr(recognise_attention, "has_template", lambda _target: True)
    monkeypatch.setattr(attention_kernel, "template_refusal", lambda _func, _target: None)


def notes_of(lowered: LoweredModule) -> tuple[str, ...]:
    return next(report.notes for report in lowered.reports if report.name == "append_caches")


def appends(lowered: LoweredModule) -> int:
    return sum(len(calls) for name, calls in lowered.kernels.items() if name.startswith("append"))


def several_new_tokens() -> OnnxModel:
    """A cache that grows by several positions at a time."""
    f = Form()
    q, k, v = f.qkv()
    total = (BATCH, HEADS, LENGTH + 3, SIZE)
    past = [f.input(f"past_{which}", "float", BATCH, HEADS, 3, SIZE) for which in ("key", "value")]
    key, value = (f.op("Concat", old, new, axis=2) for old, new in zip(past, (k, v), strict=True))
    product = f.op("MatMul", f.op("Softmax", f.divided(f.scores(q, key)), axis=-1), value)
    flat = f.op("Reshape", f.op("Transpose", product, perm=[0, 2, 1, 3]), [BATCH, LENGTH, HIDDEN])
    return f.model(f.linear(flat, HIDDEN, HIDDEN), (BATCH, LENGTH, HIDDEN), **{key: total, value: total})


def caches_of_two_widths() -> OnnxModel:
    f = Form()
    x = f.x(BATCH, 1, HIDDEN)
    q, k, v = (
        f.op("Transpose", f.op("Reshape", f.linear(x, HIDDEN, HEADS * d), [BATCH, 1, HEADS, d]), perm=[0, 2, 1, 3])
        for d in (SIZE, SIZE, 2 * SIZE)
    )
    key, value = (
        f.op("Concat", f.input(f"past_{which}", "float", BATCH, HEADS, LENGTH, d), new, axis=2)
        for which, new, d in (("key", k, SIZE), ("value", v, 2 * SIZE))
    )
    product = f.op("MatMul", f.op("Softmax", f.divided(f.scores(q, key)), axis=-1), value)
    flat = f.op("Reshape", f.op("Transpose", product, perm=[0, 2, 1, 3]), [BATCH, 1, 2 * HIDDEN])
    sizes = {key: (BATCH, HEADS, LENGTH + 1, SIZE), value: (BATCH, HEADS, LENGTH + 1, 2 * SIZE)}
    return f.model(f.linear(flat, 2 * HIDDEN, HIDDEN), (BATCH, 1, HIDDEN), **sizes)


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize("form", [cached, several_new_tokens, caches_of_two_widths])
def test_append_caches_writes_caches_and_their_rounded_copies_in_one_kernel(form) -> None:
    model = form()
    lowered = lower(import_model(model), LLVM, FP16)
    assert notes_of(lowered) == ("1 pairs of caches grow in one kernel each",)
    assert appends(lowered) == 1
    assert not any("concat" in name for name in lowered.kernels)
    feeds = random_inputs(model, seed=0)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize("name", ["gpt2-tiny-decode", "llama-tiny-decode"])
def test_append_caches_agrees_with_onnx_runtime_when_caches_are_half_precision(name: str) -> None:
    model = small_model(name, precision="fp16")
    lowered = lower(import_model(model), LLVM)
    assert appends(lowered) == 2
    feeds = random_inputs(model, seed=0)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


@pytest.mark.slow
def test_append_caches_is_one_launch_of_a_decode_step_on_hopper() -> None:
    options = LoweringOptions(disabled_passes=frozenset({"append_in_attention"}))
    lowered = lower(import_model(small_model("llama-tiny-decode", precision="fp16")), HOPPER.target, options)
    choices = select_kernels(
        lowered,
        extract_tasks([lowered]),
        database=None,
        target=HOPPER,
        environment=detect_environment(HOPPER),
    )
    manifest = build_manifest(compile_module(lowered, choices, HOPPER), 0.0)
    assert [kernel.launches for kernel in manifest.kernels if kernel.function.startswith("append")] == [1]
    a_layer = [
        kernel.function
        for kernel in manifest.kernels
        for call in lowered.kernels[kernel.function]
        if any(node.startswith("/model/layers.1/") for node in call.onnx_nodes)
    ]
    assert len(a_layer) == 6
    assert manifest.launches == sum(kernel.calls for kernel in manifest.kernels)


def read_between() -> OnnxModel:
    """The grown keys are read before the values have grown."""
    f = Form()
    q, k, v = f.qkv()
    past = [f.input(f"past_{which}", "float", BATCH, HEADS, 3, SIZE) for which in ("key", "value")]
    key = f.op("Concat", past[0], k, axis=2)
    weights = f.op("Softmax", f.divided(f.scores(q, key)), axis=-1)
    value = f.op("Concat", past[1], f.op("Mul", v, f.op("ReduceMean", key, keepdims=1)), axis=2)
    product = f.op("Transpose", f.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    flat = f.op("Reshape", product, [BATCH, LENGTH, HIDDEN])
    return f.model(f.linear(flat, HIDDEN, HIDDEN), (BATCH, LENGTH, HIDDEN))


@pytest.mark.usefixtures("any_target")
def test_append_caches_leaves_caches_alone_when_one_is_made_of_the_other() -> None:
    model = read_between()
    lowered = lower(import_model(model), LLVM, FP16)
    assert notes_of(lowered) == ()
    feeds = random_inputs(model, seed=0)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


@pytest.mark.parametrize(
    ("target", "options"),
    [("llvm", FP16), ("cuda:sm_90a", LoweringOptions("fp16", frozenset({"append_caches"})))],
)
def test_append_caches_leaves_the_graph_alone_when_it_is_not_for_it(target: str, options: LoweringOptions) -> None:
    lowered = lower(import_model(cached()), resolve_target(target).target, options)
    assert notes_of(lowered) == ()
    assert appends(lowered) == 0
