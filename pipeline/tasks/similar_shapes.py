"""Near shapes: kernels that differ from a task in their sizes alone, such as another sequence length or batch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.records import Environment, Route, TargetKey, TuningRecord, Workload
from relaxtune.tuning_db.store import TuningDatabase

# Whole numbers that are sizes: not part of a name (`float16`, `i0`) nor of a fraction.
_SIZE = re.compile(r"(?<![\w.\-+])\d+(?![\w.])")
# Shapes whose records are looked at, the nearest first, and records of each.
_SHAPES_MAX = 3
_RECORDS_MAX = 8
# Distances are compared to so many digits: the order in which logarithms are added changes those after them.
_DIGITS = 9


@dataclass(frozen=True)
class NearRecords:
    """The best decisions of near shapes, the nearest shape's first."""

    # Of the search, and of templates.
    traces: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    # The largest part of its fallback's latency that the search saved at a near shape, from 0 to 1; None where that is
    # known of none. A saving of nothing is certain only for a shape with `_RECORDS_MAX` valid candidates.
    saved: float | None = None


def shape_free(signature: str) -> str:
    """Return a signature without its sizes: family, dtypes, operators and their order stay."""
    return _SIZE.sub("#", signature)


def distance(signature: str, other: str) -> float:
    """Return how far the sizes of two signatures of one form are apart: the sum of their ratios' logarithms."""
    return float(np.abs(_log_sizes(signature) - _log_sizes(other)).sum())


def _log_sizes(signature: str) -> NDArray[np.float64]:
    return np.array([math.log(int(size) + 1) for size in _SIZE.findall(signature)])


class _Form:
    """The workloads of one form, and the logarithms of their sizes: a row each, with room for more."""

    def __init__(self, sizes: int) -> None:
        self._workloads: list[Workload] = []
        self._rows: dict[str, int] = {}
        self._logs = np.empty((8, sizes))

    def put(self, workload: Workload) -> None:
        row = self._rows.setdefault(workload.workload_hash, len(self._workloads))
        self._workloads[row : row + 1] = [workload]
        if row == len(self._logs):
            self._logs = np.concatenate([self._logs, np.empty_like(self._logs)])
        self._logs[row] = _log_sizes(workload.signature)

    def nearest(self, signature: str, count: int) -> list[Workload]:
        """Return those nearest to a signature, which itself is left out; of equal distances the older comes first."""
        far = np.abs(self._logs[: len(self._workloads)] - _log_sizes(signature)).sum(axis=1)
        ordered = (self._workloads[row] for row in np.argsort(far.round(_DIGITS), kind="stable"))
        return list(islice((one for one in ordered if one.signature != signature), count))


class KnownShapes:
    """Workloads by the form of their signatures, without their IR."""

    def __init__(self, workloads: Iterable[Workload] = ()) -> None:
        self._by_form: dict[str, _Form] = {}
        self.add(workloads)

    def add(self, workloads: Iterable[Workload]) -> None:
        """Take in workloads; those that are known are replaced."""
        for one in workloads:
            form = shape_free(one.signature)
            if form not in self._by_form:
                self._by_form[form] = _Form(len(_SIZE.findall(one.signature)))
            self._by_form[form].put(replace(one, ir_json=None))

    def near(self, task: TuningTask) -> list[Workload]:
        """Return the workloads that are nearest to a task, the nearest first; the task is none of them."""
        form = self._by_form.get(shape_free(task.signature))
        return [] if form is None else form.nearest(task.signature, _SHAPES_MAX)


def near_records(
    near: Sequence[Sequence[Workload]], database: TuningDatabase, target: TargetKey, environment: Environment
) -> list[NearRecords]:
    """Return for each of several tasks the best decisions of the shapes near it; the database is asked once a route.

    Parameters
    ----------
    near : sequence of sequence of Workload
        For each task, from `KnownShapes.near`; the task itself comes first where other devices measured it.
    target, environment : TargetKey, Environment
        Where the records must be true.
    """
    wanted = {one.workload_hash: one for of_task in near for one in of_task}
    if not wanted:
        return [NearRecords() for _ in near]

    def ask(route: Route, k: int) -> dict[str, list[TuningRecord]]:
        questions = [
            Question(one.workload_hash, one.signature_key, target, environment, route) for one in wanted.values()
        ]
        return dict(zip(wanted, database.list_top_each(questions, k=k), strict=True))

    searched, templates = ask(Route.METASCHEDULE, _RECORDS_MAX), ask(Route.TEMPLATE, _RECORDS_MAX)
    fallbacks = ask(Route.FALLBACK, 1)
    return [_of_task([one.workload_hash for one in of_task], searched, templates, fallbacks) for of_task in near]


def _of_task(hashes: Sequence[str], *by_route: Mapping[str, Sequence[TuningRecord]]) -> NearRecords:
    searched, templates, fallbacks = by_route
    saved: list[float] = []
    for one in hashes:
        fallback_us, best_us = (found[one][0].latency_us if found[one] else None for found in (fallbacks, searched))
        if fallback_us and best_us is not None and (best_us < fallback_us or len(searched[one]) == _RECORDS_MAX):
            saved.append(max(0.0, 1.0 - best_us / fallback_us))
    traces, parameters = (
        tuple(dict.fromkeys(record.decision for one in hashes for record in found[one]))
        for found in (searched, templates)
    )
    return NearRecords(traces, parameters, max(saved, default=None))
