"""What stands beside what between two dates or two TVM versions: like with like, and nothing of interrupted runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from relaxtune.tuning_db.questions.changes import changes
from relaxtune.tuning_db.records import RecordFilter, Route

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)
SPANS = RecordFilter(until=START + DAY), RecordFilter(since=START + DAY)


@pytest.fixture
def measured(database, samples):
    """Return a function that records a kernel's latencies on a day."""
    database.record_workload(samples.workload())
    database.record_workload(samples.workload(tvm_version="0.28"))

    def record(decision: str, *us: float, day: int = 0, **changed: object) -> None:
        database.record_measurement(
            samples.record(decision=decision, latencies_us=us, created_at=START + day * DAY, **changed)
        )

    return record


def job(database, samples, outcome: str) -> str:
    started = database.start_job(model="bert", model_sha256="0" * 64, target=samples.target())
    database.finish_job(started.id, outcome)
    return started.id


def test_kernels_of_both_sides_are_compared_with_themselves_the_fastest_first(database, measured):
    measured("a", 2.0, 2.1)
    measured("b", 1.0, 1.1)
    measured("c", 0.5)
    measured("a", 3.0, day=1)
    measured("b", 1.5, day=1)
    measured("b", 1.4, 1.6, day=2)
    measured("d", 0.4, day=1)
    (found,) = changes(database, *SPANS)
    assert found.same_kernels
    assert found.before_us == ((1.0, 1.1), (2.0, 2.1))
    assert found.after_us == ((1.4, 1.6), (3.0,))


def test_routes_devices_and_versions_are_not_mixed(database, measured, samples):
    measured("a", 1.0)
    measured("a", 2.0, day=1, route=Route.TEMPLATE)
    measured("a", 2.0, day=1, environment=samples.environment(cores=999))
    measured("a", 2.0, day=1, environment=samples.environment(tvm_version="0.28"))
    measured("a", 2.0, day=1, environment=samples.gpu(), target=samples.target("cuda", "sm_90a"))
    assert changes(database, *SPANS) == ()
    versions = RecordFilter(tvm_version=samples.environment().tvm_version), RecordFilter(tvm_version="0.28")
    (found,) = changes(database, *versions)
    assert (found.route, found.before_us, found.after_us) == (Route.METASCHEDULE, ((1.0,),), ((2.0,),))


def test_another_driver_is_compared(database, measured, samples):
    measured("a", 1.0)
    measured("a", 2.0, day=1, environment=samples.environment(driver="600.1"))
    assert len(changes(database, *SPANS)) == 1


@pytest.mark.parametrize(("outcome", "compared"), [("done", 1), ("interrupted", 0), ("failed: OSError", 0)])
def test_best_kernels_are_compared_where_both_searches_were_carried_to_their_end(
    database, measured, samples, outcome, compared
):
    measured("a", 1.0, job_id=job(database, samples, "done"))
    measured("b", 5.0, day=1, job_id=job(database, samples, outcome))
    found = changes(database, *SPANS)
    assert len(found) == compared
    assert not any(one.same_kernels for one in found)


def test_the_resume_of_an_interrupted_run_is_compared_by_what_both_measured(database, measured, samples):
    measured("known", 1.0, job_id=job(database, samples, "interrupted"))
    resumed = job(database, samples, "done")
    measured("tried", 5.0, day=1, job_id=resumed)
    assert changes(database, *SPANS) == ()
    measured("known", 1.5, day=1, job_id=resumed)
    (found,) = changes(database, *SPANS)
    assert (found.before_us, found.after_us) == (((1.0,),), ((1.5,),))
