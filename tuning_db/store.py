"""`SqlDatabase`: the tuning database in one SQL database, of SQLite or PostgreSQL."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Self

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session, undefer

from relaxtune.tuning_db.artifacts import Artifact, Benchmark, Validation
from relaxtune.tuning_db.contract import NO_FILTER, TuningDatabase
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
from relaxtune.tuning_db.sql.schema import (
    HEAD_REVISION,
    ArtifactRow,
    BenchmarkRow,
    EnvironmentRow,
    JobRow,
    JobTaskRow,
    RecordRow,
    SignatureRow,
    TargetRow,
    ValidationRow,
    WorkloadRow,
)
from relaxtune.tuning_db.sql.statements import conditions, read_records, select_records
from relaxtune.tuning_db.sql.transactions import Transactions
from relaxtune.tuning_db.urls import DatabasePlace


class SqlDatabase(Transactions, TuningDatabase):
    """One SQL database behind a URL: a file, the memory, or a server."""

    def __init__(self, location: Location, engine: Engine, mode: Mode) -> None:
        """Hold an engine; use `SqlDatabase.open`."""
        super().__init__(location, engine, mode)
        self._places = ranking.PlaceCache()

    # -- opening -----------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, url: DatabasePlace, *, mode: Mode = Mode.TUNE, create: bool = True) -> Self:
        """Return the database at `url`, created if it is not there.

        Parameters
        ----------
        url : str, Path or DatabaseUrl
            A path, `sqlite:///path`, `sqlite://` for memory, or `postgresql://user@host/name`.
        mode : Mode
            `READ_ONLY` never creates nor writes.
        create : bool
            Whether a missing database is created.

        Raises
        ------
        DatabaseUrlError
            The URL, its dialect or its driver cannot be used.
        DatabaseOpenError
            There is no database, or it is damaged, protected, or not ours.
        SchemaVersionError
            Its schema is older or newer than this package's.
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
        if not workloads and not records:
            return []

        def work(session: Session) -> list[int]:
            writing.put_workloads(session, workloads)
            return writing.put_records(session, records) if records else []

        return self.write(work)

    def start_job(
        self, *, model: str, model_sha256: str, target: TargetKey, options: str = "{}", code_version: str | None = None
    ) -> Job:
        job = Job(str(uuid.uuid4()), model, model_sha256, target, options, utc_now(), code_version=code_version)
        self.write(lambda session: writing.put_job(session, job))
        return job

    def finish_job(self, job_id: str, outcome: str) -> Job:
        moment = utc_now()
        return self.write(lambda session: writing.finish_job(session, job_id, outcome, moment))

    def record_job_tasks(self, job_id: str, tasks: Sequence[JobTask]) -> None:
        self.write(lambda session: writing.put_job_tasks(session, job_id, tasks))

    def record_artifact(self, artifact: Artifact) -> None:
        self.write(lambda session: artifact_rows.put_artifact(session, artifact))

    def record_validation(self, validation: Validation) -> None:
        self.write(lambda session: artifact_rows.put_validation(session, validation))

    def record_benchmark(self, benchmark: Benchmark) -> None:
        self.write(lambda session: artifact_rows.put_benchmark(session, benchmark))

    # -- reading -----------------------------------------------------------------------------------------------------

    def list_top(self, question: Question, *, k: int = 10) -> list[TuningRecord]:
        # Targets and environments that others add meanwhile are not asked for: none of them is ever removed.
        return self.read(lambda session: ranking.top_records(session, question, k, self._places), single=True)

    def list_top_each(self, questions: Sequence[Question], *, k: int = 10) -> list[list[TuningRecord]]:
        return self.read(lambda session: ranking.top_records_each(session, questions, k, self._places))

    def list_failed(self, question: Question, *, status: Status | None = None) -> list[TuningRecord]:
        return self.read(lambda session: ranking.failed_records(session, question, status, self._places), single=True)

    def list_records(
        self, filters: RecordFilter = NO_FILTER, *, limit: int | None = None, offset: int = 0
    ) -> list[TuningRecord]:
        statement = select_records().where(*conditions(filters)).order_by(RecordRow.id).limit(limit).offset(offset)
        return self.read(lambda session: read_records(session, statement, self._places.get(session.connection())))

    def list_known(self, filters: RecordFilter, *, workload_hashes: Sequence[str]) -> list[TuningRecord]:

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
        statement = select_records().where(RecordRow.id == record_id)
        found = self.read(lambda session: read_records(session, statement))
        if not found:
            raise NotFoundError(f"No record {record_id} in {self._location.shown}. `relaxtune db query` lists them.")
        return found[0]

    def count_records(self, filters: RecordFilter = NO_FILTER) -> int:
        statement = select(func.count()).select_from(RecordRow).where(*conditions(filters))
        return self.read(lambda session: session.execute(statement).scalar_one())

    def find_workload(self, workload_hash: str, tvm_version: str | None = None) -> Workload | None:
        statement = (
            select(WorkloadRow, SignatureRow)
            .join(SignatureRow, SignatureRow.id == WorkloadRow.signature_id)
            .where(WorkloadRow.workload_hash == workload_hash)
            .order_by(WorkloadRow.id.desc())
            .limit(1)
            .options(undefer(WorkloadRow.ir_json))
        )
        if tvm_version is not None:
            statement = statement.where(WorkloadRow.tvm_version == tvm_version)

        def work(session: Session) -> Workload | None:
            row = session.execute(statement).one_or_none()
            return None if row is None else to_workload(*row)

        return self.read(work)

    def list_workloads(self, *, family: str | None = None, signature_key: str | None = None) -> list[Workload]:
        statement = (
            select(WorkloadRow, SignatureRow)
            .join(SignatureRow, SignatureRow.id == WorkloadRow.signature_id)
            .order_by(WorkloadRow.id)
            .options(undefer(WorkloadRow.ir_json))
        )
        if family is not None:
            statement = statement.where(SignatureRow.family == family)
        if signature_key is not None:
            statement = statement.where(SignatureRow.key == signature_key)
        return self.read(lambda session: [to_workload(*row) for row in session.execute(statement)])

    def get_job(self, job_id: str) -> Job:
        return self.read(lambda session: writing.get_job(session, job_id))

    def list_jobs(self, *, model: str | None = None, limit: int | None = None) -> list[Job]:
        statement = select(JobRow, TargetRow).join(TargetRow, TargetRow.id == JobRow.target_id)
        statement = statement.order_by(JobRow.started_at.desc(), JobRow.id).limit(limit)
        if model is not None:
            statement = statement.where(JobRow.model == model)
        return self.read(lambda session: [to_job(*row) for row in session.execute(statement)])

    def list_job_tasks(self, job_id: str) -> list[JobTask]:
        statement = (
            select(JobTaskRow, WorkloadRow)
            .join(WorkloadRow, WorkloadRow.id == JobTaskRow.workload_id)
            .where(JobTaskRow.job_id == job_id)
            .order_by(JobTaskRow.id)
        )
        return self.read(lambda session: [to_job_task(*row) for row in session.execute(statement)])

    def list_artifacts(self, *, model: str | None = None) -> list[Artifact]:
        return self.read(lambda session: artifact_rows.list_artifacts(session, model))

    def list_validations(self, *, artifact_key: str | None = None) -> list[Validation]:
        return self.read(lambda session: artifact_rows.list_validations(session, artifact_key))

    def list_benchmarks(self, *, artifact_key: str | None = None) -> list[Benchmark]:
        return self.read(lambda session: artifact_rows.list_benchmarks(session, artifact_key))

    def info(self) -> DatabaseInfo:
        return self.read(self._info)

    def _info(self, session: Session) -> DatabaseInfo:
        def count(table: type) -> int:
            return session.execute(select(func.count()).select_from(table)).scalar_one()

        by_status = dict(session.execute(select(RecordRow.status, func.count()).group_by(RecordRow.status)).all())
        by_route = dict(session.execute(select(RecordRow.route, func.count()).group_by(RecordRow.route)).all())
        return DatabaseInfo(
            url=self._location.shown,
            dialect=self._location.dialect,
            mode=self._mode,
            schema_revision=current_revision(session.connection(), self._location) or HEAD_REVISION,
            workloads=count(WorkloadRow),
            signatures=count(SignatureRow),
            targets=count(TargetRow),
            environments=count(EnvironmentRow),
            jobs=count(JobRow),
            artifacts=count(ArtifactRow),
            validations=count(ValidationRow),
            benchmarks=count(BenchmarkRow),
            records=count(RecordRow),
            records_by_status=tuple((status, by_status.get(status, 0)) for status in Status),
            records_by_route=tuple((route, by_route.get(route, 0)) for route in Route),
            size_bytes=database_size(session.connection()),
        )


def upgrade(url: DatabasePlace) -> str | None:
    """Bring the schema of the database at `url` to this package's; return the revision it had.

    Raises
    ------
    SchemaVersionError
        The database is newer than this package.
    """
    location = parse_location(url)
    database = SqlDatabase(location, make_engine(location, read_only=False, create=False), Mode.TUNE)
    with database:
        return database.write(lambda session: migrate(session.connection(), location))
