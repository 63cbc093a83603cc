"""Breaks a real Ray cluster while it carries a plan out, and checks that the plan ends as it does without.

    python -m tests.guardrails.cluster_faults [--faults node actor builder postgres store driver] [--kills 20]
        [--seed 0] [--out FILE]

Each fault has a cluster of its own (a head without a CPU, a node that measures, one that builds), a PostgreSQL that
survives its end, and the same plan of two cells. It comes once some candidates are recorded:

- node: the node that builds, or the one that measures while another joins, is killed
- actor, builder: the Ray workers that measure, or that build, are killed
- postgres: the server is stopped for seconds and started again, twice: while tasks are tuned, while cells are finished
- store: the object stores of all nodes are full for seconds, and no disk takes what they spill
- driver: it is killed with -9 again and again, while it starts or once it has recorded or finished something, and
  `batch resume` goes on

Afterwards the same cells must be accepted as without a fault. No record may be lost that was there before a fault, none
may be there twice, none may say that a candidate failed, and no driver may have measured what one before it recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import ray
from ray.cluster_utils import Cluster

from relaxtune.pipeline.environment import detect_environment
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.batches import get_batch, list_cells
from relaxtune.tuning_db.cell_states import CellState
from relaxtune.tuning_db.records import Route, Status, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.batch.plan_cases import dense
from tests.pipeline.tuning.ray.clusters import add_measuring_node, find_workers, kill_workers, measures, small_cluster
from tests.tuning_db.postgres_server import Server, restartable_server

CANDIDATES, CANDIDATES_A_KILL = 40, 20
BEGUN = 4
AWAY_S = 4.0
# Of the kills, so many come while the driver starts, the others within so many seconds of its first records.
_WHILE_STARTING, _AT_WORK_S = 0.25, 1.0
ENDS_WITHIN_S = 600.0
_MAIN = "from relaxtune.pipeline.cli.app import main; main()"
# What is larger than this goes through the object stores; nothing may be spilled to a disk.
_SMALL_STORE = {"max_direct_call_object_size": 4096, "local_fs_capacity_threshold": 0.0001}
_PIECE = 4 << 20


@dataclass
class Run:
    """One plan on a broken cluster.

    Attributes
    ----------
    seen
        Records that were there before a fault, by id.
    at_work
        Kills of a driver that had recorded or finished something.
    driver
        The newest one.
    """

    fault: str
    folder: Path
    server: Server
    cluster: Cluster
    kills: int
    seed: int
    seen: dict[int, str] = field(default_factory=dict)
    done: int = 0
    at_work: int = 0
    driver: subprocess.Popen[bytes] = field(init=False)

    @property
    def plan(self) -> Path:
        return self.folder / "plan.toml"

    def start(self, *words: str) -> None:
        """Start a driver in a session of its own; its output goes to a file."""
        command = [sys.executable, "-c", _MAIN, "batch", *words, str(self.plan), "--cluster", self.cluster.address]
        with (self.folder / "log.txt").open("ab") as log:
            self.driver = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def kill(self) -> None:
        """Kill the driver's session: processes that it started die with it, as with its node."""
        os.killpg(self.driver.pid, signal.SIGKILL)
        self.driver.wait()

    def told(self) -> str:
        """Return the end of what the drivers wrote."""
        return (self.folder / "log.txt").read_text(errors="replace")[-3000:]

    def look(self) -> int:
        """Note the records that are there now; return how many candidates they are of."""
        with TuningDatabase.open(self.server.url) as database:
            records = database.list_records()
        self.seen |= {int(one.id or 0): one.decision for one in records}
        return len({(one.workload_hash, one.decision) for one in records if one.route is not Route.FALLBACK})

    def wait_for(self, ready: Callable[[], bool]) -> bool:
        """Wait until something is so; False when the driver ended first."""
        end = time.monotonic() + ENDS_WITHIN_S
        while time.monotonic() < end and self.driver.poll() is None:
            if ready():
                return True
            time.sleep(0.2)
        return False

    def held(self) -> bool:
        """Return whether the driver has the batch."""
        with TuningDatabase.open(self.server.url) as database:
            return get_batch(database, "faults").driver.pid == self.driver.pid

    def any_cell(self, *states: CellState) -> bool:
        """Return whether some cell is in one of these states."""
        with TuningDatabase.open(self.server.url) as database:
            cells = list_cells(database, get_batch(database, "faults").id)
        return any(one.state in states for one in cells)


