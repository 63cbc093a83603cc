"""Tasks that join a run, from its beginning or from a feed while it goes on, each with all that earlier runs know."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.spans import span
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.record import Recorder
from relaxtune.pipeline.tuning.resume import EarlierRuns, end_what_was_done, find_runs, measured_since, take_known
from relaxtune.pipeline.tuning.search.cost_model import WARMUP_CANDIDATES, FastCostModel
from relaxtune.pipeline.tuning.search.evolution import TaskSearch, return_freed_memory
from relaxtune.pipeline.tuning.search.template_search import TemplateSearch
from relaxtune.pipeline.tuning.search.warm_start import WarmStart
from relaxtune.pipeline.tuning.task_start import OFFERED_ROUTES, TaskStart
from relaxtune.pipeline.tuning.tasks import Tasks, TaskState
from relaxtune.schedules.search.space import make_space
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.metaschedule import top_records
from relaxtune.tuning_db.records import Environment, Mode, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase

# Parents of the first round, from the records of earlier runs.
_SEEDS = 64
_ROUND_MIN = 4
_FEED_WAIT_S = 0.2
# Freed memory is given back after so many new tasks: a cell comes as bytes, then as objects, and much of both is freed.
_RETURN_EVERY = 256

# Returns the records of a task that are still true of the kernels that this version makes.
StillTrue = Callable[[TuningTask, Sequence[TuningRecord]], Sequence[TuningRecord]]


@dataclass(frozen=True)
class Arrival:
    """Tasks of one more model."""

    tasks: tuple[TuningTask, ...] = ()  # A task that the run has already is tuned once, for the sum of the weights.
    trials: int | None = 0  # Candidates that the run may measure for it; None where only time limits the run.
    dropped: frozenset[str] = frozenset()  # Workload hashes of tasks that no model wants any more.
    # Workload hash -> the beginning of the task, where another process has found it already.
    starts: Mapping[str, TaskStart] = field(default_factory=dict)


class TaskFeed(Protocol):
    """Gives a run its tasks. All calls come from the thread that tunes."""

    @property
    def arriving(self) -> bool:
        """Whether more tasks may come: the run does not end before."""

    def take(self, *, idle: bool) -> Sequence[Arrival]:
        """Return the arrivals so far.

        `idle` says that nothing is built or measured at this moment. Where measuring must be exclusive, this is the
        time for other work: the run waits until this returns, and calls again until nothing comes.
        """

    def settled(self, workload_hashes: Sequence[str]) -> None:
        """Hear of tasks that are done: nothing more of them will be measured."""

    def improved(self, workload_hash: str, best_us: float) -> None:
        """Hear of the best latency known of a task, its fallback's included."""

    def wait(self, seconds: float) -> None:
        """Wait so long at most for the next arrival."""


