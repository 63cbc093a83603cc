"""Vectors of texts by an artifact: order, batches, limits, refusals. The tokenizer is a stand-in by words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from relaxtune.models import get_preset, load_model, save_model
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.artifact.text.embedder import ROWS, Embedder
from relaxtune.pipeline.artifact.text.tokenizer import artifact_tokenizer, end_tokens
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest
from tests.command_line import Ended

TEXTS = ["one", "two words", "", "three of words and some more", "one", *(f"text number {n}" for n in range(70))]


@dataclass(frozen=True)
class Encoding:
    ids: list[int]

    @property
    def attention_mask(self) -> list[int]:
        return [1] * len(self.ids)

    @property
    def type_ids(self) -> list[int]:
        return [0] * len(self.ids)


class Words:
    """A token for each word: the number of its letters."""

    padding: Mapping[str, int] | None = None

    def __init__(self, most: int | None = None) -> None:
        self.truncation = None if most is None else {"max_length": most}

    def no_padding(self) -> None:
        self.padding = None

    def enable_truncation(self, max_length: int) -> None:
        self.truncation = {"max_length": max_length}

    def encode_batch_fast(self, texts: list[str]) -> list[Encoding]:
        most = None if self.truncation is None else self.truncation["max_length"]
        return [Encoding([2, *map(len, text.split()), 3][:most]) for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hub") / "encoder"
    (made / "1_Pooling").mkdir(parents=True)
    shapes = {spec.name: spec.shape for spec in get_preset("bert-tiny").inputs}
    save_model(load_model("bert-tiny", shapes=shapes), made / "model.onnx")
    modules = [{"path": "1_Pooling", "type": "s.Pooling"}, {"path": "2", "type": "s.Normalize"}]
    (made / "modules.json").write_text(json.dumps(modules))
    (made / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (made / "tokenizer.json").write_text("{}")
    (made / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    return made


@pytest.fixture(scope="module", params=[False, True], ids=["padded", "unpad"])
def artifact(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
    lowering = LoweringOptions(unpad=request.param)
    made = compile_model(ModelRequest(folder, target="llvm", lowering=lowering), tmp_path_factory.mktemp("out") / "a")
    patch.undo()
    assert made.validation is not None
    assert made.validation.passed
    return made.directory


def test_vectors_are_those_of_each_text_alone_in_the_texts_order(artifact: Path) -> None:
    module = Module.load(artifact)
    session = ort.InferenceSession(module.manifest.source)
    embedder = Embedder(module.manifest, module.run, Words())
    vectors = embedder(TEXTS)
    assert (vectors.shape, vectors.dtype) == ((len(TEXTS), 128), np.float32)
    for text, got in zip(TEXTS, vectors, strict=True):
        (want,) = session.run(None, embedder.tokenise([text]))
        np.testing.assert_allclose(got, want[0], atol=2e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    np.testing.assert_array_equal(vectors[0], vectors[4])
    assert embedder([]).shape == (0, 128)


def test_texts_of_similar_lengths_run_together_and_long_ones_are_cut(artifact: Path) -> None:
    module, calls = Module.load(artifact), []

    def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        calls.append(inputs["input_ids"].shape)
        return module.run(inputs)

    embedder = Embedder(module.manifest, run, Words())
    assert embedder.max_tokens == 512
    embedder(["word " * 2000, *(["a b"] * (ROWS + 1))])
    assert calls == [(1, 512), (ROWS, 4), (1, 4)]
    assert Embedder(module.manifest, run, Words(9)).max_tokens == 9


def test_inputs_that_are_padded_together_run_in_the_batches_of_their_texts(artifact: Path) -> None:
    module, calls = Module.load(artifact), []

    def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        calls.append(inputs["input_ids"].shape)
        return module.run(inputs)

    embedder, texts = Embedder(module.manifest, run, Words()), ["", "word " * 300, *TEXTS]
    expected, of_texts = embedder(texts), calls.copy()
    calls.clear()
    np.testing.assert_array_equal(embedder.run(embedder.tokenise(texts)), expected)
    assert calls == of_texts


def test_artifact_carries_the_files_of_its_model(artifact: Path, folder: Path) -> None:
    manifest = Module.load(artifact).manifest
    assert {"tokenizer.json", "generation_config.json"} <= manifest.files.keys()
    assert end_tokens(artifact) == [3, 7]
    assert end_tokens(folder.parent) == []


def test_module_of_another_kind_is_refused(artifact: Path) -> None:
    manifest = Module.load(artifact).manifest
    with pytest.raises(UsageError, match="makes no vector of each text"):
        Embedder(replace(manifest, inputs=manifest.inputs[1:]), dict, Words())
    pinned = tuple(replace(spec, shape=(1, 16)) for spec in manifest.inputs)
    with pytest.raises(UsageError, match="takes token ids 1x16 alone"):
        Embedder(replace(manifest, inputs=pinned), dict, Words())


@pytest.mark.parametrize(
    ("words", "said"),
    [(["no.txt"], "expected a text file"), (["empty.txt"], "has no lines")],
)
def test_command_refuses_what_it_cannot_embed(
    artifact: Path, tmp_path: Path, relaxtune: Callable[..., Ended], words: Sequence[str], said: str
) -> None:
    (tmp_path / "empty.txt").write_text("")
    ended = relaxtune("embed", artifact, *(tmp_path / word for word in words))
    assert (ended.code, said in ended.stderr) == (2, True), ended.stderr
    with pytest.raises(UsageError, match="carries no tokenizer"):
        artifact_tokenizer(tmp_path)