def break_node(run: Run) -> None:
    """Kill the node that builds once another one is there, then the one that measures."""
    run.cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    add_measuring_node(run.cluster)
    for measuring in (False, True):
        node = next(one for one in run.cluster.worker_nodes if measures(one) == measuring)
        run.cluster.remove_node(node, allow_graceful=False)
        run.done += 1


def break_workers(name: str) -> Callable[[Run], None]:
    """Return what kills the Ray workers that do something."""

    def kill(run: Run) -> None:
        # A builder is idle now and then.
        if run.wait_for(lambda: bool(find_workers(run.cluster, name))):
            kill_workers(run.cluster, name)
            run.done += 1

    return kill


def break_postgres(run: Run) -> None:
    """Stop the server for seconds: while tasks are tuned, and while a cell is finished."""
    finishing = (CellState.COMPILING, CellState.VALIDATING)
    for ready in (lambda: True, lambda: run.any_cell(*finishing)):
        if not run.wait_for(ready):
            return
        run.look()
        run.server.stop()
        time.sleep(AWAY_S)
        run.server.start()
        run.done += 1


class Filler:
    """Fills the object store of its node with what cannot be spilled, as it is in use."""

    def fill(self, pieces: int) -> int:
        """Put pieces until no more fit; return how many there are."""
        import numpy as np

        self.held = []
        for number in range(pieces):
            try:
                one = ray.put(np.full(_PIECE, number, np.uint8))
                self.held.append((one, ray.get(one)))
            except ray.exceptions.RayError:
                break
        return len(self.held)


def break_store(run: Run) -> None:
    """Fill all object stores for seconds."""
    ray.init(address=run.cluster.address, namespace="filler", log_to_driver=False, logging_level="ERROR")
    try:
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        nodes = [one["NodeID"] for one in ray.nodes() if one["Alive"]]
        filler = ray.remote(num_cpus=0)(Filler)
        fillers = [filler.options(scheduling_strategy=strategy(node, soft=False)).remote() for node in nodes]
        run.done = min(ray.get([one.fill.remote(64) for one in fillers]))
        time.sleep(2 * AWAY_S)
        for one in fillers:
            ray.kill(one)
    finally:
        ray.shutdown()


def break_driver(run: Run) -> None:
    """Kill the driver again and again."""
    moments = random.Random(run.seed)
    finishing = (CellState.COMPILING, CellState.VALIDATING)
    worked = True
    while run.driver.poll() is None:
        run.kill()
        run.done += 1
        run.at_work += worked
        known = run.look()
        run.start("resume")
        if run.done == run.kills:
            return
        worked = moments.random() >= _WHILE_STARTING
        if worked:
            worked = run.wait_for(lambda known=known: run.held() and (run.look() > known or run.any_cell(*finishing)))  # type: ignore[misc]
            time.sleep(moments.uniform(0, _AT_WORK_S))
        else:
            time.sleep(moments.uniform(1, 5))


FAULTS: dict[str, Callable[[Run], None]] = {
    "none": lambda run: None,
    "node": break_node,
    "actor": break_workers("MeasuringActor"),
    "builder": break_workers("build"),
    "postgres": break_postgres,
    "store": break_store,
    "driver": break_driver,
}


