from __future__ import annotations

import dataclasses
import math
import pickle
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings, strategies as st

from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.jobs import Job, JobTask
from relaxtune.tuning_db.records import (
    Environment,
    RecordFilter,
    Route,
    Status,
    TargetKey,
    TuningRecord,
    Workload,
    canonical_json,
)
from relaxtune.tuning_db.store import TuningDatabase

ENVIRONMENT_CHANGES = {
    "device_kind": "cuda",
    "device_name": "other",
    "arch": "znver5",
    "driver": "1",
    "cuda": "13",
    "tvm_version": "0.28",
    "tvm_ffi_version": "0.2",
    "cores": 4,
    "schedules_version": "0123456789abcdef",
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Environment)])
def test_environment_key_changes_when_one_ingredient_changes(samples, field):
    assert samples.environment().key != samples.environment(**{field: ENVIRONMENT_CHANGES[field]}).key


def test_environment_key_of_earlier_schemas_is_kept(samples):
    """A database made before `schedules_version` holds this key; another one would double its environments."""
    earlier = "f62a77be7d03f86395322b42e3b47648615117f72ed80dfb9af1ddad5a61426e"
    assert samples.environment(schedules_version=None).key == earlier


def test_environment_key_is_equal_when_content_is_equal(samples):
    assert samples.environment().key == samples.environment().key
    assert len(samples.environment().key) == 64


@pytest.mark.parametrize(
    "other", [TargetKey("cuda", "znver4"), TargetKey("llvm", "znver5"), TargetKey("llvm", "znver4", '{"cores":2}')]
)
def test_target_key_changes_when_one_ingredient_changes(other):
    assert TargetKey("llvm", "znver4").key != other.key


def test_target_key_is_equal_when_only_the_spelling_differs():
    one = TargetKey("llvm", "znver4", '{"a": 1, "b": [2, 3]}')
    other = TargetKey(" LLVM ", "ZnVer4", '{"b":[2,3],"a":1}')
    assert one == other
    assert one.key == other.key


def test_target_key_differs_when_a_list_has_another_order():
    assert (
        TargetKey("llvm", "znver4", '{"keys":["a","b"]}').key != TargetKey("llvm", "znver4", '{"keys":["b","a"]}').key
    )


def test_signature_key_is_equal_when_only_the_spelling_differs(samples):
    one = samples.workload(signature='{"family": "matmul", "dims": [1, 2]}')
    other = samples.workload(signature='{"dims":[1,2],"family":"matmul"}', workload_hash="other", name="other")
    assert one.signature_key == other.signature_key


@pytest.mark.parametrize(
    "signature",
    [
        '{"family":"reduction","dims":[1],"dtypes":["float32"],"epilogue":[]}',
        '{"family":"matmul","dims":[2],"dtypes":["float32"],"epilogue":[]}',
        '{"family":"matmul","dims":[1],"dtypes":["float16"],"epilogue":[]}',
        '{"family":"matmul","dims":[1],"dtypes":["float32"],"epilogue":["gelu"]}',
    ],
)
def test_signature_key_changes_when_one_ingredient_changes(samples, signature):
    base = samples.workload(signature='{"family":"matmul","dims":[1],"dtypes":["float32"],"epilogue":[]}')
    assert base.signature_key != samples.workload(signature=signature).signature_key


RECORD_CHANGES: dict[str, object] = {
    "workload_hash": "other",
    "signature_key": "f" * 64,
    "target": TargetKey("llvm", "znver4", '{"cores":8}'),
    "environment": None,
    "route": Route.FALLBACK,
    "decision": "[1]",
    "status": Status.WRONG_RESULT,
    "latencies_us": (12.5, 11.5),
    "error": "text",
    "registers": 1,
    "smem_bytes": 1,
    "spill_bytes": 1,
    "kernel_hash": "0123456789abcdef",
    "code_version": "0.1.0+g0123456789ab",
    "seed": 1,
    "duration_s": 1.0,
    "job_id": "job",
    "created_at": datetime(2030, 1, 1, tzinfo=UTC),
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(TuningRecord) if f.compare])
def test_record_key_changes_when_one_ingredient_changes(samples, field):
    record = samples.record()
    change = RECORD_CHANGES[field] or samples.environment(cores=64)
    assert record.key != dataclasses.replace(record, **{field: change}).key


