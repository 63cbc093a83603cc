"""`TuningDatabase`: the only door to the tuning database, in one SQL database of SQLite or PostgreSQL."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from relaxtune.tuning_db.artifacts import Artifact, Benchmark, Validation
from relaxtune.tuning_db.errors import DatabaseOpenError, NotFoundError
from relaxtune.tuning_db.jobs import Job, JobTask
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.records import (
    DatabaseInfo,
    Mode,
    RecordFilter,
    Route,
    Status,
    TargetKey,
    TuningRecord,
    Workload,
    utc_now,
)
from relaxtune.tuning_db.sql import artifact_rows, ranking, writing
from relaxtune.tuning_db.sql.engine import Location, database_size, make_engine, parse_location
from relaxtune.tuning_db.sql.migrate import check_revision, current_revision, migrate
from relaxtune.tuning_db.sql.rows import to_job, to_job_task, to_workload
from relaxtune.tuning_db.sql.schema import HEAD_REVISION, Base, JobRow, JobTaskRow, RecordRow, SignatureRow, WorkloadRow
from relaxtune.tuning_db.sql.statements import (
    conditions,
    read_records,
    select_job_tasks,
    select_jobs,
    select_records,
    select_workloads,
)
from relaxtune.tuning_db.sql.transactions import Transactions
from relaxtune.tuning_db.urls import DatabasePlace

NO_FILTER = RecordFilter()
_COUNTED = (
    *("workloads", "signatures", "targets", "environments", "jobs", "artifacts", "validations", "benchmarks"),
    "records",
)
T = TypeVar("T")
P = ParamSpec("P")


class TuningDatabase(Transactions):
    """The tuning database. This docstring is its contract, which several databases keep as layers too (`layers`).

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

    **Truth.** `list_top`, `list_top_each` and `list_failed` return records that are true at a question's place, by the
    rules of `tuning_db.lookup`. A failed candidate is kept with its error text.

    **Modes.** `read-only` refuses every write, and opens a SQLite file so that it cannot change; `tune` and `force` are
    alike here: what `force` means is for the tuning code.

    **Errors.** Nothing but `TuningDatabaseError` and its leaves is raised for what can go wrong outside the caller.
    """

    def __init__(self, location: Location, engine: Engine, mode: Mode) -> None:
        """Hold an engine; use `TuningDatabase.open`."""
        super().__init__(location, engine, mode)
        self._places = ranking.PlaceCache()

    # -- opening -----------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, url: DatabasePlace, *, mode: Mode = Mode.TUNE, create: bool = True) -> Self:
        """Return the database at `url`, created if it is not there.

        `url`: a path, `sqlite:///path`, `sqlite://` for memory, or `postgresql://user@host/name`. `mode`: `READ_ONLY`
        never creates nor writes. `create`: whether a missing database is created.
        Raises `DatabaseUrlError`: the URL, its dialect or its driver cannot be used; `DatabaseOpenError`: there is no
        database, or it is damaged, protected, or not ours; `SchemaVersionError`: its schema is older or newer than this
        package's.
        """
        location = parse_location(url)
        mode = Mode(mode)
        read_only = mode is Mode.READ_ONLY
        database = cls(location, make_engine(location, read_only=read_only, create=create), mode)
        try:
            database._prepare(create=create and not read_only)
        except BaseException:
            database.close()
            raise
        return database

    def _prepare(self, *, create: bool) -> None:
        revision = self.read(lambda session: current_revision(session.connection(), self._location))
        if revision is None:
            if not create:
                raise DatabaseOpenError(
                    f"The database {self._location.shown} is empty. Create its tables with: "
                    f"relaxtune db init --db {self._location.shown}"
                )
            self.write(lambda session: migrate(session.connection(), self._location))
            return
        check_revision(revision, self._location)

    # -- writing -----------------------------------------------------------------------------------------------------

    def record_all(self, *, workloads: Sequence[Workload], records: Sequence[TuningRecord]) -> list[int]:
        """Keep workloads and records in one transaction, all or none, and return the ids of the records in order.

        A workload already known gets the signature, name and IR given now.

        Raises `NotFoundError`: the workload, the signature or the job of a record is not in the database.
        """
        if not workloads and not records:
            return []

        def work(session: Session) -> list[int]:
            writing.put_workloads(session, workloads)
            return writing.put_records(session, records) if records else []

        return self.write(work)

    def record_workload(self, workload: Workload) -> None:
        """Keep a workload; see `record_all`."""
        self.record_all(workloads=[workload], records=[])

    def record_measurements(self, records: Sequence[TuningRecord]) -> list[int]:
        """Keep records, all or none, and return their ids in the same order; see `record_all`."""
        return self.record_all(workloads=[], records=records)

    def record_measurement(self, record: TuningRecord) -> int:
        """Keep one record and return its id."""
        return self.record_measurements([record])[0]

    def start_job(
        self, *, model: str, model_sha256: str, target: TargetKey, options: str = "{}", code_version: str | None = None
    ) -> Job:
        """Keep and return a new job that starts now; `options` is JSON, `code_version` the relaxtune that runs."""
        job = Job(str(uuid.uuid4()), model, model_sha256, target, options, utc_now(), code_version=code_version)
        self.write(lambda session: writing.put_job(session, job))
        return job

    def finish_job(self, job_id: str, outcome: str) -> Job:
        """Note that a job ended now, and how; return it."""
        moment = utc_now()
        return self.write(lambda session: writing.finish_job(session, job_id, outcome, moment))

    def record_job_tasks(self, job_id: str, tasks: Sequence[JobTask]) -> None:
        """Keep the tasks of a job, all or none; a task already there gets the weight, nodes and seconds given now."""
        self.write(lambda session: writing.put_job_tasks(session, job_id, tasks))

    def record_artifact(self, artifact: Artifact) -> None:
        """Keep a compiled module; the same one written again, wherever, is kept once."""
        self.write(lambda session: artifact_rows.put_artifact(session, artifact))

    def record_validation(self, validation: Validation) -> None:
        """Keep a validation of an artifact that was recorded."""
        self.write(lambda session: artifact_rows.put_validation(session, validation))

    def record_benchmark(self, benchmark: Benchmark) -> None:
        """Keep a benchmark of an artifact that was recorded."""
        self.write(lambda session: artifact_rows.put_benchmark(session, benchmark))

    # -- reading -----------------------------------------------------------------------------------------------------

    def list_top(self, question: Question, *, k: int = 10) -> list[TuningRecord]:
        """Return up to `k` valid records that are true here, the best first."""
        return self.list_top_each([question], k=k)[0]

    def list_top_each(self, questions: Sequence[Question], *, k: int = 10) -> list[list[TuningRecord]]:
        """Return what `list_top` returns for each question; many at once take little longer than one."""
        # One question reads records once for each rank. Writes of others meanwhile change no earlier rank.
        single = len(questions) == 1
        return self.read(lambda session: ranking.top_records(session, questions, k, self._places), single=single)

    def find_best(self, question: Question) -> TuningRecord | None:
        """Return the first of `list_top`, or None."""
        return next(iter(self.list_top(question, k=1)), None)

    def list_failed(self, question: Question, *, status: Status | None = None) -> list[TuningRecord]:
        """Return the failed records that are true here, the oldest first; those of one status, or of every failure.

        Records of lower architectures are among them, as in `list_top`.
        """
        return self.read(lambda session: ranking.failed_records(session, question, status, self._places), single=True)

    def list_records(
        self, filters: RecordFilter = NO_FILTER, *, limit: int | None = None, offset: int = 0
    ) -> list[TuningRecord]:
        """Return the records that a filter selects, layer by layer, in the order they were written."""
        statement = select_records().where(*conditions(filters)).order_by(RecordRow.id).limit(limit).offset(offset)
        return self.read(lambda session: read_records(session, statement, self._places.get(session.connection())))

    def list_known(self, filters: RecordFilter, *, workload_hashes: Sequence[str]) -> list[TuningRecord]:
        """Return the records of some workloads that a filter selects, by workload, in the order they were written."""

        def work(session: Session) -> list[TuningRecord]:
            found: list[TuningRecord] = []
            places = self._places.get(session.connection())
            for part in writing.chunks(list(dict.fromkeys(workload_hashes))):
                wanted = select(WorkloadRow.id).where(WorkloadRow.workload_hash.in_(part))
                statement = (
                    select_records()
                    .where(RecordRow.workload_id.in_(wanted), *conditions(filters))
                    .order_by(RecordRow.workload_id, RecordRow.id)
                )
                found += read_records(session, statement, places)
            return found

        return self.read(work)

    def get_record(self, record_id: int) -> TuningRecord:
        """Return one record.

        Raises `NotFoundError`: there is none with this id.
        """
        statement = select_records().where(RecordRow.id == record_id)
        found = self.read(lambda session: read_records(session, statement))
        if not found:
            raise NotFoundError(f"No record {record_id} in {self._location.shown}. `relaxtune db query` lists them.")
        return found[0]

    def count_records(self, filters: RecordFilter = NO_FILTER) -> int:
        """Return how many records `list_records` would return."""
        statement = select(func.count()).select_from(RecordRow).where(*conditions(filters))
        return self.read(lambda session: session.execute(statement).scalar_one())

    def find_workload(self, workload_hash: str, tvm_version: str | None = None) -> Workload | None:
        """Return a workload as `get_workload` does, or None."""
        statement = select_workloads().where(WorkloadRow.workload_hash == workload_hash)
        statement = statement.order_by(WorkloadRow.id.desc()).limit(1)
        if tvm_version is not None:
            statement = statement.where(WorkloadRow.tvm_version == tvm_version)

        def work(session: Session) -> Workload | None:
            row = session.execute(statement).one_or_none()
            return None if row is None else to_workload(*row)

        return self.read(work)

    def has_workload(self, workload_hash: str, tvm_version: str | None = None) -> bool:
        """Return whether a workload is known, by this TVM version or, with None, by any."""
        return self.find_workload(workload_hash, tvm_version) is not None

    def get_workload(self, workload_hash: str, tvm_version: str | None = None) -> Workload:
        """Return a workload; with no TVM version, the one recorded last.

        Raises `NotFoundError`: it is not known.
        """
        workload = self.find_workload(workload_hash, tvm_version)
        if workload is None:
            version = "any TVM version" if tvm_version is None else f"TVM {tvm_version}"
            raise NotFoundError(
                f"No workload {workload_hash} of {version} in {self.url}. `relaxtune db workloads` lists them."
            )
        return workload

    def list_workloads(self, *, family: str | None = None, signature_key: str | None = None) -> list[Workload]:
        """Return the workloads known, layer by layer, in the order they were recorded."""
        statement = select_workloads().order_by(WorkloadRow.id)
        if family is not None:
            statement = statement.where(SignatureRow.family == family)
        if signature_key is not None:
            statement = statement.where(SignatureRow.key == signature_key)
        return self.read(lambda session: [to_workload(*row) for row in session.execute(statement)])

    def get_job(self, job_id: str) -> Job:
        """Return a job.

        Raises `NotFoundError`: it is not known.
        """
        return self.read(lambda session: writing.get_job(session, job_id))

    def list_jobs(self, *, model: str | None = None, limit: int | None = None) -> list[Job]:
        """Return the jobs, the newest first."""
        statement = select_jobs().order_by(JobRow.started_at.desc(), JobRow.id).limit(limit)
        if model is not None:
            statement = statement.where(JobRow.model == model)
        return self.read(lambda session: [to_job(*row) for row in session.execute(statement)])

    def list_job_tasks(self, job_id: str) -> list[JobTask]:
        """Return the tasks of a job, in the order they were recorded."""
        statement = select_job_tasks().where(JobTaskRow.job_id == job_id).order_by(JobTaskRow.id)
        return self.read(lambda session: [to_job_task(*row) for row in session.execute(statement)])

    def list_artifacts(self) -> list[Artifact]:
        """Return the artifacts, in the order they were recorded."""
        return self.read(artifact_rows.list_artifacts)

    def list_validations(self) -> list[Validation]:
        """Return the validations, in the order they were recorded."""
        return self.read(artifact_rows.list_validations)

    def list_benchmarks(self) -> list[Benchmark]:
        """Return the benchmarks, in the order they were recorded."""
        return self.read(artifact_rows.list_benchmarks)

    def info(self) -> DatabaseInfo:
        """Return what the database holds, of one moment."""
        return self.read(self._info)

    def _info(self, session: Session) -> DatabaseInfo:
        tables = {name: Base.metadata.tables[name] for name in _COUNTED}
        counts = {name: session.scalar(select(func.count()).select_from(table)) or 0 for name, table in tables.items()}
        by_status = dict(session.execute(select(RecordRow.status, func.count()).group_by(RecordRow.status)).all())
        by_route = dict(session.execute(select(RecordRow.route, func.count()).group_by(RecordRow.route)).all())
        return DatabaseInfo(
            url=self._location.shown,
            dialect=self._location.dialect,
            mode=self._mode,
            schema_revision=current_revision(session.connection(), self._location) or HEAD_REVISION,
            **counts,
            records_by_status=tuple((status, by_status.get(status, 0)) for status in Status),
            records_by_route=tuple((route, by_route.get(route, 0)) for route in Route),
            size_bytes=database_size(session.connection()),
        )


def upgrade(url: DatabasePlace) -> str | None:
    """Bring the schema of the database at `url` to this package's; return the revision it had.

    Raises `SchemaVersionError`: the database is newer than this package.
    """
    location = parse_location(url)
    database = TuningDatabase(location, make_engine(location, read_only=False, create=False), Mode.TUNE)
    with database:
        return database.write(lambda session: migrate(session.connection(), location))


def question(work: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[TuningDatabase, P], T]:
    """Return a function that asks a database what `work` asks a session, on one consistent state."""

    @wraps(work)
    def ask(database: TuningDatabase, /, *arguments: P.args, **options: P.kwargs) -> T:
        return database.read(lambda session: work(session, *arguments, **options))

    return ask
