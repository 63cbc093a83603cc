"""A run of a tuning command, and its tasks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from relaxtune.tuning_db.records import TargetKey, normalise


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

    @property
    def wall_s(self) -> float | None:
        """Seconds from its start to its end; None without one."""
        return None if self.finished_at is None else (self.finished_at - self.started_at).total_seconds()

    def __post_init__(self) -> None:
        """Bring the options to canonical JSON and the times to UTC."""
        normalise(self, text="model code_version", json="options", utc="started_at finished_at")


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
        normalise(self, quantity="seconds")
