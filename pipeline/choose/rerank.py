"""Re-ranks the candidates of the hottest kernels inside the whole model, at the end of a tuning run.

A kernel timed alone may mislead: in the model its neighbours leave other data in the caches, other kernels beside it on
the device, and fewer or more multiprocessors to the one that starts while it ends. So for each of the hottest tasks the
runners-up, and the untuned default, are compiled beside the model as tuned (`pipeline.artifact.compile`). One
experiment on all of them (`pipeline.experiment`) finds those that surely make the model faster. Gains do not add up:
where several tasks have one, the best alone, the best two, and so on are compared again, and the combination that
saves most ships.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import tvm

from relaxtune.pipeline.artifact.entries import MeasuredEntry
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.choose.model_arm import compiled_arms
from relaxtune.pipeline.choose.record_lookup import RecordLookup
from relaxtune.pipeline.choose.replay import replay_record
from relaxtune.pipeline.choose.selection import template_default
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.experiment.experiment import LEAST_GAIN, Experiment, Question, Side, run_experiment
from relaxtune.pipeline.prepare import PreparedModel
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.tuning_db.records import Route, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase

logger = logging.getLogger(__name__)

# Runners-up of each task, and how far behind the winner they may be when timed alone.
_RIVALS = 3
_MARGIN = 0.1
_AS_TUNED = "as tuned"
# The probability with which one experiment (a run has two at most) may show a gain where there is none.
_QUESTION = Question(border=-LEAST_GAIN, doubt=0.01, seconds=20.0)


@dataclass(frozen=True)
class Trial:
    """One runner-up inside the model."""

    # The kernel and the record that made it.
    task: str
    route: Route
    record_id: int | None
    alone_us: float  # Its latency when it is timed alone.
    # Median latency of the model with it, and of the model as tuned.
    model_ms: float
    baseline_ms: float
    # The part of the model's latency that it saves, and its lower bound.
    gain: float
    least_gain: float
    taken: bool  # Whether it replaces the winner in the artifact.


@dataclass(frozen=True)
class RerankReport:
    """The runners-up tried inside the model, each timed so many `runs`.

    `gain` is the part of the model's latency that all that is taken saves together. `latencies_ms` are the model's own:
    with the kernels that are taken, else as tuned.
    """

    trials: tuple[Trial, ...]
    runs: int = 0
    gain: float = 0.0
    latencies_ms: tuple[float, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON data."""
        return {
            "runs": self.runs,
            "gain": self.gain,
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
            "latencies_ms": list(self.latencies_ms),
        }


def rerank(
    prepared: PreparedModel,
    choices: Sequence[KernelChoice],
    database: TuningDatabase,
    *,
    tasks: int,
    lock: AbstractContextManager[object] | None = None,
) -> tuple[tuple[KernelChoice, ...], RerankReport]:
    """Return the choices, with winners replaced by runners-up that make the whole model faster, and what was tried.

    `choices`: as selected from the records. `tasks`: how many of the tasks that take most of the model's time are
    looked at. `lock`: held while models are timed, where other processes time something on the same device.
    """
    lookup = RecordLookup(database, prepared.target, prepared.environment)
    latencies_us = {choice.task: choice.latency_us for choice in choices if choice.latency_us is not None}
    timed = [task for task in prepared.tasks if task.name in latencies_us]
    hottest = sorted(timed, key=lambda task: (-task.weight * latencies_us[task.name], task.name))[:tasks]
    rivals = [rival for task in hottest for rival in _rivals(prepared, task, choices, lookup)]
    if not rivals:
        return tuple(choices), RerankReport(())
    with contextlib.ExitStack() as held:
        tried = _try(prepared, choices, [rival.changes for rival in rivals], held, lock)
        gainers = _gainers(rivals, tried)
        together = [gainers[:count] for count in range(1, len(gainers) + 1)]
        if len(gainers) > 1:
            variants = [[change for number in numbers for change in rivals[number].changes] for numbers in together]
            again = _try(prepared, choices, variants, held, lock)
            names = [str(number) for number in range(len(together))]
        else:
            again, names = tried, [str(number) for number in gainers]
    sure = [place for place, name in enumerate(names) if again.contrasts[name].side is Side.BELOW]
    most = max(sure, key=lambda place: again.contrasts[names[place]].gain, default=None)
    taken, gain, latencies_ms = (
        ([], 0.0, tried.arms[_AS_TUNED].latencies_ms)
        if most is None
        else (together[most], again.contrasts[names[most]].gain, again.arms[names[most]].latencies_ms)
    )
    changed = {choice.function: choice for number in taken for choice in rivals[number].changes}
    report = RerankReport(_trials(rivals, tried, taken), tried.runs, gain, latencies_ms)
    return tuple(changed.get(choice.function, choice) for choice in choices), report


