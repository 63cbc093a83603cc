"""An artifact without padding, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relaxtune.models import load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.models.unpadding import ENTRY
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.validate.reference import Reference
from tests.token_lists import token_lists

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device")]

SHAPES = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ("batch", "sequence"))


def masks() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    drawn = [rng.random((batch, width)) < share for batch, width, share in ((1, 1, 1), (7, 333, 0.4), (5, 16, 0.2))]
    drawn += [np.arange(width) < rng.integers(1, width + 1, (rows, 1)) for rows, width in ((32, 128), (3, 512))]
    drawn.append(np.arange(300) >= np.array([[299], [0], [40], [298]]))
    return [mask.astype("int64") for mask in drawn]


def test_tokens_are_listed_and_outputs_are_the_models(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("unpadded") / "artifact"
    lowering = LoweringOptions(precision="fp16", unpad=True)
    request = ModelRequest("bert-tiny", shapes=SHAPES, target="cuda", lowering=lowering)
    report = compile_model(request, directory, samples=2).validation
    assert report is not None
    assert report.passed
    module, model = Module.load(directory), load_model("bert-tiny", shapes=SHAPES)
    reference, unpadding = Reference(model), module.manifest.unpadding
    assert unpadding is not None
    for mask in masks():
        shapes = ((mask.size,), (mask.size, 2), mask.shape, (1,))
        lists = [tvm.runtime.empty(shape, "int32", module.device) for shape in shapes]
        module._machine[ENTRY](tvm.runtime.tensor(mask, device=module.device), *lists)
        rows, spans, slots, count = (one.numpy() for one in lists)
        want_rows, want_spans, want_slots = token_lists(unpadding, mask)
        assert unpadding.size(int(count[0]), mask.size) == len(want_rows)
        np.testing.assert_array_equal(rows[: len(want_rows)], want_rows)
        np.testing.assert_array_equal(spans[: len(want_rows)], want_spans)
        np.testing.assert_array_equal(slots, want_slots)
        sizes = dict(zip(("batch", "sequence"), mask.shape, strict=True))
        feeds = random_inputs(model, seed=1, dims=sizes) | {"attention_mask": mask}
        want = unpadding.without_padding(reference.run(feeds), feeds)
        seen = mask.any(axis=1)
        for _ in range(3):  # kernels one by one, captured, and as a graph
            got = module.run(feeds)
            for name, array in want.items():
                np.testing.assert_allclose(got[name][seen], array[seen], rtol=2e-2, atol=2e-2)
