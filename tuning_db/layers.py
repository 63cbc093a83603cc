"""A user's database over shared ones: one door, several layers.

Writes go to the first layer alone; the others are opened read-only. A look-up asks every layer and ranks the answers
by the rules of `tuning_db.lookup`, as if they were one database; of equals, the upper layer wins. Every record found
says in `layer` which database it comes from. A record of a workload that only a lower layer has takes the workload
along. Jobs, queries and exchange concern the first layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from sqlalchemy import Engine

from relaxtune.tuning_db.errors import DatabaseUrlError
from relaxtune.tuning_db.lookup import DeviceRank, rank_record
from relaxtune.tuning_db.records import Environment, Mode, RecordFilter, Route, TargetKey, TuningRecord, Workload
from relaxtune.tuning_db.sql.engine import Location, parse_location
from relaxtune.tuning_db.store import TuningDatabase


def open_databases(urls: Sequence[str | Path], *, mode: Mode = Mode.TUNE, create: bool = True) -> TuningDatabase:
    """Return the first of `urls`, over the others if there are any.

    Raises
    ------
    TuningDatabaseError
        See `LayeredDatabase.open_layers`.
    """
    if len(urls) == 1:
        return TuningDatabase.open(urls[0], mode=mode, create=create)
    return LayeredDatabase.open_layers(urls, mode=mode, create=create)


class LayeredDatabase(TuningDatabase):
    """A `TuningDatabase` that also finds what shared databases know."""

    def __init__(self, location: Location, engine: Engine, mode: Mode) -> None:
        """Hold the first layer; use `LayeredDatabase.open_layers`."""
        super().__init__(location, engine, mode)
        self._below: tuple[TuningDatabase, ...] = ()
        # Workloads, by hash and TVM version, that the first layer is known to have.
        self._own: set[tuple[str, str]] = set()

    @classmethod
    def open_layers(cls, urls: Sequence[str | Path], *, mode: Mode = Mode.TUNE, create: bool = True) -> Self:
        """Return the first of `urls` over the others.

        Raises
        ------
        DatabaseUrlError
            No URL is given, or one twice.
        TuningDatabaseError
            See `TuningDatabase.open`; a shared database has to be there.
        """
        places = [parse_location(url).shown for url in urls]
        if not places or len(set(places)) != len(places):
            raise DatabaseUrlError(f"Layers need one database or more, each once: got {places}.")
        with ExitStack() as opened:
            below = [opened.enter_context(TuningDatabase.open(url, mode=Mode.READ_ONLY)) for url in urls[1:]]
            database = cls.open(urls[0], mode=mode, create=create)
            database._below = tuple(below)
            opened.pop_all()
        return database

    @property
    def layers(self) -> tuple[str, ...]:
        """The databases, the upper one first."""
        return (self.url, *(layer.url for layer in self._below))

    def close(self) -> None:
        """Close all layers."""
        super().close()
        for layer in self._below:
            layer.close()

    def list_top(
        self,
        *,
        workload_hash: str | None,
        signature_key: str | None,
        target: TargetKey,
        environment: Environment,
        route: Route | None = None,
        k: int = 10,
    ) -> list[TuningRecord]:
        """Return up to `k` records that are true here from all layers, the best first."""

        def ask(layer: TuningDatabase) -> list[TuningRecord]:
            find = super(LayeredDatabase, self).list_top if layer is self else layer.list_top
            return find(
                workload_hash=workload_hash,
                signature_key=signature_key,
                target=target,
                environment=environment,
                route=route,
                k=k,
            )

        found: list[tuple[DeviceRank, float, int, TuningRecord]] = []
        seen: set[str] = set()
        for depth, layer in enumerate((self, *self._below)):
            for record in ask(layer):
                rank = rank_record(target, environment, record)
                # A record merged from one layer into another is one record.
                if rank is not None and record.latency_us is not None and record.key not in seen:
                    seen.add(record.key)
                    named = dataclasses.replace(record, layer=layer.url)
                    found.append((rank, record.latency_us, depth, named))
        # Stable: inside a layer the order is that of the answer.
        found.sort(key=lambda item: item[:3])
        return [record for *_, record in found[:k]]

    def list_known(self, filters: RecordFilter, *, workload_hashes: Sequence[str]) -> list[TuningRecord]:
        """Return the records of some workloads that a filter selects, of all layers, each once."""
        found: dict[str, TuningRecord] = {}
        for layer in (self, *self._below):
            find = super().list_known if layer is self else layer.list_known
            for record in find(filters, workload_hashes=workload_hashes):
                found.setdefault(record.key, dataclasses.replace(record, layer=layer.url))
        return list(found.values())

    def record_all(self, *, workloads: Sequence[Workload], records: Sequence[TuningRecord]) -> list[int]:
        """Keep workloads and records in one transaction, with those workloads that only a lower layer has."""
        given = {(workload.workload_hash, workload.tvm_version) for workload in workloads}
        wanted = {(record.workload_hash, record.environment.tvm_version) for record in records} - given
        carried = [workload for key in sorted(wanted - self._own) if (workload := self._only_below(*key)) is not None]
        ids = super().record_all(workloads=[*carried, *workloads], records=records)
        self._own |= given | wanted
        return ids

    def record_measurements(self, records: Sequence[TuningRecord]) -> list[int]:
        """Keep records, all or none, with the workloads of theirs that only a lower layer has."""
        batch = list(records)
        return self.record_all(workloads=[], records=batch) if batch else []

    def _only_below(self, workload_hash: str, tvm_version: str) -> Workload | None:
        own = super().find_workload(workload_hash, tvm_version)
        return None if own is not None else self.find_workload(workload_hash, tvm_version)

    def find_workload(self, workload_hash: str, tvm_version: str | None = None) -> Workload | None:
        """Return a workload of the uppermost layer that has it, or None."""
        found = super().find_workload(workload_hash, tvm_version)
        for layer in self._below:
            found = found or layer.find_workload(workload_hash, tvm_version)
        return found
