"""A node is killed in the middle of a run: what it had in hand is done again, and no candidate fails for it."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from ray.cluster_utils import Cluster

from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.progress import ProgressEvent
from relaxtune.pipeline.tuning.ray.machine import RayCluster
from relaxtune.pipeline.tuning.session import tune
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Route, Status
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.tuning.ray.clusters import add_measuring_node, measures, small_cluster
from tests.pipeline.tuning.tuning_cases import all_records, matmul_task

TRIALS = 24
OPTIONS = TuningOptions(trials=TRIALS, trials_per_iteration=8, population=16, finals=0, warm_start_s=0.0)


class KillsNode:
    """Kills a node of a kind once some candidates are back."""

    def __init__(self, cluster: Cluster, *, measuring: bool) -> None:
        self.cluster, self.thread = cluster, threading.Thread(target=self._kill)
        self.nodes = [one for one in cluster.worker_nodes if measures(one) == measuring]

    def __call__(self, event: ProgressEvent) -> None:
        if event.done == 5:
            self.thread.start()

    def _kill(self) -> None:
        self.cluster.remove_node(self.nodes[0], allow_graceful=False)


@pytest.mark.slow
@pytest.mark.parametrize("measuring", [True, False], ids=["the node that measures", "a node that builds"])
def test_a_run_ends_the_same_when_a_node_is_lost(database: TuningDatabase, measuring: bool) -> None:
    target = resolve_target("llvm")
    with small_cluster(builders=2) as started, closing(RayCluster(started.address)) as cluster:
        environment = cluster.find_environment(target)
        assert environment is not None
        watcher = KillsNode(started, measuring=measuring)
        if measuring:
            # It joins once the run's devices are counted, and has nothing to do before the other is lost.
            add_measuring_node(started)
        summary = tune(
            [matmul_task(64, 64, 64)],
            target=target,
            database=database,
            environment=environment,
            options=OPTIONS,
            machine=cluster.open_machine,
            progress=watcher,
            still_true=all_records,
        )
        watcher.thread.join()
    (result,) = summary.tasks
    assert (result.valid, result.failed) == (TRIALS, 0)
    records = [one for one in database.list_records() if one.route is not Route.FALLBACK]
    assert {one.status for one in records} == {Status.OK}
    assert len(records) == len({one.decision for one in records}) == TRIALS
