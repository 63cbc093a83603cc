"""Candidates a second while tuning a model's kernels: by number of build processes, and stock MetaSchedule beside it.

    python -m benchmarks.tuning.bench_tuning_scaling [--model bert-base] [--shape input_ids=1x128] [--precision fp16]
        [--workers 1 2 4 8 16] [--seconds 25] [--stock-seconds 90] [--light-seconds 35]
        [--arms search "stock light"] [--out FILE]

Every arm tunes for so many seconds in a process of its own, one arm after the other, and is then ended. All processes
import the model first, together, and wait for their turn.

- *stock*: `meta_schedule.tune_tasks` with its own builder (as many processes as the last of --workers), runner, space,
  cost model, scheduler and number of candidates a round (64), and a search thread for each core. It needs the package
  cloudpickle.
- *stock replay*: the same with MetaSchedule's strategy `replay-trace`, which draws candidates and evolves none: the
  least time that stock can spend on a search.
- *search N*: this project's search alone, with N build processes, in an empty database; no finals, no early stop.
- *all N*: the same with the kernel templates, as a user gets it; with the last of --workers.
- *stock light*, *search light*: the same two on the tasks that are neither matmuls nor attention: of stock's schedules
  of matmuls most fail to build.

All but *all* tune the same kernels: those of the model lowered without the passes whose kernels only templates make,
for some of which stock has no design space. Every process runs as if PyTorch were not installed, which TVM would import
in each of stock's build processes.

A candidate counts when it is measured or has failed: of stock, when its builder or its runner says so, since its
scheduler asks for the results of a round only after the first rounds of all tasks. The clock runs from the call, so
that process starts, references and default schedules count; importing the model does not. `steady` leaves out what
comes before the first candidate. Raw moments of every candidate, and the seconds of each of stock's rounds, go to the
output file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.relax_integration import extracted_tasks_to_tune_contexts

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from relaxtune.pipeline.artifact.export import versions  # noqa: E402
from relaxtune.pipeline.choose.record_lookup import still_true_in  # noqa: E402
from relaxtune.pipeline.cli.options import parse_shapes  # noqa: E402
from relaxtune.pipeline.passes.module import LoweringOptions  # noqa: E402
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model  # noqa: E402
from relaxtune.pipeline.tasks.task import TuningTask  # noqa: E402
from relaxtune.pipeline.tuning.options import TuningOptions  # noqa: E402
from relaxtune.pipeline.tuning.progress import ProgressEvent  # noqa: E402
from relaxtune.pipeline.tuning.result_table import to_data  # noqa: E402
from relaxtune.pipeline.tuning.session import tune  # noqa: E402
from relaxtune.tuning_db.records import Route  # noqa: E402
from relaxtune.tuning_db.store import TuningDatabase  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "tuning-scaling.json"
STOCK_TRIALS = 1 << 16
# Until an arm that was told to end has ended.
GRACE_S = 60
ARMS = ("stock", "stock replay", "stock light", "search", "search light", "all")
# Families of kernels whose tasks the light arms leave out.
HEAVY = ("matmul", "batch_matmul", "attention")


class Moments:
    """The seconds, from the start of the clock, at which each candidate was finished, and whether it was valid."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._began = time.monotonic()
        self._valid = 0

    @property
    def now_s(self) -> float:
        """Seconds since the start of the clock."""
        return time.monotonic() - self._began

    def add(self, valid: bool) -> None:
        """Note a candidate, at once in the file: an arm may be killed."""
        self._file.write(f"{self.now_s:.3f} {int(valid)}\n")

    def __call__(self, event: ProgressEvent) -> None:
        """Note a candidate of ours."""
        self.add(event.valid > self._valid)
        self._valid = event.valid


class Phases:
    """What stock's builder and runner did, and when: a line of JSON each, at once in the file."""

    def __init__(self, path: Path, moments: Moments) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._moments = moments

    @contextlib.contextmanager
    def timed(self, phase: str, candidates: int) -> Iterator[None]:
        """Note what goes on inside."""
        began = self._moments.now_s
        yield
        noted = {"phase": phase, "candidates": candidates, "from_s": began, "to_s": self._moments.now_s}
        self._file.write(json.dumps(noted) + "\n")


@derived_object
class CountingBuilder(ms.builder.PyBuilder):
    """Stock's builder, whose failures are noted."""

    def __init__(self, inner: ms.builder.LocalBuilder, moments: Moments, phases: Phases) -> None:
        super().__init__()
        self.inner, self.moments, self.phases = inner, moments, phases

    def build(self, build_inputs: list[ms.builder.BuilderInput]) -> list[ms.builder.BuilderResult]:
        """Build a round's candidates."""
        with self.phases.timed("build", len(build_inputs)):
            results: list[ms.builder.BuilderResult] = list(self.inner.build(build_inputs))
        for result in results:
            if result.error_msg is not None:
                self.moments.add(valid=False)
        return results


