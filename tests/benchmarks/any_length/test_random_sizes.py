"""Calls of random sizes."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np

from benchmarks.any_length.random_sizes import cut, random_points, time_stream
from relaxtune.models import TensorSpec


def test_points_are_within_the_sizes_and_the_same_each_time() -> None:
    points = random_points((2, 5), 40)
    assert {batch for batch, _ in points} == {1, 2}
    assert {length for _, length in points} == {1, 2, 3, 4, 5}
    assert random_points((2, 5), 40) == points


def test_inputs_are_cut_to_the_sizes_of_a_call() -> None:
    specs = [TensorSpec("mask", "int64", ("batch", "past + 1")), TensorSpec("cache", "float16", ("batch", 2, "past"))]
    larger = {
        "mask": np.arange(15).reshape(3, 5),
        "cache": np.arange(24, dtype=np.float16).reshape(3, 2, 4),
    }
    found = cut(larger, specs, {"batch": 2, "past": 3})
    assert {name: array.shape for name, array in found.items()} == {"mask": (2, 4), "cache": (2, 2, 3)}
    for name, array in found.items():
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, larger[name][tuple(map(slice, array.shape))])


def test_every_arm_has_the_same_calls_and_its_slow_ones_are_told() -> None:
    called: dict[str, list[int]] = {"one": [], "other": []}

    def arm(name: str, place: int) -> None:
        called[name].append(place)
        if place == 0:
            time.sleep(0.02)

    arms = {name: [lambda name=name, place=place: arm(name, place) for place in range(4)] for name in called}
    found = time_stream(arms, 60)
    assert called["one"] == called["other"]
    assert called["one"][:3] == [0, 1, 2]
    assert sum(Counter(called["one"][3:]).values()) == 60
    for times in found.values():
        assert times["median_us"] <= times["p99_us"] <= times["most_us"]
        assert times["most_us"] >= 20_000
