"""Generation on a GPU: one loaded artifact, batches of other sizes in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

import relaxtune
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest

PROMPTS = [[3, 141, 59, 26, 535, 89, 79], [3, 141, 59], [7, 11, 13, 17, 19]]


@pytest.mark.gpu
def test_batches_in_turn_give_the_tokens_of_each_alone(decoder: Path, tmp_path: Path) -> None:
    request = ModelRequest(
        decoder,
        target="cuda",
        lowering=LoweringOptions("fp16"),
        generate=True,
        max_length=256,
        buckets={"batch": [1, 3]},
    )
    result = compile_model(request, tmp_path / "artifact", samples=4)
    assert result.validation is not None
    assert result.validation.passed
    alone = {
        size: list(relaxtune.load(result.directory).generate_batch(PROMPTS[:size], max_new_tokens=40, chunk=3))
        for size in (1, 2, 3)
    }
    module = relaxtune.load(result.directory)
    for size in (1, 3, 1, 2, 3, 1):
        assert list(module.generate_batch(PROMPTS[:size], max_new_tokens=40, chunk=3)) == alone[size]
