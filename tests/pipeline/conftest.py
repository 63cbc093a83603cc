"""One small model compiled once for all tests of compiling, artifacts, running, validating and measuring."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.artifact.compile import CompiledModule, compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import detect_environment, target_key
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from tests.pipeline.tuning.tuning_cases import Place
from tests.unoptimised import UNOPTIMISED_HOST


@pytest.fixture(autouse=True)
def _failed_passes_end_the_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package's function `lower` hides its module of the same name.
    monkeypatch.setattr(sys.modules["relaxtune.pipeline.passes.lower"], "END_AT_FAILED_PASS", True)


@pytest.fixture(scope="session")
def llvm_target() -> ResolvedTarget:
    return resolve_target("llvm")


@pytest.fixture(scope="session")
def place(llvm_target: ResolvedTarget) -> Place:
    return Place(llvm_target, detect_environment(llvm_target), target_key(llvm_target))


@pytest.fixture(scope="session")
def quick_target() -> ResolvedTarget:
    """Return this CPU as a target that LLVM does not optimise for: whole models compile in a sixth of the time."""
    return UNOPTIMISED_HOST


@pytest.fixture(scope="session")
def bert_tiny() -> OnnxModel:
    return load_model("bert-tiny", shapes=dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (1, 32)))


@pytest.fixture(scope="session")
def bert_inputs(bert_tiny: OnnxModel) -> dict[str, np.ndarray]:
    return random_inputs(bert_tiny, seed=0)


@pytest.fixture(scope="session")
def lowered(bert_tiny: OnnxModel, llvm_target: ResolvedTarget) -> LoweredModule:
    return lower(import_model(bert_tiny), llvm_target.target)


@pytest.fixture(scope="session")
def tasks(lowered: LoweredModule) -> list[TuningTask]:
    return extract_tasks([lowered])


@pytest.fixture(scope="session")
def compiled(lowered: LoweredModule, tasks: list[TuningTask], llvm_target: ResolvedTarget) -> CompiledModule:
    environment = detect_environment(llvm_target)
    choices = select_kernels(lowered, tasks, database=None, target=llvm_target, environment=environment)
    return compile_module(lowered, choices, llvm_target)


@pytest.fixture(scope="session")
def artifact(compiled: CompiledModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact that tests only read."""
    directory = tmp_path_factory.mktemp("artifacts") / "bert-tiny"
    write_artifact(compiled, directory)
    return directory


@pytest.fixture
def artifact_copy(artifact: Path, tmp_path: Path) -> Callable[[], Path]:
    """Return a maker of copies that a test may damage."""

    def make() -> Path:
        return Path(shutil.copytree(artifact, tmp_path / "copy"))

    return make
