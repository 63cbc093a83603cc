"""What a tuning database knows of an artifact besides the records of its kernels: its tuning, and peers beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relaxtune.tuning_db.questions.artifacts import ArmSummary, artifacts
from relaxtune.tuning_db.questions.progress import job_progress
from relaxtune.tuning_db.store import TuningDatabase


@dataclass(frozen=True)
class Progress:
    """How an artifact came to be, and where it stands."""

    # (seconds since the job began, microseconds of all calls of all kernels by the best known then).
    curve: tuple[tuple[float, float], ...] = ()
    # The last benchmark on each device: the artifact, and peers that took turns with it.
    arms: tuple[ArmSummary, ...] = ()

    def to_json(self) -> Mapping[str, object]:
        """Return plain JSON data."""
        arms = [{**vars(arm), "created_at": arm.created_at.isoformat(timespec="seconds")} for arm in self.arms]
        return {"curve": [list(point) for point in self.curve], "arms": arms}


def progress_of_artifact(database: TuningDatabase, key: str) -> Progress:
    """Return what is known of an artifact by its key; nothing where it was never noted."""
    found = artifacts(database, key=key)
    if not found:
        return Progress()
    return Progress(_curve(database, found[0].job_id), found[0].benchmarks)


def progress_of_job(database: TuningDatabase, job_id: str) -> Progress:
    """Return how a job came on, and the benchmarks of the newest artifact that it made."""
    made = artifacts(database, job_id=job_id, limit=1)
    return Progress(_curve(database, job_id), made[0].benchmarks if made else ())


def _curve(database: TuningDatabase, job_id: str | None) -> tuple[tuple[float, float], ...]:
    return () if job_id is None else job_progress(database, job_id).curve
