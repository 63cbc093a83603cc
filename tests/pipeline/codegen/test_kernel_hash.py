# ruff: noqa: F811
"""The hash of a kernel: the same from the tuner's build process, a database and an artifact; another after a change."""

from __future__ import annotations

import pickle
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import tvm
import tvm_ffi

from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.entries import KernelEntry
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.choose.record_lookup import RecordLookup, without_stale
from relaxtune.pipeline.choose.replay import replay_record
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.codegen.finish import finish_kernels
from relaxtune.pipeline.codegen.kernel_hash import CODE_GENERATION, is_kernel, kernel_hash, made_hash
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.pipeline.tasks.routes import DEFAULT_ROUTES
from relaxtune.pipeline.tuning.local.build_worker import BuildRequest, start
from relaxtune.pipeline.tuning.record import describe_workload
from relaxtune.pipeline.tuning.resume import measured_since
from relaxtune.pipeline.tuning.task_start import template_candidates
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.metaschedule import replay_decision
from relaxtune.tuning_db.records import Environment, Route, Status, utc_now
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.artifact.test_compile import fallback_record, parallel_trace
from tests.pipeline.choose.test_template_route import lowered, target, tasks, template_record  # noqa: F401
from tests.unoptimised import UNOPTIMISED_TEXT

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
            kernel_hash=made_hash(one.module.make()["main"], target.target),
        )
        for number, one in enumerate(candidates, 1)
    ]


def built_hash(what, target, directory: Path) -> str | None:
    """Return the hash that the tuner's build process tells of a candidate."""
    stem = str(directory / "candidate")
    reply = start()(BuildRequest(pickle.dumps(what), pickle.dumps(target.target), stem))
    return reply.resources.kernel_hash


def entries_of(lowered, task, record, target, directory: Path, routes=DEFAULT_ROUTES) -> list[KernelEntry]:
    """Return the kernels of an artifact that was made of a record."""
    with TuningDatabase.open("sqlite://") as database:
        database.record_workload(describe_workload(task))
        number = database.record_measurement(record)
        environment = detect_environment(target)
        choices = select_kernels(
            lowered, [task], database=database, target=target, environment=environment, routes=routes
        )
    manifest = write_artifact(compile_module(lowered, choices, target), directory / "artifact")
    assert all(entry.kernel_hash for entry in manifest.kernels)
    return [entry for entry in manifest.kernels if entry.record_id == number]


def test_a_template_has_one_hash_in_the_build_process_and_in_an_artifact(lowered, task, target, tmp_path: Path) -> None:
    candidate = template_candidates(task, target)[0]
    told = built_hash(candidate.module, target, tmp_path)
    record = replace(template_record(task, candidate.decision, target), kernel_hash=told)
    assert {entry.kernel_hash for entry in entries_of(lowered, task, record, target, tmp_path)} == {told}


@pytest.mark.slow
def test_a_fallback_has_one_hash_on_the_gpu(lowered, tasks, target, tmp_path: Path) -> None:
    task = tasks[0]
    told = built_hash(apply_fallback(task.mod, target.target), target, tmp_path)
    record = fallback_record(task, target, kernel_hash=told, environment=other_gpu(target))
    fallbacks = entries_of(lowered, task, record, target, tmp_path, frozenset({Route.FALLBACK}))
    assert {entry.kernel_hash for entry in fallbacks} == {told}


def test_fallbacks_and_traces_have_one_hash_on_the_cpu(tmp_path: Path) -> None:
    prepared = prepare_model(ModelRequest("bert-tiny", {"input_ids": (1, 16)}, UNOPTIMISED_TEXT))
    lowered, target = prepared.lowered, prepared.target
    environment = detect_environment(target)
    told = {}
    with TuningDatabase.open("sqlite://") as database:
        for number, task in enumerate(prepared.tasks):
            record = fallback_record(task, target, latencies_us=(1.0,))
            scheduled = apply_fallback(task.mod, target.target)
            if number % 2:
                record = replace(record, route=Route.METASCHEDULE, decision=parallel_trace(task))
                scheduled = replay_decision(task.mod, record.decision).mod
            told[task.name] = built_hash(scheduled, target, tmp_path)
            database.record_workload(describe_workload(task))
            database.record_measurement(replace(record, kernel_hash=told[task.name]))
        choices = select_kernels(lowered, prepared.tasks, database=database, target=target, environment=environment)
    hashes = compile_module(lowered, choices, target).kernel_hashes
    tuned = {choice.function: choice for choice in choices if choice.task is not None}
    assert {choice.route for choice in tuned.values()} == {Route.FALLBACK, Route.METASCHEDULE}
    assert all(choice.has_record for choice in tuned.values())
    assert {name: hashes[name] for name in tuned} == {name: told[one.task] for name, one in tuned.items()}


