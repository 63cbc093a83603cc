"""What a model is timed on while its kernels are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import Arm, module_arm
from relaxtune.pipeline.choose import model_arm
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from tests.unoptimised import UNOPTIMISED_TEXT


def test_a_model_is_timed_on_masks_that_hide_nothing_as_its_kernels_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Mapping[str, np.ndarray]] = []

    def noted(module: Module, inputs: Mapping[str, np.ndarray]) -> Arm:
        given.append(inputs)
        return module_arm(module, inputs)

    monkeypatch.setattr(model_arm, "module_arm", noted)
    prepared = prepare_model(ModelRequest("bert-tiny", {"input_ids": (2, 8)}, UNOPTIMISED_TEXT))
    choices = select_kernels(
        prepared.lowered, prepared.tasks, database=None, target=prepared.target, environment=prepared.environment
    )
    model_arm.compiled_arms(prepared, choices, (), tmp_path / "model")[0]()
    (inputs,) = given
    assert inputs["attention_mask"].shape == (2, 8)
    assert (inputs["attention_mask"] == 1).all()
    assert len(np.unique(inputs["input_ids"])) > 2
