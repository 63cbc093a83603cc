"""What a task begins with is found where a model is imported: the thread that tunes has to find none of it."""

from __future__ import annotations

import pickle
from unittest.mock import Mock

import pytest
import tvm_ffi

from relaxtune.pipeline.tuning import task_start
from relaxtune.pipeline.tuning.measure.recipe import scheduled
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.search.cost_model import WARMUP_CANDIDATES, FastCostModel
from relaxtune.pipeline.tuning.search.warm_start import WarmStart
from relaxtune.pipeline.tuning.task_start import TaskStart
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Route
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.tuning.tuning_cases import Place, add_one_mod, matmul_task, task_of


def test_what_was_found_goes_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    target = resolve_target("cuda:sm_90a")
    task = task_of("add", add_one_mod(size=4096))
    found = TaskStart(task, target, TuningOptions().routes).find_all()
    sent = pickle.dumps(found)
    for name in ("fallback_with_rules", "template_candidates", "apply_fallback", "recognise_matmul"):
        monkeypatch.setattr(task_start, name, None)
    start = pickle.loads(sent)
    assert start.spec == found.spec
    assert [one.decision for one in start.offers] == [one.decision for one in found.offers]
    assert {one.route for one in start.offers} == {Route.TEMPLATE}
    assert start.fallback == found.fallback
    assert tvm_ffi.structural_equal(scheduled(start.reference)["main"], task.mod["main"])


def test_the_workloads_of_a_family_are_read_once_in_a_run(place: Place, database: TuningDatabase) -> None:
    reading = Mock(wraps=database)
    options = TuningOptions(trials=1)
    measured: set[str] = set()
    warm = WarmStart(
        FastCostModel(WARMUP_CANDIDATES, 0), reading, place.target, place.environment, options, measured.__contains__
    )
    first, second, third = (matmul_task(rows, 32, 32, f"rows{rows}") for rows in (16, 64, 128))

    def asked() -> set[str]:
        calls = [call for call in reading.list_top_each.call_args_list if call.kwargs["k"] != 256]
        return {question.workload_hash for call in calls for question in call.args[0]}

    warm.begin([first], ())
    warm.begin([second], ())
    # Nothing was measured of the first task, which is near.
    assert asked() == set()
    measured.add(first.workload_hash)
    warm.begin([third], ())
    assert asked() == {first.workload_hash}
    assert reading.list_workloads.call_count == 1
