"""The last word of a tuning run: the hottest kernels' best candidates, tried inside the whole model.

A kernel timed alone may mislead: in the model its neighbours leave other data in the caches, and other kernels beside
it on the device. So for each of the hottest tasks the runners-up are compiled into the model one at a time, and all
these models and the one as tuned take turns. The model as tuned takes part twice, first and last in every turn: a
runner-up's gain is over both, turn by turn, and how far the two are apart is how much it must exceed to count. It is
taken when a sign test of the turns (`pipeline.paired_gain`) leaves no doubt of that; while it is open, there are more
turns, and the doubt allowed is shared by all runners-up and by every time that is looked.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm

from pipeline.environment import target_key
from pipeline.errors import LoweringError
from pipeline.manifest import MeasuredEntry
from pipeline.measure import DEFAULT_WARMUP, Arm, measure
from pipeline.model_arm import compiled_arm
from pipeline.paired_gain import LEAST_GAIN, PairedGain, is_gain, paired_gain
from pipeline.prepare import PreparedModel
from pipeline.selection import KernelChoice, replay_record
from pipeline.tuning.options import TaskSummary, TuningSummary
from pipeline.tuning.recorder import describe_workload
from pipeline.tuning.standing import standing_records
from pipeline.tuning.task import TuningTask
from tuning_db.records import Route, TuningRecord
from tuning_db.store import TuningDatabase

logger = logging.getLogger(__name__)

# Runners-up of each task, and how far behind the winner they may be when timed alone.
_RIVALS = 2
_MARGIN = 0.1
_LISTED = 64
# Turns after which it is looked whether the gains are settled; slow models have no more once so many seconds are over.
_LOOKS = (30, 60, 120)
_SECONDS_MAX = 20.0
_BEFORE, _AFTER = "as tuned, before", "as tuned, after"
# The probability with which a run of all of this may take a runner-up that gains nothing.
_DOUBT = 0.01


@dataclass(frozen=True)
class Trial:
    """One runner-up inside the model.

    Attributes
    ----------
    task, route, record_id
        The kernel and the record that made it.
    alone_us
        Its latency when it is timed alone.
    model_ms, baseline_ms
        Median latency of the model with it, and of the model as tuned (the mean of before and after).
    gain, least_gain
        The part of the model's latency that it saves: the median of the turns, and what it is at least, beyond doubt.
    taken
        Whether it replaces the winner in the artifact.
    """

    task: str
    route: Route
    record_id: int | None
    alone_us: float
    model_ms: float
    baseline_ms: float
    gain: float
    least_gain: float
    taken: bool


@dataclass(frozen=True)
class RerankReport:
    """What came of trying runners-up inside the model in so many turns.

    `noise` is how far the model as tuned, before and after the others in a turn, is from itself. `latencies_ms` are the
    model's own, by turn: with the runner-up that gained most where one is taken, else as tuned.
    """

    trials: tuple[Trial, ...]
    noise: float
    turns: int = 0
    latencies_ms: tuple[float, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON data."""
        return {
            "noise": self.noise,
            "turns": self.turns,
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
            "latencies_ms": list(self.latencies_ms),
        }


