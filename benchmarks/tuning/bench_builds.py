"""How many candidates a second are built while a model is tuned, and what the driver's own thread spends on each.

    python -m benchmarks.tuning.bench_builds [--model bert-base:fp16] [--shape input_ids=8x128] [--target cuda:sm_90a]
        [--trials 100] [--workers N] [--devices 1] [--measure-ms 20] [--out FILE]

No GPU is needed: search, builds and database are real, a measurement is a wait (`benchmarks/tuning/waiting_backend.py`;
20 ms is what a candidate of BERT took an H200: 8.0 s of `benchmarks/results/h200-two-gpus.json` for 400).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from benchmarks.tuning.waiting_backend import WaitingBackend
from relaxtune.pipeline.choose.record_lookup import still_true_in
from relaxtune.pipeline.cli.options import parse_shapes
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.pipeline.tuning.local.backend import this_machine
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.result_table import to_data
from relaxtune.pipeline.tuning.session import tune
from relaxtune.schedules.targets.host import physical_cores
from relaxtune.tuning_db.store import TuningDatabase


def main() -> None:
    """Tune, and print what it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="bert-base:fp16")
    parser.add_argument("--shape", action="append", default=[])
    parser.add_argument("--target", default="cuda:sm_90a")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--workers", type=int, default=physical_cores())
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--measure-ms", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    shapes = parse_shapes(arguments.shape or ["input_ids=8x128"])
    prepared = prepare_model(ModelRequest(arguments.model, shapes, arguments.target))
    environment = replace(prepared.environment, device_name="a device that waits")
    options = TuningOptions(trials=arguments.trials, workers=arguments.workers, warm_start_s=0.0, seed=1)
    backend = WaitingBackend(environment, arguments.devices, arguments.measure_ms / 1e3)
    stop = StopSignal()
    with (
        tempfile.TemporaryDirectory() as folder,
        TuningDatabase.open(Path(folder) / "tuning.db") as database,
        this_machine(prepared.target, environment, options, stop, backend=backend) as machine,
    ):
        built_s: list[float] = []
        machine.builder.submit = _counting(machine.builder.submit, built_s)  # type: ignore[method-assign]
        began, own, whole = time.monotonic(), time.thread_time(), time.process_time()
        summary = tune(
            prepared.tasks,
            target=prepared.target,
            database=database,
            environment=environment,
            still_true=still_true_in(database, prepared.target, environment),
            options=options,
            machine=lambda *_: nullcontext(machine),
        )
        seconds, own, whole = time.monotonic() - began, time.thread_time() - own, time.process_time() - whole
    backend.close()
    count = summary.candidates
    document = {
        "model": arguments.model,
        "target": arguments.target,
        "workers": arguments.workers,
        "devices": arguments.devices,
        "candidates": count,
        "failed": sum(task.failed for task in summary.tasks),
        "seconds": seconds,
        "candidates_per_s": count / seconds,
        "built": len(built_s),
        "worker_s_per_build": sum(built_s) / len(built_s),
        "driver_thread_s_per_candidate": own / count,
        "driver_process_s_per_candidate": whole / count,
        "device_busy_share": [busy / seconds for busy in backend.busy_s.values()],
        "seconds_by_phase": to_data(summary)["seconds_by_phase"],
    }
    print(json.dumps(document, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _counting(submit: Callable[..., None], built_s: list[float]) -> Callable[..., None]:
    lock = threading.Lock()

    def counting(what: object, target: object, on_built: Callable[..., None]) -> None:
        def noted(built: object) -> None:
            with lock:
                built_s.append(built.seconds)  # type: ignore[attr-defined]
            on_built(built)

        submit(what, target, noted)

    return counting


if __name__ == "__main__":
    main()
