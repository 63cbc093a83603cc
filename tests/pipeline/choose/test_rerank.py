"""Runners-up inside the model: what is compiled is real, what is measured is made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import relaxtune.pipeline.choose.rerank as rerank_module
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.bench.measure import Arm
from relaxtune.pipeline.choose.model_records import ModelDecision, measured_model
from relaxtune.pipeline.choose.rerank import RerankReport, rerank
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.codegen.kernel_hash import made_hash
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.jobs.tuned_model import rerank_prepared, select_as_measured
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.record import describe_workload
from relaxtune.pipeline.tuning.search.cost_model import WARMUP_CANDIDATES, FastCostModel
from relaxtune.pipeline.tuning.search.evolution import TaskSearch
from relaxtune.schedules.registry import apply_decision, list_candidates
from relaxtune.schedules.search.space import make_space
from relaxtune.tuning_db.records import Route, Status, TuningRecord, utc_now
from relaxtune.tuning_db.store import TuningDatabase
from tests.unoptimised import UNOPTIMISED_TEXT


@pytest.fixture(scope="module")
def prepared() -> PreparedModel:
    return prepare_model(ModelRequest("bert-tiny", target=UNOPTIMISED_TEXT, shapes={"input_ids": (1, 16)}))


@pytest.fixture(scope="module")
def hot(prepared: PreparedModel) -> TuningTask:
    return max(prepared.tasks, key=lambda one: one.weight * one.flops)


@pytest.fixture
def database(prepared: PreparedModel, hot: TuningTask, tmp_path: Path) -> TuningDatabase:
    """Two candidates of the hot task, 10.0 and 10.4 us, and its fallback, far behind."""
    opened = TuningDatabase.open(tmp_path / "tuning.db")
    record_two(opened, prepared, hot, 10.0)
    return opened


def record_two(database: TuningDatabase, prepared: PreparedModel, task: TuningTask, us: float) -> None:
    """Record two candidates of a task, 4 % apart, and its fallback, which takes five times as long."""
    target = prepared.target.target
    search = TaskSearch(
        task.mod,
        target,
        make_space(target),
        FastCostModel(WARMUP_CANDIDATES, 0),
        [],
        name="hot",
        seed=0,
        per_round=8,
        population=16,
        threads=1,
    )
    first, second = search.propose()[:2]
    record_latencies(
        database,
        prepared,
        task,
        {
            (Route.METASCHEDULE, first.decision): us,
            (Route.METASCHEDULE, second.decision): 1.04 * us,
            (Route.FALLBACK, '{"rule":"any"}'): 5 * us,
        },
    )


def record_latencies(
    database: TuningDatabase, prepared: PreparedModel, task: TuningTask, latencies_us: dict[tuple[Route, str], float]
) -> None:
    workload = describe_workload(task)
    database.record_workload(workload)
    database.record_measurements(
        [
            TuningRecord(
                workload_hash=task.workload_hash,
                signature_key=workload.signature_key,
                target=target_key(prepared.target),
                environment=prepared.environment,
                route=route,
                decision=decision,
                status=Status.OK,
                latencies_us=(latency_us,),
                kernel_hash=None
                if route is not Route.TEMPLATE
                else made_hash(apply_decision(task.mod["main"], prepared.target, decision), prepared.target.target),
            )
            for (route, decision), latency_us in latencies_us.items()
        ]
    )


def as_tuned(prepared: PreparedModel, database: TuningDatabase | None) -> tuple[KernelChoice, ...]:
    return select_kernels(
        prepared.lowered,
        prepared.tasks,
        database=database,
        target=prepared.target,
        environment=prepared.environment,
    )


def told(monkeypatch: pytest.MonkeyPatch, *trials: dict[str, float], spread: float = 0.0) -> None:
    """Have the arms say that they took so long, off by up to `spread`; what they are of is compiled all the same.

    `trials` are the medians of the arms of one module each, in the order in which modules are compiled.
    """
    rng = np.random.default_rng(0)
    modules = iter(trials)
    compiled_arms = rerank_module.compiled_arms

    def arm(ms: float) -> Arm:
        return lambda: ms * (1 + rng.uniform(-spread, spread))

    def arms(*arguments: object) -> list[Arm]:
        made, medians = compiled_arms(*arguments), next(modules)
        assert len(made) == len(medians)
        for one in made:
            one()
        return [arm(ms) for ms in medians.values()]

    monkeypatch.setattr(rerank_module, "compiled_arms", arms)


@pytest.mark.quick_cases("faster", "one-percent-in-noise", "slower")
@pytest.mark.parametrize(
    ("rival", "spread", "taken"),
    [(0.95, 0.01, True), (0.99, 0.005, True), (0.99, 0.025, True), (0.999, 0.0, False), (1.05, 0.0, False)],
    ids=["faster", "one-percent", "one-percent-in-noise", "hardly", "slower"],
)
def test_a_runner_up_is_taken_when_the_model_is_surely_faster(
    prepared: PreparedModel,
    hot: TuningTask,
    database: TuningDatabase,
    monkeypatch: pytest.MonkeyPatch,
    rival: float,
    spread: float,
    taken: bool,
) -> None:
    choices = as_tuned(prepared, database)
    told(monkeypatch, {"as tuned": 1.0, "0": rival}, spread=spread)
    changed, report = rerank(prepared, choices, database, tasks=1)
    (trial,) = report.trials
    assert (trial.taken, trial.alone_us) == (taken, 10.4)
    assert report.runs == len(report.latencies_ms) >= 16
    assert trial.model_ms == pytest.approx(rival, rel=0.01)
    assert trial.least_gain <= trial.gain
    mine = [choice for choice in changed if choice.task == hot.name]
    assert {choice.latency_us for choice in mine} == {10.4 if taken else 10.0}
    assert all("inside the model" in choice.note for choice in mine) is taken
    others = [(a, b) for a, b in zip(choices, changed, strict=True) if a.task != hot.name]
    assert all(a is b for a, b in others)


def test_a_refuted_runner_up_is_not_tried(prepared: PreparedModel, hot: TuningTask, database: TuningDatabase) -> None:
    second = next(record for record in database.list_records() if record.latency_us == 10.4)
    wrong = dataclasses.replace(second, status=Status.WRONG_RESULT, latencies_us=(), created_at=utc_now())
    database.record_measurement(wrong)
    choices = as_tuned(prepared, database)
    assert rerank(prepared, choices, database, tasks=1) == (choices, RerankReport(()))


@pytest.mark.slow
def test_gains_that_do_not_add_up_are_not_taken_together(
    prepared: PreparedModel, hot: TuningTask, database: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, third = [task for task in prepared.tasks if task is not hot and task.family == hot.family][:2]
    record_two(database, prepared, second, 5.0)
    record_two(database, prepared, third, 2.0)
    choices = as_tuned(prepared, database)
    alone = {"as tuned": 1.0, "0": 0.97, "1": 0.96, "2": 0.999}
    together = {"as tuned": 1.0, "0": 0.96, "1": 0.94, "2": 0.95}
    told(monkeypatch, alone, together, alone, {**together, "1": 0.97, "2": 0.98})
    changed, report = rerank(prepared, choices, database, tasks=3)
    assert [trial.alone_us for trial in report.trials if trial.taken] == pytest.approx([10.4, 5.2])
    assert (report.gain, report.latencies_ms[0]) == (pytest.approx(0.06), 0.94)
    taken = {choice.task for choice in changed if choice.within_model}
    assert taken == {hot.name, second.name}
    changed, report = rerank(prepared, choices, database, tasks=3)
    assert {choice.task for choice in changed if choice.within_model} == {second.name}
    assert report.gain == pytest.approx(0.04)


def test_what_gains_is_recorded_and_compiled_from_then_on(
    prepared: PreparedModel, hot: TuningTask, database: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, {"as tuned": 1.0, "0": 0.9}, spread=0.001)
    model = measured_model(prepared)
    changed, report = rerank_prepared(
        prepared, as_tuned(prepared, database), database, TuningOptions(rerank=1), model=model
    )
    assert report.gain == pytest.approx(0.1, abs=0.01)
    _, choices = select_as_measured(prepared, database)
    for choice, of_records in zip(changed, choices, strict=True):
        assert (choice.route, choice.decision) == (of_records.route, of_records.decision)
        assert of_records.within_model == (of_records.task == hot.name)
    (record,) = [one for one in database.list_records() if one.workload_hash == model.workload.workload_hash]
    assert record.latency_us == pytest.approx(900, rel=0.01)


def test_a_templates_default_is_tried_however_far_behind_it_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ModelRequest(
        "bert-tiny", target="cuda:sm_90a", shapes={"input_ids": (1, 128)}, lowering=LoweringOptions(precision="fp16")
    )
    prepared = prepare_model(request)
    task = next(task for task in prepared.tasks if task.family == "matmul")
    candidates = [one.to_json() for one in list_candidates(task.mod["main"], prepared.target)[0][:6]]
    database = TuningDatabase.open(tmp_path / "tuning.db")
    slower = {(Route.TEMPLATE, decision): 10.0 + number for number, decision in enumerate(reversed(candidates))}
    record_latencies(database, prepared, task, slower)
    tried: list[str | None] = []

    def arms(_: object, __: object, variants: Sequence[Sequence[KernelChoice]], ___: object) -> list[Arm]:
        tried.extend(variant[0].decision for variant in variants)
        return [lambda: None] * (1 + len(variants))

    monkeypatch.setattr(rerank_module, "compiled_arms", arms)
    _, choices = select_as_measured(prepared, database)
    rerank(prepared, choices, database, tasks=1)
    assert tried == [candidates[4], candidates[0]]


def test_nothing_is_compiled_when_nothing_is_near(
    prepared: PreparedModel, hot: TuningTask, database: TuningDatabase
) -> None:
    choices = as_tuned(prepared, None)
    assert rerank(prepared, choices, database, tasks=1)[1].trials == ()
    record_two(database, prepared, hot, 9.0)
    assert rerank(prepared, choices, database, tasks=0)[0] == choices


def test_a_kernel_taken_for_its_time_in_the_model_is_compiled_from_records_until_a_newer_one_is_faster(
    prepared: PreparedModel, hot: TuningTask, database: TuningDatabase
) -> None:
    task = hot
    model = measured_model(prepared)

    def chosen_kernel() -> KernelChoice:
        _, choices = select_as_measured(prepared, database)
        return next(choice for choice in choices if choice.task == task.name)

    assert (chosen_kernel().latency_us, chosen_kernel().within_model) == (10.0, False)
    second = next(record for record in database.list_records() if record.latency_us == 10.4)
    decision = ModelDecision(kernels={task.workload_hash: (second.route, second.decision)})
    model.record(database, decision, seed=0, job_id=None, latencies_ms=(0.9, 0.8, 0.95))
    (of_model,) = [one for one in database.list_records() if one.workload_hash == model.workload.workload_hash]
    assert of_model.latency_us == pytest.approx(900.0)
    chosen = chosen_kernel()
    assert (chosen.latency_us, chosen.record_id, chosen.within_model) == (10.4, second.id, True)
    newer = dataclasses.replace(second, latencies_us=(9.0,), created_at=utc_now(), decision=second.decision)
    first = next(record for record in database.list_records() if record.latency_us == 10.0)
    database.record_measurement(dataclasses.replace(newer, decision=first.decision))
    assert (chosen_kernel().latency_us, chosen_kernel().within_model) == (9.0, False)
    model.record(database, ModelDecision(), seed=0, job_id=None, latencies_ms=(0.7,))
    assert not chosen_kernel().within_model
