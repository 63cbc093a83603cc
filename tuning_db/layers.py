"""A user's database over shared ones: one door, several layers.

The first layer alone is written; the others are opened read-only. A question about records or workloads goes to every
layer, and the answers are put together as if they were one database: a record that several layers hold is one record,
the upper layer's. Every record found names in `layer` the database it comes from. A record of a workload that
only a lower layer has takes the workload along.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Self

from sqlalchemy import Engine

from relaxtune.tuning_db.errors import DatabaseUrlError
from relaxtune.tuning_db.lookup import Question, rank_record
from relaxtune.tuning_db.records import Mode, RecordFilter, Status, TuningRecord, Workload
from relaxtune.tuning_db.sql.engine import Location, parse_location
from relaxtune.tuning_db.store import NO_FILTER, TuningDatabase
from relaxtune.tuning_db.urls import DatabasePlace

_ONE = TuningDatabase


def open_databases(urls: Sequence[DatabasePlace], *, mode: Mode = Mode.TUNE, create: bool = True) -> TuningDatabase:
    """Return the first of `urls`, over the others if there are any.

    Raises `TuningDatabaseError`: see `LayeredDatabase.open_layers`.
    """
    if len(urls) == 1:
        return TuningDatabase.open(urls[0], mode=mode, create=create)
    return LayeredDatabase.open_layers(urls, mode=mode, create=create)


class LayeredDatabase(TuningDatabase):
    """A database over others: what these know is found too; all else is the first one's."""

    def __init__(self, location: Location, engine: Engine, mode: Mode) -> None:
        super().__init__(location, engine, mode)
        self._below: tuple[TuningDatabase, ...] = ()
        # Workloads, by hash and TVM version, that the first layer is known to have.
        self._own: set[tuple[str, str]] = set()

    @classmethod
    def open_layers(cls, urls: Sequence[DatabasePlace], *, mode: Mode = Mode.TUNE, create: bool = True) -> Self:
        """Return the first of `urls` over the others.

        Raises `DatabaseUrlError`: no URL is given, or one twice; `TuningDatabaseError`: see `TuningDatabase.open`; a
        shared database has to be there.
        """
        places = [parse_location(url).shown for url in urls]
        if not places or len(set(places)) != len(places):
            raise DatabaseUrlError(f"Layers need one database or more, each once: got {places}.")
        with ExitStack() as opened:
            below = [opened.enter_context(TuningDatabase.open(url, mode=Mode.READ_ONLY)) for url in urls[1:]]
            database = cls.open(urls[0], mode=mode, create=create)
            opened.pop_all()
        database._below = tuple(below)
        return database

    @property
    def layers(self) -> tuple[str, ...]:
        """The databases, the upper one first."""
        return tuple(layer.url for layer in self._all)

    @property
    def _all(self) -> tuple[TuningDatabase, ...]:
        return (self, *self._below)

    def close(self) -> None:
        super().close()
        for layer in self._below:
            layer.close()

    def record_all(self, *, workloads: Sequence[Workload], records: Sequence[TuningRecord]) -> list[int]:
        given = {(workload.workload_hash, workload.tvm_version) for workload in workloads}
        wanted = {(record.workload_hash, record.environment.tvm_version) for record in records} - given
        missing = [
            key for key in sorted(wanted - self._own) if super(LayeredDatabase, self).find_workload(*key) is None
        ]
        carried = [workload for key in missing if (workload := self.find_workload(*key)) is not None]
        ids = super().record_all(workloads=[*carried, *workloads], records=records)
        self._own |= given | wanted
        return ids

    def _joined(self, answers: Iterable[Iterable[TuningRecord]]) -> list[TuningRecord]:
        """Put an answer of each layer together; a record of two layers is the upper one's."""
        found: dict[str, TuningRecord] = {}
        for layer, records in zip(self._all, answers, strict=True):
            for record in records:
                found.setdefault(record.key, dataclasses.replace(record, layer=layer.url))
        return list(found.values())

    def list_top_each(self, questions: Sequence[Question], *, k: int = 10) -> list[list[TuningRecord]]:
        answers = [_ONE.list_top_each(layer, questions, k=k) for layer in self._all]
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
        return self._joined(_ONE.list_failed(layer, question, status=status) for layer in self._all)

    def list_records(
        self, filters: RecordFilter = NO_FILTER, *, limit: int | None = None, offset: int = 0
    ) -> list[TuningRecord]:
        end = None if limit is None else offset + limit
        return self._joined(_ONE.list_records(layer, filters) for layer in self._all)[offset:end]

    def list_known(self, filters: RecordFilter, *, workload_hashes: Sequence[str]) -> list[TuningRecord]:
        return self._joined(_ONE.list_known(layer, filters, workload_hashes=workload_hashes) for layer in self._all)

    def count_records(self, filters: RecordFilter = NO_FILTER) -> int:
        return len(self.list_records(filters))

    def find_workload(self, workload_hash: str, tvm_version: str | None = None) -> Workload | None:
        found = (_ONE.find_workload(layer, workload_hash, tvm_version) for layer in self._all)
        return next((workload for workload in found if workload is not None), None)

    def list_workloads(self, *, family: str | None = None, signature_key: str | None = None) -> list[Workload]:
        found: dict[tuple[str, str], Workload] = {}
        for layer in self._all:
            for workload in _ONE.list_workloads(layer, family=family, signature_key=signature_key):
                found.setdefault((workload.workload_hash, workload.tvm_version), workload)
        return list(found.values())
