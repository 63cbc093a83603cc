"""Pick a kernel for every PrimFunc of a lowered module, from what was measured.

The record that wins (`tuning_db.winner`) makes the kernel. Where no record can be used, a template
that makes the function gives its default, its own first guess; where none does, the fallback schedule takes its place.
The choice says which, and why. Compiling never fails for want of a record.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
from tvm import tirx

from relaxtune.pipeline.artifact.entries import MeasuredEntry
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.choose.model_records import ModelDecision
from relaxtune.pipeline.choose.record_lookup import RecordLookup, unusable
from relaxtune.pipeline.choose.replay import replay_record
from relaxtune.pipeline.codegen.tvm_errors import TVM_ERRORS
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.tasks.routes import DEFAULT_ROUTES
from relaxtune.pipeline.tasks.sizes_of_tables import untuned_function
from relaxtune.pipeline.tasks.task import SizeOfTable, TuningTask
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import as_scheduled, is_scheduled
from relaxtune.schedules.registry import ANY_SIZE, apply_decision, list_candidates, table_of
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import Parameters, TemplateError
from relaxtune.tuning_db.records import Environment, Route, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.winner import Choice, Considered, Judged, Preferred, Trace, left_aside, summary, winner

logger = logging.getLogger(__name__)

NO_DATABASE = "no database was given"
# Faster by no more in a table, a kernel is as fast in a model, and one more to compile.
_TIE = 0.01


def select_kernels(
    lowered: LoweredModule,
    tasks: Sequence[TuningTask],
    *,
    database: TuningDatabase | None,
    target: ResolvedTarget,
    environment: Environment,
    routes: frozenset[Route] = DEFAULT_ROUTES,
    decision: ModelDecision | None = None,
    why: str = NO_DATABASE,
    explain: bool = False,
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
        The reason in the choices where there is no database.
    decision : ModelDecision or None
        Kernels that are faster inside the model than those that are the fastest alone.
    explain : bool
        Whether the traces of the choices have records that are not true here, too.
    """
    by_function = {name: task for task in tasks for name in task.functions.get(lowered.graph.name, ())}
    lookup = None if database is None else RecordLookup(database, target, environment, explain=explain)
    choices: list[KernelChoice] = []
    for function in lowered.kernels:
        task = by_function.get(function)
        if task is None:
            place = (lowered.graph.name, function)
            places = [(of, one) for one in tasks for of in one.tables if (of.model, of.function) == place]
            func = untuned_function(lowered, function, places)
            table: KernelChoice | None = None
            trace: Trace = ()
            if lookup is not None and places and Route.TEMPLATE in routes:
                table, trace = _choose_table(function, func, places, lookup, target, decision)
            aside = "its table cannot be made" if target.kind == "cuda" else "the default schedule is as fast"
            if not places:
                reason = "not tunable: it has no tuning task"
            elif lookup is None:
                reason = why
            else:
                reason = aside if any(one.taken for one in trace) else "no record of any size"
            choice = table or _untuned(function, func, target, routes, reason)
            choices.append(replace(choice, trace=trace if table else left_aside(trace, aside)))
        elif lookup is None:
            fallback = KernelChoice(function, task.name, Route.FALLBACK)
            choices.append(_noted(_unmeasured(fallback, task, target, routes), why))
        else:
            preferred = None if decision is None else decision.preferred(task.workload_hash)
            choices.append(_choose(function, task, lookup, target, routes, preferred))
    # The untuned build of a comparison has no records on purpose.
    if database is not None or why == NO_DATABASE:
        _log_choices(choices)
    return tuple(choices)


def tasks_without_record(choices: Sequence[KernelChoice]) -> tuple[str, ...]:
    """Return the names of the tuning tasks that had no usable record, each once."""
    return tuple(dict.fromkeys(c.task for c in choices if c.task is not None and not c.has_record))


def _choose(
    function: str,
    task: TuningTask,
    lookup: RecordLookup,
    target: ResolvedTarget,
    routes: frozenset[Route],
    preferred: Preferred | None,
) -> KernelChoice:
    """Return the kernel of the record that wins, or one without a record."""
    fallback = KernelChoice(function, task.name, Route.FALLBACK)
    scheduled: dict[int, tirx.PrimFunc] = {}

    @cache
    def default() -> KernelChoice:
        return _unmeasured(fallback, task, target, routes, lookup.failed_templates(task))

    def unusable(record: TuningRecord) -> str | None:
        if record.route is Route.FALLBACK:
            return None
        try:
            scheduled[id(record)] = replay_record(task, record, target)
        except LoweringError as e:
            logger.warning("%s", e)
            return str(e)
        return None

    found = winner(
        lookup.judge(task),
        routes=routes,
        preferred=preferred,
        unusable=unusable,
        has_default=lambda: default().route is Route.TEMPLATE,
    )
    logger.debug("task %s: %s", task.name, summary(found.trace))
    record = found.record
    passed_over = tuple(one.id or 0 for one in found.unusable)
    if record is None:
        return replace(_noted(default(), found.why), unusable=passed_over, trace=found.trace)
    return replace(
        fallback,
        route=record.route,
        record_id=record.id,
        latency_us=record.latency_us,
        decision=record.decision,
        note=found.why,
        unusable=passed_over,
        database=record.layer,
        measured=MeasuredEntry(record.environment.device_name, record.registers, record.smem_bytes, record.spill_bytes),
        within_model=found.inside,
        trace=found.trace,
        scheduled=scheduled.get(id(record)),
    )


