"""What bounds a kernel, which share of the time it takes, and where it stands under the ceilings."""

from __future__ import annotations

import dataclasses

import pytest

from relaxtune.pipeline.report.kernel import Bottleneck, KernelRow, find_bottleneck, judged
from relaxtune.pipeline.report.page import roofline_chart, shares_chart
from tests.pipeline.report.conftest import CEILINGS


@pytest.mark.parametrize(
    ("time_us", "compute", "bandwidth", "launch", "expected"),
    [
        (100.0, 0.8, 0.3, 2.0, Bottleneck.COMPUTE),
        (100.0, 0.3, 0.8, 2.0, Bottleneck.BANDWIDTH),
        (100.0, 0.6, 0.6, 2.0, Bottleneck.COMPUTE),
        (3.0, 0.1, 0.2, 2.0, Bottleneck.LAUNCH),
        (3.0, 0.1, 0.9, 2.0, Bottleneck.BANDWIDTH),
        (100.0, 0.1, 0.2, 2.0, Bottleneck.LATENCY),
        (100.0, 0.1, 0.2, None, Bottleneck.LATENCY),
        (100.0, 0.1, 3.0, 2.0, Bottleneck.LATENCY),
        (3.0, None, 3.0, 2.0, Bottleneck.LAUNCH),
        (3.0, None, None, 2.0, None),
    ],
)
def test_the_bottleneck_is_the_unit_near_its_ceiling_else_the_launch_else_latency(
    time_us: float, compute: float | None, bandwidth: float | None, launch: float | None, expected: Bottleneck | None
) -> None:
    assert find_bottleneck(time_us, compute, bandwidth, launch) is expected


def test_the_fastest_kernel_stands_for_a_launch() -> None:
    rows = [row(name, time_us) for name, time_us in (("small", 1.0), ("twice", 2.0), ("large", 50.0))]
    for launch_us in (None, 0.3):
        found = {one.name: one.bottleneck for one in judged(rows, dataclasses.replace(CEILINGS, launch_us=launch_us))}
        assert found == {"small": Bottleneck.LAUNCH, "twice": Bottleneck.LAUNCH, "large": Bottleneck.LATENCY}


def test_a_fast_kernel_does_not_stand_for_a_launch_when_launches_are_far_faster() -> None:
    (found,) = judged([row("large", 50.0)], dataclasses.replace(CEILINGS, launch_us=1.0))
    assert found.bottleneck is Bottleneck.LATENCY


def row(name: str, time_us: float | None) -> KernelRow:
    return KernelRow(name, "norm", (), 1, "fallback", None, time_us=time_us, flops=1.0, bytes=10.0, dtype="float32")


def test_kernels_without_a_time_take_no_share() -> None:
    found = judged([row("a", 1.0), row("b", None)], CEILINGS)
    assert [(one.name, one.share) for one in found] == [("a", 1.0), ("b", None)]
    assert shares_chart([found[1]]) == ""


def test_a_roofline_needs_a_bandwidth_ceiling_and_a_point() -> None:
    found = judged([row("a", 1.0)], CEILINGS)
    assert roofline_chart(found, CEILINGS).startswith("<svg")
    assert roofline_chart(found, dataclasses.replace(CEILINGS, bytes_per_s=None)) == ""
    assert roofline_chart(judged([row("b", None)], CEILINGS), CEILINGS) == ""
    assert roofline_chart(found, None) == ""
