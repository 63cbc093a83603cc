# ruff: noqa: F811
"""The hash of a kernel: the same from the tuner's build process, a database and an artifact; another after a change."""

from __future__ import annotations

import pickle
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.choose.selection import replay_record, select_kernels
from relaxtune.pipeline.choose.stale import measured_since, without_stale
from relaxtune.pipeline.codegen.kernel_hash import kernel_hash
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.tuning.local.build_worker import BuildRequest, start
from relaxtune.pipeline.tuning.measure.resources import read_resources
from relaxtune.pipeline.tuning.plan.recorder import describe_workload
from relaxtune.pipeline.tuning.search.template_candidates import template_candidates
from relaxtune.tuning_db.records import Route, Status, utc_now
from relaxtune.tuning_db.store import SqlDatabase
from tests.pipeline.choose.test_template_route import lowered, target, tasks, template_record  # noqa: F401

ANOTHER = "0" * 16


@pytest.fixture(scope="module")
def task(tasks, target):
    return next(task for task in tasks if task.family == "matmul" and template_candidates(task, target))


@pytest.fixture(scope="module")
def measured(task, target):
    """Return records of three decisions of a template, as a run of this version leaves them, the fastest first."""
    candidates = template_candidates(task, target)[:3]
    return [
        replace(
            template_record(task, one.decision, target),
            latencies_us=(float(number),),
            kernel_hash=kernel_hash(one.make(target)["main"]),
        )
        for number, one in enumerate(candidates, 1)
    ]


def test_the_build_process_tells_the_hash_that_an_artifact_of_the_record_has(
    lowered, task, target, tmp_path: Path
) -> None:
    candidate = template_candidates(task, target)[0]
    stem = str(tmp_path / "candidate")
    start()(BuildRequest(pickle.dumps(candidate.make(target)), pickle.dumps(target.target), stem))
    told = read_resources(stem + ".so").kernel_hash
    record = replace(template_record(task, candidate.decision, target), kernel_hash=told)
    with SqlDatabase.open(tmp_path / "tuning.db") as database:
        database.record_workload(describe_workload(task))
        number = database.record_measurement(record)
        choices = select_kernels(
            lowered, [task], database=database, target=target, environment=detect_environment(target)
        )
    manifest = write_artifact(compile_module(lowered, choices, target), tmp_path / "artifact")
    entries = [entry for entry in manifest.kernels if entry.record_id == number]
    assert entries
    assert {entry.kernel_hash for entry in entries} == {told}
    assert all(entry.kernel_hash for entry in manifest.kernels)


def test_the_name_of_a_kernel_takes_no_part_and_its_code_does(task, target) -> None:
    first, second = (one.make(target)["main"] for one in template_candidates(task, target)[:2])
    assert kernel_hash(first) == kernel_hash(first.with_attr("global_symbol", "another"))
    assert kernel_hash(first) != kernel_hash(second)


def test_a_record_of_another_kernel_than_its_decision_makes_is_passed_over(lowered, task, target, measured) -> None:
    changed = replace(measured[0], kernel_hash=ANOTHER)
    with pytest.raises(LoweringError, match=rf"is of kernel {ANOTHER}, .* has changed\. Measure the task again"):
        replay_record(task, changed, target)
    with SqlDatabase.open("sqlite://") as database:
        database.record_workload(describe_workload(task))
        passed_over = database.record_measurement(changed)
        taken = database.record_measurement(measured[1])
        choices = select_kernels(
            lowered, [task], database=database, target=target, environment=detect_environment(target)
        )
    choice = next(choice for choice in choices if choice.task == task.name)
    assert (choice.record_id, choice.unusable) == (taken, (passed_over,))


def test_a_slow_fallback_does_not_stand_in_for_candidates_made_in_another_way_by_now(
    lowered, task, target, measured
) -> None:
    fallback = replace(measured[0], route=Route.FALLBACK, decision="{}", latencies_us=(9.0,), kernel_hash=None)
    with SqlDatabase.open("sqlite://") as database:
        database.record_workload(describe_workload(task))
        slow = database.record_measurement(fallback)

        def chosen():
            environment = detect_environment(target)
            choices = select_kernels(lowered, [task], database=database, target=target, environment=environment)
            return next(choice for choice in choices if choice.task == task.name)

        passed_over = database.record_measurement(replace(measured[0], kernel_hash=ANOTHER))
        assert (chosen().route, chosen().record_id, chosen().unusable) == (Route.TEMPLATE, None, (passed_over,))
        assert "has changed" in chosen().note
        # Slower than the fallback in its old form too: nothing says that the template would win.
        database.record_measurement(replace(fallback, latencies_us=(0.5,), created_at=utc_now() + timedelta(seconds=1)))
        assert (chosen().route, chosen().unusable) == (Route.FALLBACK, ())
        assert chosen().record_id != slow


def test_records_that_no_longer_hold_are_measured_again(task, target, measured) -> None:
    environment = measured[0].environment
    assert without_stale(task, measured, target, environment) == measured
    fastest_changed = [replace(measured[0], kernel_hash=ANOTHER), *measured[1:]]
    assert without_stale(task, fastest_changed, target, environment) == measured[1:]
    all_changed = [replace(record, kernel_hash=ANOTHER) for record in measured]
    failed = replace(measured[0], decision='{"template":"old"}', status=Status.BUILD_ERROR, latencies_us=())
    searched = replace(measured[0], route=Route.METASCHEDULE)
    known = without_stale(task, [*all_changed, failed, searched], target, environment)
    assert known == [searched]


def test_a_task_with_stale_records_is_done_once_it_was_measured_anew(measured) -> None:
    old, *others = measured
    assert measured_since(measured, measured)
    assert not measured_since([], [old])
    later = replace(others[0], created_at=old.created_at + timedelta(seconds=1))
    assert measured_since([later], [old, later])
    assert not measured_since([replace(later, created_at=old.created_at)], [old, later])