def _untuned(
    function: str, func: tirx.PrimFunc, target: ResolvedTarget, routes: frozenset[Route], reason: str
) -> KernelChoice:
    """Return a kernel for a function without a task, or a table of sizes without a record."""
    fallback = KernelChoice(function, None, Route.FALLBACK)
    candidates, _ = list_candidates(func, target) if Route.TEMPLATE in routes and not is_scheduled(func) else ([], [])
    chosen = _default(fallback, func, target, candidates[0]) if candidates else fallback
    return _noted(chosen, reason)


def _choose_table(
    function: str,
    func: tirx.PrimFunc,
    places: Sequence[tuple[SizeOfTable, TuningTask]],
    lookup: RecordLookup,
    target: ResolvedTarget,
    decision: ModelDecision | None,
) -> tuple[KernelChoice | None, Trace]:
    """Return the kernel of symbolic sizes that records of some sizes make, and the records that were looked at.

    There is none where nothing is recorded, or it cannot be made. The same records give the same kernel: tuning and
    compiling from records alone both end here.
    """
    if target.kind == "cuda":
        made, note, trace = _lines(func, places, lookup, target, decision)
    else:
        made, note, trace = _for_all_sizes(func, places, lookup, target)
    if made is None:
        return None, trace
    try:
        scheduled = as_scheduled(apply_decision(func, target, made))
    except (TemplateError, *TVM_ERRORS) as e:
        logger.warning("kernel %s: its records make no kernel for all sizes: %s", function, last_line(e))
        return None, trace
    choice = KernelChoice(function, None, Route.TEMPLATE, decision=made, of_sizes=True, scheduled=scheduled)
    return _noted(choice, note), trace


def _lines(
    func: tirx.PrimFunc,
    places: Sequence[tuple[SizeOfTable, TuningTask]],
    lookup: RecordLookup,
    target: ResolvedTarget,
    decision: ModelDecision | None,
) -> tuple[str | None, str, Trace]:
    """Return a function's table with the fastest record of each size; None where nothing is recorded."""
    table = table_of(func, target)
    offered = None if table is None else table.candidates(func, target)
    if table is None or offered is None or isinstance(offered, Refusal):
        return None, "", ()
    (own,) = offered

    def doubt(of: SizeOfTable, task: TuningTask, record: TuningRecord) -> str | None:
        return _doubt(task, record, target, table.refusal(func, target, record.decision, of.place))

    chosen: dict[SizeOfTable, Choice] = {}
    used: set[str] = set()
    for of, task in sorted(places, key=lambda one: one[0].place):
        preferred = None if decision is None else decision.preferred(task.workload_hash)
        kept = used | {own.at(of.place)}
        chosen[of] = _fastest(lookup.judge(task), kept, partial(doubt, of, task), preferred)
        used |= {one.decision for one in (chosen[of].record,) if one is not None}
    trace = tuple(entry for one in chosen.values() for entry in one.trace)
    found = {of: choice.record for of, choice in chosen.items() if choice.record is not None}
    measured = ", ".join(f"{of.text} (record {record.id})" for of, record in found.items())
    made = own.with_measured({of.place: record.decision for of, record in found.items()}).to_json() if found else None
    return made, f"table of kernels measured at {measured}", trace


def _for_all_sizes(
    func: tirx.PrimFunc,
    places: Sequence[tuple[SizeOfTable, TuningTask]],
    lookup: RecordLookup,
    target: ResolvedTarget,
) -> tuple[str | None, str, Trace]:
    """Return the decision that takes the least time at all sizes together; None where that is the default schedule's.

    At a size where a decision was not measured, it counts as the default. Latencies are lower quartiles: other work
    only adds time, and a kernel on all cores waits for the one that is disturbed.
    """
    offered = ANY_SIZE.own(func, target)
    if isinstance(offered, Refusal):
        return None, "", ()
    own, default_us = offered.to_json(), 0.0
    trace: Trace = ()
    saved_us, found = Counter[str](), dict[str, tuple[TuningTask, TuningRecord]]()
    for _, task in places:
        judged = lookup.judge(task)
        trace += judged.trace
        of_size = {one.decision: one for one in reversed(judged.standing) if one.route is Route.TEMPLATE}
        quick_us = {text: float(np.quantile(one.latencies_us, 0.25)) for text, one in of_size.items()}
        if own in of_size:
            default_us += task.weight * quick_us[own]
            saved_us.update({text: task.weight * (quick_us[own] - us) for text, us in quick_us.items()})
            found = {**{text: (task, one) for text, one in of_size.items()}, **found}
    together = [replace(one, latencies_us=(default_us - saved_us[text],)) for text, (_, one) in found.items()]
    ranked = Judged(tuple(sorted(together, key=lambda one: one.latency_us or 0.0)), trace)
    best = _fastest(ranked, {own}, lambda record: _doubt(found[record.decision][0], record, target))
    rows = ", ".join(of.text for of, _ in places)
    if best.record is None or best.record.decision == own:
        return None, "", best.trace
    return best.record.decision, f"one kernel, measured at {rows} (record {best.record.id})", best.trace


