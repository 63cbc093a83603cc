"""Candidates become records: what a tuning run reads from and writes to the tuning database."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import tvm

from relaxtune.pipeline.environment import code_version
from relaxtune.pipeline.errors import MeasuringBrokenError
from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.candidates import Candidate
from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured
from relaxtune.pipeline.tuning.options import TaskSummary
from relaxtune.tuning_db.errors import DatabaseBusyError, DatabaseLostError, DatabaseWriteError
from relaxtune.tuning_db.jobs import JobTask
from relaxtune.tuning_db.lookup import DeviceRank, device_rank, versions_match
from relaxtune.tuning_db.records import Environment, RecordFilter, Status, TargetKey, TuningRecord, Workload
from relaxtune.tuning_db.store import TuningDatabase

logger = logging.getLogger(__name__)

_US_PER_S = 1e6
# Writes take this share of a run at most, as long as that leaves no measurement unwritten for too long.
_FLUSH_SHARE = 0.005
_FLUSH_MIN_S = 1.0
_FLUSH_MAX_S = 10.0
# While a server is away, writes are tried less and less often, as each of them waits for it.
_RETRY_MAX_S = 300.0
_CLOSE_WAIT_S = 300.0
# This many candidates lost one after another are no accident.
_LOST_MAX = 16
# Faults that may be over the next time: a full disk, other writers, a server that restarts.
_PASSING = (DatabaseWriteError, DatabaseBusyError, DatabaseLostError)


def describe_workload(task: TuningTask, *, with_ir: bool = True) -> Workload:
    """Return the database's form of a task."""
    return Workload(
        workload_hash=task.workload_hash,
        family=task.family,
        signature=task.signature,
        name=task.name,
        flops=task.flops,
        bytes=task.bytes,
        ir_json=task.packed.text if with_ir else None,
        tvm_version=tvm.__version__,
    )


