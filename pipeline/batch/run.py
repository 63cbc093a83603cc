"""A plan carried out on this machine: every cell prepared, the tasks of a target tuned once, each cell finished.

A cell that cannot be had, fails validation or misses a limit does not stop the others, unless that is asked for.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from relaxtune.pipeline.artifact.directory import check_destination
from relaxtune.pipeline.batch.cells import Cell, list_cells
from relaxtune.pipeline.batch.executors import Executors, open_executors
from relaxtune.pipeline.batch.plan import Plan
from relaxtune.pipeline.batch.tasks import (
    CellFault,
    CellTasks,
    TaskGroup,
    group_cells,
    log_fault,
    prepare_cell,
    share_budget,
)
from relaxtune.pipeline.bench.measure import OWN_ARM, UNTUNED_ARM
from relaxtune.pipeline.errors import InterruptedEarlyError, PipelineError, ValidationFailedError
from relaxtune.pipeline.jobs import TuneRequest, TuneResult, finish_tuned
from relaxtune.pipeline.prepare import prepare_model
from relaxtune.pipeline.tuned_model import select_tuned, tune_tasks
from relaxtune.pipeline.tuning.options import TuningOptions, TuningSummary
from relaxtune.pipeline.tuning.plan.recorder import job_task
from relaxtune.pipeline.tuning.progress import ProgressListener, SilentProgress
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.errors import TuningDatabaseError
from relaxtune.tuning_db.layers import open_databases

logger = logging.getLogger(__name__)


class CellStatus(StrEnum):
    """What became of a cell: `rejected` has an artifact, which is not accepted; `failed` has none."""

    DONE = "done"
    REJECTED = "rejected"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class CellResult:
    """What became of a cell.

    Attributes
    ----------
    validated
        Whether its outputs agree with ONNX Runtime's; None where that was not found out.
    untuned_ms, shipped_ms
        Median latency of the model without records, and of the artifact, measured in one run.
    artifact
        Its directory; `NAME.rejected` of one that was rejected.
    reason
        Why it is not done, "" where it is.
    seconds
        Compiling, comparing and validating it.
    """

    cell: Cell
    status: CellStatus
    validated: bool | None = None
    untuned_ms: float | None = None
    shipped_ms: float | None = None
    artifact: Path | None = None
    reason: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, object]:
        """Return the result as plain JSON data."""
        cell = asdict(self.cell)
        return {
            "cell": cell.pop("name"),
            "status": self.status.value,
            "validated": self.validated,
            "untuned_ms": self.untuned_ms,
            "shipped_ms": self.shipped_ms,
            "artifact": None if self.artifact is None else str(self.artifact),
            "reason": self.reason,
            "seconds": self.seconds,
            **cell,
        }


@dataclass(frozen=True)
class BatchResult:
    """What became of a plan: its cells in the plan's order, and the tuning run of each target that had one."""

    plan: Plan
    cells: tuple[CellResult, ...]
    tuning: tuple[TuningSummary, ...]

    @property
    def exit_code(self) -> int:
        """What the command line returns: 0 where every cell was accepted, 3 where a validation failed, else 1."""
        if any(one.validated is False for one in self.cells):
            return ValidationFailedError.exit_code
        return int(any(one.status is not CellStatus.DONE for one in self.cells))


def run_batch(
    plan: Plan,
    *,
    fail_fast: bool = False,
    on_cell: Callable[[CellResult], None] | None = None,
    progress: ProgressListener | None = None,
    cluster: str | None = None,
) -> BatchResult:
    """Carry out a plan.

    Parameters
    ----------
    fail_fast : bool
        Whether the first cell that is not accepted ends the run; what comes after it is `skipped`.
    on_cell : callable or None
        Told of each cell when it is finished.
    progress : ProgressListener or None
        Told of each candidate.
    cluster : str or None
        See `open_executors`.

    Notes
    -----
    Ctrl-C during the tuning keeps every finished measurement. The cells of that target are still finished, those of
    targets not tuned yet are skipped.

    Raises
    ------
    PlanError, ArtifactError, TuningDatabaseError
        The plan says what cannot be, an artifact's place cannot be written, the database cannot be had: before
        anything is started. TuningDatabaseError also later.
    InterruptedEarlyError
        Ctrl-C came before anything was measured.
    """
    cells = list_cells(plan)
    for cell in cells:
        check_destination(plan.out / cell.name)
    found: dict[str, CellResult] = {}
    tuning: list[TuningSummary] = []
    why = "the run was interrupted before it"
    with open_executors(cluster) as executors, open_databases([plan.database]) as database:
        results = _results(plan, cells, database, executors, progress or SilentProgress(), tuning)
        with closing(results):
            for result in results:
                found[result.cell.name] = result
                if on_cell is not None:
                    on_cell(result)
                if fail_fast and result.status is not CellStatus.DONE:
                    why = f"--fail-fast: {result.cell.name} is {result.status.value}"
                    break
    for cell in cells:
        if cell.name not in found:
            found[cell.name] = CellResult(cell, CellStatus.SKIPPED, reason=why)
            if on_cell is not None:
                on_cell(found[cell.name])
    return BatchResult(plan, tuple(found[cell.name] for cell in cells), tuple(tuning))


