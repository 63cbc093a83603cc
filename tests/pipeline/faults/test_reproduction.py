"""The script of a reproduction exits 3 while its fault is there, and 0 without it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from relaxtune.pipeline.bisect import bisect
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.jobs.reproduction import write_reproduction
from relaxtune.pipeline.validate.validation import default_tolerance, sample_inputs
from relaxtune.schedules.targets import ResolvedTarget
from tests import warm_python
from tests.pipeline.faults.planting import build
from tests.pipeline.faults.small_models import make_model
from tests.pipeline.faults.test_kernels import CASES as KERNEL_CASES
from tests.pipeline.faults.test_passes import CASES as PASS_CASES

ROOT = Path(__file__).parent.parent.parent.parent


def exit_of(script: Path) -> int:
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script))
    return int(ended.value.code or 0)


def test_a_pass_is_shown_by_the_nodes_it_spoils(
    quick_target: ResolvedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model("windowed", tmp_path)
    (inputs,) = sample_inputs(model, samples=1, seed=0)
    with monkeypatch.context() as patch:
        PASS_CASES["the window is one too wide"].fault.plant(patch)
        module = build(model, quick_target, tmp_path)
        tolerance = default_tolerance(module, model)
        found = bisect(module, model, inputs, tolerance)
        assert found is not None
        folder = tmp_path / "repro"
        made = write_reproduction(found, module.manifest, tmp_path / "artifact", model, inputs, tolerance, folder)
        assert made.part == "nodes"
        assert made.onnx_nodes == 1
        assert {path.name for path in folder.iterdir()} == {"model.onnx", "inputs.npz", "reproduce.py"}
        assert set(np.load(folder / "inputs.npz")) == {"scores"}
        assert exit_of(made.script) == 3
        assert "would pass with" in capsys.readouterr().out
    healthy = warm_python.run([sys.executable, str(made.script)], cwd=ROOT)
    assert healthy.returncode == 0, healthy.stderr
    assert "kept ok" in healthy.stdout


@pytest.mark.slow
def test_a_kernel_that_is_not_made_again_is_shown_by_the_artifact(quick_target: ResolvedTarget, tmp_path: Path) -> None:
    case = KERNEL_CASES["a mask is read one key early"]
    model = make_model(case.model, tmp_path)
    module = build(model, quick_target, tmp_path, case.fault)
    (inputs,) = sample_inputs(model, samples=1, seed=0)
    tolerance = default_tolerance(module, model)
    found = bisect(module, model, inputs, tolerance)
    assert found is not None
    folder = tmp_path / "repro"
    for _ in range(2):  # the second time over the first
        made = write_reproduction(found, module.manifest, tmp_path / "artifact", model, inputs, tolerance, folder)
    assert made.part == "artifact"
    assert exit_of(made.script) == 3


def test_a_folder_with_other_files_is_not_replaced(quick_target: ResolvedTarget, tmp_path: Path) -> None:
    case = KERNEL_CASES["a mask is read one key early"]
    model = make_model(case.model, tmp_path)
    module = build(model, quick_target, tmp_path, case.fault)
    (inputs,) = sample_inputs(model, samples=1, seed=0)
    found = bisect(module, model, inputs, default_tolerance(module, model))
    assert found is not None
    with pytest.raises(PipelineError, match="is not empty"):
        write_reproduction(
            found, module.manifest, tmp_path / "artifact", model, inputs, default_tolerance(module, model), tmp_path
        )
