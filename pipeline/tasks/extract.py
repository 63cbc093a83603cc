"""From lowered modules to tuning tasks: every kernel once, with what it means and how much it matters."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import s_tir, tirx

from relaxtune.models.spec import shape_text
from relaxtune.pipeline.passes.module import KernelCall, LoweredModule
from relaxtune.pipeline.tasks.packed_module import PackedModule
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.schedules.marks import INCIDENTAL_ATTRS
from relaxtune.schedules.tir.blocks import buffer_bytes, is_buffer, list_blocks, list_statements, static_shape
from relaxtune.schedules.tir.expressions import call_names
from relaxtune.schedules.tir.index_ranges import index_ranges
from relaxtune.schedules.tir.signature import describe_kernel
from relaxtune.tuning_db.metaschedule import workload_hash


@dataclass(frozen=True)
class UntunableKernel:
    """A kernel that no task is made of, and why."""

    model: str
    name: str
    calls: int
    reason: str


def extract_tasks(modules: Sequence[LoweredModule]) -> list[TuningTask]:
    """Return the tuning tasks of all modules, equal kernels merged, those with the most arithmetic first.

    Kernels that cannot be tuned are left out; `list_untunable` returns them with the reason.
    """
    found: dict[str, TuningTask] = {}
    taken: set[str] = set()
    for lowered in modules:
        for name, func, calls in called_kernels(lowered):
            if untunable_reason(func) is not None:
                continue
            mod = as_workload(func)
            key = workload_hash(mod)
            if key in found:
                found[key] = _merged(found[key], lowered.graph.name, name, calls)
            else:
                unique = unique_name(name, taken)
                taken.add(unique)
                found[key] = make_task(
                    unique, mod, model=lowered.graph.name, function=name, calls=[call.onnx_nodes for call in calls]
                )
    return sorted(found.values(), key=lambda task: (-task.weight * task.flops, -task.weight * task.bytes, task.name))


def list_untunable(modules: Sequence[LoweredModule]) -> list[UntunableKernel]:
    """Return the kernels that `extract_tasks` leaves out, with the reason for each."""
    return [
        UntunableKernel(lowered.graph.name, name, len(calls), reason)
        for lowered in modules
        for name, func, calls in called_kernels(lowered)
        if (reason := untunable_reason(func)) is not None
    ]


def untunable_reason(func: tirx.PrimFunc) -> str | None:
    """Return why a PrimFunc cannot be tuned, or None when it can."""
    attrs = func.attrs or {}
    if attrs.get("tirx.is_scheduled", False):
        return "it is already scheduled"
    for param in func.params:
        if not is_buffer(param):
            return f"its parameter {param.name} is a scalar, whose value at run time is not known"
        if static_shape(param) is None:
            sizes = [int(dim) if isinstance(dim, tirx.IntImm) else str(dim) for dim in param.shape]
            return f"the size of its parameter {param.name}, {shape_text(sizes)}, is known at run time only"
    for stmt in list_statements(func.body):
        if isinstance(stmt, tirx.For) and stmt.thread_binding is not None:
            tag = stmt.thread_binding.thread_tag
            return f"it is already scheduled: its loop {stmt.loop_var.name} is bound to {tag}"
        if isinstance(stmt, s_tir.SBlock) and any(static_shape(buffer) is None for buffer in stmt.alloc_buffers):
            return f"its block {stmt.name_hint} allocates a buffer of symbolic shape"
        value = getattr(stmt, "value", None)
        if (
            isinstance(stmt, tirx.Evaluate)
            and isinstance(value, tvm.ir.Call)
            and any("extern" in name or "packed" in name for name in call_names(value))
        ):
            return "it calls external code, which no schedule can change"
    if not list_blocks(func):
        return "it has no compute block to schedule"
    return None


def as_workload(func: tirx.PrimFunc) -> tvm.ir.IRModule:
    """Return the module that a task is about: the PrimFunc alone, as `main`, without incidental attributes."""
    for attr in INCIDENTAL_ATTRS:
        if func.attrs and attr in func.attrs:
            func = func.without_attr(attr)
    func = func.with_attr("global_symbol", "main").with_attr("tirx.noalias", True)
    return tvm.ir.IRModule({"main": func})


def make_task(
    name: str, mod: tvm.ir.IRModule, *, model: str, function: str, calls: Sequence[Sequence[str]]
) -> TuningTask:
    """Return the task of one workload.

    Parameters
    ----------
    name : str
        Name of the task.
    mod : IRModule
        As `as_workload` returns it.
    model, function : str
        The model, and the PrimFunc's name in it.
    calls : sequence of sequences of str
        The ONNX nodes of each call.
    """
    func = mod["main"]
    meaning = describe_kernel(func)
    return TuningTask(
        name=name,
        packed=PackedModule.of(mod),
        workload_hash=workload_hash(mod),
        family=meaning.family,
        signature=meaning.signature,
        weight=len(calls),
        flops=float(s_tir.analysis.estimate_tir_flops(mod)),
        bytes=float(sum(buffer_bytes(param) for param in func.params)),
        onnx_nodes=tuple(dict.fromkeys(node for nodes in calls for node in nodes)),
        functions={model: (function,)},
        index_ranges=index_ranges(func),
    )


def called_kernels(lowered: LoweredModule) -> Iterator[tuple[str, tirx.PrimFunc, tuple[KernelCall, ...]]]:
    """Yield the kernels of a module that are called: name, function, calls."""
    functions = {var.name_hint: func for var, func in lowered.mod.functions.items()}
    for name, calls in lowered.kernels.items():
        if calls:
            yield name, functions[name], calls


def _merged(task: TuningTask, model: str, name: str, calls: tuple[KernelCall, ...]) -> TuningTask:
    names = task.functions.get(model, ())
    return replace(
        task,
        weight=task.weight + len(calls),
        onnx_nodes=tuple(dict.fromkeys([*task.onnx_nodes, *(node for call in calls for node in call.onnx_nodes)])),
        functions={**task.functions, model: names if name in names else (*names, name)},
    )


def unique_name(name: str, taken: Container[str]) -> str:
    """Return a name that is not taken: `name`, or with the first free number behind it."""
    unique, count = name, 1
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    return unique
