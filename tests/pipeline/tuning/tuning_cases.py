"""Small tasks and modules, some of them made to fail, for the tests of tuning."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import tvm
from tvm import te

from relaxtune.pipeline.tasks.extract import as_workload, make_task
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.candidates import Candidate, Evaluator, State
from relaxtune.pipeline.tuning.local.backend import Machine
from relaxtune.pipeline.tuning.measure.arguments import argument_specs
from relaxtune.pipeline.tuning.measure.backend import Builder, MeasureBackend, Outcome, build_all
from relaxtune.pipeline.tuning.measure.recipe import Buildable, Recipe
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.tuning.options import TaskSummary
from relaxtune.pipeline.tuning.session import OpenMachine
from relaxtune.pipeline.tuning.tasks import Tasks, TaskState
from relaxtune.pipeline.validate.tolerances import EXACT_KERNEL
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import TemplateError
from relaxtune.tuning_db.records import Environment, Route, Status, TargetKey, TuningRecord


def all_records(_: TuningTask, recorded: Sequence[TuningRecord]) -> Sequence[TuningRecord]:
    """Take every record of earlier runs: these tests change no kernel between runs."""
    return recorded


@dataclass(frozen=True)
class Place:
    """Where the tests tune."""

    target: ResolvedTarget
    environment: Environment
    key: TargetKey


def matmul_mod(m: int = 16, k: int = 16, n: int = 16) -> tvm.ir.IRModule:
    a = te.placeholder((m, k), name="A")
    b = te.placeholder((k, n), name="B")
    r = te.reduce_axis((0, k), name="r")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="matmul")
    return as_workload(te.create_prim_func([a, b, c]))


def matmul_task(m: int = 16, k: int = 16, n: int = 16, name: str = "matmul") -> TuningTask:
    return make_task(name, matmul_mod(m, k, n), model="tiny", function=name, calls=((f"{name}_node",),))


def settled_task() -> TaskSummary:
    """Return what became of a task with six valid and two failed candidates, four times as fast as before."""
    return TaskSummary(
        task=matmul_task(),
        valid=6,
        failed=2,
        failures={Status.TIMEOUT: 2},
        known=3,
        before_us=100.0,
        after_us=25.0,
        route=Route.METASCHEDULE,
        weight=12,
        share=1.0,
        seconds=4.0,
        spread=0.04,
        ended="settled",
    )


def extern_mod(symbol: str, *arguments: object, size: int = 16) -> tvm.ir.IRModule:
    """Return `C = A + 1` whose every element also calls a C function: how a test makes a real crash or hang."""
    a = te.placeholder((size,), name="A")

    def element(i: tvm.ir.Var) -> tvm.ir.Expr:
        call = tvm.tirx.call_extern("int32", symbol, *arguments)
        return a[i] + tvm.tirx.Cast("float32", call)

    return as_workload(te.create_prim_func([a, te.compute((size,), element, name="C")]))


def add_one_mod(offset: float = 1.0, size: int = 16) -> tvm.ir.IRModule:
    a = te.placeholder((size,), name="A")
    return as_workload(te.create_prim_func([a, te.compute((size,), lambda i: a[i] + offset, name="C")]))


@dataclass(frozen=True)
class MadeUpRecipe(Recipe):
    """A recipe without a template: the fallback's schedule of `C = A + 1`, or nothing at all."""

    broken: bool = False

    def make(self) -> tvm.ir.IRModule:
        if self.broken:
            raise TemplateError("the tile is wider than the matrix")
        return apply_fallback(add_one_mod(size=64), self.target.target)


@dataclass(frozen=True)
class HeldRecipe(MadeUpRecipe):
    """A recipe whose first build says so through a pipe and then goes on until it is killed; the next one is built."""

    pipe: str = ""

    def make(self) -> tvm.ir.IRModule:
        first = f"{self.pipe}.taken"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.pipe, first)
            Path(first).write_text("building")
            signal.pause()
        return super().make()


