"""A cluster larger than any here: many measuring actors and cells, where only building and measuring are waited for.

    python -m benchmarks.bench_cluster [--actors 4 16 64] [--cells 100 1000] [--measure-ms 250] [--build-ms 500]
        [--builders-each 4] [--trials-each 8] [--seconds 60] [--file-database] [--out FILE] [--plot FILE]

Real are Ray with an actor process for each device, its object store, PostgreSQL (`tests/tuning_db/postgres_server.py`),
the run's thread, its queue of tasks, what templates offer, and the records. A measurement is a wait of --measure-ms in
the actor, and answers with a latency that the code decides; a build is a wait of --build-ms in one of four actors that
stand for all builders. Each cell brings a task of its own and three that it shares with others. A run ends when all
cells are tuned, or after --seconds.

Told of each run: the share of the time in which an actor waited for a measurement (of all actors, from the first one's
first to the last), candidates a second, the time of one decision which task is next, and the driver's peak memory.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from tvm import te

from benchmarks.gpu_arms.results import machine
from relaxtune.pipeline.choose.stale_records import still_true_in
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.tasks.extract import as_workload, make_task
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.local.build_pool import BuilderLimits
from relaxtune.pipeline.tuning.local.machine import Machine
from relaxtune.pipeline.tuning.measure.backend import Built, Capabilities, Outcome
from relaxtune.pipeline.tuning.measure.side_by_side import SideBySide
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.plan.feed import Arrival
from relaxtune.pipeline.tuning.plan.task_queue import TaskQueue
from relaxtune.pipeline.tuning.progress import ProgressEvent
from relaxtune.pipeline.tuning.ray.backend import ActorMeasurer
from relaxtune.pipeline.tuning.ray.builder import RayBuilder
from relaxtune.pipeline.tuning.ray.objects import ArtifactStore
from relaxtune.pipeline.tuning.session import tune
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Route, Status
from relaxtune.tuning_db.store import SqlDatabase
from tests.tuning_db.postgres_server import running_server

_SHARED = 3
_SHARED_OF_ALL = 50
_BUILDING_ACTORS = 4
_START_S = 600.0
_OBJECT_STORE = 400 << 20


class WaitingActor:
    """Stands for a device; it imports nothing of ours, so that many fit on one machine."""

    def __init__(self, measure_s: float) -> None:
        self.measure_s, self.slept, self.first, self.last = measure_s, 0.0, 0.0, 0.0

    def begin(self) -> str:
        """Return the host."""
        return socket.gethostname()

    def measure(self, workload: str, code: bytes) -> float:
        """Wait, and return a latency."""
        began = time.time()
        self.first = self.first or began
        time.sleep(self.measure_s)
        self.last = time.time()
        self.slept += self.last - began
        digest = hashlib.sha256(workload.encode() + code).digest()
        return (10.0 + 90.0 * int.from_bytes(digest[:4], "big") / 2**32) * 1e-6

    def told(self) -> tuple[float, float, float]:
        """Return the seconds waited, and when the first wait began and the last one ended."""
        return self.slept, self.first, self.last

    def leave(self) -> None:
        """Do nothing."""


class WaitingBuilders:
    """Stands for builders: each build is a wait, as many at the same time as are asked for."""

    def __init__(self, build_s: float) -> None:
        self.build_s = build_s

    async def build(self, what: bytes, _target: bytes, _limits: object) -> tuple[Built, bytes]:
        """Wait, and return code that the kernel decides."""
        await asyncio.sleep(self.build_s)
        code = hashlib.sha256(what).digest() * 2000
        return Built(Status.OK, BuiltArtifact("", hashlib.sha256(code).hexdigest()), None, self.build_s), code


class WaitingMeasurer(ActorMeasurer):
    """An actor that only waits; what is lost and found is Ray's business as ever."""

    def prepare_reference(self, spec: WorkloadSpec) -> None:
        """Do nothing: no result is compared."""

    def measure(self, artifact: BuiltArtifact, spec: WorkloadSpec) -> Outcome:
        """Let the actor wait."""
        answer = self._ask(lambda: self._actor.measure.remote(spec.workload, self._store.find(artifact)))
        if isinstance(answer, Outcome):
            return answer
        return Outcome(Status.OK, (answer,) * 3, environment=ENVIRONMENT)


