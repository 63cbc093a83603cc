"""A plan on a real Ray cluster, with a real PostgreSQL: a head without a CPU, a node that measures, one that builds."""

from __future__ import annotations

from pathlib import Path

import onnx

from relaxtune.pipeline.batch.driver import run_batch
from relaxtune.pipeline.batch.events import BatchEvent, CellEvent
from relaxtune.pipeline.batch.plan import read_plan
from relaxtune.tuning_db.batches import get_batch, list_cells
from relaxtune.tuning_db.cell_states import CellState
from relaxtune.tuning_db.store import SqlDatabase
from tests.pipeline.batch.test_driver import dense
from tests.pipeline.tuning.ray.clusters import small_cluster
from tests.tuning_db.postgres_server import running_server


def test_a_plan_is_carried_out_by_a_cluster(tmp_path: Path) -> None:
    onnx.save(dense(), tmp_path / "first.onnx")
    (tmp_path / "strange.onnx").write_bytes(b"this is no model")
    events: list[BatchEvent] = []
    with running_server() as url, small_cluster() as cluster:
        plan = tmp_path / "far.toml"
        plan.write_text(
            f'database = "{url}"\nsamples = 1\n[budget]\ncandidates = 4\n[[cells]]\ntargets = ["llvm"]\n'
            'models = ["first.onnx", "strange.onnx"]\nshapes = ["x=16x32"]\n',
            encoding="utf-8",
        )
        result = run_batch(read_plan(plan), on_event=events.append, cluster=cluster.address)
        with SqlDatabase.open(url) as database:
            rows = list_cells(database, get_batch(database, "far").id)
    assert [one.state for one in result.cells] == [CellState.DONE, CellState.FAILED]
    assert [row.state for row in rows] == [CellState.DONE, CellState.FAILED]
    assert result.cells[0].facts.validated
    assert (tmp_path / "out" / "first-16x32-llvm" / "model.so").is_file()
    states = [one.state.value for one in events if isinstance(one, CellEvent) and "first" in one.cell.name]
    assert states == ["importing", "tuning", "compiling", "done"]
    assert sum(one.candidates for one in result.tuning) == 4
