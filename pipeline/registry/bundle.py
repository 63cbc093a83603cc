"""The few records that a set of artifacts is made of, as one small database to ship to machines of the same kind.

`compile` with it makes the same kernels there, and `artifact rebuild` needs nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.errors import ArtifactError, PipelineError, UsageError
from relaxtune.pipeline.job_outcomes import record_of
from relaxtune.pipeline.temporary import locked_folder
from relaxtune.tuning_db.records import Mode, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.urls import DatabasePlace


@dataclass(frozen=True)
class Bundle:
    """The contents of a bundle: artifacts, their records, and bytes."""

    path: Path
    artifacts: int
    records: int
    bytes: int


def write_bundle(artifacts: Sequence[Path], database: DatabasePlace, out: Path) -> Bundle:
    """Write the records behind the kernels of artifacts as a SQLite database, whole or not at all.

    The database has the records under the numbers that the manifests name; `out` is not there yet.

    Raises `ArtifactError`: one of them is no artifact, or a record is not the one that its manifest names; the kernels
    are named; `UsageError`: the file is there; `TuningDatabaseError`: a database cannot be read or written.
    """
    if out.exists():
        raise UsageError(f"{out} exists; expected a new file, so that nothing else is in the bundle")
    entries = {}
    for place in artifacts:
        manifest = load_manifest(place)
        buckets = () if manifest.buckets is None else manifest.buckets.entries
        for entry in (*manifest.kernels, *(one for bucket in buckets for one in bucket.kernels)):
            if entry.record_id is not None:
                entries[place, entry.function] = entry
    with TuningDatabase.open(database, mode=Mode.READ_ONLY, create=False) as opened:
        records: dict[int, TuningRecord] = {}
        missing = []
        for (place, function), entry in entries.items():
            record = record_of(opened, entry)
            if record is None:
                missing.append(f"{function} of {place} (record {entry.record_id})")
            elif record.id is not None:
                records[record.id] = record
        if missing:
            raise ArtifactError(
                f"{opened.url} has other records than the manifests name for {len(missing)} kernels: "
                f"{', '.join(missing[:10])}; name the database that the artifacts were made from"
            )
        keys = {(record.workload_hash, record.environment.tvm_version) for record in records.values()}
        workloads = [opened.get_workload(*key) for key in sorted(keys)]
    out = Path(os.path.realpath(out))
    try:
        with locked_folder(out.parent, f".{out.name}.staging-") as folder:
            with TuningDatabase.open(folder / out.name) as bundle:
                # The job that measured them stays where it is.
                bundle.record_all(workloads=workloads, records=[replace(one, job_id=None) for one in records.values()])
            (folder / out.name).replace(out)
    except OSError as e:
        raise PipelineError(f"{out} cannot be written: {e.strerror or e}; name a file in a folder with room") from e
    return Bundle(out, len(artifacts), len(records), out.stat().st_size)
