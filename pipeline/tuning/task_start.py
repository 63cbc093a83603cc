"""The beginning of a task, known before anything is measured: its reference, its fallback, the offers of templates.

Finding it takes 60 ms for a kernel of a transformer. In a batch the process that imports a model does it, so that the
thread that tunes has some milliseconds of work with a task.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import tvm
from tvm import tirx

from relaxtune.pipeline.tasks.packed_module import PackedModule
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.candidates import Candidate
from relaxtune.pipeline.tuning.measure.arguments import argument_specs
from relaxtune.pipeline.tuning.measure.workload_spec import WorkloadSpec
from relaxtune.pipeline.tuning.search.template_candidates import template_candidates
from relaxtune.pipeline.validate.tolerances import KernelTolerance, kernel_tolerance
from relaxtune.schedules.errors import Refusal, ScheduleError
from relaxtune.schedules.fallback import apply_fallback, fallback_with_rules
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.tir.blocks import written_params
from relaxtune.schedules.tir.dependent_arguments import column_sums_of_weights, padding_masks, partial_sums_of_rows
from relaxtune.schedules.tir.matmul import recognise_matmul
from relaxtune.schedules.tir.row_norm import COUNT
from relaxtune.tuning_db.records import Route, canonical_json

logger = logging.getLogger(__name__)

# An unscheduled PrimFunc runs at about 0.3 GFLOP/s; beyond this the reference has the CPU's fallback schedule, which
# shares nothing with MetaSchedule's.
_PLAIN_FLOPS_MAX = 1e8


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
        return _reference(self.task, host_target(self.target))

    @cached_property
    def spec(self) -> WorkloadSpec:
        """The arguments and tolerances of candidates, without the reference."""
        return _spec(self.task)

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


def _reference(task: TuningTask, host: tvm.target.Target) -> PackedModule:
    if task.flops <= _PLAIN_FLOPS_MAX:
        return task.packed
    try:
        return PackedModule.of(apply_fallback(task.mod, host))
    except ScheduleError as e:
        logger.warning("the reference of task %s is unscheduled: %s", task.name, e)
        return task.packed


def _spec(task: TuningTask) -> WorkloadSpec:
    func = task.mod["main"]
    return WorkloadSpec(
        workload=task.workload_hash,
        arguments=argument_specs(func),
        outputs=written_params(func),
        index_ranges=task.index_ranges,
        tolerance=kernel_tolerance(func),
        masks=padding_masks(func),
        partial_sums=partial_sums_of_rows(func),
        column_sums=column_sums_of_weights(func),
        own_tolerances=own_tolerances(func),
    )


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
