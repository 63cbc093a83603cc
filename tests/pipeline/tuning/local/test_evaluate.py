from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.tuning.local.build_pool import BuilderLimits, BuildPool
from relaxtune.pipeline.tuning.local.builder import BatchingBuilder
from relaxtune.pipeline.tuning.local.evaluate import Evaluator, Finished, Job, remove_artifact
from relaxtune.pipeline.tuning.local.process import ChildDiedError
from relaxtune.pipeline.tuning.local.runner import ProcessRunner
from relaxtune.pipeline.tuning.measure.clock import BusyClock
from relaxtune.pipeline.tuning.measure.failure import StopSignal
from relaxtune.pipeline.tuning.measure.notes import CandidateNote
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Status
from tests.pipeline.tuning.tuning_cases import Place, add_one_mod, args_info, slow_build_mod, unbuildable_mod

OPTIONS = MeasureOptions(repeats=3, contender_repeats=0, min_repeat_s=0.0005, threads=1)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildPool]:
    with closing(BuildPool(2, tmp_path_factory.mktemp("artifacts"), BuilderLimits(), StopSignal())) as opened:
        yield opened


@pytest.fixture(scope="module")
def runner() -> Iterator[ProcessRunner]:
    with closing(ProcessRunner("cpu:0", OPTIONS, timeout_s=20.0)) as opened:
        yield opened


def job(mod: tvm.ir.IRModule, workload: str = "any") -> Job:
    return Job(mod, args_info(mod), CandidateNote(workload, {}, (1,)))


def take_all(evaluator: Evaluator) -> list[Finished]:
    found = []
    while evaluator.pending:
        one = evaluator.take(60.0)
        assert one is not None
        found.append(one)
    return found


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_slow_build_holds_up_others_only_where_it_would_disturb_them(
    pool: BuildPool, runner: ProcessRunner, place: Place, exclusive: bool
) -> None:
    evaluator = Evaluator(pool, runner, place.target.target, exclusive=exclusive)
    evaluator.submit([(job(add_one_mod()), "warm")])
    take_all(evaluator)
    evaluator.submit(
        [(job(slow_build_mod(512, endless=False)), "slow")] + [(job(add_one_mod(n)), n) for n in (2.0, 3.0, 4.0)]
    )
    first = evaluator.take(60.0)
    assert first is not None
    assert first.outcome is not None
    built = pool.clock.seconds
    time.sleep(0.05)
    assert (pool.clock.seconds == built) is exclusive
    everything = [first, *take_all(evaluator)]
    assert {one.tag for one in everything} == {"slow", 2.0, 3.0, 4.0}
    assert all(one.outcome is not None and one.outcome.status is Status.OK for one in everything)
    slow = next(one for one in everything if one.tag == "slow")
    assert slow.outcome is not None
    assert slow.outcome.duration_s > 5 * min(one.outcome.duration_s for one in everything if one.outcome)
    assert evaluator.seconds["queue"] > 0
    evaluator.close()


def test_equal_binaries_of_a_workload_are_measured_once(pool: BuildPool, runner: ProcessRunner, place: Place) -> None:
    evaluator = Evaluator(pool, runner, place.target.target, exclusive=True)
    evaluator.submit([(job(add_one_mod()), 0), (job(add_one_mod()), 1), (job(add_one_mod(), "other"), 2)])
    evaluator.submit([(job(unbuildable_mod()), 3)])
    by_tag = {one.tag: one for one in take_all(evaluator)}
    seconds = [by_tag[n].outcome.seconds for n in range(4)]
    assert seconds[0] == seconds[1] != seconds[2]
    assert by_tag[3].outcome.status is Status.BUILD_ERROR
    assert by_tag[3].artifact is None
    for number in range(3):
        artifact = by_tag[number].artifact
        assert Path(artifact).exists()
        remove_artifact(artifact)
        assert not list(Path(artifact).parent.glob(Path(artifact).stem + "*"))
    evaluator.close()


def test_a_foreign_builder_is_asked_in_batches_and_its_failure_reaches_the_run(
    pool: BuildPool, runner: ProcessRunner, place: Place
) -> None:
    sizes = []

    @derived_object
    class Foreign(ms.builder.PyBuilder):
        def build(self, inputs: list[ms.builder.BuilderInput]) -> list[ms.builder.BuilderResult]:
            sizes.append(len(inputs))
            if len(sizes) == 1:
                time.sleep(0.3)
            if len(sizes) > 2:
                raise OSError("the cluster is gone")
            return [ms.builder.BuilderResult(None, "no compiler here")] * len(inputs)

    with closing(BatchingBuilder(Foreign(), 2)) as builder:
        evaluator = Evaluator(builder, runner, place.target.target, exclusive=False)
        evaluator.submit([(job(add_one_mod()), n) for n in range(3)])
        assert {one.outcome.status for one in take_all(evaluator)} == {Status.BUILD_ERROR}
        evaluator.submit([(job(add_one_mod()), 3)])
        with pytest.raises(RuntimeError, match="the cluster is gone"):
            evaluator.take(60.0)
        evaluator.close()
    assert sizes in ([1, 2, 1], [2, 1, 1])


def test_build_processes_that_cannot_start_end_the_run(
    tmp_path: Path, runner: ProcessRunner, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "relaxtune.pipeline.tuning.local.build_pool.BUILD_MODULE", "relaxtune.pipeline.tuning.no_such_worker"
    )
    with closing(BuildPool(1, tmp_path, BuilderLimits(), StopSignal())) as pool:
        evaluator = Evaluator(pool, runner, place.target.target, exclusive=False)
        evaluator.submit([(job(add_one_mod()), 0)])
        with pytest.raises(ChildDiedError, match="failed to start 3 times"):
            evaluator.take(60.0)
        evaluator.submit([(job(add_one_mod()), 1)])
        with pytest.raises(ChildDiedError, match="failed to start 3 times"):
            evaluator.take(60.0)
        evaluator.close()


def test_gpu_candidates_tell_registers_shared_memory_and_spills(pool: BuildPool) -> None:
    target = resolve_target("cuda:sm_90a").target
    mod = add_one_mod()

    @derived_object
    class Nowhere(ms.runner.PyRunner):
        def run(self, inputs: list[ms.runner.RunnerInput]) -> list[ms.runner.RunnerFuture]:
            return [_Failed() for _ in inputs]

    evaluator = Evaluator(pool, Nowhere(), target, exclusive=False)
    evaluator.submit([(Job(apply_fallback(mod, target), args_info(mod), CandidateNote("any", {}, (1,))), 0)])
    (one,) = take_all(evaluator)
    assert one.outcome.status is Status.RUN_ERROR
    resources = one.outcome.resources
    assert 0 < resources.registers < 64
    assert (resources.smem_bytes, resources.spill_bytes) == (0, 0)
    evaluator.close()


@derived_object
class _Failed(ms.runner.PyRunnerFuture):
    def done(self) -> bool:
        return True

    def result(self) -> ms.runner.RunnerResult:
        return ms.runner.RunnerResult(None, "no device here")


def test_a_busy_clock_counts_what_overlaps_once() -> None:
    clock = BusyClock()
    clock.enter()
    clock.enter()
    time.sleep(0.05)
    clock.leave()
    assert 0.05 <= clock.seconds < 0.5
    clock.leave()
    stopped = clock.seconds
    time.sleep(0.02)
    assert clock.seconds == stopped