class Recorder:
    """Gathers records and writes them in batches; `flush` must be called in the end, whatever happened.

    Records have the given target, job and seed, and the environment of their backend. The time of the phase `database`
    is added to `seconds`.
    """

    def __init__(
        self,
        database: TuningDatabase,
        target: TargetKey,
        environment: Environment,
        *,
        job_id: str | None,
        seed: int,
        seconds: dict[str, float],
    ) -> None:
        self._database = database
        self._target = target
        self._environment = environment
        self._job_id = job_id
        self._seed = seed
        self._seconds = seconds
        self._signature_keys: dict[str, str] = {}
        self._pending: list[TuningRecord] = []
        self._interval_s = _FLUSH_MIN_S
        self._flushed_s = 0.0
        # Candidates lost one after another.
        self._lost = 0
        self._failed_s = 0.0
        # Records of the run's tasks, by workload, as they were when the task joined.
        self._known: dict[str, list[TuningRecord]] = {}
        self._unread: set[str] = set()

    def start(self, tasks: Sequence[TuningTask]) -> None:
        """Record the workloads, and that the job has these tasks."""
        workloads = [describe_workload(task) for task in tasks]
        self._unread |= {workload.workload_hash for workload in workloads} - self._signature_keys.keys()
        self._signature_keys |= {workload.workload_hash: workload.signature_key for workload in workloads}
        began = time.monotonic()
        self._database.record_all(workloads=workloads, records=[])
        if self._job_id is not None:
            self._database.record_job_tasks(self._job_id, [job_task(task) for task in tasks])
        self._seconds["database"] += time.monotonic() - began

    def finish(self, summaries: Sequence[TaskSummary]) -> None:
        """Record the seconds that each task of the job took."""
        began = time.monotonic()
        if self._job_id is not None:
            self._database.record_job_tasks(self._job_id, [job_task(s.task, s.seconds) for s in summaries])
        self._seconds["database"] += time.monotonic() - began

    def known(self, task: TuningTask) -> list[TuningRecord]:
        """Return the records of a task that are true on this very device, failed ones included; those of all layers.

        All tasks given to `start` are read at once, with the first of them.
        """
        if task.workload_hash not in self._unread:
            return self._known.get(task.workload_hash, [])
        began = time.monotonic()
        place = RecordFilter(
            target_kind=self._target.kind,
            arch=self._target.arch,
            tvm_version=self._environment.tvm_version,
            device_name=self._environment.device_name,
        )
        records = self._database.list_known(place, workload_hashes=sorted(self._unread))
        self._unread = set()
        for record in records:
            same_device = device_rank(self._environment, record.environment) is DeviceRank.SAME_DEVICE
            if same_device and versions_match(self._environment, record.environment, record.route):
                self._known.setdefault(record.workload_hash, []).append(record)
        self._seconds["database"] += time.monotonic() - began
        return self._known.get(task.workload_hash, [])

    def add(self, task: TuningTask, candidate: Candidate) -> Candidate:
        """Keep a finished candidate for the next `flush` and return it as recorded; a lost one leaves no record."""
        outcome = candidate.outcome
        if outcome is None or isinstance(outcome.status, Unmeasured):
            return candidate
        ok = outcome.status is Status.OK
        self._lost = 0
        self._pending.append(
            TuningRecord(
                workload_hash=task.workload_hash,
                signature_key=self._signature_keys[task.workload_hash],
                target=self._target,
                environment=outcome.environment or self._environment,
                route=candidate.route,
                decision=candidate.decision,
                status=outcome.status,
                latencies_us=tuple(value * _US_PER_S for value in outcome.seconds) if ok else (),
                error=outcome.error,
                registers=outcome.resources.registers,
                smem_bytes=outcome.resources.smem_bytes,
                spill_bytes=outcome.resources.spill_bytes,
                kernel_hash=outcome.resources.kernel_hash,
                seed=self._seed,
                duration_s=outcome.duration_s,
                job_id=self._job_id,
                code_version=code_version(),
            )
        )
        return candidate.recorded()

    def lose(self, task: TuningTask, outcome: Outcome) -> None:
        """Log a lost candidate; it leaves no record.

        Raises `MeasuringBrokenError`: too many were lost one after another.
        """
        self._lost += not outcome.no_reference
        message = f"a candidate of task {task.name} was lost and is not recorded: {last_line(outcome.error)}"
        logger.warning("%s", message)
        logger.debug("%s", outcome.error)
        if self._lost > _LOST_MAX:
            raise MeasuringBrokenError(
                f"{_LOST_MAX} candidates in a row were lost, through no fault of theirs; {message}"
            )

    @property
    def flush_interval_s(self) -> float:
        """Seconds between two writes: they take a small share of the run, and a killed run loses no more than that."""
        return self._interval_s

    def flush_if_due(self) -> None:
        """Write what is pending, or nothing if the last write was a moment ago."""
        if time.monotonic() - self._flushed_s > self.flush_interval_s:
            self.try_flush()
            self._flushed_s = time.monotonic()

    def flush(self) -> None:
        """Write what is pending, all or none.

        Raises `TuningDatabaseError`: it cannot be written; it stays pending.
        """
        if not self._pending:
            return
        began = time.monotonic()
        try:
            self._database.record_measurements(self._pending)
            self._pending = []
            self._failed_s = 0.0
        finally:
            took = time.monotonic() - began
            self._seconds["database"] += took
            self._interval_s = min(_FLUSH_MAX_S, max(_FLUSH_MIN_S, took / _FLUSH_SHARE))

    def try_flush(self) -> None:
        """Write what is pending, or keep it for the next time: a full disk may be emptied while a run goes on."""
        try:
            self.flush()
        except _PASSING as e:
            self._interval_s = min(_RETRY_MAX_S, 2 * max(self._failed_s, _FLUSH_MAX_S))
            self._failed_s = self._interval_s
            logger.warning("%d measurements wait for the database: %s", len(self._pending), e)

    def close(self) -> None:
        """Write what is pending, at the end of a run: a server that is away is waited for.

        Raises `TuningDatabaseError`: it cannot be written, or the server did not come back.
        """
        began = time.monotonic()
        while True:
            try:
                self.flush()
            except (DatabaseLostError, DatabaseBusyError) as e:
                if time.monotonic() - began > _CLOSE_WAIT_S:
                    raise
                logger.warning("%d measurements wait for the database: %s", len(self._pending), e)
                time.sleep(1.0)
            else:
                return


def job_task(task: TuningTask, seconds: float = 0.0) -> JobTask:
    """Return the database's form of a task of a job."""
    return JobTask(task.workload_hash, tvm.__version__, task.weight, task.onnx_nodes, seconds)
