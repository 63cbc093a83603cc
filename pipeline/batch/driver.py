"""A plan carried out: its batch held in the database, each target's tasks tuned once, each cell accepted by itself.

A cell that cannot be imported, fails validation or misses a limit does not stop the others, unless `fail_fast` is set.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from relaxtune.pipeline.artifact.directory import check_destination
from relaxtune.pipeline.batch.board import Board
from relaxtune.pipeline.batch.cells import Cell, list_cells
from relaxtune.pipeline.batch.events import BatchEvent, BatchResult, OnEvent
from relaxtune.pipeline.batch.executors import Executors, open_executors
from relaxtune.pipeline.batch.feed import CellFeed
from relaxtune.pipeline.batch.finishing import FinishRequest
from relaxtune.pipeline.batch.plan import Plan, parse_plan
from relaxtune.pipeline.batch.tasks import group_job, group_options, group_targets, trials_of
from relaxtune.pipeline.batch.unchanged import cell_key, find_unchanged
from relaxtune.pipeline.errors import InterruptedEarlyError, PipelineError
from relaxtune.pipeline.jobs.compile_and_tune import not_here
from relaxtune.pipeline.jobs.tuned_model import tune_tasks
from relaxtune.pipeline.tuning.measure.stop import StopSignal, ctrl_c_requests
from relaxtune.pipeline.tuning.options import TuningSummary
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db import batches
from relaxtune.tuning_db.batches import batch_key
from relaxtune.tuning_db.cell_states import Batch, CellFacts, CellSpec, CellState
from relaxtune.tuning_db.layers import open_databases
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.urls import DatabasePlace, DatabaseUrl, hide_secrets

logger = logging.getLogger(__name__)

_POLL_S = 0.2


def run_batch(
    plan: Plan,
    *,
    fail_fast: bool = False,
    on_event: OnEvent | None = None,
    cluster: str | None = None,
    stop: StopSignal | None = None,
) -> BatchResult:
    """Carry out a plan.

    With `fail_fast` the first cell that is not accepted ends the run; the others stay queued. `on_event` is called with
    each state of each cell and each candidate, from several threads, one at a time. `cluster` is as in
    `open_executors`. `stop` ends the run from another thread. Ctrl-C keeps every finished measurement and every
    finished cell; `resume_batch` takes the others up.

    Raises `PlanError`, `ArtifactError`, `TuningDatabaseError`: the plan says what cannot be, an artifact's place cannot
    be written, the database cannot be had, another driver has the plan: before anything is started (the last also
    later); `InterruptedEarlyError`: Ctrl-C came before anything was measured or accepted.
    """
    cells = list_cells(plan)
    for cell in cells:
        check_destination(plan.out / cell.name)
    with open_executors(cluster, plan.database) as executors, open_databases([plan.database]) as database:
        specs = [_spec(plan, cell) for cell in cells]
        batch = batches.start_batch(
            database,
            key=batch_key(plan.name, plan.out),
            name=plan.name,
            path=str(plan.path.absolute()),
            plan=hide_secrets(plan.text),
            cells=specs,
        )
        return _drive(plan, batch, cells, executors, database, stop or StopSignal(), on_event, fail_fast=fail_fast)


def resume_batch(
    database: DatabasePlace,
    start: str | None = None,
    *,
    retry: bool = False,
    fail_fast: bool = False,
    on_event: OnEvent | None = None,
    cluster: str | None = None,
) -> BatchResult:
    """Go on with a batch that another driver left.

    `start`: the batch's name or the start of its id; None is the newest. `retry`: whether cells that failed, were
    rejected or were cancelled are done again.
    Raises `NotFoundError`, `BatchHeldError`: there is no such batch; its driver works on it.
    """
    with open_executors(cluster, database) as executors, open_databases([database], create=False) as opened:
        found = batches.get_batch(opened, start)
        plan = replace(parse_plan(Path(found.path), found.plan), place=DatabaseUrl.of(database))
        cells = list_cells(plan)
        batch = batches.take_batch(opened, found.id)
        if retry:
            for row in batches.list_cells(opened, batch.id):
                if row.state.over and row.state is not CellState.DONE:
                    batches.move_cell(opened, batch.id, row.spec.name, CellState.QUEUED)
        return _drive(plan, batch, cells, executors, opened, StopSignal(), on_event, fail_fast=fail_fast)


def _spec(plan: Plan, cell: Cell) -> CellSpec:
    return CellSpec(
        name=cell.name,
        source=cell.source,
        shape=cell.shape,
        buckets=";".join(cell.buckets),
        precision=cell.precision,
        effort=plan.table.effort.value,
        target=cell.target,
        importance=cell.importance,
        tags=",".join(cell.tags),
        key=cell_key(plan, cell, (plan.out / cell.name).absolute()),
        max_latency_ms=cell.limits.max_latency_ms,
        rtol=cell.limits.rtol,
        atol=cell.limits.atol,
    )


def _drive(
    plan: Plan,
    batch: Batch,
    cells: Sequence[Cell],
    executors: Executors,
    database: TuningDatabase,
    stop: StopSignal,
    on_event: OnEvent | None,
    *,
    fail_fast: bool,
) -> BatchResult:
    rows = {row.spec.name: row for row in batches.list_cells(database, batch.id)}
    known = {cell.name: (cell, rows[cell.name].state, rows[cell.name].facts) for cell in cells if cell.name in rows}
    board = Board(database, batch.id, known, stop, on_event or (lambda _: None), fail_fast=fail_fast)
    tuning: list[TuningSummary] = []
    outcome = "failed"
    try:
        with board, ctrl_c_requests(stop):
            for cell in cells:
                queued = board.state(cell) is CellState.QUEUED
                same = find_unchanged(database, rows[cell.name].spec.key) if queued else None
                if same is not None:
                    note = f"nothing changed since it was accepted at {same.updated_at:%Y-%m-%d %H:%M} UTC"
                    board.move(cell, CellState.DONE, replace(same.facts, seconds=0.0), note)
            groups = group_targets(cells)
            found: dict[int, TuningSummary] = {}

            def carry_out(positions: Sequence[int]) -> None:
                for one in positions:
                    target, group = groups[one]
                    if not stop.requested:
                        summary = _carry_out(plan, batch, target, group, len(cells), board, executors, database)
                        found.update({} if summary is None else {one: summary})

            try:
                side_by_side([partial(carry_out, one) for one in executors.apart([one for one, _ in groups])], stop)
            finally:
                tuning.extend(found[one] for one in sorted(found))
            for cell in cells:
                if board.state(cell).working:
                    board.move(cell, CellState.QUEUED)
        if board.lost is not None:
            raise board.lost
        result = BatchResult(plan, batch.id, tuple(board.events()), tuple(tuning))
        interrupted = stop.requested and board.failed_first is None
        outcome = "interrupted" if interrupted else f"{result.accepted} of {len(cells)} accepted"
        if interrupted and not result.accepted and not any(one.candidates for one in tuning):
            raise InterruptedEarlyError(
                f"interrupted before anything was measured; `relaxtune batch resume {plan.name}` goes on"
            )
        return result
    finally:
        if board.lost is None:
            batches.finish_batch(database, batch.id, outcome)


def _carry_out(
    plan: Plan,
    batch: Batch,
    target: ResolvedTarget,
    group: Sequence[Cell],
    every: int,
    board: Board,
    executors: Executors,
    database: TuningDatabase,
) -> TuningSummary | None:
    """Tune the tasks of one target's cells, of so many in the plan, and finish each; None where nothing was tuned."""
    left = [cell for cell in group if board.state(cell) is CellState.QUEUED]
    if not left:
        return None
    environment = executors.find_environment(target)
    if environment is None:
        for cell in left:
            board.move(cell, CellState.FAILED, CellFacts(error=not_here(target)))
        return None
    options = group_options(plan, len(group), every, executors.count_devices(target))
    # The job, once it has begun.
    job_ids: list[str] = []

    def request_of(cell: Cell) -> FinishRequest:
        out = (plan.out / cell.name).absolute()
        return FinishRequest(
            cell, plan.name, batch.id, plan.database, out, options, plan.table.samples, "".join(job_ids)
        )

    feed = CellFeed(left, board, database, executors.workers(target), request_of, trials_of(plan, every))
    try:
        _, summary = tune_tasks(
            group_job(plan, group, target, environment),
            (),
            options,
            database,
            partial(board.measured, target.arch),
            machine=executors.machine,
            feed=feed,
            stop=StopSignal(within=board.stop),
            on_job=job_ids.append,
        )
    except InterruptedEarlyError:
        return None
    except PipelineError as error:
        logger.warning("%s: nothing could be tuned: %s", target.arch, error)
        feed.fail_rest(error)
        return None
    counts = (len(summary.tasks), len(left), summary.candidates)
    logger.info("%s: %d tasks of %d cells, %d candidates", target.arch, *counts)
    feed.finish_rest()
    return summary


