"""The rounds of a run: what candidates are asked for, and where they go."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from relaxtune.pipeline.tuning.candidates import Candidate
from relaxtune.pipeline.tuning.local.measuring_process import MeasuringProcess, _NoAnswerError
from relaxtune.pipeline.tuning.local.requests import ReferenceRequest
from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.options import TuningOptions, TuningSummary
from relaxtune.pipeline.tuning.search.evolution import TaskSearch
from relaxtune.pipeline.tuning.session import tune
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.tuning.tuning_cases import Place, all_records, matmul_task

QUICK = MeasureOptions(repeats=2, contender_repeats=0, min_repeat_s=0.0005)


def tune_two(place: Place, database: TuningDatabase) -> TuningSummary:
    """Tune a large and a small matmul with four candidates for both."""
    return tune(
        [replace(matmul_task(64, 64, 64), name="large"), matmul_task(16, 16, 16)],
        target=place.target,
        database=database,
        environment=place.environment,
        still_true=all_records,
        options=TuningOptions(trials=4, trials_per_iteration=4, population=16, workers=1, finals=0, measure=QUICK),
    )


def test_candidates_that_a_search_does_not_find_are_left_to_others(
    place: Place, database: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = TaskSearch.propose

    def finds_nothing(search: TaskSearch) -> list[Candidate]:
        if search._name != "large":
            return propose(search)
        # Meanwhile all candidates of the run are promised to this search.
        time.sleep(0.5)
        return []

    monkeypatch.setattr(TaskSearch, "propose", finds_nothing)
    summary = tune_two(place, database)
    assert [one.valid for one in summary.tasks] == [0, 4]


def test_a_task_whose_reference_takes_too_much_memory_is_left_out_and_the_run_goes_on(
    place: Place, database: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = MeasuringProcess._ask

    def without_memory(self: MeasuringProcess, request: object, timeout_s: float, kind: type) -> object:
        if isinstance(request, ReferenceRequest) and request.measurement.spec.arguments[0].shape == (64, 64):
            raise _NoAnswerError(Outcome(Unmeasured.LOST, error="CUDA_ERROR_OUT_OF_MEMORY"))
        return ask(self, request, timeout_s, kind)

    monkeypatch.setattr(MeasuringProcess, "_ask", without_memory)
    summary = tune_two(place, database)
    tasks = {one.task.name: one for one in summary.tasks}
    assert tasks["large"].skipped == "memory is too small for its reference"
    assert tasks["matmul"].valid == 4
    assert {record.workload_hash for record in database.list_records()} == {tasks["matmul"].task.workload_hash}
