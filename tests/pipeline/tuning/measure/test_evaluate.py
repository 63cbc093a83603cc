from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import tvm

from relaxtune.pipeline.errors import MeasuringBrokenError
from relaxtune.pipeline.tuning.local.backend import LocalBackend
from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.measure.backend import OnMeasured, Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.clock import BusyClock
from relaxtune.pipeline.tuning.measure.evaluate import Evaluator, Finished, Job
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Status
from tests.pipeline.tuning.test_gpu import NoDevice
from tests.pipeline.tuning.tuning_cases import Place, add_one_mod, slow_build_mod, spec_of, unbuildable_mod

OPTIONS = MeasureOptions(repeats=3, contender_repeats=0, min_repeat_s=0.0005, threads=1)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildPool]:
    with closing(BuildPool(2, tmp_path_factory.mktemp("artifacts"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def backend(place: Place) -> Iterator[LocalBackend]:
    with closing(LocalBackend(["cpu:0"], place.environment, OPTIONS, timeout_s=20.0)) as opened:
        yield opened


def job(mod: tvm.ir.IRModule, workload: str = "any") -> Job:
    return Job(mod, spec_of(mod, workload))


def take_all(evaluator: Evaluator) -> list[Finished]:
    found = []
    while evaluator.pending:
        one = evaluator.take(60.0)
        assert one is not None
        found.append(one)
    return found


@pytest.mark.timing
@pytest.mark.parametrize("exclusive", [False, True])
def test_a_slow_build_holds_up_others_only_where_it_would_disturb_them(
    pool: BuildPool, backend: LocalBackend, place: Place, exclusive: bool
) -> None:
    evaluator = Evaluator(pool, backend, place.target.target, exclusive=exclusive)
    evaluator.submit([(job(add_one_mod()), "warm")])
    take_all(evaluator)
    evaluator.submit(
        [(job(slow_build_mod(512, endless=False)), "slow")] + [(job(add_one_mod(n)), n) for n in (2.0, 3.0, 4.0)]
    )
    first = evaluator.take(60.0)
    assert first is not None
    built = pool.clock.seconds
    time.sleep(0.05)
    assert (pool.clock.seconds == built) is exclusive
    everything = [first, *take_all(evaluator)]
    assert {one.tag for one in everything} == {"slow", 2.0, 3.0, 4.0}
    assert all(one.outcome.status is Status.OK for one in everything)
    slow = next(one for one in everything if one.tag == "slow")
    assert slow.outcome.duration_s > 5 * min(one.outcome.duration_s for one in everything)
    assert evaluator.seconds["queue"] > 0 or not exclusive


def test_equal_binaries_of_a_workload_are_measured_once(pool: BuildPool, backend: LocalBackend, place: Place) -> None:
    evaluator = Evaluator(pool, backend, place.target.target, exclusive=True)
    evaluator.submit([(job(add_one_mod()), 0), (job(add_one_mod()), 1), (job(add_one_mod(), "other"), 2)])
    evaluator.submit([(job(unbuildable_mod()), 3)])
    by_tag = {one.tag: one for one in take_all(evaluator)}
    seconds = [by_tag[n].outcome.seconds for n in range(4)]
    assert seconds[0] == seconds[1] != seconds[2]
    assert by_tag[3].outcome.status is Status.BUILD_ERROR
    assert by_tag[3].artifact is None
    for number in range(3):
        artifact = by_tag[number].artifact
        path = Path(artifact.content)
        assert path.exists()
        pool.discard(artifact)
        assert not list(path.parent.glob(path.stem + "*"))


def test_a_measurement_that_was_lost_is_tried_again_and_its_twins_do_not_share_the_loss(
    pool: BuildPool, place: Place
) -> None:
    """The backend loses what it is given first, and then one more candidate twice."""
    waiting: list[OnMeasured] = []

    class Loses(NoDevice):
        def submit(self, artifact: BuiltArtifact, spec: WorkloadSpec, on_measured: OnMeasured) -> None:
            waiting.append(on_measured)

    evaluator = Evaluator(pool, Loses(place.environment), place.target.target, exclusive=False)
    evaluator.submit([(job(add_one_mod()), 0), (job(add_one_mod()), 1)])
    until = time.monotonic() + 60
    while not (waiting and evaluator._building == 0) and time.monotonic() < until:
        time.sleep(0.05)
    for status in (Unmeasured.LOST, Status.OK):
        (answer,) = waiting
        waiting.clear()
        answer(Outcome(status, (1e-3,) if status is Status.OK else ()))
    assert [one.outcome.status for one in take_all(evaluator)] == [Status.OK, Status.OK]
    evaluator.submit([(job(add_one_mod(2.0)), 2)])
    for _ in range(2):
        while not waiting and time.monotonic() < until:
            time.sleep(0.05)
        waiting.pop()(Outcome(Unmeasured.LOST, error="the node is gone"))
    (lost,) = take_all(evaluator)
    assert (lost.outcome.status, lost.outcome.error) == (Unmeasured.LOST, "the node is gone")


def test_build_processes_that_cannot_start_end_the_run(
    tmp_path: Path, backend: LocalBackend, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "relaxtune.pipeline.tuning.local.build_pool.BUILD_MODULE", "relaxtune.pipeline.tuning.no_such_worker"
    )
    with closing(BuildPool(1, tmp_path)) as pool:
        evaluator = Evaluator(pool, backend, place.target.target, exclusive=False)
        for number in range(2):
            evaluator.submit([(job(add_one_mod()), number)])
            with pytest.raises(MeasuringBrokenError, match="failed to start"):
                evaluator.take(60.0)


def test_gpu_candidates_tell_registers_shared_memory_and_spills(pool: BuildPool, place: Place) -> None:
    target = resolve_target("cuda:sm_90a").target
    evaluator = Evaluator(pool, NoDevice(place.environment), target, exclusive=False)
    evaluator.submit([(job(apply_fallback(add_one_mod(), target)), 0)])
    (one,) = take_all(evaluator)
    assert one.outcome.status is Status.OK
    assert one.outcome.environment == place.environment
    resources = one.outcome.resources
    assert 0 < resources.registers < 64
    assert (resources.smem_bytes, resources.spill_bytes) == (0, 0)


@pytest.mark.timing
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
