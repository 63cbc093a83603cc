"""A cell whose tasks are tuned becomes an artifact: compiled, compared with the untuned model, validated, accepted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from relaxtune.pipeline.batch.cells import Cell
from relaxtune.pipeline.batch.tasks import log_fault
from relaxtune.pipeline.bench.measure import ORT_ARM, OWN_ARM, UNTUNED_ARM
from relaxtune.pipeline.environment import code_version, target_key
from relaxtune.pipeline.errors import ValidationFailedError
from relaxtune.pipeline.job_outcomes import artifact_of
from relaxtune.pipeline.jobs.compile_and_tune import Beforehand, finish_tuned
from relaxtune.pipeline.jobs.tuned_model import select_tuned
from relaxtune.pipeline.jobs.values import TuneRequest, TuneResult
from relaxtune.pipeline.prepare import PreparedModel, prepare_model, timed_stages
from relaxtune.pipeline.tuning.options import TuningOptions, TuningSummary
from relaxtune.pipeline.tuning.record import job_task
from relaxtune.tuning_db.batches import move_cell
from relaxtune.tuning_db.cell_states import CellFacts, CellState, TransitionError
from relaxtune.tuning_db.errors import TuningDatabaseError
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.urls import DatabaseUrl


@dataclass(frozen=True)
class FinishRequest:
    """A cell to finish, as plain values: it may be done by another process."""

    cell: Cell
    # The plan's name, and its batch in the database.
    plan: str
    batch_id: str
    database: DatabaseUrl
    out: Path  # The artifact's directory.
    options: TuningOptions
    samples: int
    tuned_by: str  # The job that tuned the cell's tasks.


@dataclass(frozen=True)
class ReadyCell:
    """A cell that waits for its tuning; None where a part is not built yet."""

    prepared: PreparedModel
    beforehand: Beforehand | None = None


@dataclass(frozen=True)
class FinishedCell:
    """The result of a cell; `stage_s` are the seconds of its stages."""

    state: CellState
    facts: CellFacts
    stage_s: Mapping[str, float] = field(default_factory=dict)


def finish_cell(
    request: FinishRequest,
    database: TuningDatabase,
    lock: AbstractContextManager[object] | None = None,
    on_validating: Callable[[], None] | None = None,
    ready: ReadyCell | None = None,
) -> FinishedCell:
    """Make the artifact of a cell; a job of its own says so in the database.

    `lock` is held while something is timed. `on_validating` is called once the database says that the cell is being
    validated. `ready` are the parts built while the cell was tuned; the others are built now.

    Raises `TuningDatabaseError`: the database is gone. All other errors are the cell's own, and in the result.
    """
    began = time.monotonic()
    try:
        with timed_stages() as stage_s:
            found = _finish(request, database, lock, on_validating or (lambda: None), ready)
            found = replace(found, stage_s=stage_s)
    except TransitionError as error:
        found = FinishedCell(error.state, CellFacts())
    except TuningDatabaseError:
        raise
    except Exception as error:  # a cell's own: it must not end the others
        log_fault(request.cell, error)
        found = FinishedCell(CellState.FAILED, CellFacts(error=error_text(error)))
    return replace(found, facts=replace(found.facts, seconds=time.monotonic() - began))


def error_text(error: Exception) -> str:
    """Return the message of an error, else its type."""
    return str(error) or type(error).__name__


def _finish(
    request: FinishRequest,
    database: TuningDatabase,
    lock: AbstractContextManager[object] | None,
    on_validating: Callable[[], None],
    ready: ReadyCell | None,
) -> FinishedCell:
    cell = request.cell

    def compiled() -> None:
        move_cell(database, request.batch_id, cell.name, CellState.VALIDATING)
        on_validating()

    prepared = prepare_model(cell.request) if ready is None else ready.prepared
    noted = {
        "batch": request.plan,
        "cell": cell.name,
        "tags": list(cell.tags),
        "source": cell.source,
        "tuned_by": request.tuned_by,
    }
    job = database.start_job(
        model=prepared.model.name,
        model_sha256=prepared.lowered.graph.source_sha256,
        target=target_key(prepared.target),
        options=json.dumps(noted),
        code_version=code_version(),
    )
    outcome = "interrupted"
    try:
        database.record_job_tasks(job.id, [job_task(task) for task in prepared.tasks])
        nothing = TuningSummary((), 0.0, {}, interrupted=False)
        tuned = select_tuned(prepared, request.options, database, request.tuned_by, nothing, lock)
        tune_request = TuneRequest(request.database, request.options, samples=request.samples, limits=cell.limits)
        result = finish_tuned(
            prepared,
            tuned,
            tune_request,
            database,
            request.out,
            lock=lock,
            on_compiled=compiled,
            beforehand=None if ready is None else ready.beforehand,
        )
        found = _found(result)
        outcome = found.state.value
    except Exception as error:
        outcome = f"failed: {type(error).__name__}"
        raise
    finally:
        database.finish_job(job.id, outcome)
    return replace(found, facts=replace(found.facts, job_id=job.id))


def _found(result: TuneResult) -> FinishedCell:
    validation, directory = result.compiled.validation, result.compiled.directory
    reasons = [result.missed] if result.missed else []
    if validation is not None and not validation.passed:
        try:
            validation.raise_if_failed()
        except ValidationFailedError as error:
            reasons.append(str(error))
    medians = {} if result.shipping is None else {arm.name: arm.median_ms for arm in result.shipping.report.arms}
    facts = CellFacts(
        error="; ".join(reasons) or None,
        model=result.compiled.manifest.model,
        artifact=str(directory),
        artifact_key=artifact_of(result.compiled.manifest, directory).key,
        size_bytes=sum(path.stat().st_size for path in directory.iterdir()),
        validated=None if validation is None else validation.passed,
        untuned_ms=medians.get(UNTUNED_ARM),
        shipped_ms=medians.get(OWN_ARM),
        peer=ORT_ARM if ORT_ARM in medians else None,
        peer_ms=medians.get(ORT_ARM),
    )
    return FinishedCell(CellState.REJECTED if reasons else CellState.DONE, facts)
