from __future__ import annotations

import numpy as np
import pytest

from relaxtune.models import load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.passes.kit.ir import bindings_of, called_function, main_of
from relaxtune.schedules.functions.attention import AttentionSpec, spec_of
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.attention_forms import BATCH, HEADS, HIDDEN, LENGTH, Form
from tests.pipeline.passes.pass_cases import compiled, run_compiled

SHAPES = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ("batch", "sequence"))
OPTIONS = LoweringOptions(precision="fp16", unpad=True)


def attentions_of(lowered: LoweredModule) -> list[AttentionSpec]:
    called = [called_function(binding.value) for binding in bindings_of(main_of(lowered.mod))]
    specs = [spec_of(lowered.mod[var]) for var in called if var is not None]
    return [spec for spec in specs if spec is not None]


def test_packed_tokens_see_those_of_their_own_row() -> None:
    model = load_model("bert-tiny", shapes=SHAPES)
    lowered = lower(import_model(model), resolve_target("cuda:sm_90a").target, OPTIONS)
    specs = attentions_of(lowered)
    assert [spec.spans is not None and spec.bias is None for spec in specs] == [True, True]
    machine, unpadding, rng = compiled(lowered), lowered.unpadding, np.random.default_rng(0)
    assert unpadding is not None
    # Right padding, any places, and left padding, which hides the first token that the pooler reads.
    lengths = rng.integers(1, 14, (4, 1))
    for mask in (np.arange(13) < lengths, rng.random((4, 13)) < 0.7, np.arange(13) >= 13 - lengths):
        feeds = random_inputs(model, seed=1, dims={"batch": 4, "sequence": 13})
        feeds["attention_mask"] = mask.astype("int64")
        want = dict(zip((spec.name for spec in model.outputs), run_reference(model, feeds), strict=True))
        got = run_compiled(machine, lowered, feeds)
        for array, expected in zip(got, unpadding.without_padding(want, feeds).values(), strict=True):
            np.testing.assert_allclose(array, expected, atol=2e-2)


def position_bias(f: Form, scores: str) -> str:
    return f.op("Add", scores, f.weight(1, HEADS, LENGTH, LENGTH))


def bias_of_keys(f: Form, scores: str) -> str:
    return f.op("Add", scores, f.weight(1, 1, 1, LENGTH))


@pytest.mark.parametrize("bias", [position_bias, bias_of_keys])
def test_attention_that_adds_more_than_a_mask_of_padding_stays_in_the_padded_form(bias: object) -> None:
    f = Form()
    query, key, value = f.qkv(f.linear(f.x(), HIDDEN, HIDDEN))
    scores = bias(f, f.divided(f.scores(query, key)))  # type: ignore[operator]
    masked = f.op("Where", f.padding(), scores, -1e9)
    merged = f.op("Transpose", f.op("MatMul", f.op("Softmax", masked, axis=-1), value), perm=[0, 2, 1, 3])
    flat = f.op("Reshape", merged, [BATCH, LENGTH, HIDDEN])
    model = f.model(f.linear(flat, HIDDEN, HIDDEN), (BATCH, LENGTH, HIDDEN))
    lowered = lower(import_model(model), resolve_target("cuda:sm_90a").target, OPTIONS)
    assert [spec.spans for spec in attentions_of(lowered)] == [None]
