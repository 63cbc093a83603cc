"""A decoder's graph as a step of generation: what is recognised, what is refused, what hides places without a token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from relaxtune.models import load_model
from relaxtune.models.onnx_model import OnnxModel
from relaxtune.models.spec import VISIBLE
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.importer.graph import ImportedGraph
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes.generation.entries import generation_graphs, visible_lengths
from relaxtune.pipeline.passes.generation.step import StepOptions, as_step
from relaxtune.pipeline.passes.kit.ir import bindings_of, is_op, main_of
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.generation.conftest import FREE
from tests.pipeline.importer.onnx_cases import make_model
from tests.unoptimised import UNOPTIMISED_TEXT

CPU = resolve_target("llvm")
HEADS, WIDTH, WORDS = 2, 4, 16
CACHE = ("batch", HEADS, "past", WIDTH)
GROWN = ("batch", HEADS, "past + new", WIDTH)


def layer(*, weights: str = "weights", past: tuple[int | str, ...] = CACHE, **inputs: tuple[str, tuple]) -> OnnxModel:
    """Return a layer of attention over a cache of keys, which are the values too; no mask hides any place."""
    words = np.random.default_rng(0).standard_normal((WORDS, HEADS * WIDTH)).astype("float32")
    nodes = [
        helper.make_node("Gather", ["words", "ids"], ["x"]),
        helper.make_node("Reshape", ["x", "split"], ["heads"]),
        helper.make_node("Transpose", ["heads"], ["query"], perm=[0, 2, 1, 3]),
        helper.make_node("Concat", ["past", "query"], ["present"], axis=2),
        helper.make_node("Transpose", ["present"], ["turned"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["query", "turned"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", [weights, "present"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["back"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["back", "joined"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "head"], ["logits"]),
    ]
    return make_model(
        nodes,
        {"ids": ("int64", ("batch", "new")), "past": ("float32", past), **inputs},
        {"logits": ("float32", ("batch", "new", WORDS)), "present": ("float32", GROWN)},
        {
            "words": words,
            "head": np.ascontiguousarray(words.T),
            "split": np.array([0, 0, HEADS, WIDTH]),
            "joined": np.array([0, 0, HEADS * WIDTH]),
        },
    )


def step_of(model: OnnxModel) -> ImportedGraph:
    return as_step(import_model(model), StepOptions(32, CPU))


@pytest.fixture(scope="module")
def llama() -> ImportedGraph:
    return import_model(load_model("llama-tiny-with-past", shapes=FREE))


def test_step_has_state_in_the_place_of_caches_masks_and_positions(llama: ImportedGraph) -> None:
    step = as_step(llama, StepOptions(64, CPU, "float16"))
    named = {spec.name: (spec.dtype, spec.shape) for spec in step.inputs}
    assert list(named)[:5] == ["tokens", "position", "place", "padding", "history"]
    assert named["history"] == ("int64", (65, "batch"))
    assert set(list(named.values())[8:]) == {("float16", ("visible", "batch", 2, 32))}
    assert [spec.name for spec in step.outputs] == ["logits", "position"]
    assert step.outputs[0].shape == ("batch", 1024)


def test_step_of_known_sizes_has_no_symbolic_axis(llama: ImportedGraph) -> None:
    step = as_step(llama, StepOptions(64, CPU), {"batch": 2, "sequence": 1, VISIBLE: 32})
    assert all(spec.is_static for spec in (*step.inputs, *step.outputs))


def test_logits_are_computed_for_the_last_token_alone(llama: ImportedGraph) -> None:
    products = [
        one for one in bindings_of(main_of(as_step(llama, StepOptions(64, CPU)).mod)) if is_op(one.value, "matmul")
    ]
    last = products[-1].var.ty.shape.values
    assert int(last[1]) == 1


def test_caches_are_written_and_none_is_given_back(llama: ImportedGraph) -> None:
    written = [
        binding
        for binding in bindings_of(main_of(step_of(llama.model).mod))
        if is_op(binding.value, "call_tir_inplace")
    ]
    assert len(written) == len(llama.inputs) - 3 + 2  # each cache, the counts, and the tokens


def test_layer_of_a_decode_step_is_six_launches_on_a_gpu() -> None:
    request = ModelRequest(
        "llama-tiny-with-past", target="cuda:sm_90a", lowering=LoweringOptions("fp16"), generate=True, max_length=256
    )
    prepared = prepare_model(request)
    (bucket,) = prepared.buckets
    assert dict(bucket.bucket.sizes) == {"batch": 1, "sequence": 1, VISIBLE: 256}
    for lowered in (prepared.lowered, bucket.lowered):
        attention = next(report for report in lowered.reports if report.name == "recognise_attention")
        assert attention.notes == ("2 attentions recognised",)
    step = main_of(bucket.lowered.mod)
    launches = [one for one in bindings_of(step) if is_op(one.value, "call_tir", "call_tir_inplace")]
    # Embedding, mask, angle, its sine and cosine, first norm; two layers; head, draw, state.
    assert len(launches) == 6 + 2 * 6 + 3


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: load_model("bert-tiny"), "no input is a cache"),
        (lambda: load_model("llama-tiny-with-past"), "no input is a cache"),
        (lambda: layer(weights="scores"), "without a softmax"),
        (lambda: layer(other=("float32", (3,))), "cannot make its inputs other"),
    ],
)
def test_graph_that_generation_cannot_take_is_refused(model, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        step_of(model())


def test_longer_sequences_than_the_tables_hold_are_refused() -> None:
    graph = import_model(load_model("gpt2-tiny-with-past", shapes=FREE))
    with pytest.raises(UsageError, match="reach 512 tokens"):
        generation_graphs(graph, 513, None, {}, CPU)
    step, decode = generation_graphs(graph, None, None, {"batch": [1, 4]}, CPU)
    assert step.generation is not None
    assert step.generation.capacity == 512
    assert [bucket.name for bucket, _ in decode] == ["batch=1,sequence=1", "batch=4,sequence=1"]
    with pytest.raises(UsageError, match="--bucket sequence"):
        generation_graphs(graph, None, None, {"sequence": [8]}, CPU)


def test_decode_steps_look_at_half_as_many_places_again() -> None:
    assert visible_lengths(100) == [100]
    assert visible_lengths(2048) == [256, 384, 512, 768, 1024, 1536, 2048]
    assert visible_lengths(700) == [256, 384, 512, 700]


def test_places_without_a_token_are_hidden_where_the_graph_has_no_mask(tmp_path: Path) -> None:
    model = layer()
    path = tmp_path / "layer.onnx"
    onnx.save(model.proto, path)
    result = compile_model(
        ModelRequest(path, target=UNOPTIMISED_TEXT, generate=True, max_length=200), tmp_path / "artifact"
    )
    assert result.validation is not None
    assert result.validation.passed
    module, session = Module.load(result.directory), ort.InferenceSession(path)
    ids, past, expected = np.array([[3, 1, 4]]), np.zeros((1, HEADS, 0, WIDTH), np.float32), []
    list(module.generate([9] * 90, max_new_tokens=5))  # leaves its tokens in the caches
    for _ in range(20):
        logits, past = session.run(None, {"ids": ids, "past": past})
        ids = logits[:, -1].argmax(-1)[:, None]
        expected.append(int(ids[0, 0]))
    assert list(module.generate([3, 1, 4], max_new_tokens=20)) == expected
    with pytest.raises(UsageError, match="several lengths"):
        module.generate_batch([[1], [1, 2]])
