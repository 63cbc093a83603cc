"""Memory of the process that tunes over thousands of candidates.

    python -m benchmarks.tuning.bench_tuning_memory [--candidates 5000] [--tasks 4] [--out FILE]

Small matmuls are tuned with a builder and a runner that answer at once with made-up latencies: searching, learning,
recording and the queues are the real ones, and they are what the tuner's process does; compiled code and measurements
are in other processes, which are recycled. Its resident memory is noted at every 50th candidate. `growth` is the median
of the last tenth less that of the second tenth (the first has the imports and the first searches in it).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import tvm
from tvm import te

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.tuning.waiting_backend import WaitingBackend  # noqa: E402
from relaxtune.pipeline.artifact.export import versions  # noqa: E402
from relaxtune.pipeline.choose.record_lookup import still_true_in  # noqa: E402
from relaxtune.pipeline.environment import detect_environment  # noqa: E402
from relaxtune.pipeline.tasks.extract import as_workload, make_task  # noqa: E402
from relaxtune.pipeline.tasks.task import TuningTask  # noqa: E402
from relaxtune.pipeline.tuning.local.backend import Machine  # noqa: E402
from relaxtune.pipeline.tuning.measure.backend import Builder, Built, OnBuilt  # noqa: E402
from relaxtune.pipeline.tuning.measure.recipe import Buildable  # noqa: E402
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact  # noqa: E402
from relaxtune.pipeline.tuning.options import TuningOptions  # noqa: E402
from relaxtune.pipeline.tuning.progress import ProgressEvent  # noqa: E402
from relaxtune.pipeline.tuning.session import tune  # noqa: E402
from relaxtune.pipeline.workers.child import resident_bytes  # noqa: E402
from relaxtune.schedules.targets import resolve_target  # noqa: E402
from relaxtune.tuning_db.records import Status  # noqa: E402
from relaxtune.tuning_db.store import TuningDatabase  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "tuning-memory.json"
EVERY = 50


class NoBuilder(Builder):
    """Answers every build with a file of no meaning, another one each time."""

    capacity, waiting = 2, 0

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._serial = itertools.count()

    def submit(self, what: Buildable, target: tvm.target.Target, on_built: OnBuilt) -> None:
        """Return an artifact."""
        number = str(next(self._serial))
        path = self._folder / f"{number}.so"
        path.write_text(number)
        on_built(Built(Status.OK, BuiltArtifact(str(path), hashlib.sha256(number.encode()).hexdigest())))

    def discard(self, artifact: BuiltArtifact) -> None:
        """Remove the file."""
        Path(str(artifact.content)).unlink()

    def close(self) -> None:
        """Do nothing."""


class Samples:
    """Resident memory of this process, every so many candidates."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []

    def __call__(self, event: ProgressEvent) -> None:
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
    with tempfile.TemporaryDirectory() as work, TuningDatabase.open(Path(work) / "tuning.db") as database:
        summary = tune(
            [make_matmul(64 * (number + 1)) for number in range(arguments.tasks)],
            target=target,
            database=database,
            environment=environment,
            still_true=still_true_in(database, target, environment),
            options=TuningOptions(trials=arguments.candidates, workers=2, finals=0, population=32),
            progress=samples,
            machine=lambda *_: nullcontext(Machine(NoBuilder(Path(work)), WaitingBackend(environment, 1, 0.0))),
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
