from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tvm import tirx

from relaxtune.models import OnnxModel
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.passes.attention import kernel as attention_kernel, recognise_attention
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.pipeline.tasks.routes import DEFAULT_ROUTES
from relaxtune.schedules.functions.attention import AttentionSpec, spec_of
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Route
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.attention_forms import (
    BATCH,
    FORMS,
    HEADS,
    HIDDEN,
    LENGTH,
    SIZE,
    Expected,
    Form,
    plain,
    sliding_window,
)
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, run_lowered, small_model

FP16 = LoweringOptions(precision="fp16")
TOLERANCE = 2e-2
FORMS_BY_NAME = {form.__name__: form for form in FORMS}


@pytest.fixture
def any_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recognise attention for a CPU too: its PrimFunc is right everywhere, and a CPU is what is here to run it."""
    monkeypatch.setattr(recognise_attention, "has_template", lambda _target: True)
    monkeypatch.setattr(attention_kernel, "template_refusal", lambda _func, _target: None)


def specs_of(lowered: LoweredModule) -> list[AttentionSpec]:
    functions = [lowered.mod[name] for name in lowered.kernels]
    found = [spec_of(func) for func in functions if isinstance(func, tirx.PrimFunc)]
    return [spec for spec in found if spec is not None]


def notes_of(lowered: LoweredModule) -> tuple[str, ...]:
    return next(report.notes for report in lowered.reports if report.name == "recognise_attention")


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize(("form", "expected"), FORMS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_recognise_attention_agrees_with_onnx_runtime_in_every_form(
    form: Callable[[], OnnxModel], expected: Expected
) -> None:
    model = form()
    lowered = lower(import_model(model), LLVM, FP16)
    assert notes_of(lowered) == ("1 attentions recognised",)
    (spec,) = specs_of(lowered)
    got = (spec.causal, spec.window, spec.kv_heads, spec.bias.kind if spec.bias else None)
    assert got == (expected.causal, expected.window, expected.kv_heads, expected.bias)
    assert spec.scale == pytest.approx(SIZE**-0.5 if form.__name__ != "relative_bias_and_padding" else 1.0)
    # One kernel more rounds the input.
    assert sum(map(len, lowered.kernels.values())) - 1 == expected.kernels, list(lowered.kernels)
    feeds = random_inputs(model, seed=1)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize("name", ["gpt2-tiny-decode", "t5-tiny"])
def test_recognise_attention_agrees_with_onnx_runtime_when_model_is_of_the_zoo(name: str) -> None:
    model = small_model(name)
    lowered = lower(import_model(model), LLVM, FP16)
    assert notes_of(lowered) == ("2 attentions recognised",)
    feeds = random_inputs(model, seed=0)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-tiny", "llama-tiny", "llama-tiny-decode", "vit-tiny"])
def test_recognise_attention_finds_every_layer_when_model_is_of_the_zoo(name: str) -> None:
    lowered = lower(import_model(small_model(name)), resolve_target("cuda:sm_90a").target, FP16)
    assert notes_of(lowered) == ("2 attentions recognised",)
    assert not any("softmax" in kernel for kernel in lowered.kernels)
    assert [spec.causal for spec in specs_of(lowered)] == [name in ("gpt2-tiny", "llama-tiny")]


@pytest.mark.usefixtures("any_target")
def test_recognise_attention_agrees_with_onnx_runtime_when_graph_is_half_precision() -> None:
    model = small_model("llama-tiny-decode", precision="fp16")
    lowered = lower(import_model(model), LLVM)
    assert [(spec.heads, spec.kv_heads, spec.causal) for spec in specs_of(lowered)] == [(4, 2, False)]
    feeds = random_inputs(model, seed=0)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


def test_recognise_attention_gives_five_kernels_a_layer_when_target_is_hopper() -> None:
    lowered = lower(import_model(small_model("bert-tiny")), resolve_target("cuda:sm_90a").target, FP16)
    a_layer = [
        name
        for name, calls in lowered.kernels.items()
        for call in calls
        if any(node.startswith("/encoder/layer.0/") for node in call.onnx_nodes)
        and not any(node.startswith("/encoder/layer.1/") for node in call.onnx_nodes)
    ]
    assert len(a_layer) == 5
    (spec,) = specs_of(lowered)
    packed = 3 * 128
    assert (spec.query.param, spec.key.param, spec.value.param) == (0, 0, 0)
    assert (spec.query.offset, spec.key.offset, spec.value.offset) == (0, 128, 256)
    assert {layout.position_stride for layout in (spec.query, spec.key, spec.value)} == {packed}
    assert (spec.output.position_stride, spec.output.head_stride) == (128, 64)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("llvm", FP16),
        ("cuda:sm_75", FP16),
        ("cuda:sm_90a", LoweringOptions(precision="fp16", disabled_passes=frozenset({"recognise_attention"}))),
    ],
)
def test_recognise_attention_leaves_the_graph_alone_when_no_template_makes_it(
    target: str, options: LoweringOptions
) -> None:
    lowered = lower(import_model(plain()), resolve_target(target).target, options)
    assert specs_of(lowered) == []
    assert notes_of(lowered) == ()
    assert any("softmax" in name for name in lowered.kernels)


def test_recognise_attention_says_why_when_operands_are_float32() -> None:
    lowered = lower(import_model(plain()), resolve_target("cuda:sm_90a").target)
    assert specs_of(lowered) == []
    (note,) = notes_of(lowered)
    assert note.startswith("attention not recognised at Softmax")
    assert "its operands are float32, expected float16 or bfloat16" in note


def soft_capped() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    return f.finish(f.op("Tanh", f.divided(f.scores(q, k))), v)


def mildly_masked() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    return f.finish(f.op("Where", f.padding(), f.scores(q, k), -5.0), v)


def with_weights_as_result() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    weights = f.op("Softmax", f.scores(q, k), axis=-1)
    merged = f.op("Transpose", f.op("MatMul", weights, v), perm=[0, 2, 1, 3])
    result = f.linear(f.op("Reshape", merged, [2, LENGTH, HEADS * SIZE]), HEADS * SIZE, HEADS * SIZE)
    return f.model(result, (2, LENGTH, HEADS * SIZE), **{weights: (2, HEADS, LENGTH, LENGTH)})


def guarded_with_unknown_bias() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    bias = f.input("bias", "float", 2, 1, LENGTH, LENGTH)
    weights = f.op("Softmax", f.op("Add", f.scores(q, k), bias), axis=-1)
    weights = f.op("Where", f.op("IsNaN", weights), 0.0, weights)
    return f.project(f.op("Transpose", f.op("MatMul", weights, v), perm=[0, 2, 1, 3]))


def over_queries() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    weighted = f.op("MatMul", f.op("Softmax", f.scores(q, k), axis=2), v)
    return f.project(f.op("Transpose", weighted, perm=[0, 2, 1, 3]))


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (soft_capped, "its scores go through relax.tanh"),
        (mildly_masked, "its mask puts -5 in the place of scores, expected -10000 or less"),
        (with_weights_as_result, "its weights have 2 readers, expected one"),
        (guarded_with_unknown_bias, "its bias may give rows of NaN; they become zeros"),
        (over_queries, "its softmax is over axis 2 of 4, expected the last"),
    ],
)
def test_recognise_attention_says_why_when_it_is_not_one_for_a_kernel(
    form: Callable[[], OnnxModel], reason: str
) -> None:
    model = form()
    lowered = lower(import_model(model), LLVM, FP16)
    assert specs_of(lowered) == []
    (note,) = notes_of(lowered)
    assert note.endswith(reason)
    assert any("softmax" in name for name in lowered.kernels)


@pytest.mark.usefixtures("any_target")
def test_recognise_attention_leaves_the_guard_that_counts_keys() -> None:
    model = FORMS_BY_NAME["zeros_where_no_key_is_seen"]()
    lowered = lower(import_model(model), LLVM, FP16)
    assert specs_of(lowered)
    feeds = random_inputs(model, seed=0)
    feeds["attention_mask"][:] = 1
    feeds["attention_mask"][0] = 0
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


@pytest.mark.usefixtures("any_target")
def test_recognise_attention_keeps_zeros_of_a_guard_where_rows_see_no_key() -> None:
    model = FORMS_BY_NAME["causal_sum_with_infinity_and_guard"]()
    lowered = lower(import_model(model), LLVM, FP16)
    feeds = random_inputs(model, seed=0)
    feeds["attention_mask"][:] = 1
    feeds["attention_mask"][0, :3] = 0  # left padding: the first three queries see nothing
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


def test_recognise_attention_says_why_when_the_template_refuses() -> None:
    f = Form()
    x = f.x(2, LENGTH, 20)
    q, k, v = (
        f.op("Transpose", f.op("Reshape", f.linear(x, 20, 20), [2, LENGTH, 4, 5]), perm=[0, 2, 1, 3]) for _ in range(3)
    )
    merged = f.op("Transpose", f.op("MatMul", f.op("Softmax", f.scores(q, k), axis=-1), v), perm=[0, 2, 1, 3])
    result = f.linear(f.op("Reshape", merged, [2, LENGTH, 20]), 20, 20)
    model = f.model(result, (2, LENGTH, 20))
    lowered = lower(import_model(model), resolve_target("cuda:sm_90a").target, FP16)
    assert specs_of(lowered) == []
    assert "no template makes it" in notes_of(lowered)[0]
    assert "head_dim is 5" in notes_of(lowered)[0]


def test_recognise_attention_is_off_when_templates_are() -> None:
    request = ModelRequest("bert-tiny", target="cuda:sm_90a", lowering=FP16, routes=frozenset({Route.METASCHEDULE}))
    assert specs_of(prepare_model(request).lowered) == []
    assert len(specs_of(prepare_model(replace(request, routes=DEFAULT_ROUTES)).lowered)) == 1


@pytest.mark.usefixtures("any_target")
def test_attention_is_one_tuning_task_described_by_its_specification() -> None:
    tasks = [extract_tasks([lower(import_model(form()), LLVM, FP16)]) for form in (plain, sliding_window)]
    found = [task for one in tasks for task in one if task.family == "attention"]
    assert [task.name for task in found] == ["attention", "attention"]
    specs = [json.loads(task.signature)["attention"] for task in found]
    assert [(spec["causal"], spec["window"]) for spec in specs] == [(False, 0), (True, 3)]
    assert found[0].signature != found[1].signature


def values_wider_than_keys() -> OnnxModel:
    f = Form()
    x = f.x()
    query, key = (f.heads(f.linear(x, HIDDEN, HIDDEN)) for _ in range(2))
    split = f.op("Reshape", f.linear(x, HIDDEN, 2 * HIDDEN), [BATCH, LENGTH, HEADS, 2 * SIZE])
    weights = f.op("Softmax", f.divided(f.scores(query, key)), axis=-1)
    weighted = f.op("MatMul", weights, f.op("Transpose", split, perm=[0, 2, 1, 3]))
    flat = f.op("Reshape", f.op("Transpose", weighted, perm=[0, 2, 1, 3]), [BATCH, LENGTH, 2 * HIDDEN])
    return f.model(f.linear(flat, 2 * HIDDEN, HIDDEN), (BATCH, LENGTH, HIDDEN))


def latent_attention() -> OnnxModel:
    """DeepSeek-V3's: keys are a part of a product and rotary positions that all heads share; values the other part."""
    f = Form()
    x = f.x()
    nope, rope, wide = 2 * SIZE, SIZE, 2 * SIZE
    query = f.op("Reshape", f.linear(x, HIDDEN, HEADS * (nope + rope)), [BATCH, LENGTH, HEADS, nope + rope])
    query = f.op("Transpose", query, perm=[0, 2, 1, 3])
    latent, shared = f.ops("Split", f.linear(x, HIDDEN, HIDDEN + rope), [HIDDEN, rope], outputs=2, axis=-1)
    product = f.op("Reshape", f.linear(latent, HIDDEN, HEADS * (nope + wide)), [BATCH, LENGTH, HEADS, nope + wide])
    product = f.op("Transpose", product, perm=[0, 2, 1, 3])
    key, value = f.ops("Split", product, [nope, wide], outputs=2, axis=-1)
    shared = f.op("Expand", f.op("Reshape", shared, [BATCH, 1, LENGTH, rope]), [BATCH, HEADS, LENGTH, rope])
    scores = f.op("Mul", f.scores(query, f.op("Concat", key, shared, axis=-1)), (nope + rope) ** -0.5)
    hidden = np.triu(np.full((LENGTH, LENGTH), -np.inf), 1)
    weights = f.op("Softmax", f.op("Add", scores, hidden), axis=-1)
    weighted = f.op("Transpose", f.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    flat = f.op("Reshape", weighted, [BATCH, LENGTH, HEADS * wide])
    return f.model(f.linear(flat, HEADS * wide, HIDDEN), (BATCH, LENGTH, HIDDEN))


def queries_that_see_no_key() -> OnnxModel:
    f = Form()
    x = f.x()
    query = f.heads(f.linear(x, HIDDEN, HIDDEN))
    last = f.op("Slice", x, [LENGTH // 2], [LENGTH], [1])
    key, value = (
        f.op("Transpose", f.op("Reshape", f.linear(last, HIDDEN, HIDDEN), [BATCH, -1, HEADS, SIZE]), perm=[0, 2, 1, 3])
        for _ in range(2)
    )
    sees = np.tril(np.ones((LENGTH, LENGTH // 2), bool), k=-LENGTH // 2)
    return f.finish(f.op("Where", sees, f.divided(f.scores(query, key)), -1e9), value)


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize("form", [values_wider_than_keys, latent_attention])
def test_recognise_attention_takes_values_of_another_width(form: Callable[[], OnnxModel]) -> None:
    model = form()
    lowered = lower(import_model(model), LLVM, FP16)
    (spec,) = specs_of(lowered)
    assert (spec.head_dim, spec.value_dim) == ((8, 16) if form is values_wider_than_keys else (24, 16))
    feeds = random_inputs(model, seed=1)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)


def test_template_makes_latent_attention_of_an_export_of_any_size() -> None:
    lowered = lower(import_model(latent_attention()), resolve_target("cuda:sm_90a").target, FP16)
    (spec,) = specs_of(lowered)
    assert (spec.head_dim, spec.value_dim, spec.causal, spec.bias) == (24, 16, True, None)


@pytest.mark.usefixtures("any_target")
def test_recognise_attention_reads_a_causal_mask_whose_first_queries_see_no_key() -> None:
    model = queries_that_see_no_key()
    lowered = lower(import_model(model), LLVM, FP16)
    (spec,) = specs_of(lowered)
    assert (spec.causal, spec.queries, spec.keys) == (False, LENGTH, LENGTH // 2)
    assert spec.bias is not None
    feeds = random_inputs(model, seed=1)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), TOLERANCE)