def _try(
    prepared: PreparedModel,
    choices: Sequence[KernelChoice],
    variants: Sequence[Sequence[KernelChoice]],
    held: contextlib.ExitStack,
    lock: AbstractContextManager[object] | None,
) -> Experiment:
    """Return an experiment on variants of a model, each named by its number, beside the model as tuned."""
    folder = held.enter_context(temporary_folder())
    plain, *others = compiled_arms(prepared, choices, variants, Path(folder) / "model")
    arms = {_AS_TUNED: plain, **{str(number): arm for number, arm in enumerate(others)}}
    with lock or contextlib.nullcontext():
        return run_experiment(lambda: arms, _QUESTION)


def _trials(rivals: Sequence[_Rival], tried: Experiment, taken: Sequence[int]) -> tuple[Trial, ...]:
    """Return the gain of each rival alone, and log it."""
    trials = tuple(
        Trial(
            one.task,
            one.record.route,
            one.record.id,
            one.record.latency_us or 0.0,
            tried.arms[str(number)].median_ms,
            tried.arms[_AS_TUNED].median_ms,
            tried.contrasts[str(number)].gain,
            tried.contrasts[str(number)].least_gain,
            number in taken,
        )
        for number, one in enumerate(rivals)
    )
    for trial in trials:
        logger.info(
            "task %s, record %s in the model: %.4f ms, as tuned %.4f ms, gains %.2f %%, %.2f %% at least",
            trial.task,
            trial.record_id,
            trial.model_ms,
            trial.baseline_ms,
            100 * trial.gain,
            100 * trial.least_gain,
        )
    return trials


def _gainers(rivals: Sequence[_Rival], tried: Experiment) -> list[int]:
    """Return of each task the rival that gains most, if it surely gains anything, the best first."""
    best: dict[str, int] = {}
    contrasts = [tried.contrasts[str(number)] for number in range(len(rivals))]
    for number in sorted(range(len(rivals)), key=lambda number: -contrasts[number].gain):
        if contrasts[number].least_gain > 0:
            best.setdefault(rivals[number].task, number)
    return list(best.values())


@dataclass(frozen=True)
class _Rival:
    """A runner-up: its record and the choices it makes."""

    task: str
    record: TuningRecord
    changes: tuple[KernelChoice, ...]


def _rivals(
    prepared: PreparedModel, task: TuningTask, choices: Sequence[KernelChoice], lookup: RecordLookup
) -> list[_Rival]:
    """Return the runners-up of a task, and its template's default where that was measured and is none of them."""
    mine = [choice for choice in choices if choice.task == task.name]
    if not mine or mine[0].latency_us is None:
        return []
    others = [
        record
        for record in lookup.judge(task).standing
        if (record.layer, record.id) != (mine[0].database, mine[0].record_id)
        and (record.route, record.decision) != (mine[0].route, mine[0].decision)
        and record.route in prepared.request.routes | {Route.FALLBACK}
    ]
    near = [record for record in others if (record.latency_us or 0.0) <= mine[0].latency_us * (1 + _MARGIN)][:_RIVALS]
    default = template_default(task, prepared.target)
    untuned = [
        record
        for record in others
        if default is not None and record.decision == default.to_json() and record not in near
    ]
    found = []
    for record in [*near, *untuned[:1]]:
        try:
            scheduled = None if record.route is Route.FALLBACK else replay_record(task, record, prepared.target)
        except LoweringError as e:
            logger.warning("%s", e)
            continue
        found.append(_Rival(task.name, record, tuple(_changed(choice, record, scheduled) for choice in mine)))
    return found


def _changed(choice: KernelChoice, record: TuningRecord, scheduled: tvm.tirx.PrimFunc | None) -> KernelChoice:
    return dataclasses.replace(
        choice,
        route=record.route,
        record_id=record.id,
        latency_us=record.latency_us,
        decision=record.decision,
        note=f"faster than record {choice.record_id} inside the model",
        database=record.layer,
        measured=MeasuredEntry(record.environment.device_name, record.registers, record.smem_bytes, record.spill_bytes),
        within_model=True,
        scheduled=scheduled,
    )
