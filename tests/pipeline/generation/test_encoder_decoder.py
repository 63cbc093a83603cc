"""Tokens of a decoder behind an encoder, beside ONNX Runtime's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from relaxtune import Module, UsageError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest
from tests.command_line import Ended
from tests.pipeline.generation.encoder_decoder import greedy, write_files

IDS = np.array([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 0, 0]])
MASK = np.array([[1] * 6, [1] * 4 + [0] * 2])
COUNT = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files") / "model")


@pytest.fixture(scope="module")
def artifact(folder: Path) -> Path:
    result = compile_model(
        ModelRequest(folder, target="llvm", generate=True, max_length=64), folder.parent / "artifact", samples=2
    )
    assert result.validation is not None
    assert result.validation.passed
    return result.directory


def test_tokens_are_the_models_own(folder: Path, artifact: Path) -> None:
    module = Module.load(artifact)
    expected = greedy(folder, IDS, MASK, COUNT)
    rows = list(module.generate_batch(inputs={"input_ids": IDS, "attention_mask": MASK}, max_new_tokens=COUNT))
    assert np.transpose(rows).tolist() == expected
    assert len(set(expected[0])) > 3
    # A mask that is not given hides nothing; the next text has another length.
    tokens = list(module.generate(inputs={"input_ids": IDS[1:, :4]}, max_new_tokens=COUNT))
    assert tokens == expected[1]
    begun = [7, *tokens[:5]]
    assert list(module.generate(begun, inputs={"input_ids": IDS[1:, :4]}, max_new_tokens=9)) == tokens[5:14]


def test_command_takes_the_prompt_of_the_encoder(
    artifact: Path, tmp_path: Path, relaxtune: Callable[..., Ended]
) -> None:
    expected = list(Module.load(artifact).generate(inputs={"input_ids": IDS[:1]}, max_new_tokens=9))
    words = ("generate", artifact, "--max-new-tokens", 9, "--format", "json")
    assert relaxtune(*words, "--ids", ",".join(map(str, IDS[0]))).data["tokens"] == expected
    np.savez(tmp_path / "inputs.npz", input_ids=IDS[:1])
    assert relaxtune(*words, "--inputs", tmp_path / "inputs.npz").data["tokens"] == expected


def test_encoder_is_an_artifact_of_its_own(artifact: Path, relaxtune: Callable[..., Ended]) -> None:
    assert relaxtune("validate", artifact / "encoder", "--samples", 1, "--db", "none").code == 0
    # The whole knows the new validation.
    assert relaxtune("validate", artifact, "--samples", 1, "--db", "none").code == 0


@pytest.mark.parametrize(
    ("prompts", "inputs", "said"),
    [
        ([[7]], None, "give inputs of that too: input_ids"),
        ([[7]] * 3, {"input_ids": IDS}, "3 prompts need as many inputs of the encoder, got 2"),
    ],
)
def test_wrong_inputs_are_refused(artifact: Path, prompts: list[list[int]], inputs: dict | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Module.load(artifact).generate_batch(prompts, inputs=inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_tokens_on_a_gpu_are_those_of_a_cpu(folder: Path, tmp_path: Path, precision: str) -> None:
    options = LoweringOptions(None if precision == "fp32" else precision)
    request = ModelRequest(folder, target="cuda", lowering=options, generate=True, max_length=64)
    result = compile_model(request, tmp_path / "artifact", samples=2)
    assert result.validation is not None
    assert result.validation.passed
    module = Module.load(result.directory)
    for _ in range(2):
        rows = list(module.generate_batch(inputs={"input_ids": IDS, "attention_mask": MASK}, max_new_tokens=20))
        tokens = list(module.generate(inputs={"input_ids": IDS[1:, :4]}, max_new_tokens=20))
        assert [row[1] for row in rows] == tokens
        if precision == "fp32":
            assert np.transpose(rows).tolist() == greedy(folder, IDS, MASK, 20)
