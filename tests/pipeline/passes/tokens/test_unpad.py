from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from relaxtune.models import OnnxModel
from relaxtune.models.unpadding import TOKENS
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.passes.kit.ir import bindings_of, main_of, shape_of
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.attention_forms import BATCH, HEADS, HIDDEN, LENGTH, SIZE, Form
from tests.pipeline.passes.pass_cases import LLVM, compiled, feeds_of, run_compiled

MASKS = {
    "all": np.ones((BATCH, LENGTH)),
    "right": np.array([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]),
    "left": np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]]),
    "holes": np.array([[0, 1, 0, 1, 1, 0], [1, 0, 0, 1, 0, 1]]),
    "one": np.array([[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]]),
}


def unpadded(model: OnnxModel, **options: object) -> LoweredModule:
    return lower(import_model(model), LLVM, LoweringOptions(unpad=True, **options))  # type: ignore[arg-type]


def layer(f: Form, x: str, mask: Callable[[Form, str], str]) -> str:
    """Return [B, S, HIDDEN] of attention behind a projection, under a mask of the form's own."""
    query, key, value = f.qkv(f.linear(x, HIDDEN, HIDDEN))
    weights = f.op("Softmax", mask(f, f.divided(f.scores(query, key))), axis=-1)
    merged = f.op("Transpose", f.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    return f.linear(f.op("Reshape", merged, [BATCH, LENGTH, HIDDEN]), HIDDEN, HIDDEN)


def added(f: Form, scores: str) -> str:
    wide = f.op("Cast", f.op("Reshape", f.mask(), [BATCH, 1, 1, LENGTH]), to=1)
    return f.op("Add", scores, f.op("Mul", f.op("Sub", 1.0, wide), -1e9))


def chosen(f: Form, scores: str) -> str:
    return f.op("Where", f.padding(), scores, -np.inf)


def beside_a_position_bias(f: Form, scores: str) -> str:
    return added(f, f.op("Add", scores, f.weight(1, HEADS, LENGTH, LENGTH)))


def joined_with_causal(f: Form, scores: str) -> str:
    causal = np.tri(LENGTH, dtype=bool)[None, None]
    return f.op("Where", f.op("And", f.padding(), causal), scores, -1e30)


def indices(*, backwards: bool = False) -> np.ndarray:
    """Return the index tensor of `mask[rows, places]` as transformers exports it, [B, 1, 1, S, 2]."""
    rows, places = np.indices((BATCH, LENGTH))
    return np.stack([rows, places[:, ::-1] if backwards else places], axis=-1)[:, None, None].astype("int64")


def gathered(f: Form, scores: str) -> str:
    seen = f.op("GatherND", f.op("Cast", f.mask(), to=9), indices())
    return f.op("Where", f.op("And", np.ones((1, 1, LENGTH, LENGTH), bool), seen), scores, -3e38)


def gathered_by_ranges(f: Form, scores: str) -> str:
    """torchscript's: one index of the flat mask, made of two ranges."""
    rows = f.op("Reshape", f.op("Range", np.array(0), np.array(BATCH), np.array(1)), [BATCH, 1, 1, 1])
    places = f.op("Reshape", f.op("Range", np.array(0), np.array(LENGTH), np.array(1)), [1, 1, 1, LENGTH])
    index = f.op("Add", places, f.op("Mul", rows, np.array([LENGTH])))
    flat = f.op("Reshape", f.op("Cast", f.mask(), to=9), [BATCH * LENGTH])
    return f.op("Where", f.op("Gather", flat, index, axis=0), scores, -3e38)


def kept(f: Form) -> str:
    return f.op("Cast", f.op("Reshape", f.mask(), [BATCH, LENGTH, 1]), to=1)


def mean_of_tokens(f: Form, hidden: str) -> str:
    total = f.op("ReduceSum", f.op("Mul", hidden, kept(f)), [1], keepdims=0)
    return f.op("Div", total, f.op("Max", f.op("ReduceSum", kept(f), [1], keepdims=0), 1e-9))


def first_token(f: Form, hidden: str) -> str:
    return f.linear(f.op("Gather", hidden, np.array(0), axis=1), HIDDEN, HIDDEN)


def greatest(f: Form, hidden: str) -> str:
    low = f.op("Mul", f.op("Sub", 1.0, kept(f)), -1e9)
    return f.op("ReduceMax", f.op("Add", hidden, low), [1], keepdims=0)


@pytest.mark.parametrize(
    "form", [added, chosen, beside_a_position_bias, joined_with_causal, gathered, gathered_by_ranges]
)
def test_tokens_are_those_of_the_padded_graph_under_any_mask(form: Callable[[Form, str], str]) -> None:
    f = Form()
    hidden = layer(f, f.x(), form)
    model = f.model(f.op("Add", hidden, f.linear("x", HIDDEN, HIDDEN)), (BATCH, LENGTH, HIDDEN))
    lowered = unpadded(model)
    machine = compiled(lowered)
    causal = form is joined_with_causal
    for name, mask in MASKS.items():
        feeds = feeds_of(model) | {"attention_mask": mask.astype("int64")}
        (got,) = run_compiled(machine, lowered, feeds)
        (want,) = run_reference(model, feeds)
        seen = mask[..., None].astype(bool)
        np.testing.assert_allclose(got, np.where(seen, want, 0), rtol=2e-5, atol=2e-5, err_msg=name)
        assert causal or np.isfinite(want).all()


@pytest.mark.parametrize("pooled", [mean_of_tokens, first_token, greatest])
def test_pooled_rows_are_those_of_the_padded_graph(pooled: Callable[[Form, str], str]) -> None:
    f = Form()
    model = f.model(pooled(f, layer(f, f.x(), added)), (BATCH, HIDDEN))
    lowered = unpadded(model)
    machine = compiled(lowered)
    for name, mask in MASKS.items():
        feeds = feeds_of(model) | {"attention_mask": mask.astype("int64")}
        (got,), (want,) = run_compiled(machine, lowered, feeds), run_reference(model, feeds)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=name)


