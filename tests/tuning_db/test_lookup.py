from __future__ import annotations

import dataclasses

import pytest

from relaxtune.tuning_db.lookup import (
    DeviceRank,
    Question,
    decision_is_portable,
    device_rank,
    rank_record,
    target_is_lower,
    target_matches,
    versions_match,
)
from relaxtune.tuning_db.records import Route, Status, TargetKey


def test_target_matches_when_only_other_attributes_differ():
    assert target_matches(TargetKey("llvm", "znver4"), TargetKey("LLVM", "ZNVER4", '{"num-cores":8}'))


@pytest.mark.parametrize("found", [TargetKey("cuda", "znver4"), TargetKey("llvm", "znver5")])
def test_target_does_not_match_when_kind_or_arch_differs(found):
    assert not target_matches(TargetKey("llvm", "znver4"), found)


def test_target_does_not_match_when_an_arch_only_begins_alike():
    assert not target_matches(TargetKey("cuda", "sm_90a"), TargetKey("cuda", "sm_90"))


@pytest.mark.parametrize(
    ("route", "usable"),
    [(Route.METASCHEDULE, False), (Route.FALLBACK, False), (Route.TEMPLATE, True), (Route.LIBRARY, True)],
)
def test_other_tvm_version_is_usable_only_by_routes_of_our_own(samples, route, usable):
    assert versions_match(samples.environment(), samples.environment(tvm_version="0.28"), route) is usable
    assert versions_match(samples.environment(), samples.environment(), route)


@pytest.mark.parametrize("route", Route)
def test_noted_version_of_the_schedules_decides_nothing(samples, route):
    earlier, now = samples.environment(schedules_version="v1"), samples.environment()
    assert versions_match(now, earlier, route)
    assert device_rank(now, earlier) is DeviceRank.SAME_DEVICE


@pytest.mark.parametrize(
    ("changes", "rank"),
    [
        ({}, DeviceRank.SAME_DEVICE),
        ({"driver": "1"}, DeviceRank.SAME_DEVICE),
        ({"cuda": "14"}, DeviceRank.SAME_DEVICE),
        ({"tvm_ffi_version": "0.2"}, DeviceRank.SAME_DEVICE),
        ({"device_name": "other"}, DeviceRank.SAME_ARCH),
        ({"device_kind": "cuda"}, DeviceRank.SAME_ARCH),
        ({"cores": 64}, DeviceRank.SAME_ARCH),
    ],
)
def test_device_rank_depends_on_kind_name_and_cpu_cores_alone(samples, changes, rank):
    assert device_rank(samples.environment(), samples.environment(**changes)) is rank


def test_device_rank_ignores_host_cores_on_a_gpu(samples):
    assert device_rank(samples.gpu(cores=2), samples.gpu(cores=64)) is DeviceRank.SAME_DEVICE


@pytest.mark.parametrize(
    ("route", "by_workload", "by_signature", "expected"),
    [
        (None, True, True, tuple(Route)),
        (None, True, False, (Route.METASCHEDULE, Route.FALLBACK)),
        (None, False, True, (Route.TEMPLATE, Route.LIBRARY)),
        (Route.TEMPLATE, True, False, ()),
        (Route.METASCHEDULE, False, True, ()),
        (Route.METASCHEDULE, True, True, (Route.METASCHEDULE,)),
        (None, False, False, ()),
    ],
)
def test_routes_of_a_question_are_those_whose_key_is_known(samples, route, by_workload, by_signature, expected):
    keys = ("w" if by_workload else None, "s" if by_signature else None)
    assert Question(*keys, samples.target(), samples.environment(), route).routes == expected


@pytest.mark.parametrize(
    ("kind", "wanted", "found", "lower"),
    [
        ("cuda", "sm_86", "sm_80", True),
        ("cuda", "sm_89", "sm_86", True),
        ("cuda", "sm_80", "sm_86", False),
        ("cuda", "sm_80", "sm_80", False),
        ("cuda", "sm_90", "sm_80", False),
        ("cuda", "sm_120", "sm_100", False),
        ("cuda", "sm_103", "sm_100", True),
        ("cuda", "sm_90a", "sm_90", False),
        ("cuda", "sm_91", "sm_90a", False),
        ("llvm", "znver5", "znver4", True),
        ("llvm", "znver4", "znver5", False),
        ("llvm", "x86-64-v4", "x86-64-v3", True),
        ("llvm", "znver4", "x86-64-v3", False),
        ("llvm", "sm_86", "sm_80", False),
    ],
)
def test_target_is_lower_only_inside_a_family(kind, wanted, found, lower):
    assert target_is_lower(TargetKey(kind, wanted), TargetKey(kind, found)) is lower


