"""A manifest that states other things than the files beside it hold is refused by an ArtifactError, hashes right."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from relaxtune.models import TensorSpec
from relaxtune.pipeline.artifact.directory import hash_file, load_manifest
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from tests.pipeline.cli.test_secrets import save_matmul

X = TensorSpec("x", "float32", (8, 16))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    save_matmul(folder / "m.onnx")
    compile_model(ModelRequest(folder / "m.onnx", target="llvm"), folder / "artifact")
    return folder / "artifact"


@pytest.mark.parametrize(
    "lie",
    [
        lambda m: replace(m, inputs=(replace(X, dtype="int32"),)),
        lambda m: replace(m, inputs=(replace(X, dtype="float99"),)),
        lambda m: replace(m, inputs=(replace(X, shape=(8, 8)),)),
        lambda m: replace(m, inputs=(X, replace(X, name="z"))),
        lambda m: replace(m, outputs=(replace(X, dtype="int32"),)),
        lambda m: replace(m, outputs=(replace(X, shape=(8, 8)),)),
        lambda m: replace(m, outputs=(X, X)),
        lambda m: replace(m, weights=()),
    ],
)
def test_a_signature_that_is_not_the_codes_is_refused(
    small: Path, tmp_path: Path, lie: Callable[[Manifest], Manifest]
) -> None:
    directory = Path(shutil.copytree(small, tmp_path / "copy"))
    manifest = lie(load_manifest(directory))
    (directory / "manifest.json").write_text(manifest.to_json())
    with pytest.raises(ArtifactError):
        Module.load(directory).run({s.name: np.ones([int(n) for n in s.shape], s.dtype) for s in manifest.inputs})


@pytest.mark.parametrize("change", [lambda a: a.astype(np.float16), lambda a: a.ravel()[:7].copy()])
def test_weights_that_are_not_the_codes_are_refused(
    small: Path, tmp_path: Path, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    directory = Path(shutil.copytree(small, tmp_path / "copy"))
    path = directory / "params.safetensors"
    weights = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file({name: change(array) for name, array in weights.items()}, path)
    manifest = load_manifest(directory)
    manifest = manifest.with_files({name: hash_file(directory / name) for name in manifest.files})
    (directory / "manifest.json").write_text(manifest.to_json())
    with pytest.raises(ArtifactError):
        Module.load(directory).run({"x": np.ones((8, 16), np.float32)})
