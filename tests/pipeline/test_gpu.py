"""Whole models on a GPU: compiled here and elsewhere, with and without a CUDA graph, against ONNX Runtime."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.artifact.compile import compile_module, entry_of
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.pipeline.report.profile import profile_artifact
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.validate.validation import validate
from relaxtune.schedules.marks import SCHEDULED_ATTR
from relaxtune.schedules.registry import apply_decision, list_candidates
from relaxtune.schedules.targets import ResolvedTarget, resolve_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device"),
]

SHAPES = {
    "bert-tiny": dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (1, 32)),
    # A causal mask: booleans in memory.
    "gpt2-tiny": dict.fromkeys(("input_ids", "attention_mask"), (1, 32)),
}

# Run where no GPU is visible, as on a build machine; what it needs is on the command line.
OFFLINE = """
import sys
from pathlib import Path
from relaxtune.models import load_model
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.schedules.targets import resolve_target
import tvm
assert not tvm.cuda(0).exist
target = resolve_target(sys.argv[1])
model = load_model("bert-tiny", shapes=dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (1, 32)))
write_artifact(compile_module(lower(import_model(model), target.target), (), target), Path(sys.argv[2]))
"""


def model_of(name: str) -> OnnxModel:
    return load_model(name, shapes=SHAPES[name])


def write(model: OnnxModel, directory: Path, precision: str | None = None, *, cuda_graph: bool = True) -> Path:
    target = resolve_target("cuda")
    lowered = lower(import_model(model), target.target, LoweringOptions(precision=precision))
    write_artifact(compile_module(lowered, (), target, cuda_graph=cuda_graph), directory)
    return directory


@pytest.mark.parametrize("cuda_graph", [True, False], ids=["graph", "launches"])
@pytest.mark.parametrize(
    ("name", "precision"),
    [("bert-tiny", None), ("bert-tiny", "fp16"), ("gpt2-tiny", None), ("gpt2-tiny", "fp16")],
)
def test_model_agrees_with_onnxruntime(name: str, precision: str | None, cuda_graph: bool, tmp_path: Path) -> None:
    model = model_of(name)
    artifact = write(model, tmp_path / "artifact", precision, cuda_graph=cuda_graph)
    report = validate(artifact, model, samples=2)
    assert report.passed, report


def test_repeated_runs_follow_their_inputs(tmp_path: Path) -> None:
    model = model_of("bert-tiny")
    module = Module.load(write(model, tmp_path / "artifact"))
    first, second = random_inputs(model, seed=1), random_inputs(model, seed=2)
    once = module.run(first)
    other = module.run(second)
    again = module.run(first)
    for name, array in once.items():
        assert (again[name] == array).all()
        assert (other[name] != array).any()


def test_variants_in_one_module_compute_the_same_each_in_its_own_graph(tmp_path: Path) -> None:
    request = ModelRequest("bert-tiny", SHAPES["bert-tiny"], "cuda", LoweringOptions(precision="fp16"))
    prepared = prepare_model(request)
    choices = select_kernels(
        prepared.lowered, prepared.tasks, database=None, target=prepared.target, environment=prepared.environment
    )
    variants = [
        [dataclasses.replace(choice, scheduled=made) for choice in choices if choice.task == task.name]
        for task in prepared.tasks
        for made in second_candidate(task, prepared.target)
    ]
    assert variants
    compiled = compile_module(prepared.lowered, choices, prepared.target, variants=variants)
    write_artifact(compiled, tmp_path / "artifact")
    module = Module.load(tmp_path / "artifact")
    entries = [module, *(module.variant(entry_of(number)) for number in range(len(variants)))]
    for seed in range(2):
        inputs = random_inputs(prepared.model, seed=seed)
        # By turns, since they share memory.
        results = [entry.run(inputs) for entry in entries]
        for result in results[1:]:
            for name, expected in results[0].items():
                np.testing.assert_allclose(result[name], expected, rtol=2e-2, atol=2e-2)


def second_candidate(task: TuningTask, target: ResolvedTarget) -> list[tvm.tirx.PrimFunc]:
    candidates, _ = list_candidates(task.mod["main"], target)
    made = [apply_decision(task.mod["main"], target, one.to_json()) for one in candidates[1:2]]
    return [func.without_attr("global_symbol").with_attr(SCHEDULED_ATTR, True) for func in made]


def test_artifact_compiled_without_a_gpu_runs_here(tmp_path: Path) -> None:
    arch = resolve_target("cuda").arch
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
    command = [sys.executable, "-c", OFFLINE, f"cuda:{arch}", str(tmp_path / "artifact")]
    outcome = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    assert validate(tmp_path / "artifact", model_of("bert-tiny"), samples=1).passed


def test_a_module_takes_the_memory_that_was_planned(tmp_path: Path) -> None:
    # A model of 100 MB: the driver hands out blocks of 2 MiB, and what earlier tests left of one is used first.
    model = load_model("bert-base-1-layers", shapes=SHAPES["bert-tiny"])
    artifact = write(model, tmp_path / "artifact")
    memory, profile = load_manifest(artifact).memory, profile_artifact(artifact)
    assert memory is not None
    assert memory.planned_bytes
    assert profile.observed_bytes is not None
    needed = memory.planned_bytes + memory.weights_bytes
    # Code, the graph and the driver's own rounding come on top. Other processes on the device would count too.
    assert needed - 2 * 2**20 <= profile.observed_bytes < needed + 256 * 2**20
