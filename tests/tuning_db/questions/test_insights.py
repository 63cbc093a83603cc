from __future__ import annotations

import sys
from datetime import UTC, date, datetime, timedelta

import pytest

from relaxtune.tuning_db.errors import NotFoundError, TuningDatabaseError
from relaxtune.tuning_db.jobs import JobTask
from relaxtune.tuning_db.questions import insights, queries
from relaxtune.tuning_db.questions.data_frames import flatten, to_frame
from relaxtune.tuning_db.questions.insights import failure_cause
from relaxtune.tuning_db.records import RecordFilter, Route, Status

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.fixture
def filled(database, samples):
    """Two matmuls of bert, one measured by two jobs and twice slower at last, and a norm without records."""
    first, second = samples.workload(1), samples.workload(2)
    norm = samples.workload(3, family="norm", signature='{"family":"norm","inputs":[[[1,128,768],"float16"]]}')
    for workload in (first, second, norm):
        database.record_workload(workload)
    job = database.start_job(model="bert", model_sha256="0" * 64, target=samples.target())
    tasks = [JobTask(w.workload_hash, w.tvm_version, 12, ("n",), 2.0) for w in (first, norm)]
    database.record_job_tasks(job.id, tasks)
    gpu = {"target": samples.target("cuda", "sm_90a"), "environment": samples.gpu()}
    newer = samples.workload(1, workload_hash="hash1b", tvm_version="0.28")
    database.record_workload(newer)
    database.record_measurements(
        [
            samples.record(first, latencies_us=(8.0, 9.0, 10.0), created_at=START, job_id=job.id),
            samples.record(first, latencies_us=(6.0,), created_at=START + DAY, route=Route.TEMPLATE),
            samples.record(first, latencies_us=(7.0,), created_at=START + 2 * DAY),
            samples.failure(first, created_at=START + 2 * DAY, error="trace\n  smem 99 KiB at 0xff", job_id=job.id),
            samples.failure(first, created_at=START + 3 * DAY, error="smem 7 KiB at 0x1\n"),
            samples.failure(second, created_at=START, error=None, status=Status.TIMEOUT),
            samples.record(first, latencies_us=(1.0,), created_at=START + 2 * DAY, **gpu),
            samples.record(
                newer,
                latencies_us=(12.0,),
                created_at=START + 4 * DAY,
                environment=samples.environment(tvm_version="0.28"),
            ),
        ]
    )
    return database, job


def test_history_has_a_point_for_each_day_version_and_device(filled):
    database, _ = filled
    points = insights.history(database, workload_hash="hash1")
    seen = [(p.day, p.device_name, p.candidates, p.valid, p.best_us, p.route, p.so_far_us) for p in points]
    day = date(2026, 1, 1)
    assert seen == [
        (day, "EPYC 9654", 1, 1, 9.0, Route.METASCHEDULE, 9.0),
        (day + DAY, "EPYC 9654", 1, 1, 6.0, Route.TEMPLATE, 6.0),
        (day + 2 * DAY, "EPYC 9654", 2, 1, 7.0, Route.METASCHEDULE, 6.0),
        (day + 2 * DAY, "NVIDIA H200", 1, 1, 1.0, Route.METASCHEDULE, 1.0),
        (day + 3 * DAY, "EPYC 9654", 1, 0, None, None, 6.0),
    ]
    assert {(p.device_name, p.driver) for p in points} == {("EPYC 9654", None), ("NVIDIA H200", "580.1")}
    assert {p.tvm_version for p in insights.history(database)} == {"0.27.0.post1", "0.28"}
    assert len(insights.history(database, RecordFilter(target_kind="cuda"))) == 1


def test_history_tells_drivers_apart_and_names_the_best_kernel_of_each(database, samples):
    workload = samples.workload()
    database.record_workload(workload)
    times = {("580.1", "aaaa"): 5.0, ("580.1", "bbbb"): 4.0, ("590.2", "cccc"): 6.0}
    database.record_measurements(
        [
            samples.record(
                latencies_us=(us,),
                target=samples.target("cuda", "sm_90a"),
                environment=samples.gpu(driver=driver),
                kernel_hash=made,
                created_at=START,
            )
            for (driver, made), us in times.items()
        ]
    )
    found = [(p.driver, p.candidates, p.best_us, p.kernel_hash) for p in insights.history(database)]
    assert found == [("580.1", 2, 4.0, "bbbb"), ("590.2", 1, 6.0, "cccc")]


def test_history_tells_commits_of_relaxtune_apart(database, samples):
    workload = samples.workload()
    database.record_workload(workload)
    for code, us in ((None, 5.0), ("0.1.0+ga", 4.0), ("0.1.0+gb", 6.0)):
        database.record_measurement(samples.record(latencies_us=(us,), code_version=code, created_at=START))
    found = {p.code_version: (p.best_us, p.so_far_us) for p in insights.history(database)}
    assert found == {None: (5.0, 5.0), "0.1.0+ga": (4.0, 4.0), "0.1.0+gb": (6.0, 4.0)}