class Admission:
    """Lets tasks join a run."""

    def __init__(
        self,
        target: ResolvedTarget,
        database: TuningDatabase,
        environment: Environment,
        options: TuningOptions,
        job_id: str | None,
        still_true: StillTrue,
        feed: TaskFeed | None,
    ) -> None:
        #: Seconds by phase; `search` is added to here, and `database` by the recorder.
        self.seconds = dict.fromkeys(("start", "search", "build", "queue", "measure", "database"), 0.0)
        self.tasks = Tasks(target, options.min_gain)
        # Candidates that the run may measure (None: no limit), and those that earlier runs of the same job did. A feed
        # gives candidates with every model.
        self.trials: int | None = options.trials if feed is None else 0
        self.spent = 0
        key = target_key(target)
        self.recorder = Recorder(database, key, environment, job_id=job_id, seed=options.seed, seconds=self.seconds)
        self._target, self._environment = target, environment
        self._database, self._options = database, options
        self._job_id, self._still_true, self._feed = job_id, still_true, feed
        self._cost_model = FastCostModel(WARMUP_CANDIDATES, options.seed)
        self._warm_start = WarmStart(
            self._cost_model,
            database,
            target,
            environment,
            options,
            lambda workload_hash: self.tasks.get(workload_hash).best_us is not None,
        )
        self._known: dict[str, Sequence[TuningRecord]] = {}
        self._models = 0
        self._returned_at = 0

    @property
    def has_work(self) -> bool:
        """Whether there is anything to measure."""
        to_do = [state for state in self.tasks.states if not state.left_alone]
        unknown = any(state.before_us is None for state in to_do)
        return unknown or bool(to_do and (self.trials is None or self.spent < self.trials))

    @property
    def round_size(self) -> int:
        """Candidates of a round: fewer when the trials would not give every task one."""
        size = self._options.trials_per_iteration
        return (
            size if self.trials is None else max(1, min(size, max(_ROUND_MIN, self.trials // max(1, len(self.tasks)))))
        )

    def await_work(self, feed: TaskFeed, due: Callable[[], bool]) -> bool:
        """Take tasks from a feed until there is anything to measure; False if the run is due to end before."""
        while not due():
            arrivals = feed.take(idle=True)
            self.admit_before(feed, arrivals)
            if self.has_work:
                return True
            if not arrivals and not feed.arriving:
                break
            if not arrivals:
                with span("driver: wait for cells"):
                    feed.wait(_FEED_WAIT_S)
        return False

    def admit_before(self, feed: TaskFeed, arrivals: Sequence[Arrival]) -> None:
        """Let tasks join before anything is measured."""
        for arrival in arrivals:
            with span("driver: admit"):
                self.admit(arrival)
            settled = self.tasks.take_settled()
            for state in settled:
                state.release()
            feed.settled([state.task.workload_hash for state in settled])

    def admit(self, arrival: Arrival) -> list[TaskState]:
        """Let tasks join; return the new ones. A task that the run has already gets more weight."""
        fresh = [task for task in arrival.tasks if self.tasks.find(task.workload_hash) is None]
        heavier = []
        for task in arrival.tasks:
            state = self.tasks.find(task.workload_hash)
            if state is not None:
                state.task = state.task.joined(task)
                heavier.append(state)
        self.recorder.start([*fresh, *(state.task for state in heavier)])
        new = self._with_known(fresh, arrival)
        self._models += bool(arrival.tasks)
        self.tasks.models = max(1, self._models)
        if self._feed is not None:
            more = arrival.trials
            self.trials = None if self.trials is None or more is None else self.trials + more
        self.tasks.add(new)
        for state in heavier:
            self.tasks.reopen(state)
        for workload in sorted(arrival.dropped):
            dropped = self.tasks.find(workload)
            if dropped is not None:
                self.tasks.end(dropped, "no model wants it any more")
        for state in new if self._feed is not None else ():
            if state.best_us is not None and self._feed is not None:
                self._feed.improved(state.task.workload_hash, state.best_us)
        if len(self.tasks) - self._returned_at >= _RETURN_EVERY:
            self._returned_at = len(self.tasks)
            return_freed_memory()
        return new

    def _with_known(self, tasks: Sequence[TuningTask], arrival: Arrival) -> list[TaskState]:
        options = self._options
        forced = options.mode is Mode.FORCE
        hashes = [task.workload_hash for task in tasks]
        # A run that belongs to no job goes on from the records that belong to none.
        runs = EarlierRuns() if forced else EarlierRuns(broken_off=frozenset({None}))
        if self._job_id is not None and not forced:
            this = self._database.get_job(self._job_id)
            job = (this.model, this.model_sha256, this.target)
            runs = find_runs(self._database, *job, hashes, options, but=self._job_id)
        new: list[TaskState] = []
        holding: list[TaskState] = []
        records: list[TuningRecord] = []
        for task in tasks:
            begins = arrival.starts.get(task.workload_hash)
            if begins is None or begins.routes != options.routes:
                begins = TaskStart(task, self._target, options.routes)
            state = TaskState(task, begins=begins)
            new.append(state)
            recorded = [] if forced else self.recorder.known(task)
            known = self._still_true(task, recorded)
            records += known
            if measured_since(known, recorded):
                holding.append(state)
            self.spent += take_known(state, known, options, runs)
            self._known[task.workload_hash] = known
        end_what_was_done(holding, records, runs)
        return new

    def begin(self, states: Sequence[TaskState]) -> None:
        """Give new tasks the candidates of templates and the best decisions of near shapes."""
        states = [state for state in states if not state.left_alone]
        for state in states:
            known_us = {
                record.decision: record.latency_us
                for record in self._known.pop(state.task.workload_hash)
                if record.route in OFFERED_ROUTES
            }
            if state.start.offers:
                state.templates = TemplateSearch(state.start.offers, known_us, thorough=self._options.all_templates)
        if self._options.warm_start_s and self._options.mode is not Mode.FORCE and states:
            since = time.monotonic()
            known = {state.task.workload_hash for state in states if state.known}
            near = self._warm_start.begin([state.task for state in states], known)
            for state, best in zip(states, near, strict=True):
                state.near = best
                if state.templates is not None:
                    state.templates.prefer(best.parameters)
            self.seconds["search"] += time.monotonic() - since

    def new_search(self, state: TaskState, threads: int) -> TaskSearch:
        """Return the search of a task, which begins with the records of the database."""
        options, mod = self._options, state.task.mod
        forced = options.mode is Mode.FORCE
        place = (target_key(self._target), self._environment)
        seeds = [] if forced else top_records(self._database, mod, *place, _SEEDS, tvm_target=self._target.target)
        return TaskSearch(
            mod,
            self._target.target,
            make_space(self._target.target, mod),
            self._cost_model,
            seeds,
            name=state.task.name,
            seed=options.seed,
            per_round=options.trials_per_iteration,
            # On a GPU most schedules drawn at random are refused, and drawing them is most of a search's time.
            population=options.population // (2 if self._target.kind == "cuda" else 1),
            threads=threads,
        )
