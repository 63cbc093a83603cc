"""Batches and their cells: the state machine, who holds a batch, and what a dead driver leaves."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from datetime import timedelta
from itertools import product

import pytest

from relaxtune.tuning_db import batches, cell_states
from relaxtune.tuning_db.batches import (
    DIED,
    batch_key,
    beat,
    cancel_cell,
    find_done,
    finish_batch,
    get_batch,
    list_attempts,
    list_batches,
    list_cells,
    move_cell,
    start_batch,
    take_batch,
)
from relaxtune.tuning_db.cell_states import (
    TRANSITIONS,
    BatchHeldError,
    CellFacts,
    CellSpec,
    CellState,
    Driver,
    TransitionError,
)
from relaxtune.tuning_db.errors import NotFoundError
from relaxtune.tuning_db.records import utc_now
from relaxtune.tuning_db.store import TuningDatabase

SPEC = CellSpec(
    "bert", "bert.onnx", "ids=1x8", "", "fp16", "quick", "llvm", 3, "kept,nightly", "k" * 64, max_latency_ms=2.5
)
TWO = (SPEC, replace(SPEC, name="gpt", key="g" * 64))
ELSEWHERE = Driver("another-host", 7)
WAY = [CellState.IMPORTING, CellState.TUNING, CellState.COMPILING, CellState.VALIDATING]


def begin(database, key="plan", cells=TWO):
    return start_batch(database, key=key, name="night", path="/plans/night.toml", plan="[[cells]]", cells=cells)


def as_driver(monkeypatch, driver):
    monkeypatch.setattr(batches.Driver, "here", classmethod(lambda cls: driver))


def later(monkeypatch, seconds):
    for module in (batches, cell_states):
        monkeypatch.setattr(module, "utc_now", lambda: utc_now() + timedelta(seconds=seconds))


def test_a_batch_is_kept_with_its_cells(database):
    batch = begin(database)
    assert list_batches(database) == [batch]
    assert (batch.driver, batch.held, batch.outcome) == (Driver.here(), True, None)
    cells = list_cells(database, batch.id)
    assert [cell.spec for cell in cells] == list(TWO)
    assert {cell.state for cell in cells} == {CellState.QUEUED}
    assert not any(cell.dead or cell.attempts for cell in cells)
    for found in (get_batch(database, "night"), get_batch(database, batch.id[:6]), get_batch(database)):
        assert found == batch
    with pytest.raises(NotFoundError, match=r"No batch day in .*; it knows night\. `relaxtune db batches`"):
        get_batch(database, "day")


def test_an_accepted_cell_keeps_what_came_of_it(database):
    batch = begin(database)
    for state in WAY:
        move_cell(database, batch.id, "bert", state)
    facts = CellFacts(artifact="/out/bert", artifact_key="a" * 64, validated=True, shipped_ms=1.25, size_bytes=2**33)
    move_cell(database, batch.id, "bert", CellState.DONE, facts)
    cell, other = list_cells(database, batch.id)
    assert (cell.state, cell.facts, cell.attempts, cell.driver) == (CellState.DONE, facts, 1, None)
    assert other.state is CellState.QUEUED
    found = find_done(database, SPEC.key)
    assert found is not None
    assert found[0].facts == facts
    assert find_done(database, TWO[1].key) is None
    finish_batch(database, batch.id, "done")
    assert not list_batches(database)[0].held


@pytest.mark.parametrize(("state", "wanted"), [pair for pair in product(CellState, CellState) if pair[0] != pair[1]])
def test_transitions_are_those_of_the_table(tmp_path_factory, state, wanted, shared):
    database, batch = shared
    connection = sqlite3.connect(database.url.removeprefix("sqlite:///"))
    connection.execute("UPDATE cells SET state = ? WHERE name = 'bert'", [state.value])
    connection.commit()
    connection.close()
    if wanted in TRANSITIONS[state]:
        move_cell(database, batch.id, "bert", wanted)
        assert list_cells(database, batch.id)[0].state is wanted
    else:
        with pytest.raises(TransitionError, match=rf"The cell bert is {state} and cannot become {wanted}; it may"):
            move_cell(database, batch.id, "bert", wanted)
        assert list_cells(database, batch.id)[0].state is state


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with TuningDatabase.open(tmp_path_factory.mktemp("cells") / "cells.db") as database:
        yield database, begin(database)


def test_every_state_has_its_transitions_and_work_can_always_end():
    assert set(TRANSITIONS) == set(CellState)
    assert all({CellState.FAILED, CellState.CANCELLED, CellState.QUEUED} <= TRANSITIONS[state] for state in WAY)
    assert not TRANSITIONS[CellState.DONE]


def test_a_second_driver_is_told_who_has_the_plan(database, monkeypatch):
    as_driver(monkeypatch, ELSEWHERE)
    batch = begin(database)
    monkeypatch.undo()
    for attempt in (lambda: begin(database), lambda: take_batch(database, batch.id), lambda: beat(database, batch.id)):
        with pytest.raises(BatchHeldError, match=r"worked on by process 7 on another-host, last seen at 20"):
            attempt()
    assert begin(database, key="another plan").key == "another plan"


def test_a_driver_that_died_leaves_cells_that_resume_takes_up(database, monkeypatch):
    as_driver(monkeypatch, ELSEWHERE)
    batch = begin(database)
    for state in WAY[:2]:
        move_cell(database, batch.id, "bert", state)
    monkeypatch.undo()
    bert, gpt = list_cells(database, batch.id)
    assert (bert.dead, bert.driver, gpt.dead) == (False, ELSEWHERE, False)
    later(monkeypatch, 31)
    bert, gpt = list_cells(database, batch.id)
    assert (bert.dead, bert.state, gpt.dead) == (True, CellState.TUNING, False)
    taken = take_batch(database, batch.id)
    assert (taken.driver, taken.held) == (Driver.here(), True)
    assert {cell.state for cell in list_cells(database, batch.id)} == {CellState.QUEUED}
    move_cell(database, batch.id, "bert", CellState.IMPORTING)
    first, second = list_attempts(database, batch.id)
    assert (first.driver, first.state, first.error) == (ELSEWHERE, CellState.TUNING, DIED)
    assert (second.number, second.driver, second.finished_at) == (2, Driver.here(), None)
    as_driver(monkeypatch, ELSEWHERE)
    with pytest.raises(BatchHeldError):
        beat(database, batch.id)


def test_a_new_batch_of_the_plan_ends_the_one_of_a_dead_driver(database, monkeypatch):
    as_driver(monkeypatch, ELSEWHERE)
    old = begin(database)
    monkeypatch.undo()
    later(monkeypatch, 31)
    new = begin(database)
    assert [(one.id, one.outcome) for one in list_batches(database)] == [(new.id, None), (old.id, DIED)]
    assert get_batch(database, "night") == new


def test_a_process_that_is_gone_is_dead_at_once():
    assert Driver.here().alive(utc_now())
    assert not Driver(Driver.here().host, 2**22 + 1).alive(utc_now())
    assert not Driver.here().alive(utc_now() - timedelta(seconds=31))
    assert ELSEWHERE.alive(utc_now())


def test_a_heartbeat_keeps_cells_alive(database, monkeypatch):
    batch = begin(database)
    move_cell(database, batch.id, "bert", CellState.IMPORTING)
    later(monkeypatch, 40)
    assert list_cells(database, batch.id)[0].dead
    beat(database, batch.id)
    assert not list_cells(database, batch.id)[0].dead


def test_a_cancelled_cell_goes_no_further_and_may_be_queued_again(database):
    batch = begin(database)
    move_cell(database, batch.id, "bert", CellState.IMPORTING)
    cancel_cell(database, batch.id, "bert")
    with pytest.raises(TransitionError) as refused:
        move_cell(database, batch.id, "bert", CellState.TUNING)
    assert refused.value.state is CellState.CANCELLED
    (attempt,) = list_attempts(database, batch.id)
    assert (attempt.error, attempt.finished_at is None) == ("cancelled", False)
    move_cell(database, batch.id, "bert", CellState.QUEUED)
    move_cell(database, batch.id, "bert", CellState.IMPORTING)
    assert list_cells(database, batch.id)[0].facts.error is None
    with pytest.raises(NotFoundError, match=r"No cell brt in batch .*; it has bert, gpt"):
        cancel_cell(database, batch.id, "brt")


def test_a_plan_is_known_by_its_name_and_the_folder_of_its_artifacts(tmp_path):
    keys = {batch_key("night", tmp_path), batch_key("night", tmp_path / "out"), batch_key("day", tmp_path)}
    assert len(keys) == 3
