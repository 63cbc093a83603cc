"""TVM in a command, where PyTorch is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """\
import sys
from relaxtune.pipeline.cli.tvm_alone import leave_torch_out_of_tvm
leave_torch_out_of_tvm()
import {first}
import tvm
print(sys.modules.get("torch", "left out"))
import torch
print(torch.__name__)
"""


@pytest.mark.parametrize("first", ["tvm", "tvm_ffi"])
def test_torch_is_left_out_of_tvm_and_can_be_imported_afterwards(tmp_path: Path, first: str) -> None:
    (tmp_path / "torch.py").write_text("", encoding="utf-8")
    repository = str(Path(__file__).parents[3])
    told = subprocess.run(
        [sys.executable, "-c", CODE.format(first=first)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), repository])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split("\n")[:2] == ["left out", "torch"]
