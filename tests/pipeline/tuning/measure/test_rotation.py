from __future__ import annotations

import math
from enum import IntEnum
from types import SimpleNamespace

import pytest

from relaxtune.pipeline.tuning.measure import rotation
from relaxtune.pipeline.tuning.measure.rotation import RotatedTimer, can_rotate, launches, sets_needed
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions, time_adaptively

L2 = 50 << 20


@pytest.mark.parametrize(("size", "sets"), [(1 << 10, 32), (10 << 20, 11), (200 << 20, 2)])
def test_copies_together_pass_twice_the_l2(size: int, sets: int) -> None:
    assert sets_needed(size, L2) == sets
    assert sets == 32 or sets * size > 2 * L2


def test_a_copy_comes_twice_only_when_the_others_evict_it() -> None:
    assert launches(1 << 10, 32, L2, quick_s=3e-6, min_repeat_s=0.004) == 32
    assert launches(10 << 20, 11, L2, quick_s=1e-5, min_repeat_s=0.004) == 400
    assert launches(10 << 20, 11, L2, quick_s=1.0, min_repeat_s=0.004) == 1
    assert launches(10 << 20, 11, L2, quick_s=1e-6, min_repeat_s=0.004) == 500


def test_the_binding_of_the_cuda_extra_is_found() -> None:
    assert can_rotate()


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_READY = 600


class Clock:
    """A host and a GPU that runs what the host queues in order, in simulated seconds; the part of CUDA that is used.

    The host takes `host_s` for a launch, except for the first, which it was free for; the GPU takes `kernel_s`.
    """

    CUresult = Result

    def __init__(self, kernel_s: float, host_s: float) -> None:
        self.kernel_s, self.host_s = kernel_s, host_s
        self.now = self.done = 0.0
        self.launched = 0

    def launch(self, *_: object) -> None:
        self.now += self.host_s if self.launched else 4e-6
        self.launched += 1
        self.done = max(self.done, self.now) + self.kernel_s

    def perf_counter(self) -> float:
        return self.now

    def cuMemAlloc(self, size: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, size

    def cuEventCreate(self, _: int) -> tuple[Result, SimpleNamespace]:
        return Result.CUDA_SUCCESS, SimpleNamespace(at=0.0)

    def cuMemsetD8Async(self, _: int, __: int, size: int, ___: int) -> tuple[Result]:
        self.now += 2e-6
        self.done = max(self.done, self.now) + size / 3e12
        return (Result.CUDA_SUCCESS,)

    def cuEventRecord(self, event: SimpleNamespace, _: int) -> tuple[Result]:
        event.at = max(self.done, self.now)
        return (Result.CUDA_SUCCESS,)

    def cuEventQuery(self, event: SimpleNamespace) -> tuple[Result]:
        return (Result.CUDA_SUCCESS if event.at <= self.now else Result.CUDA_ERROR_NOT_READY,)

    def cuEventSynchronize(self, event: SimpleNamespace) -> tuple[Result]:
        self.now = max(self.now, event.at)
        return (Result.CUDA_SUCCESS,)

    def cuEventElapsedTime(self, start: SimpleNamespace, stop: SimpleNamespace) -> tuple[Result, float]:
        return Result.CUDA_SUCCESS, (stop.at - start.at) * 1e3


@pytest.mark.parametrize(
    ("kernel_us", "host_us"), [(2, 4), (2, 30), (40, 4), (40, 30)], ids=["quiet", "busy", "long", "long and busy"]
)
def test_a_busy_host_is_not_measured(kernel_us: float, host_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(kernel_us * 1e-6, host_us * 1e-6)
    monkeypatch.setattr(rotation.importlib, "import_module", lambda _: clock)
    monkeypatch.setattr(rotation.time, "perf_counter", clock.perf_counter)
    timer = RotatedTimer(SimpleNamespace(l2_cache_size_bytes=L2))
    assert timer.time(clock.launch, [()], 32, 3) == pytest.approx([kernel_us * 1e-6] * 3)


def test_a_host_that_stays_too_busy_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1e-6, 1e-3)
    monkeypatch.setattr(rotation.importlib, "import_module", lambda _: clock)
    monkeypatch.setattr(rotation.time, "perf_counter", clock.perf_counter)
    timer = RotatedTimer(SimpleNamespace(l2_cache_size_bytes=L2))
    assert len(timer.time(clock.launch, [()], 32, 3)) == 3


@pytest.mark.parametrize("kernel_us", [1, 3, 10])
def test_a_candidate_on_a_busy_host_takes_the_gpu_for_less_than_a_second(
    kernel_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(kernel_us * 1e-6, 50e-6)
    monkeypatch.setattr(rotation.importlib, "import_module", lambda _: clock)
    monkeypatch.setattr(rotation.time, "perf_counter", clock.perf_counter)
    timer = RotatedTimer(SimpleNamespace(l2_cache_size_bytes=L2))
    size = 10 << 20
    time_adaptively(
        lambda number, repeats: timer.time(clock.launch, [()], number, repeats),
        lambda single: launches(size, sets_needed(size, L2), L2, single, MeasureOptions().min_repeat_s),
        math.inf,
        MeasureOptions(),
    )
    assert clock.now < 1
