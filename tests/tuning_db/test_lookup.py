from __future__ import annotations

import pytest

from tuning_db.lookup import DeviceRank, device_rank, routes_to_search, target_matches, tvm_version_matches
from tuning_db.records import Route, TargetKey


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
    assert tvm_version_matches(samples.environment(), samples.environment(tvm_version="0.28"), route) is usable
    assert tvm_version_matches(samples.environment(), samples.environment(), route)


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
def test_routes_to_search_are_those_whose_key_is_known(route, by_workload, by_signature, expected):
    assert routes_to_search(route, by_workload=by_workload, by_signature=by_signature) == expected
