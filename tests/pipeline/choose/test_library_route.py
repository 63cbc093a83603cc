"""The library route from a record to an artifact: without a GPU and without the libraries, and on a GPU with them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import tvm

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.codegen.cuda_libraries import offer_library
from relaxtune.pipeline.codegen.kernel_hash import made_hash
from relaxtune.pipeline.environment import UNKNOWN_DEVICE, detect_environment, target_key
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.prepare import LIBRARY_PASSES, TEMPLATE_PASSES, ModelRequest, prepare_model
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.pipeline.tasks.routes import DEFAULT_ROUTES
from relaxtune.pipeline.tuning.record import describe_workload
from relaxtune.pipeline.validate.validation import validate
from relaxtune.schedules.functions.attention import spec_of
from relaxtune.schedules.libraries.vendors import CUBLASLT, CUDNN
from relaxtune.schedules.registry import LIBRARIES, apply_decision, list_candidates
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.tuning_db.records import Route, Status, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase

ROUTES = frozenset({Route.LIBRARY, Route.FALLBACK})


def lowered_for_libraries(model: OnnxModel, target: ResolvedTarget, precision: str | None) -> LoweredModule:
    options = LoweringOptions(precision=precision, disabled_passes=TEMPLATE_PASSES - LIBRARY_PASSES)
    return lower(import_model(model), target.target, options)


def choose(
    lowered: LoweredModule, target: ResolvedTarget, path: Path, routes: frozenset[Route], place: int = 0
) -> list[KernelChoice]:
    """Return the kernels chosen where the libraries' candidates at one place of their lists are on record."""
    environment = detect_environment(target)
    measured = environment if environment.device_name != UNKNOWN_DEVICE else replace(environment, device_name="a GPU")
    tasks = extract_tasks([lowered])
    with TuningDatabase.open(path) as database:
        for task in tasks:
            offered, _ = list_candidates(task.mod["main"], target, LIBRARIES)
            if not offered:
                continue
            decision = offered[place].to_json()
            database.record_workload(describe_workload(task))
            database.record_measurement(
                TuningRecord(
                    workload_hash=task.workload_hash,
                    signature_key=describe_workload(task).signature_key,
                    target=target_key(target),
                    environment=measured,
                    route=Route.LIBRARY,
                    decision=decision,
                    status=Status.OK,
                    latencies_us=(1.0,),
                    kernel_hash=made_hash(apply_decision(task.mod["main"], target, decision), target.target),
                )
            )
        return list(
            select_kernels(lowered, tasks, database=database, target=target, environment=environment, routes=routes)
        )


def write(lowered: LoweredModule, choices: list[KernelChoice], target: ResolvedTarget, directory: Path) -> Manifest:
    return write_artifact(compile_module(lowered, choices, target), directory)


def bert(batch: int = 1) -> OnnxModel:
    return load_model("bert-tiny", shapes=dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (batch, 33)))


@pytest.mark.slow
def test_libraries_are_used_where_they_are_asked_for_and_named_in_the_manifest(tmp_path: Path) -> None:
    target = resolve_target("cuda:sm_90a")
    lowered = lowered_for_libraries(bert(), target, "fp16")
    by_default = choose(lowered, target, tmp_path / "tuning.db", DEFAULT_ROUTES)
    assert Route.LIBRARY not in {choice.route for choice in by_default}
    choices = choose(lowered, target, tmp_path / "tuning.db", DEFAULT_ROUTES | {Route.LIBRARY})
    by_library = {choice.function for choice in choices if choice.route is Route.LIBRARY}
    # Every matmul of a BERT, with float32 biases, gelu and residuals, and its attention.
    matmuls = {choice.function for choice in choices if "matmul" in choice.function or "attention" in choice.function}
    assert len(matmuls) >= 5
    assert by_library == matmuls
    manifest = write(lowered, choices, target, tmp_path / "artifact")
    assert {CUBLASLT.file, CUDNN.file} <= set(manifest.target.libraries)
    code = (tmp_path / "artifact" / "model.so").read_bytes()
    assert b"relaxtune_cublaslt_matmul" in code
    assert b"relaxtune_cudnn_attention" in code


@pytest.mark.slow
def test_an_artifact_needs_only_the_libraries_that_it_calls(tmp_path: Path) -> None:
    target = resolve_target("cuda:sm_90a")
    lowered = lowered_for_libraries(bert(), target, "fp16")
    choices = [
        choice if "attention" in choice.function else replace(choice, route=Route.FALLBACK, scheduled=None)
        for choice in choose(lowered, target, tmp_path / "tuning.db", ROUTES)
    ]
    libraries = write(lowered, choices, target, tmp_path / "artifact").target.libraries
    assert CUDNN.file in libraries
    assert CUBLASLT.file not in libraries


@pytest.mark.parametrize(("routes", "kept"), [(ROUTES, True), (ROUTES - {Route.LIBRARY}, False)])
def test_attention_is_recognised_for_libraries_alone(routes: frozenset[Route], kept: bool) -> None:
    request = ModelRequest(
        "bert-tiny",
        shapes=dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (1, 32)),
        target="cuda:sm_90a",
        lowering=LoweringOptions(precision="fp16"),
        routes=routes,
    )
    tasks = prepare_model(request).tasks
    assert any(spec_of(task.mod["main"]) is not None for task in tasks) == kept
    assert not any("norms" in task.name for task in tasks)


@pytest.mark.parametrize("library", [CUBLASLT, CUDNN], ids=lambda library: library.title)
def test_the_library_found_is_told_to_kernels(library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.variable, raising=False)
    monkeypatch.setattr("relaxtune.pipeline.codegen.cuda_libraries.pypi_folders", lambda _name: [tmp_path])
    monkeypatch.setattr("relaxtune.pipeline.codegen.cuda_libraries.TOOLKIT_FOLDERS", ())
    assert offer_library(library) is None
    (tmp_path / library.file).touch()
    found = offer_library(library)
    assert found == tmp_path / library.file
    assert os.environ[library.variable] == str(found)


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device")
@pytest.mark.parametrize("place", [0, 1])
def test_an_artifact_of_library_kernels_agrees_with_onnxruntime(place: int, tmp_path: Path) -> None:
    target = resolve_target("cuda")
    if any(offer_library(library) is None for library in (CUBLASLT, CUDNN)):
        pytest.skip("needs nvidia-cublas and nvidia-cudnn-cu13")
    model = bert(batch=3)
    lowered = lowered_for_libraries(model, target, "fp16")
    choices = choose(lowered, target, tmp_path / "tuning.db", ROUTES, place)
    assert sum(choice.route is Route.LIBRARY for choice in choices) >= 5
    write(lowered, choices, target, tmp_path / "artifact")
    report = validate(tmp_path / "artifact", model, samples=3)
    assert report.passed, report
    # Each run replays one CUDA graph.
    module = Module.load(tmp_path / "artifact")
    first, second = random_inputs(model, seed=1), random_inputs(model, seed=2)
    once = module.run(first)
    other = module.run(second)
    again = module.run(first)
    for name, value in once.items():
        assert (value == again[name]).all()
        assert (value != other[name]).any()
