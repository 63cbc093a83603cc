"""`TuningDatabase`: the contract that every form of the tuning database keeps, and the only door to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar

from relaxtune.tuning_db.artifacts import Artifact, Benchmark, Validation
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.jobs import Job, JobTask
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.records import DatabaseInfo, Mode, RecordFilter, Status, TargetKey, TuningRecord, Workload

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

NO_FILTER = RecordFilter()
T = TypeVar("T")
P = ParamSpec("P")


class TuningDatabase(ABC):
    """The tuning database. This docstring is the contract; one SQL database keeps it, and so do several as layers.

    **Values.** All that goes in and comes out is a frozen value; no row, session or connection leaves. A value read
    stays as it was read.

    **Atomicity.** Each `record_*`, `start_job` and `finish_job` call is one transaction: when it returns, all of it is
    kept, also if the process is killed in the next moment; when it raises, none of it is.

    **Idempotence.** Everything is stored under a natural key (sha256 of its content, or workload hash and TVM version).
    Writing an equal value again changes nothing and returns the id of the first, so a write whose answer was lost may
    simply be repeated. Records are never updated.

    **Readers** see the last committed state at the moment of their call, never a part of a write, and do not wait for
    writers. A call that asks more than once (an export, a query) sees one state all along. A record just written by
    this process is seen by its next call.

    **Layers.** Questions about records and workloads are answered from all layers. The first layer alone is written,
    and ids, jobs, artifacts, exchange and queries are those of the first layer.

    **Threads** may share one instance. **Processes** open their own; an instance carried through `fork` drops the
    connections of its parent and opens new ones, but a memory database belongs to the process that opened it and
    refuses others.

    **Locks.** A write that meets another writer waits, with a bounded number of retries and jitter, and only then
    raises `DatabaseBusyError`. First creation by many processes at once is safe.

    **Truth.** `list_top`, `list_top_each` and `list_failed` return records that are true at the place asked for, by the
    rules of `tuning_db.lookup`. A failed candidate is kept with its error text.

    **Modes.** `read-only` refuses every write, and opens a SQLite file so that it cannot change; `tune` and `force` are
    alike here: what `force` means is for the tuning code.

    **Errors.** Nothing but `TuningDatabaseError` and its leaves is raised for what can go wrong outside the caller.
    """

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it is, without a password."""

    @property
    @abstractmethod
    def mode(self) -> Mode:
        """How it was opened."""

    @property
    @abstractmethod
    def writes(self) -> int:
        """How many writes of this object have ended, whatever came of them."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections; a memory database is gone."""

    @abstractmethod
    def read(self, work: Callable[[Session], T], *, single: bool = False) -> T:
        """Return `work(session)` on one consistent state. For modules of `tuning_db` only: rows must not leave it.

        `single` promises that one statement of `work` at most reads what others write. It then needs no transaction.
        """

    @abstractmethod
    def write(self, work: Callable[[Session], T]) -> T:
        """Return `work(session)`, committed whole; it may be run again after a lock. For `tuning_db` only."""

    # -- writing -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def record_all(self, *, workloads: Sequence[Workload], records: Sequence[TuningRecord]) -> list[int]:
        """Keep workloads and records in one transaction, all or none, and return the ids of the records in order.

        A workload already known gets the signature, name and IR given now.

        Raises
        ------
        NotFoundError
            The workload, the signature or the job of a record is not in the database.
        """

    def record_workload(self, workload: Workload) -> None:
        """Keep a workload; see `record_all`."""
        self.record_all(workloads=[workload], records=[])

    def record_measurements(self, records: Sequence[TuningRecord]) -> list[int]:
        """Keep records, all or none, and return their ids in the same order; see `record_all`."""
        return self.record_all(workloads=[], records=records)

    def record_measurement(self, record: TuningRecord) -> int:
        """Keep one record and return its id."""
        return self.record_measurements([record])[0]

    @abstractmethod
    def start_job(
        self, *, model: str, model_sha256: str, target: TargetKey, options: str = "{}", code_version: str | None = None
    ) -> Job:
        """Keep and return a new job that starts now; `options` is JSON, `code_version` the relaxtune that runs."""

    @abstractmethod
    def finish_job(self, job_id: str, outcome: str) -> Job:
        """Note that a job ended now, and how; return it."""

    @abstractmethod
    def record_job_tasks(self, job_id: str, tasks: Sequence[JobTask]) -> None:
        """Keep the tasks of a job, all or none; a task already there gets the weight, nodes and seconds given now."""

    @abstractmethod
    def record_artifact(self, artifact: Artifact) -> None:
        """Keep a compiled module; the same one written again, wherever, is kept once."""

    @abstractmethod
    def record_validation(self, validation: Validation) -> None:
        """Keep a validation of an artifact that was recorded."""

    @abstractmethod
    def record_benchmark(self, benchmark: Benchmark) -> None:
        """Keep a benchmark of an artifact that was recorded."""

    # -- records and workloads, of all layers ------------------------------------------------------------------------

    @abstractmethod
    def list_top(self, question: Question, *, k: int = 10) -> list[TuningRecord]:
        """Return up to `k` valid records that are true here, the best first."""

    @abstractmethod
    def list_top_each(self, questions: Sequence[Question], *, k: int = 10) -> list[list[TuningRecord]]:
        """Return what `list_top` returns for each question; many at once take little longer than one."""

    def find_best(self, question: Question) -> TuningRecord | None:
        """Return the first of `list_top`, or None."""
        return next(iter(self.list_top(question, k=1)), None)

    @abstractmethod
    def list_failed(self, question: Question, *, status: Status | None = None) -> list[TuningRecord]:
        """Return the failed records that are true here, the oldest first; those of one status, or of every failure.

        Records of lower architectures are among them, as in `list_top`.
        """

    @abstractmethod
    def list_records(
        self, filters: RecordFilter = NO_FILTER, *, limit: int | None = None, offset: int = 0
    ) -> list[TuningRecord]:
        """Return the records that a filter selects, layer by layer, in the order they were written."""

    @abstractmethod
    def list_known(self, filters: RecordFilter, *, workload_hashes: Sequence[str]) -> list[TuningRecord]:
        """Return the records of some workloads that a filter selects, by workload, in the order they were written."""

    @abstractmethod
    def count_records(self, filters: RecordFilter = NO_FILTER) -> int:
        """Return how many records `list_records` would return."""

    @abstractmethod
    def find_workload(self, workload_hash: str, tvm_version: str | None = None) -> Workload | None:
        """Return a workload as `get_workload` does, or None."""

    def has_workload(self, workload_hash: str, tvm_version: str | None = None) -> bool:
        """Return whether a workload is known, by this TVM version or, with None, by any."""
        return self.find_workload(workload_hash, tvm_version) is not None

    def get_workload(self, workload_hash: str, tvm_version: str | None = None) -> Workload:
        """Return a workload; with no TVM version, the one recorded last.

        Raises
        ------
        NotFoundError
            It is not known.
        """
        workload = self.find_workload(workload_hash, tvm_version)
        if workload is None:
            version = "any TVM version" if tvm_version is None else f"TVM {tvm_version}"
            raise NotFoundError(
                f"No workload {workload_hash} of {version} in {self.url}. `relaxtune db workloads` lists them."
            )
        return workload

    @abstractmethod
    def list_workloads(self, *, family: str | None = None, signature_key: str | None = None) -> list[Workload]:
        """Return the workloads known, layer by layer, in the order they were recorded."""

    # -- the first layer ---------------------------------------------------------------------------------------------

    @abstractmethod
    def get_record(self, record_id: int) -> TuningRecord:
        """Return one record.

        Raises
        ------
        NotFoundError
            There is none with this id.
        """

    @abstractmethod
    def get_job(self, job_id: str) -> Job:
        """Return a job.

        Raises
        ------
        NotFoundError
            It is not known.
        """

    @abstractmethod
    def list_jobs(self, *, model: str | None = None, limit: int | None = None) -> list[Job]:
        """Return the jobs, the newest first."""

    @abstractmethod
    def list_job_tasks(self, job_id: str) -> list[JobTask]:
        """Return the tasks of a job, in the order they were recorded."""

    @abstractmethod
    def list_artifacts(self, *, model: str | None = None) -> list[Artifact]:
        """Return the artifacts, in the order they were recorded."""

    @abstractmethod
    def list_validations(self, *, artifact_key: str | None = None) -> list[Validation]:
        """Return the validations, in the order they were recorded."""

    @abstractmethod
    def list_benchmarks(self, *, artifact_key: str | None = None) -> list[Benchmark]:
        """Return the benchmarks, in the order they were recorded."""

    @abstractmethod
    def info(self) -> DatabaseInfo:
        """Return what the database holds, of one moment."""


def question(work: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[TuningDatabase, P], T]:
    """Return a function that asks a database what `work` asks a session, on one consistent state."""

    @wraps(work)
    def ask(database: TuningDatabase, /, *arguments: P.args, **options: P.kwargs) -> T:
        return database.read(lambda session: work(session, *arguments, **options))

    return ask
