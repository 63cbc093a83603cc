"""References that the device computes, and candidates that appeal from them to the CPU's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import tvm

import relaxtune.pipeline.tuning.local.measuring_process as process_module
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.tuning.beginnings import device_reference
from relaxtune.pipeline.tuning.local.backend import LocalBackend, this_machine
from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.local.requests import MeasureRequest, outputs_file
from relaxtune.pipeline.tuning.measure.arguments import ArgumentSpec, make_arrays
from relaxtune.pipeline.tuning.measure.backend import OnMeasured, Outcome
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.session import tune
from relaxtune.pipeline.tuning.task_start import TaskStart
from relaxtune.pipeline.tuning.tasks import TaskState
from relaxtune.pipeline.validate.tolerances import KernelTolerance
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Environment, Route, Status
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.tuning.test_gpu import NoDevice, half_matmul
from tests.pipeline.tuning.tuning_cases import (
    Place,
    add_one_mod,
    all_records,
    built,
    extern_mod,
    matmul_task,
    measure,
    spec_of,
    task_of,
)

QUICK = MeasureOptions(repeats=2, contender_repeats=0, min_repeat_s=0.0005, threads=1)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildPool]:
    with closing(BuildPool(1, tmp_path_factory.mktemp("artifacts"))) as opened:
        yield opened


@pytest.fixture
def backend(place: Place) -> Iterator[LocalBackend]:
    with closing(LocalBackend(["cpu:0"], place.environment, QUICK, timeout_s=10.0)) as opened:
        yield opened


def add(pool: BuildPool, place: Place, offset: float) -> BuiltArtifact:
    return built(pool, place.target.target, add_one_mod(offset))


def spec_with(pool: BuildPool, place: Place, on_device: float, on_host: float | None) -> WorkloadSpec:
    """Return a workload whose device and host compute `A + on_device` and `A + on_host`."""
    return spec_of(
        add_one_mod(),
        "add",
        reference=add(pool, place, on_device),
        reference_on_device=True,
        host_reference=None if on_host is None else add(pool, place, on_host),
        tolerance=KernelTolerance(1e-6, 1e-6),
    )


def statuses(backend: LocalBackend, pool: BuildPool, place: Place, spec: WorkloadSpec, *offsets: float) -> list[object]:
    """Return what comes of candidates `A + offset`."""
    return [one.status for one in measure(backend, *[(add(pool, place, offset), spec) for offset in offsets])]


def request(backend: LocalBackend, spec: WorkloadSpec) -> MeasureRequest:
    return backend.processes[0].request("", spec)


def test_a_candidate_that_agrees_with_the_device_does_not_appeal(
    backend: LocalBackend, pool: BuildPool, place: Place
) -> None:
    spec = spec_with(pool, place, 1.0, 1.0)
    assert statuses(backend, pool, place, spec, 1.0) == [Status.OK]
    assert request(backend, spec).may_appeal


def test_a_wrong_reference_of_the_device_refuses_no_candidate(
    backend: LocalBackend, pool: BuildPool, place: Place
) -> None:
    spec = spec_with(pool, place, 3.0, 1.0)
    assert statuses(backend, pool, place, spec, 1.0, 2.0, 1.0) == [Status.OK, Status.WRONG_RESULT, Status.OK]
    asked = request(backend, spec)
    assert not asked.may_appeal
    assert asked.reference_file(0) == outputs_file(asked.spec.host_reference, 0)
    # What agreed with the device alone is found from now on.
    assert statuses(backend, pool, place, spec, 3.0) == [Status.WRONG_RESULT]


def test_a_wrong_candidate_is_judged_by_the_host(backend: LocalBackend, pool: BuildPool, place: Place) -> None:
    spec = spec_with(pool, place, 1.0, 1.0)
    (outcome,) = measure(backend, (add(pool, place, 2.0), spec))
    assert outcome.status is Status.WRONG_RESULT
    assert "16 of 16 elements are off" in str(outcome.error)
    assert not request(backend, spec).may_appeal


def test_without_a_host_the_device_decides(backend: LocalBackend, pool: BuildPool, place: Place) -> None:
    spec = spec_with(pool, place, 1.0, None)
    assert statuses(backend, pool, place, spec, 1.0, 2.0) == [Status.OK, Status.WRONG_RESULT]


def test_a_host_that_fails_leaves_the_devices_verdict(
    backend: LocalBackend, pool: BuildPool, place: Place, tmp_path: Path
) -> None:
    missing = BuiltArtifact(str(tmp_path / "no-such.so"), "0" * 64)
    spec = dataclasses.replace(spec_with(pool, place, 1.0, None), host_reference=missing)
    expected = [Status.WRONG_RESULT, Status.OK, Status.WRONG_RESULT]
    assert statuses(backend, pool, place, spec, 2.0, 1.0, 3.0) == expected


def test_a_host_that_takes_too_long_is_asked_once(
    backend: LocalBackend, pool: BuildPool, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_APPEAL_TIMEOUT_S", 1.0)
    slow = built(pool, place.target.target, extern_mod("sleep", 100))
    spec = dataclasses.replace(spec_with(pool, place, 1.0, None), host_reference=slow)
    expected = [Status.WRONG_RESULT, Status.WRONG_RESULT, Status.OK]
    assert statuses(backend, pool, place, spec, 2.0, 3.0, 1.0) == expected
    assert backend.restarts == 1


def test_finalists_appeal_too(backend: LocalBackend, pool: BuildPool, place: Place) -> None:
    answers: SimpleQueue[Sequence[Outcome] | None] = SimpleQueue()
    finalists = [add(pool, place, offset) for offset in (1.0, 1.0, 2.0)]
    backend.compare(finalists, spec_with(pool, place, 3.0, 1.0), 2, answers.put)
    outcomes = answers.get(timeout=60)
    assert outcomes is not None
    assert [one.status for one in outcomes] == [Status.OK, Status.OK, Status.WRONG_RESULT]
    assert all(one.environment == place.environment for one in outcomes)


def test_only_large_tasks_of_a_gpu_are_left_to_the_device(place: Place) -> None:
    target = resolve_target("cuda:sm_90a")
    large, small = (
        TaskState(task, begins=TaskStart(task, target, frozenset()))
        for task in (task_of("large", half_matmul(1024)), matmul_task())
    )
    assert device_reference(large, target) is not None
    assert device_reference(small, target) is None
    assert device_reference(large, place.target) is None


class Specs(NoDevice):
    """Keeps the workload of each candidate."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.specs: list[WorkloadSpec] = []

    def submit(self, artifact: BuiltArtifact, spec: WorkloadSpec, on_measured: OnMeasured) -> None:
        assert spec.reference is not None
        assert Path(str(spec.reference.content)).exists()
        self.specs.append(spec)
        super().submit(artifact, spec, on_measured)


