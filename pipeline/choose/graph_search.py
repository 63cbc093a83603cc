"""Searches the graph of a model: decisions of the lowering, each settled by the latency of the whole model.

A pass that saves a kernel makes others longer, or keeps them from a better schedule; whether it pays depends on the
device and the sizes. So each decision (`pipeline.passes.graph_decisions`) that changes the module is compiled with the
best records known, and takes turns with the best module so far (`pipeline.experiment`). A decision that is surely
faster is kept, and the next is tried on top of it. Every trial is recorded; one that was surely no faster is not
repeated.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from tvm_ffi import structural_equal

from relaxtune.pipeline.artifact.compile import CompiledModule, compile_module
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.choose.model_arm import load_arm, timed_calls
from relaxtune.pipeline.choose.model_records import MeasuredModel, damaged_record
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.experiment.experiment import (
    LEAST_GAIN,
    Contrast,
    Experiment,
    Question,
    Side,
    run_experiment,
    slower_sizes,
)
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.graph_decisions import DECISIONS, GraphDecision
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import PreparedModel, list_tasks
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.workers.machine_faults import is_of_the_machine
from relaxtune.tuning_db.records import Mode
from relaxtune.tuning_db.store import TuningDatabase

logger = logging.getLogger(__name__)

# A decision that is kept may be no faster with a probability of 1 %.
_QUESTION = Question(border=-LEAST_GAIN, doubt=0.01, seconds=10.0)
# Seconds of an experiment at least, and the runs of both arms together that it takes at least.
_LEAST_S, _LEAST_RUNS = 2.0, 20
# A trial that begins in time may end later than planned by this part of the seconds.
_LATE = 0.5
_BEST, _TRIED = "so far", "tried"


class Verdict(StrEnum):
    """The result of an experiment on a decision."""

    KEPT = "kept"
    UNSURE = "not sure"
    NO_FASTER = "no faster"
    SLOWER = "slower"
    NOT_TRIED = "no time left"
    NO_CODE = "does not compile"


_SETTLED = (Verdict.NO_FASTER, Verdict.SLOWER)


@dataclass(frozen=True)
class GraphTrial:
    """One decision, and the latencies of the model with it and without.

    `gain` is the part of the latency that it saves, between `least_gain` and `most_gain`; None where nothing was
    measured, or too little for bounds.
    """

    decision: str
    verdict: Verdict
    gain: float | None = None
    least_gain: float | None = None
    most_gain: float | None = None
    model_ms: float | None = None
    baseline_ms: float | None = None
    runs: int = 0
    record_id: int | None = None  # The record that it is known from, where this run did not measure it.

    @property
    def reason(self) -> str:
        """The result in a phrase."""
        if self.gain is None:
            return self.verdict.value
        least, most = self.least_gain, self.most_gain
        if self.verdict is Verdict.KEPT:
            return f"{self.gain:.1%} faster (at least {least or 0.0:.1%}), kept"
        if self.verdict is Verdict.SLOWER:
            return f"{-self.gain:.1%} slower" if self.gain < 0 else f"{self.gain:.1%} faster, slower at some sizes"
        bounds = "" if least is None or most is None else f", between {least:+.1%} and {most:+.1%}"
        return f"{self.verdict}: {self.gain:+.1%}{bounds}"


@dataclass(frozen=True)
class GraphReport:
    """The decisions that were tried, in order; `latencies_ms` are the model's with those that were kept."""

    trials: tuple[GraphTrial, ...] = ()
    seconds: float = 0.0
    latencies_ms: tuple[float, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON data."""
        return {"seconds": self.seconds, "trials": [{**asdict(one), "reason": one.reason} for one in self.trials]}


def search_graph(
    prepared: PreparedModel,
    model: MeasuredModel,
    database: TuningDatabase,
    choose: Callable[[PreparedModel], Sequence[KernelChoice]],
    tuning: TuningOptions,
    untuned: CompiledModule | None = None,
) -> tuple[PreparedModel, GraphReport]:
    """Return a model with the decisions that make it surely faster, and what was tried in `tuning.graph_s` seconds.

    `model` is the model as its request says, under which trials are recorded. `choose` returns the kernels of a form of
    the model. Under mode `force`, what records have settled is measured again. `untuned` is `prepared` without records,
    if it was compiled already: where the kernels are the same, its code is taken.
    """
    offered = [one for one in DECISIONS if one.may_change(prepared.lowered)]
    if tuning.graph_s <= 0 or prepared.buckets or not offered:
        return prepared, GraphReport()
    began = time.monotonic()
    known = {} if tuning.mode is Mode.FORCE else {one.decision: one for one in recorded_trials(model, database)}
    known = {name: trial for name, trial in known.items() if trial.verdict in _SETTLED}
    trials = [known[one.name] for one in offered if one.name in known]
    waiting = [one for one in offered if one.name not in known]
    if not waiting:
        return prepared, GraphReport(tuple(trials))
    logger.info("graph search: %d decisions in about %.0f s", len(waiting), tuning.graph_s)
    with temporary_folder() as folder:
        search = _Search(prepared, model, database, choose, tuning.graph_s, Path(folder), tuning.seed)
        if search.begin(untuned):
            for number, decision in enumerate(waiting):
                trial = search.try_one(decision, len(waiting) - number)
                if trial is not None:
                    trials.append(trial)
                    logger.info("%s: %s", trial.decision, trial.reason)
        else:
            trials += [GraphTrial(one.name, Verdict.NOT_TRIED) for one in waiting]
            logger.info("graph search: left out")
        return search.prepared, GraphReport(tuple(trials), time.monotonic() - began, search.latencies_ms)


@dataclass
class _Search:
    """The best module so far, loaded, and the time until the search is over."""

    prepared: PreparedModel
    model: MeasuredModel
    database: TuningDatabase
    choose: Callable[[PreparedModel], Sequence[KernelChoice]]
    seconds: float
    folder: Path
    seed: int
    latencies_ms: tuple[float, ...] = ()

    def begin(self, untuned: CompiledModule | None) -> bool:
        """Load the model as it is; return False where it does not compile, or no time is left for another build."""
        started = time.monotonic()
        self._until = started + self.seconds
        self._calls = timed_calls(self.prepared)
        compile_s = 0.0 if untuned is None else sum(untuned.seconds.values())
        if 2 * compile_s + _LEAST_S > self.seconds:  # Loading the model, and another build of it.
            logger.info("graph search: no time left to compile the model again, which took %.0f s", compile_s)
            return False
        choices = self.choose(self.prepared)
        try:
            compiled = compile_module(self.prepared.lowered, choices, self.prepared.target, like=untuned)
            self._best = load_arm(compiled, self._calls, self.folder / "best")
        except LoweringError as e:  # The search of kernels meets it too, and its records say so.
            logger.warning("graph search: the model does not compile: %s", e)
            return False
        self._build_s = max(compile_s, time.monotonic() - started)
        started = time.monotonic()
        self._best.arm()
        self._run_s = time.monotonic() - started
        return True

    def _left_s(self) -> float:
        return self._until - time.monotonic()

    def _has_time(self, seconds: float) -> bool:
        left_s = self._left_s()
        return left_s > 0 and seconds <= left_s + _LATE * self.seconds

    def try_one(self, decision: GraphDecision, waiting: int) -> GraphTrial | None:
        """Return the outcome of a decision, recorded; None where it changes nothing. `waiting` counts it too."""
        if not decision.may_change(self.prepared.lowered):
            return None
        least_s = max(_LEAST_S, _LEAST_RUNS * self._run_s)
        if not self._has_time(self._build_s + least_s):
            return GraphTrial(decision.name, Verdict.NOT_TRIED)
        started = time.monotonic()
        variant = relowered(self.prepared, decision.applied(self.prepared.lowered.options))
        if structural_equal(variant.lowered.mod, self.prepared.lowered.mod):
            return None
        recorded = self.model.with_decision(decision.name)
        try:
            compiled = compile_module(variant.lowered, self.choose(variant), variant.target)
            loaded = load_arm(compiled, self._calls, self.folder / decision.pass_name / decision.name, self._best)
        except LoweringError as e:
            logger.warning("%s: %s", decision.name, e)
            if not is_of_the_machine(str(e)):
                recorded.record(self.database, {"decision": decision.name}, seed=self.seed, job_id=None, error=str(e))
            return GraphTrial(decision.name, Verdict.NO_CODE)
        self._build_s = time.monotonic() - started
        share_s = min(_QUESTION.seconds, max(least_s, self._left_s() / waiting))
        arms = {_BEST: self._best.arm, _TRIED: loaded.arm}
        found = run_experiment(lambda: arms, replace(_QUESTION, seconds=share_s))
        trial = _trial(decision.name, found)
        plain = {name: value for name, value in asdict(trial).items() if value is not None and name != "record_id"}
        plain["beside"] = sorted(self.prepared.lowered.options.decided)
        latencies_ms = found.arms[_TRIED].latencies_ms
        recorded.record(self.database, plain, seed=self.seed, job_id=None, latencies_ms=latencies_ms)
        if trial.verdict is Verdict.KEPT:
            options = decision.applied(self.prepared.lowered.options, trial.reason)
            self.prepared = replace(variant, lowered=replace(variant.lowered, options=options))
            self._best, self.latencies_ms = loaded, latencies_ms
        return trial


def _trial(name: str, found: Experiment) -> GraphTrial:
    contrast = found.contrasts[_TRIED]
    slower = slower_sizes(found.arms[_TRIED], found.arms[_BEST], _QUESTION.doubt)
    least, most = (bound if math.isfinite(bound) else None for bound in (contrast.least_gain, -contrast.least))
    return GraphTrial(
        name,
        _verdict(contrast, slower),
        gain=contrast.gain,
        least_gain=least,
        most_gain=most,
        model_ms=found.arms[_TRIED].median_ms,
        baseline_ms=found.arms[_BEST].median_ms,
        runs=found.runs,
    )


def _verdict(contrast: Contrast, slower: Sequence[str]) -> Verdict:
    """Return the verdict; a decision that is slower at one of the tuned sizes is not kept."""
    if contrast.side is Side.UNSURE:
        return Verdict.UNSURE
    if slower or contrast.least > 0:
        return Verdict.SLOWER
    return Verdict.KEPT if contrast.side is Side.BELOW else Verdict.NO_FASTER


def relowered(prepared: PreparedModel, options: LoweringOptions) -> PreparedModel:
    """Return a model lowered with other options, and its tasks."""
    if options == prepared.lowered.options:
        return prepared
    lowered = lower(prepared.lowered.graph, prepared.target.target, options)
    tasks, untunable = list_tasks([lowered], prepared.sizes, prepared.target)
    return replace(prepared, lowered=lowered, tasks=tasks, untunable=untunable)


def recorded_trials(model: MeasuredModel, database: TuningDatabase) -> tuple[GraphTrial, ...]:
    """Return the newest trial of each decision that is true here."""
    trials = []
    for decision in DECISIONS:
        record = model.with_decision(decision.name).newest(database)
        if record is not None:
            try:
                plain = {name: value for name, value in json.loads(record.decision).items() if name in _RECORDED}
                verdict = Verdict(plain.pop("verdict"))
                trials.append(GraphTrial(**plain, verdict=verdict, record_id=record.id))
            except (ValueError, LookupError, TypeError, AttributeError) as e:
                raise damaged_record(record, e) from e
    return tuple(trials)


_RECORDED = frozenset(GraphTrial.__dataclass_fields__)
