"""Candidates a second with one GPU and with several, alternately, each with as many cores; and how busy each GPU is.

    python -m benchmarks.tuning.bench_devices [--model bert-base:fp16] [--shape input_ids=8x128] [--trials 400]
        [--devices 1 2] [--rounds 2] [--cores 16] [--kernels-by-driver] [--out FILE]

Every run has a fresh database. `--kernels-by-driver` adds runs in which the thread that tunes makes and sends the
kernels of templates, as it did before recipes (`relaxtune/pipeline/tuning/measure/recipe.py`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.gpu_arms.results import machine
from relaxtune.pipeline.choose.record_lookup import still_true_in
from relaxtune.pipeline.cli.options import parse_shapes
from relaxtune.pipeline.codegen.cuda_compiler import find_toolchain
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.tuning.candidates import Candidate
from relaxtune.pipeline.tuning.local.backend import Machine, this_machine
from relaxtune.pipeline.tuning.measure.recipe import scheduled
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.result_table import to_data
from relaxtune.pipeline.tuning.session import tune
from relaxtune.schedules.targets.host import physical_cores
from relaxtune.tuning_db.store import TuningDatabase

_SAMPLE_S = 0.25


def main() -> None:
    """Tune with one device and with several, alternately; print what each run took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="bert-base:fp16")
    parser.add_argument("--shape", action="append", default=[])
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cores", type=int, default=16, help="Build processes for each GPU.")
    parser.add_argument("--kernels-by-driver", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    shapes = parse_shapes(arguments.shape or ["input_ids=8x128"])
    prepared = prepare_model(ModelRequest(arguments.model, shapes, arguments.target))
    document: dict[str, object] = {
        "machine": machine(),
        "model": arguments.model,
        "trials": arguments.trials,
        "cores": physical_cores(),
        "compiler": asdict(find_toolchain()) if prepared.target.kind == "cuda" else None,
        "environment": asdict(prepared.environment),
    }
    runs: list[dict[str, object]] = []
    arms = [(count, False) for count in arguments.devices]
    if arguments.kernels_by_driver:
        arms.append((max(arguments.devices), True))
    for _ in range(arguments.rounds):
        for count, by_driver in arms:
            runs.append(_run(prepared, count, arguments.cores, arguments.trials, by_driver=by_driver))
            print(json.dumps({key: value for key, value in runs[-1].items() if key != "samples"}), flush=True)
            if arguments.out:
                document["runs"] = runs
                arguments.out.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")


def _run(prepared: PreparedModel, count: int, cores: int, trials: int, *, by_driver: bool) -> dict[str, object]:
    devices = tuple(f"cuda:{index}" for index in range(count)) if prepared.target.kind == "cuda" else None
    options = TuningOptions(trials=trials, workers=cores * count, devices=devices, warm_start_s=0.0, seed=1)
    started: list[Machine] = []
    samples: list[tuple[float, ...]] = []
    over = threading.Event()

    @contextmanager
    def watched(*asked):  # type: ignore[no-untyped-def]
        with this_machine(*asked) as opened:
            started.append(opened)
            yield opened
            busy.update(opened.backend.busy_s)

    def sample() -> None:
        while not over.wait(_SAMPLE_S):
            for one in started:
                building = sum(slot.job is not None for slot in one.builder._slots)  # type: ignore[attr-defined]
                waits = len(one.backend._waiting)  # type: ignore[attr-defined]
                samples.append((time.monotonic() - began, building, one.builder.waiting, waits))

    handed_in = Candidate.handed_in
    if by_driver:
        Candidate.handed_in = lambda self, spec: handed_in(replace(self, module=scheduled(self.module)), spec)  # type: ignore
    busy: dict[str, float] = {}
    try:
        with tempfile.TemporaryDirectory() as folder, TuningDatabase.open(Path(folder) / "tuning.db") as database:
            began, own = time.monotonic(), time.thread_time()
            threading.Thread(target=sample, daemon=True).start()
            summary = tune(
                prepared.tasks,
                target=prepared.target,
                database=database,
                environment=prepared.environment,
                still_true=still_true_in(database, prepared.target, prepared.environment),
                options=options,
                machine=watched,
            )
            seconds, own = time.monotonic() - began, time.thread_time() - own
    finally:
        over.set()
        Candidate.handed_in = handed_in  # type: ignore[method-assign]
    return {
        "devices": count,
        "kernels_by_driver": by_driver,
        "workers": cores * count,
        "candidates": summary.candidates,
        "failed": sum(task.failed for task in summary.tasks),
        "seconds": seconds,
        "candidates_per_s": summary.candidates / seconds,
        "driver_thread_s": own,
        "busy_share": {name: each / seconds for name, each in busy.items()},
        "kernels_us": sum(task.weight * (task.after_us or 0.0) for task in summary.tasks),
        "seconds_by_phase": to_data(summary)["seconds_by_phase"],
        # Seconds, builds going on, builds waiting, candidates waiting for a device.
        "samples": [[round(value, 2) for value in one] for one in samples],
    }


if __name__ == "__main__":
    main()
