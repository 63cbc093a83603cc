"""From a request to the model lowered and cut into tasks."""

from __future__ import annotations

import logging

import pytest

from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.prepare import ModelRequest, prepare_model


def test_kernels_of_symbolic_sizes_are_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    shapes = {spec.name: spec.shape for spec in get_preset("bert-tiny").inputs}
    with caplog.at_level(logging.INFO):
        prepared = prepare_model(ModelRequest("bert-tiny", shapes, "llvm"))
    (line,) = [record.getMessage() for record in caplog.records if "cannot be tuned:" in record.getMessage()]
    assert len(prepared.untunable) > 5
    assert all(kernel.name in line for kernel in prepared.untunable)
