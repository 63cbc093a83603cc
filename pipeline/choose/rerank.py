"""Re-ranks the candidates of the hottest kernels inside the whole model, at the end of a tuning run.

A kernel timed alone may mislead: in the model its neighbours leave other data in the caches, other kernels beside it on
the device, and fewer or more multiprocessors to the one that starts while it ends. So for each of the hottest tasks the
runners-up, and what would be taken if nothing had been measured, are compiled beside the model as tuned
(`pipeline.artifact.variants`), and all take turns. The model as tuned takes part twice, first and last in every turn: a
runner-up's gain is over both, turn by turn, and how far the two are apart is how much it must exceed to count. It is
taken when a sign test of the turns (`pipeline.bench.paired_gain`) leaves no doubt of that; while it is open, there are
more turns, and the doubt allowed is shared by all runners-up and by every time that is looked. Gains do not add up:
where several tasks have one, the best alone, the best two, and so on take turns again, and the most that pays is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import tvm

from relaxtune.pipeline.artifact.entries import MeasuredEntry
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.bench.measure import DEFAULT_WARMUP, Arm, measure
from relaxtune.pipeline.bench.paired_gain import LEAST_GAIN, PairedGain, is_gain, paired_gain
from relaxtune.pipeline.choose.candidates import CandidateLookup
from relaxtune.pipeline.choose.model_arm import compiled_arms
from relaxtune.pipeline.choose.replay import replay_record
from relaxtune.pipeline.choose.selection import template_default
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.prepare import PreparedModel
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.records import Route, TuningRecord

logger = logging.getLogger(__name__)

# Runners-up of each task, and how far behind the winner they may be when timed alone.
_RIVALS = 3
_MARGIN = 0.1
# Turns after which it is looked whether the gains are settled; slow models end before they would take so many seconds.
_LOOKS = (30, 60, 120)
_SECONDS_MAX = 20.0
_BEFORE, _AFTER = "as tuned, before", "as tuned, after"
# The probability with which the turns of one module (a run has two at most) may show a gain where there is none.
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

    `noise` is how far the model as tuned, before and after the others in a turn, is from itself. `gain` is the part of
    the model's latency that all that is taken saves together. `latencies_ms` are the model's own, by turn: with what is
    taken, else as tuned.
    """

    trials: tuple[Trial, ...]
    noise: float
    turns: int = 0
    gain: float = 0.0
    latencies_ms: tuple[float, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON data."""
        return {
            "noise": self.noise,
            "turns": self.turns,
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
    turn: AbstractContextManager[object] | None = None,
) -> tuple[tuple[KernelChoice, ...], RerankReport]:
    """Return the choices, with winners replaced by runners-up that make the whole model faster, and what was tried.

    Parameters
    ----------
    choices : sequence of KernelChoice
        As selected from the records.
    tasks : int
        How many of the tasks that take most of the model's time are looked at.
    turn : context manager or None
        Held while models are timed, where other processes time something on the same device.
    """
    lookup = CandidateLookup(database, prepared.target, prepared.environment)
    hottest = _hottest(prepared, choices, tasks)
    rivals = [rival for task in hottest for rival in _rivals(prepared, task, choices, lookup)]
    if not rivals:
        return tuple(choices), RerankReport((), 0.0)
    with contextlib.ExitStack() as held:
        tried = _try(prepared, choices, [rival.changes for rival in rivals], held, turn)
        gainers = _gainers(rivals, tried)
        together = [gainers[:count] for count in range(1, len(gainers) + 1)]
        if len(gainers) > 1:
            variants = [[change for number in numbers for change in rivals[number].changes] for numbers in together]
            again = _try(prepared, choices, variants, held, turn)
        else:
            again = tried.of(gainers)
    sure = [number for number, gain in enumerate(again.gains) if is_gain(gain)]
    most = max(sure, key=lambda number: again.gains[number].median, default=None)
    taken, gain, latencies_ms = (
        ([], 0.0, tried.before_ms)
        if most is None
        else (together[most], again.gains[most].median, again.variants_ms[most])
    )
    changed = {choice.function: choice for number in taken for choice in rivals[number].changes}
    report = RerankReport(_trials(rivals, tried, taken), tried.gains[0].bias, tried.turns, gain, latencies_ms)
    return tuple(changed.get(choice.function, choice) for choice in choices), report


@dataclass(frozen=True)
class _Tried:
    """Latencies in milliseconds by turn, of the model as tuned and of its variants, and what each variant gains."""

    before_ms: tuple[float, ...]
    variants_ms: tuple[tuple[float, ...], ...]
    after_ms: tuple[float, ...]
    gains: tuple[PairedGain, ...]

    @property
    def turns(self) -> int:
        """How often each ran."""
        return len(self.before_ms)

    def of(self, numbers: Sequence[int]) -> _Tried:
        """Return some of the variants."""
        variants_ms = tuple(self.variants_ms[number] for number in numbers)
        return dataclasses.replace(self, variants_ms=variants_ms, gains=tuple(self.gains[number] for number in numbers))


def _try(
    prepared: PreparedModel,
    choices: Sequence[KernelChoice],
    variants: Sequence[Sequence[KernelChoice]],
    held: contextlib.ExitStack,
    turn: AbstractContextManager[object] | None,
) -> _Tried:
    """Return what variants of a model take, after as many turns as it takes to tell whether they gain."""
    folder = held.enter_context(temporary_folder())
    plain, *others = compiled_arms(prepared, choices, variants, Path(folder) / "model")
    arms = {_BEFORE: plain, **{str(number): arm for number, arm in enumerate(others)}, _AFTER: plain}
    with turn or contextlib.nullcontext():
        return _take_turns(arms, len(others))


def _take_turns(arms: Mapping[str, Arm], variants: int) -> _Tried:
    latencies: dict[str, tuple[float, ...]] = dict.fromkeys(arms, ())
    doubt = _DOUBT / (variants * len(_LOOKS))
    began, turns = time.monotonic(), 0
    gains: tuple[PairedGain, ...] = ()
    for look in _LOOKS:
        report = measure(arms, runs=look - turns, warmup=0 if turns else DEFAULT_WARMUP)
        turns = look
        for arm in report.arms:
            latencies[arm.name] += arm.latencies_ms
        before, after = latencies[_BEFORE], latencies[_AFTER]
        gains = tuple(paired_gain(latencies[str(n)], before, after, doubt=doubt) for n in range(variants))
        # The next look doubles the turns.
        slow = 2 * (time.monotonic() - began) > _SECONDS_MAX
        if slow or all(is_gain(one) or one.most < LEAST_GAIN for one in gains):
            break
    of_variants = tuple(latencies[str(number)] for number in range(variants))
    return _Tried(latencies[_BEFORE], of_variants, latencies[_AFTER], gains)


def _trials(rivals: Sequence[_Rival], tried: _Tried, taken: Sequence[int]) -> tuple[Trial, ...]:
    """Return what came of each rival alone, and tell it."""
    trials = tuple(
        Trial(
            one.task,
            one.record.route,
            one.record.id,
            one.record.latency_us or 0.0,
            statistics.median(tried.variants_ms[number]),
            statistics.median([*tried.before_ms, *tried.after_ms]),
            tried.gains[number].median,
            tried.gains[number].least,
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


def _gainers(rivals: Sequence[_Rival], tried: _Tried) -> list[int]:
    """Return of each task the rival that gains most, if it surely gains anything, the best first."""
    best: dict[str, int] = {}
    for number in sorted(range(len(rivals)), key=lambda number: -tried.gains[number].median):
        if tried.gains[number].least > 0:
            best.setdefault(rivals[number].task, number)
    return list(best.values())


@dataclass(frozen=True)
class _Rival:
    """A runner-up: its record and the choices it makes."""

    task: str
    record: TuningRecord
    changes: tuple[KernelChoice, ...]


def _hottest(prepared: PreparedModel, choices: Sequence[KernelChoice], count: int) -> list[TuningTask]:
    """Return the tasks whose kernels take most of the model's time by their records."""
    latencies_us = {choice.task: choice.latency_us for choice in choices if choice.latency_us is not None}
    timed = [task for task in prepared.tasks if task.name in latencies_us]
    return sorted(timed, key=lambda task: (-task.weight * latencies_us[task.name], task.name))[:count]


def _rivals(
    prepared: PreparedModel, task: TuningTask, choices: Sequence[KernelChoice], lookup: CandidateLookup
) -> list[_Rival]:
    """Return the runners-up of a task, and its template's default where that was measured and is none of them."""
    mine = [choice for choice in choices if choice.task == task.name]
    if not mine or mine[0].latency_us is None:
        return []
    others = [
        record
        for record in lookup.list_standing(task)
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
        made=scheduled,
    )
