"""Tuning by this project beside stock MetaSchedule on this CPU: the same kernels, as many candidates, taking turns.

    python -m benchmarks.tuning.bench_tuning_stock [--models bert-tiny bert-base-layer] [--seeds 5] [--trials 12]
        [--out FILE]

Tuned are the kernels that make up at least 10 % of a model's arithmetic. Each arm runs in a process of its own, one arm
after the other; which goes first alternates with the seed. Asked of both are TRIALS candidates a kernel:

- *stock*: `meta_schedule.tune_tasks` with its own builder, runner, database, space, cost model and scheduler, on the
  kernels without `pack_weights` (its own layout of the weights), at most TRIALS candidates for each. Its
  processes get as many TVM threads as there are cores; left alone, they would measure with half of them.
- *ours*: `pipeline.tuning.session.tune`, with TRIALS times the number of kernels in all, shared by its own scheduler.

The clock of an arm runs from the call to its return: process starts inside count, importing the model does not.
Afterwards one evaluator times the kernels of both arms in turns. A model's latency is the sum over its kernels of calls
times latency. `needed` is how many candidates of ours, in the order measured, it took until the kernels chosen up to
there are as fast as the stock arm's final ones; 0 means the default schedules were.

Raw values go to the output file after every seed; a run that finds them there goes on from where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.relax_integration import extracted_tasks_to_tune_contexts

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from relaxtune.models.zoo.bert import build_bert  # noqa: E402
from relaxtune.models.zoo.graph import Precision  # noqa: E402
from relaxtune.models.zoo.presets import DEFAULT_DIMS, get_preset  # noqa: E402
from relaxtune.pipeline.choose.record_lookup import still_true_in  # noqa: E402
from relaxtune.pipeline.choose.replay import replay_record  # noqa: E402
from relaxtune.pipeline.choose.selection import select_kernels  # noqa: E402
from relaxtune.pipeline.codegen.finish import finish_kernels  # noqa: E402
from relaxtune.pipeline.environment import cpu_name, target_key  # noqa: E402
from relaxtune.pipeline.passes.module import LoweringOptions  # noqa: E402
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model  # noqa: E402
from relaxtune.pipeline.tasks.task import TuningTask  # noqa: E402
from relaxtune.pipeline.tuning.options import TuningOptions  # noqa: E402
from relaxtune.pipeline.tuning.session import tune  # noqa: E402
from relaxtune.pipeline.tvm_runtime.threads import configure_threads  # noqa: E402
from relaxtune.schedules.fallback import apply_fallback  # noqa: E402
from relaxtune.schedules.marks import SCHEDULED_ATTR  # noqa: E402
from relaxtune.schedules.targets.host import physical_cores  # noqa: E402
from relaxtune.tuning_db.records import RecordFilter, Route, Status, TuningRecord  # noqa: E402
from relaxtune.tuning_db.store import TuningDatabase  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "tuning-stock-cpu.json"
MODELS = ("bert-tiny", "bert-base-layer")
ARMS = ("stock", "ours")
SHARE_MIN = 0.1
# Runs of the common evaluator: turns, and seconds that one kernel runs in each.
TURNS, TURN_S = 7, 0.02
# MetaSchedule's latency of a failed candidate is 1e10 seconds.
FAILED_S = 1e9
ARM_TIMEOUT_S = 3600


def main() -> None:
    """Run the arms that the output file lacks, and print what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=12, help="candidates a kernel")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--stock-timeout",
        type=float,
        default=30.0,
        help="stock's seconds to build or to run a candidate; 30 is its own",
    )
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm is not None:
        request = (arguments.models[0], arguments.trials, arguments.seed, arguments.work)
        stock = arguments.arm == "stock"
        document = run_stock(*request, arguments.stock_timeout) if stock else run_ours(*request)
        (arguments.work / "result.json").write_text(json.dumps(document), encoding="utf-8")
        return
    document = read_document(arguments.out, arguments.trials)
    done = {(run["model"], run["seed"]) for run in document["runs"]}
    for seed in range(1, arguments.seeds + 1):
        for model in arguments.models:
            if (model, seed) in done:
                continue
            run = run_pair(model, arguments.trials, seed, arguments.stock_timeout)
            document["runs"].append(run)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print(describe(run), flush=True)
    for model in arguments.models:
        runs = [run for run in document["runs"] if run["model"] == model]
        if runs:
            print(summarise(model, runs))


