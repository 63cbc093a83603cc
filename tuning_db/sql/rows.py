"""Between rows and values: pure functions, both ways."""

from __future__ import annotations

import dataclasses
import json
import math

from relaxtune.tuning_db.jobs import Job, JobTask
from relaxtune.tuning_db.records import Environment, TargetKey, TuningRecord, Workload, canonical_json
from relaxtune.tuning_db.sql.column_types import NumberKind, read_as
from relaxtune.tuning_db.sql.schema import (
    EnvironmentRow,
    JobRow,
    JobTaskRow,
    RecordRow,
    SignatureRow,
    TargetRow,
    WorkloadRow,
)

# Fields of the value, and columns of the row.
_ENVIRONMENT = tuple(field.name for field in dataclasses.fields(Environment))


def number_kind(value: float | None) -> NumberKind:
    """Return what kind of number `value` is."""
    if value is None:
        return NumberKind.NONE
    if math.isnan(value):
        return NumberKind.NAN
    if math.isinf(value):
        return NumberKind.INF if value > 0 else NumberKind.NEG_INF
    return NumberKind.FINITE


def latencies_to_text(latencies_us: tuple[float, ...]) -> str:
    """Return raw latencies as JSON; finite ones keep every bit, the others are written as their kind."""
    if all(map(math.isfinite, latencies_us)):
        return canonical_json(latencies_us)
    kinds = ((value, number_kind(value)) for value in latencies_us)
    return canonical_json([value if kind is NumberKind.FINITE else kind.value for value, kind in kinds])


def latencies_from_text(text: str) -> tuple[float, ...]:
    """Return what `latencies_to_text` was given."""
    return read_as(lambda numbers: tuple(float(value) for value in json.loads(numbers)), text)


def record_columns(
    record: TuningRecord, workload_id: int, signature_id: int, target_id: int, environment_id: int
) -> dict[str, object]:
    """Return the columns of a record, which refers to the rows with these ids."""
    median = record.latency_us
    kind = number_kind(median)
    return {
        "key": record.key,
        "workload_id": workload_id,
        "signature_id": signature_id,
        "target_id": target_id,
        "environment_id": environment_id,
        "job_id": record.job_id,
        "route": record.route,
        "status": record.status,
        "latency_us": median if kind is NumberKind.FINITE else None,
        "latency_kind": kind,
        "latencies": latencies_to_text(record.latencies_us),
        "registers": record.registers,
        "smem_bytes": record.smem_bytes,
        "spill_bytes": record.spill_bytes,
        "kernel_hash": record.kernel_hash,
        "seed": record.seed,
        "duration_s": record.duration_s,
        "created_at": record.created_at,
        "error": record.error,
        "decision": record.decision,
    }


def target_columns(target: TargetKey) -> dict[str, object]:
    """Return the columns of a target."""
    return {"key": target.key, "kind": target.kind, "arch": target.arch, "attributes": target.attributes}


def environment_columns(environment: Environment) -> dict[str, object]:
    """Return the columns of an environment."""
    return {"key": environment.key, **{name: getattr(environment, name) for name in _ENVIRONMENT}}


def to_target(row: TargetRow) -> TargetKey:
    """Return the value of a row."""
    return TargetKey(row.kind, row.arch, row.attributes)


def to_environment(row: EnvironmentRow) -> Environment:
    """Return the value of a row."""
    return Environment(**{name: getattr(row, name) for name in _ENVIRONMENT})


def to_workload(row: WorkloadRow, signature: SignatureRow) -> Workload:
    """Return the value of a row."""
    return Workload(
        workload_hash=row.workload_hash,
        family=signature.family,
        signature=signature.signature,
        name=row.name,
        flops=row.flops,
        bytes=row.bytes,
        ir_json=row.ir_json,
        tvm_version=row.tvm_version,
    )


def to_record(
    row: RecordRow, workload_hash: str, signature_key: str, target: TargetKey, environment: Environment
) -> TuningRecord:
    """Return the value of a row and of the rows it refers to."""
    return TuningRecord(
        workload_hash=workload_hash,
        signature_key=signature_key,
        target=target,
        environment=environment,
        route=row.route,
        decision=row.decision,
        status=row.status,
        latencies_us=latencies_from_text(row.latencies),
        error=row.error,
        registers=row.registers,
        smem_bytes=row.smem_bytes,
        spill_bytes=row.spill_bytes,
        kernel_hash=row.kernel_hash,
        seed=row.seed,
        duration_s=row.duration_s,
        job_id=row.job_id,
        created_at=row.created_at,
        id=row.id,
    )


def to_job(row: JobRow, target: TargetRow) -> Job:
    """Return the value of a row."""
    return Job(
        id=row.id,
        model=row.model,
        model_sha256=row.model_sha256,
        target=to_target(target),
        options=row.options,
        started_at=row.started_at,
        finished_at=row.finished_at,
        outcome=row.outcome,
    )


def to_job_task(row: JobTaskRow, workload: WorkloadRow) -> JobTask:
    """Return the value of a row."""
    return JobTask(
        workload_hash=workload.workload_hash,
        tvm_version=workload.tvm_version,
        weight=row.weight,
        onnx_nodes=tuple(read_as(json.loads, row.onnx_nodes)),
        seconds=row.seconds,
    )
