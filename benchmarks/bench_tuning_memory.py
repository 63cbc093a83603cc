"""Memory of the process that tunes over thousands of candidates.

    python benchmarks/bench_tuning_memory.py [--candidates 5000] [--tasks 4] [--out FILE]

Small matmuls are tuned with a builder and a runner that answer at once with made-up latencies: searching, learning,
recording and the queues are the real ones, and they are what the tuner's process does; compiled code and measurements
are in other processes, which are recycled. Its resident memory is noted at every 50th candidate. `growth` is the median
of the last tenth less that of the second tenth (the first has the imports and the first searches in it).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import tvm
from tvm import te
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from relaxtune.pipeline.artifact.export import versions  # noqa: E402
from relaxtune.pipeline.choose.stale_records import still_true_in  # noqa: E402
from relaxtune.pipeline.environment import detect_environment  # noqa: E402
from relaxtune.pipeline.tasks.extract import as_workload, make_task  # noqa: E402
from relaxtune.pipeline.tasks.task import TuningTask  # noqa: E402
from relaxtune.pipeline.tuning.local.child import resident_bytes  # noqa: E402
from relaxtune.pipeline.tuning.metaschedule import MetaScheduleBackend, MetaScheduleBuilder  # noqa: E402
from relaxtune.pipeline.tuning.options import TuningOptions  # noqa: E402
from relaxtune.pipeline.tuning.progress import ProgressEvent  # noqa: E402
from relaxtune.pipeline.tuning.session import tune  # noqa: E402
from relaxtune.schedules.targets import resolve_target  # noqa: E402
from relaxtune.tuning_db.store import SqlDatabase  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "tuning-memory.json"
EVERY = 50


@derived_object
class NoBuilder(ms.builder.PyBuilder):
    """Answers every build with a file of no meaning, another one each time."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._serial = 0

    def build(self, build_inputs: list[ms.builder.BuilderInput]) -> list[ms.builder.BuilderResult]:
        """Return one artifact per input."""
        results = []
        for _ in build_inputs:
            self._serial += 1
            path = self._folder / f"{self._serial}.so"
            path.write_text(str(self._serial))
            results.append(ms.builder.BuilderResult(str(path), None))
        return results


@derived_object
class NoFuture(ms.runner.PyRunnerFuture):
    """A made-up latency."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self) -> ms.runner.RunnerResult:
        """Return the latency."""
        return ms.runner.RunnerResult([self._seconds] * 3, None)


@derived_object
class NoRunner(ms.runner.PyRunner):
    """Answers every measurement with a random latency."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = np.random.default_rng(0)

    def run(self, runner_inputs: list[ms.runner.RunnerInput]) -> list[ms.runner.RunnerFuture]:
        """Return one future per input."""
        return [NoFuture(float(self._generator.lognormal(-9.0, 0.5))) for _ in runner_inputs]


class Samples:
    """Resident memory of this process, every so many candidates."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []

    def candidate_measured(self, event: ProgressEvent) -> None:
        """Take a sample when it is time."""
        if event.done % EVERY == 0:
            self.taken.append((event.done, resident_bytes()))


def make_matmul(size: int) -> TuningTask:
    """Return a small task of its own."""
    a, b = (te.placeholder((size, size), name=name) for name in "AB")
    r = te.reduce_axis((0, size), name="r")
    c = te.compute((size, size), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="matmul")
    mod = as_workload(te.create_prim_func([a, b, c]))
    return make_task(f"matmul_{size}", mod, model="memory", function="matmul", calls=(("node",),))


def main() -> None:
    """Tune and print the memory at the start, in the middle and at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=5000)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    target = resolve_target("llvm")
    environment = detect_environment(target)
    samples = Samples()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work, SqlDatabase.open(Path(work) / "tuning.db") as database:
        summary = tune(
            [make_matmul(64 * (number + 1)) for number in range(arguments.tasks)],
            target=target,
            database=database,
            environment=environment,
            still_true=still_true_in(database, target, environment),
            options=TuningOptions(trials=arguments.candidates, workers=2, finals=0, population=32),
            progress=samples,
            builder=MetaScheduleBuilder(NoBuilder(Path(work)), 2),
            backend=MetaScheduleBackend(NoRunner(), environment, target.kind),
        )
    mib = [size / 2**20 for _, size in samples.taken]
    tenth = max(1, len(mib) // 10)
    growth = statistics.median(mib[-tenth:]) - statistics.median(mib[tenth : 2 * tenth])
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {**versions(), "tvm": tvm.__version__},
        "candidates": summary.candidates,
        "tasks": arguments.tasks,
        "seconds": time.monotonic() - began,
        "growth_mib": growth,
        "rss_mib": [[done, round(size / 2**20, 1)] for done, size in samples.taken],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    shown = ", ".join(f"{samples.taken[i][0]}: {mib[i]:.0f} MiB" for i in (0, tenth, len(mib) // 2, len(mib) - 1))
    print(f"{summary.candidates} candidates in {document['seconds']:.0f} s; {shown}; growth {growth:.0f} MiB")


if __name__ == "__main__":
    main()
