"""Results of earlier runs that are used again: lowered cells, and accepted cells.

An accepted cell stays where source, options and code are the same, and no record is better since. The tasks of a
lowered cell are kept for the next `batch plan`, in a file named by all that its tasks follow from: the content of its
model, its shape, precision and target, and the code here. It holds facts as JSON, no code and no weights.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

import relaxtune
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.batch.cells import Cell, source_key
from relaxtune.pipeline.batch.plan import Plan
from relaxtune.pipeline.batch.tasks import LoweredCell, note_of
from relaxtune.pipeline.environment import detect_environment, target_key
from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.job_outcomes import artifact_of
from relaxtune.pipeline.tasks.task import TaskFacts
from relaxtune.pipeline.tuning.ray.facts import hash_of_code
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.batches import find_done
from relaxtune.tuning_db.cell_states import BatchCell
from relaxtune.tuning_db.records import RecordFilter, Status, content_key
from relaxtune.tuning_db.store import TuningDatabase

logger = logging.getLogger(__name__)

# The folders whose code decides what an artifact is, and the rooms that only show, store or start what others make.
_CODE = ("models", "pipeline", "schedules")
NOT_OF_ARTIFACTS = ("pipeline/cli/", "pipeline/dashboard/", "pipeline/registry/", "pipeline/report/")
# A file that no plan has read in so many days is removed.
_KEPT_DAYS = 30


def cell_key(plan: Plan, cell: Cell, out: Path) -> str:
    """Return the content key of all that decides what a cell's artifact is, records aside."""
    table = plan.table
    request = {**asdict(cell), "source": source_key(cell.source), "tags": None, "importance": None, "name": None}
    target = target_key(resolve_target(cell.target)).key
    budget = table.budget.model_dump()
    return content_key([request, target, table.effort, table.samples, table.seed, budget, str(out), code_key()])


@cache
def code_key() -> str:
    """Return the sha256 of the code that makes artifacts, and of the versions of what makes kernels."""
    versions = [importlib.metadata.version(name) for name in ("apache-tvm", "apache-tvm-ffi")]
    return content_key([*versions, hash_of_code(Path(relaxtune.__file__).parent, _CODE, NOT_OF_ARTIFACTS)])


def find_unchanged(database: TuningDatabase, key: str) -> BatchCell | None:
    """Return the cell of this key that was accepted, where its artifact is intact and would be made the same again."""
    found = find_done(database, key)
    if found is None:
        return None
    cell, moment = found
    if cell.facts.job_id is None or cell.facts.artifact is None:
        return None
    directory = Path(cell.facts.artifact)
    try:
        intact = artifact_of(load_manifest(directory), directory).key == cell.facts.artifact_key
    except ArtifactError:
        return None
    return cell if intact and not _has_better_records(database, cell.facts.job_id, moment) else None


def _has_better_records(database: TuningDatabase, job_id: str, moment: datetime) -> bool:
    job = database.get_job(job_id)
    hashes = [task.workload_hash for task in database.list_job_tasks(job_id)]
    valid = RecordFilter(target_kind=job.target.kind, arch=job.target.arch, status=Status.OK)
    before: defaultdict[str, float] = defaultdict(lambda: math.inf)
    since: defaultdict[str, float] = defaultdict(lambda: math.inf)
    for place, best in ((replace(valid, until=moment), before), (replace(valid, since=moment), since)):
        for record in database.list_known(place, workload_hashes=hashes):
            if record.latency_us is not None:
                best[record.workload_hash] = min(record.latency_us, best[record.workload_hash])
    return any(latency_us < before[workload] for workload, latency_us in since.items())


# Name and sha256 of a cell's model, and its tasks.
_KEPT = TypeAdapter(tuple[str, str, tuple[TaskFacts, ...]])
_FACTS = tuple(one.name for one in fields(TaskFacts))


class LoweredBefore:
    """Facts of cells' tasks in a folder, a file for each cell."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, cell: Cell) -> LoweredCell | None:
        """Return a cell as it was lowered before; None where it was not, or what is there cannot be read."""
        path = self._path(cell)
        try:
            model, sha256, tasks = _KEPT.validate_json(path.read_bytes())
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as e:
            logger.warning("%s is left aside, and %s is lowered again: %s", path, cell.name, e)
            return None
        target = resolve_target(cell.target)
        environment = detect_environment(target)
        return LoweredCell(cell, model, sha256, target, environment, tasks, note_of(target, environment))

    def keep(self, cells: Sequence[LoweredCell]) -> None:
        """Keep what cells were lowered to; a folder that cannot be written only costs the time another time."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for one in cells:
                facts = tuple(TaskFacts(**{name: getattr(task, name) for name in _FACTS}) for task in one.tasks)
                path = self._path(one.cell)
                staged = path.with_suffix(f".{os.getpid()}")
                staged.write_bytes(_KEPT.dump_json((one.model, one.model_sha256, facts)))
                staged.replace(path)
        except OSError as e:
            logger.warning("lowered cells cannot be kept for the next `batch plan`: %s", e)

    def remove_old(self) -> None:
        """Remove files that no plan has read in a month."""
        for path in self._folder.glob("*"):
            # Another plan may remove it too.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - 86_400 * _KEPT_DAYS:
                    path.unlink()

    def _path(self, cell: Cell) -> Path:
        target = resolve_target(cell.target)
        model = [source_key(cell.source), Path(cell.source).stem, cell.shape, list(cell.buckets), cell.precision]
        versions = [importlib.metadata.version(name) for name in ("onnx", "onnx-ir")]
        key = content_key([*model, cell.seed, str(target.target), repr(target.limits), versions, code_key()])
        return self._folder / f"{key}.json"