def spec_of(mod: tvm.ir.IRModule, workload: str = "any", **more: object) -> WorkloadSpec:
    """Return what candidates of a module are measured with; its last parameter is the output."""
    arguments = argument_specs(mod["main"])
    fields = {"tolerance": EXACT_KERNEL, **more}
    return WorkloadSpec(workload, arguments, (len(arguments) - 1,), **fields)  # type: ignore[arg-type]


def built(builder: Builder, target: tvm.target.Target, mod: Buildable) -> BuiltArtifact:
    (one,) = build_all(builder, [mod], target)
    assert one.artifact is not None, one.error
    return one.artifact


def measure(backend: MeasureBackend, *candidates: tuple[BuiltArtifact, WorkloadSpec]) -> list[Outcome]:
    """Return what came of some candidates, in the order given."""
    done: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
    for index, (artifact, spec) in enumerate(candidates):
        backend.submit(artifact, spec, lambda outcome, index=index: done.put((index, outcome)))  # type: ignore[misc]
    found = dict(done.get(timeout=120) for _ in candidates)
    return [found[index] for index in range(len(candidates))]


def unbuildable_mod(size: int = 16) -> tvm.ir.IRModule:
    """Return a module that LLVM cannot compile: it asks which threads of a GPU's warp are active."""
    a = te.placeholder((size,), name="A")

    def element(i: tvm.ir.Var) -> tvm.ir.Expr:
        return a[i] + tvm.tirx.Cast("float32", tvm.tirx.call_intrin("uint32", "tirx.tvm_warp_activemask"))

    return as_workload(te.create_prim_func([a, te.compute((size,), element, name="C")]))


def task_of(name: str, mod: tvm.ir.IRModule) -> TuningTask:
    return make_task(name, mod, model="tiny", function=name, calls=((f"{name}_node",),))


def slow_build_mod(size: int = 2048, *, endless: bool = True) -> tvm.ir.IRModule:
    """Return a module that takes minutes, or a second or two, to compile: an unrolled loop, with or without `exp`."""
    a = te.placeholder((size,), name="A")

    def element(i: tvm.ir.Var) -> tvm.ir.Expr:
        value = a[i]
        for power in range(4):
            value = value * a[(i * 7 + power) % size] + (tvm.tirx.exp(value) if endless else a[(i * 5 + power) % size])
        return value

    mod = as_workload(te.create_prim_func([a, te.compute((size,), element, name="C")]))
    schedule = tvm.s_tir.Schedule(mod)
    schedule.unroll(schedule.get_loops(schedule.get_sblock("C"))[0])
    return schedule.mod


def far_mod() -> tvm.ir.IRModule:
    """Return a module that writes two gigabytes past its output."""
    text = add_one_mod().script()
    near = "C[v_i] = "
    assert near in text
    return tvm.script.from_source(text.replace(near, f"C[v_i + {1 << 29}] = "))


def recorded(route: Route, decision: str, latency_us: float, content: str = "") -> Candidate:
    """Return a valid candidate of 3 runs within a hundredth, with its artifact if it has content."""
    seconds = tuple(latency_us * 1e-6 * factor for factor in (0.99, 1.0, 1.01))
    artifact = BuiltArtifact(content, "") if content else None
    return Candidate(route, decision, state=State.RECORDED, artifact=artifact, outcome=Outcome(Status.OK, seconds))


def take_all(evaluator: Evaluator) -> list[Candidate]:
    """Return all candidates that were handed in, in the order in which they are finished."""
    found: list[Candidate] = []
    while evaluator.pending:
        events = evaluator.take(60.0)
        assert events is not None
        found += [one for one in events if isinstance(one, Candidate)]
    return found


def choose_among(states: Sequence[TaskState]) -> TaskState | None:
    """Return the task that a run of these would choose first."""
    for number, state in enumerate(states):
        state.task = replace(state.task, workload_hash=str(number))
    tasks = Tasks()
    tasks.add(states)
    return tasks.choose()


def given(builder: Builder, backend: MeasureBackend) -> OpenMachine:
    """Return what gives `tune` a builder and a backend that it does not start."""
    return lambda *_: contextlib.nullcontext(Machine(builder, backend))
