from __future__ import annotations

import json

import numpy as np
import pytest

from relaxtune.pipeline.tuning.candidates import Candidate
from relaxtune.pipeline.tuning.search.template_search import TemplateSearch, parameter_table, predict
from relaxtune.tuning_db.records import Route
from tests.pipeline.tuning.tuning_cases import matmul_task

TASK = matmul_task()
GRID = [(m, n, stages) for m in (16, 32, 64, 128) for n in (32, 64, 128, 256) for stages in (2, 4)]


def decision(m: int, n: int, stages: int) -> str:
    return json.dumps({"template": "made_up", "tile_m": m, "tile_n": n, "stages": stages, "swap": False})


def latency_us(text: str) -> float:
    """Return what a kernel takes that likes tiles of 64x128 and does not care for the stages."""
    fields = json.loads(text)
    return 10.0 + 3.0 * abs(np.log2(fields["tile_m"] / 64)) + 4.0 * abs(np.log2(fields["tile_n"] / 128))


def candidates() -> list[Candidate]:
    return [Candidate(Route.TEMPLATE, decision(*numbers)) for numbers in GRID]


def run(search: TemplateSearch) -> list[str]:
    asked = []
    while batch := search.propose(8):
        asked += [one.decision for one in batch]
        for one in batch:
            search.learn(one.decision, latency_us(one.decision))
    return asked


def test_the_best_is_found_and_the_hopeless_are_left_alone() -> None:
    search = TemplateSearch(candidates(), {})
    asked = run(search)
    assert search.done
    assert min(map(latency_us, asked)) == 10.0
    assert len(asked) < len(GRID)
    assert len(set(asked)) == len(asked)


def test_all_are_measured_when_asked_for() -> None:
    assert len(run(TemplateSearch(candidates(), {}, thorough=True))) == len(GRID)


def test_what_is_known_is_not_asked_again() -> None:
    known = {one.decision: latency_us(one.decision) for one in candidates()[::2]}
    assert not set(run(TemplateSearch(candidates(), known))) & set(known)


def test_what_was_best_for_near_shapes_comes_first() -> None:
    best = decision(64, 128, 4)
    search = TemplateSearch(candidates(), {})
    assert not search.informed
    search.prefer(["of another version", best])
    assert search.informed
    first = [one.decision for one in search.propose(3)]
    assert first == [best, decision(*GRID[0]), decision(*GRID[1])]


def test_failures_are_not_asked_again_and_predict_nothing() -> None:
    search = TemplateSearch(candidates(), {})
    for one in search.propose(8):
        search.learn(one.decision, None)
    assert not search.done
    assert len(search.propose(100)) == 8


def test_predictions_pass_through_what_was_measured_and_doubt_the_rest() -> None:
    table = parameter_table([decision(*numbers) for numbers in GRID])
    measured = {row: latency_us(decision(*GRID[row])) for row in range(0, len(GRID), 3)}
    mean, deviation = predict(table, measured)
    for row, us in measured.items():
        assert np.exp(mean[row]) == pytest.approx(us, rel=0.06)
    unknown = [row for row in range(len(GRID)) if row not in measured]
    assert deviation[unknown].mean() > 2 * deviation[list(measured)].mean()


def test_parameter_table_gives_texts_a_column_a_value() -> None:
    table = parameter_table([json.dumps({"kind": kind, "same": 3}) for kind in ("a", "b", "c")])
    assert table.shape == (3, 3)
