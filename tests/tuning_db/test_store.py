"""The contract of `TuningDatabase`, over every dialect; what only a file can do is in test_store_file.py."""

from __future__ import annotations

import dataclasses
import os
import threading
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import event, update

from relaxtune.tuning_db.errors import NotFoundError, TuningDatabaseError
from relaxtune.tuning_db.jobs import JobTask
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.records import RecordFilter, Route, Status
from relaxtune.tuning_db.sql.schema import HEAD_REVISION, JobRow, JobTaskRow
from relaxtune.tuning_db.store import TuningDatabase

START = datetime(2026, 1, 1, tzinfo=UTC)


def find(database, samples, workload=None, **changes):
    workload = workload or samples.workload()
    question = {
        "workload_hash": workload.workload_hash,
        "signature_key": workload.signature_key,
        "target": samples.target(),
        "environment": samples.environment(),
    }
    return database.find_best(Question(**{**question, **changes}))


class TestWorkloads:
    def test_workload_comes_back_as_it_went_in(self, database, samples):
        database.record_workload(samples.workload())
        assert database.get_workload("hash1") == samples.workload()
        assert database.has_workload("hash1")
        assert not database.has_workload("hash2")

    def test_workload_takes_the_later_description_when_recorded_again(self, database, samples):
        database.record_workload(samples.workload())
        later = samples.workload(signature='{"family":"matmul","better":1}', name="better", flops=1.0, ir_json=None)
        database.record_workload(later)
        assert database.list_workloads() == [dataclasses.replace(later, ir_json='{"ir":1}')]

    def test_workload_is_kept_once_per_tvm_version(self, database, samples):
        database.record_workload(samples.workload())
        database.record_workload(samples.workload(tvm_version="0.28", name="newer"))
        assert database.get_workload("hash1").name == "newer"
        assert database.get_workload("hash1", "0.27.0.post1").name == "matmul1"
        assert not database.has_workload("hash1", "0.29")

    def test_get_workload_raises_when_unknown(self, database):
        with pytest.raises(NotFoundError, match=r"No workload nix of TVM 0\.27 .*relaxtune db workloads"):
            database.get_workload("nix", "0.27")

    def test_list_workloads_selects_by_family_and_signature(self, database, samples):
        one, two = samples.workload(1), samples.workload(2, family="reduction")
        database.record_workload(one)
        database.record_workload(two)
        assert database.list_workloads(family="reduction") == [two]
        assert database.list_workloads(signature_key=one.signature_key) == [one]


