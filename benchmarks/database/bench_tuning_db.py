"""Time the tuning database at a million records, in SQLite and in PostgreSQL, beside stock MetaSchedule's JSON files.

    python -m benchmarks.database.bench_tuning_db [--records 1000000] [--stock-records 100000] [--only sqlite]
        [--realtime]

Makes its databases in a temporary folder: 500 workloads of 20 models, tuned by jobs one after another; one candidate in
ten failed, one in ten is a template's and one in forty the fallback; two devices, and two versions of the default
schedules. Durable settings: every commit of SQLite is synchronised, PostgreSQL runs with its defaults. Prints a
table, and writes the raw values to benchmarks/results/.

With `--realtime` (root), all but the filling is measured at real-time priority, the server's processes included, for
machines that are busy with other work; the bulk commits are then the last ten of the filling.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from relaxtune.tuning_db.jobs import JobTask  # noqa: E402
from relaxtune.tuning_db.lookup import Question  # noqa: E402
from relaxtune.tuning_db.questions import insights  # noqa: E402
from relaxtune.tuning_db.records import (  # noqa: E402
    Environment,
    RecordFilter,
    Route,
    Status,
    TargetKey,
    TuningRecord,
    Workload,
)
from relaxtune.tuning_db.store import TuningDatabase  # noqa: E402

WORKLOADS = 500
MODELS = 20
BATCH = 10_000
LAST_BATCHES = 10
TVM = "0.27.0.post1"
TARGET = TargetKey("cuda", "sm_90a", '{"max_threads_per_block":1024}')
HERE = Environment("cuda", "NVIDIA H200", "sm_90a", "580.1", "13.0", TVM, "0.1.14.post1", 16, "f00d")
EARLIER = replace(HERE, schedules_version="cafe")
OTHER = Environment("cuda", "NVIDIA H100", "sm_90a", "570.2", "13.0", TVM, "0.1.14.post1", 64, "f00d")
ENVIRONMENTS = (HERE, EARLIER, HERE, HERE, OTHER)
TRACE = json.dumps(
    [[["GetSBlock", [], ["matmul", "main"], ["b0"]], ["GetLoops", ["b0"], [], ["l1", "l2", "l3"]]]
     + [["SamplePerfectTile", [f"l{i}"], [4, 64], [f"v{i}a", f"v{i}b", f"v{i}c", f"v{i}d"]] for i in (1, 2, 3)]
     + [["Split", ["l1", "v1a", "v1b"], [1, 0], ["l4", "l5"]], ["Reorder", ["l4", "l5"], [], []]], []]
)  # fmt: skip


def make_workload(number: int) -> Workload:
    signature = f'{{"family":"matmul","dims":[{number},768,768],"dtypes":["float16"],"epilogue":[]}}'
    return Workload(f"{number:019d}", "matmul", signature, f"matmul{number}", 1e9, 1e6, '{"ir":1}', TVM)


def make_records(start: int, count: int, total: int, jobs: list[str]) -> Iterator[TuningRecord]:
    """Yield records as jobs write them: 40 candidates of a workload after another, over and over."""
    keys = [make_workload(number) for number in range(WORKLOADS)]
    epoch = datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(start, start + count):
        rng = random.Random(number)
        workload = keys[number // 40 % WORKLOADS]
        failed = number % 10 == 3
        median = 5.0 + rng.expovariate(0.02)
        yield TuningRecord(
            workload_hash=workload.workload_hash,
            signature_key=workload.signature_key,
            target=TARGET,
            environment=ENVIRONMENTS[number // 40_000 % 5],
            route=Route.FALLBACK if number % 40 == 0 else Route.TEMPLATE if number % 10 == 7 else Route.METASCHEDULE,
            decision=TRACE,
            status=Status.BUILD_ERROR if failed else Status.OK,
            latencies_us=() if failed else tuple(round(median * (1 + 0.01 * i), 3) for i in (-1, 0, 1)),
            error=f"too much shared memory: {rng.randrange(99)} KiB" if failed else None,
            seed=number,
            duration_s=0.2,
            job_id=jobs[number * len(jobs) // total],
            created_at=epoch + timedelta(seconds=number * 0.2),
        )


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def take_processor(url: str) -> None:
    """Give this process, and the server behind the URL, real-time priority."""
    processes = [psutil.Process()]
    if "host=" in url:
        postmaster = psutil.Process(
            int((Path(url.split("host=")[1]) / "data" / "postmaster.pid").read_text().split()[0])
        )
        # Later ones are forked from it.
        processes += [postmaster, *postmaster.children(recursive=True)]
    for process in processes:
        for thread in process.threads():
            os.sched_setscheduler(thread.id, os.SCHED_RR, os.sched_param(1))


def fill(database: TuningDatabase, total: int, before_last: Callable[[], None] | None) -> tuple[list[str], list[float]]:
    """Fill a database and return its jobs and the milliseconds of each batch; of the last ones after `before_last`."""
    for number in range(WORKLOADS):
        database.record_workload(make_workload(number))
    jobs = []
    for number in range(MODELS):
        job = database.start_job(model=f"model{number}", model_sha256=f"{number:064d}", target=TARGET)
        per_model = WORKLOADS // MODELS
        tasks = range(number * per_model, (number + 1) * per_model)
        database.record_job_tasks(job.id, [JobTask(make_workload(n).workload_hash, TVM, 1, (), 0.0) for n in tasks])
        jobs.append(job.id)
    batches = []
    starts = range(0, total, BATCH)
    for start in starts:
        batch = list(make_records(start, min(BATCH, total - start), total, jobs))
        if before_last is not None and start == starts[-min(LAST_BATCHES, len(starts))]:
            before_last()
            batches = []
        batches.append(timed(lambda batch=batch: database.record_measurements(batch)))
    return jobs, batches


def measure_ours(url: str, total: int, repeats: int, realtime: bool) -> dict[str, object]:
    with TuningDatabase.open(url) as database:
        jobs, batches = fill(database, total, (lambda: take_processor(url)) if realtime else None)
        size = database.info().size_bytes
    opens = []
    for _ in range(10):
        began = time.perf_counter()
        TuningDatabase.open(url).close()
        opens.append((time.perf_counter() - began) * 1e3)
    with TuningDatabase.open(url) as database:

        def question(number: int) -> Question:
            workload = make_workload(number * 37 % WORKLOADS)
            return Question(workload.workload_hash, workload.signature_key, TARGET, HERE)

        first = timed(lambda: database.find_best(question(0)))
        best = [timed(lambda n=n: database.find_best(question(n))) for n in range(1, repeats)]
        top = [timed(lambda n=n: database.list_top(question(n), k=10)) for n in range(1, repeats)]
        single = [
            timed(lambda r=r: database.record_measurement(r))
            for r in make_records(total, repeats, total + repeats, jobs)
        ]
        coverage = [timed(lambda n=n: insights.coverage(database, f"model{n}")) for n in range(5)]
        other = {
            "top of a model": timed(lambda: _top(database)),
            "history of a task": timed(
                lambda: insights.history(database, workload_hash=make_workload(1).workload_hash)
            ),
            "failures by cause": timed(lambda: insights.failures(database, RecordFilter(job_id=jobs[3]))),
            "cost of a job": timed(lambda: insights.job_cost(database, jobs[3])),
        }
    if realtime:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return {
        "records": total,
        "realtime_priority": realtime,
        "size_mb": size / 1e6,
        "open_ms": opens,
        "first_best_ms": first,
        "best_ms": best,
        "top10_ms": top,
        "single_commit_ms": single,
        "bulk_batch_ms": batches,
        "bulk_records_per_s": [BATCH / ms * 1e3 for ms in batches],
        "coverage_ms": coverage,
        "other_ms": other,
    }


def _top(database: TuningDatabase) -> None:
    from relaxtune.tuning_db.questions import queries

    queries.top(database, RecordFilter(model="model3"))


def measure_stock(folder: Path, total: int) -> dict[str, object]:
    """Time stock JSONDatabase on files that it wrote itself."""
    import tvm
    from tvm import te
    from tvm.s_tir import meta_schedule as ms

    files = [str(folder / "database_workload.json"), str(folder / "database_tuning_record.json")]
    target = tvm.target.Target({"kind": "llvm", "num-cores": 2})

    def matmul(size: int) -> tvm.ir.IRModule:
        a, b = te.placeholder((size, size), name="A"), te.placeholder((size, size), name="B")
        k = te.reduce_axis((0, size), name="k")
        c = te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
        return tvm.IRModule({"main": te.create_prim_func([a, b, c])})

    def record(workload: ms.database.Workload, number: int) -> ms.database.TuningRecord:
        args = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
        return ms.database.TuningRecord(traces[workload], workload, [1e-5 + number * 1e-9], target, args)

    database = ms.database.JSONDatabase(*files)
    workloads = [database.commit_workload(matmul(16 + n)) for n in range(WORKLOADS)]
    traces = {}
    for workload in workloads:
        schedule = tvm.s_tir.Schedule(workload.mod)
        block = schedule.get_sblock("C")
        for loop in schedule.get_loops(block):
            schedule.split(loop, [None, 2])
        traces[workload] = schedule.trace
    single = [timed(lambda n=n: database.commit_tuning_record(record(workloads[0], n))) for n in range(100)]
    # The rest is its own lines again, since writing them through it takes minutes: one line of each workload, repeated.
    for number in range(1, WORKLOADS):
        database.commit_tuning_record(record(workloads[number], number))
    lines = Path(files[1]).read_text().splitlines()[-(WORKLOADS - 1) :]
    with open(files[1], "a") as stream:
        for number in range(total - len(single) - WORKLOADS + 1):
            stream.write(lines[number % len(lines)] + "\n")
    # Once: it takes minutes. The processor time tells how far other work on the machine had part in it.
    busy = time.process_time()
    began = time.perf_counter()
    database = ms.database.JSONDatabase(*files)
    opens = [(time.perf_counter() - began) * 1e3]
    open_cpu = (time.process_time() - busy) * 1e3
    asked = [matmul(16 + n * 37 % WORKLOADS) for n in range(20)]
    best = [timed(lambda mod=mod: database.query_tuning_record(mod, target, "main")) for mod in asked]
    return {
        "records": total,
        "open_ms": opens,
        "open_cpu_ms": open_cpu,
        "best_ms": best,
        "single_commit_ms": single[-100:],
    }


def show(results: dict[str, dict[str, object]]) -> None:
    print(f"{'':28}" + "".join(f"{name:>24}" for name in results))
    for key in ("records", "size_mb", "open_ms", "first_best_ms", "best_ms", "top10_ms", "single_commit_ms",
                "bulk_records_per_s", "coverage_ms"):  # fmt: skip
        cells = []
        for result in results.values():
            value = result.get(key)
            median = statistics.median(value) if isinstance(value, list) else value
            cells.append("" if median is None else f"{median:,.2f}")
        print(f"{key:28}" + "".join(f"{cell:>24}" for cell in cells))
    for name, result in results.items():
        print(name, {key: round(value, 1) for key, value in result.get("other_ms", {}).items()})
    if "stock json" in results and "sqlite (stock's size)" in results:
        stock, ours = results["stock json"], results["sqlite (stock's size)"]
        ratio = statistics.median(stock["open_ms"]) / statistics.median(ours["open_ms"])
        print(f"open at {stock['records']} records: stock takes {ratio:.0f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--stock-records", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--only", choices=["sqlite", "postgresql", "stock"])
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "tuning-db.json")
    options = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.only in (None, "sqlite"):
            results["sqlite"] = measure_ours(
                f"sqlite:///{folder}/tuning.db", options.records, options.repeats, options.realtime
            )
        if options.only in (None, "postgresql"):
            from tests.tuning_db.postgres_server import running_server

            url = stack.enter_context(running_server(durable=True))
            results["postgresql"] = measure_ours(url, options.records, options.repeats, options.realtime)
        if options.only in (None, "stock"):
            small = f"sqlite:///{folder}/small.db"
            results["sqlite (stock's size)"] = measure_ours(
                small, options.stock_records, options.repeats, options.realtime
            )
            results["stock json"] = measure_stock(folder, options.stock_records)
    show(results)
    conditions = {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()}
    conditions["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
    if options.out.exists() and options.only is not None:
        results = {**json.loads(options.out.read_text())["results"], **results}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps({"conditions": conditions, "results": results}, indent=1) + "\n")


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