def other_gpu(target: ResolvedTarget) -> Environment:
    return replace(detect_environment(target), device_name="some GPU")


def test_earlier_hashes_hold_while_code_generation_is_what_it_was(task, target, measured, monkeypatch) -> None:
    """Earlier records keep 64 bits: of the scheduled function, or of a fallback's finished one."""
    scheduled = template_candidates(task, target)[0].module.make()["main"]
    finished = finish_kernels(tvm.IRModule({"main": scheduled}), target.target)["main"]
    for func in (scheduled, finished):
        bare = func.without_attr("global_symbol").without_attr("tirx.is_scheduled")
        earlier = f"{tvm_ffi.structural_hash(bare, map_free_vars=True) % 2**64:016x}"
        assert is_kernel(earlier, scheduled, target.target)
        replay_record(task, replace(measured[0], kernel_hash=earlier), target)
    monkeypatch.setitem(CODE_GENERATION, "cuda", 2)
    assert not is_kernel(earlier, scheduled, target.target)
    assert not is_kernel(measured[0].kernel_hash, scheduled, target.target)
    assert is_kernel(made_hash(scheduled, target.target), scheduled, target.target)


def test_the_name_of_a_kernel_takes_no_part_and_its_code_does(task, target) -> None:
    first, second = (one.module.make()["main"] for one in template_candidates(task, target)[:2])
    assert kernel_hash(first, "cuda") == kernel_hash(first.with_attr("global_symbol", "another"), "cuda")
    assert kernel_hash(first, "cuda") != kernel_hash(second, "cuda")


def test_a_record_of_another_kernel_than_its_decision_makes_is_passed_over(lowered, task, target, measured) -> None:
    changed = replace(measured[0], kernel_hash=ANOTHER)
    with pytest.raises(LoweringError, match=rf"is of kernel {ANOTHER}, .* has changed\. Measure the task again"):
        replay_record(task, changed, target)
    with TuningDatabase.open("sqlite://") as database:
        database.record_workload(describe_workload(task))
        passed_over = database.record_measurement(changed)
        taken = database.record_measurement(measured[1])
        choices = select_kernels(
            lowered, [task], database=database, target=target, environment=detect_environment(target)
        )
    choice = next(choice for choice in choices if choice.task == task.name)
    assert (choice.record_id, choice.unusable) == (taken, (passed_over,))


@pytest.mark.slow
def test_a_slow_fallback_does_not_stand_in_for_candidates_made_in_another_way_by_now(
    lowered, task, target, measured
) -> None:
    fallback = fallback_record(task, target, latencies_us=(9.0,), environment=measured[0].environment)
    with TuningDatabase.open("sqlite://") as database:
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
    with TuningDatabase.open("sqlite://") as database:
        lookup = RecordLookup(database, target, measured[0].environment)
        assert without_stale(lookup, task, measured) == measured
        fastest_changed = [replace(measured[0], kernel_hash=ANOTHER), *measured[1:]]
        assert without_stale(lookup, task, fastest_changed) == measured[1:]
        all_changed = [replace(record, kernel_hash=ANOTHER) for record in measured]
        failed = replace(measured[0], decision='{"template":"old"}', status=Status.BUILD_ERROR, latencies_us=())
        searched = replace(measured[0], route=Route.METASCHEDULE)
        known = without_stale(lookup, task, [*all_changed, failed, searched])
        assert known == [searched]


def test_a_refuted_record_that_holds_does_not_hide_a_stale_one(task, target, measured) -> None:
    wrong = replace(measured[0], status=Status.WRONG_RESULT, created_at=measured[0].created_at + timedelta(seconds=1))
    known = [measured[0], replace(measured[1], kernel_hash=ANOTHER), measured[2]]
    with TuningDatabase.open("sqlite://") as database:
        database.record_all(workloads=[describe_workload(task)], records=[wrong])
        lookup = RecordLookup(database, target, measured[0].environment)
        assert without_stale(lookup, task, known) == [measured[0], measured[2]]


def test_a_task_with_stale_records_is_done_once_it_was_measured_anew(measured) -> None:
    old, *others = measured
    assert measured_since(measured, measured)
    assert not measured_since([], [old])
    later = replace(others[0], created_at=old.created_at + timedelta(seconds=1))
    assert measured_since([later], [old, later])
    assert not measured_since([replace(later, created_at=old.created_at)], [old, later])
