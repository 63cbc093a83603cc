from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from tvm.s_tir.meta_schedule.utils import shash2hex

from relaxtune.pipeline.tasks.packed_module import PackedModule
from relaxtune.pipeline.tasks.similar_shapes import KnownShapes, NearRecords, distance, near_records, shape_free
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.record import describe_workload
from relaxtune.pipeline.tuning.search.cost_model import WARMUP_CANDIDATES, FastCostModel
from relaxtune.pipeline.tuning.search.evolution import TaskSearch
from relaxtune.pipeline.tuning.search.warm_start import learn_from_records, spread_out
from relaxtune.pipeline.tuning.session import tune
from relaxtune.pipeline.tuning.tasks import TaskState
from relaxtune.schedules.search.space import make_space
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.metaschedule import ir_to_json, replay_decision
from relaxtune.tuning_db.records import RecordFilter, Route, Status, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.tuning.tuning_cases import Place, all_records, choose_among, matmul_task

OPTIONS = TuningOptions(
    trials=40,
    trials_per_iteration=20,
    population=24,
    workers=1,
    finals=0,
    measure=MeasureOptions(repeats=1, contender_repeats=0, min_repeat_s=0.0001),
)
SHORT, LONG = matmul_task(32, 64, 32, "short"), matmul_task(96, 64, 32, "long")


@pytest.fixture(scope="module")
def tuned(place: Place, tmp_path_factory: pytest.TempPathFactory) -> TuningDatabase:
    """A database with 40 candidates of the short task."""
    database = TuningDatabase.open(tmp_path_factory.mktemp("warm") / "tuning.db")
    tune(
        [SHORT],
        target=place.target,
        database=database,
        environment=place.environment,
        still_true=all_records,
        options=OPTIONS,
    )
    database.record_workload(describe_workload(LONG))
    return database


def test_a_signature_without_sizes_keeps_what_is_computed() -> None:
    assert shape_free(SHORT.signature) == shape_free(LONG.signature)
    half = LONG.signature.replace("float32", "float16")
    assert shape_free(half) != shape_free(LONG.signature)
    assert shape_free('{"expr":"t0[i0,i1]*0.125+p1[r0]","m":128}') == '{"expr":"t0[i0,i1]*0.125+p1[r0]","m":#}'


def test_the_nearest_shape_comes_first_and_the_task_itself_is_not_near() -> None:
    far = matmul_task(1024, 64, 32, "far")
    known = KnownShapes(describe_workload(task) for task in (far, SHORT, LONG))
    assert [one.name for one in known.near(LONG)] == ["short", "far"]
    assert distance(SHORT.signature, SHORT.signature) == 0.0


def test_decisions_of_a_near_shape_become_candidates(place: Place, tuned: TuningDatabase) -> None:
    (found,) = near_records([KnownShapes(tuned.list_workloads()).near(LONG)], tuned, place.key, place.environment)
    assert 1 < len(found.traces) <= 8
    assert found.parameters == ()
    search = TaskSearch(
        LONG.mod,
        place.target.target,
        make_space(place.target.target),
        FastCostModel(WARMUP_CANDIDATES, 0),
        [],
        name="long",
        seed=0,
        per_round=4,
        population=16,
        threads=1,
    )
    adopted = search.adopt([*found.traces, "no trace"])
    assert adopted
    for one in adopted:
        with place.target.target:
            replayed = replay_decision(LONG.mod, one.decision)
        assert replayed.mod.script() == one.module.script()


