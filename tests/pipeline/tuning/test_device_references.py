"""References that the device makes, and candidates that appeal from them to the CPU's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

import relaxtune.pipeline.tuning.local.runner as runner_module
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.tuning.local.builder import PoolBuilder
from relaxtune.pipeline.tuning.local.runner import ProcessRunner
from relaxtune.pipeline.tuning.measure.arguments import ArgumentSpec, make_arrays
from relaxtune.pipeline.tuning.measure.failure import read_failure
from relaxtune.pipeline.tuning.measure.notes import CandidateNote, attach_note, read_note
from relaxtune.pipeline.tuning.measure.requests import host_reference_file, may_appeal, reference_file
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.plan.baseline import device_reference_mod
from relaxtune.pipeline.tuning.plan.state import TaskState
from relaxtune.pipeline.tuning.session import tune
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.contract import TuningDatabase
from relaxtune.tuning_db.records import Route, Status
from tests.pipeline.tuning.test_gpu import Told, half_matmul
from tests.pipeline.tuning.tuning_cases import Place, add_one_mod, args_info, extern_mod, matmul_task, task_of

QUICK = MeasureOptions(repeats=2, contender_repeats=0, min_repeat_s=0.0005, threads=1)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolBuilder]:
    with closing(PoolBuilder(1, tmp_path_factory.mktemp("artifacts"))) as opened:
        yield opened


@pytest.fixture
def runner() -> Iterator[ProcessRunner]:
    with closing(ProcessRunner("cpu:0", QUICK, timeout_s=10.0)) as opened:
        yield opened


def built(builder: PoolBuilder, place: Place, offset: float, note: CandidateNote | None = None) -> str:
    mod = add_one_mod(offset)
    noted = mod if note is None else attach_note(mod, note)
    (result,) = builder.build([ms.builder.BuilderInput(noted, place.target.target)])
    assert result.error_msg is None
    return str(result.artifact_path)


def note_with(builder: PoolBuilder, place: Place, on_device: float, on_host: float | None) -> CandidateNote:
    """Return a note whose device and host compute `A + on_device` and `A + on_host`."""
    host = None if on_host is None else built(builder, place, on_host)
    return CandidateNote(
        "add", {}, (1,), built(builder, place, on_device), True, host_reference=host, rtol=1e-6, atol=1e-6
    )


def candidates(builder: PoolBuilder, place: Place, note: CandidateNote, *offsets: float) -> list[ms.runner.RunnerInput]:
    info = args_info(add_one_mod())
    return [ms.runner.RunnerInput(built(builder, place, offset, note), "llvm", info) for offset in offsets]


def statuses(results: list[ms.runner.RunnerResult]) -> list[Status]:
    return [
        Status.OK if result.error_msg is None else read_failure(str(result.error_msg), Status.RUN_ERROR)[0]
        for result in results
    ]


def test_who_agrees_with_the_device_asks_nobody_else(runner: ProcessRunner, builder: PoolBuilder, place: Place) -> None:
    note = note_with(builder, place, 1.0, 1.0)
    (right,) = candidates(builder, place, note, 1.0)
    assert statuses([one.result() for one in runner.run([right])]) == [Status.OK]
    assert may_appeal(runner.process.request(right))


def test_a_wrong_reference_of_the_device_refuses_nobody(
    runner: ProcessRunner, builder: PoolBuilder, place: Place
) -> None:
    note = note_with(builder, place, 3.0, 1.0)
    right, wrong, again = candidates(builder, place, note, 1.0, 2.0, 1.0)
    results = [one.result() for one in runner.run([right, wrong, again])]
    assert statuses(results) == [Status.OK, Status.WRONG_RESULT, Status.OK]
    request = runner.process.request(right)
    assert not may_appeal(request)
    assert reference_file(request, 0) == host_reference_file(request, 0)
    # What agreed with the device alone is found from now on.
    (like_device,) = candidates(builder, place, note, 3.0)
    assert statuses([one.result() for one in runner.run([like_device])]) == [Status.WRONG_RESULT]


def test_a_wrong_candidate_is_judged_by_the_host(runner: ProcessRunner, builder: PoolBuilder, place: Place) -> None:
    (wrong,) = candidates(builder, place, note_with(builder, place, 1.0, 1.0), 2.0)
    (result,) = [one.result() for one in runner.run([wrong])]
    assert statuses([result]) == [Status.WRONG_RESULT]
    assert "16 of 16 elements are off" in str(result.error_msg)
    assert not may_appeal(runner.process.request(wrong))


def test_without_a_host_the_device_has_the_last_word(runner: ProcessRunner, builder: PoolBuilder, place: Place) -> None:
    right, wrong = candidates(builder, place, note_with(builder, place, 1.0, None), 1.0, 2.0)
    assert statuses([one.result() for one in runner.run([right, wrong])]) == [Status.OK, Status.WRONG_RESULT]


def test_a_host_that_fails_leaves_the_devices_verdict(
    runner: ProcessRunner, builder: PoolBuilder, place: Place, tmp_path: Path
) -> None:
    note = dataclasses.replace(note_with(builder, place, 1.0, None), host_reference=str(tmp_path / "no-such.so"))
    wrong, right, other = candidates(builder, place, note, 2.0, 1.0, 3.0)
    results = [one.result() for one in runner.run([wrong, right, other])]
    assert statuses(results) == [Status.WRONG_RESULT, Status.OK, Status.WRONG_RESULT]


def test_a_host_that_takes_too_long_is_asked_once(
    builder: PoolBuilder, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_APPEAL_TIMEOUT_S", 1.0)
    (slow,) = builder.build([ms.builder.BuilderInput(extern_mod("sleep", 100), place.target.target)])
    note = dataclasses.replace(note_with(builder, place, 1.0, None), host_reference=str(slow.artifact_path))
    with closing(ProcessRunner("cpu:0", QUICK, timeout_s=10.0)) as runner:
        results = [one.result() for one in runner.run(candidates(builder, place, note, 2.0, 3.0, 1.0))]
        assert statuses(results) == [Status.WRONG_RESULT, Status.WRONG_RESULT, Status.OK]
        assert runner.process.restarts == 1


def test_finalists_appeal_too(runner: ProcessRunner, builder: PoolBuilder, place: Place) -> None:
    results = runner.compare(candidates(builder, place, note_with(builder, place, 3.0, 1.0), 1.0, 1.0, 2.0), 2)
    assert results is not None
    assert statuses(results) == [Status.OK, Status.OK, Status.WRONG_RESULT]


def test_only_large_tasks_of_a_gpu_are_left_to_the_device(place: Place) -> None:
    target = resolve_target("cuda:sm_90a")
    large, small = TaskState(task_of("large", half_matmul(1024))), TaskState(matmul_task())
    assert device_reference_mod(large, target) is not None
    assert device_reference_mod(small, target) is None
    assert device_reference_mod(large, place.target) is None


@derived_object
class Notes(ms.runner.PyRunner):
    """Keeps what is told of each candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[CandidateNote] = []

    def run(self, inputs: list[ms.runner.RunnerInput]) -> list[ms.runner.RunnerFuture]:
        for one in inputs:
            note = read_note(str(one.artifact_path))
            assert note is not None
            assert note.reference is not None
            assert Path(note.reference).exists()
            self.notes.append(note)
        return [Told(1e-5) for _ in inputs]