class TestRecords:
    def test_records_come_back_in_order_with_their_ids(self, database, samples):
        database.record_workload(samples.workload())
        given = [samples.record(seed=seed) for seed in range(5)]
        ids = database.record_measurements(given)
        found = database.list_records()
        assert found == given
        assert [record.id for record in found] == ids
        assert database.list_records(limit=2, offset=1) == given[1:3]

    def test_equal_record_is_kept_once_when_written_twice(self, database, samples):
        database.record_workload(samples.workload())
        record = samples.record()
        first = database.record_measurement(record)
        assert database.record_measurements([record, record]) == [first, first]
        assert database.count_records() == 1

    def test_large_batch_is_kept_whole(self, database, samples):
        database.record_workload(samples.workload())
        batch = [samples.record(seed=seed) for seed in range(1203)]
        ids = database.record_measurements(batch)
        assert len(set(ids)) == database.count_records() == 1203

    def test_empty_batch_is_nothing(self, database):
        assert database.record_measurements([]) == []

    def test_nothing_is_kept_when_one_record_of_a_batch_has_an_unknown_workload(self, database, samples):
        database.record_workload(samples.workload())
        batch = [samples.record(), samples.record(samples.workload(2))]
        with pytest.raises(NotFoundError, match=r"refers to workload hash2 of TVM .*Call record_workload first"):
            database.record_measurements(batch)
        assert database.count_records() == 0
        assert database.info().targets == 0

    def test_record_is_refused_when_its_job_is_unknown(self, database, samples):
        database.record_workload(samples.workload())
        with pytest.raises(NotFoundError, match="No job nix in the database"):
            database.record_measurement(samples.record(job_id="nix"))

    def test_failure_keeps_its_error_text(self, database, samples):
        database.record_workload(samples.workload())
        database.record_measurement(samples.failure(status=Status.TIMEOUT, error="30 s"))
        (found,) = database.list_records()
        assert (found.status, found.error, found.latency_us) == (Status.TIMEOUT, "30 s", None)

    def test_write_is_seen_by_the_next_call_of_another_thread(self, database, samples):
        database.record_workload(samples.workload())
        errors = []

        def commit(thread):
            try:
                for number in range(25):
                    database.record_measurement(samples.record(seed=thread * 1000 + number))
                    assert database.count_records(RecordFilter(status=Status.OK)) > 0
            except Exception as e:
                errors.append(e)

        threads = [threading.Thread(target=commit, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert database.count_records() == 100


class TestFilters:
    @pytest.fixture
    def filled(self, database, samples):
        matmul, norm = samples.workload(1), samples.workload(2, family="reduction")
        database.record_workload(matmul)
        database.record_workload(norm)
        job = database.start_job(model="bert", model_sha256="0" * 64, target=samples.target())
        database.record_job_tasks(job.id, [JobTask("hash1", matmul.tvm_version, 1, ("a",), 0.0)])
        cuda = {"target": samples.target("cuda", "sm_90a"), "environment": samples.gpu(tvm_version=norm.tvm_version)}
        database.record_measurements(
            [
                samples.record(matmul, created_at=START, route=Route.TEMPLATE),
                samples.failure(matmul, created_at=START + timedelta(days=1), job_id=job.id),
                samples.record(norm, created_at=START + timedelta(days=2), **cuda),
            ]
        )
        return database, job, matmul

    @pytest.mark.parametrize(
        ("filters", "expected"),
        [
            ({}, [1, 2, 3]),
            ({"family": "reduction"}, [3]),
            ({"model": "bert"}, [1, 2]),
            ({"model": "gpt2"}, []),
            ({"workload_hash": "hash2"}, [3]),
            ({"target_kind": "cuda"}, [3]),
            ({"arch": "znver4"}, [1, 2]),
            ({"device_name": "NVIDIA H200"}, [3]),
            ({"tvm_version": "0.28"}, []),
            ({"route": Route.TEMPLATE}, [1]),
            ({"status": Status.BUILD_ERROR}, [2]),
            ({"since": START + timedelta(days=1)}, [2, 3]),
            ({"until": START + timedelta(days=1)}, [1]),
            ({"family": "matmul", "status": Status.OK}, [1]),
        ],
    )
    def test_filter_selects_by_each_ingredient(self, filled, filters, expected):
        database, _, _ = filled
        assert [record.id for record in database.list_records(RecordFilter(**filters))] == expected
        assert database.count_records(RecordFilter(**filters)) == len(expected)

    def test_filter_selects_by_job_and_signature(self, filled):
        database, job, matmul = filled
        assert [record.id for record in database.list_records(RecordFilter(job_id=job.id))] == [2]
        assert database.count_records(RecordFilter(signature_key=matmul.signature_key)) == 2


class TestLookup:
    def test_best_is_the_lowest_median_among_valid_records(self, database, samples):
        database.record_workload(samples.workload())
        slow, fast = samples.record(latencies_us=(9.0, 9.0, 1.0)), samples.record(latencies_us=(5.0, 5.0, 50.0))
        wrong = samples.record(status=Status.WRONG_RESULT, latencies_us=(1.0,), error="max error 3")
        database.record_measurements([slow, fast, wrong, samples.failure()])
        assert find(database, samples) == fast

    def test_best_is_none_when_there_is_only_failure(self, database, samples):
        database.record_workload(samples.workload())
        database.record_measurements([samples.failure(status=status) for status in Status if status is not Status.OK])
        assert find(database, samples) is None

    def test_older_record_wins_when_latencies_are_equal(self, database, samples):
        database.record_workload(samples.workload())
        ids = database.record_measurements([samples.record(seed=1), samples.record(seed=2)])
        assert find(database, samples).id == ids[0]

    @pytest.mark.parametrize("route", Route)
    @pytest.mark.parametrize(("kind", "arch"), [("llvm", "znver5"), ("cuda", "sm_90a")])
    def test_record_is_never_used_when_its_target_differs(self, database, samples, route, kind, arch):
        database.record_workload(samples.workload())
        environment = samples.gpu() if kind == "cuda" else samples.environment(arch=arch)
        database.record_measurement(
            samples.record(target=samples.target(kind, arch), environment=environment, route=route)
        )
        assert find(database, samples) is None
        assert find(database, samples, target=samples.target(kind, arch), environment=environment) is not None

    def test_record_of_other_target_attributes_is_used(self, database, samples):
        database.record_workload(samples.workload())
        database.record_measurement(samples.record(target=samples.target(attributes='{"num-cores":8}')))
        assert find(database, samples) is not None

    def test_record_of_another_device_ranks_last_whatever_its_latency(self, database, samples):
        database.record_workload(samples.workload())
        other = samples.record(environment=samples.environment(device_name="EPYC 9124"), latencies_us=(1.0,))
        here = samples.record(latencies_us=(99.0,))
        database.record_measurement(other)
        assert find(database, samples) == other
        database.record_measurement(here)
        assert find(database, samples) == here
        everything = database.list_top(
            Question(
                workload_hash="hash1", signature_key=None, target=samples.target(), environment=samples.environment()
            ),
            k=5,
        )
        assert everything == [here, other]

    @pytest.mark.parametrize(
        ("route", "usable"),
        [(Route.METASCHEDULE, False), (Route.FALLBACK, False), (Route.TEMPLATE, True), (Route.LIBRARY, True)],
    )
    def test_record_of_another_tvm_is_used_only_by_routes_of_our_own(self, database, samples, route, usable):
        newer = samples.workload(tvm_version="0.28")
        database.record_workload(newer)
        database.record_measurement(samples.record(environment=samples.environment(tvm_version="0.28"), route=route))
        assert (find(database, samples) is not None) is usable

    def test_template_is_found_by_signature_for_another_workload(self, database, samples):
        one, twin = samples.workload(1), samples.workload(1, workload_hash="twin")
        database.record_workload(one)
        database.record_workload(twin)
        trace = samples.record(one, latencies_us=(1.0,))
        template = samples.record(one, route=Route.TEMPLATE, decision='{"tile":64}', latencies_us=(2.0,))
        database.record_measurements([trace, template])
        assert find(database, samples, one) == trace
        assert find(database, samples, twin) == template
        assert find(database, samples, twin, signature_key=None) is None
        assert find(database, samples, one, route=Route.TEMPLATE) == template
        assert find(database, samples, one, workload_hash=None) == template

    def test_top_is_ordered_over_routes_and_limited(self, database, samples):
        database.record_workload(samples.workload())
        routes = [Route.METASCHEDULE, Route.TEMPLATE, Route.LIBRARY, Route.FALLBACK]
        given = [samples.record(route=routes[n % 4], latencies_us=(float(n + 1),)) for n in range(12)]
        database.record_measurements(given[::-1])
        question = Question("hash1", samples.workload().signature_key, samples.target(), samples.environment())
        assert database.list_top(question, k=7) == given[:7]
        assert database.list_top(question, k=50) == given
        assert database.list_top(question, k=0) == []


class TestJobs:
    def test_job_comes_back_with_its_tasks_and_end(self, database, samples):
        workload = samples.workload()
        database.record_workload(workload)
        job = database.start_job(model="bert", model_sha256="0" * 64, target=samples.target(), options='{"b":1, "a":2}')
        assert job.options == '{"a":2,"b":1}'
        assert database.get_job(job.id) == job
        tasks = [JobTask("hash1", workload.tvm_version, 12, ("/layer.0/MatMul", "/layer.0/Add"), 1.5)]
        database.record_job_tasks(job.id, tasks)
        assert database.list_job_tasks(job.id) == tasks
        database.record_job_tasks(job.id, [dataclasses.replace(tasks[0], seconds=2.5)])
        assert [task.seconds for task in database.list_job_tasks(job.id)] == [2.5]
        done = database.finish_job(job.id, "ok")
        assert done.outcome == "ok"
        assert done.finished_at >= job.started_at
        assert database.list_jobs() == [done]

    def test_more_tasks_of_a_job_are_recorded_without_reading_those_that_it_has(self, database, samples):
        version = samples.workload().tvm_version
        workloads = [samples.workload(number) for number in range(4)]
        database.record_all(workloads=workloads, records=[])
        job = database.start_job(model="bert", model_sha256="0" * 64, target=samples.target())
        tasks = [JobTask(one.workload_hash, version, 1, (), 0.0) for one in workloads]
        database.record_job_tasks(job.id, tasks[:3])
        loaded = []

        def note(row, _):
            loaded.append(row.workload_id)

        event.listen(JobTaskRow, "load", note)
        database.record_job_tasks(job.id, [dataclasses.replace(tasks[0], seconds=2.5), tasks[3]])
        event.remove(JobTaskRow, "load", note)
        assert len(loaded) == 1
        assert sorted(task.seconds for task in database.list_job_tasks(job.id)) == [0.0, 0.0, 0.0, 2.5]

    def test_job_does_not_end_before_it_began_when_the_clock_was_set_back(self, database, samples):
        job = database.start_job(model="bert", model_sha256="0" * 64, target=samples.target())
        moment = datetime.max.replace(tzinfo=UTC)
        database.write(lambda session: session.execute(update(JobRow).values(started_at=moment)))
        assert database.finish_job(job.id, "done").finished_at == moment

    def test_jobs_are_listed_newest_first_and_by_model(self, database, samples):
        jobs = [database.start_job(model=m, model_sha256="0" * 64, target=samples.target()) for m in ("a", "b", "a")]
        assert database.list_jobs() == jobs[::-1]
        assert database.list_jobs(model="a") == [jobs[2], jobs[0]]
        assert database.list_jobs(limit=1) == [jobs[2]]

    def test_unknown_job_is_refused(self, database):
        for call in (database.get_job, lambda job: database.finish_job(job, "ok")):
            with pytest.raises(NotFoundError, match="No job nix"):
                call("nix")
        with pytest.raises(NotFoundError, match="No job nix"):
            database.record_job_tasks("nix", [])

    def test_tasks_are_refused_when_a_workload_is_unknown(self, database, samples):
        job = database.start_job(model="bert", model_sha256="0" * 64, target=samples.target())
        database.record_workload(samples.workload())
        tasks = [JobTask(name, samples.workload().tvm_version, 1, (), 0.0) for name in ("hash1", "nix")]
        with pytest.raises(NotFoundError, match=f"Task nix of TVM .* of job {job.id} is not a workload"):
            database.record_job_tasks(job.id, tasks)
        assert database.list_job_tasks(job.id) == []


def test_info_counts_everything(database, samples):
    database.record_workload(samples.workload(1))
    database.record_workload(samples.workload(2))
    database.start_job(model="bert", model_sha256="0" * 64, target=samples.target())
    database.record_measurements([samples.record(), samples.record(route=Route.TEMPLATE), samples.failure()])
    info = database.info()
    assert (info.workloads, info.signatures, info.targets, info.environments, info.jobs) == (2, 2, 1, 1, 1)
    assert (info.records, info.dialect, info.schema_revision) == (
        3,
        database.url.split(":")[0].removesuffix("+psycopg"),
        HEAD_REVISION,
    )
    assert dict(info.records_by_status) == {**dict.fromkeys(Status, 0), Status.OK: 2, Status.BUILD_ERROR: 1}
    assert dict(info.records_by_route) == {**dict.fromkeys(Route, 0), Route.METASCHEDULE: 2, Route.TEMPLATE: 1}
    assert info.size_bytes > 0


def test_get_record_raises_when_unknown(database):
    with pytest.raises(NotFoundError, match="No record 7 in "):
        database.get_record(7)


def test_values_live_on_when_the_database_is_closed(path, samples):
    with TuningDatabase.open(path) as database:
        database.record_workload(samples.workload())
        database.record_measurement(samples.record(seed=3))
        (record,) = database.list_records()
    assert record.target == samples.target()
    assert record.environment.device_name == "EPYC 9654"


def in_child(work) -> str:
    """Return what `work` returns in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException as e:
            answer = f"{type(e).__name__}: {e}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_gets_connections_of_its_own_when_the_database_is_a_file(path, samples):
    with TuningDatabase.open(path) as database:
        database.record_workload(samples.workload())
        assert in_child(lambda: str(database.record_measurement(samples.record()))) == "1"
        assert database.record_measurement(samples.record()) == 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_is_refused_when_the_database_is_in_memory():
    with TuningDatabase.open("sqlite://") as database:
        answer = in_child(lambda: str(database.count_records()))
        assert answer.startswith(
            f"{TuningDatabaseError.__name__}: The memory database was opened by process {os.getpid()}"
        )
        assert database.count_records() == 0
