"""The beginning of a task, known before anything is measured: its reference, its fallback, the offers of templates.

Finding it takes 60 ms for a kernel of a transformer. In a batch the process that imports a model does it, so that the
thread that tunes has some milliseconds of work with a task.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import zip_longest

import tvm
from tvm import tirx

from relaxtune.pipeline.tasks.packed_module import PackedModule
from relaxtune.pipeline.tasks.task import SizeOfTable, TuningTask
from relaxtune.pipeline.tuning.candidates import Candidate
from relaxtune.pipeline.tuning.measure.arguments import argument_specs
from relaxtune.pipeline.tuning.measure.recipe import Recipe
from relaxtune.pipeline.tuning.measure.workload_spec import WorkloadSpec
from relaxtune.pipeline.validate.tolerances import KernelTolerance, kernel_tolerance
from relaxtune.schedules.errors import Refusal, ScheduleError
from relaxtune.schedules.fallback import apply_fallback, fallback_with_rules
from relaxtune.schedules.registry import LIBRARIES, TEMPLATES, Table, list_candidates, table_of
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.attention_sm90.table import TableParameters
from relaxtune.schedules.templates.base import Template
from relaxtune.schedules.templates.ranges import RangesParameters
from relaxtune.schedules.tir.blocks import written_params
from relaxtune.schedules.tir.dependent_arguments import column_sums_of_weights, padding_masks, partial_sums_of_rows
from relaxtune.schedules.tir.matmul import recognise_matmul
from relaxtune.schedules.tir.row_norm import COUNT
from relaxtune.tuning_db.records import Route, canonical_json

logger = logging.getLogger(__name__)

# An unscheduled PrimFunc runs at about 0.3 GFLOP/s; beyond this the reference has the CPU's fallback schedule, which
# shares nothing with MetaSchedule's.
_PLAIN_FLOPS_MAX = 1e8
_MAKERS: Mapping[Route, Mapping[str, Template]] = {Route.TEMPLATE: TEMPLATES, Route.LIBRARY: LIBRARIES}
# The routes whose candidates are parameters, known before anything is measured.
OFFERED_ROUTES = frozenset(_MAKERS)


@dataclass(frozen=True)
class FallbackSchedule:
    """A task's default schedule, and its decision."""

    mod: PackedModule
    decision: str


@dataclass(frozen=True, eq=False)
class TaskStart:
    """The beginning of a task; each part is found at its first use, and travels to other processes."""

    task: TuningTask
    target: ResolvedTarget
    # Routes whose templates and libraries offer candidates; routes outside `OFFERED_ROUTES` offer nothing.
    routes: frozenset[Route]

    @cached_property
    def reference(self) -> PackedModule:
        """A module for the host, whose results candidates are compared with."""
        if self.task.flops <= _PLAIN_FLOPS_MAX:
            return self.task.packed
        try:
            return PackedModule.of(apply_fallback(self.task.mod, host_target(self.target)))
        except ScheduleError as e:
            logger.warning("the reference of task %s is unscheduled: %s", self.task.name, e)
            return self.task.packed

    @cached_property
    def spec(self) -> WorkloadSpec:
        """The arguments and tolerances of candidates, without the reference."""
        func = self.task.mod["main"]
        return WorkloadSpec(
            workload=self.task.workload_hash,
            arguments=argument_specs(func),
            outputs=written_params(func),
            index_ranges=self.task.index_ranges,
            tolerance=kernel_tolerance(func),
            masks=padding_masks(func),
            partial_sums=partial_sums_of_rows(func),
            column_sums=column_sums_of_weights(func),
            own_tolerances=own_tolerances(func),
        )

    @cached_property
    def fallback(self) -> FallbackSchedule | str:
        """The default schedule, or why there is none."""
        try:
            scheduled, rules = fallback_with_rules(self.task.mod, self.target.target)
        except ScheduleError as e:
            logger.warning("task %s has no fallback schedule: %s", self.task.name, e)
            return str(e)
        return FallbackSchedule(PackedModule.of(scheduled), canonical_json({"rule": rules["main"]}))

    @cached_property
    def offers(self) -> tuple[Candidate, ...]:
        """The candidates of templates and libraries, the most promising first."""
        return tuple(template_candidates(self.task, self.target, routes=self.routes))

    def find_all(self) -> TaskStart:
        """Find all parts now; return itself."""
        _ = self.reference, self.spec, self.fallback, self.offers
        return self


def host_target(target: ResolvedTarget) -> tvm.target.Target:
    """Return the CPU that references are computed on."""
    return target.target.host if target.target.host is not None else target.target


def own_tolerances(func: tirx.PrimFunc) -> Mapping[int, KernelTolerance]:
    """Return the tolerances of statistics and partial sums of rows, by the positions of those outputs.

    Statistics are computed in float32 from parameters alone, whatever the product is rounded to. The sums of squares
    among the partial sums are much larger than the sums.
    """
    matmul = recognise_matmul(func)
    if isinstance(matmul, Refusal):
        return {}
    own: dict[int, KernelTolerance] = {}
    if matmul.norm is not None and matmul.norm.output is not None:
        own[matmul.norm.output] = kernel_tolerance(func, matmul.norm.output)
    if matmul.partials is not None:
        own[matmul.partials.output] = replace(kernel_tolerance(func, matmul.partials.output), quantities=COUNT)
    return own


def template_candidates(
    task: TuningTask, target: ResolvedTarget, routes: Collection[Route] = (Route.TEMPLATE,)
) -> list[Candidate]:
    """Return what templates and libraries offer for a task, the most promising first.

    They alternate, so that a short run measures the first of each.

    Routes outside `OFFERED_ROUTES` offer nothing.
    """
    offers: list[list[Candidate]] = []
    for route, makers in _MAKERS.items():
        if route not in routes:
            continue
        if task.symbolic is not None and route is Route.TEMPLATE:
            decisions = _lines_of_table(task.symbolic, task.tables[0], target)
        else:
            found, refused = list_candidates(task.mod["main"], target, makers)
            for reason in refused:
                logger.debug("task %s: %s", task.name, reason)
            decisions = [parameters.to_json() for parameters in found]
        offers.append([Candidate(route, one, Recipe(task.packed, target, one)) for one in decisions])
    return [one for rank in zip_longest(*offers) for one in rank if one is not None]


def _lines_of_table(symbolic: PackedModule, of: SizeOfTable, target: ResolvedTarget) -> list[str]:
    """Return the decisions that can be at a place of a table, that of the untuned table first."""
    func, table, untuned = _untuned_table(symbolic, target)
    if table is None or untuned is None:
        return []
    offered = table.lines(func, target, of.place)
    others = () if isinstance(offered, Refusal) else offered
    return [*dict.fromkeys([untuned.at(of.place), *(one.to_json() for one in others)])]


@lru_cache(maxsize=64)
def _untuned_table(
    symbolic: PackedModule, target: ResolvedTarget
) -> tuple[tirx.PrimFunc, Table | None, RangesParameters | TableParameters | None]:
    """Return a symbolic function, one object for all its sizes, what makes its table, and the untuned one."""
    func = symbolic.make()["main"]
    table = table_of(func, target)
    offered = None if table is None else table.candidates(func, target)
    return func, table, None if offered is None or isinstance(offered, Refusal) else offered[0]
