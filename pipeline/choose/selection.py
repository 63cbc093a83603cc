"""Pick a kernel for every PrimFunc of a lowered module, from what was measured.

A kernel is picked from the tuning database by the rules of `tuning_db.lookup`. Where no record can be used, a template
that makes the function gives its default, its own first guess; where none does, the fallback schedule takes its place.
The choice says which, and why. Compiling never fails for want of a record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import tvm
from tvm import tirx

from relaxtune.pipeline.artifact.entries import MeasuredEntry
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.choose.model_records import ModelDecision
from relaxtune.pipeline.choose.plausible import believable_records
from relaxtune.pipeline.choose.standing import standing_records
from relaxtune.pipeline.codegen.kernel_hash import is_kernel, made_hash
from relaxtune.pipeline.codegen.tvm_errors import TVM_ERRORS
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.tasks.routes import DEFAULT_ROUTES
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.errors import ScheduleError
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.marks import SCHEDULED_ATTR
from relaxtune.schedules.registry import apply_decision, list_candidates
from relaxtune.schedules.search.tensor_intrinsics import register_intrinsics
from relaxtune.schedules.search.tensor_tile import has_tensor_tiles
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import Parameters, TemplateError
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.errors import TuningDatabaseError
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.lookup_cache import LookupCache
from relaxtune.tuning_db.metaschedule import replay_decision
from relaxtune.tuning_db.records import Environment, RecordFilter, Route, Status, TuningRecord, Workload

logger = logging.getLogger(__name__)

# Records tried for one kernel, the best first, before the fallback is taken.
RECORDS_TRIED = 8
# Records looked at, the best first: enough to find the fallback's among them, and those of the routes asked for.
RECORDS_LISTED = 1000


def select_kernels(
    lowered: LoweredModule,
    tasks: Sequence[TuningTask],
    *,
    database: TuningDatabase | None,
    target: ResolvedTarget,
    environment: Environment,
    routes: frozenset[Route] = DEFAULT_ROUTES,
    decision: ModelDecision | None = None,
    why: str = "no database was given",
) -> tuple[KernelChoice, ...]:
    """Return how each PrimFunc of the module gets its schedule, in execution order.

    Parameters
    ----------
    lowered : LoweredModule
        The module to compile.
    tasks : sequence of TuningTask
        Its tuning tasks, possibly among those of other models.
    database : TuningDatabase or None
        Where records are looked up; with None every kernel is a template's default or the fallback.
    target, environment : ResolvedTarget, Environment
        Where the code is to run.
    routes : frozenset of Route
        Records of other routes are left aside, as are defaults of templates without their route.
    why : str
        What the choices say where there is no database.
    decision : ModelDecision or None
        Kernels that are faster inside the model than those that are the fastest alone.
    """
    by_function = {name: task for task in tasks for name in task.functions.get(lowered.graph.name, ())}
    lookups = None if database is None else LookupCache(database)
    refuted = [] if database is None else database.list_records(RecordFilter(status=Status.WRONG_RESULT))
    choices = []
    for function in lowered.kernels:
        task = by_function.get(function)
        if task is None:
            choice = KernelChoice(function, None, Route.FALLBACK, note="not tunable: it has no tuning task")
        elif database is None or lookups is None:
            choice = _unmeasured(function, task, target, routes, why)
        else:
            choice = _choose(function, task, database, lookups, refuted, target, environment, routes, decision)
        choices.append(choice)
    _log_choices(choices)
    return tuple(choices)


def tasks_without_record(choices: Sequence[KernelChoice]) -> tuple[str, ...]:
    """Return the names of the tuning tasks that had no usable record, each once."""
    return tuple(dict.fromkeys(c.task for c in choices if c.task is not None and not c.has_record))


def replay_record(task: TuningTask, record: TuningRecord, target: ResolvedTarget) -> tirx.PrimFunc:
    """Return the task's PrimFunc scheduled as a record says, postprocessing included.

    Raises
    ------
    LoweringError
        The decision does not fit the task, or makes another kernel by now than the one that was measured.
    """
    if has_tensor_tiles(target.target):
        register_intrinsics()
    try:
        scheduled = _REPLAY[record.route](task, record, target)
    except (TuningDatabaseError, ScheduleError, *TVM_ERRORS) as e:
        raise LoweringError(f"record {record.id} of task {task.name} cannot be replayed: {_reason(e)}") from e
    if record.kernel_hash is None and record.route is Route.FALLBACK:
        # Its decision names a rule alone.
        raise LoweringError(f"record {record.id} of task {task.name} does not say which kernel was measured")
    if record.kernel_hash is not None and not is_kernel(record.kernel_hash, scheduled, target.target):
        raise LoweringError(
            f"record {record.id} of task {task.name} is of kernel {record.kernel_hash}, its decision makes "
            f"{made_hash(scheduled, target.target)} by now: the code that makes it has changed. Measure the task again "
            "(`relaxtune tune`)"
        )
    return _as_scheduled(scheduled)


def without_stale_fallbacks(
    task: TuningTask, records: Sequence[TuningRecord], target: ResolvedTarget
) -> list[TuningRecord]:
    """Return a task's records less valid ones of fallbacks that the default schedules make in another way by now."""
    fallbacks = [one for one in records if one.route is Route.FALLBACK and one.status is Status.OK]
    # Measured again and again, it is scheduled once for each kernel it was.
    holds = {hash_: _holds(task, one, target) for hash_, one in {one.kernel_hash: one for one in fallbacks}.items()}
    stale = {id(one) for one in fallbacks if not holds[one.kernel_hash]}
    return [one for one in records if id(one) not in stale]


