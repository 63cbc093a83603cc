"""Tables of positions on a GPU, within them and beyond their ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import tvm

from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.passes.symbolic import functions_of_positions
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.pipeline.validate.validation import validate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device"),
]


@pytest.mark.parametrize("positions", [5, 24, 4096])
@pytest.mark.parametrize("name", ["llama-tiny", "t5-tiny"])
def test_models_agree_with_onnx_runtime_where_tables_end(
    name: str, positions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of T5's buckets, tables of 24 places end before all is the same."""
    monkeypatch.setattr(functions_of_positions, "POSITIONS", positions)
    shapes = {spec.name: spec.shape for spec in get_preset(name).inputs}
    prepared = prepare_model(ModelRequest(name, shapes, "cuda", LoweringOptions(precision="fp16")))
    assert any("table" in kernel for kernel in prepared.lowered.kernels)
    choices = select_kernels(
        prepared.lowered, prepared.tasks, database=None, target=prepared.target, environment=prepared.environment
    )
    write_artifact(compile_module(prepared.lowered, choices, prepared.target), tmp_path / "artifact")
    module = Module.load(tmp_path / "artifact")
    for length in (1, 5, 6, 23, 24, 25, 130):
        dims = {"batch": 2, "sequence": length}
        assert validate(module, prepared.model, dims=dims, samples=1, repeats=1).passed, dims
