"""The template route from a record to code: what the database says is made, without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from relaxtune.models import load_model
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.choose.replay import replay_record
from relaxtune.pipeline.choose.selection import select_kernels, tasks_without_record
from relaxtune.pipeline.codegen.kernel_hash import made_hash
from relaxtune.pipeline.environment import detect_environment, target_key
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.passes.module import LoweredModule, LoweringOptions
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.record import describe_workload
from relaxtune.pipeline.tuning.task_start import template_candidates
from relaxtune.schedules.registry import apply_decision
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import TemplateError
from relaxtune.tuning_db.records import Route, Status, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.artifact.test_compile import fallback_record


@pytest.fixture(scope="module")
def target() -> ResolvedTarget:
    return resolve_target("cuda:sm_90a")


@pytest.fixture(scope="module")
def lowered(target: ResolvedTarget) -> LoweredModule:
    graph = import_model(load_model("bert-tiny", shapes={"input_ids": (1, 64)}))
    return lower(graph, target.target, LoweringOptions(precision="fp16"))


@pytest.fixture(scope="module")
def tasks(lowered: LoweredModule) -> list[TuningTask]:
    return extract_tasks([lowered])


def template_record(task: TuningTask, decision: str, target: ResolvedTarget, *, fits: bool = True) -> TuningRecord:
    environment = replace(detect_environment(target), device_name="some GPU")
    return TuningRecord(
        workload_hash=task.workload_hash,
        signature_key=describe_workload(task).signature_key,
        target=target_key(target),
        environment=environment,
        route=Route.TEMPLATE,
        decision=decision,
        status=Status.OK,
        latencies_us=(1.0,),
        kernel_hash=made_hash(apply_decision(task.mod["main"], target, decision), target.target) if fits else "0" * 16,
    )


@pytest.fixture(scope="module")
def database(tasks, target, tmp_path_factory) -> TuningDatabase:
    """A database with the first template candidate of every task that has one."""
    opened = TuningDatabase.open(tmp_path_factory.mktemp("template") / "tuning.db")
    for task in tasks:
        opened.record_workload(describe_workload(task))
        for candidate in template_candidates(task, target)[:1]:
            opened.record_measurement(template_record(task, candidate.decision, target))
    return opened


def test_templates_offer_candidates_for_every_matmul_that_tensor_cores_can_do(tasks, target) -> None:
    offered = [task for task in tasks if task.family == "matmul" and template_candidates(task, target)]
    assert len(offered) >= 4


@pytest.mark.slow
def test_records_of_templates_become_kernels_of_one_graph(lowered, tasks, target, database, tmp_path) -> None:
    environment = detect_environment(target)
    choices = select_kernels(lowered, tasks, database=database, target=target, environment=environment)
    made = [choice for choice in choices if choice.route is Route.TEMPLATE]
    assert len(made) >= 4
    assert all(json.loads(choice.decision or "{}")["template"] for choice in made)
    manifest = write_artifact(compile_module(lowered, choices, target), tmp_path / "artifact")
    assert "template" in {kernel.route for kernel in manifest.kernels} <= {"template", "fallback"}
    assert manifest.target.cuda_graph
    code = (tmp_path / "artifact" / "model.so").read_bytes()
    assert b"__global__" not in code


def test_route_can_be_left_aside(lowered, tasks, target, database) -> None:
    environment = detect_environment(target)
    routes = frozenset(Route) - {Route.TEMPLATE}
    choices = select_kernels(lowered, tasks, database=database, target=target, environment=environment, routes=routes)
    assert {choice.route for choice in choices} == {Route.FALLBACK}
    assert len(tasks_without_record(choices)) == len(tasks)


def test_record_of_an_unknown_template_is_passed_over_and_named(tasks, target) -> None:
    record = template_record(tasks[0], '{"template": "gemm_sm999", "tile": 1}', target, fits=False)
    with pytest.raises(LoweringError, match=r"gemm_sm999.*not known here"):
        replay_record(tasks[0], record, target)


def test_record_of_a_template_that_does_not_fit_is_refused(tasks, target) -> None:
    fitting = next(task for task in tasks if task.family == "matmul" and template_candidates(task, target))
    decision = template_candidates(fitting, target)[0].decision
    other = next(task for task in tasks if task.family == "norm")
    with pytest.raises(LoweringError, match="does not make this function"):
        replay_record(other, template_record(other, decision, target, fits=False), target)


@pytest.mark.slow
def test_kernels_without_a_record_are_defaults_of_templates(lowered, tasks, target, tmp_path) -> None:
    environment = detect_environment(target)
    choices = select_kernels(lowered, tasks, database=None, target=target, environment=environment)
    made = [choice for choice in choices if choice.route is Route.TEMPLATE]
    assert len(made) >= 4
    assert not any(choice.has_record for choice in choices)
    assert {choice.note for choice in made} >= {"no database was given; default of template gemm_sm90"}
    assert len(tasks_without_record(choices)) == len(tasks)
    by_name = {task.name: task for task in tasks}
    assert all(c.decision == template_candidates(by_name[c.task or ""], target)[0].decision for c in made)
    manifest = write_artifact(compile_module(lowered, choices, target), tmp_path / "artifact")
    entries = {kernel.function: kernel for kernel in manifest.kernels}
    assert all(entries[c.function].route == "template" and entries[c.function].record_id is None for c in made)
    assert all(entries[c.function].launches == 1 for c in made)
    assert manifest.launches is not None
    assert manifest.launches >= sum(entry.calls for entry in manifest.kernels)


@pytest.mark.parametrize(("model", "text"), [("bert-tiny", "cuda:sm_80"), ("llama-tiny-decode", "cuda:sm_120")])
def test_untuned_half_precision_is_made_by_templates_from_ampere_on(model: str, text: str) -> None:
    target = resolve_target(text)
    lowered = lower(import_model(load_model(model)), target.target, LoweringOptions(precision="fp16"))
    environment = detect_environment(target)
    choices = select_kernels(lowered, extract_tasks([lowered]), database=None, target=target, environment=environment)
    assert {choice.route for choice in choices} == {Route.TEMPLATE}
    made = {json.loads(choice.decision or "{}")["template"] for choice in choices}
    assert made >= {"attention_sm80", "rows"}
    assert "gemm_sm80" in made or model != "bert-tiny"


def test_default_stands_in_when_the_only_record_cannot_be_replayed(lowered, tasks, target, tmp_path) -> None:
    task = next(task for task in tasks if task.family == "matmul" and template_candidates(task, target))
    with TuningDatabase.open(tmp_path / "tuning.db") as opened:
        opened.record_workload(describe_workload(task))
        number = opened.record_measurement(
            template_record(task, '{"template": "gemm_sm999", "tile": 1}', target, fits=False)
        )
        environment = detect_environment(target)
        choices = select_kernels(lowered, tasks, database=opened, target=target, environment=environment)
    choice = next(choice for choice in choices if choice.task == task.name)
    assert (choice.route, choice.has_record, choice.unusable) == (Route.TEMPLATE, False, (number,))
    assert "faster records not usable (1)" in choice.note
    assert choice.note.endswith("default of template gemm_sm90")


def record_with(task: TuningTask, target: ResolvedTarget, **changes: object) -> TuningRecord:
    return replace(template_record(task, template_candidates(task, target)[0].decision, target), **changes)


def test_a_fallback_measured_alone_does_not_stand_against_a_template(lowered, tasks, target, tmp_path) -> None:
    task = next(task for task in tasks if task.family == "matmul" and template_candidates(task, target))
    environment = replace(detect_environment(target), device_name="some GPU")
    with TuningDatabase.open(tmp_path / "tuning.db") as opened:
        opened.record_workload(describe_workload(task))
        opened.record_measurement(fallback_record(task, target, environment=environment))
        choices = select_kernels(lowered, tasks, database=opened, target=target, environment=environment)
        alone = next(choice for choice in choices if choice.task == task.name)
        assert (alone.route, alone.has_record) == (Route.TEMPLATE, False)
        assert alone.note == "no record of a candidate; default of template gemm_sm90"
        # A default that failed is not taken; the next proposal is.
        opened.record_measurement(record_with(task, target, status=Status.RUN_ERROR, latencies_us=(), error="boom"))
        choices = select_kernels(lowered, tasks, database=opened, target=target, environment=environment)
    after = next(choice for choice in choices if choice.task == task.name)
    assert after.decision == template_candidates(task, target)[1].decision


def test_fallback_stands_in_and_says_why_when_a_default_cannot_be_made(lowered, tasks, target, monkeypatch) -> None:
    def refuse(*_args: object) -> None:
        raise TemplateError("no room for it")

    monkeypatch.setattr("relaxtune.pipeline.choose.selection.apply_decision", refuse)
    environment = detect_environment(target)
    choices = select_kernels(lowered, tasks, database=None, target=target, environment=environment)
    assert {choice.route for choice in choices} == {Route.FALLBACK}
    expected = "no database was given; the default of template gemm_sm90 cannot be made: no room for it"
    assert sum(choice.note == expected for choice in choices) >= 4
    assert all(choice.scheduled is None for choice in choices)


def test_a_slip_in_a_template_is_no_kernel_that_cannot_be_made(lowered, tasks, target, monkeypatch) -> None:
    monkeypatch.setattr("relaxtune.pipeline.choose.selection.apply_decision", lambda *_args: len(None))
    with pytest.raises(TypeError, match="NoneType"):
        select_kernels(lowered, tasks, database=None, target=target, environment=detect_environment(target))


@pytest.mark.slow
def test_matmuls_of_symbolic_rows_are_tables_of_kernels_without_a_task(target: ResolvedTarget) -> None:
    graph = import_model(load_model("bert-tiny", shapes={"input_ids": ("batch", "sequence")}))
    symbolic = lower(graph, target.target, LoweringOptions(precision="fp16"))
    environment = detect_environment(target)
    choices = select_kernels(symbolic, extract_tasks([symbolic]), database=None, target=target, environment=environment)
    tables = [choice for choice in choices if choice.decision and '"template":"ranges"' in choice.decision]
    assert len(tables) >= 4
    assert {choice.task for choice in tables} == {None}
    assert all(choice.route is Route.TEMPLATE and choice.scheduled is not None for choice in tables)
    without = select_kernels(
        symbolic, (), database=None, target=target, environment=environment, routes=frozenset({Route.FALLBACK})
    )
    assert {choice.route for choice in without} == {Route.FALLBACK}
