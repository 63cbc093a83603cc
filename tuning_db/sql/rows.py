"""Between rows and values: pure functions, both ways."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache
from typing import Any, TypeVar, cast

from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.jobs import Job, JobTask
from relaxtune.tuning_db.records import Environment, TargetKey, TuningRecord, Workload, canonical_json
from relaxtune.tuning_db.sql.column_types import DamagedValueError, NumberKind, read_as
from relaxtune.tuning_db.sql.schema import JobRow, JobTaskRow, RecordRow, SignatureRow, TargetRow, WorkloadRow

_Value = TypeVar("_Value")
# Columns of a record that are fields of the value.
_RECORD = (
    *("job_id", "route", "status", "registers", "smem_bytes", "spill_bytes", "kernel_hash", "seed", "duration_s"),
    *("created_at", "error", "decision", "code_version"),
)


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
        "latency_us": median if kind is NumberKind.FINITE else None,
        "latency_kind": kind,
        "latencies": latencies_to_text(record.latencies_us),
        **{name: getattr(record, name) for name in _RECORD},
    }


def value_columns(value: Any, *others: str) -> dict[str, object]:
    """Return the columns of a value: its key, and its fields but for `others`."""
    return {
        "key": value.key,
        **{name: getattr(value, name) for name in _names(cast(Any, type(value))) if name not in others},
    }


def to_value(of: type[_Value], row: object, **given: object) -> _Value:
    """Return the value of a row: each field that is not given is the column of its name.

    Raises `DamagedValueError`: the row holds what no value has.
    """
    try:
        columns = {name: getattr(row, name) for name in _names(cast(Any, of)) if name not in given}
        if bytes in map(type, (*given.values(), *columns.values())):
            raise DamagedValueError(f"bytes where a text or a number belongs, in a row of {of.__name__}")
        return of(**given, **columns)
    except (InvalidRecordError, AttributeError, TypeError, RecursionError) as e:
        raise DamagedValueError(f"a row of {of.__name__}: {e}") from e


@cache
def _names(of: type[Any]) -> tuple[str, ...]:
    """Return the fields of a value that are columns; no row holds the layer it is read from."""
    return tuple(field.name for field in dataclasses.fields(of) if field.name != "layer")


def to_workload(row: WorkloadRow, signature: SignatureRow) -> Workload:
    """Return the value of a row."""
    return to_value(Workload, row, family=signature.family, signature=signature.signature)


def to_record(
    row: RecordRow, workload_hash: str, signature_key: str, target: TargetKey, environment: Environment
) -> TuningRecord:
    """Return the value of a row and of the rows it refers to."""
    return to_value(
        TuningRecord,
        row,
        workload_hash=workload_hash,
        signature_key=signature_key,
        target=target,
        environment=environment,
        latencies_us=latencies_from_text(row.latencies),
    )


def to_job(row: JobRow, target: TargetRow) -> Job:
    """Return the value of a row."""
    return to_value(Job, row, target=to_value(TargetKey, target))


def to_job_task(row: JobTaskRow, workload: WorkloadRow) -> JobTask:
    """Return the value of a row."""
    nodes = tuple(read_as(json.loads, row.onnx_nodes))
    known = {"workload_hash": workload.workload_hash, "tvm_version": workload.tvm_version}
    return to_value(JobTask, row, **known, onnx_nodes=nodes)
