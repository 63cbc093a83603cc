"""Random graphs and near misses agree with ONNX Runtime: some in every run, ten thousand and more by `-m nightly`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import ArtifactError
from tests.guardrails import graph_judge
from tests.guardrails.graph_judge import FAULTS, Outcome, Plan, Status, try_graph
from tests.guardrails.graph_workers import try_graphs
from tests.guardrails.graphs import summary
from tests.guardrails.near_misses import PATTERNS
from tests.guardrails.planted_faults import PLANTS, Plant, verdicts
from tests.guardrails.sized_calls import SizedPlan
from tests.guardrails.sized_graphs import draw_sized

STEPS, NEAR = Plan(), Plan(near_misses=True)
HOPPER = Plan(near_misses=True, target="cuda:sm_90a")


def faults(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.status in FAULTS]


def test_twelve_random_graphs_agree_with_onnx_runtime() -> None:
    assert faults(try_graph(seed, STEPS) for seed in range(12)) == []


def test_answers_that_hang_on_the_last_bit_are_no_fault() -> None:
    # A norm of values near -10,000, where ONNX's own evaluator says what we do; an ArgMax of equal sums.
    assert [try_graph(seed, STEPS).status for seed in (10510, 15045)] == [Status.RIGHT, Status.UNSTABLE]


def test_graph_that_onnx_runtime_cannot_optimise_is_judged() -> None:
    assert try_graph(604014, STEPS).status is Status.RIGHT


@pytest.mark.slow
@pytest.mark.parametrize("plan", [NEAR, HOPPER], ids=["llvm", "passes of Hopper"])
def test_a_near_miss_of_each_pattern_agrees_with_onnx_runtime(plan: Plan) -> None:
    assert faults(try_graph(seed, plan) for seed in range(len(PATTERNS))) == []


# Graphs of several opsets, in float16 too, with branches, caches, several outputs.
@pytest.mark.quick_cases("5", "8", "12", "16")
@pytest.mark.parametrize("seed", [4, 5, 6, 8, 10, 12, 13, 14, 15, 16, 17, 19])
def test_graph_with_symbolic_axes_called_at_five_sizes_agrees_with_onnx_runtime(seed: int) -> None:
    assert SizedPlan().attempt(seed).status is Status.RIGHT


def test_graph_with_symbolic_axes_is_the_same_for_its_seed() -> None:
    first, second = (draw_sized(5)[0] for _ in range(2))
    assert first.proto("g", list(first.shapes)[-1:]) == second.proto("g", list(second.shapes)[-1:])


def test_wrong_answer_of_one_size_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Module.run

    def wrong_from_eight(module: Module, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        wide = max(size for array in feeds.values() for size in array.shape) > 7
        return {name: array + np.float32(0.1 * wide) for name, array in run(module, feeds).items()}

    monkeypatch.setattr(Module, "run", wrong_from_eight)
    assert SizedPlan().attempt(5).status is Status.WRONG


def test_call_that_is_refused_where_onnx_runtime_answers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: Module, feeds: Mapping[str, np.ndarray]) -> None:
        raise ArtifactError("no")

    monkeypatch.setattr(Module, "run", refuse)
    outcome = SizedPlan().attempt(5)
    assert (outcome.status, outcome.reason[:4]) == (Status.REFUSED, "call")


@pytest.mark.parametrize("plan", [STEPS, NEAR])
def test_graph_is_the_same_for_its_seed(plan: Plan) -> None:
    (first, feeds), (second, _) = plan.draw(5), plan.draw(5)
    assert first.proto.SerializeToString() == second.proto.SerializeToString()
    assert feeds["x0"].dtype == np.float32


def test_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = graph_judge.run_lowered
    monkeypatch.setattr(graph_judge, "run_lowered", lambda *given: [array + np.float32(0.1) for array in run(*given)])
    assert try_graph(5, STEPS).status is Status.WRONG


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_fault_is_called_wrong(plant: Plant) -> None:
    assert verdicts(plant, 2) == [Status.WRONG, Status.WRONG]


def test_graph_that_takes_too_long_is_lost_and_no_other() -> None:
    outcomes = list(try_graphs([5], STEPS, limit_s=-1000))
    assert [(outcome.seed, outcome.status) for outcome in outcomes] == [(5, Status.CRASHED)]
    assert summary(outcomes)["counts"]["crashed"] == 1  # type: ignore[index]


class Waits:
    """A graph that waits, as on a machine that is busy with something else."""

    def attempt(self, seed: int) -> Outcome:
        time.sleep(3)
        return Outcome(seed, Status.RIGHT)


@pytest.mark.slow
def test_graph_that_waits_for_a_busy_machine_is_not_lost() -> None:
    # The first one may take longer: its process imports.
    assert [one.status for one in try_graphs([0, 1], Waits(), limit_s=2)] == [Status.RIGHT, Status.RIGHT]


@pytest.mark.nightly
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize(
    ("plan", "count"), [(STEPS, 10_000), (NEAR, 2000), (HOPPER, 2000)], ids=["steps", "near misses", "of Hopper"]
)
def test_thousands_of_random_graphs_agree_with_onnx_runtime(plan: Plan, count: int) -> None:
    assert faults(try_graphs(range(count), plan, workers=os.cpu_count() or 1)) == []