@derived_object
class CountingRunner(ms.runner.PyRunner):
    """Stock's runner, which measures one candidate after the other, each of them noted."""

    def __init__(self, inner: ms.runner.LocalRunner, moments: Moments, phases: Phases) -> None:
        super().__init__()
        self.inner, self.moments, self.phases = inner, moments, phases

    def run(self, runner_inputs: list[ms.runner.RunnerInput]) -> list[ms.runner.RunnerFuture]:
        """Measure what was built of a round's candidates."""
        futures = []
        with self.phases.timed("run", len(runner_inputs)):
            for one in runner_inputs:
                (future,) = self.inner.run([one])
                self.moments.add(valid=future.result().error_msg is None)
                futures.append(future)
        return futures


def run_stock(prepared: PreparedModel, tasks: Sequence[TuningTask], arm: Arm, folder: Path) -> None:
    """Tune with stock MetaSchedule until the process is ended."""
    target = prepared.target.target
    extracted = [ms.ExtractedTask(task.name, task.mod, target, [task.mod], task.weight) for task in tasks]
    moments = Moments(folder / "moments")
    phases = Phases(folder / "phases", moments)
    contexts, weights = extracted_tasks_to_tune_contexts(
        extracted,
        str(folder),
        strategy="replay-trace" if "replay" in arm.name else "evolutionary",
        num_threads="logical",
        seed=1,
    )
    ms.tune_tasks(
        tasks=contexts,
        task_weights=weights,
        work_dir=str(folder),
        max_trials_global=STOCK_TRIALS,
        builder=CountingBuilder(ms.builder.LocalBuilder(max_workers=arm.workers), moments, phases),
        runner=CountingRunner(ms.runner.LocalRunner(), moments, phases),
    )


def run_ours(
    prepared: PreparedModel,
    tasks: Sequence[TuningTask],
    workers: int,
    seconds: float,
    routes: frozenset[Route],
    folder: Path,
) -> None:
    """Tune with this project for some seconds and write what came of it."""
    with TuningDatabase.open(folder / "tuning.db") as database:
        moments = Moments(folder / "moments")
        summary = tune(
            tasks,
            target=prepared.target,
            database=database,
            environment=prepared.environment,
            still_true=still_true_in(database, prepared.target, prepared.environment),
            options=TuningOptions(
                trials=None, time_budget_s=seconds, workers=workers, routes=routes, finals=0, warm_start_s=0.0, seed=1
            ),
            progress=moments,
        )
    document = {**to_data(summary), "environment": asdict(prepared.environment)}
    (folder / "summary.json").write_text(json.dumps(document), encoding="utf-8")


@dataclass(frozen=True)
class Arm:
    """What one process does; `light` leaves out matmuls and attention."""

    name: str
    workers: int
    seconds: float

    @property
    def is_stock(self) -> bool:
        """Whether it runs until it is ended."""
        return self.name.startswith("stock")


