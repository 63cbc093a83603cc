"""The benchmark of any length on a GPU: no arm is timed in the wake of another; what is compiled before its turn."""

from __future__ import annotations

import pytest

from benchmarks.whole_models import bench_any_length_gpu


def test_each_arm_is_timed_after_a_call_of_its_own_and_turns_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(bench_any_length_gpu, "error_of", lambda _found, _expected: 0.0)
    monkeypatch.setattr(bench_any_length_gpu, "_WARM", 0)
    arms = {name: lambda name=name: called.append(name) for name in ("symbolic", "ort")}
    found = bench_any_length_gpu.measure(arms, {}, 2)
    assert called[2:] == ["symbolic", "symbolic", "ort", "ort", "ort", "ort", "symbolic", "symbolic"]
    assert all({"median_us", "p99_us"} <= set(one) for one in found.values())


def test_an_arm_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_any_length_gpu, "error_of", lambda found, _expected: found)
    found = bench_any_length_gpu.measure({"symbolic": lambda: 0.0, "ort": lambda: 1.0}, {}, 1)
    assert "median_us" in found["symbolic"]
    assert found["ort"] == {"error": 1.0}


def test_expected_outputs_are_let_go_before_arms_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"y": 1.0}
    held: list[int] = []
    monkeypatch.setattr(bench_any_length_gpu, "error_of", lambda _found, expected: float(not expected))
    monkeypatch.setattr(bench_any_length_gpu, "_WARM", 0)
    found = bench_any_length_gpu.measure({"symbolic": lambda: held.append(len(expected))}, expected, 1)
    assert found["symbolic"]["error"] == 0.0
    assert held == [1, 0, 0]


@pytest.mark.parametrize(
    ("points", "smallest"),
    [
        ([(1, 1), (8, 1), (32, 1), (1, 7), (8, 7), (32, 7), (1, 16)], {(1, 1), (8, 1), (1, 7), (8, 7)}),
        ([(32, 512), (8, 128), (1, 512)], {(8, 128), (1, 512)}),
        ([(32,), (8,), (1,)], {(8,), (1,)}),
        ([(8, 64)], {(8, 64)}),
    ],
)
def test_torch_compiles_ahead_at_the_smallest_point_of_each_kind(
    points: list[tuple[int, ...]], smallest: set[tuple[int, ...]]
) -> None:
    found = bench_any_length_gpu.smallest_of_kinds(points)
    assert len(found) == len(smallest)
    assert set(found) == smallest
