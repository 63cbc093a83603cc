"""Parameters of products of symbolic size: proposals at known sizes, kernels for all sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models.axis_profile import AxisProfile
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.jobs.tuned_model import choose_kernels
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.tasks.sizes_of_tables import untuned_function
from relaxtune.pipeline.tuning.record import describe_workload
from relaxtune.pipeline.tuning.task_start import template_candidates
from relaxtune.schedules.cpu.any_size.template import AnySizeParameters
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.registry import ANY_SIZE, apply_decision
from relaxtune.tuning_db.records import Route
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.choose.test_template_route import template_record

SIZES = (3, 17, 70)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    weight = np.random.default_rng(0).standard_normal((256, 96)).astype("float32")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], name="layer"), helper.make_node("Relu", ["h"], ["y"])],
        "tokens",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["tokens", 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["tokens", 96])],
        [numpy_helper.from_array(weight, "w")],
    )
    path = tmp_path_factory.mktemp("model") / "tokens.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return prepare_model(ModelRequest(path, target="llvm", profile={"tokens": AxisProfile(*SIZES)}))


def symbolic(prepared: PreparedModel) -> tvm.tirx.PrimFunc:
    return untuned_function(prepared.lowered, prepared.tasks[0].tables[0].function)


def test_each_size_is_a_task_and_the_default_is_proposed_first(prepared: PreparedModel) -> None:
    assert [(task.tables[0].place[0][1], task.weight) for task in prepared.tasks] == [(3, 1), (17, 2), (70, 1)]
    own = ANY_SIZE.own(symbolic(prepared), prepared.target)
    assert isinstance(own, AnySizeParameters)
    for task in prepared.tasks:
        offered = [one.decision for one in template_candidates(task, prepared.target)]
        assert offered[0] == own.to_json()
        assert len(offered) == len(set(offered)) > 5
    # Nothing was measured: the kernel is the default schedule's.
    (choice,) = choose_kernels(prepared, None)
    assert (choice.route, choice.decision) == (Route.FALLBACK, None)


@pytest.mark.parametrize("parameters", [AnySizeParameters(4, 1, 1, 1), AnySizeParameters(6, 3, 2, 2)])
def test_kernel_of_any_parameters_is_right_at_all_sizes(prepared: PreparedModel, parameters: AnySizeParameters) -> None:
    kernel = apply_decision(symbolic(prepared), prepared.target, parameters.to_json())
    built = tvm.compile(tvm.IRModule({"main": kernel}), prepared.target.target)
    for rows in SIZES:
        panels = np.random.default_rng(rows).random(np.shape(packed_weight(prepared)), "float32")
        x = np.random.default_rng(1).random((rows, 256), "float32")
        y = tvm.runtime.tensor(np.full((rows, 96), np.nan, "float32"))
        built["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(panels), y)
        weight = np.concatenate(list(panels), axis=1)[:, :96]
        np.testing.assert_allclose(y.numpy(), np.maximum(x @ weight, 0), rtol=1e-4)


def packed_weight(prepared: PreparedModel) -> np.ndarray:
    shape = [int(size) for size in symbolic(prepared).params[1].shape]
    return np.empty(shape, "float32")


@pytest.mark.parametrize(
    ("parameters", "why"),
    [(AnySizeParameters(31), "31 rows"), (AnySizeParameters(4, 1, 300, 1), "300 blocks of 256 steps")],
)
def test_parameters_that_do_not_fit_are_refused(
    prepared: PreparedModel, parameters: AnySizeParameters, why: str
) -> None:
    refused = ANY_SIZE.apply(symbolic(prepared), prepared.target, parameters)
    assert isinstance(refused, Refusal)
    assert why in refused.reason


def test_decision_that_saves_most_at_all_sizes_makes_the_kernel(prepared: PreparedModel, tmp_path: Path) -> None:
    prepared = replace(prepared, environment=replace(detect_environment(prepared.target), device_name="some CPU"))
    # The second one is faster where most of the time is; the third was measured at one size alone.
    latencies_us = {3: (10.0, 11.0), 17: (10.0, 10.0, 9.0), 70: (100.0, 90.0)}
    with TuningDatabase.open(tmp_path / "tuning.db") as database:
        for task in prepared.tasks:
            database.record_workload(describe_workload(task))
            offered = template_candidates(task, prepared.target)
            for one, latency_us in zip(offered, latencies_us[task.tables[0].place[0][1]], strict=False):
                record = template_record(task, one.decision, prepared.target)
                # Other work disturbed most of the runs.
                database.record_measurement(replace(record, latencies_us=(latency_us, latency_us, 500.0, 600.0, 700.0)))
        (choice,) = choose_kernels(prepared, database)
        assert choice.decision == template_candidates(prepared.tasks[0], prepared.target)[1].decision
        assert choice.of_sizes
        assert choice.note == "one kernel, measured at rows=3, rows=17, rows=70 (record 2)"


def test_default_stays_where_no_record_is_faster(prepared: PreparedModel, tmp_path: Path) -> None:
    prepared = replace(prepared, environment=replace(detect_environment(prepared.target), device_name="some CPU"))
    with TuningDatabase.open(tmp_path / "tuning.db") as database:
        for task in prepared.tasks:
            database.record_workload(describe_workload(task))
            for one, latency_us in zip(template_candidates(task, prepared.target), (10.0, 9.95), strict=False):
                record = template_record(task, one.decision, prepared.target)
                database.record_measurement(replace(record, latencies_us=(latency_us,)))
        (choice,) = choose_kernels(prepared, database)
    assert (choice.route, choice.note) == (Route.FALLBACK, "the default schedule is as fast")
