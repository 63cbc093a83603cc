"""Timing a kernel on a GPU with its arguments out of the L2 cache, as a model's weights are.

A kernel that is run again and again on the same arguments finds them in L2 (50 MB on an H200), where a whole model
reads every weight from memory once an inference. So several copies of the arguments are made, and a raw latency is that
of a row of launches, each on the next copy; before the row, a memset larger than twice the L2 evicts what is there.
The memset does a second thing: the launches are queued while it runs, so that the host's 4 us a launch are not
measured (a function that takes the host longer gets more of them). Where the host was late all the same, because other
processes kept it busy, the row is timed again behind twice as many. Events are recorded on the stream of the launches,
around the row.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import tvm

# Copies of the arguments at most; small ones are cold after the memset however few copies there are.
_SETS_MAX = 32
_SETS_MIN = 2
# Queueing one launch takes 4 to 5 us on the host, two of them and a vendor's library some times that; what a moment's
# disturbance makes of it is bounded. A memset writes about 3 TB/s.
_LAUNCH_S = 6e-6
_LAUNCH_MAX_S = 40e-6
_MEMSET_BYTES_PER_S = 3e12
_L2_FACTOR = 2
# Launches in a row at most. Of kernels of 2 us, 500 are two thousand times an event's resolution (about 0.5 us, CUDA
# runtime API, "cudaEventElapsedTime"); ten times as many keep the GPU at the memset that hides their queueing for
# longer than all else that is done with a candidate.
_ROW_MAX = 500
# A row that took less than this many times what queueing it took may have waited for the host.
_HOST_BOUND = 1.25
# Times at most that a row is timed again.
_AGAIN_MAX = 4


def can_rotate() -> bool:
    """Whether the package cuda-bindings, by which events are recorded, is installed."""
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


def sets_needed(argument_bytes: int, l2_bytes: int) -> int:
    """Return how many copies of the arguments make up more than twice the L2, within limits."""
    return min(_SETS_MAX, max(_SETS_MIN, math.ceil(_L2_FACTOR * l2_bytes / max(1, argument_bytes)) + 1))


def launches(argument_bytes: int, sets: int, l2_bytes: int, quick_s: float, min_repeat_s: float) -> int:
    """Return how many launches one raw latency is the mean of: such that they last `min_repeat_s`, or 500.

    Where all copies together fit into twice the L2, no copy may come twice.
    """
    wanted = min(_ROW_MAX, max(1, math.ceil(min_repeat_s / quick_s)))
    return min(wanted, sets) if sets * argument_bytes <= _L2_FACTOR * l2_bytes else wanted


class RotatedTimer:
    """Times launches on one GPU between two events.

    The context of `device`, a CUDA device, is current in this thread.
    """

    def __init__(self, device: tvm.runtime.Device) -> None:
        self.l2_bytes = int(device.l2_cache_size_bytes or 0)
        self._driver: ModuleType = importlib.import_module("cuda.bindings.driver")
        self._scratch_bytes = max(_L2_FACTOR * self.l2_bytes, 1 << 26)
        self._scratch = self._call("cuMemAlloc", self._scratch_bytes)
        self._start, self._stop = self._call("cuEventCreate", 0), self._call("cuEventCreate", 0)

    def time(
        self, function: Callable[..., object], sets: Sequence[Sequence[tvm.runtime.Tensor]], number: int, repeats: int
    ) -> list[float]:
        """Return the seconds of one launch, `repeats` times, each the mean of `number` launches."""
        began = time.perf_counter()
        function(*sets[0])
        # A launch may take the host twice as long as just now, within bounds.
        queueing_s = number * min(max(_LAUNCH_S, 2 * (time.perf_counter() - began)), _LAUNCH_MAX_S)
        memsets = max(1, math.ceil(queueing_s * _MEMSET_BYTES_PER_S / self._scratch_bytes))
        stream = 0  # TVM launches on the default stream.
        seconds: list[float] = []
        position = again = 0
        while len(seconds) < repeats:
            for _ in range(memsets):
                self._call("cuMemsetD8Async", self._scratch, 0, self._scratch_bytes, stream)
            self._call("cuEventRecord", self._start, stream)
            began = time.perf_counter()
            for _ in range(number):
                function(*sets[position % len(sets)])
                position += 1
            self._call("cuEventRecord", self._stop, stream)
            queued_s = time.perf_counter() - began
            (status,) = self._driver.cuEventQuery(self._start)
            late = status == self._driver.CUresult.CUDA_SUCCESS
            self._call("cuEventSynchronize", self._stop)
            elapsed_s = float(self._call("cuEventElapsedTime", self._start, self._stop)) / 1e3
            if late and elapsed_s < _HOST_BOUND * queued_s and again < _AGAIN_MAX:
                memsets, again = 2 * memsets, again + 1
                continue
            seconds.append(max(elapsed_s / number, 1e-9))
        return seconds

    def _call(self, name: str, *arguments: object) -> Any:
        status, *values = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA: {name} failed with {status.name}")
        return values[0] if values else None
