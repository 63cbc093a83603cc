"""A database of the kernels of a model, and the artifact that is compiled from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.codegen.kernel_hash import made_hash
from relaxtune.pipeline.environment import detect_environment, target_key
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.report.ceilings import Ceilings
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.jobs import JobTask
from relaxtune.tuning_db.records import Route, Status, TuningRecord, Workload
from relaxtune.tuning_db.store import TuningDatabase

CEILINGS = Ceilings("test", {"float32": 1e12}, 10e9, 1.0, "made up")


@pytest.fixture(scope="module")
def database(
    tasks: list[TuningTask],
    quick_target: ResolvedTarget,
    bert_tiny: OnnxModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> TuningDatabase:
    """A database with a fallback's record of each task, 10 us for the first and 1 us more for each that follows."""
    opened = TuningDatabase.open(tmp_path_factory.mktemp("report") / "tuning.db")
    target, environment = target_key(quick_target), detect_environment(quick_target)
    job = opened.start_job(model=bert_tiny.name, model_sha256=bert_tiny.sha256, target=target)
    records, workloads = [], []
    for index, task in enumerate(tasks):
        workload = Workload(
            task.workload_hash, task.family, task.signature, task.name, task.flops, task.bytes, None,
            environment.tvm_version,
        )  # fmt: skip
        workloads.append(workload)
        records.append(
            TuningRecord(
                workload.workload_hash, workload.signature_key, target, environment, Route.FALLBACK, "{}", Status.OK,
                (9.0 + index, 10.0 + index, 11.0 + index), registers=40 + index, smem_bytes=1024, spill_bytes=0,
                job_id=job.id,
                kernel_hash=made_hash(apply_fallback(task.mod, quick_target.target)["main"], quick_target.target),
            )
        )  # fmt: skip
    # Faster, but within what the fallback's latencies scatter: it ships nowhere.
    lucky = replace(records[0], route=Route.METASCHEDULE, decision="[]", latencies_us=(9.5,), registers=99)
    opened.record_all(workloads=workloads, records=[*records, lucky])
    opened.record_job_tasks(
        job.id,
        [JobTask(t.workload_hash, environment.tvm_version, t.weight, t.onnx_nodes, 0.1) for t in tasks],
    )
    return opened


@pytest.fixture(scope="module")
def tuned(
    database: TuningDatabase,
    lowered: LoweredModule,
    tasks: list[TuningTask],
    quick_target: ResolvedTarget,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """An artifact compiled from that database."""
    choices = select_kernels(
        lowered, tasks, database=database, target=quick_target, environment=detect_environment(quick_target)
    )
    directory = tmp_path_factory.mktemp("tuned") / "bert-tiny"
    write_artifact(compile_module(lowered, choices, quick_target), directory)
    return directory
