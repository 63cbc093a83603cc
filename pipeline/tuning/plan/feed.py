"""Tasks that come while a run goes on, and word of those that are settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.plan.task_start import TaskStart


@dataclass(frozen=True)
class Arrival:
    """Tasks of one more model.

    Attributes
    ----------
    tasks
        A task that the run has already is tuned once, for the sum of the weights.
    trials
        Candidates that the run may measure for it; None where only time limits the run.
    dropped
        Workload hashes of tasks that no model wants any more.
    starts
        Workload hash -> what the task begins with, where another process has found it already.
    """

    tasks: tuple[TuningTask, ...] = ()
    trials: int | None = 0
    dropped: frozenset[str] = frozenset()
    starts: Mapping[str, TaskStart] = field(default_factory=dict)


class TaskFeed(Protocol):
    """Gives a run its tasks. All calls come from the thread that tunes."""

    @property
    def arriving(self) -> bool:
        """Whether more tasks may come: the run does not end before."""

    def take(self, *, idle: bool) -> Sequence[Arrival]:
        """Return what is there now.

        `idle` says that nothing is built or measured at this moment. Where measuring must be exclusive, this is the
        time for other work: the run waits until this returns, and asks again until nothing comes.
        """

    def settled(self, workload_hashes: Sequence[str]) -> None:
        """Hear of tasks that are done: nothing more of them will be measured."""

    def improved(self, workload_hash: str, best_us: float) -> None:
        """Hear of the best latency known of a task, its fallback's included."""

    def wait(self, seconds: float) -> None:
        """Wait so long at most for the next arrival."""