def _results(
    plan: Plan,
    cells: Sequence[Cell],
    database: TuningDatabase,
    executors: Executors,
    progress: ProgressListener,
    tuning: list[TuningSummary],
) -> Generator[CellResult]:
    """Yield the cells as they are finished; `tuning` gets the summary of each tuning run."""
    prepared: list[CellTasks] = []
    for cell in cells:
        logger.info("preparing %s", cell.name)
        one = prepare_cell(cell)
        if isinstance(one, CellFault) or one.note:
            yield CellResult(cell, CellStatus.FAILED, reason=one.note)
        else:
            prepared.append(one)
    groups = group_cells(prepared)
    for group, options in zip(groups, share_budget(plan, groups), strict=True):
        alone = sum(len(one.tasks) for one in group.cells)
        logger.info("%s: %d tasks of %d cells, %d before merging", group.target.arch, len(group.tasks),
                    len(group.cells), alone)  # fmt: skip
        try:
            job_id, summary = tune_tasks(group.job(plan), group.tasks, options, database, progress, executors.backends)
        except InterruptedEarlyError:
            raise
        except PipelineError as error:
            for one in group.cells:
                yield CellResult(one.cell, CellStatus.FAILED, reason=_told(error))
            continue
        tuning.append(summary)
        for one in group.cells:
            yield _finish(plan, group, one, options, database, job_id, summary)
        if summary.interrupted:
            return


def _finish(
    plan: Plan,
    group: TaskGroup,
    one: CellTasks,
    options: TuningOptions,
    database: TuningDatabase,
    tuned_by: str,
    summary: TuningSummary,
) -> CellResult:
    """Make the artifact of a cell whose tasks are tuned; a job of its own says so in the database."""
    cell = one.cell
    logger.info("finishing %s", cell.name)
    began = time.monotonic()
    noted = {
        "batch": plan.name,
        "cell": cell.name,
        "tags": list(cell.tags),
        "source": cell.source,
        "tuned_by": tuned_by,
    }
    job = database.start_job(
        model=one.model, model_sha256=one.model_sha256, target=group.key, options=json.dumps(noted)
    )
    outcome = "interrupted"
    try:
        database.record_job_tasks(job.id, [job_task(task) for task in one.tasks])
        prepared = prepare_model(cell.request)
        tuned = select_tuned(prepared, options, database, tuned_by, summary)
        request = TuneRequest(plan.database, options, samples=plan.table.samples, limits=cell.limits)
        made = finish_tuned(prepared, tuned, request, database, plan.out / cell.name)
        result = _result_of(cell, made, time.monotonic() - began)
        outcome = result.status.value
    except TuningDatabaseError:
        outcome = "failed: TuningDatabaseError"
        raise
    except Exception as error:  # a cell's own: it must not end the others
        log_fault(cell, error)
        result = CellResult(cell, CellStatus.FAILED, reason=_told(error), seconds=time.monotonic() - began)
        outcome = f"failed: {type(error).__name__}"
    finally:
        database.finish_job(job.id, outcome)
    return result


def _result_of(cell: Cell, made: TuneResult, seconds: float) -> CellResult:
    validation, shipping = made.compiled.validation, made.shipping
    reasons = [made.missed] if made.missed else []
    if validation is not None and not validation.passed:
        try:
            validation.raise_if_failed()
        except ValidationFailedError as error:
            reasons.append(str(error))
    untuned_ms, shipped_ms = (
        None if shipping is None else shipping.report.arm(arm).median_ms for arm in (UNTUNED_ARM, OWN_ARM)
    )
    return CellResult(
        cell,
        CellStatus.REJECTED if reasons else CellStatus.DONE,
        None if validation is None else validation.passed,
        untuned_ms,
        shipped_ms,
        made.compiled.directory,
        "; ".join(reasons),
        seconds,
    )


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
