"""Runners-up inside the model: what is compiled is real, what is measured is made up."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import pipeline.rerank as rerank_module
from pipeline.environment import target_key
from pipeline.measure import Arm, ArmResult, BenchmarkReport
from pipeline.model_records import ModelDecision, measured_model
from pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from pipeline.rerank import rerank
from pipeline.selection import KernelChoice, select_kernels
from pipeline.tuned_model import select_as_measured
from pipeline.tuning.cost_model import WARMUP_CANDIDATES, FastCostModel
from pipeline.tuning.options import TaskSummary, TuningSummary
from pipeline.tuning.recorder import describe_workload
from pipeline.tuning.search import TaskSearch
from schedules.space import make_space
from tuning_db.records import Route, Status, TuningRecord, utc_now
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


def told(medians: dict[str, float], spread: float = 0.0, spoilt: float = 0.0) -> object:
    """Return what measures: latencies off by up to `spread`, the first arm too fast in a part of the turns."""
    rng = np.random.default_rng(0)

    def measure(arms: dict[str, Arm], *, runs: int, warmup: int) -> BenchmarkReport:
        for arm in arms.values():
            arm()
        assert list(arms) == list(medians)
        latencies = {name: ms * (1 + rng.uniform(-spread, spread, runs)) for name, ms in medians.items()}
        latencies["as tuned, before"][: round(spoilt * runs)] = 0.1
        return BenchmarkReport(tuple(ArmResult(name, tuple(ms)) for name, ms in latencies.items()), runs, warmup, {})

    return measure


@pytest.mark.parametrize(
    ("before", "rival", "after", "spread", "spoilt", "taken", "turns"),
    [
        (1.00, 0.95, 1.01, 0.01, 0.1, True, 30),
        (1.00, 0.95, 1.01, 0.0, 0.4, False, 120),
        (1.00, 0.95, 1.10, 0.0, 0.0, False, 120),
        (1.00, 0.99, 1.00, 0.005, 0.0, True, 30),
        (1.00, 0.99, 1.00, 0.025, 0.0, True, 60),
        (1.00, 0.999, 1.00, 0.0, 0.0, False, 30),
        (1.00, 1.05, 1.00, 0.0, 0.0, False, 30),
    ],
    ids=["faster", "not-in-most-turns", "within-the-noise", "one-percent", "one-percent-in-noise", "hardly", "slower"],
)
def test_a_runner_up_is_taken_when_the_model_is_faster_by_more_than_the_noise(
    prepared: PreparedModel,
    summary: TuningSummary,
    database: TuningDatabase,
    monkeypatch: pytest.MonkeyPatch,
    before: float,
    rival: float,
    after: float,
    spread: float,
    spoilt: float,
    taken: bool,
    turns: int,
) -> None:
    choices = select_kernels(
        prepared.lowered,
        prepared.tasks,
        database=database,
        target=prepared.target,
        environment=prepared.environment,
    )
    medians = {"as tuned, before": before, "0": rival, "as tuned, after": after}
    monkeypatch.setattr(rerank_module, "measure", told(medians, spread, spoilt))
    changed, report = rerank(prepared, choices, summary, database, tasks=1)
    (trial,) = report.trials
    assert (trial.taken, trial.alone_us, report.turns) == (taken, 10.4, turns)
    assert trial.model_ms == pytest.approx(rival, rel=0.01)
    assert trial.least_gain <= trial.gain
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


def test_a_kernel_taken_for_its_time_in_the_model_is_compiled_from_records_until_a_newer_one_is_faster(
    prepared: PreparedModel, summary: TuningSummary, database: TuningDatabase
) -> None:
    task = summary.tasks[0].task
    model = measured_model(prepared)

    def hot() -> KernelChoice:
        _, choices = select_as_measured(prepared, database)
        return next(choice for choice in choices if choice.task == task.name)

    assert (hot().latency_us, hot().within_model) == (10.0, False)
    second = next(record for record in database.list_records() if record.latency_us == 10.4)
    rows_max = prepared.lowered.options.norm_rows_max
    decision = ModelDecision(rows_max, {task.workload_hash: (second.route, second.decision)})
    model.record(database, decision, seed=0, job_id=None, latencies_ms=(0.9, 0.8, 0.95))
    (of_model,) = [one for one in database.list_records() if one.workload_hash == model.workload.workload_hash]
    assert of_model.latency_us == pytest.approx(900.0)
    chosen = hot()
    assert (chosen.latency_us, chosen.record_id, chosen.within_model) == (10.4, second.id, True)
    newer = dataclasses.replace(second, latencies_us=(9.0,), created_at=utc_now(), decision=second.decision)
    first = next(record for record in database.list_records() if record.latency_us == 10.0)
    database.record_measurement(dataclasses.replace(newer, decision=first.decision))
    assert (hot().latency_us, hot().within_model) == (9.0, False)
    model.record(database, ModelDecision(rows_max), seed=0, job_id=None, latencies_ms=(0.7,))
    assert not hot().within_model
