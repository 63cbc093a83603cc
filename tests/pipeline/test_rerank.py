"""Runners-up inside the model: what is compiled is real, what is measured is made up."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import pipeline.rerank as rerank_module
from pipeline.environment import target_key
from pipeline.measure import Arm, ArmResult, BenchmarkReport
from pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from pipeline.rerank import rerank
from pipeline.selection import select_kernels
from pipeline.tuning.cost_model import WARMUP_CANDIDATES, FastCostModel
from pipeline.tuning.options import TaskSummary, TuningSummary
from pipeline.tuning.recorder import describe_workload
from pipeline.tuning.search import TaskSearch
from schedules.space import make_space
from tuning_db.records import Route, Status, TuningRecord
from tuning_db.store import TuningDatabase


@pytest.fixture(scope="module")
def prepared() -> PreparedModel:
    return prepare_model(ModelRequest("bert-tiny", target="llvm", shapes={"input_ids": (1, 16)}))


@pytest.fixture(scope="module")
def summary(prepared: PreparedModel) -> TuningSummary:
    task = max(prepared.tasks, key=lambda one: one.weight * one.flops)
    hot = TaskSummary(task, 2, 0, {}, 0, 12.0, 10.0, Route.METASCHEDULE, task.weight, 1.0, 1.0)
    return TuningSummary((hot,), 1.0, {}, interrupted=False)


@pytest.fixture
def database(prepared: PreparedModel, summary: TuningSummary, tmp_path: Path) -> TuningDatabase:
    """Two candidates of the hot task, 10.0 and 10.4 us, and its fallback, far behind."""
    task = summary.tasks[0].task
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
    opened = TuningDatabase.open(tmp_path / "tuning.db")
    opened.record_workload(describe_workload(task))
    made = ((Route.METASCHEDULE, first.decision, 10.0), (Route.METASCHEDULE, second.decision, 10.4))
    opened.record_measurements(
        [
            TuningRecord(
                workload_hash=task.workload_hash,
                signature_key=describe_workload(task).signature_key,
                target=target_key(prepared.target),
                environment=prepared.environment,
                route=route,
                decision=decision,
                status=Status.OK,
                latencies_us=(us,),
            )
            for route, decision, us in (*made, (Route.FALLBACK, '{"rule":"any"}', 50.0))
        ]
    )
    return opened


def told(medians: dict[str, float], turns: int = 5, spoilt: int = 0) -> object:
    def measure(arms: dict[str, Arm], *, runs: int) -> BenchmarkReport:
        for arm in arms.values():
            arm()
        assert list(arms) == list(medians)
        latencies = {name: [ms] * turns for name, ms in medians.items()}
        for turn in range(spoilt):
            latencies["as tuned, before"][turn] = 0.1
        return BenchmarkReport(tuple(ArmResult(name, tuple(ms)) for name, ms in latencies.items()), runs, 0, {})

    return measure


@pytest.mark.parametrize(
    ("before", "rival", "after", "spoilt", "taken"),
    [
        (1.00, 0.95, 1.01, 1, True),
        (1.00, 0.95, 1.01, 2, False),
        (1.00, 0.95, 1.10, 0, False),
        (1.00, 0.999, 1.00, 0, False),
        (1.00, 1.05, 1.00, 0, False),
    ],
    ids=["faster", "not-in-most-turns", "within-the-noise", "hardly", "slower"],
)
def test_a_runner_up_is_taken_when_the_model_is_faster_by_more_than_the_noise(
    prepared: PreparedModel,
    summary: TuningSummary,
    database: TuningDatabase,
    monkeypatch: pytest.MonkeyPatch,
    before: float,
    rival: float,
    after: float,
    spoilt: int,
    taken: bool,
) -> None:
    choices = select_kernels(
        prepared.lowered,
        prepared.tasks,
        database=database,
        target=prepared.target,
        environment=prepared.environment,
    )
    medians = {"as tuned, before": before, "0": rival, "as tuned, after": after}
    monkeypatch.setattr(rerank_module, "measure", told(medians, spoilt=spoilt))
    changed, report = rerank(prepared, choices, summary, database, tasks=1)
    (trial,) = report.trials
    assert (trial.taken, trial.alone_us, trial.model_ms) == (taken, 10.4, rival)
    hot = summary.tasks[0].task.name
    mine = [choice for choice in changed if choice.task == hot]
    assert {choice.latency_us for choice in mine} == {10.4 if taken else 10.0}
    assert all("inside the model" in choice.note for choice in mine) is taken
    others = [(a, b) for a, b in zip(choices, changed, strict=True) if a.task != hot]
    assert all(a is b for a, b in others)


def test_nothing_is_compiled_when_nothing_is_near(
    prepared: PreparedModel, summary: TuningSummary, database: TuningDatabase
) -> None:
    choices = select_kernels(
        prepared.lowered, prepared.tasks, database=None, target=prepared.target, environment=prepared.environment
    )
    assert rerank(prepared, choices, summary, database, tasks=1)[1].trials == ()
    none = dataclasses.replace(summary, tasks=())
    assert rerank(prepared, choices, none, database, tasks=3)[0] == choices
