"""From a request to the model lowered and cut into tasks."""

from __future__ import annotations

import logging

import pytest

from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.cli.options import ModelOptions
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.prepare import ModelRequest, prepare_model


def test_kernels_of_symbolic_sizes_are_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    shapes = {spec.name: spec.shape for spec in get_preset("bert-tiny").inputs}
    with caplog.at_level(logging.INFO):
        prepared = prepare_model(ModelRequest("bert-tiny", shapes, "llvm"))
    (line,) = [record.getMessage() for record in caplog.records if "cannot be tuned:" in record.getMessage()]
    assert len(prepared.untunable) > 5
    assert all(kernel.name in line for kernel in prepared.untunable)


def test_padding_is_not_left_out_of_buckets() -> None:
    request = ModelOptions("bert-tiny", target="llvm", bucket=["sequence=8,16"], unpad=True).request()
    assert request.lowering.unpad
    with pytest.raises(UsageError, match="--unpad leaves padding out, and --bucket pads to a size"):
        prepare_model(request)
