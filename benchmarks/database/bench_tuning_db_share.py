"""How much of a tuning run's wall time the database takes, beside stock MetaSchedule's JSON files.

    python -m benchmarks.database.bench_tuning_db_share [--trials 32] [--model bert-tiny] [--model-trials 64]

Two runs. In the first, stock MetaSchedule tunes a matmul with its own builder and runner, and every call that it makes
to its database goes to stock `JSONDatabase` and to ours, one after the other, each timed: the same seed and the same
candidates, within one run. In the other, our engine tunes a model as `relaxtune tune` does, and every transaction on
our database is timed; the candidates it recorded are then committed to a stock `JSONDatabase`. The database files are
there before, as they are in all runs but the first one of a user.

Two runs of MetaSchedule with one seed part ways after the first measured latencies, so that the difference of their
wall times would say nothing about their databases.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import tvm  # noqa: E402
from tvm import te  # noqa: E402
from tvm.ir.utils import derived_object  # noqa: E402
from tvm.s_tir import meta_schedule as ms  # noqa: E402

from relaxtune.pipeline.choose.stale_records import still_true_in  # noqa: E402
from relaxtune.pipeline.environment import detect_environment, target_key  # noqa: E402
from relaxtune.pipeline.prepare import ModelRequest, prepare_model  # noqa: E402
from relaxtune.pipeline.tuning.options import TuningOptions  # noqa: E402
from relaxtune.pipeline.tuning.session import tune  # noqa: E402
from relaxtune.schedules.targets import resolve_target  # noqa: E402
from relaxtune.tuning_db.exchange.stock_json import RECORD_FILE, WORKLOAD_FILE  # noqa: E402
from relaxtune.tuning_db.metaschedule import MetaScheduleAdapter, ir_from_json  # noqa: E402
from relaxtune.tuning_db.records import RecordFilter, Route, Status  # noqa: E402
from relaxtune.tuning_db.sql.transactions import Transactions  # noqa: E402
from relaxtune.tuning_db.store import TuningDatabase  # noqa: E402

SIZE = 256
STOCK_TIMEOUT_S = 300


class Stopwatch:
    """Seconds and calls of each of two databases."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        """Return what `work` returns, its time added to `name`."""
        began = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds[name] += time.perf_counter() - began
            self.calls[name] += 1


@derived_object
class BothDatabases(ms.database.PyDatabase):  # type: ignore[misc]
    """Gives every call to both databases and answers with what the stock one said."""

    def __init__(self, stock: ms.database.Database, ours: ms.database.Database, watch: Stopwatch) -> None:
        super().__init__()
        self._stock, self._ours, self._watch = stock, ours, watch

    def _both(self, call: Callable[[Any], Any]) -> Any:
        answer = self._watch.time("stock", lambda: call(self._stock))
        self._watch.time("ours", lambda: call(self._ours))
        return answer

    def has_workload(self, mod: tvm.ir.IRModule) -> bool:
        """Ask both."""
        return bool(self._both(lambda database: database.has_workload(mod)))

    def commit_workload(self, mod: tvm.ir.IRModule) -> ms.database.Workload:
        """Commit to both."""
        return self._both(lambda database: database.commit_workload(mod))

    def commit_tuning_record(self, record: ms.database.TuningRecord) -> None:
        """Commit to both."""
        self._both(lambda database: database.commit_tuning_record(record))

    def get_top_k(self, workload: ms.database.Workload, top_k: int) -> list[ms.database.TuningRecord]:
        """Ask both."""
        return list(self._both(lambda database: database.get_top_k(workload, top_k)))

    def get_all_tuning_records(self) -> list[ms.database.TuningRecord]:
        """Ask both."""
        return list(self._both(lambda database: database.get_all_tuning_records()))

    def __len__(self) -> int:
        """Ask both."""
        return int(self._both(len))


def open_stock(folder: Path) -> ms.database.JSONDatabase:
    folder.mkdir(exist_ok=True)
    return ms.database.JSONDatabase(str(folder / WORKLOAD_FILE), str(folder / RECORD_FILE))


def matmul() -> tvm.ir.IRModule:
    a, b = te.placeholder((SIZE, SIZE), name="A"), te.placeholder((SIZE, SIZE), name="B")
    k = te.reduce_axis((0, SIZE), name="k")
    c = te.compute((SIZE, SIZE), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    return tvm.IRModule({"main": te.create_prim_func([a, b, c])})


def same(stock: list[list[float]], ours: list[list[float]]) -> bool:
    """Return whether two answers hold the same latencies; seconds to microseconds and back change the last bit."""
    return [[f"{float(v):.12g}" for v in values] for values in stock] == [
        [f"{float(v):.12g}" for v in values] for values in ours
    ]


def stock_run(folder: Path, url: str, trials: int, seed: int) -> dict[str, object]:
    """Tune with stock MetaSchedule and both databases."""
    target = resolve_target("llvm")
    watch = Stopwatch()
    TuningDatabase.open(url).close()
    opening = time.perf_counter()
    with TuningDatabase.open(url) as database:
        adapter = MetaScheduleAdapter(database, target_key(target), detect_environment(target), seed=seed)
        opened = time.perf_counter() - opening
        stock = watch.time("stock", lambda: open_stock(folder / "stock"))
        watch.seconds["ours"] += opened
        began = time.perf_counter()
        ms.tune_tir(
            matmul(),
            target.target,
            str(folder / "work"),
            max_trials_global=trials,
            num_trials_per_iter=min(trials, 16),
            # A busy machine must not turn candidates into failures.
            builder=ms.builder.LocalBuilder(timeout_sec=STOCK_TIMEOUT_S),
            runner=ms.runner.LocalRunner(timeout_sec=STOCK_TIMEOUT_S),
            database=BothDatabases(stock, adapter, watch),
            seed=seed,
        )
        wall = time.perf_counter() - began
        stored = [database.count_records(), len((folder / "stock" / RECORD_FILE).read_text().splitlines())]
        found = [[list(r.run_secs) for r in d.get_top_k(d.commit_workload(matmul()), 5)] for d in (stock, adapter)]
    if stored[0] != stored[1] or not found[0] or not same(*found):
        raise SystemExit(f"the databases disagree: {stored} records, the best five have {found}")
    return {
        "candidates": stored[0],
        "calls": watch.calls["ours"],
        "wall_s": wall,
        "stock_database_s": watch.seconds["stock"],
        "our_database_s": watch.seconds["ours"],
        # The run itself contains both.
        "difference_percent": 100 * (watch.seconds["ours"] - watch.seconds["stock"]) / (wall - watch.seconds["ours"]),
    }


@contextmanager
def timed_transactions(watch: Stopwatch) -> Iterator[None]:
    """Time every transaction of this process, nested ones once."""
    original = Transactions._retrying
    depth = 0

    def retrying(self: Transactions, *arguments: Any, **options: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            if depth > 1:
                return original(self, *arguments, **options)
            return watch.time("ours", lambda: original(self, *arguments, **options))
        finally:
            depth -= 1

    Transactions._retrying = retrying  # type: ignore[method-assign]
    try:
        yield
    finally:
        Transactions._retrying = original  # type: ignore[method-assign]


def our_run(folder: Path, url: str, model: str, trials: int, seed: int) -> dict[str, object]:
    """Tune a model with our engine, then give its candidates to stock's database."""
    prepared = prepare_model(ModelRequest(model, target="llvm"))
    watch = Stopwatch()
    TuningDatabase.open(url).close()
    began = time.perf_counter()
    with timed_transactions(watch), TuningDatabase.open(url) as database:
        target = target_key(prepared.target)
        job = database.start_job(model=prepared.model.name, model_sha256="0" * 64, target=target)
        options = replace(TuningOptions(), trials=trials, seed=seed)
        tune(
            prepared.tasks,
            target=prepared.target,
            database=database,
            environment=prepared.environment,
            still_true=still_true_in(database, prepared.target, prepared.environment),
            options=options,
            job_id=job.id,
        )
        database.finish_job(job.id, "done")
    wall = time.perf_counter() - began
    with TuningDatabase.open(url) as database:
        records = database.list_records(RecordFilter(route=Route.METASCHEDULE))
        total = database.count_records()
        texts = {record.workload_hash: database.get_workload(record.workload_hash).ir_json for record in records}
    stock = watch.time("stock", lambda: open_stock(folder / "stock-of-ours"))
    workloads = {}
    for key, text in texts.items():
        mod = ir_from_json(text or "")
        workloads[key] = watch.time("stock", lambda mod=mod: stock.commit_workload(mod))
    for record in records:
        seconds = [us / 1e6 for us in record.latencies_us] if record.status is Status.OK else [1e10]
        workload = workloads[record.workload_hash]
        args = ms.arg_info.ArgInfo.from_entry_func(workload.mod, remove_preproc=True)
        line = [json.loads(record.decision), seconds, None, None]
        parsed = ms.database.TuningRecord.from_json(line, workload)
        value = ms.database.TuningRecord(parsed.trace, workload, seconds, prepared.target.target, args)
        watch.time("stock", lambda value=value: stock.commit_tuning_record(value))
    return {
        "model": model,
        "tasks": len(prepared.tasks),
        "records": total,
        "records_given_to_stock": len(records),
        "transactions": watch.calls["ours"],
        "wall_s": wall,
        "stock_database_s": watch.seconds["stock"],
        "our_database_s": watch.seconds["ours"],
        "difference_percent": 100 * (watch.seconds["ours"] - watch.seconds["stock"]) / (wall - watch.seconds["ours"]),
    }


def show(run: str, result: dict[str, object]) -> None:
    print(run)
    for key, value in result.items():
        print(f"  {key:24}{round(value, 4) if isinstance(value, float) else value:>12}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--model", default="bert-tiny")
    parser.add_argument("--model-trials", type=int, default=64)
    parser.add_argument("--only", choices=["ours", "stock"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "tuning-db-share.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours, both = f"sqlite:///{folder}/ours.db", f"sqlite:///{folder}/both.db"
        results = {}
        if options.only != "stock":
            results["our engine"] = our_run(folder, ours, options.model, options.model_trials, options.seed)
            show("our engine", results["our engine"])
        if options.only != "ours":
            results["stock run"] = stock_run(folder, both, options.trials, options.seed)
            show("stock run", results["stock run"])
    conditions = {"cores": os.cpu_count(), "python": platform.python_version(), "tvm": tvm.__version__}
    conditions["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
    conditions["cpu"] = detect_environment(resolve_target("llvm")).device_name
    if options.out.exists() and options.only is not None:
        results = {**json.loads(options.out.read_text())["results"], **results}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps({"conditions": conditions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
