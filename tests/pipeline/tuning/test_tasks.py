"""The choice of the next task, and the ends of tasks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.tuning.bench_task_queue import make_states
from relaxtune.pipeline.tasks.task import SizeOfTable
from relaxtune.pipeline.tuning.tasks import Tasks, TaskState


def best_of(states: list[TaskState]) -> float:
    """The rank of the best open task, by looking at all of them."""
    rounds = sum(state.rounds for state in states)
    usual = sum(state.seconds for state in states) / rounds if rounds else 1.0
    return max(rank_of(state, usual) for state in states if state.open)


def rank_of(state: TaskState, usual: float) -> float:
    return state.expected_gain_us() / max(state.round_seconds(usual), 1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_the_next_task_is_the_one_that_a_look_at_all_of_them_finds(seed: int) -> None:
    rng = random.Random(seed)
    states = make_states(60, seed)
    tasks = Tasks()
    tasks.add(states[:40])
    for step in range(300):
        if step == 100:
            tasks.add(states[40:])
        known = states[:40] if step < 100 else states
        chosen = tasks.choose()
        assert chosen is not None
        rounds = sum(state.rounds for state in known)
        usual = sum(state.seconds for state in known) / rounds if rounds else 1.0
        assert rank_of(chosen, usual) == pytest.approx(best_of(known))
        chosen.seconds += rng.uniform(0.1, 3.0)
        chosen.valid += 4
        chosen.best_us = (chosen.best_us or chosen.before_us or 1.0) * rng.uniform(0.6, 1.0)
        chosen.close_round()
        tasks.changed(chosen)
        if step % 17 == 0:
            tasks.end(chosen, "exhausted")
    assert tasks.model_us == pytest.approx(
        sum(state.task.weight * (state.best_us or state.before_us or 0.0) for state in states)
    )


def test_what_promises_less_than_the_part_of_a_model_ends_also_when_others_are_added() -> None:
    small, large = make_states(2)
    small.before_us, large.before_us = 1.0, 1e6
    small.best_us, small.progress, small.rounds = 1.0, [1.0] * 10, 10
    tasks = Tasks(min_gain=0.001)
    tasks.add([small])
    assert tasks.choose() is small
    tasks.add([large])
    assert tasks.choose() is large
    assert "settled: the next round would save about" in str(small.ended)
    assert tasks.take_settled() == [small]
    assert tasks.take_settled() == []
    # The part is of one model: with a million of them the small task is worth a round again.
    tasks.models = 10**6
    tasks.reopen(small)
    tasks.end(large, "exhausted")
    assert tasks.choose() is small
    assert tasks.take_settled() == [large]
    tasks.reopen(large)
    assert tasks.take_settled() == [large]


def test_a_task_with_candidates_on_their_way_is_not_settled() -> None:
    (state,) = make_states(1)
    tasks = Tasks()
    tasks.add([state])
    state.in_flight, state.ended = 2, "exhausted"
    tasks.changed(state)
    assert tasks.choose() is None
    assert tasks.take_settled() == []
    state.in_flight = 0
    tasks.changed(state)
    assert tasks.take_settled() == [state]
    assert tasks.take_rest() == []


def test_tasks_that_the_rounds_left_do_not_come_to_end_before_the_run_does() -> None:
    large, small, busy, new = make_states(4)
    for state, us in ((large, 1000.0), (small, 1.0), (busy, 1.0), (new, 1.0)):
        state.before_us = state.best_us = us
        state.progress, state.rounds, state.seconds = [us] * 4, 4, 4.0
    busy.in_flight = 2
    tasks = Tasks()
    tasks.add([large, small, busy, new])
    # The large task promises more after a hundred rounds that saved nothing than the others after none.
    tasks.end_left_out(100)
    assert large.ended is None
    assert "for tasks that promise more" in str(small.ended)
    assert tasks.take_settled() == [small, new]
    busy.in_flight = 0
    tasks.changed(busy)
    assert busy.ended is None
    tasks.reopen(small)
    assert small.open
    # A thousand rounds come to all of them.
    tasks.end_left_out(1000 * 4 * 4)
    assert busy.ended is None
    assert small.ended is None


def test_the_line_of_a_table_that_is_the_furthest_behind_the_others_comes_first() -> None:
    near, far = make_states(2)
    for state, best_us in ((near, 100.0), (far, 80.0)):
        state.task = replace(state.task, flops=100.0, bytes=0.0, weight=1, tables=(SizeOfTable("model", "matmul", 1),))
        state.best_us, state.before_us, state.progress, state.rounds = best_us, best_us, [best_us] * 4, 4
    tasks = Tasks()
    tasks.add([near, far])
    assert tasks.choose() is near
    # At the rate of the first line, this one would take a third.
    far.task = replace(far.task, flops=33.0)
    assert tasks.choose() is far