@pytest.mark.parametrize("on_device", [True, False])
def test_a_run_builds_both_references_of_a_large_task(database: TuningDatabase, on_device: bool) -> None:
    target, runner = resolve_target("cuda:sm_90a"), Notes()
    tune(
        [task_of("large", half_matmul(1024)), task_of("small", half_matmul(64))],
        target=target,
        database=database,
        environment=detect_environment(target),
        options=TuningOptions(
            trials=2, workers=2, device_references=on_device, routes=frozenset({Route.TEMPLATE}), finals=0
        ),
        runner=runner,
    )
    large = [note for note in runner.notes if note.reference_on_device]
    assert bool(large) is on_device
    assert all(note.host_reference is not None for note in large)
    small = [note for note in runner.notes if not note.reference_on_device]
    assert small
    assert all(note.host_reference is None for note in small)


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device")
def test_a_gpu_and_a_cpu_agree_on_what_is_right(database: TuningDatabase, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is refused, and nobody had to appeal."""
    target = resolve_target("cuda")
    summary = tune(
        [task_of("large", half_matmul(1024))],
        target=target,
        database=database,
        environment=detect_environment(target),
        options=TuningOptions(trials=4, workers=2, routes=frozenset({Route.TEMPLATE}), finals=2),
    )
    (result,) = summary.tasks
    assert result.valid == 4
    assert result.before_us is not None
    assert not any("reference" in record.message for record in caplog.records)


def test_the_numbers_of_a_large_output_repeat_and_those_of_an_input_do_not() -> None:
    specs = [
        ArgumentSpec((3, 1 << 20), "float16"),
        ArgumentSpec((3, 1 << 20), "float16"),
        ArgumentSpec((8,), "float32"),
    ]
    read, written, small = make_arrays(specs, {}, 5, outputs=(1, 2))
    assert (written[0] == written[1]).all()
    assert not (read[0] == read[1]).all()
    assert written.astype(np.float32).std() == pytest.approx(3**-0.5, rel=0.01)
    assert np.unique(small).size == 8
