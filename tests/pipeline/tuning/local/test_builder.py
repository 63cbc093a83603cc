from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import tvm
from tvm import te
from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.tuning.local.build_pool import BuilderLimits
from relaxtune.pipeline.tuning.local.builder import PoolBuilder
from relaxtune.pipeline.tuning.measure.failure import StopSignal, read_failure
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Status
from tests.pipeline.tuning.tuning_cases import (
    Place,
    add_one_mod,
    extern_mod,
    matmul_mod,
    slow_build_mod,
    unbuildable_mod,
)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolBuilder]:
    with closing(PoolBuilder(1, tmp_path_factory.mktemp("artifacts"))) as opened:
        yield opened


def inputs(place: Place, *mods: tvm.ir.IRModule) -> list[ms.builder.BuilderInput]:
    return [ms.builder.BuilderInput(mod, place.target.target) for mod in mods]


def test_build_returns_a_loadable_artifact(builder: PoolBuilder, place: Place) -> None:
    results = builder.build(inputs(place, add_one_mod(), matmul_mod()))
    assert [result.error_msg for result in results] == [None, None]
    module = tvm.runtime.load_module(str(results[0].artifact_path))
    a = tvm.runtime.tensor([float(i) for i in range(16)]).numpy().astype("float32")
    out = tvm.runtime.empty((16,), "float32")
    module["main"](tvm.runtime.tensor(a), out)
    assert (out.numpy() == a + 1).all()


@pytest.mark.parametrize("function", ["exp", "erf", "tanh"])
def test_candidates_compute_functions_as_artifacts_do(builder: PoolBuilder, place: Place, function: str) -> None:
    a = te.placeholder((16,), "float32", name="a")
    out = te.compute((16,), lambda i: getattr(tvm.tirx, function)(a[i]), name="out")
    (result,) = builder.build(inputs(place, tvm.IRModule({"main": te.create_prim_func([a, out])})))
    assert result.error_msg is None
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", str(result.artifact_path)], capture_output=True, text=True, check=True
    ).stdout
    # A call of the C library's scalar function would be measured where an artifact has vector arithmetic.
    assert f"{function}f" not in symbols


def test_build_tells_the_error_text_when_the_compiler_refuses(builder: PoolBuilder, place: Place) -> None:
    good, failed, also_good = builder.build(inputs(place, add_one_mod(), unbuildable_mod(), add_one_mod(2.0)))
    assert good.error_msg is None
    assert also_good.error_msg is None
    status, text = read_failure(str(failed.error_msg), Status.OK)
    assert status is Status.BUILD_ERROR
    assert "Traceback" in text


def test_build_goes_on_when_a_worker_is_killed(builder: PoolBuilder, place: Place) -> None:
    assert builder.build(inputs(place, add_one_mod()))[0].error_msg is None
    restarts = builder.pool.restarts
    os.kill(builder.pool.pids[0], signal.SIGKILL)
    time.sleep(0.2)
    assert builder.build(inputs(place, add_one_mod()))[0].error_msg is None
    assert builder.pool.restarts == restarts + 1


def test_build_reports_a_timeout_and_replaces_the_worker(tmp_path: Path, place: Place) -> None:
    with closing(PoolBuilder(1, tmp_path, BuilderLimits(timeout_s=0.001))) as builder:
        first = builder.pool.pids[0]
        status, text = read_failure(str(builder.build(inputs(place, slow_build_mod()))[0].error_msg), Status.OK)
        assert status is Status.TIMEOUT
        assert "build_timeout_s" in text
        assert builder.pool.pids[0] != first
        assert not psutil.pid_exists(first)


def test_build_kills_a_worker_that_takes_too_much_memory(tmp_path: Path, place: Place) -> None:
    with closing(PoolBuilder(1, tmp_path, BuilderLimits(build_rss_max_bytes=1 << 20))) as builder:
        first = builder.pool.pids[0]
        status, text = read_failure(str(builder.build(inputs(place, slow_build_mod()))[0].error_msg), Status.OK)
        assert status is Status.BUILD_ERROR
        assert "1 are allowed (build_rss_max_bytes)" in text
        assert not psutil.pid_exists(first)


def test_build_makes_gpu_code_like_an_artifact(builder: PoolBuilder) -> None:
    cuda = resolve_target("cuda:sm_90a").target
    bound = apply_fallback(add_one_mod(), cuda)
    good, unbound = builder.build([ms.builder.BuilderInput(mod, cuda) for mod in (bound, add_one_mod())])
    assert good.error_msg is None
    data = Path(str(good.artifact_path)).read_bytes()
    assert b"main_kernel" in data
    assert b"__global__" not in data
    assert "have blocks that no GPU thread runs" in str(unbound.error_msg)


def test_build_replaces_a_worn_worker(tmp_path: Path, place: Place) -> None:
    with closing(PoolBuilder(1, tmp_path, BuilderLimits(builds_max=2))) as builder:
        first = builder.pool.pids[0]
        results = builder.build(inputs(place, add_one_mod(), add_one_mod(2.0), add_one_mod(3.0)))
        assert [result.error_msg for result in results] == [None] * 3
        assert builder.pool.restarts == 1
        assert builder.pool.pids[0] != first


def test_build_goes_on_after_a_full_disk(tmp_path: Path, place: Place) -> None:
    with closing(PoolBuilder(1, tmp_path)) as builder:
        # Everything written there fails as on a full disk.
        (tmp_path / "candidate-000001.o").symlink_to("/dev/full")
        full, fine = builder.build(inputs(place, add_one_mod(), add_one_mod()))
    assert read_failure(str(full.error_msg), Status.OK)[0] is Status.BUILD_ERROR
    assert fine.error_msg is None


def test_build_gives_up_when_the_run_is_stopped(tmp_path: Path, place: Place) -> None:
    stop = StopSignal()
    with closing(PoolBuilder(1, tmp_path, stop=stop)) as builder:
        stop.request()
        assert str(builder.build(inputs(place, add_one_mod()))[0].error_msg).startswith("cancelled")


def test_close_leaves_no_process(tmp_path: Path, place: Place) -> None:
    builder = PoolBuilder(2, tmp_path)
    pids = builder.pool.pids
    builder.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_build_links_code_with_external_calls(builder: PoolBuilder, place: Place) -> None:
    assert builder.build(inputs(place, extern_mod("abs", -3)))[0].error_msg is None
