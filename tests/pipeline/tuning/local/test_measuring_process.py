from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tvm

import relaxtune.pipeline.tuning.local.measuring_process as process_module
from relaxtune.pipeline.tuning.local.backend import LocalBackend
from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured, pack
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.validate.tolerances import KernelTolerance
from relaxtune.pipeline.workers import limits as limits_module
from relaxtune.pipeline.workers.worker import Worker
from relaxtune.tuning_db.records import Status
from tests.pipeline.tuning.tuning_cases import Place, add_one_mod, built, extern_mod, far_mod, measure, spec_of

QUICK = MeasureOptions(repeats=3, contender_repeats=0, min_repeat_s=0.0005, threads=1)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildPool]:
    with closing(BuildPool(1, tmp_path_factory.mktemp("artifacts"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def backend(place: Place) -> Iterator[LocalBackend]:
    with closing(LocalBackend(["cpu:0"], place.environment, QUICK, timeout_s=3.0)) as opened:
        yield opened


def candidate(
    pool: BuildPool, place: Place, mod: tvm.ir.IRModule, spec: WorkloadSpec | None = None
) -> tuple[BuiltArtifact, WorkloadSpec]:
    return built(pool, place.target.target, mod), spec or spec_of(mod)


def checked(pool: BuildPool, place: Place, workload: str = "add-one") -> WorkloadSpec:
    """Return a workload whose candidates are compared with `A + 1`."""
    reference = built(pool, place.target.target, add_one_mod())
    return spec_of(add_one_mod(), workload, reference=reference, tolerance=KernelTolerance(1e-6, 1e-6))


def test_measure_returns_every_raw_latency_and_where_it_was_measured(
    backend: LocalBackend, pool: BuildPool, place: Place
) -> None:
    (outcome,) = measure(backend, candidate(pool, place, add_one_mod(), checked(pool, place)))
    assert outcome.status is Status.OK
    assert len(outcome.seconds) == QUICK.repeats
    assert all(0 < value < 1 for value in outcome.seconds)
    assert outcome.environment == place.environment
    assert outcome.duration_s > 0


def test_measure_tells_a_wrong_result(backend: LocalBackend, pool: BuildPool, place: Place) -> None:
    (outcome,) = measure(backend, candidate(pool, place, add_one_mod(2.0), checked(pool, place)))
    assert outcome.status is Status.WRONG_RESULT
    assert "16 of 16 elements are off" in str(outcome.error)


def test_artifacts_may_come_as_bytes(backend: LocalBackend, pool: BuildPool, place: Place) -> None:
    artifact, spec = candidate(pool, place, add_one_mod(), checked(pool, place, "bytes"))

    def as_bytes(one: BuiltArtifact | None) -> BuiltArtifact:
        assert one is not None
        return replace(one, content=pack(Path(str(one.content)).read_bytes()))

    away = as_bytes(artifact)
    there = replace(spec, reference=as_bytes(spec.reference))
    damaged = replace(away, content=pack(b"no shared object"), sha256="0" * 64)
    good, bad = measure(backend, (away, there), (damaged, there))
    assert good.status is Status.OK
    assert bad.status is Unmeasured.LOST
    assert "expected sha256 0000" in str(bad.error)


@pytest.mark.parametrize(
    ("symbol", "arguments", "status", "text"),
    [
        ("abort", (), Status.RUN_ERROR, "died of signal SIGABRT"),
        ("raise", (11,), Status.RUN_ERROR, "died of signal SIGSEGV"),
        ("_exit", (7,), Status.RUN_ERROR, "ended with exit status 7"),
        ("sleep", (100,), Status.TIMEOUT, "run_timeout_s"),
        ("no_such_function", (), Status.RUN_ERROR, "no_such_function"),
    ],
)
def test_measuring_goes_on_when_a_candidate_kills_or_blocks_the_process(
    backend: LocalBackend,
    pool: BuildPool,
    place: Place,
    symbol: str,
    arguments: tuple[int, ...],
    status: Status,
    text: str,
) -> None:
    bad = candidate(pool, place, extern_mod(symbol, *arguments))
    failed, after = measure(backend, bad, candidate(pool, place, add_one_mod()))
    assert failed.status is status
    assert text in str(failed.error)
    assert after.status is Status.OK


def test_measuring_goes_on_when_a_candidate_writes_out_of_bounds(
    backend: LocalBackend, pool: BuildPool, place: Place
) -> None:
    failed, after = measure(backend, candidate(pool, place, far_mod()), candidate(pool, place, add_one_mod()))
    assert failed.status is Status.RUN_ERROR
    assert "died of signal SIG" in str(failed.error)
    assert after.status is Status.OK


def test_a_process_killed_from_outside_is_no_failure_of_its_candidate(
    backend: LocalBackend, pool: BuildPool, place: Place
) -> None:
    good = candidate(pool, place, add_one_mod())
    assert measure(backend, good)[0].status is Status.OK
    os.kill(backend.processes[0].pid, signal.SIGKILL)
    assert measure(backend, good)[0].status is Status.OK
    # Whatever kills it, SIGKILL is no crash.
    killed, after = measure(backend, candidate(pool, place, extern_mod("raise", int(signal.SIGKILL))), good)
    assert killed.status is Unmeasured.LOST
    assert "died of signal SIGKILL" in str(killed.error)
    assert after.status is Status.OK


def test_a_disk_too_full_for_a_reference_is_no_failure_of_a_candidate(
    backend: LocalBackend, pool: BuildPool, place: Place
) -> None:
    assert measure(backend, candidate(pool, place, add_one_mod()))[0].status is Status.OK
    spec = checked(pool, place, "full")
    assert spec.reference is not None
    for seed in range(4):
        # Everything written there fails as on a full disk.
        partial = f"{spec.reference.content!s}.{seed}.{backend.processes[0].pid}.partial"
        Path(partial).symlink_to("/dev/full")
    (lost,) = measure(backend, candidate(pool, place, add_one_mod(), spec))
    assert lost.status is Unmeasured.LOST
    assert "No space left on device" in str(lost.error)


def test_memory_too_small_for_a_reference_is_no_failure_of_a_candidate(
    backend: LocalBackend, pool: BuildPool, place: Place
) -> None:
    spec = checked(pool, place, "large")
    large = replace(spec, arguments=tuple(replace(one, shape=(1 << 58,)) for one in spec.arguments))
    (lost,) = measure(backend, candidate(pool, place, add_one_mod(), large))
    assert (lost.status, lost.no_reference) == (Unmeasured.LOST, True)
    # Without a reference, it is the candidate's own arguments.
    (lost,) = measure(backend, candidate(pool, place, add_one_mod(), replace(large, reference=None)))
    assert (lost.status, lost.no_reference) == (Unmeasured.LOST, False)
    assert measure(backend, candidate(pool, place, add_one_mod()))[0].status is Status.OK


def test_a_hopeless_candidate_is_timed_once(pool: BuildPool, place: Place) -> None:
    # usleep of 16 times 2 ms is far behind the plain addition of the same workload.
    with closing(LocalBackend(["cpu:0"], place.environment, QUICK, timeout_s=5.0)) as backend:
        fast, slow = measure(
            backend,
            candidate(pool, place, add_one_mod(), spec_of(add_one_mod(), "same")),
            candidate(pool, place, extern_mod("usleep", 2000), spec_of(add_one_mod(), "same")),
        )
    assert len(fast.seconds) == QUICK.repeats
    assert len(slow.seconds) == 1
    assert slow.seconds[0] > 0.03


def test_a_machine_that_slept_leaves_no_timeout(pool: BuildPool, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps by an hour once the candidate has begun, as when everything was stopped meanwhile."""
    slow = candidate(pool, place, extern_mod("usleep", 20_000))
    asked: list[float] = []

    def now() -> float:
        asked.append(time.monotonic())
        return asked[-1] + (3600.0 if asked[-1] - asked[0] > 0.3 else 0.0)

    with closing(LocalBackend(["cpu:0"], place.environment, QUICK, timeout_s=60.0)) as backend:
        assert measure(backend, candidate(pool, place, add_one_mod()))[0].status is Status.OK
        monkeypatch.setattr(limits_module, "time", SimpleNamespace(monotonic=now))
        (outcome,) = measure(backend, slow)
    assert asked[-1] - asked[0] > 0.3
    assert outcome.status is Status.OK


@pytest.mark.slow
def test_measuring_is_given_up_when_the_run_is_stopped(pool: BuildPool, place: Place) -> None:
    stop = StopSignal()
    bad = candidate(pool, place, extern_mod("sleep", 100))
    with closing(LocalBackend(["cpu:0"], place.environment, QUICK, timeout_s=60.0, stop=stop)) as backend:
        began = time.monotonic()
        threading.Timer(2.0, stop.request).start()
        assert measure(backend, bad)[0].status is Unmeasured.STOPPED
        assert time.monotonic() - began < 20


def test_close_leaves_no_process_and_answers_what_is_left(pool: BuildPool, place: Place) -> None:
    backend = LocalBackend(["cpu:0"], place.environment, QUICK)
    pid = backend.processes[0].pid
    assert psutil.pid_exists(pid)
    answers: list[Outcome] = []
    for _ in range(3):
        backend.submit(*candidate(pool, place, extern_mod("sleep", 100)), answers.append)
    backend.close()
    assert not psutil.pid_exists(pid)
    backend.submit(*candidate(pool, place, add_one_mod()), answers.append)
    assert [one.status for one in answers] == [Unmeasured.STOPPED] * 4


def test_without_a_process_the_run_ends(pool: BuildPool, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "MEASURE_MODULE", "relaxtune.pipeline.tuning.no_such_worker")
    good = candidate(pool, place, add_one_mod())
    with closing(LocalBackend(["cpu:0"], place.environment, QUICK)) as backend:
        for _ in range(2):
            (outcome,) = measure(backend, good)
            assert outcome.status is Unmeasured.BROKEN
            assert "failed to start" in str(outcome.error)


def test_a_process_that_the_system_does_not_start_is_no_failure_of_a_candidate(pool: BuildPool, place: Place) -> None:
    good = candidate(pool, place, add_one_mod())
    with closing(LocalBackend(["cpu:0"], place.environment, QUICK)) as backend:
        (process,) = backend.processes
        process._worker.close()
        process._worker = Worker(process_module.MEASURE_MODULE, python=Path("/nowhere/python"))
        (outcome,) = measure(backend, good)
    assert outcome.status is Unmeasured.LOST
    assert "/nowhere/python does not start: No such file" in str(outcome.error)
