"""The template route from a record to code: what the database says is made, without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from models import load_model
from pipeline.compile import compile_module, replay_record, select_kernels, tasks_without_record
from pipeline.environment import detect_environment, target_key
from pipeline.errors import LoweringError
from pipeline.export import write_artifact
from pipeline.importer import import_model
from pipeline.passes import lower
from pipeline.passes.module import LoweredModule, LoweringOptions
from pipeline.tuning.recorder import describe_workload
from pipeline.tuning.task import TuningTask
from pipeline.tuning.tasks import extract_tasks
from pipeline.tuning.template_candidates import template_candidates
from schedules.targets import ResolvedTarget, resolve_target
from tuning_db.records import Route, Status, TuningRecord
from tuning_db.store import TuningDatabase


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


def template_record(task: TuningTask, decision: str, target: ResolvedTarget) -> TuningRecord:
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


def test_templates_offer_candidates_for_the_matmuls_only(tasks, target) -> None:
    offered = {task.name: len(template_candidates(task, target)) for task in tasks}
    families = {task.name: task.family for task in tasks}
    assert sum(count > 0 for count in offered.values()) >= 4
    assert {families[name] for name, count in offered.items() if count} == {"matmul"}


def test_candidates_decided_before_are_not_offered_again(tasks, target) -> None:
    task = next(task for task in tasks if template_candidates(task, target))
    first, *others = template_candidates(task, target)
    again = template_candidates(task, target, {first.decision})
    assert [candidate.decision for candidate in again] == [candidate.decision for candidate in others]


def test_records_of_templates_become_kernels_of_one_graph(lowered, tasks, target, database, tmp_path) -> None:
    environment = detect_environment(target)
    choices = select_kernels(lowered, tasks, database=database, target=target, environment=environment)
    made = [choice for choice in choices if choice.route is Route.TEMPLATE]
    assert len(made) >= 4
    assert all(json.loads(choice.decision or "{}")["template"] for choice in made)
    manifest = write_artifact(compile_module(lowered, choices, target), tmp_path / "artifact")
    assert {kernel.route for kernel in manifest.kernels} == {"template", "fallback"}
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
    record = template_record(tasks[0], '{"template": "gemm_sm999", "tile": 1}', target)
    with pytest.raises(LoweringError, match=r"gemm_sm999.*not known here"):
        replay_record(tasks[0], record, target)


def test_record_of_a_template_that_does_not_fit_is_refused(tasks, target) -> None:
    fitting = next(task for task in tasks if template_candidates(task, target))
    decision = template_candidates(fitting, target)[0].decision
    other = next(task for task in tasks if task.family == "norm")
    with pytest.raises(LoweringError, match="does not make this function"):
        replay_record(other, template_record(other, decision, target), target)