def test_target_is_never_lower_across_kinds():
    assert not target_is_lower(TargetKey("cuda", "sm_86"), TargetKey("rocm", "sm_80"))


@pytest.mark.parametrize(
    ("kind", "route", "smem_bytes", "portable"),
    [
        ("llvm", Route.METASCHEDULE, None, True),
        ("llvm", Route.LIBRARY, None, False),
        ("llvm", Route.FALLBACK, None, False),
        ("cuda", Route.METASCHEDULE, None, False),
        ("cuda", Route.METASCHEDULE, 48 * 1024, True),
        ("cuda", Route.TEMPLATE, 48 * 1024 + 1, False),
        ("cuda", Route.LIBRARY, 0, False),
    ],
)
def test_decision_is_portable_by_route_and_shared_memory(kind, route, smem_bytes, portable):
    assert decision_is_portable(TargetKey(kind, "a"), route, smem_bytes) is portable


def places(samples):
    """Yield (target, environment) pairs that differ in each way that a rule knows."""
    for arch in ("znver3", "znver4", "znver5", "x86-64-v4"):
        for name in ("EPYC 9654", "EPYC 9124"):
            for version in ("0.27.0.post1", "0.28"):
                yield samples.target("llvm", arch), samples.environment(device_name=name, tvm_version=version)
                newer = samples.environment(device_name=name, tvm_version=version, schedules_version="v2")
                yield samples.target("llvm", arch), newer
    for arch in ("sm_80", "sm_86", "sm_90a"):
        yield samples.target("cuda", arch), samples.gpu()


def test_sql_finds_what_the_rules_say(database, samples):
    """The rules are pure functions, and SQL carries them out: both must agree on every record and every place."""
    for version in ("0.27.0.post1", "0.28"):
        database.record_workload(samples.workload(tvm_version=version))
    records = [
        samples.record(
            target=target,
            environment=environment,
            route=route,
            smem_bytes=smem_bytes,
            latencies_us=(1.0 + number,),
            seed=number,
        )
        for number, (target, environment) in enumerate(places(samples))
        for route in Route
        for smem_bytes in (None, 1024)
    ]
    records += [samples.failure(status=Status.WRONG_RESULT, latencies_us=(0.5,))]
    database.record_measurements(records)
    stored = database.list_records()
    workload = samples.workload()
    for target, environment in places(samples):
        ranked = [(rank_record(target, environment, record), record.latency_us, record.id) for record in stored]
        expected = [id_ for rank, _, id_ in sorted(item for item in ranked if item[0] is not None)]
        question = Question("hash1", workload.signature_key, target, environment)
        found = database.list_top(question, k=1000)
        assert [record.id for record in found] == expected
        assert [record.id for record in database.list_top(question, k=3)] == [record.id for record in found[:3]]


@pytest.mark.quick_cases("sqlite-file-0", "sqlite-file-3", "sqlite-memory-1000", "postgresql-1", "layers-3")
@pytest.mark.parametrize("k", [0, 1, 3, 1000])
def test_many_questions_at_once_are_answered_as_each_alone(database, samples, k):
    workloads = [samples.workload(number) for number in (1, 2, 3)]
    for workload in workloads:
        database.record_workload(workload)
        database.record_workload(dataclasses.replace(workload, tvm_version="0.28"))
    where = list(places(samples))[::3]
    records = [
        samples.record(
            workload,
            target=target,
            environment=environment,
            route=route,
            smem_bytes=1024,
            latencies_us=(1.0 + (37 * number + 11 * seed) % 17,),
            seed=100 * number + seed,
        )
        for number, workload in enumerate(workloads[:2])
        for target, environment in where
        for route in Route
        for seed in (1, 2)
    ]
    database.record_measurements(records)
    questions = [
        Question(workload_hash, signature_key, target, environment, route)
        for target, environment in where
        for route in (None, Route.METASCHEDULE, Route.TEMPLATE)
        for one in workloads
        for workload_hash, signature_key in (
            (one.workload_hash, one.signature_key),
            (one.workload_hash, None),
            (None, one.signature_key),
        )
    ]
    answers = database.list_top_each(questions, k=k)
    assert answers == [database.list_top(one, k=k) for one in questions]
    assert any(answers) == (k > 0)
    assert database.list_top_each([], k=k) == []
