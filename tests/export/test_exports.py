"""Real exports of torch.onnx against ONNX Runtime: through the whole pipeline, symbolic ones at several sizes.

Asked for by `-m export`. Without torch the tests are skipped, but a run that asks for them fails.
"""

from __future__ import annotations

from importlib import import_module, util
from pathlib import Path
from types import ModuleType

import numpy as np
import onnxruntime as ort
import pytest

from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from tests.export.matrix_cases import PINNED, STATIC, SYMBOLIC, Cell, Export

pytestmark = [
    pytest.mark.export,
    # torch and transformers warn about their own deprecations at import; ours stay errors in every other test.
    pytest.mark.filterwarnings("default"),
]

# Of the families in the matrix (`python -m tests.export.matrix`), one of each kind.
STATIC_FAMILIES = ["bert", "gpt2", "vit", "whisper-encoder", "t5-encoder", "swin", "mixtral", "llama-prefill"]
SYMBOLIC_FAMILIES = ["distilbert", "deberta-v2", "modernbert", "bloom", "gemma2", "llama-decode", "bart", "qwen2-moe"]
SENTENCES = ("A cat sits on the mat.", "Compilers turn graphs into kernels.", "Il pleut sur la ville.")
TOKENS = 16


@pytest.fixture(scope="session")
def exporter(request: pytest.FixtureRequest) -> ModuleType:
    missing = [name for name in ("torch", "transformers") if util.find_spec(name) is None]
    if missing:
        message = f"{' and '.join(missing)} not installed: pip install 'relaxtune[export]'"
        expression = str(request.config.option.markexpr)
        if "export" in expression and "not export" not in expression:
            pytest.fail(message)
        pytest.skip(message)
    return import_module("tests.export.make_exports")


def compile_export(path: Path, folder: Path) -> Module:
    prepared = prepare_model(ModelRequest(path, target="llvm"))
    choices = select_kernels(
        prepared.lowered,
        prepared.tasks,
        database=None,
        target=prepared.target,
        environment=prepared.environment,
    )
    write_artifact(compile_module(prepared.lowered, choices, prepared.target), folder)
    unnamed = [call for calls in prepared.lowered.kernels.values() for call in calls if not call.onnx_nodes]
    assert not unnamed
    return Module.load(folder)


@pytest.mark.parametrize("kind", ["dynamo", "torchscript"])
@pytest.mark.parametrize("family", STATIC_FAMILIES)
def test_export_compiles_and_agrees_with_onnx_runtime(
    exporter: ModuleType, tmp_path: Path, family: str, kind: str
) -> None:
    check(exporter, Cell(Export(family, kind), STATIC), tmp_path)


@pytest.mark.parametrize("kind", ["dynamo", "torchscript"])
@pytest.mark.parametrize("family", SYMBOLIC_FAMILIES)
def test_export_with_symbolic_axes_agrees_at_every_size_and_when_pinned(
    exporter: ModuleType, tmp_path: Path, family: str, kind: str
) -> None:
    for axes in (SYMBOLIC, PINNED):
        check(exporter, Cell(Export(family, kind, dynamic=True), axes), tmp_path)


def check(exporter: ModuleType, cell: Cell, folder: Path) -> None:
    worker = import_module("tests.export.matrix_worker")
    path = worker.make_export(cell.export, folder)
    assert isinstance(path, Path), path
    outcome = worker.run_cell(cell, path, folder / "artifact")
    assert outcome.state == "validated", f"{outcome.state}: {outcome.reason}"


@pytest.mark.parametrize("kind", ["dynamo", "torchscript"])
def test_minilm_with_real_weights_gives_the_same_sentence_embeddings(
    exporter: ModuleType, tmp_path: Path, kind: str
) -> None:
    from transformers import AutoTokenizer

    path = exporter.export("minilm", kind, tmp_path, dynamic=True)
    module = compile_export(path, tmp_path / "artifact")
    reference = ort.InferenceSession(path)
    tokenizer = AutoTokenizer.from_pretrained(exporter.minilm_folder())
    embeddings = []
    for sentence in SENTENCES:
        tokens = tokenizer(sentence, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="np")
        feeds = {name: tokens[name].astype("int64") for name in ("input_ids", "attention_mask")}
        (got,) = module.run(feeds).values()
        (want,) = reference.run(None, feeds)
        embeddings.append(pool(got, feeds["attention_mask"]))
        assert float(embeddings[-1] @ pool(want, feeds["attention_mask"])) > 0.99999
    assert float(embeddings[0] @ embeddings[1]) < 0.5


def pool(hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the sentence embedding: the mean over the tokens, of length one."""
    mean = (hidden[0] * mask[0][:, None]).sum(axis=0) / mask.sum()
    return np.asarray(mean / np.linalg.norm(mean))
