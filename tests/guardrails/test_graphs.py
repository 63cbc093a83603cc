"""Random graphs agree with ONNX Runtime: a dozen in every run, ten thousand by `-m nightly`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.guardrails import graphs
from tests.guardrails.graph_cases import draw_graph
from tests.guardrails.graphs import try_graph, try_graphs

# ONNX Runtime refuses a graph in a thousand for a node that its own optimiser left behind.
FAULTS = ("wrong", "crashed")


def test_twelve_random_graphs_agree_with_onnx_runtime() -> None:
    outcomes = [try_graph(seed) for seed in range(12)]
    assert [outcome for outcome in outcomes if outcome.status in FAULTS] == []


def test_graph_is_the_same_for_its_seed() -> None:
    (first, feeds), (second, _) = draw_graph(5), draw_graph(5)
    assert first.proto.SerializeToString() == second.proto.SerializeToString()
    assert feeds["x"].dtype == np.float32


def test_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = graphs.run_lowered
    monkeypatch.setattr(graphs, "run_lowered", lambda *given: [array + np.float32(0.1) for array in run(*given)])
    assert try_graph(5).status == "wrong"


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_ten_thousand_random_graphs_agree_with_onnx_runtime() -> None:
    outcomes = try_graphs(range(10_000))
    assert [outcome for outcome in outcomes if outcome.status in FAULTS] == []