def test_record_key_and_equality_ignore_the_id(samples):
    record = samples.record()
    assert dataclasses.replace(record, id=7) == record
    assert dataclasses.replace(record, id=7).key == record.key


@pytest.mark.parametrize(
    ("latencies", "median"),
    [((3.0, 1.0, 2.0), 2.0), ((1.0, 2.0), 1.5), ((5.0,), 5.0), ((), None), ((1.0, math.inf), math.inf)],
)
def test_latency_us_is_the_median(samples, latencies, median):
    assert samples.failure(latencies_us=latencies).latency_us == median


def test_latency_us_is_nan_when_one_latency_is(samples):
    assert math.isnan(samples.failure(latencies_us=(1.0, math.nan, 2.0)).latency_us)


@pytest.mark.parametrize("latencies", [(), (math.nan,), (1.0, math.inf), (0.0,), (-1.0,)])
def test_ok_record_is_refused_when_a_latency_is_not_true(samples, latencies):
    with pytest.raises(InvalidRecordError, match=r"status ok and latencies_us=.*at least one, all finite and above 0"):
        samples.record(latencies_us=latencies)


def test_record_is_refused_when_target_and_device_differ_in_kind(samples):
    with pytest.raises(InvalidRecordError, match=r"target kind 'cuda', measured on device kind 'cpu': expected 'cuda'"):
        samples.record(target=samples.target("cuda", "sm_90a"))


def test_record_is_refused_when_its_time_has_no_zone(samples):
    with pytest.raises(InvalidRecordError, match=r"created_at has no time zone.*datetime\.now\(UTC\)"):
        samples.record(created_at=datetime(2026, 1, 1))


def test_record_is_refused_when_an_integer_has_more_than_64_bits(samples):
    with pytest.raises(InvalidRecordError, match=r"seed does not fit 64 bits: got 9223372036854775808"):
        samples.record(seed=2**63)


@pytest.mark.parametrize("duration", [-1.0, math.nan, math.inf])
def test_record_is_refused_when_its_duration_is_not_true(samples, duration):
    with pytest.raises(InvalidRecordError, match="duration_s must be a finite number of at least 0"):
        samples.record(duration_s=duration)


def test_record_time_is_in_utc_when_given_in_another_zone(samples):
    moment = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    assert samples.record(created_at=moment).created_at.isoformat() == "2026-01-01T10:00:00+00:00"


def test_error_text_is_storable_when_it_holds_nul_and_broken_utf8(samples):
    assert samples.failure(error="a\0b\udcff").error == "a\\x00b\\udcff"


def test_workload_is_refused_when_its_signature_is_not_json(samples):
    with pytest.raises(InvalidRecordError, match=r"Workload\.signature is not valid JSON"):
        samples.workload(signature="{M:1}")


@pytest.mark.parametrize("field", ["flops", "bytes"])
def test_workload_is_refused_when_a_quantity_is_not_finite(samples, field):
    with pytest.raises(InvalidRecordError, match=f"Workload.{field} of matmul1 must be a finite number"):
        samples.workload(**{field: math.nan})


def test_workload_is_refused_when_its_hash_is_empty(samples):
    with pytest.raises(InvalidRecordError, match="'matmul1' has an empty workload_hash"):
        samples.workload(workload_hash="")


