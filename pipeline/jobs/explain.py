"""Why a model gets its graph and its kernels: the records that were looked at, and what became of each.

The reasons are those of the choice itself (`tuning_db.winner`). Nothing is compiled or measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.choose.graph_search import GraphTrial, recorded_trials
from relaxtune.pipeline.choose.model_records import measured_model
from relaxtune.pipeline.jobs.tuned_model import UNTUNED, bucket_kernels, select_as_measured
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.tuning_db.layers import open_databases
from relaxtune.tuning_db.records import Mode, Route
from relaxtune.tuning_db.urls import DatabasePlace
from relaxtune.tuning_db.winner import Considered, in_order


@dataclass(frozen=True)
class ExplainedKernel:
    """One kernel of a model: who makes it, and the records that were looked at, the one taken first."""

    # The functions of the model that it computes; "[bucket]" stands behind those of a shape bucket.
    functions: tuple[str, ...]
    task: str | None  # None for a function that is not tuned.
    workload_hash: str | None
    # Who makes it, and why where that is no record.
    route: Route
    note: str
    records: tuple[Considered, ...]

    @property
    def taken(self) -> Considered | None:
        """The record that it is made by."""
        return next((record for record in self.records if record.taken), None)


@dataclass(frozen=True)
class Explanation:
    """The kernels of a model on a target."""

    model: str
    target: str
    device: str  #: The device of the look-up, the one that is here, or "unknown" where code for the target cannot run.
    tvm_version: str
    note: str  #: A note on all kernels, where the newest record of the whole model is no faster with records.
    kernels: tuple[ExplainedKernel, ...]
    decisions: tuple[GraphTrial, ...] = ()  #: The decisions about the graph that were tried.

    def to_json(self) -> dict[str, object]:
        """Return the explanation as plain JSON data."""
        return asdict(self)


def explain_model(request: ModelRequest, database: DatabasePlace, shared: Sequence[DatabasePlace] = ()) -> Explanation:
    """Return why `compile` would give a model the kernels it gives, record by record.

    Raises `ModelError` or `ScheduleError` or `TuningDatabaseError` or `PipelineError`: the model, the target or a
    database cannot be had; see `pipeline.errors`.
    """
    with open_databases([database, *shared], mode=Mode.READ_ONLY, create=False) as opened:
        requested = prepare_model(request)
        decisions = recorded_trials(measured_model(requested), opened)
        prepared, choices = select_as_measured(requested, opened, explain=True)
        named = [(choice.function, choice) for choice in choices]
        for bucket in prepared.buckets:
            chosen = bucket_kernels(prepared.of_bucket(bucket), opened, explain=True)
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
            records=in_order(group[0][1].trace),
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
        decisions=decisions,
    )
