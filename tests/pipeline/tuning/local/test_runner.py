from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import tvm
from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.tuning.local.builder import PoolBuilder
from relaxtune.pipeline.tuning.local.runner import ProcessRunner
from relaxtune.pipeline.tuning.measure.failure import StopSignal, read_failure
from relaxtune.pipeline.tuning.measure.notes import CandidateNote, attach_note
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.tuning_db.records import Status
from tests.pipeline.tuning.tuning_cases import Place, add_one_mod, args_info, extern_mod, far_mod

QUICK = MeasureOptions(repeats=3, contender_repeats=0, min_repeat_s=0.0005, threads=1)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolBuilder]:
    with closing(PoolBuilder(1, tmp_path_factory.mktemp("artifacts"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def runner() -> Iterator[ProcessRunner]:
    with closing(ProcessRunner("cpu:0", QUICK, timeout_s=3.0)) as opened:
        yield opened


def candidate(
    builder: PoolBuilder, place: Place, mod: tvm.ir.IRModule, note: CandidateNote | None = None
) -> ms.runner.RunnerInput:
    noted = mod if note is None else attach_note(mod, note)
    result = builder.build([ms.builder.BuilderInput(noted, place.target.target)])[0]
    assert result.error_msg is None
    return ms.runner.RunnerInput(str(result.artifact_path), "llvm", args_info(mod))


def measure(runner: ProcessRunner, *inputs: ms.runner.RunnerInput) -> list[ms.runner.RunnerResult]:
    return [future.result() for future in runner.run(list(inputs))]


def reference_note(builder: PoolBuilder, place: Place) -> CandidateNote:
    reference = candidate(builder, place, add_one_mod()).artifact_path
    return CandidateNote("add-one", {}, (1,), str(reference), rtol=1e-6, atol=1e-6)


def test_run_returns_every_raw_latency(runner: ProcessRunner, builder: PoolBuilder, place: Place) -> None:
    note = reference_note(builder, place)
    (result,) = measure(runner, candidate(builder, place, add_one_mod(), note))
    assert result.error_msg is None
    assert len(result.run_secs) == QUICK.repeats
    assert all(0 < float(value) < 1 for value in result.run_secs)


def test_run_tells_a_wrong_result(runner: ProcessRunner, builder: PoolBuilder, place: Place) -> None:
    note = reference_note(builder, place)
    (result,) = measure(runner, candidate(builder, place, add_one_mod(2.0), note))
    status, text = read_failure(str(result.error_msg), Status.OK)
    assert status is Status.WRONG_RESULT
    assert "16 of 16 elements are off" in text


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
def test_run_goes_on_when_a_candidate_kills_or_blocks_the_process(
    runner: ProcessRunner,
    builder: PoolBuilder,
    place: Place,
    symbol: str,
    arguments: tuple[int, ...],
    status: Status,
    text: str,
) -> None:
    bad = candidate(builder, place, extern_mod(symbol, *arguments))
    good = candidate(builder, place, add_one_mod())
    failed, after = measure(runner, bad, good)
    found, error = read_failure(str(failed.error_msg), Status.OK)
    assert found is status
    assert text in error
    assert after.error_msg is None


def test_run_goes_on_when_a_candidate_writes_out_of_bounds(
    runner: ProcessRunner, builder: PoolBuilder, place: Place
) -> None:
    bad = candidate(builder, place, far_mod())
    failed, after = measure(runner, bad, candidate(builder, place, add_one_mod()))
    status, text = read_failure(str(failed.error_msg), Status.OK)
    assert status is Status.RUN_ERROR
    assert "died of signal SIG" in text
    assert after.error_msg is None


def test_run_goes_on_when_the_process_is_killed(runner: ProcessRunner, builder: PoolBuilder, place: Place) -> None:
    good = candidate(builder, place, add_one_mod())
    assert measure(runner, good)[0].error_msg is None
    os.kill(runner.process.pid, signal.SIGKILL)
    failed, after = measure(runner, good, good)
    assert read_failure(str(failed.error_msg), Status.OK)[0] is Status.RUN_ERROR
    assert after.error_msg is None


def test_run_times_a_hopeless_candidate_once(builder: PoolBuilder, place: Place) -> None:
    # usleep of 16 times 2 ms is far behind the plain addition of the same workload.
    with closing(ProcessRunner("cpu:0", QUICK, timeout_s=5.0)) as runner:
        note = CandidateNote("same", {}, (1,))
        fast, slow = measure(
            runner,
            candidate(builder, place, add_one_mod(), note),
            candidate(builder, place, extern_mod("usleep", 2000), note),
        )
    assert len(fast.run_secs) == QUICK.repeats
    assert len(slow.run_secs) == 1
    assert float(slow.run_secs[0]) > 0.03


def test_run_gives_up_when_the_run_is_stopped(builder: PoolBuilder, place: Place) -> None:
    stop = StopSignal()
    bad = candidate(builder, place, extern_mod("sleep", 100))
    with closing(ProcessRunner("cpu:0", QUICK, timeout_s=60.0, stop=stop)) as runner:
        began = time.monotonic()
        (future,) = runner.run([bad])
        threading.Timer(2.0, stop.request).start()
        assert str(future.result().error_msg).startswith("cancelled")
        assert time.monotonic() - began < 20


def test_close_leaves_no_process() -> None:
    runner = ProcessRunner("cpu:0", QUICK)
    pid = runner.process.pid
    assert psutil.pid_exists(pid)
    runner.close()
    assert not psutil.pid_exists(pid)


def test_artifacts_carry_no_note_when_none_is_given(builder: PoolBuilder, place: Place) -> None:
    item = candidate(builder, place, add_one_mod())
    assert not Path(str(item.artifact_path)).with_suffix(".json").exists()
