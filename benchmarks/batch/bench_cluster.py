"""A cluster larger than any here: many measuring actors and cells, where only importing, building and measuring wait.

    python -m benchmarks.batch.bench_cluster [--actors 4 16 64] [--cells 100 1000] [--models 40] [--measure-ms 250]
        [--build-ms 500] [--import-ms 8000] [--builders-each 4] [--trials-each 30] [--seconds 60] [--file-database]
        [--prepared FOLDER] [--limit 600] [--out FILE] [--plot FILE]

Real are the plan and its cells' states, Ray with an actor process for each device, its object store, PostgreSQL
(`tests/tuning_db/postgres_server.py`), the run's thread, its queue of tasks, searches, what templates offer, and the
records. The tasks are those of --models real cells of the zoo for Hopper, in shapes and precisions that people have,
imported and lowered before the runs; more cells are these again under other names, so that no run tunes them for free.

A measurement is a wait in the actor, drawn for each kernel from an exponential distribution with the mean --measure-ms
(0.08 s on an H200, references and finals included: benchmarks/results/h200-batch.json); it answers with a latency that
the code decides. A build is a wait of --build-ms in one of four actors that stand for all builders; an import is one of
--import-ms, as many at the same time as there are devices. A run ends when all cells are done, or is interrupted after
--seconds.

Told of each run: the share of the time in which an actor waited for a measurement (of all actors, from the first one's
first to the last), candidates a second, the time of one decision which task is next, the driver's processor time, and
its memory: the peak with what it maps of the object store, and without that over time (`samples`, every 5 s). A run is
interrupted after --limit seconds; its samples tell how far it came. With --out they are in FILE.samples meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray

from benchmarks.batch.count_batch_tasks import plan_text
from benchmarks.batch.waiting_actors import WaitingActor, WaitingBuilders
from benchmarks.batch.waiting_cluster import (
    BUILDING_ACTORS,
    BuildTask,
    WaitingExecutors,
    WaitingMeasurer,
    WaitingRayBuilder,
    WaitingWorkers,
)
from benchmarks.this_run import run_facts
from relaxtune.pipeline.batch import driver
from relaxtune.pipeline.batch.cells import Cell, list_cells
from relaxtune.pipeline.batch.events import BatchEvent, CandidateEvent
from relaxtune.pipeline.batch.plan import parse_plan
from relaxtune.pipeline.batch.tasks import CellFault, prepare_cell
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.tuning.local.backend import Machine
from relaxtune.pipeline.tuning.local.build_pool import BuilderLimits
from relaxtune.pipeline.tuning.measure.side_by_side import SideBySide
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.tasks import Tasks
from relaxtune.tuning_db.batches import list_cells as list_rows
from relaxtune.tuning_db.cell_states import CellState
from relaxtune.tuning_db.store import TuningDatabase
from tests.tuning_db.postgres_server import running_server

_OBJECT_STORE = 800 << 20
_SAMPLE_EVERY_S = 5.0
# What a run that is interrupted has for its end.
_END_S = 60.0


def prepare(folder: Path, count: int, processes: int) -> list[Path]:
    """Import and lower real cells into files, with what their tasks begin with."""
    cells = list(list_cells(parse_plan(Path("many.toml"), plan_text("cuda:sm_90a"))))
    random.Random(0).shuffle(cells)
    chosen = cells[:count]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(prepare_one, chosen, [folder / f"{number}.pickle" for number in range(count)]))


def prepare_one(cell: Cell, path: Path) -> Path:
    """Import and lower one cell into a file."""
    found = prepare_cell(cell)
    if isinstance(found, CellFault):
        raise PipelineError(found.note)
    path.write_bytes(pickle.dumps(found.with_starts()))
    return path


def run_once(arguments: argparse.Namespace, actors: int, cells: int) -> dict[str, object]:
    """Carry a plan of so many cells out with so many actors; a process of its own, so that its memory is one run's."""
    paths = sorted(arguments.prepared.glob("*.pickle"))
    ray.init(
        "local",
        num_cpus=len(os.sched_getaffinity(0)), include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=_OBJECT_STORE,
    )  # fmt: skip
    decisions: list[float] = []
    choose = Tasks.choose

    def timed(self: Tasks, *rest: Any) -> Any:
        began = time.perf_counter()
        found = choose(self, *rest)
        decisions.append(time.perf_counter() - began)
        return found

    Tasks.choose = timed  # type: ignore[method-assign]
    made = ray.remote(max_restarts=-1, num_cpus=0)(WaitingActor)
    handles = [made.remote(arguments.measure_ms / 1e3) for _ in range(actors)]
    ray.get([one.begin.remote() for one in handles])
    building = ray.remote(num_cpus=0, max_concurrency=1000)(WaitingBuilders)
    builders = [
        building.remote(arguments.build_ms / 1e3, arguments.import_ms / 1e3)
        for _ in range(max(1, min(BUILDING_ACTORS, actors // 16)))
    ]
    ray.get([one.begin.remote() for one in builders])
    told: list[tuple[float, float, float]] = []
    spent: list[float] = []
    samples: list[dict[str, float]] = []
    seen: Counter[str] = Counter()
    over = threading.Event()

    def count(event: BatchEvent) -> None:
        seen["candidates" if isinstance(event, CandidateEvent) else event.state.value] += 1

    def watch(queues: list[Tasks]) -> None:
        began = time.monotonic()
        while not over.wait(_SAMPLE_EVERY_S):
            tasks = sum(len(one) for one in queues)
            samples.append({
                "at_s": round(time.monotonic() - began, 1),
                "tasks": tasks,
                "candidates": seen["candidates"],
                "cells_done": seen[CellState.DONE.value],
                "decisions": len(decisions),
                "processor_s": round(time.process_time(), 2),
                "own_mb": round(own_mb(), 1),
            })  # fmt: skip
            if arguments.samples:
                with arguments.samples.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(samples[-1]) + "\n")

    queues: list[Tasks] = []
    made_queue = Tasks.__init__

    def noted(self: Tasks, *rest: Any) -> None:
        made_queue(self, *rest)
        queues.append(self)

    Tasks.__init__ = noted  # type: ignore[method-assign]
    threading.Thread(target=watch, args=(queues,), daemon=True).start()

    @contextmanager
    def opened(stop: StopSignal) -> Iterator[Machine]:
        measurers = [WaitingMeasurer(ray, one, f"waits {at}", stop) for at, one in enumerate(handles)]
        backend = SideBySide(measurers, undisturbed=True, depth=2)
        builder = WaitingRayBuilder(ray, BuilderLimits(), stop)
        builder.builders = actors * arguments.builders_each
        builder._task = BuildTask(builders)
        cpu, own, began = time.process_time(), time.thread_time(), time.monotonic()
        timer = threading.Timer(arguments.seconds, stop.request)
        timer.daemon = True
        timer.start()
        try:
            yield Machine(builder, backend)
            told.extend(ray.get([one.told.remote() for one in handles]))
        finally:
            timer.cancel()
            spent.extend((time.process_time() - cpu, time.thread_time() - own, time.monotonic() - began))
            builder.close()
            backend.close()

    with (
        tempfile.TemporaryDirectory() as folder,
        nullcontext(f"sqlite:///{folder}/tuning.db") if arguments.file_database else running_server() as url,
    ):
        shapes = [f"input_ids={1 + number // 100}x{1 + number % 100}" for number in range(cells)]
        plan = parse_plan(
            Path(folder) / "many.toml",
            f'database = "{url}"\neffort = "quick"\n[budget]\ncandidates = {cells * arguments.trials_each}\n'
            f'[[cells]]\nmodels = ["bert-tiny"]\ntargets = ["cuda:sm_90a"]\nshapes = {shapes}\n',
        )
        numbers = {cell.name: number for number, cell in enumerate(list_cells(plan))}
        workers = WaitingWorkers(actors, builders, paths, numbers)
        driver.open_executors = lambda *_, **__: closing(WaitingExecutors(opened, workers))  # type: ignore[assignment]
        result = driver.run_batch(plan, on_event=count)
        with TuningDatabase.open(url) as database:
            records, database_bytes = database.count_records(), database.info().size_bytes
            states = [row.state for row in list_rows(database, result.batch_id)]
    over.set()
    ray.shutdown()
    (summary,) = result.tuning
    used = [one for one in told if one[0]]
    first, last = min(one[1] for one in used), max(one[2] for one in used)
    measured = records / (last - first)
    return {
        "actors": actors,
        "cells": cells,
        "cells_done": states.count(CellState.DONE),
        "tasks": len(summary.tasks),
        "candidates": summary.candidates,
        "records": records,
        "seconds": spent[2],
        "measuring_s": last - first,
        "measured_per_s": measured,
        "busy_share": sum(one[0] for one in told) / (actors * (last - first)),
        "decision_ms_median": 1e3 * statistics.median(decisions or [0.0]),
        "decision_ms_p99": 1e3 * sorted(decisions or [0.0])[int(0.99 * (len(decisions) - 1))],
        "decision_ms_max": 1e3 * max(decisions, default=0.0),
        "decisions": len(decisions),
        "driver_thread_ms_per_record": 1e3 * spent[1] / max(1, records),
        "driver_process_ms_per_record": 1e3 * spent[0] / max(1, records),
        "driver_threads": threading.active_count(),
        "driver_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "driver_own_peak_mb": max((one["own_mb"] for one in samples), default=own_mb()),
        "database_mb": database_bytes / 2**20,
        "samples": samples,
        "seconds_by_phase": dict(summary.seconds_by_phase),
    }


def own_mb() -> float:
    """Return this process's memory without what it shares, such as the object store."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw how the busy share, the driver's memory and a decision grow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = (("busy_share", "actors busy"), ("driver_own_peak_mb", "driver, MB"), ("decision_ms_p99", "ms, p99"))
    figure, axes = pyplot.subplots(1, len(figures), figsize=(13, 4))
    for axis, (name, label) in zip(axes, figures, strict=True):
        ended = [run for run in document["runs"] if "fault" not in run and (run["decisions"] or axis is not axes[-1])]
        for cells in sorted({run["cells"] for run in ended}):
            runs = sorted((run for run in ended if run["cells"] == cells), key=lambda run: run["actors"])
            axis.plot([run["actors"] for run in runs], [run[name] for run in runs], marker="o", label=f"{cells} cells")
        axis.set(xlabel="measuring actors", ylabel=label, ylim=(0, None))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def run_all(arguments: argparse.Namespace, prepared: Path) -> dict[str, Any]:
    """Run every number of actors with every number of cells, each in a process of its own."""
    passed = ("measure_ms", "build_ms", "import_ms", "builders_each", "trials_each", "seconds")
    settings = {name: getattr(arguments, name) for name in passed}
    document: dict[str, Any] = {
        "settings": {**settings, "models": len(list(prepared.iterdir()))},
        "machine": run_facts(),
        "ray": ray.__version__,
        "runs": [],
    }
    for actors, cells in itertools.product(arguments.actors, arguments.cells):
        command = [sys.executable, "-m", "benchmarks.batch.bench_cluster", "--one", "--prepared", str(prepared)]
        command += ["--actors", str(actors), "--cells", str(cells)]
        command += [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command += ["--file-database"] if arguments.file_database else []
        with tempfile.TemporaryDirectory() as folder:
            samples = Path(f"{arguments.out}.samples") if arguments.out else Path(folder) / "samples"
            samples.write_text("", encoding="utf-8")
            run = run_limited([*command, "--samples", str(samples)], samples, arguments.limit)
        document["runs"].append({"actors": actors, "cells": cells, "load": os.getloadavg()[0], **run})
        print(json.dumps({**document["runs"][-1], "samples": run["samples"][-1:]}), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def run_limited(command: Sequence[str], samples: Path, limit_s: float) -> dict[str, Any]:
    """Return what a run told; of one that ended without an answer, why, and its samples."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        told = ""
        for sign, seconds in ((signal.SIGINT, limit_s), (signal.SIGKILL, _END_S)):
            try:
                out, told = process.communicate(timeout=seconds)
                break
            except subprocess.TimeoutExpired:
                # Ctrl-C first: what was started is ended, and the answer comes.
                process.send_signal(sign)
                told = f"killed after {limit_s:g} s"
    if process.returncode == 0:
        return dict(json.loads(out.strip().splitlines()[-1]))
    seen = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    return {"fault": told.strip()[-2000:], "samples": seen}


def main() -> None:
    """Run every number of actors with every number of cells."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--actors", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--cells", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--measure-ms", type=float, default=250.0)
    parser.add_argument("--build-ms", type=float, default=500.0)
    parser.add_argument("--import-ms", type=float, default=8000.0)
    parser.add_argument("--builders-each", type=int, default=4)
    parser.add_argument("--trials-each", type=int, default=30, help="Candidates for each cell.")
    parser.add_argument("--models", type=int, default=40, help="Real cells that are imported before the runs.")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="Processes that import these.")
    parser.add_argument("--prepared", type=Path, help="A folder of such cells; kept from one call to the next.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--limit", type=float, default=600.0, help="Seconds after which a run is interrupted.")
    parser.add_argument("--samples", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--file-database", action="store_true", help="SQLite, where PostgreSQL is not installed.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        # A shell's background job begins with Ctrl-C ignored, and --limit uses it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(json.dumps(run_once(arguments, arguments.actors[0], arguments.cells[0])))
        return
    with tempfile.TemporaryDirectory() if arguments.prepared is None else nullcontext(arguments.prepared) as folder:
        prepared = Path(folder)
        prepared.mkdir(exist_ok=True)
        if not any(prepared.iterdir()):
            prepare(prepared, arguments.models, arguments.processes)
        document = run_all(arguments, prepared)
    if arguments.plot:
        plot(document, arguments.plot)


if __name__ == "__main__":
    main()
