"""Tables of kernels of symbolic sizes from records: each size is a task, and the winners make the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models.axis_profile import AxisProfile
from relaxtune.models.size_histogram import SizePoint, profile_of
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.choose.model_records import measured_model
from relaxtune.pipeline.codegen.kernel_hash import made_hash
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.jobs.tuned_model import TunedModel, choose_kernels, select_as_measured, with_untuned_sizes
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.registry.rebuild import rebuild_artifact
from relaxtune.pipeline.tasks.sizes_of_tables import untuned_function
from relaxtune.pipeline.tuning.options import TuningSummary
from relaxtune.pipeline.tuning.record import describe_workload
from relaxtune.pipeline.tuning.task_start import template_candidates
from relaxtune.schedules.registry import RANGES
from relaxtune.schedules.search.space import list_designs
from relaxtune.schedules.templates.attention_sm90.table import TableParameters
from relaxtune.schedules.templates.ranges import RangesParameters
from relaxtune.tuning_db.records import Route
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.choose.test_template_route import template_record

PROFILE = {"tokens": AxisProfile(16, 128, 4096)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weight = np.random.default_rng(0).standard_normal((768, 768)).astype("float16")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], name="layer"), helper.make_node("Relu", ["h"], ["y"])],
        "tokens",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["tokens", 768])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["tokens", 768])],
        [numpy_helper.from_array(weight, "w")],
    )
    path = tmp_path_factory.mktemp("model") / "tokens.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.fixture(scope="module")
def prepared(model: Path) -> PreparedModel:
    found = prepare_model(ModelRequest(model, target="cuda:sm_90a", profile=PROFILE))
    return replace(found, environment=replace(detect_environment(found.target), device_name="some GPU"))


def database_of(prepared: PreparedModel, path: Path, winners: dict[int, str]) -> TuningDatabase:
    """Return a database in which some decision is the fastest at some sizes, and what is proposed first is slower."""
    database = TuningDatabase.open(path)
    for task in prepared.tasks:
        database.record_workload(describe_workload(task))
        first = template_candidates(task, prepared.target)[0].decision
        decision = winners[task.tables[0].place[0][1]]
        records = [(decision, 1.0), *([(first, 9.0)] if first != decision else [])]
        for one, latency_us in records:
            record = template_record(task, one, prepared.target)
            database.record_measurement(replace(record, latencies_us=(latency_us,)))
    return database


def others(prepared: PreparedModel) -> dict[int, str]:
    """Return a decision for each size; none is proposed first anywhere."""
    few, many = (
        (task.tables[0].place[0][1], template_candidates(task, prepared.target)) for task in prepared.tasks[:2]
    )
    return {few[0]: few[1][1].decision, many[0]: many[1][3].decision, 4096: many[1][3].decision}


def test_each_size_of_a_profile_is_a_task_that_no_trace_is_searched_for(prepared: PreparedModel) -> None:
    assert [(task.tables[0].place[0][1], task.weight) for task in prepared.tasks] == [(16, 1), (128, 2), (4096, 1)]
    assert prepared.untunable == ()
    assert list_designs(prepared.tasks[0].mod, prepared.target.target) == []


def test_counted_lengths_give_the_weights(model: Path) -> None:
    lengths = [SizePoint((("tokens", 16),), 90), SizePoint((("tokens", 128),), 10)]
    request = ModelRequest(model, target="cuda:sm_90a", profile=profile_of(lengths), lengths=lengths)
    assert [(task.tables[0].place[0][1], task.weight) for task in prepare_model(request).tasks] == [(16, 18), (128, 2)]


def test_table_is_of_the_winners_and_cut_where_they_change(prepared: PreparedModel, tmp_path: Path) -> None:
    winners = others(prepared)
    (choice,) = choose_kernels(prepared, database_of(prepared, tmp_path / "tuning.db", winners))
    assert choice.route is Route.TEMPLATE
    assert "rows=16 (record 1), rows=128 (record 3), rows=4096 (record 5)" in choice.note
    ranges = RangesParameters.from_json(choice.decision or "").ranges
    at = {rows: next(one for one in ranges if rows <= one.most) for rows in (1, 16, 17, 128, 129, 4096)}
    assert {rows: one.decision for rows, one in at.items() if rows in winners} == winners
    # One decision wins at 128 and at 4096, and so between them; of 17 rows nothing is known.
    assert at[129] == at[4096]
    assert at[17].decision not in winners.values()


def test_candidates_of_a_size_can_be_in_the_table_and_its_untuned_line_comes_first(prepared: PreparedModel) -> None:
    (untuned,) = choose_kernels(prepared, None)
    ranges = RangesParameters.from_json(untuned.decision or "")
    func, dropped = untuned_function(prepared.lowered, untuned.function), 0
    for task in prepared.tasks:
        place = task.tables[0].place
        offered = [one.decision for one in template_candidates(task, prepared.target)]
        of_static = template_candidates(replace(task, symbolic=None), prepared.target)
        dropped += len({one.decision for one in of_static} - set(offered))
        assert offered[0] == ranges.at(place)
        assert {RANGES.refusal(func, prepared.target, one, place) for one in offered[::5]} == {None}
    # Sums that all blocks share need a known number of rows.
    assert dropped > 0


def test_untuned_line_stays_where_nothing_is_surely_faster(prepared: PreparedModel, tmp_path: Path) -> None:
    database = TuningDatabase.open(tmp_path / "tuning.db")
    for task, gain in zip(prepared.tasks, (0.995, 0.995, 0.9), strict=True):
        database.record_workload(describe_workload(task))
        first, second = template_candidates(task, prepared.target)[:2]
        for one, latency_us in ((first, 10.0), (second, 10.0 * gain)):
            record = template_record(task, one.decision, prepared.target)
            database.record_measurement(replace(record, latencies_us=(latency_us,)))
    (choice,) = choose_kernels(prepared, database)
    assert "rows=16 (record 1), rows=128 (record 3), rows=4096 (record 6)" in choice.note
    assert [one.reason for one in choice.trace if one.id == 2] == ["at most 1% faster than a kernel of the table"]


def test_size_that_is_slower_in_the_model_keeps_its_untuned_line(prepared: PreparedModel, tmp_path: Path) -> None:
    database = database_of(prepared, tmp_path / "tuning.db", others(prepared))
    tuned = TunedModel(
        "job", TuningSummary((), 0.0, {}, interrupted=False), prepared, choose_kernels(prepared, database)
    )
    kept = with_untuned_sizes(tuned, {"tokens=128"}, database)
    at = {rows: (("rows", rows),) for rows in (16, 128, 4096)}
    own, before, after = (
        RangesParameters.from_json(choices[0].decision or "")
        for choices in (choose_kernels(prepared, None), tuned.choices, kept.choices)
    )
    assert [after.at(at[rows]) == before.at(at[rows]) for rows in at] == [True, False, True]
    assert after.at(at[128]) == own.at(at[128])
    # Compiling from records follows the model's record.
    assert kept.with_untuned is not None
    measured_model(prepared).record(database, kept.with_untuned, seed=0, job_id=None, latencies_ms=(1.0,))
    _, again = select_as_measured(prepared, database)
    assert again[0].decision == kept.choices[0].decision


def test_records_alone_give_the_same_kernels_again(model: Path, prepared: PreparedModel, tmp_path: Path) -> None:
    database = database_of(prepared, tmp_path / "tuning.db", others(prepared))
    again = replace(prepare_model(prepared.request), environment=prepared.environment)
    hashes = [kernels(prepared, choose_kernels(prepared, database)), kernels(again, choose_kernels(again, database))]
    assert hashes[0] == hashes[1] != kernels(prepared, choose_kernels(prepared, None))


@pytest.mark.slow
def test_artifact_with_a_table_of_records_is_made_again_without_them(prepared: PreparedModel, tmp_path: Path) -> None:
    choices = choose_kernels(prepared, database_of(prepared, tmp_path / "tuning.db", others(prepared)))
    manifest = write_artifact(compile_module(prepared.lowered, choices, prepared.target), tmp_path / "artifact")
    assert manifest.kernels[0].table == choices[0].decision
    assert rebuild_artifact(tmp_path / "artifact", tmp_path / "again").same


def kernels(prepared: PreparedModel, choices: tuple[KernelChoice, ...]) -> list[str]:
    return [made_hash(one.scheduled, prepared.target.target) for one in choices if one.scheduled is not None]


def test_free_axes_are_tuned_at_usual_sizes_and_compile_finds_their_records(model: Path, tmp_path: Path) -> None:
    free = prepare_model(ModelRequest(model, target="cuda:sm_90a"))
    free = replace(free, environment=replace(detect_environment(free.target), device_name="some GPU"))
    assert [(task.tables[0].place[0][1], task.weight) for task in free.tasks] == [(1, 6), (8, 2), (32, 1)]
    assert free.untunable == ()
    winner = template_candidates(free.tasks[0], free.target)[3].decision
    database = database_of(free, tmp_path / "tuning.db", dict.fromkeys((1, 8, 32), winner))
    again = replace(prepare_model(free.request), environment=free.environment)
    (choice,) = choose_kernels(again, database)
    assert "rows=1 (record 1), rows=8 (record 3), rows=32 (record 5)" in choice.note
    assert {entry.id for entry in choice.trace} == {1, 2, 3, 4, 5, 6}
    # Nobody said that calls have these sizes: the kernels without records are those for any size.
    untuned = kernels(free, choose_kernels(free, None))
    assert untuned == kernels(free, choose_kernels(replace(free, tasks=()), None))


def test_records_of_a_table_are_explained_where_none_is_taken(prepared: PreparedModel, tmp_path: Path) -> None:
    with TuningDatabase.open(tmp_path / "tuning.db") as database:
        (choice,) = choose_kernels(prepared, database)
        assert choice.note.startswith("no record of any size; ")
    winners = others(prepared)
    database = database_of(prepared, tmp_path / "others.db", winners)
    elsewhere = replace(prepared, environment=replace(prepared.environment, tvm_version="0.1"))
    (choice,) = choose_kernels(elsewhere, database, explain=True)
    assert choice.trace


@pytest.mark.slow
def test_attention_of_free_sizes_is_tuned_at_each_of_them(tmp_path: Path) -> None:
    profile = {"batch": AxisProfile(1, 2, 8), "sequence": AxisProfile(16, 64, 64)}
    shapes = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ("batch", "sequence"))
    lowering = LoweringOptions(precision="fp16")
    free = prepare_model(
        ModelRequest("bert-tiny", shapes=shapes, target="cuda:sm_90a", profile=profile, lowering=lowering)
    )
    free = replace(free, environment=replace(detect_environment(free.target), device_name="some GPU"))
    tasks = [task for task in free.tasks if task.family == "attention"]
    assert [task.tables[0].text for task in tasks] == [
        "batch=1 sequence=16", "batch=2 sequence=64", "batch=8 sequence=64",
    ]  # fmt: skip
    with TuningDatabase.open(tmp_path / "tuning.db") as database:
        for task in tasks:
            database.record_workload(describe_workload(task))
            for number, one in enumerate(template_candidates(task, free.target)[:2]):
                record = template_record(task, one.decision, free.target)
                database.record_measurement(replace(record, latencies_us=(10.0 - number,)))
        choice = next(one for one in choose_kernels(free, database) if one.function == "attention")
    table = TableParameters.from_json(choice.decision or "")
    for task in tasks:
        assert table.at(task.tables[0].place) == template_candidates(task, free.target)[1].decision
    assert choice.note.startswith("table of kernels measured at batch=1 sequence=16 (record 2)")
