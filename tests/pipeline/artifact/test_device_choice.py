from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from relaxtune.pipeline.artifact.compile import runs_here
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.schedules.targets import resolve_target

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86")
LESS = json.dumps({"kind": "llvm", "mcpu": "x86-64", "num-cores": 2})


@on_x86
@pytest.mark.parametrize(
    ("config", "runs"),
    [
        (LESS, True),
        # Instructions that no processor here has: those of Intel's for complex matrices.
        (json.dumps({"kind": "llvm", "mcpu": "x86-64", "mattr": ["+amx-complex"]}), False),
        (json.dumps({"kind": "llvm", "mtriple": "aarch64-linux-gnu"}), False),
    ],
    ids=["less", "more", "another machine"],
)
def test_code_for_a_processor_runs_where_its_instructions_are(config: str, runs: bool) -> None:
    assert runs_here(resolve_target("llvm"))
    assert runs_here(resolve_target(config)) == runs


@on_x86
def test_what_is_compiled_for_a_processor_with_less_is_validated(tmp_path: Path) -> None:
    result = compile_model(ModelRequest("bert-tiny", target=LESS), tmp_path / "out", samples=1)
    assert result.validation is not None
    assert result.validation.passed