class _Task:
    """What `RayBuilder` calls: the next of the building actors."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._next = itertools.cycle(actors)

    def remote(self, *arguments: object) -> Any:
        return next(self._next).build.options(num_returns=2).remote(*arguments)


class WaitingRayBuilder(RayBuilder):
    """As many builders as the devices of the run have."""

    builders = 1

    @property
    def capacity(self) -> int:
        """Builds at the same time."""
        return self.builders


class Cells:
    """The feed of a run: cells come as long as there is too little to do."""

    def __init__(self, cells: int, ahead: int) -> None:
        self._left = list(range(cells))
        self._ahead = ahead
        self._granted = self._back = 0
        self.trials = 0

    @property
    def arriving(self) -> bool:
        """Whether cells are left."""
        return bool(self._left)

    def take(self, *, idle: bool) -> list[Arrival]:
        """Give cells while there is too little to do."""
        arrivals = []
        while self._left and self._granted - self._back < self._ahead:
            number = self._left.pop(0)
            tasks = (
                task_of(1000 + number),
                *(task_of((number * 7 + each) % _SHARED_OF_ALL) for each in range(_SHARED)),
            )
            self._granted += self.trials
            arrivals.append(Arrival(tasks, self.trials))
        return arrivals

    def settled(self, workload_hashes: Sequence[str]) -> None:
        """Do nothing: cells come by the candidates that are back."""

    def candidate_measured(self, _event: ProgressEvent) -> None:
        """Count a candidate that is back."""
        self._back += 1

    def wait(self, seconds: float) -> None:
        """Wait a moment."""
        time.sleep(min(seconds, 0.01))


TARGET = resolve_target("cuda:sm_90a")
ENVIRONMENT = replace(detect_environment(TARGET), device_name="a device that waits")
_tasks: dict[int, TuningTask] = {}


def task_of(number: int) -> TuningTask:
    if number not in _tasks:
        a = te.placeholder((4096 + 64 * number,), name="A")
        mod = as_workload(te.create_prim_func([a, te.compute(a.shape, lambda i: a[i] + 1.0, name="C")]))
        name = f"add_{number}"
        _tasks[number] = make_task(name, mod, model="m", function=name, calls=((f"{name}_node",),))
    return _tasks[number]


def run_once(arguments: argparse.Namespace, actors: int, cells: int) -> dict[str, object]:
    """Tune the cells with so many actors; a process of its own, so that its memory is one run's."""
    for number in (*range(_SHARED_OF_ALL), *range(1000, 1000 + cells)):
        task_of(number)
    ray.init(
        "local",
        num_cpus=actors + 8, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=_OBJECT_STORE,
    )  # fmt: skip
    decisions: list[float] = []
    choose = TaskQueue.choose

    def timed(self: TaskQueue, *rest: Any) -> Any:
        began = time.perf_counter()
        found = choose(self, *rest)
        decisions.append(time.perf_counter() - began)
        return found

    TaskQueue.choose = timed  # type: ignore[method-assign]
    trials = arguments.trials_each * (1 + _SHARED)
    feed = Cells(cells, ahead=8 * actors + 2 * trials)
    feed.trials = trials
    told: list[tuple[float, float, float]] = []

    @contextmanager
    def machine(_target: object, _environment: object, _options: object, stop: Any) -> Iterator[Machine]:
        store = ArtifactStore()
        made = ray.remote(max_restarts=-1, num_cpus=0)(WaitingActor)
        handles = [made.remote(arguments.measure_ms / 1e3) for _ in range(actors)]
        ray.get([one.begin.remote() for one in handles])
        building = ray.remote(num_cpus=0, max_concurrency=1000)(WaitingBuilders)
        builders = [building.remote(arguments.build_ms / 1e3) for _ in range(_BUILDING_ACTORS)]
        measurers = [WaitingMeasurer(ray, one, f"waits {at}", store, stop) for at, one in enumerate(handles)]
        backend = SideBySide(measurers, Capabilities("cuda", "waits", compares=False, undisturbed=True), depth=2)
        builder = WaitingRayBuilder(ray, store, BuilderLimits(), stop)
        builder.builders = actors * arguments.builders_each
        builder._task = _Task(builders)
        # What starts Ray's processes is no part of a run's time.
        stop.deadline = time.monotonic() + arguments.seconds
        try:
            yield Machine(builder, backend)
            told.extend(ray.get([one.told.remote() for one in handles]))
        finally:
            builder.close()
            backend.close()

    options = TuningOptions(
        trials=None, time_budget_s=_START_S, finals=0, warm_start_s=0.0, routes=frozenset({Route.TEMPLATE})
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        nullcontext(f"sqlite:///{folder}/tuning.db") if arguments.file_database else running_server() as url,
        SqlDatabase.open(url) as database,
    ):
        began, cpu, own = time.monotonic(), time.process_time(), time.thread_time()
        summary = tune(
            (), target=TARGET, database=database, environment=ENVIRONMENT, options=options, machine=machine, feed=feed,
            progress=feed, still_true=still_true_in(database, TARGET, ENVIRONMENT),
        )  # fmt: skip
        seconds, cpu, own = time.monotonic() - began, time.process_time() - cpu, time.thread_time() - own
        records = len(database.list_records())
    ray.shutdown()
    used = [one for one in told if one[0]]
    first, last = min(one[1] for one in used), max(one[2] for one in used)
    return {
        "actors": actors,
        "cells": cells,
        "tasks": len(summary.tasks),
        "candidates": summary.candidates,
        "records": records,
        "seconds": seconds,
        "cells_left": len(feed._left),
        "measuring_s": last - first,
        "candidates_per_s": summary.candidates / (last - first),
        "possible_per_s": actors / (arguments.measure_ms / 1e3),
        "busy_share": sum(one[0] for one in told) / (actors * (last - first)),
        "decision_ms_median": 1e3 * statistics.median(decisions),
        "decision_ms_p99": 1e3 * sorted(decisions)[int(0.99 * (len(decisions) - 1))],
        "decisions": len(decisions),
        "driver_thread_ms_per_candidate": 1e3 * own / max(1, summary.candidates),
        "driver_process_ms_per_candidate": 1e3 * cpu / max(1, summary.candidates),
        "driver_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "seconds_by_phase": dict(summary.seconds_by_phase),
    }


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw how the busy share, the driver's memory and a decision grow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = (("busy_share", "share of actors busy"), ("driver_peak_mb", "driver, MB"), ("decision_ms_p99", "ms, p99"))
    figure, axes = pyplot.subplots(1, len(figures), figsize=(13, 4))
    for axis, (name, label) in zip(axes, figures, strict=True):
        for cells in sorted({run["cells"] for run in document["runs"]}):
            runs = sorted((run for run in document["runs"] if run["cells"] == cells), key=lambda run: run["actors"])
            axis.plot([run["actors"] for run in runs], [run[name] for run in runs], marker="o", label=f"{cells} cells")
        axis.set(xlabel="measuring actors", ylabel=label, ylim=(0, None))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Run every number of actors with every number of cells."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--actors", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--cells", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--measure-ms", type=float, default=250.0)
    parser.add_argument("--build-ms", type=float, default=500.0)
    parser.add_argument("--builders-each", type=int, default=4)
    parser.add_argument("--trials-each", type=int, default=8, help="Candidates for each task of a cell.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--file-database", action="store_true", help="SQLite, where PostgreSQL is not installed.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run_once(arguments, arguments.actors[0], arguments.cells[0])))
        return
    settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "plot", "one")}
    document: dict[str, Any] = {"machine": machine(), "settings": settings, "ray": ray.__version__, "runs": []}
    for actors, cells in itertools.product(arguments.actors, arguments.cells):
        command = [
            sys.executable, "-m", "benchmarks.bench_cluster", "--one", "--actors", str(actors), "--cells", str(cells),
            "--measure-ms", str(arguments.measure_ms), "--build-ms", str(arguments.build_ms),
            "--builders-each", str(arguments.builders_each), "--trials-each", str(arguments.trials_each),
            "--seconds", str(arguments.seconds), *(["--file-database"] if arguments.file_database else []),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{actors} actors, {cells} cells: {done.stderr.strip()[-2000:]}")
        document["runs"].append(json.loads(done.stdout.strip().splitlines()[-1]))
        print(json.dumps(document["runs"][-1]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        plot(document, arguments.plot)


if __name__ == "__main__":
    main()
