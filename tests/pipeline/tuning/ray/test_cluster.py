"""Tuning on a real Ray cluster: a head without a CPU, a node that measures, a node that builds."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
from ray.cluster_utils import Cluster

from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.errors import MeasuringBrokenError, UsageError
from relaxtune.pipeline.tuning.candidates import Candidate, Evaluator
from relaxtune.pipeline.tuning.local.backend import Machine
from relaxtune.pipeline.tuning.measure.backend import Built, Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.ray.backend import ActorMeasurer
from relaxtune.pipeline.tuning.ray.cluster import new_run, report_on
from relaxtune.pipeline.tuning.ray.machine import RayCluster, require_server
from relaxtune.pipeline.tuning.ray.node_side import ActorSettings, MeasuringActor
from relaxtune.pipeline.tuning.session import tune
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.tuning_db.records import Route, Status
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.urls import DatabaseUrl
from tests.pipeline.tuning.ray.clusters import kill_workers, small_cluster
from tests.pipeline.tuning.tuning_cases import (
    HeldRecipe,
    add_one_mod,
    all_records,
    built,
    extern_mod,
    given,
    matmul_task,
    measure,
    spec_of,
    take_all,
    unbuildable_mod,
)

pytestmark = pytest.mark.slow

OPTIONS = TuningOptions(
    trials=4,
    trials_per_iteration=4,
    population=16,
    finals=3,
    warm_start_s=0.0,
    run_timeout_s=8.0,
    measure=MeasureOptions(repeats=3, contender_repeats=0, min_repeat_s=0.0005),
)


@pytest.fixture(scope="module")
def target() -> ResolvedTarget:
    return resolve_target("llvm")


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    with small_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(started: Cluster) -> Iterator[RayCluster]:
    with closing(RayCluster(started.address)) as connected:
        yield connected


@pytest.fixture(scope="module")
def machine(cluster: RayCluster, target: ResolvedTarget) -> Iterator[Machine]:
    environment = cluster.find_environment(target)
    assert environment is not None
    with cluster.open_machine(target, environment, OPTIONS, StopSignal()) as opened:
        yield opened


def candidate(machine: Machine, target: ResolvedTarget, mod, workload: str = "any"):
    return built(machine.builder, target.target, mod), spec_of(mod, workload)


def test_a_candidate_fails_on_a_cluster_as_it_does_here(machine: Machine, target: ResolvedTarget) -> None:
    failed: SimpleQueue[Built] = SimpleQueue()
    machine.builder.submit(unbuildable_mod(), target.target, failed.put)
    right = candidate(machine, target, add_one_mod())
    crash = candidate(machine, target, extern_mod("abort"))
    hang = candidate(machine, target, extern_mod("sleep", 100))
    outcomes = measure(machine.backend, right, crash, hang, right)
    assert [one.status for one in outcomes] == [Status.OK, Status.RUN_ERROR, Status.TIMEOUT, Status.OK]
    assert all(one.environment == detect_environment(target) for one in outcomes)
    assert failed.get(timeout=300).status is Status.BUILD_ERROR
    assert all(seconds > 0 for seconds in machine.backend.busy_s.values())


def test_a_reference_is_code_of_the_cluster_too(machine: Machine, target: ResolvedTarget) -> None:
    artifact, spec = candidate(machine, target, add_one_mod())
    wrong = candidate(machine, target, add_one_mod(2.0))[0]
    with_reference = replace(spec, workload="checked", reference=artifact)
    (outcome,) = measure(machine.backend, (wrong, with_reference))
    assert outcome.status is Status.WRONG_RESULT


def test_what_a_killed_actor_measured_is_measured_again(
    started: Cluster, machine: Machine, target: ResolvedTarget
) -> None:
    evaluator = Evaluator(machine.builder, machine.backend, target.target, exclusive=False)
    mods = [extern_mod("usleep", 3000 + number) for number in range(3)]
    evaluator.submit(
        [
            Candidate(Route.METASCHEDULE, str(number), mod).handed_in(spec_of(mod, str(number)))
            for number, mod in enumerate(mods)
        ]
    )
    first: list[object] = []
    while not first:
        first = evaluator.take(300) or []
    kill_workers(started, "MeasuringActor")
    found = [*first, *take_all(evaluator)]
    assert [one.state for one in found] == ["measured"] * 3
    assert machine.backend.restarts >= 1


def test_what_a_killed_worker_built_is_built_again(
    started: Cluster, machine: Machine, target: ResolvedTarget, tmp_path: Path
) -> None:
    pipe = tmp_path / "building"
    os.mkfifo(pipe)
    heard = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    evaluator = Evaluator(machine.builder, machine.backend, target.target, exclusive=False)
    held = Candidate(Route.METASCHEDULE, "held", HeldRecipe(b"", target, "", pipe=str(pipe)))
    others = [Candidate(Route.METASCHEDULE, str(number), add_one_mod(10.0 + number)) for number in range(3)]
    evaluator.submit([held.handed_in(spec_of(add_one_mod(size=64), "held"))])
    evaluator.submit([one.handed_in(spec_of(add_one_mod(), one.decision)) for one in others])
    assert select.select([heard], [], [], 60)[0], "the build never began"
    os.close(heard)
    kill_workers(started, "build")
    assert [one.state for one in take_all(evaluator)] == ["measured"] * 4


def test_a_device_that_is_away_is_waited_for_while_another_one_measures(
    cluster: RayCluster, machine: Machine, target: ResolvedTarget
) -> None:
    measured = measure(machine.backend, candidate(machine, target, add_one_mod()))
    assert [one.status for one in measured] == [Status.OK]
    # The only device is the other's, so that this actor has none.
    actor = cluster.ray.remote(**cluster.get_place(target).actor)(MeasuringActor)
    environment = cluster.find_environment(target)
    assert environment is not None
    settings = ActorSettings(new_run(), target, environment, MeasureOptions(), 2.0, 0)
    away = ActorMeasurer(cluster.ray, actor.remote(settings), "the second", StopSignal(), away_s=0.3)
    told = LeavesAt(away, "it joins them when it is back")
    try:
        with pytest.raises(MeasuringBrokenError, match=r"no device for the second in 0\.3 s"):
            away.ready()
        away.peers = machine.backend._measurers  # type: ignore[attr-defined]
        logging.getLogger(ActorMeasurer.__module__).addHandler(told)
        assert not away.ready()
        assert told.count == 2
    finally:
        logging.getLogger(ActorMeasurer.__module__).removeHandler(told)
        away.close()


class LeavesAt(logging.Handler):
    """Gives a device up when a log line came twice."""

    def __init__(self, measurer: ActorMeasurer, words: str) -> None:
        super().__init__()
        self.measurer, self.words, self.count = measurer, words, 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += self.words in record.getMessage()
        if self.count == 2:
            self.measurer.leave()


def test_a_stopped_run_answers_everything_at_once(
    cluster: RayCluster, machine: Machine, target: ResolvedTarget
) -> None:
    stop = StopSignal()
    environment = cluster.find_environment(target)
    assert environment is not None
    built_, measured = SimpleQueue[Built](), SimpleQueue[Outcome]()
    # The device is another run's, so that this one waits for it.
    with cluster.open_machine(target, environment, OPTIONS, stop) as second:
        second.builder.submit(add_one_mod(3.0), target.target, built_.put)
        second.backend.submit(built_.get(timeout=300).artifact, spec_of(add_one_mod()), measured.put)  # type: ignore[arg-type]
        stop.request()
        second.builder.submit(add_one_mod(4.0), target.target, built_.put)
        assert built_.get(timeout=5).status is Unmeasured.STOPPED
        assert measured.get(timeout=5).status is Unmeasured.STOPPED


@pytest.mark.parametrize("database", ["tuning.db", "sqlite:///tuning.db"])
def test_a_cluster_refuses_a_file_as_its_database(database: str) -> None:
    with pytest.raises(UsageError, match=r"needs a PostgreSQL database.*locks do not hold over network"):
        require_server(DatabaseUrl.of(database))
    require_server(DatabaseUrl.of("postgresql://me@there/tuning"))


def test_a_check_names_what_differs_and_how_to_mend_it(cluster: RayCluster) -> None:
    (measuring,) = [one for one in cluster.nodes if one.resources.get("relaxtune_cpu")]
    assert all(report_on(one).ok for one in cluster.nodes)
    facts = measuring.facts
    assert facts is not None
    other = replace(
        measuring, facts=replace(facts, versions={**facts.versions, "apache-tvm": "0.26.0", "its code": "x"})
    )
    first, second = sorted(report_on(other).faults)
    assert first.startswith("apache-tvm is 0.26.0, here it is 0.27")
    assert "pip install 'apache-tvm==" in first
    assert "check the same commit out" in second
    missing = replace(measuring, facts=None, fault="No module named relaxtune")
    assert report_on(missing).faults == (
        "No module named relaxtune: install relaxtune there, for the Python that runs Ray",
    )


def test_a_run_on_a_cluster_records_every_candidate(
    cluster: RayCluster, machine: Machine, target: ResolvedTarget, database: TuningDatabase
) -> None:
    environment = cluster.find_environment(target)
    assert environment == detect_environment(target)
    task = matmul_task(32, 32, 32)
    summary = tune(
        [task],
        target=target,
        database=database,
        environment=environment,
        still_true=all_records,
        options=OPTIONS,
        machine=given(machine.builder, machine.backend),
    )
    (result,) = summary.tasks
    assert (result.valid, result.failed) == (4, 0), result.last_error
    # The fallback, the candidates, and the final.
    records = database.list_records()
    assert len(records) >= 5
    assert {one.status for one in records} == {Status.OK}
    assert {one.environment for one in records} == {environment}
