"""Options of a tuning run, by themselves or by a level of effort, and its results. Imports nothing of TVM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from relaxtune.pipeline.tasks.routes import DEFAULT_ROUTES
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.tuning_db.records import Mode, Route, Status

if TYPE_CHECKING:
    from relaxtune.pipeline.tasks.task import TuningTask

# The routes that offer candidates; fallbacks are measured in any case, as what the others are compared with.
SEARCHED_ROUTES = frozenset({Route.METASCHEDULE, Route.TEMPLATE, Route.LIBRARY})


@dataclass(frozen=True)
class TuningOptions:
    """Options of a tuning run."""

    # Candidates over all tasks, fallbacks not counted; None leaves it to the time budget. Candidates of an interrupted
    # run of the same job count, but for mode `force`.
    trials: int | None = 256
    # Seconds after which no candidate is started and those being built are given up; None sets no limit.
    time_budget_s: float | None = None
    # Seconds of the budget for what comes before and after the search.
    reserved_s: float = 0.0
    # Candidates a task proposes at a time; a round builds and measures them, and the cost model learns from it.
    trials_per_iteration: int = 16
    population: int = 64  # Schedules that evolve between two rounds; searching takes time in proportion to it.
    # A task is left alone when a round is expected to save less than this part of the model's kernel time.
    min_gain: float = 0.0
    # Latencies of each of a task's contenders, at most, when they alternate at the end; 0 leaves that out.
    finals: int = 7
    # Seconds that the cost model may take to learn from earlier records at the start; 0 leaves that out, and the
    # records of near shapes too.
    warm_start_s: float = 5.0
    all_templates: bool = False  # Measure every candidate of the templates, also those that are predicted to be slow.
    rerank: int = 0  # Hottest tasks whose best candidates are tried inside the compiled model; 0 leaves that out.
    # Seconds for graph decisions at most, before kernels are searched (`pipeline.choose.graph_search`); 0 leaves them
    # out. Of a time budget, a quarter.
    graph_s: float = 0.0
    # Whether they are tried on CPUs too, where a build takes long and the passes as they are were best in each trial.
    graph_on_cpus: bool = False
    graph_spent_s: float = 0.0  # Seconds of the search that graph decisions took.
    seed: int = 0  # Of the search and of the arguments' values.
    # Seconds for building and for measuring one candidate.
    build_timeout_s: float = 30.0
    run_timeout_s: float = 10.0
    workers: int | None = None  # Build processes; None takes the cores this process may use.
    # Devices to measure on side by side, such as `cuda:0`; None takes all visible GPUs of the target's model.
    devices: tuple[str, ...] | None = None
    # `tune` takes what the database knows for granted: a candidate recorded here is not measured again, and a task with
    # `enough_records` valid ones is skipped. `force` measures everything again.
    mode: Mode = Mode.TUNE
    # Valid MetaSchedule records of a task in this environment that make further search unnecessary.
    enough_records: int = 512
    # Fork build and measuring processes from one that has done their imports, where that works (Linux); else each is
    # started afresh, which takes seconds.
    fork: bool = True
    # Build and measure at the same time; None does so where that disturbs no clock, as on a GPU, and not on a CPU.
    overlap: bool | None = None
    # Compute what the candidates of large tasks are compared with on the GPU, by its default schedule; the CPU, which
    # takes seconds for some, computes only when a candidate differs.
    device_references: bool = True
    # Routes that may offer candidates; without `metaschedule` nothing is searched, without `template` none is tried.
    routes: frozenset[Route] = SEARCHED_ROUTES & DEFAULT_ROUTES
    measure: MeasureOptions = field(default_factory=MeasureOptions)  # How a candidate is timed.


class Effort(StrEnum):
    """How much a tuning run tries; the README tells what each level costs."""

    QUICK = "quick"
    NORMAL = "normal"
    THOROUGH = "thorough"


#: The options of each level; all others are the defaults of `TuningOptions`.
LEVELS: Mapping[Effort, TuningOptions] = {
    # A first look: the kernels that take most of the time, one or two rounds each.
    Effort.QUICK: TuningOptions(trials=64, population=32, min_gain=0.005, finals=5, warm_start_s=2.0, graph_s=5.0),
    Effort.NORMAL: TuningOptions(trials=256, population=64, min_gain=0.001, graph_s=30.0),
    # All that templates offer, a search until a round saves a ten-thousandth, and a look at the whole model.
    Effort.THOROUGH: TuningOptions(
        trials=2048,
        population=128,
        min_gain=0.0001,
        finals=11,
        warm_start_s=15.0,
        all_templates=True,
        rerank=6,
        graph_s=180.0,
        graph_on_cpus=True,
    ),
}


#: Seconds that finals may take after the deadline, for each second of the search before it.
FINALS_SHARE = 1 / 8


def search_seconds(options: TuningOptions) -> float | None:
    """Return the seconds of the search of kernels: what is left of the budget, a third of it at least.

    The time of graph decisions is subtracted, down to a quarter.
    """
    budget_s = options.time_budget_s
    if budget_s is None:
        return None
    seconds = max(budget_s / 3, budget_s - options.reserved_s)
    return max(seconds / 4, seconds - options.graph_spent_s)


def options_for(effort: Effort, trials: int | None, time_budget_s: float | None) -> TuningOptions:
    """Return the options of a level with other limits.

    A time budget alone leaves the candidates unlimited; neither leaves the level's own.
    """
    level = LEVELS[effort]
    wanted = trials if trials is not None or time_budget_s is not None else level.trials
    return replace(level, trials=wanted, time_budget_s=time_budget_s)


@dataclass(frozen=True)
class TaskSummary:
    """The result of one task."""

    task: TuningTask
    # Candidates measured in this run, the fallback not counted.
    valid: int
    failed: int
    failures: Mapping[Status, int]  # How many failed, by status.
    known: int  # Valid records of earlier runs that this run took for granted.
    # Median latency of the fallback and of the best kernel known now, of this run or an earlier one.
    before_us: float | None
    after_us: float | None
    route: Route | None  # The route of that best kernel; None when nothing valid is known.
    weight: int
    # The part of the model's kernel time that the task takes with its best kernel, from 0 to 1; calls counted.
    share: float
    seconds: float  # Searching, and what the build processes and the measuring process spent on its candidates.
    skipped: str | None = None  # Why the task was not searched, or None.
    last_error: str | None = None
    # The distance from the fastest to the slowest latency of that best kernel over their median; None if it is of an
    # earlier run.
    spread: float | None = None
    ended: str | None = None  # Why its search ended before the run did, or None.

    @property
    def speedup(self) -> float | None:
        """How many times faster than the fallback the best kernel is; None when either is unknown."""
        return self.before_us / self.after_us if self.before_us and self.after_us else None


@dataclass(frozen=True)
class TuningSummary:
    """The result of a tuning run."""

    tasks: tuple[TaskSummary, ...]
    seconds: float
    # Seconds in which it went on: `start`, `search` (proposing candidates and training the cost model), `build` (any
    # process), `queue` (a built candidate waited for the device), `measure`, `database`. They overlap, so that their
    # sum may be more than the whole.
    seconds_by_phase: Mapping[str, float]
    interrupted: bool  # The user stopped the run; its finished candidates are recorded and counted here.
    restarts: int = 0  # Build and measuring processes of this machine that were replaced: killed, crashed, or worn.

    @property
    def candidates(self) -> int:
        """Candidates measured or failed in this run, fallbacks not counted."""
        return sum(task.valid + task.failed for task in self.tasks)

    @property
    def candidates_per_s(self) -> float:
        """Candidates over the whole time of the run."""
        return self.candidates / self.seconds if self.seconds > 0 else 0.0