def read_document(path: Path, trials: int) -> dict[str, Any]:
    """Return the document of an earlier run with as many trials, or a new one."""
    if path.exists():
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if document["trials_per_kernel"] == trials:
            return document
        raise SystemExit(
            f"{path} was made with --trials {document['trials_per_kernel']}, asked for is {trials}: give another --out"
        )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": physical_cores(),
        "tvm": tvm.__version__,
        "trials_per_kernel": trials,
        "runs": [],
    }


def run_pair(model: str, trials: int, seed: int, stock_timeout_s: float) -> dict[str, Any]:
    """Return what came of both arms for one seed, their kernels timed in turns."""
    order = ARMS if seed % 2 else tuple(reversed(ARMS))
    with tempfile.TemporaryDirectory(prefix="relaxtune-bench-") as folder:
        results: dict[str, dict[str, Any]] = {}
        for arm in order:
            work = Path(folder) / arm
            work.mkdir()
            results[arm] = run_arm(arm, model, trials, seed, work, stock_timeout_s)
        libraries = {
            (arm, name): Path(folder) / arm / name
            for arm in ARMS
            for kernel in results[arm]["kernels"]
            for name in {*kernel["chosen"], kernel["final"]} - {None}
        }
        latencies = time_in_turns(libraries)
    return {
        "model": model,
        "seed": seed,
        "order": list(order),
        "arms": {arm: results[arm] for arm in ARMS},
        "latencies_us": {f"{arm}/{name}": values for (arm, name), values in latencies.items()},
        **compare(results, {key: statistics.median(values) for key, values in latencies.items()}),
    }


def run_arm(arm: str, model: str, trials: int, seed: int, work: Path, stock_timeout_s: float) -> dict[str, Any]:
    """Return the result of one arm, run in a process of its own."""
    command = [sys.executable, __file__, "--arm", arm, "--models", model, "--trials", str(trials), "--seed", str(seed)]
    command += ["--stock-timeout", str(stock_timeout_s)]
    environment = {**os.environ, "TVM_NUM_THREADS": str(physical_cores())}
    log = work / "log.txt"
    with log.open("wb") as stream:
        code = subprocess.run(
            [*command, "--work", str(work)], env=environment, stdout=stream, stderr=stream, timeout=ARM_TIMEOUT_S
        ).returncode
    if code != 0:
        raise SystemExit(f"the {arm} arm failed with exit code {code}:\n{log.read_text(errors='replace')[-3000:]}")
    result: dict[str, Any] = json.loads((work / "result.json").read_text(encoding="utf-8"))
    return result


def compare(results: dict[str, dict[str, Any]], us: dict[tuple[str, str], float]) -> dict[str, Any]:
    """Return the figures of one pair, over the kernels for which the stock arm found something valid."""
    pairs = list(zip(results["stock"]["kernels"], results["ours"]["kernels"], strict=True))
    found = [(stock, ours) for stock, ours in pairs if stock["final"] is not None]
    stock_us = sum(stock["calls"] * us["stock", stock["final"]] for stock, _ in found)
    ours_us = sum(ours["calls"] * us["ours", ours["final"]] for _, ours in found)
    return {
        "kernels_without_valid_stock_candidate": len(pairs) - len(found),
        "stock_us": stock_us,
        "ours_us": ours_us,
        "latency_ratio": ours_us / stock_us if found else None,
        "wall_ratio": results["stock"]["seconds"] / results["ours"]["seconds"],
        "needed": count_needed([ours for _, ours in found], us, stock_us, results["ours"]["candidates"])
        if found
        else None,
    }


def count_needed(
    kernels: Sequence[dict[str, Any]], us: dict[tuple[str, str], float], goal_us: float, candidates: int
) -> int | None:
    """Return after how many candidates the kernels chosen up to there take `goal_us` at most; None for never."""
    for count in range(candidates + 1):
        total = 0.0
        for kernel in kernels:
            chosen = [name for name, after in kernel["chosen"].items() if after <= count]
            total += kernel["calls"] * us["ours", chosen[-1]]
        if total <= goal_us:
            return count
    return None


