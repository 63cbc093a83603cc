from __future__ import annotations

import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import psutil
import pytest
import tvm
from tvm import te

from relaxtune.pipeline.tuning.local.build_pool import BuilderLimits, BuildPool
from relaxtune.pipeline.tuning.measure.backend import Built, Unmeasured, build_all
from relaxtune.pipeline.tuning.measure.recipe import Buildable, Recipe
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.workers.machine_faults import how_it_failed
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.base import TemplateError
from relaxtune.tuning_db.records import Status
from tests.pipeline.tuning.tuning_cases import (
    Place,
    add_one_mod,
    extern_mod,
    matmul_mod,
    slow_build_mod,
    unbuildable_mod,
)


@dataclass(frozen=True)
class TellingRecipe(Recipe):
    """A recipe that fails with what its process sees of the GPUs, and where it keeps what it needs for a while."""

    def make(self) -> tvm.ir.IRModule:
        raise TemplateError(
            f"GPUs: {os.environ.get('CUDA_VISIBLE_DEVICES')!r}; files: {tempfile.gettempdir()}; niceness: {os.nice(0)}"
        )


@dataclass(frozen=True)
class FaultyMachineRecipe(Recipe):
    """A recipe for which its process lacks what `decision` says."""

    def make(self) -> tvm.ir.IRModule:
        match self.decision:
            case "memory":
                np.empty(1 << 60, np.uint8)
            case "memory of TVM":
                tvm.runtime.empty((1 << 60,), "uint8")
            case "files":
                _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
                try:
                    Path(os.devnull).read_bytes()
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            case "a linker":
                killed = subprocess.run(["sh", "-c", "kill -9 $$"], check=False)
                raise OSError(how_it_failed("ld", killed.returncode, ""))
        raise AssertionError("nothing was lacking")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildPool]:
    with closing(BuildPool(1, tmp_path_factory.mktemp("artifacts"))) as opened:
        yield opened


def build(pool: BuildPool, place: Place, *mods: Buildable) -> list[Built]:
    return build_all(pool, mods, place.target.target)


def pids_of(pool: BuildPool) -> list[int]:
    return [worker.pid for worker in pool._pool.workers]


def test_build_returns_a_loadable_artifact(pool: BuildPool, place: Place) -> None:
    results = build(pool, place, add_one_mod(), matmul_mod())
    assert [result.status for result in results] == [Status.OK] * 2
    module = tvm.runtime.load_module(results[0].artifact.content)
    a = tvm.runtime.tensor([float(i) for i in range(16)]).numpy().astype("float32")
    out = tvm.runtime.empty((16,), "float32")
    module["main"](tvm.runtime.tensor(a), out)
    assert (out.numpy() == a + 1).all()


def test_a_build_process_sees_no_gpu(pool: BuildPool, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping a module of CUDA code sets the GPU up, in every build process at the same time."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (result,) = build(pool, place, TellingRecipe(b"", place.target, ""))
    assert "GPUs: ''" in str(result.error)


def test_build_processes_leave_cores_to_those_that_measure(pool: BuildPool, place: Place) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    (result,) = build(pool, place, TellingRecipe(b"", place.target, ""))
    assert f"niceness: {min(own + 5, 19)}" in str(result.error)


def test_what_a_killed_build_process_leaves_goes_with_the_directory_of_its_pool(tmp_path: Path, place: Place) -> None:
    with closing(BuildPool(1, tmp_path)) as pool:
        (result,) = build(pool, place, TellingRecipe(b"", place.target, ""))
    assert f"files: {tmp_path}" in str(result.error)


@pytest.mark.parametrize("function", ["exp", "erf", "tanh"])
def test_candidates_compute_functions_as_artifacts_do(pool: BuildPool, place: Place, function: str) -> None:
    a = te.placeholder((16,), "float32", name="a")
    out = te.compute((16,), lambda i: getattr(tvm.tirx, function)(a[i]), name="out")
    (result,) = build(pool, place, tvm.IRModule({"main": te.create_prim_func([a, out])}))
    assert result.status is Status.OK
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", result.artifact.content], capture_output=True, text=True, check=True
    ).stdout
    # A call of the C library's scalar function would be measured where an artifact has vector arithmetic.
    assert f"{function}f" not in symbols


def test_build_tells_the_error_text_when_the_compiler_refuses(pool: BuildPool, place: Place) -> None:
    good, failed, also_good = build(pool, place, add_one_mod(), unbuildable_mod(), add_one_mod(2.0))
    assert good.status is Status.OK
    assert also_good.status is Status.OK
    assert failed.status is Status.BUILD_ERROR
    assert "Traceback" in failed.error