def run_fault(fault: str, kills: int, seed: int) -> dict[str, object]:
    """Carry the plan out with a fault, and tell what came of it."""
    began = time.monotonic()
    system = _SMALL_STORE if fault == "store" else None
    candidates = CANDIDATES + (CANDIDATES_A_KILL * kills if fault == "driver" else 0)
    with (
        tempfile.TemporaryDirectory() as folder,
        restartable_server(durable=True) as server,
        small_cluster(system=system) as cluster,
    ):
        run = Run(fault, Path(folder), server, cluster, kills, seed)
        for seed, name in enumerate(("first", "second")):
            onnx.save(dense(seed=seed), run.folder / f"{name}.onnx")
        run.plan.write_text(
            f'name = "faults"\ndatabase = "{server.url}"\nsamples = 1\n[budget]\ncandidates = {candidates}\n'
            '[defaults]\ntargets = ["llvm"]\n[[cells]]\nmodels = ["first.onnx"]\nshapes = ["x=16x32"]\n'
            '[[cells]]\nmodels = ["second.onnx"]\nshapes = ["x=48x32"]\n',
            encoding="utf-8",
        )
        run.start("run")
        if not run.wait_for(lambda: run.look() >= BEGUN):
            faults = [f"it came to no fault: exit code {run.driver.poll()}"]
            if run.driver.returncode is None:
                run.kill()
            return {"fault": fault, "accepted": [], "faults": faults, "log": run.told()}
        FAULTS[fault](run)
        try:
            run.driver.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            run.kill()
        return {"fault": fault, "seconds": time.monotonic() - began, **outcome(run)}


def outcome(run: Run) -> dict[str, object]:
    """Return what the database has after a run, and what is wrong with it."""
    with TuningDatabase.open(run.server.url) as database:
        records = database.list_records()
        cells = list_cells(database, get_batch(database, "faults").id)
    tuned = {(one.workload_hash, one.decision) for one in records if one.route is not Route.FALLBACK}
    twice = Counter((one.workload_hash, one.route, one.decision, one.latencies_us) for one in records)
    accepted = sorted(one.spec.name for one in cells if one.state is CellState.DONE)
    faults = [f"{one.spec.name} is {one.state}: {one.facts.error}" for one in cells if one.state is not CellState.DONE]
    faults += [f"lost record {one}" for one in run.seen.keys() - {record.id for record in records}]
    faults += [f"{count} times {key[:3]}" for key, count in twice.items() if count > 1]
    faults += [f"record {one.id} is {one.status}: {one.error}" for one in records if one.status is not Status.OK]
    faults += [] if run.fault == "none" or run.done else ["the fault did not come"]
    faults += [f"measured again: {key}" for key in measured_again(records)]
    code = run.driver.returncode
    faults += [] if code == 0 else [f"exit code {code}"]
    faults += [] if run.fault != "driver" or run.done == run.kills else [f"{run.done} kills, {run.kills} asked for"]
    return {
        "times": run.done,
        "at_work": run.at_work,
        "exit_code": code,
        "accepted": accepted,
        "records": len(records),
        "candidates": len(tuned),
        "attempts": [one.attempts for one in cells],
        "faults": faults,
        "log": run.told() if faults else "",
    }


def measured_again(records: Sequence[TuningRecord]) -> list[tuple[str, str, str]]:
    """Return what a job measured although one before it had recorded it; a cell's own measurements are left out."""
    first: dict[tuple[str, str, str], str | None] = {}
    again = []
    for one in sorted(records, key=lambda record: record.id or 0):
        if '"template":"model"' not in one.decision:
            key = (one.workload_hash, one.route.value, one.decision)
            if first.setdefault(key, one.job_id) != one.job_id:
                again.append(key)
    return again


def main() -> None:
    """Break what is asked for; exit 1 when a plan ended otherwise than without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=sorted(FAULTS), default=list(FAULTS))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="Of the moments at which the driver is killed.")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: list[dict[str, object]] = []
    for fault in asked.faults:
        found.append(run_fault(fault, asked.kills, asked.seed))
        print(json.dumps(found[-1]), flush=True)
        if asked.out is not None:
            document = {"machine": detect_environment(resolve_target("llvm")).device_name, "ray": ray.__version__}
            document["cores"] = str(len(os.sched_getaffinity(0)))
            asked.out.write_text(json.dumps({**document, "runs": found}, indent=1) + "\n", encoding="utf-8")
    same = {tuple(one["accepted"]) for one in found}  # type: ignore[arg-type]
    sys.exit(1 if len(same) > 1 or any(one["faults"] for one in found) else 0)


if __name__ == "__main__":
    main()