def test_the_database_is_asked_as_often_for_many_tasks_as_for_one(
    place: Place, tuned: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = KnownShapes(tuned.list_workloads()).near(LONG)
    asked: list[object] = []
    read = TuningDatabase.read

    def counted(self: TuningDatabase, *rest: Any, **options: Any) -> Any:
        asked.append(rest)
        return read(self, *rest, **options)

    monkeypatch.setattr(TuningDatabase, "read", counted)
    (one,) = near_records([near], tuned, place.key, place.environment)
    once = len(asked)
    assert near_records([near, [], near], tuned, place.key, place.environment) == [one, NearRecords(), one]
    assert len(asked) == 2 * once
    assert one.traces


def test_what_is_written_down_of_a_task_needs_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ir_to_json(SHORT.mod)
    monkeypatch.setattr(PackedModule, "make", None)
    assert describe_workload(SHORT).ir_json == text


def test_the_cost_model_starts_with_what_was_recorded(
    place: Place, tuned: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (tuned.list_workloads(), tuned, place.target, place.environment)
    assert learn_from_records(FastCostModel(WARMUP_CANDIDATES, 0), *asked, seconds=0.0) == 0
    first = FastCostModel(WARMUP_CANDIDATES, 0)
    learnt = learn_from_records(first, *asked, seconds=60.0)
    assert 10 < learnt <= 24
    assert first.booster is not None
    (group,) = first.data.values()
    assert first.data.keys() == {shash2hex(SHORT.mod)}
    assert group.costs.max() > group.costs.min()
    # The next run reads the features and replays nothing.
    monkeypatch.setattr("relaxtune.pipeline.tuning.search.warm_start.replay_decision", None)
    again = FastCostModel(WARMUP_CANDIDATES, 0)
    assert learn_from_records(again, *asked, seconds=60.0) == learnt
    assert all((a == b).all() for a, b in zip(group.features, again.data[group.group_hash].features, strict=True))


def test_a_warm_run_begins_with_what_was_best_for_the_near_shape(place: Place, tuned: TuningDatabase) -> None:
    (near,) = near_records([KnownShapes(tuned.list_workloads()).near(LONG)], tuned, place.key, place.environment)
    options = dataclasses.replace(OPTIONS, trials=4, trials_per_iteration=4)
    tune(
        [LONG],
        target=place.target,
        database=tuned,
        environment=place.environment,
        still_true=all_records,
        options=options,
    )
    records = tuned.list_records(RecordFilter(workload_hash=LONG.workload_hash, route=Route.METASCHEDULE))
    assert len(records) == 4
    steps = {_steps(decision) for decision in near.traces}
    assert all(_steps(record.decision) in steps for record in records)


def test_a_run_on_another_device_begins_with_what_was_best_on_the_first(place: Place, tuned: TuningDatabase) -> None:
    best = tuned.list_top(Question(SHORT.workload_hash, None, place.key, place.environment, Route.METASCHEDULE), k=8)
    elsewhere = dataclasses.replace(place.environment, device_name="another one of its kind")
    tune(
        [SHORT],
        target=place.target,
        database=tuned,
        environment=elsewhere,
        still_true=all_records,
        options=dataclasses.replace(OPTIONS, trials=4, trials_per_iteration=4),
    )
    records = tuned.list_records(RecordFilter(workload_hash=SHORT.workload_hash, route=Route.METASCHEDULE))
    measured = [one for one in records if one.environment.device_name == elsewhere.device_name]
    assert len(measured) == 4
    assert {one.decision for one in measured} <= {one.decision for one in best}


def test_every_task_with_a_near_shape_begins_with_one_candidate(place: Place, tuned: TuningDatabase) -> None:
    others = [matmul_task(rows, 64, 32, f"rows{rows}") for rows in (48, 64)]
    options = dataclasses.replace(OPTIONS, trials=2, trials_per_iteration=4)
    tune(
        others,
        target=place.target,
        database=tuned,
        environment=place.environment,
        still_true=all_records,
        options=options,
    )
    for task in others:
        searched = RecordFilter(workload_hash=task.workload_hash, route=Route.METASCHEDULE)
        assert len(tuned.list_records(searched)) == 1


def test_a_near_shape_tells_what_the_first_round_may_save(place: Place, tuned: TuningDatabase) -> None:
    (near,) = near_records([KnownShapes(tuned.list_workloads()).near(LONG)], tuned, place.key, place.environment)
    best, default = (
        tuned.list_top(
            Question(
                workload_hash=SHORT.workload_hash,
                signature_key=None,
                target=place.key,
                environment=place.environment,
                route=route,
            ),
            k=1,
        )[0].latency_us
        or 0.0
        for route in (Route.METASCHEDULE, Route.FALLBACK)
    )
    assert near.saved is not None
    assert 0.0 < 1 - best / default <= near.saved < 1.0
    state = TaskState(LONG, before_us=100.0)
    assert state.expected_gain_us() == 50.0 * LONG.weight
    state.near = NearRecords(saved=0.1)
    assert state.expected_gain_us() == pytest.approx(10.0 * LONG.weight)


@pytest.mark.parametrize(("candidates", "saved"), [(7, None), (8, 0.0)])
def test_only_as_many_candidates_as_are_looked_at_tell_that_nothing_was_saved(
    place: Place, candidates: int, saved: float | None
) -> None:
    near = describe_workload(SHORT)

    def record(route: Route, decision: str, latency_us: float) -> TuningRecord:
        return TuningRecord(
            workload_hash=near.workload_hash,
            signature_key=near.signature_key,
            target=place.key,
            environment=place.environment,
            route=route,
            decision=decision,
            status=Status.OK,
            latencies_us=(latency_us,),
        )

    slower = [record(Route.METASCHEDULE, f"trace {number}", 12.0) for number in range(candidates)]
    with TuningDatabase.open("sqlite://") as database:
        database.record_all(workloads=[near], records=[record(Route.FALLBACK, "default", 10.0), *slower])
        (found,) = near_records([[near]], database, place.key, place.environment)
    assert len(found.traces) == candidates
    assert found.saved == saved


def test_what_a_near_shape_gained_from_is_tried_before_any_second_round() -> None:
    begun = TaskState(LONG, before_us=1000.0, best_us=1000.0, ready=True, near_begun=True, progress=[1000.0])
    light = TaskState(SHORT, before_us=1.0, ready=True, near=NearRecords(traces=("a",), saved=0.01))
    nothing = TaskState(SHORT, before_us=1.0, ready=True, near=NearRecords(traces=("a",), saved=0.0))
    assert choose_among([begun, nothing, light]) is light
    light.near_begun = True
    assert choose_among([begun, nothing, light]) is begun


def _steps(decision: str) -> str:
    """Return the instructions of a trace up to its postprocessors, without decisions."""
    return decision.split('["EnterPostproc"')[0]


def test_spread_out_takes_both_ends() -> None:
    assert spread_out(list(np.arange(100)), 4) == [0, 33, 66, 99]
    assert spread_out([1, 2], 4) == [1, 2]
