"""The libraries' benchmark: which record of a route counts, and what is told of the others."""

from __future__ import annotations

import json

from benchmarks.kernels.bench_libraries import compare_routes
from relaxtune.pipeline.environment import detect_environment, target_key
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.schedules.targets import resolve_target
from relaxtune.tuning_db.records import Route, Status, TuningRecord
from tests.pipeline.choose.test_library_route import bert, lowered_for_libraries


def test_the_newest_valid_record_of_each_route_counts() -> None:
    target = resolve_target("cuda:sm_90a")
    task = extract_tasks([lowered_for_libraries(bert(), target, "fp16")])[0]

    def record(route: Route, decision: int, latency_us: float | None, error: str | None = None) -> TuningRecord:
        return TuningRecord(
            workload_hash=task.workload_hash,
            signature_key="s",
            target=target_key(target),
            environment=detect_environment(target),
            route=route,
            decision=json.dumps({"algorithm": decision}),
            status=Status.OK if error is None else Status.RUN_ERROR,
            latencies_us=() if latency_us is None else (latency_us, latency_us + 0.5, latency_us + 2.0),
            error=error,
        )

    row = compare_routes(
        task,
        [
            record(Route.LIBRARY, 0, 1.0),
            record(Route.LIBRARY, 1, 5.0),
            record(Route.LIBRARY, 2, None, "first line\nno such algorithm"),
            record(Route.FALLBACK, 0, 0.5),
            record(Route.LIBRARY, 0, 7.0),
        ],
    )
    assert row["library"]["candidates"] == 3
    assert row["library"]["valid"] == 2
    assert row["library"]["median_us"] == 5.5
    assert row["library"]["decision"] == {"algorithm": 1}
    assert row["library"]["errors"] == ["no such algorithm"]
    assert row["template"]["median_us"] is None
