"""The child that measures candidates on one device.

It loads an artifact, runs it once on arguments whose values are in range, compares the outputs with a reference, and
times it: first a quick estimate, then as many runs as the estimate is worth. One that beats all before it is compared
once more, on other values. Arguments are made once per workload and kept; reference outputs are kept in a file, for
the process that replaces this one.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tvm

from pipeline.threads import configure_threads
from pipeline.tolerances import KernelTolerance
from pipeline.tuning.arguments import ArgumentSpec, make_arrays
from pipeline.tuning.note import CandidateNote
from pipeline.tuning.rotation import RotatedTimer, can_rotate, launches, sets_needed

_ENTRY = "main"
# Arguments of this many workloads stay allocated: enough for a batch of mixed tasks, little memory.
_WORKLOADS_KEPT = 16
# A first run shorter than this may be mostly launch and page faults, and says little.
_SLOW_S = 0.01


@dataclass(frozen=True)
class MeasureOptions:
    """How long a candidate is timed.

    Attributes
    ----------
    repeats
        Raw latencies kept of a contender.
    min_repeat_s
        Seconds that one of them lasts at least, by running the kernel several times and dividing.
    hopeless_factor, hopeless_repeats
        A candidate whose quick estimate is that many times the best of its workload so far gets only so many repeats
        of single runs.
    cold_cache
        Time every run with caches flushed of all but the first argument; CPU only.
    rotate
        Time on several copies of the arguments, together larger than twice the L2, since a model's weights are cold;
        GPU only (see `pipeline.tuning.rotation`).
    threads
        Threads of a CPU kernel; None leaves the default.
    """

    repeats: int = 5
    min_repeat_s: float = 0.004
    hopeless_factor: float = 3.0
    hopeless_repeats: int = 2
    cold_cache: bool = False
    rotate: bool = True
    threads: int | None = None


@dataclass(frozen=True)
class MeasureRequest:
    """An artifact, what it is called with, and how to time it."""

    artifact: str
    device: str
    arguments: tuple[ArgumentSpec, ...]
    note: CandidateNote | None
    options: MeasureOptions
    seed: int


@dataclass(frozen=True)
class ReferenceRequest:
    """Make the reference outputs that a measurement of this kind will need."""

    measurement: MeasureRequest


@dataclass(frozen=True)
class MeasureReply:
    """Raw seconds of one run each (empty when the result was wrong), and what differs from the reference, if any."""

    seconds: tuple[float, ...]
    mismatch: str | None


@dataclass
class _Workload:
    """Arguments of one workload; `copies` are made when a GPU candidate is timed."""

    arrays: list[np.ndarray]
    tensors: list[tvm.runtime.Tensor]
    best_s: float = math.inf
    copies: list[list[tvm.runtime.Tensor]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Size of one set of arguments."""
        return sum(array.nbytes for array in self.arrays)


def start() -> Callable[[object], object]:
    """Return the function that answers measuring requests."""
    measurer = _Measurer()

    def answer(request: object) -> object:
        if isinstance(request, ReferenceRequest):
            return measurer.make_references(request.measurement)
        if isinstance(request, MeasureRequest):
            return measurer.measure(request)
        raise TypeError(f"expected a request to measure, got {type(request).__name__}")

    return answer


def reference_file(request: MeasureRequest, seed: int) -> Path | None:
    """Return where the reference outputs for one seed are kept, or None when nothing is compared."""
    if request.note is None or request.note.reference is None:
        return None
    return Path(f"{request.note.reference}.{seed}.pickle")


def check_seeds(request: MeasureRequest) -> tuple[int, int]:
    """Return the seeds of the values a candidate is timed with, and of those a new best is checked with besides."""
    return request.seed, request.seed + 1