@pytest.mark.quick_cases("True")
@pytest.mark.parametrize("on_device", [True, False])
def test_a_run_builds_both_references_of_a_large_task(database: TuningDatabase, on_device: bool) -> None:
    target = resolve_target("cuda:sm_90a")
    backend = Specs(detect_environment(target))
    tune(
        [task_of("large", half_matmul(1024)), task_of("small", half_matmul(64))],
        target=target,
        database=database,
        environment=detect_environment(target),
        still_true=all_records,
        options=TuningOptions(
            trials=2, workers=2, device_references=on_device, routes=frozenset({Route.TEMPLATE}), finals=0
        ),
        machine=partial(this_machine, backend=backend),
    )
    large = [spec for spec in backend.specs if spec.reference_on_device]
    assert bool(large) is on_device
    assert all(spec.host_reference is not None for spec in large)
    small = [spec for spec in backend.specs if not spec.reference_on_device]
    assert small
    assert all(spec.host_reference is None for spec in small)


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device")
def test_a_gpu_and_a_cpu_agree_on_what_is_right(database: TuningDatabase, caplog: pytest.LogCaptureFixture) -> None:
    """No candidate is refused, and none had to appeal."""
    target = resolve_target("cuda")
    summary = tune(
        [task_of("large", half_matmul(1024))],
        target=target,
        database=database,
        environment=detect_environment(target),
        still_true=all_records,
        options=TuningOptions(trials=4, workers=2, routes=frozenset({Route.TEMPLATE}), finals=2),
    )
    (result,) = summary.tasks
    assert result.valid == 4
    assert result.before_us is not None
    assert not any("reference" in record.message for record in caplog.records)


def test_large_arguments_repeat_numbers_and_no_row_is_like_another() -> None:
    specs = [ArgumentSpec((9, 1 << 20), "float16"), ArgumentSpec((9, 1 << 20), "int8"), ArgumentSpec((8,), "float32")]
    floats, integers, small = make_arrays(specs, {1: 100}, 5)
    for rows in (floats, integers):
        assert not any((rows[0] == row).mean() > 0.1 for row in rows[1:])
        assert (rows.reshape(-1)[:1000] == rows.reshape(-1)[4_194_301:4_195_301]).all()
    assert floats.astype(np.float32).std() == pytest.approx(3**-0.5, rel=0.01)
    assert np.unique(small).size == 8
    other, fresh = make_arrays([specs[2], specs[2]], {}, 6)
    assert np.intersect1d(small, other).size == np.intersect1d(other, fresh).size == 0