def prepare(model: str, disabled: frozenset[str]) -> tuple[PreparedModel, list[TuningTask]]:
    """Return a model and its kernels with most of the arithmetic, in the order of the graph's nodes."""
    source: str | Path = model
    with tempfile.TemporaryDirectory() as folder:
        if model == "bert-base-layer":
            source = Path(folder) / f"{model}.onnx"
            config = dataclasses.replace(get_preset("bert-base").config, layers=1, vocab=1024)
            dims = {axis: DEFAULT_DIMS[axis] for axis in ("batch", "sequence")}
            onnx.save(build_bert(model, config, dims, Precision.FP32, 0), source)
        prepared = prepare_model(
            ModelRequest(source, target="llvm", lowering=LoweringOptions(disabled_passes=disabled))
        )
    total = sum(task.weight * task.flops for task in prepared.tasks)
    kernels = [task for task in prepared.tasks if task.weight * task.flops >= SHARE_MIN * total]
    return prepared, sorted(kernels, key=lambda task: task.onnx_nodes)


def run_stock(model: str, trials: int, seed: int, work: Path, timeout_s: float) -> dict[str, Any]:
    """Tune with stock MetaSchedule; return the seconds, the counts, and the exported best kernels."""
    prepared, kernels = prepare(model, frozenset({"pack_weights"}))
    target = prepared.target.target
    extracted = [ms.ExtractedTask(task.name, task.mod, target, [task.mod], task.weight) for task in kernels]
    began = time.monotonic()
    contexts, weights = extracted_tasks_to_tune_contexts(extracted, str(work), seed=seed)
    database = ms.tune_tasks(
        tasks=contexts,
        task_weights=weights,
        work_dir=str(work),
        max_trials_global=trials * len(kernels),
        max_trials_per_task=trials,
        builder=ms.builder.LocalBuilder(max_workers=physical_cores(), timeout_sec=timeout_s),
        runner=ms.runner.LocalRunner(timeout_sec=timeout_s),
    )
    seconds = time.monotonic() - began
    records = database.get_all_tuning_records()
    valid = [record for record in records if min(float(value) for value in record.run_secs) < FAILED_S]
    documents = []
    for number, (context, task) in enumerate(zip(contexts, kernels, strict=True)):
        best = database.query_ir_module(context.mod, target, context.task_name)
        name = f"{number}-final.so" if best is not None else None
        if name is not None:
            export(best, target, work / name)
        documents.append({"name": task.name, "calls": task.weight, "chosen": {}, "final": name})
    return {"seconds": seconds, "candidates": len(records), "valid": len(valid), "kernels": documents}


def run_ours(model: str, trials: int, seed: int, work: Path) -> dict[str, Any]:
    """Tune with this project; return the seconds, the counts, and every kernel that was the best for a while."""
    prepared, kernels = prepare(model, frozenset())
    with TuningDatabase.open(work / "tuning.db") as database:
        began = time.monotonic()
        summary = tune(
            kernels,
            target=prepared.target,
            database=database,
            environment=prepared.environment,
            still_true=still_true_in(database, prepared.target, prepared.environment),
            options=TuningOptions(trials=trials * len(kernels), seed=seed),
        )
        seconds = time.monotonic() - began
        choices = select_kernels(
            prepared.lowered,
            kernels,
            database=database,
            target=prepared.target,
            environment=prepared.environment,
        )
        kept = database.list_records(RecordFilter(target_kind=target_key(prepared.target).kind))
        records = sorted(kept, key=attrgetter("id"))
    # Contenders are timed again at the end, which makes further records of the same candidates.
    first = {(record.workload_hash, record.decision): record for record in reversed(records)}
    searched = (record for record in first.values() if record.route is not Route.FALLBACK)
    candidates = sorted(searched, key=attrgetter("id"))
    documents = []
    for number, task in enumerate(kernels):
        choice = next(choice for choice in choices if choice.task == task.name)
        scheduled = {"final": choice.scheduled, **_bests(task, records, candidates, prepared)}
        chosen: dict[str, int] = {}
        for after, func in scheduled.items():
            name = f"{number}-{after}.so"
            export(_as_module(task, func, prepared), prepared.target.target, work / name)
            if after != "final":
                chosen[name] = int(after)
        final = f"{number}-final.so"
        documents.append({"name": task.name, "calls": task.weight, "chosen": chosen, "final": final})
    return {
        "seconds": seconds,
        "seconds_by_phase": dict(summary.seconds_by_phase),
        "candidates": len(candidates),
        "valid": sum(record.status is Status.OK for record in candidates),
        "kernels": documents,
    }


