from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import tvm

from relaxtune.pipeline.errors import MeasuringBrokenError
from relaxtune.pipeline.tuning.candidates import Candidate, Evaluator, State
from relaxtune.pipeline.tuning.local.backend import LocalBackend
from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.measure.backend import Built, BusyClock, OnMeasured, Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.resources import Resources
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Route, Status
from tests.pipeline.tuning.test_gpu import NoDevice
from tests.pipeline.tuning.tuning_cases import Place, add_one_mod, slow_build_mod, spec_of, take_all, unbuildable_mod

OPTIONS = MeasureOptions(repeats=3, contender_repeats=0, min_repeat_s=0.0005, threads=1)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildPool]:
    with closing(BuildPool(2, tmp_path_factory.mktemp("artifacts"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def backend(place: Place) -> Iterator[LocalBackend]:
    with closing(LocalBackend(["cpu:0"], place.environment, OPTIONS, timeout_s=20.0)) as opened:
        yield opened


def job(mod: tvm.ir.IRModule, name: object, workload: str = "any") -> Candidate:
    return Candidate(Route.METASCHEDULE, str(name), mod).handed_in(spec_of(mod, workload))


@pytest.mark.timing
@pytest.mark.parametrize("exclusive", [False, True])
def test_a_slow_build_holds_up_others_only_where_it_would_disturb_them(
    pool: BuildPool, backend: LocalBackend, place: Place, exclusive: bool
) -> None:
    evaluator = Evaluator(pool, backend, place.target.target, exclusive=exclusive)
    evaluator.submit([job(add_one_mod(), "warm")])
    take_all(evaluator)
    evaluator.submit(
        [job(slow_build_mod(512, endless=False), "slow")] + [job(add_one_mod(n), n) for n in (2.0, 3.0, 4.0)]
    )
    first: list[object] = []
    while not first:
        first = evaluator.take(60.0) or []
    built = pool.clock.seconds
    time.sleep(0.05)
    assert (pool.clock.seconds == built) is exclusive
    everything = [*first, *take_all(evaluator)]
    assert {one.decision for one in everything} == {"slow", "2.0", "3.0", "4.0"}
    assert all(one.outcome.status is Status.OK for one in everything)
    slow = next(one for one in everything if one.decision == "slow")
    assert slow.outcome.duration_s > 5 * min(one.outcome.duration_s for one in everything)
    assert evaluator.seconds["queue"] > 0 or not exclusive


def test_equal_binaries_of_a_workload_are_measured_once(pool: BuildPool, backend: LocalBackend, place: Place) -> None:
    evaluator = Evaluator(pool, backend, place.target.target, exclusive=True)
    evaluator.submit([job(add_one_mod(), 0), job(add_one_mod(), 1), job(add_one_mod(), 2, "other")])
    evaluator.submit([job(unbuildable_mod(), 3)])
    by_tag = {int(one.decision): one for one in take_all(evaluator)}
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


@pytest.mark.parametrize(("losses", "states"), [(1, ["measured", "measured"]), (3, ["lost", "measured"])])
def test_a_lost_candidate_is_tried_again_and_twins_do_not_share_the_loss(
    pool: BuildPool, place: Place, losses: int, states: list[str]
) -> None:
    """The backend loses what it is given first: a candidate, then its twin, then the first one again."""
    answers = [Outcome(Unmeasured.LOST, error="the node is gone")] * losses + [Outcome(Status.OK, (1e-3,))]

    class Loses(NoDevice):
        def submit(self, artifact: BuiltArtifact, spec: WorkloadSpec, on_measured: OnMeasured) -> None:
            on_measured(answers.pop(0))

    # Twins are measured together once all are built.
    evaluator = Evaluator(pool, Loses(place.environment), place.target.target, exclusive=True)
    evaluator.submit([job(add_one_mod(), 0), job(add_one_mod(), 1)])
    found = take_all(evaluator)
    assert [one.state for one in found] == states
    assert answers == []
    assert evaluator.pending == 0


def test_a_candidate_goes_from_state_to_state() -> None:
    proposed = job(add_one_mod(), 0)
    artifact = BuiltArtifact(b"code", "0", Resources(registers=32))
    built = proposed.built(Built(Status.OK, artifact, seconds=1.0))
    measured = built.measured(Outcome(Status.OK, (1e-5, 2e-5, 4e-5), duration_s=2.0))
    recorded = measured.recorded()
    steps = [proposed, built, measured, recorded]
    assert [one.state for one in steps] == [State.PROPOSED, State.BUILT, State.MEASURED, State.RECORDED]
    assert (measured.latency_us, measured.fastest_us, measured.spread) == pytest.approx((20.0, 10.0, 1.5))
    assert (measured.outcome.duration_s, measured.outcome.resources) == (3.0, artifact.resources)
    assert (recorded.module, recorded.latency_us) == (None, measured.latency_us)
    assert proposed.built(Built(Status.BUILD_ERROR, error="no")).state is State.FAILED
    assert proposed.built(Built(Unmeasured.LOST)).state is State.LOST
    assert built.measured(Outcome(Status.WRONG_RESULT)).state is State.FAILED
    assert built.measured(Outcome(Unmeasured.STOPPED)).state is State.LOST
    assert built.measured(Outcome(Status.WRONG_RESULT)).latency_us is None


def test_build_processes_that_cannot_start_end_the_run(
    tmp_path: Path, backend: LocalBackend, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "relaxtune.pipeline.tuning.local.build_pool.BUILD_MODULE", "relaxtune.pipeline.tuning.no_such_worker"
    )
    with closing(BuildPool(1, tmp_path)) as pool:
        evaluator = Evaluator(pool, backend, place.target.target, exclusive=False)
        for number in range(2):
            evaluator.submit([job(add_one_mod(), number)])
            with pytest.raises(MeasuringBrokenError, match="failed to start"):
                evaluator.take(60.0)


def test_gpu_candidates_tell_registers_shared_memory_and_spills(pool: BuildPool, place: Place) -> None:
    target = resolve_target("cuda:sm_90a").target
    evaluator = Evaluator(pool, NoDevice(place.environment), target, exclusive=False)
    evaluator.submit([job(apply_fallback(add_one_mod(), target), 0)])
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