def _doubt(
    task: TuningTask, record: TuningRecord, target: ResolvedTarget, refused: Refusal | None = None
) -> str | None:
    """Return why a record no longer makes the kernel that was measured, or why symbolic sizes refuse it."""
    reason = unusable(task, record, target)
    if reason is not None:
        logger.warning("%s", reason)
        return reason
    if refused is None:
        return None
    logger.info("record %s of task %s is not for symbolic rows: %s", record.id, task.name, refused.reason)
    return f"it is not for symbolic rows: {refused.reason}"


def _fastest(
    judged: Judged,
    kept: Collection[str],
    doubt: Callable[[TuningRecord], str | None],
    preferred: Preferred | None = None,
) -> Choice:
    """Return the fastest record, or the first of those `kept` where no other is faster by over `_TIE`.

    Kept are the decision without records, and those that the table has at other sizes: each kernel takes time to
    compile.
    """
    ranked = judged.standing
    place = next((n for n, one in enumerate(ranked) if one.route is Route.TEMPLATE and one.decision in kept), 0)
    close = [one for one in ranked[:place] if (one.latency_us or 0.0) * (1 + _TIE) >= (ranked[place].latency_us or 0.0)]
    passed = tuple(Considered.of(one, f"at most {_TIE:.0%} faster than a kernel of the table") for one in close)
    judged = Judged(tuple(one for one in ranked if one not in close), (*judged.trace, *passed))
    return winner(judged, routes=(Route.TEMPLATE,), preferred=preferred, unusable=doubt)


def _noted(choice: KernelChoice, why: str) -> KernelChoice:
    """Return a kernel without a record whose note begins with the reason."""
    return replace(choice, note=f"{why}; {choice.note}" if choice.note else why)


def _unmeasured(
    fallback: KernelChoice,
    task: TuningTask,
    target: ResolvedTarget,
    routes: frozenset[Route],
    failed: frozenset[str] = frozenset(),
) -> KernelChoice:
    """Return a kernel without any measurement: the first that a template proposes and that has not failed yet.

    Where no template makes the function, it is the fallback.
    """
    first = template_default(task, target, failed) if Route.TEMPLATE in routes else None
    return fallback if first is None else _default(fallback, task.mod["main"], target, first)


def _default(fallback: KernelChoice, func: tirx.PrimFunc, target: ResolvedTarget, first: Parameters) -> KernelChoice:
    """Return the kernel of what a template proposes first, or the fallback where it cannot be made."""
    decision = first.to_json()
    try:
        scheduled = as_scheduled(apply_decision(func, target, decision))
    except (TemplateError, *TVM_ERRORS) as e:
        reason = f"the default of template {first.template} cannot be made: {last_line(e)}"
        logger.warning("kernel %s: %s", fallback.task or fallback.function, reason)
        return replace(fallback, note=reason)
    note = f"default of template {first.template}"
    return replace(fallback, route=Route.TEMPLATE, decision=decision, note=note, scheduled=scheduled)


def template_default(
    task: TuningTask, target: ResolvedTarget, failed: frozenset[str] = frozenset()
) -> Parameters | None:
    """Return the first that a template proposes for a task and that has not failed; None where none does."""
    candidates, refused = list_candidates(task.mod["main"], target)
    first = next((candidate for candidate in candidates if candidate.to_json() not in failed), None)
    if first is None:
        logger.debug("task %s: %s", task.name, "; ".join(refused) or "every candidate of a template has failed")
    return first


def _log_choices(choices: Sequence[KernelChoice]) -> None:
    missing = tasks_without_record(choices)
    defaults = sum(choice.route is Route.TEMPLATE and not choice.has_record for choice in choices)
    logger.info(
        "%d kernels: %d from records, %d defaults of templates; %d tasks without a record",
        len(choices), sum(choice.has_record for choice in choices), defaults, len(missing),
    )  # fmt: skip
    if missing:
        logger.debug("tasks without a record: %s", ", ".join(missing))
