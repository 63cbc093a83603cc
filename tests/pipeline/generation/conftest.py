"""A small decoder, and its artifact that generates, compiled once."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import relaxtune
from relaxtune.models import load_model, save_model
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from tests.unoptimised import UNOPTIMISED_TEXT

CAPACITY = 160
FREE = {axis: (axis,) for axis in ("batch", "sequence", "past_sequence")}


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_decoder(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def artifact(decoder: Path) -> Path:
    return compiled_decoder(decoder)


# Fixtures that another folder imports are made once more there.
@functools.cache
def saved_decoder(folder: Path) -> Path:
    path = folder / "decoder" / "decoder.onnx"
    path.parent.mkdir()
    save_model(load_model("llama-tiny-with-past", shapes=FREE), path)
    return path


@functools.cache
def compiled_decoder(decoder: Path) -> Path:
    result = compile_model(
        ModelRequest(decoder, target=UNOPTIMISED_TEXT, generate=True, max_length=CAPACITY),
        decoder.parent / "artifact",
        samples=2,
    )
    assert result.validation is not None
    assert result.validation.passed
    return result.directory


@pytest.fixture(scope="session")
def module(artifact: Path) -> relaxtune.Module:
    return relaxtune.load(artifact)
