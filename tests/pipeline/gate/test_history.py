"""Regressions over history: sure ones are named, noise, a busy machine and few measurements are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relaxtune.pipeline.gate import history
from relaxtune.pipeline.gate.history import Regression, regressions
from relaxtune.tuning_db.questions.changes import TaskChange
from relaxtune.tuning_db.records import RecordFilter, Route

NOTHING = RecordFilter()


def task(
    name: str, seed: int, slower: float = 1.0, *, kernels: int = 1, raw: int = 7, scatter: float = 0.02
) -> TaskChange:
    rng = np.random.default_rng(seed)

    def latencies(times: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(100 * times * np.exp(rng.normal(0, scatter, raw))) for _ in range(kernels))

    return TaskChange(name, "matmul", name, "x", "EPYC", Route.FALLBACK, True, latencies(1.0), latencies(slower))


@pytest.fixture
def judged(monkeypatch):
    def judge(*tasks: TaskChange, threshold: float = 1.05) -> list[Regression]:
        monkeypatch.setattr(history, "changes", lambda *_: tasks)
        return list(regressions(None, NOTHING, NOTHING, threshold=threshold))

    return judge


def names(found: list[Regression]) -> list[str]:
    return [one.name for one in found]


@pytest.mark.parametrize("kernels", [1, 12])
def test_a_slower_task_is_named_among_many_that_scatter(judged, kernels) -> None:
    others = [task(f"same {n}", n, kernels=kernels) for n in range(30)]
    (found,) = judged(*others, task("slower", 99, 1.3, kernels=kernels))
    assert found.name == "slower"
    assert found.ratio == pytest.approx(1.3, rel=0.05)
    assert found.least is not None
    assert 1.05 < found.least < found.ratio
    assert found.kernels == kernels


def test_nothing_is_named_where_nothing_changed(judged) -> None:
    alarms = sum(bool(judged(*(task(f"{n}", 100 * run + n) for n in range(20)), threshold=1.0001)) for run in range(50))
    assert alarms <= 5


def test_a_busy_machine_is_told_and_is_no_regression_of_each_task(judged) -> None:
    tasks = [task(f"{n}", n, 1.4) for n in range(20)]
    assert judged(*tasks) == []
    assert {round(one.device_ratio, 1) for one in judged(*tasks, threshold=0)} == {1.4}
    assert names(judged(*tasks, task("worse", 77, 2.0))) == ["worse"]


def test_few_measurements_prove_nothing(judged) -> None:
    assert judged(task("slower", 0, 2.0, raw=2)) == []
    (found,) = judged(task("slower", 0, 2.0, raw=2), threshold=0)
    assert found.least is None
    assert found.ratio == pytest.approx(2.0, rel=0.1)


def test_one_lucky_latency_before_is_no_regression(judged) -> None:
    same = task("lucky", 3)
    lucky = replace(same, before_us=((50.0, *same.before_us[0][1:]),))
    assert judged(lucky) == []


def test_nothing_to_compare_is_no_regression(judged) -> None:
    assert judged() == []
