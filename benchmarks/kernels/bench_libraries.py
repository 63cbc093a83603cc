"""Kernels of vendors' libraries beside the templates', task by task: BERT-base with its norms apart, fp16, one GPU.

    python -m benchmarks.kernels.bench_libraries [--model bert-base-2-layers] [--shapes 1x128,8x512] [--seconds 12]
                                         [--out benchmarks/results/h200-libraries.json] [--artifacts DIR]

Each shape is tuned with the routes `library` and `template` alone, as `relaxtune tune --routes library,template
--disable-pass fuse_norms` does (a matmul that makes statistics of rows is no library's). Two layers have all the tasks
of twelve. What counts for a task is each route's fastest valid candidate: the median of its latest latencies, which are
of a cold L2 and leave the host's part out. Then an artifact of the libraries' kernels alone is compiled from the same
records and compared with ONNX Runtime, and timed beside one of the templates' kernels alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_arms.results import machine
from relaxtune.models import load_model
from relaxtune.models.inputs import unpadded_inputs
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import measure, module_arm
from relaxtune.pipeline.choose.record_lookup import still_true_in
from relaxtune.pipeline.cli.output import stdout_console
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.session import tune
from relaxtune.tuning_db.records import RecordFilter, Route, Status, TuningRecord
from relaxtune.tuning_db.store import TuningDatabase

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
COMPARED = (Route.LIBRARY, Route.TEMPLATE)
_PASSES = frozenset({"fuse_norms"})
_RUNS, _WARMUP = 200, 20

Row = dict[str, Any]


def main() -> None:
    """Tune, compare, compile and validate each shape; print the tables and write the file."""
    arguments = _parse()
    console = stdout_console()
    entries = []
    with tempfile.TemporaryDirectory(prefix="relaxtune-") as folder:
        for shape in arguments.shapes.split(","):
            directory = arguments.artifacts or Path(folder)
            entry = run_shape(arguments.model, shape, arguments.seconds, directory)
            entries.append(entry)
            for row in entry["tasks"]:
                console.print(_line(row), markup=False, soft_wrap=True)
            console.print(json.dumps(entry["model"]), markup=False, soft_wrap=True)
    document = {
        "machine": machine(),
        "model": arguments.model,
        "precision": "fp16",
        "seconds": arguments.seconds,
        "shapes": entries,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def run_shape(model: str, shape: str, seconds: float, directory: Path) -> Row:
    """Return what was measured of one shape: its tasks, and the artifacts of each route alone."""
    database_path = directory / f"{shape}.db"
    both = _request(model, shape, frozenset({*COMPARED, Route.FALLBACK}))
    prepared = prepare_model(both)
    with TuningDatabase.open(database_path) as database:
        summary = _tune(prepared, database, seconds)
        records = {
            task.workload_hash: database.list_records(RecordFilter(workload_hash=task.workload_hash))
            for task in prepared.tasks
        }
    rows = [compare_routes(task, records[task.workload_hash]) for task in prepared.tasks]
    modules, validated, kernels = {}, {}, {}
    for route in COMPARED:
        request = _request(model, shape, frozenset({route, Route.FALLBACK}))
        compiled = compile_model(request, directory / f"{shape}-{route.value}", database=database_path, samples=2)
        validation = compiled.validation
        validated[route.value] = validation is not None and validation.passed
        kernels[route.value] = Counter(kernel.route for kernel in compiled.manifest.kernels)
        modules[route.value] = Module.load(compiled.directory)
    inputs = unpadded_inputs(load_model(model, shapes=both.shapes), seed=0)
    report = measure({name: module_arm(module, inputs) for name, module in modules.items()}, runs=_RUNS, warmup=_WARMUP)
    return {
        "shape": shape,
        "candidates": summary,
        "tasks": rows,
        "model": {
            "validated": validated,
            "kernels_by_route": kernels,
            "latencies_ms": {arm.name: {"median": arm.median_ms, "p95": arm.quantile(0.95)} for arm in report.arms},
        },
    }


def compare_routes(task: TuningTask, records: Sequence[TuningRecord]) -> Row:
    """Return the fastest kernel of each compared route, and how many of its candidates were valid."""
    row: Row = {"task": task.name, "weight": task.weight}
    for route in COMPARED:
        # The newest record of a decision is the one that counts.
        newest = {record.decision: record for record in records if record.route is route}
        valid = [record for record in newest.values() if record.status is Status.OK]
        best = min(valid, key=lambda record: statistics.median(record.latencies_us), default=None)
        row[route.value] = {
            "candidates": len(newest),
            "valid": len(valid),
            "median_us": None if best is None else statistics.median(best.latencies_us),
            "decision": None if best is None else json.loads(best.decision),
            "latencies_us": [] if best is None else [round(value, 3) for value in best.latencies_us],
            "errors": sorted({str(record.error).splitlines()[-1] for record in newest.values() if record.error}),
        }
    return row


def _tune(prepared: PreparedModel, database: TuningDatabase, seconds: float) -> Mapping[str, object]:
    job = database.start_job(
        model=prepared.model.name,
        model_sha256=prepared.lowered.graph.source_sha256,
        target=target_key(prepared.target),
    )
    summary = tune(
        prepared.tasks,
        target=prepared.target,
        database=database,
        environment=prepared.environment,
        still_true=still_true_in(database, prepared.target, prepared.environment),
        options=TuningOptions(trials=None, time_budget_s=seconds, routes=frozenset(COMPARED)),
        job_id=job.id,
    )
    database.finish_job(job.id, "done")
    return {"measured": summary.candidates, "seconds": summary.seconds}


def _request(model: str, shape: str, routes: frozenset[Route]) -> ModelRequest:
    sizes = tuple(int(size) for size in shape.split("x"))
    return ModelRequest(
        model,
        shapes=dict.fromkeys(INPUTS, sizes),
        target="cuda",
        lowering=LoweringOptions(precision="fp16", disabled_passes=_PASSES),
        routes=routes,
    )


def _line(row: Row) -> str:
    parts = [
        f"{route.value} {row[route.value]['valid']}/{row[route.value]['candidates']} valid, "
        f"{_number(row[route.value]['median_us'])} us"
        for route in COMPARED
    ]
    return f"{row['task']} x{row['weight']}: {'; '.join(parts)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base-2-layers", help="zoo model with a BERT's inputs")
    parser.add_argument("--shapes", default="1x128,8x512", help="batch x sequence, separated by commas")
    parser.add_argument("--seconds", type=float, default=12.0, help="seconds of tuning for each shape")
    parser.add_argument("--artifacts", type=Path, help="folder to keep databases and artifacts in")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200-libraries.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
