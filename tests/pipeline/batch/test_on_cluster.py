"""A plan on a real Ray cluster, with a real PostgreSQL: a head without a CPU, a node that measures, one that builds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import onnx
import pytest
from ray.cluster_utils import Cluster

from relaxtune.pipeline.batch.cells import list_cells
from relaxtune.pipeline.batch.driver import run_batch
from relaxtune.pipeline.batch.events import BatchEvent, CellEvent
from relaxtune.pipeline.batch.plan import parse_plan, read_plan
from relaxtune.pipeline.batch.tasks import CellTasks
from relaxtune.pipeline.batch.worker import AheadWork, PrepareWork
from relaxtune.pipeline.batch.workers import ClusterWorkers, DeviceWorkers
from relaxtune.pipeline.tuning.ray.cluster import MeasuringPlace, Reservation, new_run
from relaxtune.pipeline.tuning.ray.machine import RayCluster
from relaxtune.pipeline.tuning.ray.node_side import own_gpu
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.batches import get_batch, list_cells as stored_cells
from relaxtune.tuning_db.cell_states import CellState
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.batch.plan_cases import dense
from tests.pipeline.tuning.ray.clusters import small_cluster
from tests.tuning_db.postgres_server import running_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    with small_cluster(builders=0) as cluster:
        # Ray hands out GPUs that it was told of; nothing here computes on them.
        cluster.add_node(num_cpus=1, num_gpus=2)
        yield cluster


@pytest.fixture(scope="module")
def cluster(started: Cluster) -> Iterator[RayCluster]:
    with closing(RayCluster(started.address)) as connected:
        yield connected


def test_a_plan_is_carried_out_by_a_cluster(started: Cluster, cluster: RayCluster, tmp_path: Path) -> None:
    onnx.save(dense(), tmp_path / "first.onnx")
    (tmp_path / "strange.onnx").write_bytes(b"this is no model")
    events: list[BatchEvent] = []
    with running_server() as url:
        plan = tmp_path / "far.toml"
        plan.write_text(
            f'database = "{url}"\nsamples = 1\n[budget]\ncandidates = 4\n[[cells]]\ntargets = ["llvm"]\n'
            'models = ["first.onnx", "strange.onnx"]\nshapes = ["x=16x32"]\n',
            encoding="utf-8",
        )
        result = run_batch(read_plan(plan), on_event=events.append, cluster=started.address)
        with TuningDatabase.open(url) as database:
            rows = stored_cells(database, get_batch(database, "far").id)
    assert [one.state for one in result.cells] == [CellState.DONE, CellState.FAILED]
    assert [row.state for row in rows] == [CellState.DONE, CellState.FAILED]
    assert result.cells[0].facts.validated
    assert (tmp_path / "out" / "first-16x32-llvm" / "model.so").is_file()
    states = [one.state.value for one in events if isinstance(one, CellEvent) and "first" in one.cell.name]
    assert states == ["importing", "tuning", "compiling", "done"]
    assert sum(one.candidates for one in result.tuning) == 4


def test_what_measures_and_what_works_on_cells_share_each_gpu(cluster: RayCluster) -> None:
    with closing(two_gpus(cluster)) as reservation:
        where = cluster.ray.remote(own_gpu)
        asked = [part(device) for part in (reservation.working, reservation.measuring) for device in (0, 1, 0, 1)]
        found = cluster.ray.get([where.options(**one).remote() for one in asked], timeout=120)
    assert set(found) == {"cuda:0", "cuda:1"}
    assert found[:2] == found[2:4] == found[4:6] == found[6:]


def test_a_cell_of_a_lost_actor_is_done_by_another(cluster: RayCluster, tmp_path: Path) -> None:
    onnx.save(dense(), tmp_path / "first.onnx")
    plan = parse_plan(
        tmp_path / "near.toml",
        '[[cells]]\ntargets = ["llvm"]\nmodels = ["first.onnx"]\nshapes = ["x=16x32", "x=8x32"]\n',
    )
    first, second = list_cells(plan)
    with closing(two_gpus(cluster)) as reservation:
        workers = DeviceWorkers(cluster, reservation)
        with closing(workers):
            found = [workers.submit(PrepareWork(cell)).result(timeout=120) for cell in (first, second)]
            assert [isinstance(one, CellTasks) and one.cell for one in found] == [first, second]
            for actor in workers._actors.values():
                cluster.ray.kill(actor)
            # What the lost actor kept of the cell is gone with it.
            assert workers.submit(AheadWork(first, 1)).result(timeout=120) is False
            assert isinstance(workers.submit(PrepareWork(first)).result(timeout=120), CellTasks)


def test_work_that_a_cluster_has_is_not_given_up(cluster: RayCluster, tmp_path: Path) -> None:
    onnx.save(dense(), tmp_path / "first.onnx")
    text = '[[cells]]\ntargets = ["llvm"]\nmodels = ["first.onnx"]\nshapes = ["x=16x32"]\n'
    (cell,) = list_cells(parse_plan(tmp_path / "near.toml", text))
    with closing(ClusterWorkers(cluster, resolve_target("llvm"))) as workers:
        answer = workers.submit(PrepareWork(cell))
        # A future that was cancelled would refuse the answer when it comes.
        assert not answer.cancel()
        assert isinstance(answer.result(timeout=120), CellTasks)


def two_gpus(cluster: RayCluster) -> Reservation:
    environment = cluster.find_environment(resolve_target("llvm"))
    assert environment is not None
    place = MeasuringPlace(environment, devices=2, actor={"num_gpus": 1, "num_cpus": 0}, undisturbed=True, cores=1)
    return Reservation(cluster.ray, place, new_run())
