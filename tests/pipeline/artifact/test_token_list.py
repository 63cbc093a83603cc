from __future__ import annotations

import numpy as np
import pytest
import tvm

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.models.unpadding import ENTRY, Unpadding
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.validate.reference import Reference
from tests.token_lists import token_lists
from tests.unoptimised import UNOPTIMISED_TEXT

SHAPES = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ("batch", "sequence"))


@pytest.fixture(scope="module")
def model() -> OnnxModel:
    return load_model("bert-tiny", shapes=SHAPES)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    directory = tmp_path_factory.mktemp("unpadded") / "artifact"
    request = ModelRequest("bert-tiny", shapes=SHAPES, target=UNOPTIMISED_TEXT, lowering=LoweringOptions(unpad=True))
    assert compile_model(request, directory, samples=2).validation.passed
    return Module.load(directory)


def masks() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    drawn = [rng.random((batch, width)) < share for batch, width, share in ((1, 1, 1), (3, 7, 0.5), (5, 16, 0.2))]
    drawn.append(np.arange(9) >= np.array([[3], [0], [9], [8]]))
    drawn.append(np.zeros((2, 4), bool))
    return [mask.astype("int64") for mask in drawn]


def test_calls_give_what_the_model_gives_at_tokens_and_zeros_at_padding(model: OnnxModel, module: Module) -> None:
    reference, unpadding = Reference(model), module.manifest.unpadding
    assert unpadding is not None
    assert unpadding.kept == (0,)  # the pooler reads the first token, which left padding hides
    for mask in masks():
        sizes = dict(zip(("batch", "sequence"), mask.shape, strict=True))
        feeds = random_inputs(model, seed=1, dims=sizes) | {"attention_mask": mask}
        want, got = unpadding.without_padding(reference.run(feeds), feeds), module.run(feeds)
        seen = mask.any(axis=1)
        for name, array in want.items():
            np.testing.assert_allclose(got[name][seen], array[seen], rtol=1e-4, atol=1e-4)
        assert not got["last_hidden_state"][mask == 0].any()


def test_device_lists_the_tokens_as_numpy_does(module: Module) -> None:
    unpadding = module.manifest.unpadding
    assert unpadding is not None
    for mask in masks():
        shapes = ((mask.size,), (mask.size, 2), mask.shape, (1,))
        lists = [tvm.runtime.empty(shape, "int32") for shape in shapes]
        module._machine[ENTRY](tvm.runtime.tensor(mask), *lists)
        rows, spans, slots, count = (one.numpy() for one in lists)
        want_rows, want_spans, want_slots = token_lists(unpadding, mask)
        assert unpadding.size(int(count[0]), mask.size) == len(want_rows)
        np.testing.assert_array_equal(rows[: int(count[0])], want_rows[: int(count[0])])
        np.testing.assert_array_equal(spans[: len(want_spans)], want_spans)
        np.testing.assert_array_equal(slots, want_slots)


def test_number_of_tokens_is_rounded_up_and_no_more_than_the_places() -> None:
    unpadding = Unpadding("mask", (), 64, ())
    assert [unpadding.size(tokens, 200) for tokens in (0, 1, 64, 65, 199)] == [64, 64, 64, 128, 200]
    rows, _, slots = token_lists(unpadding, np.eye(3, 30))
    assert len(rows) == 64
    assert slots.max() == 2
