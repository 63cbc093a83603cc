from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from relaxtune.pipeline.tuning.finals import Final, Finals, list_finalists
from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.record import Recorder
from relaxtune.pipeline.tuning.session import summarise
from relaxtune.pipeline.tuning.tasks import TaskState
from relaxtune.tuning_db.records import Environment, RecordFilter, Route, Status, TuningRecord, utc_now
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.winner import judge
from tests.pipeline.tuning.tuning_cases import Place, matmul_task, recorded, spec_of

NOW = utc_now()


def contended(*latencies_us: float) -> TaskState:
    state = TaskState(matmul_task())
    state.spec = spec_of(state.task.mod)
    for position, latency_us in enumerate(latencies_us):
        route = Route.FALLBACK if position == 0 else Route.METASCHEDULE
        state.keep(recorded(route, f"[{position}]", latency_us, f"candidate-{position}.so"))
        state.offer(route, latency_us, 0.02)
    return state


def test_only_what_may_be_the_best_is_in_the_final() -> None:
    assert [round(one.latency_us, 3) for one in list_finalists(contended(20.0, 10.0, 10.3, 11.0))] == [10.0, 10.3]
    assert len(list_finalists(contended(20.0, 10.0))) == 1
    noisy = contended(20.0, 10.0, 11.0)
    noisy.best_spread = 0.3
    assert len(list_finalists(noisy)) == 2
    known = contended(20.0, 10.0)
    known.offer(Route.TEMPLATE, 5.0)
    assert list_finalists(known) == []


def test_a_default_that_was_disturbed_when_it_was_measured_is_measured_again_before_a_tie_gives_it_the_kernel() -> None:
    """Without the final, `without_ties` keeps the default of 30 us for its one run of 9, before candidates of 10."""
    state = contended(30.0, *(10.0 + number for number in range(8)))
    fallback = next(one for one in state.contenders if one.route is Route.FALLBACK)
    assert len(state.contenders) == 7
    assert list_finalists(state) == state.contenders[:1]
    disturbed = Outcome(Status.OK, (9e-6, 30e-6, 31e-6))
    state.contenders = [replace(one, outcome=disturbed) if one is fallback else one for one in state.contenders]
    assert [round(one.latency_us, 3) for one in list_finalists(state)] == [10.0, 30.0]


def test_the_final_names_the_winner_and_is_recorded(place: Place, database: TuningDatabase) -> None:
    state = contended(20.0, 10.0, 10.2, 10.4)
    recorder = Recorder(database, place.key, place.environment, job_id=None, seed=0, seconds={"database": 0.0})
    recorder.start([state.task])
    wrong = Outcome(Status.WRONG_RESULT, error="3 elements are off")
    backend = Compares([wrong, Outcome(Status.OK, (1.07e-5, 1.08e-5)), Outcome(Status.OK, (1.05e-5, 1.05e-5))])
    hold(state, backend, recorder, rounds=2)
    # Nothing was measured since.
    assert not Finals(backend, recorder, 2, StopSignal(), pytest.fail).hold(state)
    recorder.flush()
    assert backend.compared == [(["candidate-1.so", "candidate-2.so", "candidate-3.so"], 2)]
    assert round(state.best_us, 3) == 10.5
    records = database.list_records(RecordFilter(workload_hash=state.task.workload_hash))
    assert [record.status for record in records] == [Status.WRONG_RESULT, Status.OK, Status.OK]
    assert [record.decision for record in records] == ["[1]", "[2]", "[3]"]


def test_one_that_was_measured_before_the_device_became_slower_does_not_win(place: Place) -> None:
    state = contended(20.0, 10.0, 10.2, 10.8)
    backend = Compares([Outcome(Status.OK, (1.12e-5,) * 3), Outcome(Status.OK, (1.13e-5,) * 3)])
    hold(state, backend)
    assert state.best_us == pytest.approx(11.2)


def test_the_latency_before_is_told_as_of_the_final() -> None:
    state = contended(10.5, 10.0, 10.2)
    state.before_us = 10.5
    state.contenders = [one for one in state.contenders if one.route is not Route.FALLBACK]
    hold(state, Compares([Outcome(Status.OK, (1.3e-5,) * 3), Outcome(Status.OK, (1.3e-5,) * 3)]))
    (summary,) = summarise([state])
    assert summary.route is Route.METASCHEDULE
    assert summary.after_us == pytest.approx(13.0)
    assert summary.before_us == pytest.approx(10.5 * 13 / 10.2)


