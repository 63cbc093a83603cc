"""Several devices of this machine, side by side: two processes on the CPU, and two GPUs where there are two."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tvm

from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.tuning.local import devices
from relaxtune.pipeline.tuning.local.backend import LocalBackend, this_machine
from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.local.devices import Device, choose_devices, pinned
from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.progress import ProgressEvent
from relaxtune.pipeline.tuning.session import require_valid, tune
from relaxtune.pipeline.validate.tolerances import KernelTolerance
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import RecordFilter, Route, Status
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.tuning.test_gpu import half_matmul
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
GPUS = [f"cuda:{index}" for index in range(8) if tvm.cuda(index).exist]
needs_two_gpus = pytest.mark.skipif(len(GPUS) < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildPool]:
    with closing(BuildPool(1, tmp_path_factory.mktemp("artifacts"))) as opened:
        yield opened


@pytest.fixture
def backend(place: Place) -> Iterator[LocalBackend]:
    with closing(LocalBackend(["cpu:0", "cpu:0"], place.environment, QUICK, timeout_s=20.0)) as opened:
        yield opened


class Answers:
    """Keeps answers in the order in which they come."""

    def __init__(self) -> None:
        self.came: list[tuple[str, Outcome]] = []
        self._changed = threading.Condition()

    def of(self, name: str) -> Callable[[Outcome], None]:
        def answer(outcome: Outcome) -> None:
            with self._changed:
                self.came.append((name, outcome))
                self._changed.notify_all()

        return answer

    def wait(self, count: int) -> list[tuple[str, Status | Unmeasured]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.came) >= count, timeout=60)
        return [(name, outcome.status) for name, outcome in self.came]


def candidate(pool: BuildPool, place: Place, mod: tvm.ir.IRModule, workload: str) -> tuple[BuiltArtifact, WorkloadSpec]:
    return built(pool, place.target.target, mod), spec_of(mod, workload)


@pytest.mark.slow
def test_a_slow_candidate_delays_none_on_the_other_device(backend: LocalBackend, pool: BuildPool, place: Place) -> None:
    assert backend.capacity == 2
    slow = candidate(pool, place, extern_mod("usleep", 100_000), "slow")
    quick = candidate(pool, place, add_one_mod(), "quick")
    measure(backend, candidate(pool, place, add_one_mod(), "slow"), quick)
    answers = Answers()
    backend.submit(*slow, answers.of("slow"))
    for number in range(3):
        backend.submit(*quick, answers.of(str(number)))
    assert answers.wait(4) == [("0", Status.OK), ("1", Status.OK), ("2", Status.OK), ("slow", Status.OK)]


def test_only_what_is_in_flight_is_lost_with_a_process(backend: LocalBackend, pool: BuildPool, place: Place) -> None:
    # It sends SIGKILL to its own process: what killed that process is not known to be the candidate's fault.
    killing = candidate(pool, place, extern_mod("raise", int(signal.SIGKILL)), "killing")
    quick = candidate(pool, place, add_one_mod(), "quick")
    measure(backend, quick, candidate(pool, place, add_one_mod(), "killing"))
    answers = Answers()
    pids = [process.pid for process in backend.processes]
    backend.submit(*killing, answers.of("killing"))
    for number in range(4):
        backend.submit(*quick, answers.of(str(number)))
    came = dict(answers.wait(5))
    assert came.pop("killing") is Unmeasured.LOST
    assert set(came.values()) == {Status.OK}
    assert [outcome.status for outcome in measure(backend, quick, quick)] == [Status.OK, Status.OK]
    # It was tried once more.
    assert backend.restarts == 2
    assert sum(process.pid == pid for process, pid in zip(backend.processes, pids, strict=True)) == 1


@pytest.mark.slow
def test_a_reference_is_computed_once_and_other_work_goes_on(
    backend: LocalBackend, pool: BuildPool, place: Place, tmp_path: Path
) -> None:
    slow = built(pool, place.target.target, extern_mod("usleep", 50_000))
    spec = replace(spec_of(add_one_mod(), "slow"), reference=slow, tolerance=KernelTolerance(1e-6, 1e-6))
    answers = Answers()
    backend.prepare_reference(spec)
    # Of the same workload: it waits for the reference. Of another: it does not.
    right = built(pool, place.target.target, extern_mod("usleep", 0))
    backend.submit(right, spec, answers.of("same"))
    for number in range(3):
        backend.submit(*candidate(pool, place, add_one_mod(), "other"), answers.of(str(number)))
    assert [name for name, _ in answers.wait(4)] == ["0", "1", "2", "same"]
    assert len(list(Path(str(slow.content)).parent.glob(f"{Path(str(slow.content)).name}.*.pickle"))) == 2


def test_a_device_that_is_gone_leaves_its_work_to_the_others(
    backend: LocalBackend, pool: BuildPool, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = candidate(pool, place, add_one_mod(), "good")
    measure(backend, good, good)

    def gone(*arguments: object) -> None:
        raise RuntimeError("the GPU has fallen off the bus")

    monkeypatch.setattr(backend.processes[0], "measure", gone)
    outcomes = measure(backend, *[good] * 6)
    assert {one.status for one in outcomes} == {Status.OK}
    monkeypatch.setattr(backend.processes[1], "measure", gone)
    (broken,) = measure(backend, good)
    assert broken.status is Unmeasured.BROKEN
    assert broken.error == "the GPU has fallen off the bus"


class KillsAtFirst:
    """Kills a measuring process from outside while candidates are in flight."""

    def __init__(self, backend: LocalBackend) -> None:
        self.backend = backend
        self.killed = 0

    def __call__(self, event: ProgressEvent) -> None:
        if event.done == 2:
            os.kill(self.backend.processes[0].pid, signal.SIGKILL)
            self.killed += 1


def test_a_run_on_two_devices_records_no_failure_for_a_killed_process(
    backend: LocalBackend, place: Place, database: TuningDatabase
) -> None:
    listener = KillsAtFirst(backend)
    summary = tune(
        [matmul_task(32, 64, 32), task_of("add", add_one_mod(size=4096))],
        target=place.target,
        database=database,
        environment=place.environment,
        still_true=all_records,
        options=TuningOptions(trials=12, trials_per_iteration=4, population=16, workers=1, overlap=True, finals=3),
        progress=listener,
        machine=partial(this_machine, backend=backend),
    )
    assert listener.killed == 1
    assert summary.restarts >= 1
    records = database.list_records()
    assert {record.status for record in records} == {Status.OK}
    assert {record.route for record in records} == {Route.METASCHEDULE, Route.FALLBACK}
    assert sum(task.valid for task in summary.tasks) == 12
    assert {record.environment for record in records} == {place.environment}


def test_each_process_is_pinned_to_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert pinned("cuda:1") == Device("cuda:0", {"CUDA_VISIBLE_DEVICES": "1"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8932f937")
    assert pinned("cuda:1") == Device("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"})
    assert pinned("cpu:0") == Device("cpu:0")


def test_all_gpus_of_the_targets_model_are_taken(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"cuda:0": "NVIDIA H200", "cuda:1": "NVIDIA L4", "cuda:2": "NVIDIA H200"}
    monkeypatch.setattr(devices, "_gpu_models", lambda: models)
    target = resolve_target("cuda:sm_90a")
    assert choose_devices(target) == ("cuda:0", "cuda:2")
    assert choose_devices(target, ["cuda:2"]) == ("cuda:2",)
    assert choose_devices(place.target) == ("cpu:0",)
    with pytest.raises(UsageError, match=r"of one model, here NVIDIA H200 \(cuda:0\): cuda:1 is NVIDIA L4"):
        choose_devices(target, ["cuda:0", "cuda:1"])
    for wrong in (["cuda:0", "cuda:0"], ["cuda:7"], ["cpu:0"]):
        with pytest.raises(UsageError, match="expected different ones of cuda:0, cuda:1, cuda:2"):
            choose_devices(target, wrong)
    with pytest.raises(UsageError, match="measured on cpu:0, got cuda:0; leave --devices out"):
        choose_devices(place.target, ["cuda:0"])
    monkeypatch.setattr(devices, "_gpu_models", dict)
    with pytest.raises(UsageError, match="none: no GPU is visible"):
        choose_devices(target, ["cuda:0"])


@pytest.mark.gpu
@needs_two_gpus
def test_two_gpus_measure_side_by_side(database: TuningDatabase) -> None:
    target = resolve_target("cuda")
    environment = detect_environment(target)
    with closing(LocalBackend(GPUS[:2], environment, MeasureOptions())) as backend:
        names = [process.device.environment["CUDA_VISIBLE_DEVICES"] for process in backend.processes]
        assert len(set(names)) == 2
        tasks = [task_of(f"half{size}", half_matmul(size)) for size in (512, 1024)]
        summary = tune(
            tasks,
            target=target,
            database=database,
            environment=environment,
            still_true=all_records,
            options=TuningOptions(trials=16, workers=4, routes=frozenset({Route.TEMPLATE}), finals=3),
            machine=partial(this_machine, backend=backend),
        )
        assert all(process._worker.answered > 2 for process in backend.processes)
    require_valid(summary)
    assert not database.list_records(RecordFilter(status=Status.WRONG_RESULT))
    assert not database.list_records(RecordFilter(status=Status.RUN_ERROR))


@pytest.mark.gpu
@pytest.mark.timing
@needs_two_gpus
def test_two_gpus_agree_on_a_kernel(tmp_path: Path) -> None:
    target = resolve_target("cuda")
    environment = detect_environment(target)
    with closing(BuildPool(1, tmp_path)) as pool:
        mod = add_one_mod(size=16 << 20)
        artifact = built(pool, target.target, apply_fallback(mod, target.target))
    medians = []
    for gpu in GPUS[:2]:
        with closing(LocalBackend([gpu], environment, MeasureOptions(), timeout_s=60.0)) as backend:
            outcomes = measure(backend, *[(artifact, spec_of(mod))] * 5)
        medians.append(sorted(min(one.seconds) for one in outcomes)[2])
    assert medians[0] == pytest.approx(medians[1], rel=0.1)


@pytest.mark.gpu
@pytest.mark.timing
@needs_two_gpus
def test_two_gpus_measure_nearly_twice_as_many(tmp_path: Path) -> None:
    target = resolve_target("cuda")
    environment = detect_environment(target)
    with closing(BuildPool(1, tmp_path)) as pool:
        mod = add_one_mod(size=64 << 20)
        artifact = built(pool, target.target, apply_fallback(mod, target.target))
    options = MeasureOptions(repeats=20, min_repeat_s=0.02)
    seconds = {}
    for count in (1, 2):
        with closing(LocalBackend(GPUS[:count], environment, options, timeout_s=60.0)) as backend:
            measure(backend, *[(artifact, spec_of(mod, str(n))) for n in range(2 * count)])
            began = time.monotonic()
            outcomes = measure(backend, *[(artifact, spec_of(mod, str(n % 2))) for n in range(24)])
            seconds[count] = time.monotonic() - began
            assert {one.status for one in outcomes} == {Status.OK}
    assert seconds[1] / seconds[2] > 1.6
