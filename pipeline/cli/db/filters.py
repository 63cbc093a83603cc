"""The filters of `relaxtune db`: every option once; `takes_groups` gives them to a command."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from relaxtune.pipeline.cli.db.common import find_job, require_known
from relaxtune.pipeline.cli.groups import option
from relaxtune.pipeline.errors import UsageError
from relaxtune.tuning_db.records import RecordFilter, Route, Status

if TYPE_CHECKING:
    from relaxtune.tuning_db.store import TuningDatabase


@dataclass(frozen=True)
class FilterOptions:
    """The records that a command is about; in the order of `--help`."""

    model: str | None = option(None, "Only workloads that a job found in this model.")
    family: str | None = option(None, "Only this operator family: matmul, softmax, ...")
    workload: str | None = option(None, "Only this workload hash.")
    shape: str | None = option(None, "Only kernels with an argument like 1x128x768.")
    dtype: str | None = option(None, "Only kernels with an argument like float16.")
    target: str | None = option(None, "Only this target kind: llvm, cuda.")
    arch: str | None = option(None, "Only this architecture: sm_90a, znver4.")
    device: str | None = option(None, "Only records of this device: 'NVIDIA H200'.")
    tvm: str | None = option(None, "Only records of this TVM version.")
    route: Route | None = option(None, "Only kernels made by this route.")
    status: Status | None = option(None, "Only records with this status.")
    job: str | None = option(None, "Only records of this job: its id, or the start of it.")
    since: datetime | None = option(None, "Only records of this time (UTC) or later.")
    until: datetime | None = option(None, "Only records before this time (UTC).")

    def select(self, database: TuningDatabase) -> RecordFilter:
        """Return the filter that the options say.

        Raises `UsageError`: a shape cannot be read, or the database has nothing of a name.
        """
        sizes = None if self.shape is None else self.shape.split("x")
        if sizes is not None and not all(part.isdigit() for part in sizes):
            raise UsageError(f"--shape {self.shape!r}: expected sizes such as 1x128x768")
        filters = RecordFilter(
            model=self.model,
            family=self.family,
            workload_hash=self.workload,
            shape=None if sizes is None else tuple(map(int, sizes)),
            dtype=self.dtype,
            target_kind=self.target,
            arch=self.arch,
            device_name=self.device,
            tvm_version=self.tvm,
            route=self.route,
            status=self.status,
            job_id=None if self.job is None else find_job(database, self.job),
            since=as_utc(self.since),
            until=as_utc(self.until),
        )
        require_known(
            database, model=self.model, family=self.family, workload=self.workload, target=self.target, arch=self.arch,
            device=self.device, tvm=self.tvm,
        )  # fmt: skip
        return filters


def as_utc(moment: datetime | None) -> datetime | None:
    """Return a time of the command line, which has no zone, in UTC."""
    return None if moment is None else moment.replace(tzinfo=UTC)
