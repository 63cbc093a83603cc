from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from onnx import helper
from tvm import s_tir
from tvm.script import tirx as T

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.compile import CompiledModule, compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.choose.replay import replay_record
from relaxtune.pipeline.choose.selection import select_kernels, tasks_without_record
from relaxtune.pipeline.codegen.kernel_hash import made_hash
from relaxtune.pipeline.environment import detect_environment, target_key
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.validate.validation import validate
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.marks import SCHEDULED_ATTR
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.tir.blocks import list_blocks
from relaxtune.tuning_db.metaschedule import trace_to_json
from relaxtune.tuning_db.records import Route, Status, TuningRecord, Workload
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.importer.onnx_cases import make_model


@pytest.fixture
def database() -> Iterator[TuningDatabase]:
    with TuningDatabase.open("sqlite://") as opened:
        yield opened


def workload_of(task: TuningTask) -> Workload:
    return Workload(
        task.workload_hash, task.family, task.signature, task.name, task.flops, task.bytes, None, tvm.__version__
    )


def record_of(task: TuningTask, target: ResolvedTarget, **changes: object) -> TuningRecord:
    record = TuningRecord(
        workload_hash=task.workload_hash,
        signature_key=workload_of(task).signature_key,
        target=target_key(target),
        environment=detect_environment(target),
        route=Route.METASCHEDULE,
        decision="[[], []]",
        status=Status.OK,
        latencies_us=(3.0, 1.0, 2.0),
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def fallback_record(task: TuningTask, target: ResolvedTarget, **changes: object) -> TuningRecord:
    scheduled = apply_fallback(task.mod, target.target)["main"]
    made: dict[str, object] = {"route": Route.FALLBACK, "kernel_hash": made_hash(scheduled, target.target)}
    return record_of(task, target, **{**made, "decision": '{"rule": "x"}', **changes})


def keep(database: TuningDatabase, task: TuningTask, record: TuningRecord) -> int:
    database.record_workload(workload_of(task))
    return database.record_measurement(record)


def parallel_trace(task: TuningTask) -> str:
    """Return a decision that marks the outermost loop of the last block parallel, after entering the postprocessing."""
    schedule = s_tir.Schedule(task.mod)
    names = [block.name for block in list_blocks(task.mod["main"])]
    loop = schedule.get_loops(schedule.get_sblock(names[-1], func_name="main"))[0]
    schedule.enter_postproc()
    schedule.parallel(loop)
    return trace_to_json(schedule.trace)


def elementwise(tasks: list[TuningTask]) -> TuningTask:
    return next(task for task in tasks if len(list_blocks(task.mod["main"])) == 1)


def matmul(tasks: list[TuningTask]) -> TuningTask:
    return next(task for task in tasks if "matmul" in task.family)


def test_select_takes_the_fallback_and_says_why_when_there_is_no_database(
    lowered: LoweredModule, tasks: list[TuningTask], quick_target: ResolvedTarget
) -> None:
    environment = detect_environment(quick_target)
    choices = select_kernels(lowered, tasks, database=None, target=quick_target, environment=environment)
    assert [choice.function for choice in choices] == list(lowered.kernels)
    assert {choice.route for choice in choices} == {Route.FALLBACK}
    tuned = {choice.task: choice.note for choice in choices if choice.task}
    assert set(tuned) == {task.name for task in tasks}
    assert set(tuned.values()) == {"no database was given"}
    assert set(tasks_without_record(choices)) == {task.name for task in tasks}


def test_select_names_kernels_that_have_no_task(lowered: LoweredModule, quick_target: ResolvedTarget) -> None:
    environment = detect_environment(quick_target)
    choices = select_kernels(lowered, [], database=None, target=quick_target, environment=environment)
    assert all(choice.task is None and "no tuning task" in choice.note for choice in choices)
    assert tasks_without_record(choices) == ()


def test_compiled_module_agrees_with_the_reference_when_a_kernel_comes_from_a_record(
    lowered: LoweredModule,
    tasks: list[TuningTask],
    quick_target: ResolvedTarget,
    database: TuningDatabase,
    bert_tiny: OnnxModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    task = matmul(tasks)
    number = keep(database, task, record_of(task, quick_target, decision=parallel_trace(task)))
    environment = detect_environment(quick_target)
    choices = select_kernels(lowered, tasks, database=database, target=quick_target, environment=environment)
    chosen = [choice for choice in choices if choice.has_record]
    assert [choice.function for choice in chosen] == list(task.functions[lowered.graph.name])
    assert {(c.route, c.record_id, c.latency_us) for c in chosen} == {(Route.METASCHEDULE, number, 2.0)}
    assert task.name not in tasks_without_record(choices)

    directory = tmp_path_factory.mktemp("recorded") / "artifact"
    manifest = write_artifact(compile_module(lowered, choices, quick_target), directory)
    entry = next(kernel for kernel in manifest.kernels if kernel.record_id == number)
    assert entry.route == "metaschedule"
    assert entry.decision_sha256 is not None
    assert entry.onnx_nodes
    assert validate(Module.load(directory), bert_tiny, samples=1).passed


def test_replay_runs_the_postprocessing_of_a_trace(tasks: list[TuningTask], quick_target: ResolvedTarget) -> None:
    task = elementwise(tasks)
    scheduled = replay_record(task, record_of(task, quick_target, decision=parallel_trace(task)), quick_target)
    assert "T.parallel" in scheduled.script()
    assert scheduled.attrs["tirx.is_scheduled"]
    assert "global_symbol" not in scheduled.attrs


def test_select_passes_over_a_record_that_cannot_be_replayed(
    lowered: LoweredModule, tasks: list[TuningTask], quick_target: ResolvedTarget, database: TuningDatabase
) -> None:
    task = matmul(tasks)
    foreign = json.dumps([[["GetSBlock", [], ["no_such_block", "main"], ["b0"]]], []])
    bad = keep(database, task, record_of(task, quick_target, decision=foreign, latencies_us=(1.0,)))
    environment = detect_environment(quick_target)
    choices = select_kernels(lowered, tasks, database=database, target=quick_target, environment=environment)
    choice = next(choice for choice in choices if choice.task == task.name)
    assert choice.route is Route.FALLBACK
    assert choice.unusable == (bad,)
    assert f"record {bad} of task {task.name} cannot be replayed" in choice.note
    assert task.name in tasks_without_record(choices)

    good = keep(database, task, record_of(task, quick_target, decision=parallel_trace(task), latencies_us=(9.0,)))
    choices = select_kernels(lowered, tasks, database=database, target=quick_target, environment=environment)
    choice = next(choice for choice in choices if choice.task == task.name)
    assert (choice.record_id, choice.unusable) == (good, (bad,))


def test_select_takes_a_measured_fallback_when_it_is_the_best_record(
    lowered: LoweredModule, tasks: list[TuningTask], quick_target: ResolvedTarget, database: TuningDatabase
) -> None:
    task = matmul(tasks)
    number = keep(database, task, fallback_record(task, quick_target))
    environment = detect_environment(quick_target)
    choices = select_kernels(lowered, tasks, database=database, target=quick_target, environment=environment)
    choice = next(choice for choice in choices if choice.task == task.name)
    assert (choice.route, choice.record_id, choice.scheduled) == (Route.FALLBACK, number, None)


@pytest.mark.parametrize(("latency_us", "route"), [(94.0, Route.METASCHEDULE), (96.0, Route.FALLBACK)])
def test_select_gives_ties_to_the_fallback(
    lowered: LoweredModule,
    tasks: list[TuningTask],
    quick_target: ResolvedTarget,
    database: TuningDatabase,
    latency_us: float,
    route: Route,
) -> None:
    task = elementwise(tasks)
    keep(database, task, fallback_record(task, quick_target, latencies_us=(95.0, 100.0, 105.0)))
    keep(database, task, record_of(task, quick_target, decision=parallel_trace(task), latencies_us=(latency_us,)))
    environment = detect_environment(quick_target)
    choices = select_kernels(lowered, tasks, database=database, target=quick_target, environment=environment)
    (choice,) = [choice for choice in choices if choice.task == task.name]
    assert choice.route is route


def test_select_ignores_records_of_another_architecture(
    lowered: LoweredModule, tasks: list[TuningTask], quick_target: ResolvedTarget, database: TuningDatabase
) -> None:
    other = resolve_target('{"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 2}')
    task = matmul(tasks)
    keep(database, task, record_of(task, other, decision=parallel_trace(task)))
    environment = detect_environment(quick_target)
    choices = select_kernels(lowered, tasks, database=database, target=quick_target, environment=environment)
    assert not any(choice.has_record for choice in choices)


def test_compile_reports_the_seconds_of_each_phase(lowered: LoweredModule, quick_target: ResolvedTarget) -> None:
    compiled = compile_module(lowered, (), quick_target)
    assert set(compiled.seconds) == {"schedule", "plan_memory", "codegen"}
    assert not compiled.cuda_graph


def test_compile_names_the_model_when_code_generation_fails(
    lowered: LoweredModule, quick_target: ResolvedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise tvm.error.InternalError("no such intrinsic")

    monkeypatch.setattr("relaxtune.pipeline.artifact.compile.relax.build", refuse)
    with pytest.raises(LoweringError, match=r"code generation of bert-tiny for llvm .* failed: no such intrinsic"):
        compile_module(lowered, (), quick_target)


def test_embedded_weights_make_no_parameter_file(
    bert_tiny: OnnxModel,
    quick_target: ResolvedTarget,
    tmp_path_factory: pytest.TempPathFactory,
    bert_inputs: dict[str, np.ndarray],
    artifact: object,
) -> None:
    from relaxtune.pipeline.importer import import_model
    from relaxtune.pipeline.passes import LoweringOptions, lower

    lowered = lower(import_model(bert_tiny), quick_target.target, LoweringOptions(embed_weights=True))
    directory = tmp_path_factory.mktemp("embedded") / "artifact"
    manifest = write_artifact(compile_module(lowered, (), quick_target), directory)
    assert sorted(path.name for path in directory.iterdir()) == ["manifest.json", "model.so"]
    assert manifest.weights == ()
    expected = Module.load(str(artifact)).run(bert_inputs)
    for name, got in Module.load(directory).run(bert_inputs).items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-5, atol=1e-5)


def test_a_linker_that_is_killed_from_outside_does_not_end_the_compilation(
    compiled: CompiledModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed, compiler = tmp_path / "killed", tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\n[ -e {killed} ] && exec g++ "$@"\ntouch {killed}\nkill -9 $$\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert write_artifact(compiled, tmp_path / "out").files["model.so"].bytes
    assert killed.exists()
    assert "tried once more" in caplog.text


def test_a_failed_link_says_what_it_needs(
    compiled: CompiledModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LoweringError, match=r"linking model\.so failed: .* It needs a C\+\+ compiler"):
        write_artifact(compiled, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@T.prim_func(private=True, s_tir=True)
def _too_much_shared_memory(x: T.Buffer((64, 64), "float32"), y: T.Buffer((64, 64), "float32")):  # type: ignore[no-untyped-def]
    for i in T.thread_binding(64, thread="blockIdx.x"):
        kept = T.alloc_buffer((400_000,), "float32", scope="shared")
        for j in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("keep"):
                row, column = T.axis.remap("SS", [i, j])
                kept[column * 6000] = x[row, column]
                y[row, column] = T.max(kept[column * 6000], T.float32(0))


def test_kernel_that_the_compiler_refuses_takes_the_plain_schedule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = resolve_target("cuda:sm_90a")
    spec = ("float32", (64, 64))
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Softmax", ["y"], ["z"])]
    lowered = lower(import_model(make_model(nodes, {"x": spec}, {"y": spec, "z": spec}, {})), target.target)
    name = next(name for name in lowered.kernels if "relu" in name)
    made = _too_much_shared_memory.with_attr(SCHEDULED_ATTR, True)
    compiled = compile_module(lowered, [KernelChoice(name, None, Route.FALLBACK, scheduled=made)], target)
    assert f"kernel {name}: its own schedule did not compile" in caplog.text
    kernel = next(one for one in write_artifact(compiled, tmp_path / "artifact").kernels if one.function == name)
    assert kernel.route == "fallback"
    assert "takes the plain default, which is slow: ptxas error" in kernel.note
    assert "too much shared data" in kernel.note
