from __future__ import annotations

import math
import statistics

import pytest

from relaxtune.pipeline.tuning.measure.timing import MeasureOptions, is_hopeless, runs_for, settled_row, time_adaptively

OPTIONS = MeasureOptions(repeats=3, contender_repeats=4, hopeless_repeats=2)


class Kernel:
    """A kernel that always takes as long, or as told run by run; it counts its latencies."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = list(seconds)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, number: int, repeats: int) -> list[float]:
        self.asked.append((number, repeats))
        return [self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0] for _ in range(repeats)]


def timed(kernel: Kernel, best_s: float) -> int:
    return len(time_adaptively(kernel, lambda single: runs_for(single, 0.004), best_s, OPTIONS))


def test_the_hopeless_are_given_up_after_single_runs() -> None:
    kernel = Kernel(2.5e-3)
    assert timed(kernel, best_s=1e-3) == OPTIONS.hopeless_repeats
    assert kernel.asked == [(1, 1), (1, 1)]


def test_one_slow_run_does_not_make_a_candidate_hopeless() -> None:
    assert timed(Kernel(9e-3, 1e-3), best_s=1e-3) == OPTIONS.repeats + OPTIONS.contender_repeats


def test_contenders_get_more_latencies_than_the_rest() -> None:
    assert timed(Kernel(1.5e-3), best_s=1e-3) == OPTIONS.repeats
    assert timed(Kernel(1.05e-3), best_s=1e-3) == OPTIONS.repeats + OPTIONS.contender_repeats
    assert timed(Kernel(1e-3), best_s=math.inf) == OPTIONS.repeats + OPTIONS.contender_repeats


def test_latencies_average_enough_runs() -> None:
    kernel = Kernel(1e-3)
    timed(kernel, best_s=math.inf)
    assert kernel.asked == [(1, 1), (4, 3), (4, 4)]


@pytest.mark.parametrize("kernel_us", [1.0, 3.0, 5.0])
def test_a_short_kernel_on_a_gpu_is_not_given_up_for_what_a_row_takes_beside_it(kernel_us: float) -> None:
    """Measured on an H200: a row takes 3.9 us more than its launches."""

    def rows(number: int, repeats: int) -> list[float]:
        return [(number * kernel_us + 3.9) * 1e-6 / number] * repeats

    def number_for(single: float) -> int:
        return min(32, runs_for(single, 0.004))

    best_s = statistics.median(time_adaptively(rows, number_for, math.inf, OPTIONS))
    again = time_adaptively(rows, number_for, best_s, OPTIONS)
    assert again == [best_s] * (OPTIONS.repeats + OPTIONS.contender_repeats)
    slower = time_adaptively(rows, number_for, best_s / 3, OPTIONS)
    assert len(slower) == OPTIONS.hopeless_repeats


def test_a_first_run_that_was_held_up_does_not_make_the_rows_short() -> None:
    kernel = Kernel(3e-3, 1e-5)
    assert timed(kernel, best_s=math.inf) == OPTIONS.repeats + OPTIONS.contender_repeats
    assert kernel.asked == [(1, 1), (2, 3), (400, 3), (400, 4)]
    again = Kernel(1e-5)
    assert settled_row(again, lambda single: runs_for(single, 0.004), 3e-3, 1) == (400, [1e-5])


def test_a_first_run_tells_only_when_it_is_long() -> None:
    assert is_hopeless(0.05, 1e-3, OPTIONS)
    assert not is_hopeless(0.009, 1e-6, OPTIONS)
    assert not is_hopeless(0.05, math.inf, OPTIONS)
