"""A cost model that starts with what the database knows: the features of recorded candidates.

They are read from the database where an earlier run left them; otherwise the traces are replayed, some milliseconds
each, while the build processes start, and what they give is left there for the next run. Of each workload, candidates
over the whole range of latencies are taken: a model that has only seen the best cannot tell a good one from a bad one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator, Sequence

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.tasks.similar_shapes import KnownShapes, NearRecords, near_records
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.record import describe_workload
from relaxtune.pipeline.tuning.search.cost_model import FastCostModel
from relaxtune.schedules.search.space import QuietTuneContext
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.features import list_features, record_features
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.metaschedule import ir_from_json, replay_decision
from relaxtune.tuning_db.records import Environment, Route, TargetKey, TuningRecord, Workload
from relaxtune.tuning_db.store import TuningDatabase

logger = logging.getLogger(__name__)

# The name of the features; others are left alone.
_EXTRACTOR = "per-store-feature"
_RECORDS_MAX = 24
_LISTED_MAX = 256
# Workloads whose records are read at once.
_READ_AT_ONCE = 32


class WarmStart:
    """Records of earlier runs for the tasks of a run, which may come while it goes on.

    The workloads of a family are read with its first task. Each workload teaches the cost model once, and all together
    for no longer than `options.warm_start_s`.

    `is_measured` says of a task of this run, by workload hash, whether anything was measured; the database has nothing
    of the others.
    """

    def __init__(
        self,
        cost_model: FastCostModel,
        database: TuningDatabase,
        target: ResolvedTarget,
        environment: Environment,
        options: TuningOptions,
        is_measured: Callable[[str], bool],
    ) -> None:
        self._cost_model = cost_model
        self._database = database
        self._target = target
        self._environment = environment
        self._teaches = Route.METASCHEDULE in options.routes
        self._left_s = options.warm_start_s
        self._is_measured = is_measured
        self._families: set[str] = set()
        # Hashes of workloads: of the database, of the run's own tasks, of those that taught the cost model.
        self._recorded: set[str] = set()
        self._own: set[str] = set()
        self._learnt: set[str] = set()
        self._shapes = KnownShapes()

    def begin(self, tasks: Sequence[TuningTask], known: Container[str]) -> list[NearRecords]:
        """Return the best decisions of shapes near to tasks, after the cost model has learnt from earlier records.

        Without a record of a task on this device, its best decisions on another device come first. Records of near
        shapes and of the tasks themselves teach first, then others of the same operator families.

        `known` are the workload hashes of tasks with valid records of this device.
        """
        own = {task.workload_hash: describe_workload(task, with_ir=False) for task in tasks}
        others = {one.workload_hash: one for one in self._read({task.family for task in tasks})}
        self._recorded |= others.keys()
        self._shapes.add([*own.values(), *others.values()])
        self._own |= own.keys()
        near = [self._shapes.near(task) for task in tasks]
        elsewhere = [hash_ in self._recorded and hash_ not in known for hash_ in own]
        sources = [
            [
                *([itself] if is_elsewhere else []),
                *(one for one in of_task if one.workload_hash not in self._own or self._is_measured(one.workload_hash)),
            ]
            for itself, of_task, is_elsewhere in zip(own.values(), near, elsewhere, strict=True)
        ]
        found = near_records(sources, self._database, target_key(self._target), self._environment)
        teachers: dict[str, Workload] = {}
        for itself, of_task in zip(own.values(), near, strict=True):
            teachers |= {one.workload_hash: others.get(one.workload_hash, one) for one in (itself, *of_task)}
        workloads = [one for one in (teachers | others).values() if one.workload_hash not in self._learnt]
        self._learnt |= {one.workload_hash for one in workloads}
        if self._teaches and self._left_s > 0:
            began = time.monotonic()
            where = (self._database, self._target, self._environment)
            learn_from_records(self._cost_model, workloads, *where, self._left_s)
            self._left_s -= time.monotonic() - began
        return found

    def _read(self, families: set[str]) -> list[Workload]:
        """Return the workloads of families that are new to the run, written by the running TVM."""
        unread = sorted(families - self._families)
        self._families |= families
        found = [one for family in unread for one in self._database.list_workloads(family=family)]
        return [one for one in found if one.tvm_version == self._environment.tvm_version]


def learn_from_records(
    cost_model: FastCostModel,
    workloads: Sequence[Workload],
    database: TuningDatabase,
    target: ResolvedTarget,
    environment: Environment,
    seconds: float,
) -> int:
    """Teach a cost model what was recorded of some workloads and return how many candidates that was.

    `workloads` have their IR, and the most telling come first. Records of `environment` and of others of its
    architecture are taken, until `seconds` are over.
    """
    until = time.monotonic() + seconds
    key = target_key(target)
    version = f"{_EXTRACTOR}, TVM {tvm.__version__}"
    kept: dict[int, NDArray[np.float32]] | None = None
    replayed_now: dict[int, NDArray[np.float32]] = {}
    learnt = 0
    for workload, records in _recorded(workloads, database, key, environment, until):
        if kept is None:
            kept = {one.record_id: one.values for one in list_features(database, version, key)}
        chosen = spread_out(records, _RECORDS_MAX)
        # With several databases over each other, an id says nothing.
        features = {
            position: kept[record.id]
            for position, record in enumerate(chosen)
            if record.layer is None and record.id in kept
        }
        missing = [position for position in range(len(chosen)) if position not in features]
        replayed = _replay(cost_model, workload, [chosen[position] for position in missing], target.target, until)
        for index, values in replayed.items():
            record = chosen[missing[index]]
            features[missing[index]] = values
            if record.layer is None and record.id is not None and np.isfinite(values).all():
                replayed_now[record.id] = values
        cost_model.absorb(
            workload.workload_hash,
            list(features.values()),
            [(chosen[position].latency_us or 0.0) / 1e6 for position in features],
        )
        learnt += len(features)
    if replayed_now:
        record_features(database, version, replayed_now)
    if learnt:
        cost_model.train()
        logger.info("the cost model starts with %d recorded candidates, %d of them replayed", learnt, len(replayed_now))
    return learnt


def _recorded(
    workloads: Sequence[Workload], database: TuningDatabase, target: TargetKey, environment: Environment, until: float
) -> Iterator[tuple[Workload, list[TuningRecord]]]:
    """Yield the workloads with two valid records of the search or more, and these, the best first."""
    for first in range(0, len(workloads), _READ_AT_ONCE):
        part = workloads[first : first + _READ_AT_ONCE]
        if time.monotonic() > until:
            return
        questions = [Question(one.workload_hash, None, target, environment, Route.METASCHEDULE) for one in part]
        for workload, records in zip(part, database.list_top_each(questions, k=_LISTED_MAX), strict=True):
            if len(records) > 1 and time.monotonic() <= until:
                yield workload, records


def spread_out(records: Sequence[TuningRecord], count: int) -> list[TuningRecord]:
    """Return so many of some records in order, the first, the last and between them at equal steps."""
    if len(records) <= count:
        return list(records)
    step = (len(records) - 1) / (count - 1)
    return [records[round(step * position)] for position in range(count)]


def _replay(
    cost_model: FastCostModel,
    workload: Workload,
    records: Sequence[TuningRecord],
    target: tvm.target.Target,
    until: float,
) -> dict[int, NDArray[np.float32]]:
    """Return the features of those records that replay before the time is over, by their position."""
    if not records or workload.ir_json is None:
        return {}
    try:
        mod = ir_from_json(workload.ir_json)
    except InvalidRecordError as e:
        logger.info("workload %s teaches nothing: %s", workload.name, e)
        return {}
    args_info = ms.arg_info.ArgInfo.from_entry_func(mod, False)
    candidates: dict[int, ms.MeasureCandidate] = {}
    for position, record in enumerate(records):
        if time.monotonic() > until:
            break
        try:
            with target:
                schedule = replay_decision(mod, record.decision)
        except InvalidRecordError as e:
            logger.info("record %s teaches nothing: %s", record.id, e)
            continue
        candidates[position] = ms.MeasureCandidate(schedule, args_info)
    if not candidates:
        return {}
    context = QuietTuneContext(mod, target, None, name=workload.name)
    found = cost_model.features_of(context, list(candidates.values()))
    return {position: values for position, values in zip(candidates, found, strict=True) if len(values)}
