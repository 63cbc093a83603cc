"""Near shapes: kernels that differ from a task in their sizes alone, such as another sequence length or batch."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.records import Environment, Route, TargetKey, Workload

# Whole numbers that are sizes: not part of a name (`float16`, `i0`) nor of a fraction.
_SIZE = re.compile(r"(?<![\w.\-+])\d+(?![\w.])")
# Shapes whose records are looked at, the nearest first, and records of each.
_SHAPES_MAX = 3
_RECORDS_MAX = 8


@dataclass(frozen=True)
class NearRecords:
    """The best decisions of near shapes, the nearest shape's first.

    Attributes
    ----------
    traces, parameters
        Of the search, and of templates.
    saved
        The largest part of its fallback's latency that the search saved at a near shape, from 0 to 1; None where that
        is known of none.
    """

    traces: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    saved: float | None = None


def shape_free(signature: str) -> str:
    """Return a signature without its sizes: family, dtypes, operators and their order stay."""
    return _SIZE.sub("#", signature)


def distance(signature: str, other: str) -> float:
    """Return how far the sizes of two signatures of one form are apart: the sum of their ratios' logarithms."""
    pairs = zip(_SIZE.findall(signature), _SIZE.findall(other), strict=True)
    return sum(abs(math.log((int(a) + 1) / (int(b) + 1))) for a, b in pairs)


class KnownShapes:
    """Workloads by the form of their signatures, without their IR."""

    def __init__(self, workloads: Iterable[Workload] = ()) -> None:
        self._by_form: dict[str, dict[str, Workload]] = {}
        self.add(workloads)

    def add(self, workloads: Iterable[Workload]) -> None:
        """Take in workloads; those that are known are replaced."""
        for one in workloads:
            self._by_form.setdefault(shape_free(one.signature), {})[one.workload_hash] = replace(one, ir_json=None)

    def near(self, task: TuningTask) -> list[Workload]:
        """Return the workloads that are nearest to a task, the nearest first; the task is none of them."""
        found = self._by_form.get(shape_free(task.signature), {}).values()
        others = [one for one in found if one.signature != task.signature]
        return heapq.nsmallest(_SHAPES_MAX, others, key=lambda one: distance(task.signature, one.signature))


def near_records(
    near: Sequence[Workload], database: TuningDatabase, target: TargetKey, environment: Environment
) -> NearRecords:
    """Return the best decisions of the shapes near a task.

    Parameters
    ----------
    near : sequence of Workload
        From `KnownShapes.near`.
    target, environment : TargetKey, Environment
        Where the records must be true.
    """
    traces: list[str] = []
    parameters: list[str] = []
    saved: list[float] = []
    for workload in near:
        best: dict[Route, float | None] = {}
        for route, found in ((Route.METASCHEDULE, traces), (Route.TEMPLATE, parameters), (Route.FALLBACK, None)):
            records = database.list_top(
                Question(
                    workload_hash=workload.workload_hash,
                    signature_key=workload.signature_key,
                    target=target,
                    environment=environment,
                    route=route,
                ),
                k=1 if found is None else _RECORDS_MAX,
            )
            best[route] = records[0].latency_us if records else None
            if found is not None:
                found += [record.decision for record in records if record.decision not in found]
        fallback_us, best_us = best[Route.FALLBACK], best[Route.METASCHEDULE]
        if fallback_us and best_us is not None:
            saved.append(max(0.0, 1.0 - best_us / fallback_us))
    return NearRecords(tuple(traces), tuple(parameters), max(saved, default=None))
