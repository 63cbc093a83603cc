"""Candidates in flight: submitted to be built and measured, and not back yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from relaxtune.pipeline.tuning.plan.search_pool import Lesson
from relaxtune.pipeline.tuning.plan.state import TaskState
from relaxtune.pipeline.tuning.search.evolution import Candidate
from relaxtune.tuning_db.records import Route


@dataclass
class Batch:
    """Candidates of one round. `left` are on their way; the model has not learnt from those in `back` yet."""

    state: TaskState
    size: int
    left: int
    back: list[Lesson] = field(default_factory=list)
    closed: bool = False


@dataclass(frozen=True)
class Tag:
    """What a job on its way is: a candidate, a fallback, or a `reference` (the CPU's, or the device's)."""

    state: TaskState
    route: Route
    decision: str
    batch: Batch | None = None
    candidate: Candidate | None = None
    reference: bool = False
    on_device: bool = False