def test_build_goes_on_when_a_worker_is_killed(pool: BuildPool, place: Place) -> None:
    assert build(pool, place, add_one_mod())[0].status is Status.OK
    restarts = pool.restarts
    os.kill(pids_of(pool)[0], signal.SIGKILL)
    time.sleep(0.2)
    assert build(pool, place, add_one_mod())[0].status is Status.OK
    assert pool.restarts == restarts + 1


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "status"), [(1, Status.TIMEOUT), (2, Unmeasured.LOST)])
def test_a_build_killed_from_outside_is_tried_once_more_and_never_called_an_error(
    tmp_path: Path, place: Place, kills: int, status: Status | Unmeasured
) -> None:
    with closing(BuildPool(1, tmp_path, BuilderLimits(timeout_s=2.0))) as pool:
        answers: SimpleQueue[Built] = SimpleQueue()
        pool.submit(slow_build_mod(), place.target.target, answers.put)
        for _ in range(kills):
            until = time.monotonic() + 60
            (worker,) = pool._pool.workers
            while not (worker._child and worker._child.ready) and time.monotonic() < until:
                time.sleep(0.02)
            time.sleep(0.3)
            (killed,) = pids_of(pool)
            os.kill(killed, signal.SIGKILL)
            # Its successor may have the job before one looks again.
            while pids_of(pool) == [killed] and time.monotonic() < until:
                time.sleep(0.02)
        assert answers.get(timeout=60).status is status
        assert build(pool, place, add_one_mod())[0].status is Status.OK


def test_build_reports_a_timeout_and_replaces_the_worker(tmp_path: Path, place: Place) -> None:
    with closing(BuildPool(1, tmp_path, BuilderLimits(timeout_s=0.001))) as pool:
        first = pids_of(pool)[0]
        (late,) = build(pool, place, slow_build_mod())
        assert late.status is Status.TIMEOUT
        assert "build_timeout_s" in late.error
        assert pids_of(pool)[0] != first
        assert not psutil.pid_exists(first)


def test_build_kills_a_worker_that_takes_too_much_memory(tmp_path: Path, place: Place) -> None:
    with closing(BuildPool(1, tmp_path, BuilderLimits(build_rss_max_bytes=1 << 20))) as pool:
        first = pids_of(pool)[0]
        (late,) = build(pool, place, slow_build_mod())
        assert late.status is Status.BUILD_ERROR
        assert "1 are allowed (build_rss_max_bytes)" in late.error
        assert not psutil.pid_exists(first)


def test_build_makes_gpu_code_like_an_artifact(pool: BuildPool) -> None:
    cuda = resolve_target("cuda:sm_90a").target
    bound = apply_fallback(add_one_mod(), cuda)
    good, unbound = build_all(pool, [bound, add_one_mod()], cuda)
    assert good.status is Status.OK
    data = Path(good.artifact.content).read_bytes()
    assert b"main_kernel" in data
    assert b"__global__" not in data
    assert "have blocks that no GPU thread runs" in unbound.error


def test_build_replaces_a_worn_worker(tmp_path: Path, place: Place) -> None:
    with closing(BuildPool(1, tmp_path, BuilderLimits(builds_max=2))) as pool:
        first = pids_of(pool)[0]
        results = build(pool, place, add_one_mod(), add_one_mod(2.0), add_one_mod(3.0))
        assert [result.status for result in results] == [Status.OK] * 3
        assert pool.restarts == 1
        assert pids_of(pool)[0] != first


def test_build_goes_on_after_a_full_disk(tmp_path: Path, place: Place) -> None:
    with closing(BuildPool(1, tmp_path)) as pool:
        # Everything written there fails as on a full disk.
        (tmp_path / "candidate-000001.o").symlink_to("/dev/full")
        full, fine = build(pool, place, add_one_mod(), add_one_mod())
    # The disk's fault, and so none of the candidate's.
    assert full.status is Unmeasured.LOST
    assert fine.status is Status.OK


@pytest.mark.parametrize("lacking", ["memory", "memory of TVM", "files", "a linker"])
def test_what_the_machine_lacks_is_no_fact_about_a_kernel(pool: BuildPool, place: Place, lacking: str) -> None:
    (lost,) = build(pool, place, FaultyMachineRecipe(b"", place.target, lacking))
    assert lost.status is Unmeasured.LOST, lost.error
    assert build(pool, place, add_one_mod())[0].status is Status.OK


def test_build_gives_up_when_the_run_is_stopped(tmp_path: Path, place: Place) -> None:
    stop = StopSignal()
    with closing(BuildPool(1, tmp_path, stop=stop)) as pool:
        stop.request()
        assert build(pool, place, add_one_mod())[0].status is Unmeasured.STOPPED


def test_close_leaves_no_process(tmp_path: Path, place: Place) -> None:
    pool = BuildPool(2, tmp_path)
    pids = pids_of(pool)
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_build_links_code_with_external_calls(pool: BuildPool, place: Place) -> None:
    assert build(pool, place, extern_mod("abs", -3))[0].status is Status.OK
