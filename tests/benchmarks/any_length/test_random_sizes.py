"""Calls of random sizes."""

from __future__ import annotations

import time
from collections import Counter

from benchmarks.any_length.random_sizes import random_points, time_stream


def test_points_are_within_the_sizes_and_the_same_each_time() -> None:
    points = random_points((2, 5), 40)
    assert {batch for batch, _ in points} == {1, 2}
    assert {length for _, length in points} == {1, 2, 3, 4, 5}
    assert random_points((2, 5), 40) == points


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