def test_failures_are_counted_by_what_their_last_line_says(filled):
    database, _ = filled
    causes = insights.failures(database)
    assert [(c.status, c.cause, c.count, c.workloads) for c in causes] == [
        (Status.BUILD_ERROR, "smem # KiB at #", 2, 1),
        (Status.TIMEOUT, "no reason was recorded", 1, 1),
    ]
    assert causes[0].last_at == START + 3 * DAY
    assert causes[0].last_at.tzinfo is not None
    assert database.get_record(causes[0].example_id).error == "smem 7 KiB at 0x1\n"
    assert insights.failures(database, limit=1) == causes[:1]
    assert insights.failures(database, RecordFilter(workload_hash="hash2")) == causes[1:]


@pytest.mark.parametrize(
    ("error", "cause"),
    [("a\nb 1.5 us\n\n", "b # us"), ("", "no reason was recorded"), ("x" * 500, "x" * 160)],
)
def test_failure_cause_is_the_last_line_without_numbers(error, cause):
    assert failure_cause(error) == cause


def test_coverage_says_which_tasks_have_records_how_old_and_where(filled):
    database, _ = filled
    lines = insights.coverage(database, "bert", now=START + 12 * DAY)
    seen = [(t.name, t.device_name, t.arch, t.valid, t.failed, t.best_us, t.age_days, t.covered) for t in lines]
    assert seen == [
        ("matmul1", "EPYC 9654", "znver4", 3, 2, 6.0, 9.0, True),
        ("matmul1", "NVIDIA H200", "sm_90a", 1, 0, 1.0, 10.0, True),
        ("matmul3", None, None, 0, 0, None, None, False),
    ]
    assert {line.weight for line in lines} == {12}
    only_gpu = insights.coverage(database, "bert", RecordFilter(target_kind="cuda"))
    assert [(t.name, t.valid) for t in only_gpu] == [("matmul1", 1), ("matmul3", 0)]
    assert insights.coverage(database, "gpt2") == ()


def test_job_cost_adds_candidates_seconds_and_device_seconds(filled):
    database, job = filled
    cost = insights.job_cost(database, job.id)
    assert (cost.tasks, cost.candidates, cost.task_s, cost.candidate_s) == (2, 2, 4.0, 0.5)
    assert dict(cost.by_status)[Status.BUILD_ERROR] == 1
    assert cost.device_s == pytest.approx(27e-6)
    assert cost.wall_s is None
    database.finish_job(job.id, "done")
    assert insights.job_cost(database, job.id).wall_s >= 0
    with pytest.raises(NotFoundError, match="No job nix"):
        insights.job_cost(database, "nix")


def test_candidates_of_a_job_are_counted_once_each_and_without_defaults(database, samples):
    works = [samples.workload(1), samples.workload(2)]
    for work in works:
        database.record_workload(work)
    job = database.start_job(model="bert", model_sha256="0" * 64, target=samples.target())
    of_job = {"job_id": job.id, "created_at": START}
    database.record_measurements(
        [
            samples.record(works[0], decision="default", route=Route.FALLBACK, **of_job),
            *(samples.record(works[0], decision="tried twice", **of_job) for _ in range(2)),
            samples.record(works[1], decision="tried twice", **of_job),
            samples.failure(works[0], decision="failed", **of_job),
            samples.record(works[0], decision="of no job"),
        ]
    )
    assert insights.count_candidates(database, job.id) == 3


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (RecordFilter(shape=(1, 128, 768)), ["matmul3"]),
        (RecordFilter(dtype="float16"), ["matmul3"]),
        (RecordFilter(shape=(128, 768)), []),
        (RecordFilter(shape=(1, 128, 7)), []),
        (RecordFilter(dtype="float"), []),
        (RecordFilter(dtype="%"), []),
    ],
)
def test_workloads_are_selected_by_shape_and_dtype(filled, filters, expected):
    database, _ = filled
    assert [w.name for w in queries.workloads(database, filters)] == expected
    assert database.count_records(filters) == 0


def test_frame_has_a_row_for_each_value_and_a_column_for_each_field(filled):
    database, _ = filled
    frame = to_frame(queries.query(database))
    assert len(frame) == 8
    assert {"name", "record.latency_us", "record.target.arch", "record.status"} <= set(frame.columns)
    assert frame["record.latency_us"].min() == 1.0
    assert list(to_frame(insights.failures(database))["count"]) == [2, 1]


def test_frame_says_what_to_install_when_pandas_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(TuningDatabaseError, match="pip install pandas"):
        to_frame([])


def test_flatten_names_nested_fields_with_dots():
    assert flatten({"a": {"b": 1}, "s": Status.OK}) == {"a.b": 1, "s": "ok"}