@pytest.mark.parametrize("outcomes", [None, [Outcome(Status.OK, (1e-5,)), Outcome(Unmeasured.STOPPED)]])
def test_a_final_that_was_not_held_changes_nothing(outcomes: list[Outcome] | None) -> None:
    state = contended(20.0, 10.0, 10.2)
    hold(state, Compares(outcomes))
    assert state.best_us == 10.0


def test_no_final_is_held_when_the_user_stopped_the_run() -> None:
    stop, backend = StopSignal(), Compares(None)
    stop.request()
    assert not Finals(backend, NoRecords(), 2, stop, pytest.fail).hold(contended(20.0, 10.0, 10.1))
    assert backend.compared == []


def hold(state: TaskState, backend: Compares, recorder: Recorder | NoRecords | None = None, rounds: int = 3) -> None:
    """Hold the final of a task."""
    held: list[Final] = []
    finals = Finals(backend, recorder or NoRecords(), rounds, StopSignal(), held.append)
    assert finals.hold(state)
    assert finals.running == 1
    finals.take(*held)
    assert finals.running == 0


class NoRecords:
    """A recorder that keeps nothing."""

    def add(self, *outcome: object) -> None:
        """Forget an outcome."""


class Compares:
    """A backend that gives the same answer to every comparison."""

    def __init__(self, outcomes: list[Outcome] | None) -> None:
        self.outcomes = outcomes
        self.compared: list[tuple[list[object], int]] = []

    def compare(self, artifacts, spec, rounds, on_compared):
        self.compared.append(([one.content for one in artifacts], rounds))
        on_compared(self.outcomes)


def record(place: Place, decision: str, us: float, minutes: int, status: Status = Status.OK) -> TuningRecord:
    return TuningRecord(
        workload_hash="1",
        signature_key="k",
        target=place.key,
        environment=place.environment,
        route=Route.METASCHEDULE,
        decision=decision,
        status=status,
        latencies_us=(us,) if status is Status.OK else (),
        created_at=NOW + timedelta(minutes=minutes),
    )


def standing(
    records: list[TuningRecord], environment: Environment, refuted: Sequence[TuningRecord] = ()
) -> list[TuningRecord]:
    return list(judge(records, environment, lambda: refuted).standing)


def test_the_newest_measurement_of_a_decision_counts(place: Place) -> None:
    lucky, again = record(place, "a", 9.0, 0), record(place, "a", 10.5, 5)
    steady = record(place, "b", 10.0, 1)
    assert standing([lucky, steady, again], place.environment) == [steady, again]


def test_a_decision_refuted_later_does_not_count(place: Place) -> None:
    fast, slow = record(place, "a", 9.0, 0), record(place, "b", 10.0, 0)
    wrong = record(place, "a", 0.0, 3, Status.WRONG_RESULT)
    assert standing([fast, slow], place.environment, [wrong]) == [slow]
    earlier = record(place, "a", 0.0, -3, Status.WRONG_RESULT)
    assert standing([fast, slow], place.environment, [earlier]) == [fast, slow]


def test_what_was_measured_once_counts_as_if_it_had_drifted_like_the_others(place: Place) -> None:
    before = [record(place, "a", 44.2, 0), record(place, "b", 44.6, 0), record(place, "c", 47.6, 0)]
    again = [record(place, "b", 50.2, 1), record(place, "a", 49.6, 1)]
    assert standing([*before, *again], place.environment) == [again[1], again[0], before[2]]
    # Measured since, it is as fast as it says.
    later = replace(before[2], created_at=NOW + timedelta(minutes=2))
    assert standing([*before[:2], later, *again], place.environment) == [later, again[1], again[0]]


def test_a_machine_without_the_device_counts_what_a_machine_with_it_counts(place: Place) -> None:
    records = [record(place, "a", 9.0, 0), record(place, "b", 10.0, 1), record(place, "a", 10.5, 5)]
    elsewhere = replace(place.environment, device_name="unknown")
    assert standing(records, elsewhere) == standing(records, place.environment) == records[1:]


def test_measurements_of_other_devices_stay_behind_as_they_were(place: Place) -> None:
    here = record(place, "a", 10.0, 0)
    other = replace(record(place, "b", 5.0, 9), environment=replace(place.environment, device_name="another"))
    assert standing([here, other], place.environment) == [here, other]
    wrong = record(place, "b", 0.0, 10, Status.WRONG_RESULT)
    assert standing([here, other], place.environment, [wrong]) == [here]
