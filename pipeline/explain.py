"""Why a model gets the kernels it gets: for each kernel, the records that were looked at and what became of each.

The reasons are those of the look-up itself (`pipeline.choose.candidates`, `pipeline.choose.selection`), told while it
chooses. Nothing is compiled or measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.choose.candidates import TAKEN
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuned_model import UNTUNED, bucket_kernels, select_as_measured
from relaxtune.tuning_db.layers import open_databases
from relaxtune.tuning_db.records import Mode, Route, Status, TuningRecord
from relaxtune.tuning_db.urls import DatabasePlace


@dataclass(frozen=True)
class ConsideredRecord:
    """A record that was looked at, and what became of it.

    Attributes
    ----------
    id, database
        Its number, and the database it is in where several lie over each other.
    code_version
        The relaxtune that measured it, with its commit where that is known.
    taken
        Whether the kernel is made by it.
    reason
        Why it is taken or not.
    """

    id: int | None
    database: str | None
    route: Route
    status: Status
    latency_us: float | None
    device_name: str
    arch: str
    driver: str | None
    tvm_version: str
    code_version: str | None
    taken: bool
    reason: str


@dataclass(frozen=True)
class ExplainedKernel:
    """One kernel of a model: who makes it, and the records that were looked at, the one taken first.

    Attributes
    ----------
    functions
        The functions of the model that it computes; "[bucket]" stands behind those of a shape bucket.
    task, workload_hash
        None for a function that is not tuned.
    route, note
        Who makes it, and why where that is no record.
    """

    functions: tuple[str, ...]
    task: str | None
    workload_hash: str | None
    route: Route
    note: str
    records: tuple[ConsideredRecord, ...]

    @property
    def taken(self) -> ConsideredRecord | None:
        """The record that it is made by."""
        return next((record for record in self.records if record.taken), None)


@dataclass(frozen=True)
class Explanation:
    """The kernels of a model on a target.

    Attributes
    ----------
    device
        What the records are asked for: the device that is here, or "unknown" where code for the target cannot run.
    note
        What is true of all kernels: the newest record of the whole model may say that it is no faster with records.
    """

    model: str
    target: str
    device: str
    tvm_version: str
    note: str
    kernels: tuple[ExplainedKernel, ...]

    def to_json(self) -> dict[str, object]:
        """Return the explanation as plain JSON data."""
        return asdict(self)


def explain_model(request: ModelRequest, database: DatabasePlace, shared: Sequence[DatabasePlace] = ()) -> Explanation:
    """Return why `compile` would give a model the kernels it gives, record by record.

    Raises
    ------
    ModelError, ScheduleError, TuningDatabaseError, PipelineError
        The model, the target or a database cannot be had; see `pipeline.errors`.
    """
    told: dict[str, dict[tuple[str | None, int | None], tuple[TuningRecord, str]]] = {}

    def hear(task: TuningTask, record: TuningRecord, reason: str) -> None:
        told.setdefault(task.name, {})[record.layer, record.id] = record, reason

    with open_databases([database, *shared], mode=Mode.READ_ONLY, create=False) as opened:
        prepared, choices = select_as_measured(prepare_model(request), opened, hear)
        named = [(choice.function, choice) for choice in choices]
        for bucket in prepared.buckets:
            chosen = bucket_kernels(prepared.of_bucket(bucket), opened, hear)
            named += [(f"{choice.function} [{bucket.bucket.name}]", choice) for choice in chosen]
    untuned = any(choice.note.startswith(UNTUNED) for choice in choices)
    hashes = {task.name: task.workload_hash for task in prepared.tasks}
    by_kernel: dict[str, list[tuple[str, KernelChoice]]] = {}
    for function, choice in named:
        by_kernel.setdefault(choice.task or function, []).append((function, choice))
    kernels = [
        ExplainedKernel(
            functions=tuple(function for function, _ in group),
            task=group[0][1].task,
            workload_hash=hashes.get(group[0][1].task or ""),
            route=group[0][1].route,
            note=group[0][1].note,
            records=_considered(told.get(group[0][1].task or "", {}).values()),
        )
        for group in by_kernel.values()
    ]
    return Explanation(
        model=prepared.model.name,
        target=f"{prepared.target.kind} {prepared.target.arch}",
        device=prepared.environment.device_name,
        tvm_version=prepared.environment.tvm_version,
        note=UNTUNED if untuned else "",
        kernels=tuple(kernels),
    )


def _considered(told: Iterable[tuple[TuningRecord, str]]) -> tuple[ConsideredRecord, ...]:
    """Return records with what became of them: the one taken, then valid ones by latency, then failed ones."""
    found = [
        ConsideredRecord(
            id=record.id,
            database=record.layer,
            route=record.route,
            status=record.status,
            latency_us=record.latency_us,
            device_name=record.environment.device_name,
            arch=record.target.arch,
            driver=record.environment.driver,
            tvm_version=record.environment.tvm_version,
            code_version=record.code_version,
            taken=reason.startswith(TAKEN),
            reason=reason,
        )
        for record, reason in told
    ]
    return tuple(
        sorted(found, key=lambda one: (not one.taken, one.latency_us is None, one.latency_us or 0.0, one.id or 0))
    )