def test_times_are_in_utc_in_jobs_and_filters(samples):
    moment = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    job = Job("id", "bert", "0" * 64, samples.target(), "{}", moment, moment)
    assert job.started_at.tzinfo is UTC
    assert job.finished_at is not None
    assert job.finished_at.tzinfo is UTC
    assert RecordFilter(since=moment).since == moment
    with pytest.raises(InvalidRecordError, match=r"RecordFilter\.until has no time zone"):
        RecordFilter(until=datetime(2026, 1, 1))


def test_values_are_frozen_and_picklable(samples):
    record = samples.record()
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.status = Status.TIMEOUT
    assert pickle.loads(pickle.dumps(record)) == record


def test_canonical_json_refuses_nan():
    with pytest.raises(ValueError, match="JSON"):
        canonical_json([math.nan])


TEXT = st.text(max_size=20)
COUNT = st.none() | st.integers(-(2**31), 2**31 - 1)
ENVIRONMENTS = st.builds(
    Environment,
    device_kind=st.just("cpu"),
    device_name=TEXT,
    arch=TEXT,
    driver=st.none() | TEXT,
    cuda=st.none() | TEXT,
    tvm_version=st.just("0.27"),
    tvm_ffi_version=TEXT,
    cores=COUNT,
    schedules_version=st.none() | TEXT,
)
JSON_OBJECTS = st.dictionaries(TEXT, st.integers() | TEXT | st.lists(st.booleans(), max_size=3), max_size=4)
TARGETS = st.builds(TargetKey, kind=st.just("llvm"), arch=TEXT, attributes=JSON_OBJECTS.map(canonical_json))
TIMES = st.datetimes(min_value=datetime(1970, 1, 2), timezones=st.just(UTC))
SHARED = {
    "workload_hash": st.just("w"),
    "target": TARGETS,
    "environment": ENVIRONMENTS,
    "route": st.sampled_from(Route),
    "decision": TEXT,
    "error": st.none() | TEXT,
    "registers": COUNT,
    "smem_bytes": COUNT,
    "spill_bytes": COUNT,
    "kernel_hash": st.none() | st.text("0123456789abcdef", min_size=16, max_size=16),
    "code_version": st.none() | st.text(),
    "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
    "duration_s": st.floats(0, allow_nan=False, allow_infinity=False),
    "job_id": st.none(),
    "created_at": TIMES,
}
POSITIVE = st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False)


def records(signature_key: str) -> st.SearchStrategy[TuningRecord]:
    common = {**SHARED, "signature_key": st.just(signature_key)}
    good = st.builds(
        TuningRecord,
        status=st.just(Status.OK),
        latencies_us=st.lists(POSITIVE, min_size=1, max_size=5).map(tuple),
        **common,
    )
    failures = st.sampled_from([status for status in Status if status is not Status.OK])
    bad = st.builds(TuningRecord, status=failures, latencies_us=st.lists(st.floats(), max_size=5).map(tuple), **common)
    return good | bad


@pytest.fixture(scope="module")
def memory() -> TuningDatabase:
    with TuningDatabase.open("sqlite://") as opened:
        workload = Workload("w", "matmul", '{"M":1}', "w", 1.0, 1.0, None, "0.27")
        opened.record_workload(workload)
        yield opened


KEY = Workload("w", "matmul", '{"M":1}', "w", 1.0, 1.0, None, "0.27").signature_key


@given(record=records(KEY))
@settings(deadline=None, max_examples=60)
def test_record_comes_back_as_it_went_in(memory, record):
    (number,) = memory.record_measurements([record])
    # NaN is not equal to itself: repr shows every bit of a float and the kind of the others.
    found = memory.get_record(number)
    assert repr(dataclasses.replace(found, id=None)) == repr(record)
    assert found.key == record.key


@given(target=TARGETS)
@settings(max_examples=50)
def test_target_is_canonical_when_made_again_from_itself(target):
    assert TargetKey(target.kind, target.arch, target.attributes) == target


def test_job_task_keeps_nodes_as_a_tuple():
    assert JobTask("w", "0.27", 1, ["a", "b"], 1.0).onnx_nodes == ("a", "b")
