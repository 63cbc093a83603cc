"""Features of candidates for a cost model, kept with their records: the next run's model starts with them.

Features can be computed again from a record's decision, which takes far longer than reading them. They are a cache:
they go with their record, and archives leave them out. A matrix has a row for each buffer store of the kernel and a
column for each feature, in float32; it is stored compressed, some hundred bytes a candidate.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import delete, func, insert, select
from sqlalchemy.orm import Session

from relaxtune.tuning_db.errors import InvalidRecordError, NotFoundError
from relaxtune.tuning_db.lookup import target_is_lower, target_matches
from relaxtune.tuning_db.records import Status, TargetKey
from relaxtune.tuning_db.sql.column_types import read_as
from relaxtune.tuning_db.sql.schema import FeatureRow, RecordRow, WorkloadRow
from relaxtune.tuning_db.sql.statements import read_places
from relaxtune.tuning_db.sql.writing import chunks
from relaxtune.tuning_db.store import TuningDatabase, question

#: Candidates that `list_features` returns by default: what a cost model is trained on in seconds.
DEFAULT_LIMIT = 4096
_VERSION_LENGTH = 128
_DTYPE = np.dtype("<f4")


@dataclass(frozen=True, eq=False)
class CandidateFeatures:
    """The features of a recorded candidate and what was measured; `latency_us` is None unless `status` is ok.

    `values` has shape (stores, features) and dtype float32.
    """

    record_id: int
    workload_hash: str
    status: Status
    latency_us: float | None
    values: NDArray[np.float32]


def record_features(database: TuningDatabase, version: str, features: Mapping[int, NDArray[Any]]) -> None:
    """Keep the features of recorded candidates, all or none; those already there are replaced.

    `version` names the extractor and its parameters, and the TVM version where features depend on it; features of other
    versions are kept, too. Each matrix, by record id, has shape (stores, features) and finite numbers, kept as float32.

    Raises `NotFoundError`: there is no record with one of the ids; `InvalidRecordError`: a matrix has another number of
    dimensions or is not finite; the version is empty or too long.
    """
    if not 0 < len(version) <= _VERSION_LENGTH:
        raise InvalidRecordError(
            f"The version of features has 1 to {_VERSION_LENGTH} characters: got {len(version)} in {version[:40]!r}."
        )
    rows = [_to_row(record_id, version, values) for record_id, values in features.items()]

    def work(session: Session) -> None:
        for part in chunks(list(features)):
            known = session.scalar(select(func.count()).select_from(RecordRow).where(RecordRow.id.in_(part)))
            if known != len(part):
                raise NotFoundError(
                    "Features belong to records that the database does not have. Record the candidates first."
                )
            session.execute(delete(FeatureRow).where(FeatureRow.version == version, FeatureRow.record_id.in_(part)))
        session.execute(insert(FeatureRow), rows)

    if rows:
        database.write(work)


@question
def list_features(
    session: Session, version: str, target: TargetKey, *, limit: int | None = DEFAULT_LIMIT
) -> tuple[CandidateFeatures, ...]:
    """Return the features of the newest candidates of a target's family, the newest first, failed ones included.

    The family is the target's architecture and the lower ones of `tuning_db.lookup`.
    """
    places = read_places(session.connection())
    targets = [
        id_ for id_, found in places.targets.items() if target_matches(target, found) or target_is_lower(target, found)
    ]
    statement = (
        select(FeatureRow, RecordRow.status, RecordRow.latency_us, WorkloadRow.workload_hash)
        .join(RecordRow, RecordRow.id == FeatureRow.record_id)
        .join(WorkloadRow, WorkloadRow.id == RecordRow.workload_id)
        .where(FeatureRow.version == version, RecordRow.target_id.in_(targets))
        .order_by(FeatureRow.record_id.desc())
        .limit(limit)
    )
    return tuple(
        CandidateFeatures(
            record_id=row.record_id,
            workload_hash=workload_hash,
            status=status,
            latency_us=latency_us if status is Status.OK else None,
            values=read_as(
                lambda row: np.frombuffer(zlib.decompress(row.data), _DTYPE).reshape(row.rows, row.columns), row
            ).astype(np.float32),
        )
        for row, status, latency_us, workload_hash in session.execute(statement)
    )


def _to_row(record_id: int, version: str, values: NDArray[Any]) -> dict[str, object]:
    matrix = np.ascontiguousarray(values, dtype=_DTYPE)
    if matrix.ndim != 2 or not np.isfinite(matrix).all():
        raise InvalidRecordError(
            f"The features of record {record_id} must be a finite matrix (stores, features): got shape {matrix.shape}"
            f"{'' if np.isfinite(matrix).all() else ' with NaN or infinite values'}."
        )
    rows, columns = matrix.shape
    data = zlib.compress(matrix.tobytes(), level=6)
    return {"record_id": record_id, "version": version, "rows": rows, "columns": columns, "data": data}