def rerank(
    prepared: PreparedModel,
    choices: Sequence[KernelChoice],
    summary: TuningSummary,
    database: TuningDatabase,
    *,
    tasks: int,
) -> tuple[tuple[KernelChoice, ...], RerankReport]:
    """Return the choices, with winners replaced by runners-up that make the whole model faster, and what was tried.

    Parameters
    ----------
    choices : sequence of KernelChoice
        As selected from the records.
    tasks : int
        How many of the tasks that take most of the model's time are looked at.
    """
    rivals = [rival for task in _hottest(summary, tasks) for rival in _rivals(prepared, task.task, choices, database)]
    if not rivals:
        return tuple(choices), RerankReport((), 0.0)
    with tempfile.TemporaryDirectory(prefix="relaxtune-rerank-") as folder:
        plain = compiled_arm(prepared, choices, Path(folder) / "plain")
        arms = {_BEFORE: plain}
        for number, (_, changed) in enumerate(rivals):
            arms[str(number)] = compiled_arm(prepared, changed, Path(folder) / str(number))
        arms[_AFTER] = plain
        latencies, gains = _take_turns(arms, len(rivals))
    medians = {name: statistics.median(values) for name, values in latencies.items()}
    baseline = (medians[_BEFORE] + medians[_AFTER]) / 2
    best: dict[str, int] = {}
    for number, (one, _) in enumerate(rivals):
        held = best.get(one.task)
        if is_gain(gains[number]) and (held is None or gains[number].median > gains[held].median):
            best[one.task] = number
    trials = tuple(
        Trial(
            one.task,
            one.record.route,
            one.record.id,
            one.record.latency_us or 0.0,
            medians[str(n)],
            baseline,
            gains[n].median,
            gains[n].least,
            best.get(one.task) == n,
        )
        for n, (one, _) in enumerate(rivals)
    )
    taken = {choice.function: choice for number in best.values() for choice in rivals[number][0].changes}
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
    gained = max(best.values(), key=lambda number: gains[number].median, default=None)
    of_model = latencies[_BEFORE] if gained is None else latencies[str(gained)]
    report = RerankReport(trials, gains[0].bias, len(latencies[_BEFORE]), tuple(of_model))
    return tuple(taken.get(choice.function, choice) for choice in choices), report


def _take_turns(arms: Mapping[str, Arm], rivals: int) -> tuple[dict[str, list[float]], list[PairedGain]]:
    """Return the latencies of all arms and the gains of the rivals, after as many turns as it takes to tell."""
    latencies: dict[str, list[float]] = {name: [] for name in arms}
    doubt = _DOUBT / (rivals * len(_LOOKS))
    began, turns = time.monotonic(), 0
    gains: list[PairedGain] = []
    for look in _LOOKS:
        report = measure(arms, runs=look - turns, warmup=0 if turns else DEFAULT_WARMUP)
        turns = look
        for arm in report.arms:
            latencies[arm.name] += arm.latencies_ms
        before, after = latencies[_BEFORE], latencies[_AFTER]
        gains = [paired_gain(latencies[str(n)], before, after, doubt=doubt) for n in range(rivals)]
        if all(is_gain(one) or one.most < LEAST_GAIN for one in gains) or time.monotonic() - began > _SECONDS_MAX:
            break
    return latencies, gains


@dataclass(frozen=True)
class _Rival:
    """A runner-up: its record and the choices it makes."""

    task: str
    record: TuningRecord
    changes: tuple[KernelChoice, ...]


def _hottest(summary: TuningSummary, count: int) -> list[TaskSummary]:
    return [task for task in summary.tasks if task.after_us is not None][:count]


def _rivals(
    prepared: PreparedModel, task: TuningTask, choices: Sequence[KernelChoice], database: TuningDatabase
) -> list[tuple[_Rival, tuple[KernelChoice, ...]]]:
    """Return the runners-up of a task, each with all choices of the model it makes."""
    mine = [choice for choice in choices if choice.task == task.name]
    if not mine or mine[0].latency_us is None:
        return []
    records = standing_records(
        database.list_top(
            workload_hash=task.workload_hash,
            signature_key=describe_workload(task).signature_key,
            target=target_key(prepared.target),
            environment=prepared.environment,
            k=_LISTED,
        ),
        prepared.environment,
    )
    near = [
        record
        for record in records
        if (record.layer, record.id) != (mine[0].database, mine[0].record_id)
        and record.route in prepared.request.routes | {Route.FALLBACK}
        and (record.latency_us or 0.0) <= mine[0].latency_us * (1 + _MARGIN)
    ]
    found = []
    for record in near[:_RIVALS]:
        try:
            scheduled = None if record.route is Route.FALLBACK else replay_record(task, record, prepared.target)
        except LoweringError as e:
            logger.warning("%s", e)
            continue
        changes = tuple(_changed(choice, record, scheduled) for choice in mine)
        by_function = {choice.function: choice for choice in changes}
        everything = tuple(by_function.get(choice.function, choice) for choice in choices)
        found.append((_Rival(task.name, record, changes), everything))
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
