from __future__ import annotations

import pytest

from relaxtune.schedules.errors import TargetError
from relaxtune.schedules.targets import Feature, resolve_target, target_limits
from relaxtune.schedules.targets.capabilities import capabilities_of, is_of, lowest_with, native_arch, runs_on


@pytest.mark.parametrize(
    ("arch", "newest"),
    [
        ("sm_75", Feature.LDMATRIX),
        ("sm_80", Feature.CP_ASYNC),
        ("sm_89", Feature.MMA_FLOAT8),
        ("sm_90", Feature.TMA),
        ("sm_90a", Feature.WGMMA),
        ("sm_120", Feature.TMA),
        ("sm_100a", Feature.TMA),
    ],
)
def test_features_are_those_up_to_the_newest_when_arch_is_known(arch: str, newest: Feature) -> None:
    apart = {Feature.FLOAT8_CORES}
    order = [feature for feature in Feature if feature not in apart]
    assert capabilities_of(arch).features - apart == set(order[: order.index(newest) + 1])


def test_some_architectures_multiply_float8_by_halves() -> None:
    named = ("sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120", "sm_121a")
    assert [arch for arch in named if Feature.FLOAT8_CORES in capabilities_of(arch).features] == [
        "sm_89",
        "sm_120",
        "sm_121a",
    ]


def test_a_cpu_has_no_features() -> None:
    assert resolve_target("llvm").features == frozenset()


def test_lowest_with_names_the_first_architecture_that_has_all() -> None:
    assert lowest_with(Feature.MMA, Feature.CP_ASYNC) == "sm_80 or later"
    assert lowest_with(Feature.TMA, Feature.WGMMA) == "sm_90a"


def test_capabilities_name_the_known_ones_when_arch_is_not() -> None:
    with pytest.raises(TargetError, match="'sm_70' is not known; expected one of sm_75"):
        capabilities_of("sm_70")


@pytest.mark.parametrize(
    ("arch", "version", "runs"),
    [
        ("sm_80", "8.6", True),
        ("sm_86", "8.0", False),
        ("sm_80", "9.0", False),
        ("sm_90a", "9.0", True),
        ("sm_100", "10.3", True),
        ("sm_100a", "10.3", False),
        ("sm_100", "11.0", False),
    ],
)
def test_code_runs_on_later_minor_versions_but_with_a_suffix(arch: str, version: str, runs: bool) -> None:
    assert runs_on(arch, version) is runs


def test_a_target_that_is_not_here_has_a_usual_gpus_multiprocessors() -> None:
    # T4, A100, A10, L40S, H200, RTX 5090.
    counts = {"sm_75": 40, "sm_80": 108, "sm_86": 72, "sm_89": 142, "sm_90a": 132, "sm_120": 170}
    limits = {arch: target_limits(resolve_target(f"cuda:{arch}").target) for arch in counts}
    assert {arch: one.likely_sm_count for arch, one in limits.items()} == counts


def test_the_native_architecture_of_a_device_has_the_suffix_from_hopper_on() -> None:
    assert [native_arch(version) for version in ("8.9", "9.0", "12.0")] == ["sm_89", "sm_90a", "sm_120a"]
    assert is_of("sm_90a", "9.0")
    assert not is_of("sm_90a", "10.0")
