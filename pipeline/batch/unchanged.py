"""Cells that need not be done again: same source, options and code, and no better record since they were accepted."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from functools import cache
from pathlib import Path

import relaxtune
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.batch.cells import Cell, source_key
from relaxtune.pipeline.batch.plan import Plan
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.job_outcomes import artifact_of
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.batches import find_done
from relaxtune.tuning_db.cell_states import BatchCell
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.records import RecordFilter, Status, TargetKey, content_key

# The folders whose code decides what an artifact is.
_CODE = ("models", "pipeline", "schedules")
_SUFFIXES = frozenset({".py", ".c", ".h"})


def cell_key(plan: Plan, cell: Cell, out: Path) -> str:
    """Return the content key of all that decides what a cell's artifact is, records aside."""
    table = plan.table
    asked = {**asdict(cell), "source": source_key(cell.source), "tags": None, "importance": None, "name": None}
    target = target_key(resolve_target(cell.target)).key
    budget = table.budget.model_dump()
    return content_key([asked, target, table.effort, table.samples, table.seed, budget, str(out), code_key()])


@cache
def code_key() -> str:
    """Return the sha256 of this version's code, and the versions of what makes kernels."""
    digest = hashlib.sha256()
    for name in ("apache-tvm", "apache-tvm-ffi"):
        digest.update(importlib.metadata.version(name).encode())
    root = Path(relaxtune.__file__).parent
    for folder in _CODE:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _SUFFIXES:
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def find_unchanged(database: TuningDatabase, key: str) -> BatchCell | None:
    """Return the cell of this key that was accepted, where its artifact is intact and would be made the same again."""
    found = find_done(database, key)
    if found is None:
        return None
    cell, moment = found
    if cell.facts.job_id is None or not _is_intact(cell):
        return None
    return None if _has_better_records(database, cell.facts.job_id, moment) else cell


def _is_intact(cell: BatchCell) -> bool:
    if cell.facts.artifact is None:
        return False
    directory = Path(cell.facts.artifact)
    try:
        return artifact_of(load_manifest(directory), directory).key == cell.facts.artifact_key
    except ArtifactError:
        return False


def _has_better_records(database: TuningDatabase, job_id: str, moment: datetime) -> bool:
    """Whether some task of a job has a faster record since `moment` than any before."""
    job = database.get_job(job_id)
    hashes = [task.workload_hash for task in database.list_job_tasks(job_id)]
    before, since = (_best(database, job.target, hashes, newer, moment) for newer in (False, True))
    return any(latency < before.get(workload, float("inf")) for workload, latency in since.items())


def _best(
    database: TuningDatabase, target: TargetKey, hashes: list[str], newer: bool, moment: datetime
) -> Mapping[str, float]:
    span = RecordFilter(
        target_kind=target.kind,
        arch=target.arch,
        status=Status.OK,
        since=moment if newer else None,
        until=None if newer else moment,
    )
    best: dict[str, float] = {}
    for record in database.list_known(span, workload_hashes=hashes):
        if record.latency_us is not None:
            best[record.workload_hash] = min(record.latency_us, best.get(record.workload_hash, float("inf")))
    return best