def _bests(
    task: TuningTask, records: Sequence[TuningRecord], candidates: Sequence[TuningRecord], prepared: PreparedModel
) -> dict[str, Any]:
    """Return how many candidates of the run were decided when a kernel became the task's best -> its PrimFunc.

    The default schedule is the best after 0 candidates; its PrimFunc is None, like everywhere.
    """
    mine = [r for r in records if r.workload_hash == task.workload_hash and r.status is Status.OK]
    default = [r for r in mine if r.route is Route.FALLBACK]
    best_us = statistics.median(default[0].latencies_us) if default else float("inf")
    found: dict[str, Any] = {"0": None}
    for after, record in enumerate(candidates, start=1):
        if record.workload_hash != task.workload_hash or record.status is not Status.OK:
            continue
        latency_us = statistics.median(record.latencies_us)
        if latency_us < best_us:
            best_us = latency_us
            found[str(after)] = replay_record(task, record, prepared.target)
    return found


def _as_module(task: TuningTask, scheduled: Any, prepared: PreparedModel) -> tvm.ir.IRModule:
    """Return a kernel as an artifact would have it; None takes the default schedule."""
    target = prepared.target.target
    if scheduled is None:
        return finish_kernels(apply_fallback(task.mod, target), target)
    func = scheduled.with_attr("global_symbol", "main").with_attr(SCHEDULED_ATTR, True)
    return finish_kernels(tvm.ir.IRModule({"main": func}), target)


def export(mod: tvm.ir.IRModule, target: tvm.target.Target, path: Path) -> None:
    """Compile a scheduled module with one function `main` into a shared library."""
    tvm.compile(mod, target=target).export_library(str(path))
    shapes = [[list(map(int, param.shape)), str(param.dtype)] for param in mod["main"].params]
    path.with_suffix(".json").write_text(json.dumps(shapes), encoding="utf-8")


def time_in_turns(libraries: dict[tuple[str, str], Path]) -> dict[tuple[str, str], list[float]]:
    """Return the microseconds of every library's `main`, each in every turn, on the arguments' own memory."""
    configure_threads()
    rng = np.random.default_rng(0)
    timers = {}
    for key, path in libraries.items():
        shapes = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        arguments = [tvm.runtime.tensor(rng.uniform(-1, 1, shape).astype(dtype)) for shape, dtype in shapes]
        main = tvm.runtime.load_module(str(path))["main"]
        main(*arguments)
        began = time.perf_counter()
        main(*arguments)
        count = max(1, round(TURN_S / (time.perf_counter() - began)))
        timers[key] = (main, arguments, count)
    latencies: dict[tuple[str, str], list[float]] = {key: [] for key in libraries}
    for _ in range(TURNS):
        for key, (main, arguments, count) in timers.items():
            main(*arguments)
            began = time.perf_counter()
            for _ in range(count):
                main(*arguments)
            latencies[key].append((time.perf_counter() - began) / count * 1e6)
    return latencies


def describe(run: dict[str, Any]) -> str:
    """Return one line about a pair."""
    stock, ours = (run["arms"][arm] for arm in ARMS)
    return (
        f"{run['model']} seed {run['seed']}: stock {stock['seconds']:.1f} s for {stock['candidates']} candidates "
        f"({stock['valid']} valid), ours {ours['seconds']:.1f} s for {ours['candidates']} ({ours['valid']} valid): "
        f"{run['wall_ratio']:.1f} times as fast; kernels {run['stock_us']:.0f} us against {run['ours_us']:.0f} us, "
        f"stock's reached after {run['needed']}"
    )


def summarise(model: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return the medians over the seeds, with the extremes."""

    def spread(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    walls = [run["wall_ratio"] for run in runs]
    latencies = [run["latency_ratio"] for run in runs if run["latency_ratio"] is not None]
    needed = [
        (run["needed"] if run["needed"] is not None else float("inf")) / run["arms"]["stock"]["candidates"]
        for run in runs
    ]
    if not latencies:
        return f"{model}, {len(runs)} seeds: stock's seconds / ours {spread(walls)}; stock found no valid candidate"
    return (
        f"{model}, {len(runs)} seeds: stock's seconds / ours {spread(walls)}; ours' latency / stock's "
        f"{spread(latencies)}; ours' candidates to reach stock's latency / stock's candidates {spread(needed)}"
    )


if __name__ == "__main__":
    main()