class _Measurer:
    def __init__(self) -> None:
        self._workloads: dict[tuple[object, ...], _Workload] = {}
        self._timer: RotatedTimer | None = None

    def make_references(self, request: MeasureRequest) -> bool:
        """Compute the reference outputs for both seeds and keep them in files."""
        _use_threads(request)
        note = request.note
        if note is None or note.reference is None:
            return False
        device = tvm.device(request.device if note.reference_on_device else "cpu:0")
        function = tvm.runtime.load_module(note.reference)[_ENTRY]
        for seed in check_seeds(request):
            arrays = make_arrays(request.arguments, _ranges(note), seed)
            tensors = _tensors(arrays, request.arguments, device)
            function(*tensors)
            device.sync()
            path = reference_file(request, seed)
            if path is not None:
                # Written whole: a process killed here must not leave half a reference.
                partial = path.with_suffix(".partial")
                partial.write_bytes(pickle.dumps([tensors[position].numpy() for position in note.outputs]))
                partial.rename(path)
        return True

    def measure(self, request: MeasureRequest) -> MeasureReply:
        """Check and time a candidate."""
        _use_threads(request)
        device = tvm.device(request.device)
        function_module = tvm.runtime.load_module(request.artifact)
        timed_seed, fresh_seed = check_seeds(request)
        workload = self._workload(request, timed_seed, device)
        elapsed, mismatch = self._run_and_compare(function_module, workload, request, timed_seed, device)
        if mismatch is not None:
            return MeasureReply((), mismatch)
        if _is_cpu(device) or not request.options.rotate or not can_rotate():
            seconds = _time(function_module, device, workload, request.options, elapsed)
        else:
            seconds = self._time_rotated(function_module, device, workload, request, elapsed)
        median = float(np.median(seconds))
        if median < workload.best_s:
            other = self._workload(request, fresh_seed, device)
            _, mismatch = self._run_and_compare(function_module, other, request, fresh_seed, device)
            if mismatch is not None:
                return MeasureReply((), f"on other inputs, {mismatch}")
            workload.best_s = median
        return MeasureReply(tuple(seconds), None)

    def _time_rotated(
        self,
        module: tvm.runtime.Module,
        device: tvm.runtime.Device,
        workload: _Workload,
        request: MeasureRequest,
        first_s: float,
    ) -> list[float]:
        """Return the raw seconds of a candidate on arguments that are not in the L2 cache."""
        options = request.options
        if _is_hopeless(first_s, workload, options):
            return [first_s]
        self._timer = timer = self._timer or RotatedTimer(device)
        if not workload.copies:
            more = range(sets_needed(workload.bytes, timer.l2_bytes) - 1)
            copies = [_tensors(workload.arrays, request.arguments, device) for _ in more]
            workload.copies = [workload.tensors, *copies]
        function = module[_ENTRY]
        quick = timer.time(function, workload.copies, 1, 1)[0]
        if quick > options.hopeless_factor * workload.best_s:
            return [quick, *timer.time(function, workload.copies, 1, max(0, options.hopeless_repeats - 1))]
        number = launches(workload.bytes, len(workload.copies), timer.l2_bytes, quick, options.min_repeat_s)
        return timer.time(function, workload.copies, number, options.repeats)

    def _workload(self, request: MeasureRequest, seed: int, device: tvm.runtime.Device) -> _Workload:
        key = (request.note.workload if request.note else None, request.arguments, seed, request.device)
        if key not in self._workloads:
            while len(self._workloads) >= _WORKLOADS_KEPT:
                self._workloads.pop(next(iter(self._workloads)))
            arrays = make_arrays(request.arguments, _ranges(request.note), seed)
            self._workloads[key] = _Workload(arrays, _tensors(arrays, request.arguments, device))
        return self._workloads[key]

    def _run_and_compare(
        self,
        module: tvm.runtime.Module,
        workload: _Workload,
        request: MeasureRequest,
        seed: int,
        device: tvm.runtime.Device,
    ) -> tuple[float, str | None]:
        """Run once; return the seconds it took and how the outputs differ from the reference, if they do."""
        outputs = request.note.outputs if request.note else ()
        for position in outputs:
            # Random values again, so that a kernel that writes nothing is found.
            workload.tensors[position].copyfrom(workload.arrays[position])
        device.sync()
        began = time.perf_counter()
        module[_ENTRY](*workload.tensors)
        device.sync()
        elapsed = time.perf_counter() - began
        path = reference_file(request, seed)
        if path is None or request.note is None:
            return elapsed, None
        for position, expected in zip(outputs, pickle.loads(path.read_bytes()), strict=True):
            got = workload.tensors[position].numpy()
            accepted = KernelTolerance(request.note.rtol, request.note.atol, request.note.accumulated)
            mismatch = find_mismatch(got, expected, accepted)
            if mismatch is not None:
                return elapsed, f"output parameter {position}: {mismatch}"
        return elapsed, None