def side_by_side(parts: Sequence[Callable[[], None]], stop: StopSignal) -> None:
    """Do parts of a run at the same time, each in a thread; one alone in this one. The first error ends the others.

    This thread waits, and hears Ctrl-C.
    """
    if len(parts) == 1:
        parts[0]()
        return
    errors: list[BaseException] = []

    def do(part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as e:  # the border of a thread: the caller raises it
            errors.append(e)
            stop.request()

    threads = [threading.Thread(target=do, args=(one,), name="relaxtune-target", daemon=True) for one in parts]
    for one in threads:
        one.start()
    for one in threads:
        while one.is_alive():
            one.join(_POLL_S)
    if errors:
        raise errors[0]


class BatchRun:
    """A plan to carry out: it begins when it is iterated over, or with `result`.

    A loop that is left, by `break` or by Ctrl-C, ends the run: finished cells are kept.
    """

    def __init__(self, plan: Plan, *, fail_fast: bool = False, cluster: str | None = None) -> None:
        self._plan = plan
        self._fail_fast = fail_fast
        self._cluster = cluster
        self._result: BatchResult | None = None

    def __iter__(self) -> Iterator[BatchEvent]:
        """Carry the plan out, in a thread of its own, and yield what happens."""
        stop = StopSignal()
        events: SimpleQueue[BatchEvent | None] = SimpleQueue()
        run = partial(run_batch, fail_fast=self._fail_fast, on_event=events.put, cluster=self._cluster, stop=stop)
        with ThreadPoolExecutor(1, thread_name_prefix="relaxtune-batch") as pool:
            future = pool.submit(run, self._plan)
            future.add_done_callback(lambda _: events.put(None))
            try:
                while (event := events.get()) is not None:
                    yield event
            finally:
                # It is over, or its events are left: then it ends as soon as it can.
                stop.request()
        self._result = future.result()

    def result(self) -> BatchResult:
        """Return what became of the plan, which is carried out first if that was not done.

        Raises `UsageError`, `ArtifactError`, `TuningDatabaseError`, `InterruptedEarlyError`: see `run_batch`.
        """
        if self._result is None:
            self._result = run_batch(self._plan, fail_fast=self._fail_fast, cluster=self._cluster)
        return self._result
