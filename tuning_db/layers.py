"""A user's database over shared ones: one door, several layers.

The first layer alone is written; the others are opened read-only. A question about records or workloads goes to every
layer, and the answers are put together as if they were one database: a record that several layers hold is one record,
the upper layer's. Every record found names in `layer` the database it comes from. A record of a workload that
only a lower layer has takes the workload along.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self, TypeVar

from relaxtune.tuning_db.artifacts import Artifact, Benchmark, Validation
from relaxtune.tuning_db.contract import NO_FILTER, TuningDatabase
from relaxtune.tuning_db.errors import DatabaseUrlError
from relaxtune.tuning_db.jobs import Job, JobTask
from relaxtune.tuning_db.lookup import Question, rank_record
from relaxtune.tuning_db.records import DatabaseInfo, Mode, RecordFilter, Status, TargetKey, TuningRecord, Workload
from relaxtune.tuning_db.sql.engine import parse_location
from relaxtune.tuning_db.store import SqlDatabase
from relaxtune.tuning_db.urls import DatabasePlace

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

T = TypeVar("T")


def open_databases(urls: Sequence[DatabasePlace], *, mode: Mode = Mode.TUNE, create: bool = True) -> TuningDatabase:
    """Return the first of `urls`, over the others if there are any.

    Raises
    ------
    TuningDatabaseError
        See `LayeredDatabase.open_layers`.
    """
    if len(urls) == 1:
        return SqlDatabase.open(urls[0], mode=mode, create=create)
    return LayeredDatabase.open_layers(urls, mode=mode, create=create)


class LayeredDatabase(TuningDatabase):
    """Several databases as one: the first is written, and what the others know is found too."""

    def __init__(self, first: TuningDatabase, below: Sequence[TuningDatabase]) -> None:
        """Hold open databases, which are closed with this one."""
        self._first = first
        self._all = (first, *below)
        # Workloads, by hash and TVM version, that the first layer is known to have.
        self._own: set[tuple[str, str]] = set()

    @classmethod
    def open_layers(cls, urls: Sequence[DatabasePlace], *, mode: Mode = Mode.TUNE, create: bool = True) -> Self:
        """Return the first of `urls` over the others.

        Raises
        ------
        DatabaseUrlError
            No URL is given, or one twice.
        TuningDatabaseError
            See `SqlDatabase.open`; a shared database has to be there.
        """
        places = [parse_location(url).shown for url in urls]
        if not places or len(set(places)) != len(places):
            raise DatabaseUrlError(f"Layers need one database or more, each once: got {places}.")
        with ExitStack() as opened:
            below = [opened.enter_context(SqlDatabase.open(url, mode=Mode.READ_ONLY)) for url in urls[1:]]
            database = cls(SqlDatabase.open(urls[0], mode=mode, create=create), below)
            opened.pop_all()
        return database

    @property
    def layers(self) -> tuple[str, ...]:
        """The databases, the upper one first."""
        return tuple(layer.url for layer in self._all)

    @property
    def url(self) -> str:
        return self._first.url

    @property
    def mode(self) -> Mode:
        return self._first.mode

    @property
    def writes(self) -> int:
        return self._first.writes

    def close(self) -> None:
        for layer in self._all:
            layer.close()

    def read(self, work: Callable[[Session], T], *, single: bool = False) -> T:
        return self._first.read(work, single=single)

    def write(self, work: Callable[[Session], T]) -> T:
        return self._first.write(work)

    # -- writing -----------------------------------------------------------------------------------------------------

    def record_all(self, *, workloads: Sequence[Workload], records: Sequence[TuningRecord]) -> list[int]:
        given = {(workload.workload_hash, workload.tvm_version) for workload in workloads}
        wanted = {(record.workload_hash, record.environment.tvm_version) for record in records} - given
        carried = [workload for key in sorted(wanted - self._own) if (workload := self._only_below(*key)) is not None]
        ids = self._first.record_all(workloads=[*carried, *workloads], records=records)
        self._own |= given | wanted
        return ids

    def _only_below(self, workload_hash: str, tvm_version: str) -> Workload | None:
        own = self._first.find_workload(workload_hash, tvm_version)
        return None if own is not None else self.find_workload(workload_hash, tvm_version)

    def start_job(
        self, *, model: str, model_sha256: str, target: TargetKey, options: str = "{}", code_version: str | None = None
    ) -> Job:
        return self._first.start_job(
            model=model, model_sha256=model_sha256, target=target, options=options, code_version=code_version
        )

    def finish_job(self, job_id: str, outcome: str) -> Job:
        return self._first.finish_job(job_id, outcome)

    def record_job_tasks(self, job_id: str, tasks: Sequence[JobTask]) -> None:
        self._first.record_job_tasks(job_id, tasks)

    def record_artifact(self, artifact: Artifact) -> None:
        self._first.record_artifact(artifact)

    def record_validation(self, validation: Validation) -> None:
        self._first.record_validation(validation)

    def record_benchmark(self, benchmark: Benchmark) -> None:
        self._first.record_benchmark(benchmark)

    # -- records and workloads, of all layers ------------------------------------------------------------------------

    def _each_once(self, ask: Callable[[TuningDatabase], Iterable[TuningRecord]]) -> list[TuningRecord]:
        """Return what the layers answer, the upper layer's first; a record of two layers is the upper one's."""
        return self._joined([ask(layer) for layer in self._all])

    def _joined(self, answers: Sequence[Iterable[TuningRecord]]) -> list[TuningRecord]:
        """Put an answer of each layer together."""
        found: dict[str, TuningRecord] = {}
        for layer, records in zip(self._all, answers, strict=True):
            for record in records:
                found.setdefault(record.key, dataclasses.replace(record, layer=layer.url))
        return list(found.values())

    def list_top(self, question: Question, *, k: int = 10) -> list[TuningRecord]:
        return self.list_top_each([question], k=k)[0]

    def list_top_each(self, questions: Sequence[Question], *, k: int = 10) -> list[list[TuningRecord]]:
        answers = [layer.list_top_each(questions, k=k) for layer in self._all]
        return [
            self._ranked(question, [of_layer[number] for of_layer in answers], k)
            for number, question in enumerate(questions)
        ]

    def _ranked(self, question: Question, answers: Sequence[Iterable[TuningRecord]], k: int) -> list[TuningRecord]:
        found = self._joined(answers)
        ranks = [(rank_record(question.target, question.environment, record), record.latency_us) for record in found]
        # Of equal records the upper layer's comes first; inside a layer its own order holds.
        ranked = [(*rank, number) for number, rank in enumerate(ranks)]
        return [found[number] for *_, number in sorted(ranked)][: max(k, 0)]

    def list_failed(self, question: Question, *, status: Status | None = None) -> list[TuningRecord]:
        return self._each_once(lambda layer: layer.list_failed(question, status=status))

    def list_records(
        self, filters: RecordFilter = NO_FILTER, *, limit: int | None = None, offset: int = 0
    ) -> list[TuningRecord]:
        end = None if limit is None else offset + limit
        return self._each_once(lambda layer: layer.list_records(filters))[offset:end]

    def list_known(self, filters: RecordFilter, *, workload_hashes: Sequence[str]) -> list[TuningRecord]:
        return self._each_once(lambda layer: layer.list_known(filters, workload_hashes=workload_hashes))

    def count_records(self, filters: RecordFilter = NO_FILTER) -> int:
        return len(self.list_records(filters))

    def find_workload(self, workload_hash: str, tvm_version: str | None = None) -> Workload | None:
        found = (layer.find_workload(workload_hash, tvm_version) for layer in self._all)
        return next((workload for workload in found if workload is not None), None)

    def list_workloads(self, *, family: str | None = None, signature_key: str | None = None) -> list[Workload]:
        found: dict[tuple[str, str], Workload] = {}
        for layer in self._all:
            for workload in layer.list_workloads(family=family, signature_key=signature_key):
                found.setdefault((workload.workload_hash, workload.tvm_version), workload)
        return list(found.values())

    # -- the first layer ---------------------------------------------------------------------------------------------

    def get_record(self, record_id: int) -> TuningRecord:
        return self._first.get_record(record_id)

    def get_job(self, job_id: str) -> Job:
        return self._first.get_job(job_id)

    def list_jobs(self, *, model: str | None = None, limit: int | None = None) -> list[Job]:
        return self._first.list_jobs(model=model, limit=limit)

    def list_job_tasks(self, job_id: str) -> list[JobTask]:
        return self._first.list_job_tasks(job_id)

    def list_artifacts(self, *, model: str | None = None) -> list[Artifact]:
        return self._first.list_artifacts(model=model)

    def list_validations(self, *, artifact_key: str | None = None) -> list[Validation]:
        return self._first.list_validations(artifact_key=artifact_key)

    def list_benchmarks(self, *, artifact_key: str | None = None) -> list[Benchmark]:
        return self._first.list_benchmarks(artifact_key=artifact_key)

    def info(self) -> DatabaseInfo:
        return self._first.info()