def find_mismatch(output: np.ndarray, expected: np.ndarray, accepted: KernelTolerance) -> str | None:
    """Return how an output differs from what is expected, or None when it is within tolerance; integers are equal."""
    if expected.dtype.kind in "iub":
        wrong = output != expected
        if not wrong.any():
            return None
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        return (
            f"{int(wrong.sum())} of {wrong.size} integers differ, first at {where}: {output[where]}, {expected[where]}"
        )
    got, want = output.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(want)
    absolute = accepted.atol * float(np.abs(want[finite]).max(initial=0.0)) + accepted.accumulated
    with np.errstate(invalid="ignore"):
        near = finite & (np.abs(got - want) <= accepted.rtol * np.abs(want) + absolute)
    # Where an infinity or NaN is expected, nothing else is right: the bound above would be infinite there.
    wrong = ~(near | (got == want) | (np.isnan(got) & np.isnan(want)))
    if not wrong.any():
        return None
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{int(wrong.sum())} of {wrong.size} elements are off by more than {accepted.rtol:.2g} relative + "
        f"{absolute:.2g} absolute, first at {where}: got {got[where]:.6g}, expected {want[where]:.6g}"
    )


def _time(
    module: tvm.runtime.Module,
    device: tvm.runtime.Device,
    workload: _Workload,
    options: MeasureOptions,
    first_s: float,
) -> list[float]:
    """Return the raw seconds of a candidate whose first run took `first_s`."""
    if _is_hopeless(first_s, workload, options):
        return [first_s]
    flush = "cache_flush_cpu_non_first_arg" if options.cold_cache and _is_cpu(device) else ""

    def timed(number: int, repeat: int) -> list[float]:
        evaluator = module.time_evaluator(_ENTRY, device, number=number, repeat=repeat, f_preproc=flush)
        # The timer's own resolution must not make a zero: nothing runs in less than a nanosecond.
        return [max(float(value), 1e-9) for value in evaluator(*workload.tensors).results]

    quick = timed(1, 1)[0]
    if quick > options.hopeless_factor * workload.best_s:
        return [quick, *timed(1, options.hopeless_repeats - 1)] if options.hopeless_repeats > 1 else [quick]
    number = 1 if flush else max(1, math.ceil(options.min_repeat_s / quick))
    return timed(number, options.repeats)


def _is_hopeless(first_s: float, workload: _Workload, options: MeasureOptions) -> bool:
    """Whether a candidate is so far behind that even its first run, on cold caches, tells enough."""
    return first_s > max(_SLOW_S, 2 * options.hopeless_factor * workload.best_s)


def _is_cpu(device: tvm.runtime.Device) -> bool:
    return int(device.dlpack_device_type()) == int(tvm.cpu().dlpack_device_type())


def _use_threads(request: MeasureRequest) -> None:
    if request.options.threads is not None:
        configure_threads(request.options.threads)


def _tensors(
    arrays: Sequence[np.ndarray], arguments: Sequence[ArgumentSpec], device: tvm.runtime.Device
) -> list[tvm.runtime.Tensor]:
    tensors = []
    for array, spec in zip(arrays, arguments, strict=True):
        tensor = tvm.runtime.empty(spec.shape, spec.dtype, device)
        tensor.copyfrom(array)
        tensors.append(tensor)
    return tensors


def _ranges(note: CandidateNote | None) -> Mapping[int, int]:
    return {int(position): bound for position, bound in note.index_ranges.items()} if note else {}
