"""A run of a tuning command, and its tasks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from relaxtune.tuning_db.records import TargetKey, canonical_text, clean_text, require_quantity, require_utc


@dataclass(frozen=True)
class Job:
    """One run of a tuning command.

    `options` is canonical JSON, `outcome` None while it runs or when it was killed. `code_version` is the relaxtune
    that ran: its version and, from a git checkout, the commit; None where it is not known.
    """

    id: str
    model: str
    model_sha256: str
    target: TargetKey
    options: str
    started_at: datetime
    finished_at: datetime | None = None
    outcome: str | None = None
    code_version: str | None = None

    def __post_init__(self) -> None:
        """Bring the options to canonical JSON and the times to UTC."""
        object.__setattr__(self, "model", clean_text(self.model))
        object.__setattr__(self, "options", canonical_text(self.options, "Job.options"))
        if self.code_version is not None:
            object.__setattr__(self, "code_version", clean_text(self.code_version))
        object.__setattr__(self, "started_at", require_utc(self.started_at, "Job.started_at"))
        if self.finished_at is not None:
            object.__setattr__(self, "finished_at", require_utc(self.finished_at, "Job.finished_at"))


@dataclass(frozen=True)
class JobTask:
    """One task of a job: the workload, how often the model runs it, the ONNX nodes it came from, seconds spent."""

    workload_hash: str
    tvm_version: str
    weight: int
    onnx_nodes: tuple[str, ...]
    seconds: float

    def __post_init__(self) -> None:
        """Check the quantities."""
        object.__setattr__(self, "onnx_nodes", tuple(self.onnx_nodes))
        object.__setattr__(self, "seconds", require_quantity(self.seconds, "JobTask.seconds"))
