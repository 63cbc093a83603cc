"""The library route from a record to an artifact, without a GPU and without the library."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from models import load_model
from pipeline.codegen.cuda_libraries import CUBLASLT, CUBLASLT_PATH_VARIABLE, offer_cublaslt
from pipeline.compile import compile_module
from pipeline.environment import detect_environment, target_key
from pipeline.export import write_artifact
from pipeline.importer import import_model
from pipeline.passes import LoweringOptions, lower
from pipeline.routes import DEFAULT_ROUTES
from pipeline.selection import select_kernels
from pipeline.tuning.recorder import describe_workload
from pipeline.tuning.tasks import extract_tasks
from schedules.libraries.cublaslt import CublasLt
from schedules.targets import resolve_target
from schedules.templates.base import Refusal
from tuning_db.records import Route, Status, TuningRecord
from tuning_db.store import TuningDatabase


def test_a_library_is_used_where_it_is_asked_for_and_named_in_the_manifest(tmp_path: Path) -> None:
    target = resolve_target("cuda:sm_90a")
    # A Llama has no biases, so that the library computes its projections whole where they do not do the norms too.
    graph = import_model(load_model("llama-tiny:fp16", shapes={"input_ids": (1, 64)}))
    lowered = lower(graph, target.target, LoweringOptions(disabled_passes=frozenset({"fuse_norms"})))
    tasks = extract_tasks([lowered])
    library = CublasLt()
    environment = detect_environment(target)
    offered = 0
    with TuningDatabase.open(tmp_path / "tuning.db") as database:
        for task in tasks:
            candidates = library.candidates(task.mod["main"], target)
            if isinstance(candidates, Refusal):
                continue
            offered += 1
            database.record_workload(describe_workload(task))
            database.record_measurement(
                TuningRecord(
                    workload_hash=task.workload_hash,
                    signature_key=describe_workload(task).signature_key,
                    target=target_key(target),
                    environment=replace(environment, device_name="some GPU"),
                    route=Route.LIBRARY,
                    decision=candidates[0].to_json(),
                    status=Status.OK,
                    latencies_us=(1.0,),
                )
            )
        assert offered >= 2
        by_default = select_kernels(lowered, tasks, database=database, target=target, environment=environment)
        assert Route.LIBRARY not in {choice.route for choice in by_default}
        choices = select_kernels(
            lowered,
            tasks,
            database=database,
            target=target,
            environment=environment,
            routes=DEFAULT_ROUTES | {Route.LIBRARY},
        )
    assert sum(choice.route is Route.LIBRARY for choice in choices) >= offered
    manifest = write_artifact(compile_module(lowered, choices, target), tmp_path / "artifact")
    assert CUBLASLT in manifest.target.libraries
    assert b"relaxtune_cublaslt_matmul" in (tmp_path / "artifact" / "model.so").read_bytes()


def test_the_library_found_is_told_to_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLASLT_PATH_VARIABLE, raising=False)
    monkeypatch.setattr("pipeline.codegen.cuda_libraries.pypi_folders", lambda _name: [tmp_path])
    monkeypatch.setattr("pipeline.codegen.cuda_libraries.TOOLKIT_FOLDERS", ())
    assert offer_cublaslt() is None
    (tmp_path / CUBLASLT).touch()
    found = offer_cublaslt()
    assert found == tmp_path / CUBLASLT
    assert os.environ[CUBLASLT_PATH_VARIABLE] == str(found)
