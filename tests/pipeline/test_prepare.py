"""From a request to the model lowered and cut into tasks."""

from __future__ import annotations

import logging

import pytest

from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.cli.options import ModelOptions
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.prepare import ModelRequest, prepare_model


def test_each_kernel_that_cannot_be_tuned_is_named_for_who_debugs(caplog: pytest.LogCaptureFixture) -> None:
    shapes = {spec.name: spec.shape for spec in get_preset("bert-tiny").inputs}
    with caplog.at_level(logging.DEBUG, logger="relaxtune"):
        prepared = prepare_model(ModelRequest("bert-tiny", shapes, "llvm"))
    lines = [record for record in caplog.records if " cannot be tuned: " in record.getMessage()]
    assert len(prepared.untunable) > 5
    assert len(lines) == len(prepared.untunable)
    for kernel, line in zip(prepared.untunable, lines, strict=True):
        assert line.levelno == logging.DEBUG
        assert f"kernel {kernel.name} of bert-tiny cannot be tuned: {kernel.reason}" in line.getMessage()


def test_padding_is_not_left_out_of_buckets() -> None:
    request = ModelOptions("bert-tiny", target="llvm", bucket=["sequence=8,16"], unpad=True).request()
    assert request.lowering.unpad
    with pytest.raises(UsageError, match="--unpad leaves padding out, and --bucket pads to a size"):
        prepare_model(request)