class ArmProcess:
    """An arm that imports the model at once and tunes when it is told to."""

    def __init__(self, arm: Arm, arguments: argparse.Namespace) -> None:
        self.arm = arm
        self._work = tempfile.TemporaryDirectory(prefix="relaxtune-scaling-")
        self.folder = Path(self._work.name)
        passed = ["--model", arguments.model, "--target", arguments.target, "--precision", arguments.precision]
        passed += ["--arm", arm.name, "--workers", str(arm.workers), "--seconds", str(arm.seconds)]
        for shape in arguments.shape:
            passed += ["--shape", shape]
        without_torch = self.folder / "without-torch"
        without_torch.mkdir()
        (without_torch / "torch.py").write_text('raise ImportError("left out")\n', encoding="utf-8")
        paths = [str(without_torch), *filter(None, [os.environ.get("PYTHONPATH")])]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--work", self._work.name, *passed],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )

    def wait_until_ready(self) -> None:
        """Wait until the model is imported, or the process has ended."""
        while self._process.poll() is None and not (self.folder / "ready").exists():
            time.sleep(0.05)

    def run(self) -> dict[str, Any]:
        """Let it tune and return what it did."""
        arm, folder = self.arm, self.folder
        (folder / "go").touch()
        code = self._wait()
        lines = (folder / "moments").read_text(encoding="utf-8").split("\n") if (folder / "moments").exists() else []
        moments = [(float(at), valid == "1") for at, valid in (line.split() for line in lines if " " in line)]
        moments = [one for one in moments if one[0] <= arm.seconds]
        summary = json.loads((folder / "summary.json").read_text()) if (folder / "summary.json").exists() else None
        rounds = (folder / "phases").read_text(encoding="utf-8").splitlines() if arm.is_stock else []
        log = (folder / "log").read_text(encoding="utf-8", errors="replace")
        if not moments:
            print(f"{arm} finished no candidate (exit {code}):\n{log[-1500:]}", file=sys.stderr)
        self._work.cleanup()
        first = moments[0][0] if moments else None
        failures: Counter[str] = Counter()
        for task in summary["tasks"] if summary else ():
            failures.update(task["failures"])
        return {
            "arm": arm.name,
            "workers": arm.workers,
            "seconds": arm.seconds,
            "candidates": len(moments),
            "valid": sum(valid for _, valid in moments),
            "failures": dict(failures),
            "per_s": len(moments) / arm.seconds,
            "steady_per_s": (len(moments) - 1) / (arm.seconds - first) if first is not None else 0.0,
            "first_candidate_s": first,
            "seconds_by_phase": summary["seconds_by_phase"] if summary else None,
            "valid_per_s": sum(valid for _, valid in moments) / arm.seconds,
            "stock_phases": [json.loads(line) for line in rounds],
            "stock_log": scheduler_lines(log) if arm.is_stock else [],
            "environment": summary["environment"] if summary else None,
            "moments_s": [at for at, _ in moments],
        }

    def _wait(self) -> int:
        """Wait for the end; one that does not end by itself is ended so many seconds after its clock started."""
        while self._process.poll() is None and not (self.folder / "moments").exists():
            time.sleep(0.05)
        try:
            return self._process.wait(timeout=self.arm.seconds + (0.5 if self.arm.is_stock else GRACE_S))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()


def scheduler_lines(log: str) -> list[str]:
    """Return when stock's scheduler began, and which task it took and sent on when."""
    told = ("Logging directory", "TaskScheduler picks", "sample(s)")
    return [line for line in log.splitlines() if any(text in line for text in told)]


def run_child(arm: Arm, arguments: argparse.Namespace) -> None:
    """Import the model, wait for the turn, tune."""
    lowering = LoweringOptions(precision=None if arguments.precision == "fp32" else arguments.precision)
    routes = frozenset({Route.METASCHEDULE} | ({Route.TEMPLATE} if arm.name == "all" else set()))
    request = ModelRequest(
        arguments.model,
        shapes=parse_shapes(arguments.shape),
        target=arguments.target,
        lowering=lowering,
        routes=routes,
    )
    prepared = prepare_model(request)
    tasks = [task for task in prepared.tasks if task.family not in HEAVY or "light" not in arm.name]
    (arguments.work / "ready").touch()
    while not (arguments.work / "go").exists():
        time.sleep(0.02)
    if arm.is_stock:
        run_stock(prepared, tasks, arm, arguments.work)
    else:
        run_ours(prepared, tasks, arm.workers, arm.seconds, routes, arguments.work)


def main() -> None:
    """Run all arms and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--shape", nargs="*", default=[])
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--target", default="auto")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--stock-seconds", type=float, default=90.0)
    parser.add_argument("--light-seconds", type=float, default=35.0, help="of the arms stock light and stock replay")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="which arms are run")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    most = arguments.workers[-1]
    if arguments.arm is not None:
        run_child(Arm(arguments.arm, most, arguments.seconds), arguments)
        return
    ours, stock, light = arguments.seconds, arguments.stock_seconds, arguments.light_seconds
    plan = [
        Arm("search", most, ours),
        Arm("stock", most, stock),
        Arm("all", most, ours),
        Arm("stock light", most, light),
        Arm("search light", most, ours),
        Arm("stock replay", most, light),
        *(Arm("search", count, ours) for count in reversed(arguments.workers[:-1])),
    ]
    processes = [ArmProcess(arm, arguments) for arm in plan if arm.name in arguments.arms]
    for process in processes:
        process.wait_until_ready()
    runs = []
    for process in processes:
        run = process.run()
        runs.append(run)
        phases = " ".join(f"{name} {value:.0f}" for name, value in (run["seconds_by_phase"] or {}).items())
        first = "none" if run["first_candidate_s"] is None else f"{run['first_candidate_s']:.1f} s"
        print(
            f"{run['arm']:12} {run['workers']:2} build processes: {run['candidates']:4} candidates in "
            f"{run['seconds']:.0f} s, {run['per_s']:.2f}/s, steady {run['steady_per_s']:.2f}/s, first {first}, "
            f"{run['valid']} valid; {phases}",
            flush=True,
        )
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": arguments.model,
            "shape": arguments.shape,
            "precision": arguments.precision,
            "cores": os.cpu_count(),
            "versions": dict(versions()),
            "runs": runs,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
