"""From a lowered module to code: pick a kernel for every PrimFunc, schedule it, plan memory, generate code.

A kernel is picked from the tuning database by the rules of `tuning_db.lookup`; where no record can be used, the
fallback schedule takes its place and the choice says why. Compiling never fails for want of a record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import tvm
from tvm import relax, tirx
from tvm.target import codegen

from pipeline.codegen.cuda_graph import capture_whole_function, fix_output_memory
from pipeline.codegen.finish import device_toolchain, finish_kernels
from pipeline.environment import target_key
from pipeline.errors import LoweringError
from pipeline.passes import plan_memory_passes
from pipeline.passes.module import LoweredModule
from pipeline.routes import DEFAULT_ROUTES
from pipeline.tuning.task import TuningTask
from schedules.fallback import SCHEDULED_ATTR, apply_fallback
from schedules.targets import ResolvedTarget
from schedules.templates.base import TemplateError
from schedules.templates.lowering import tir_pipeline_for
from schedules.templates.registry import apply_decision
from tuning_db.cache import LookupCache
from tuning_db.errors import TuningDatabaseError
from tuning_db.metaschedule import replay_decision
from tuning_db.records import Environment, Route, TuningRecord, Workload
from tuning_db.store import TuningDatabase

logger = logging.getLogger(__name__)

# TVM's own errors share no base class; those raised through its C++ side arrive as Python's built-in ones.
TVM_ERRORS = (
    tvm.error.InternalError,
    tvm.s_tir.ScheduleError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
)

# Records tried for one kernel, the best first, before the fallback is taken.
RECORDS_TRIED = 8
# Records looked at, the best first: enough to find the fallback's among them, and those of the routes asked for.
RECORDS_LISTED = 1000


@dataclass(frozen=True)
class KernelChoice:
    """How one PrimFunc gets its schedule.

    Attributes
    ----------
    function
        Name of the PrimFunc in the lowered module.
    task
        Name of its tuning task, None when it has none.
    route
        Who makes the kernel.
    record_id, latency_us, decision
        The database record behind it, its median latency, and its decision (JSON); None for the fallback.
    note
        Why there is no record, or which better records could not be used.
    unusable
        Ids of the records that were passed over because their decision cannot be replayed.
    database
        The database the record is in, when several lie over each other; else None.
    scheduled
        The scheduled PrimFunc, None when the fallback is to make it.
    """

    function: str
    task: str | None
    route: Route
    record_id: int | None = None
    latency_us: float | None = None
    decision: str | None = None
    note: str = ""
    unusable: tuple[int, ...] = ()
    database: str | None = None
    scheduled: tirx.PrimFunc | None = field(default=None, repr=False, compare=False)

    @property
    def has_record(self) -> bool:
        """Whether a measured record stands behind the kernel."""
        return self.record_id is not None


@dataclass(frozen=True)
class CompiledModule:
    """A module compiled in memory, with what it was made of.

    Attributes
    ----------
    lowered, choices, target
        What went in.
    executable
        TVM's executable; `pipeline.export.write_artifact` writes it.
    cuda_graph
        Whether the kernels run as one captured CUDA graph.
    seconds
        Phase of the compilation -> seconds.
    """

    lowered: LoweredModule
    choices: tuple[KernelChoice, ...]
    target: ResolvedTarget
    executable: relax.VMExecutable
    cuda_graph: bool
    seconds: Mapping[str, float]


def select_kernels(
    lowered: LoweredModule,
    tasks: Sequence[TuningTask],
    *,
    database: TuningDatabase | None,
    target: ResolvedTarget,
    environment: Environment,
    routes: frozenset[Route] = DEFAULT_ROUTES,
) -> tuple[KernelChoice, ...]:
    """Return how each PrimFunc of the module gets its schedule, in execution order.

    Parameters
    ----------
    lowered : LoweredModule
        The module to compile.
    tasks : sequence of TuningTask
        Its tuning tasks, possibly among those of other models.
    database : TuningDatabase or None
        Where records are looked up; with None every kernel takes the fallback.
    target, environment : ResolvedTarget, Environment
        Where the code is to run.
    routes : frozenset of Route
        Records of other routes are left aside.
    """
    by_function = {name: task for task in tasks for name in task.functions.get(lowered.graph.name, ())}
    lookups = None if database is None else LookupCache(database)
    choices = []
    for function in lowered.kernels:
        task = by_function.get(function)
        if task is None:
            choice = KernelChoice(function, None, Route.FALLBACK, note="not tunable: it has no tuning task")
        elif lookups is None:
            choice = KernelChoice(function, task.name, Route.FALLBACK, note="no database was given")
        else:
            choice = _choose(function, task, lookups, target, environment, routes)
        choices.append(choice)
    _log_choices(choices)
    return tuple(choices)


def tasks_without_record(choices: Sequence[KernelChoice]) -> tuple[str, ...]:
    """Return the names of the tuning tasks that had no usable record, each once."""
    return tuple(dict.fromkeys(c.task for c in choices if c.task is not None and not c.has_record))


def compile_module(
    lowered: LoweredModule,
    choices: Sequence[KernelChoice],
    target: ResolvedTarget,
    *,
    cuda_graph: bool = True,
) -> CompiledModule:
    """Return the compiled module.

    Parameters
    ----------
    lowered : LoweredModule
        Unscheduled.
    choices : sequence of KernelChoice
        From `select_kernels`; a PrimFunc without a choice takes the fallback.
    target : ResolvedTarget
        What to generate code for; a CUDA target needs a compiler toolchain and no GPU.
    cuda_graph : bool
        On CUDA, whether the kernels of a module with static shapes run as one captured graph. It then reads its
        inputs at fixed addresses, and its outputs stay valid until the next run.

    Raises
    ------
    LoweringError
        Code generation refused the module, or the CUDA toolchain is missing.
    """
    target = portable_host(target)
    seconds: dict[str, float] = {}
    with _timed(seconds, "schedule"):
        mod = apply_choices(lowered.mod, choices)
        graph = cuda_graph and target.kind == "cuda"
        if graph:
            mod = capture_whole_function(mod, len(lowered.graph.inputs))
        mod = finish_kernels(apply_fallback(mod, target.target), target.target)
    with _timed(seconds, "plan_memory"), _pass_context(graph), target.target:
        mod = _plan_memory(mod, target, graph)
    with _timed(seconds, "codegen"), device_toolchain(target.target), _pass_context(graph), target.target:
        executable = _generate(mod, target, lowered.graph.name)
    return CompiledModule(lowered, tuple(choices), target, executable, graph, seconds)


def portable_host(target: ResolvedTarget) -> ResolvedTarget:
    """Return a GPU target whose host code runs on any processor of its kind, not on this machine's only.

    The host code of a GPU module packs arguments and launches kernels; a module compiled here is to run beside another
    machine's GPU. A host that was chosen otherwise than by detection, and any CPU target, stays as it is.
    """
    host = target.target.host
    detected = host is not None and str(host.attrs.get("mcpu", "")) == str(codegen.llvm_get_system_cpu())
    if target.kind != "cuda" or not detected:
        return target
    generic = tvm.target.Target({"kind": "llvm", "mtriple": str(host.attrs["mtriple"])})
    return replace(target, target=tvm.target.Target(target.target, host=generic))


def apply_choices(mod: tvm.ir.IRModule, choices: Sequence[KernelChoice]) -> tvm.ir.IRModule:
    """Return the module with the PrimFuncs of the choices replaced by their scheduled form."""
    result = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    for choice in choices:
        if choice.scheduled is not None:
            result[result.get_global_var(choice.function)] = choice.scheduled
    return result


def replay_record(task: TuningTask, record: TuningRecord, target: ResolvedTarget) -> tirx.PrimFunc:
    """Return the task's PrimFunc scheduled as a record says, postprocessing included.

    Raises
    ------
    LoweringError
        The route cannot be replayed by this version, or its decision does not fit the task.
    """
    replay = _REPLAY.get(record.route)
    if replay is None:
        raise LoweringError(f"record {record.id} of task {task.name}: route {record.route.value} is not known here")
    try:
        scheduled = replay(task, record, target)
    except (TuningDatabaseError, TemplateError, *TVM_ERRORS) as e:
        lines = [line for line in str(e).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else type(e).__name__
        raise LoweringError(f"record {record.id} of task {task.name} cannot be replayed: {reason}") from e
    return scheduled.without_attr("global_symbol").with_attr(SCHEDULED_ATTR, True)


def _replay_metaschedule(task: TuningTask, record: TuningRecord, target: ResolvedTarget) -> tirx.PrimFunc:
    with target.target:
        return replay_decision(task.mod, record.decision).mod["main"]


def _replay_template(task: TuningTask, record: TuningRecord, target: ResolvedTarget) -> tirx.PrimFunc:
    return apply_decision(task.mod["main"], target, record.decision)


_REPLAY: Mapping[Route, Callable[[TuningTask, TuningRecord, ResolvedTarget], tirx.PrimFunc]] = {
    Route.METASCHEDULE: _replay_metaschedule,
    Route.TEMPLATE: _replay_template,
    Route.LIBRARY: _replay_template,
}


def _choose(
    function: str,
    task: TuningTask,
    lookups: LookupCache,
    target: ResolvedTarget,
    environment: Environment,
    routes: frozenset[Route],
) -> KernelChoice:
    workload = Workload(
        task.workload_hash, task.family, task.signature, task.name, task.flops, task.bytes, None, tvm.__version__
    )
    records: Sequence[TuningRecord] = lookups.list_top(
        workload_hash=task.workload_hash,
        signature_key=workload.signature_key,
        target=target_key(target),
        environment=environment,
        k=RECORDS_LISTED,
    )
    records = _without_ties([record for record in records if record.route in routes])[:RECORDS_TRIED]
    passed_over: list[tuple[int, str]] = []
    for record in records:
        if record.route is Route.FALLBACK:
            return _made(function, task, record, passed_over, None)
        try:
            scheduled = replay_record(task, record, target)
        except LoweringError as e:
            logger.warning("%s", e)
            passed_over.append((record.id or 0, str(e)))
            continue
        return _made(function, task, record, passed_over, scheduled)
    note = _note(passed_over) or "no record"
    return KernelChoice(
        function, task.name, Route.FALLBACK, note=note, unusable=tuple(number for number, _ in passed_over)
    )


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
) -> KernelChoice:
    return KernelChoice(
        function=function,
        task=task.name,
        route=record.route,
        record_id=record.id,
        latency_us=record.latency_us,
        decision=record.decision,
        note=_note(passed_over),
        unusable=tuple(number for number, _ in passed_over),
        database=record.layer,
        scheduled=scheduled,
    )


def _note(passed_over: list[tuple[int, str]]) -> str:
    if not passed_over:
        return ""
    return f"{len(passed_over)} record(s) passed over: {'; '.join(reason for _, reason in passed_over)}"


def _log_choices(choices: Sequence[KernelChoice]) -> None:
    missing = tasks_without_record(choices)
    logger.info("%d kernels: %d from records, %d tasks without one", len(choices), _measured(choices), len(missing))
    if missing:
        logger.info("tasks without a record: %s", ", ".join(missing))


def _measured(choices: Sequence[KernelChoice]) -> int:
    return sum(choice.has_record for choice in choices)


def _plan_memory(mod: tvm.ir.IRModule, target: ResolvedTarget, graph: bool) -> tvm.ir.IRModule:
    passes = plan_memory_passes(target.target, graph)
    if graph:
        position = [str(one.info.name) for one in passes].index("RewriteCUDAGraph")
        fix = tvm.transform.module_pass(
            lambda planned, _: fix_output_memory(planned), opt_level=0, name="FixOutputMemory"
        )
        passes.insert(position, fix)
    return tvm.transform.Sequential(passes)(mod)


def _generate(mod: tvm.ir.IRModule, target: ResolvedTarget, name: str) -> relax.VMExecutable:
    try:
        return relax.build(mod, target.target, relax_pipeline=None, tir_pipeline=tir_pipeline_for(mod))
    except TVM_ERRORS as e:
        raise LoweringError(f"code generation of {name} for {target.kind} {target.arch} failed: {e}") from e


@contextmanager
def _pass_context(cuda_graph: bool) -> Iterator[None]:
    with tvm.transform.PassContext(opt_level=3, config={"relax.backend.use_cuda_graph": cuda_graph}):
        yield


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started