def test_matmuls_run_over_tokens_alone() -> None:
    f = Form()
    model = f.model(layer(f, f.x(), added), (BATCH, LENGTH, HIDDEN))
    lowered = unpadded(model)
    packed = [
        binding.var for binding in bindings_of(main_of(lowered.mod))
        if TOKENS in {str(size) for size in (shape_of(binding.var) or [])[:1]}
    ]  # fmt: skip
    # The gathered input, its projection, queries, keys and values, what attention gives, and the last one.
    assert len(packed) == 5
    assert lowered.unpadding is not None
    assert lowered.unpadding.zeros == (model.outputs[0].name,)


def test_a_row_without_tokens_is_zero_and_disturbs_no_other() -> None:
    f = Form()
    model = f.model(layer(f, f.x(), added), (BATCH, LENGTH, HIDDEN))
    lowered = unpadded(model)
    mask = np.array([[0] * LENGTH, [1, 1, 0, 0, 0, 0]])
    feeds = feeds_of(model) | {"attention_mask": mask}
    (got,), (want,) = run_compiled(compiled(lowered), lowered, feeds), run_reference(model, feeds)
    np.testing.assert_allclose(got[1, :2], want[1, :2], rtol=2e-5, atol=2e-5)
    assert not got[0].any()


def test_without_the_pass_padding_stays() -> None:
    f = Form()
    model = f.model(layer(f, f.x(), added), (BATCH, LENGTH, HIDDEN))
    assert unpadded(model, disabled_passes=frozenset({"unpad"})).unpadding is None


def no_mask(f: Form) -> OnnxModel:
    return f.model(layer(f, f.x(), lambda _, scores: scores), (BATCH, LENGTH, HIDDEN))


def unmasked_attention(f: Form) -> OnnxModel:
    hidden = layer(f, f.x(), lambda _, scores: scores)
    return f.model(f.op("Mul", hidden, kept(f)), (BATCH, LENGTH, HIDDEN))


def mean_of_all(f: Form) -> OnnxModel:
    return f.model(f.op("ReduceMean", layer(f, f.x(), added), [1], keepdims=0), (BATCH, HIDDEN))


def convolution_over_the_sequence(f: Form) -> OnnxModel:
    across = f.op("Transpose", layer(f, f.x(), added), perm=[0, 2, 1])
    mixed = f.op("Conv", across, f.weight(HIDDEN, HIDDEN, 3), pads=[1, 1])
    return f.model(mixed, (BATCH, HIDDEN, LENGTH))


def mask_read_backwards(f: Form) -> OnnxModel:
    def backwards(f: Form, scores: str) -> str:
        return f.op("Where", f.op("GatherND", f.op("Cast", f.mask(), to=9), indices(backwards=True)), scores, -3e38)

    return f.model(layer(f, f.x(), backwards), (BATCH, LENGTH, HIDDEN))


def sequence_behind(f: Form) -> OnnxModel:
    heads = f.heads(layer(f, f.x(), added))
    return f.model(f.op("Mul", heads, 2.0), (BATCH, HEADS, LENGTH, SIZE))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (no_mask, "expected one input that masks padding"),
        (unmasked_attention, "node 'Softmax_.*its softmax reads padding that no mask hides"),
        (mean_of_all, "node 'ReduceMean_.*takes the mean over the sequence, padding included"),
        (convolution_over_the_sequence, "node 'Conv_.*its effect on tokens is unknown"),
        (mask_read_backwards, "node 'Softmax_.*its softmax reads padding that no mask hides"),
        (sequence_behind, "has tokens along other axes than its first ones"),
    ],
)
def test_graph_that_mixes_tokens_and_padding_is_refused_by_the_name_of_its_node(
    build: Callable[[Form], OnnxModel], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        unpadded(build(Form()))
    assert "leave --unpad out" in str(refused.value)