def _holds(task: TuningTask, record: TuningRecord, target: ResolvedTarget) -> bool:
    try:
        replay_record(task, record, target)
    except LoweringError as e:
        logger.info("%s", e)
        return False
    return True


def _as_scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return func.without_attr("global_symbol").with_attr(SCHEDULED_ATTR, True)


def _reason(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _replay_metaschedule(task: TuningTask, record: TuningRecord, target: ResolvedTarget) -> tirx.PrimFunc:
    with target.target:
        return replay_decision(task.mod, record.decision).mod["main"]


def _replay_template(task: TuningTask, record: TuningRecord, target: ResolvedTarget) -> tirx.PrimFunc:
    return apply_decision(task.mod["main"], target, record.decision)


def _replay_fallback(task: TuningTask, _record: TuningRecord, target: ResolvedTarget) -> tirx.PrimFunc:
    return apply_fallback(task.mod, target.target)["main"]


_REPLAY: Mapping[Route, Callable[[TuningTask, TuningRecord, ResolvedTarget], tirx.PrimFunc]] = {
    Route.METASCHEDULE: _replay_metaschedule,
    Route.TEMPLATE: _replay_template,
    Route.LIBRARY: _replay_template,
    Route.FALLBACK: _replay_fallback,
}


def _choose(
    function: str,
    task: TuningTask,
    database: TuningDatabase,
    lookups: LookupCache,
    refuted: Sequence[TuningRecord],
    target: ResolvedTarget,
    environment: Environment,
    routes: frozenset[Route],
    decision: ModelDecision | None,
) -> KernelChoice:
    workload = Workload(
        task.workload_hash, task.family, task.signature, task.name, task.flops, task.bytes, None, tvm.__version__
    )
    records: Sequence[TuningRecord] = lookups.list_top(
        Question(
            workload_hash=task.workload_hash,
            signature_key=workload.signature_key,
            target=target_key(target),
            environment=environment,
        ),
        k=RECORDS_LISTED,
    )
    wrong = [record for record in refuted if record.workload_hash == task.workload_hash]
    records = without_stale_fallbacks(task, believable_records(task, records), target)
    records = [record for record in standing_records(records, environment, wrong) if record.route in routes]
    if all(record.route is Route.FALLBACK for record in records):
        # A run that ended early measured the fallback alone: that says nothing against a template.
        why = "no record of a candidate" if records else "no record"
        default = _unmeasured(function, task, target, routes, why, _failed_decisions(database, task))
        if default.route is Route.TEMPLATE or not records:
            return default
    preferred = _inside_the_model(records, decision)
    records = [*preferred, *_without_ties(records)][:RECORDS_TRIED]
    passed_over: list[tuple[int, str]] = []
    for record in records:
        if record.route is Route.FALLBACK:
            if passed_over:
                # What was faster is made in another way by now: more likely faster still than slower than this.
                failed = _failed_decisions(database, task)
                default = _unmeasured(function, task, target, routes, _note(passed_over), failed)
                if default.route is Route.TEMPLATE:
                    return replace(default, unusable=tuple(number for number, _ in passed_over))
            return _made(function, task, record, passed_over, None, within_model=record in preferred)
        try:
            scheduled = replay_record(task, record, target)
        except LoweringError as e:
            logger.warning("%s", e)
            passed_over.append((record.id or 0, str(e)))
            continue
        return _made(function, task, record, passed_over, scheduled, within_model=record in preferred)
    choice = _unmeasured(function, task, target, routes, _note(passed_over), _failed_decisions(database, task))
    return replace(choice, unusable=tuple(number for number, _ in passed_over))


def _failed_decisions(database: TuningDatabase, task: TuningTask) -> frozenset[str]:
    """Return the decisions of templates that were built or measured for a task, anywhere, and failed."""
    return frozenset(
        record.decision
        for status in Status
        if status is not Status.OK
        for record in database.list_records(
            RecordFilter(workload_hash=task.workload_hash, route=Route.TEMPLATE, status=status)
        )
    )


def _unmeasured(
    function: str,
    task: TuningTask,
    target: ResolvedTarget,
    routes: frozenset[Route],
    why: str,
    failed: frozenset[str] = frozenset(),
) -> KernelChoice:
    """Return a kernel that nobody measured: the first that a template proposes and that has not failed yet.

    Where no template makes the function, it is the fallback.
    """
    fallback = KernelChoice(function, task.name, Route.FALLBACK, note=why)
    first = template_default(task, target, failed) if Route.TEMPLATE in routes else None
    if first is None:
        return fallback
    decision = first.to_json()
    try:
        scheduled = apply_decision(task.mod["main"], target, decision)
    except (TemplateError, *TVM_ERRORS) as e:
        reason = f"the default of template {first.template} cannot be made: {_reason(e)}"
        logger.warning("task %s: %s", task.name, reason)
        return replace(fallback, note=f"{why}; {reason}")
    return KernelChoice(
        function=function,
        task=task.name,
        route=Route.TEMPLATE,
        decision=decision,
        note=f"{why}; default of template {first.template}",
        scheduled=_as_scheduled(scheduled),
    )


def template_default(
    task: TuningTask, target: ResolvedTarget, failed: frozenset[str] = frozenset()
) -> Parameters | None:
    """Return the first that a template proposes for a task and that has not failed; None where none does."""
    candidates, refused = list_candidates(task.mod["main"], target)
    first = next((candidate for candidate in candidates if candidate.to_json() not in failed), None)
    if first is None:
        logger.debug("task %s: %s", task.name, "; ".join(refused) or "every candidate of a template has failed")
    return first


def _inside_the_model(records: Sequence[TuningRecord], decision: ModelDecision | None) -> list[TuningRecord]:
    """Return the record that a decision about the model names, unless the fastest was measured since."""
    if decision is None or not records or decision.made_at is None or records[0].created_at > decision.made_at:
        return []
    wanted = decision.kernels.get(records[0].workload_hash)
    return [record for record in records if (record.route, record.decision) == wanted]


def _without_ties(records: Sequence[TuningRecord]) -> list[TuningRecord]:
    """Return the records less those whose median is within the spread that the fallback's own latencies show.

    The best of many equal candidates is the luckiest; such a tie goes to the fallback, which needs no replay.
    """
    fallback = next((record for record in records if record.route is Route.FALLBACK), None)
    if fallback is None:
        return list(records)
    fastest_us = min(fallback.latencies_us)
    return [record for record in records if record is fallback or (record.latency_us or 0.0) < fastest_us]


def _made(
    function: str,
    task: TuningTask,
    record: TuningRecord,
    passed_over: list[tuple[int, str]],
    scheduled: tirx.PrimFunc | None,
    *,
    within_model: bool,
) -> KernelChoice:
    return KernelChoice(
        function=function,
        task=task.name,
        route=record.route,
        record_id=record.id,
        latency_us=record.latency_us,
        decision=record.decision,
        note="faster inside the model than alone" if within_model else _note(passed_over),
        unusable=tuple(number for number, _ in passed_over),
        database=record.layer,
        measured=MeasuredEntry(record.environment.device_name, record.registers, record.smem_bytes, record.spill_bytes),
        within_model=within_model,
        scheduled=scheduled,
    )


def _note(passed_over: list[tuple[int, str]]) -> str:
    if not passed_over:
        return ""
    return f"{len(passed_over)} record(s) passed over: {'; '.join(reason for _, reason in passed_over)}"


def _log_choices(choices: Sequence[KernelChoice]) -> None:
    missing = tasks_without_record(choices)
    defaults = sum(choice.route is Route.TEMPLATE and not choice.has_record for choice in choices)
    logger.info(
        "%d kernels: %d from records, %d defaults of templates; %d tasks without a record",
        len(choices), _measured(choices), defaults, len(missing),
    )  # fmt: skip
    if missing:
        logger.info("tasks without a record: %s", ", ".join(missing))


def _measured(choices: Sequence[KernelChoice]) -> int:
    return sum(choice.has_record for choice in choices)
