"""The child that measures candidates on one device.

It loads an artifact, runs it once on arguments whose values are in range, compares the outputs with a reference, and
times it: first a quick estimate, then as many runs as the estimate is worth (`pipeline.tuning.measure.timing`). A new
best is compared once more, on other values. Arguments are made once per workload and kept. Reference outputs are kept
in a file, which the process of another device, or a replaced process, reads too. On a GPU, outputs are compared on the
device (`pipeline.tuning.measure.device_check`).
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import tvm

from relaxtune.pipeline.experiment.experiment import FEWEST_BLOCKS, Question, decide
from relaxtune.pipeline.spans import span
from relaxtune.pipeline.tuning.local.requests import (
    CompareRequest,
    MeasureReply,
    MeasureRequest,
    ReferenceRequest,
    WarmRequest,
    outputs_file,
)
from relaxtune.pipeline.tuning.measure.arguments import (
    ArgumentSpec,
    hiding_nothing,
    make_arrays,
    with_column_sums,
    with_partial_sums,
)
from relaxtune.pipeline.tuning.measure.device_check import SMALLEST, DeviceCheck
from relaxtune.pipeline.tuning.measure.rotation import RotatedTimer, can_rotate, launches, sets_needed
from relaxtune.pipeline.tuning.measure.timing import Timer, is_hopeless, runs_for, settled_row, time_adaptively
from relaxtune.pipeline.tuning.measure.wrong_result import absolute_bound, find_mismatch
from relaxtune.pipeline.tvm_runtime.threads import set_threads

_ENTRY = "main"
# Whether a finalist is faster than another one at all. The rounds are planned, whatever they take.
_FASTER = Question(border=0.0, doubt=0.05, seconds=math.inf)
# Arguments stay allocated, since tasks are measured in turns: up to this share of a GPU's memory, and of the host's.
_KEPT_SHARE = 4
# Of the host's at most: many GPUs have a process each.
_KEPT_HOST_MAX = 8 << 30


@dataclass
class _Workload:
    """Arguments of one workload and what it is expected to return.

    `copies` are made when a GPU candidate is timed. By the position of an output, `untouched` has on a GPU the random
    values that it begins with, and `held` the reference that it is compared with there.
    """

    arrays: list[np.ndarray]
    tensors: list[tvm.runtime.Tensor]
    best_s: float = math.inf
    expected: list[np.ndarray] | None = None
    expected_from: Path | None = None
    copies: list[list[tvm.runtime.Tensor]] = field(default_factory=list)
    untouched: dict[int, tvm.runtime.Tensor] = field(default_factory=dict)
    held: dict[int, tuple[tvm.runtime.Tensor, float]] = field(default_factory=dict)

    def expect(self, outputs: list[np.ndarray], path: Path) -> None:
        """Compare with these outputs from now on, which are kept in a file."""
        self.expected, self.expected_from = outputs, path
        self.held.clear()

    @property
    def bytes(self) -> int:
        """Size of one set of arguments."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def sets(self) -> int:
        """Sets of arguments on the device, one for the outputs that are kept too."""
        return 1 + len(self.copies) + (1 if self.untouched or self.held else 0)


@dataclass(frozen=True)
class _Loaded:
    """A candidate ready to be timed: its timer, and how many runs one latency averages."""

    timer: Timer
    number_for: Callable[[float], int]


def start() -> Callable[[object], object]:
    """Return the function that answers measuring requests."""
    measurer = _Measurer()

    def answer(request: object) -> object:
        match request:
            case WarmRequest():
                return measurer.warm(request)
            case ReferenceRequest():
                return measurer.make_references(request.measurement, on_host=request.on_host)
            case MeasureRequest():
                return (measurer.measure(request),)
            case CompareRequest():
                return measurer.compare(request)
        raise TypeError(f"expected a request to measure, got {type(request).__name__}")

    return answer


class _Measurer:
    def __init__(self) -> None:
        # The least recently used first.
        self._workloads: dict[tuple[object, ...], _Workload] = {}
        self._timer: RotatedTimer | None = None
        self._check: DeviceCheck | None = None

    def warm(self, request: WarmRequest) -> bool:
        """Set the device up, which takes a moment on a GPU."""
        device = tvm.device(request.device)
        _tensors([np.zeros(1, np.float32)], [ArgumentSpec((1,), "float32")], device)
        if not _is_cpu(device) and request.options.rotate and can_rotate():
            self._timer = self._timer or RotatedTimer(device)
        return True

    def make_references(self, request: MeasureRequest, *, on_host: bool = False) -> bool:
        """Compute the reference outputs for both seeds and keep them in files."""
        spec = request.spec
        reference = spec.host_reference if on_host else spec.reference
        if reference is None:
            return False
        device = tvm.device(request.device if spec.reference_on_device and not on_host else "cpu:0")
        function = _load_code(str(reference.content), request)[_ENTRY]
        for seed in request.seeds:
            workload = self._workload(request, seed, tvm.device(request.device))
            with span("reference: compute", spec.workload):
                tensors = _tensors(workload.arrays, spec.arguments, device)
                function(*tensors)
                device.sync()
            path = outputs_file(reference, seed)
            with span("reference: keep", spec.workload):
                workload.expect([tensors[position].numpy() for position in spec.outputs], path)
                # Written whole: a process killed here must not leave half a reference, and others may write the same.
                partial = path.with_suffix(f".{os.getpid()}.partial")
                partial.write_bytes(pickle.dumps(workload.expected))
                partial.rename(path)
        return True

    def measure(self, request: MeasureRequest) -> MeasureReply:
        """Check and time a candidate."""
        device = tvm.device(request.device)
        with span("load", request.spec.workload):
            module = _load_code(request.artifact, request)
        timed_seed, fresh_seed = request.seeds
        workload = self._workload(request, timed_seed, device)
        elapsed, mismatch = self._run_and_compare(module, workload, request, timed_seed, device)
        if mismatch is not None:
            return MeasureReply((), mismatch)
        best_s = min(workload.best_s, request.spec.best_s or math.inf)
        if is_hopeless(elapsed, best_s, request.options):
            return MeasureReply((elapsed,), None)
        loaded = self._load(module, workload, request, device)
        with span("time", request.spec.workload):
            seconds = time_adaptively(loaded.timer, loaded.number_for, best_s, request.options)
        median = float(np.median(seconds))
        if median < workload.best_s:
            mismatch = self._compare_fresh(module, request, fresh_seed, device)
            if mismatch is not None:
                return MeasureReply((), mismatch)
            workload.best_s = median
        return MeasureReply(tuple(seconds), None)

    def compare(self, request: CompareRequest) -> tuple[MeasureReply, ...]:
        """Check candidates of one workload on two sets of values; time them alternately until the fastest is sure."""
        timers: dict[int, Callable[[], list[float]]] = {}
        mismatches: list[str | None] = []
        for place, one in enumerate(request.measurements):
            device = tvm.device(one.device)
            module = _load_code(one.artifact, one)
            timed_seed, fresh_seed = one.seeds
            workload = self._workload(one, timed_seed, device)
            _, mismatch = self._run_and_compare(module, workload, one, timed_seed, device)
            mismatches.append(mismatch or self._compare_fresh(module, one, fresh_seed, device))
            if mismatches[-1] is None:
                loaded = self._load(module, workload, one, device)
                number, _ = settled_row(loaded.timer, loaded.number_for, min(loaded.timer(1, 2)), 1)
                timers[place] = partial(loaded.timer, number, 1)
        seconds: list[list[float]] = [[] for _ in mismatches]

        def block() -> dict[str, float]:
            """Time each arm once, every second time backwards; return the logarithms of their ratios to the first."""
            first, *others = timers
            for place in timers if len(seconds[first]) % 2 == 0 else reversed(timers):
                seconds[place] += timers[place]()
            return {str(place): math.log(seconds[place][-1] / seconds[first][-1]) for place in others}

        with span("time", request.measurements[0].spec.workload):
            if timers:
                decide(block, tuple(sorted({min(FEWEST_BLOCKS, request.rounds), request.rounds})), _FASTER)
        return tuple(MeasureReply(tuple(raw), mismatch) for raw, mismatch in zip(seconds, mismatches, strict=True))

    def _load(
        self, module: tvm.runtime.Module, workload: _Workload, request: MeasureRequest, device: tvm.runtime.Device
    ) -> _Loaded:
        options = request.options
        if _is_cpu(device) or not options.rotate or not can_rotate():
            # On one set of arguments.
            flush = "cache_flush_cpu_non_first_arg" if options.cold_cache and _is_cpu(device) else ""

            def timed(number: int, repeats: int) -> list[float]:
                evaluator = module.time_evaluator(_ENTRY, device, number=number, repeat=repeats, f_preproc=flush)
                # The timer's own resolution must not make a zero: nothing runs in less than a nanosecond.
                return [max(float(value), 1e-9) for value in evaluator(*workload.tensors).results]

            return _Loaded(timed, lambda single: 1 if flush else runs_for(single, options.min_repeat_s))
        # On a GPU, on arguments that are not in the L2 cache.
        self._timer = rotated = self._timer or RotatedTimer(device)
        if not workload.copies:
            with span("copies", request.spec.workload):
                own = workload.tensors
                if request.spec.masks:
                    own = _tensors(hiding_nothing(workload.arrays, request.spec.masks), request.spec.arguments, device)
                more = range(sets_needed(workload.bytes, rotated.l2_bytes) - 1)
                workload.copies = [own, *([_duplicate(tensor) for tensor in own] for _ in more)]
        function, sets, size = module[_ENTRY], workload.copies, workload.bytes
        return _Loaded(
            lambda number, repeats: rotated.time(function, sets, number, repeats),
            lambda single: launches(size, len(sets), rotated.l2_bytes, single, options.min_repeat_s),
        )

    def _workload(self, request: MeasureRequest, seed: int, device: tvm.runtime.Device) -> _Workload:
        spec = request.spec
        key = (spec.workload, spec.arguments, seed, request.device)
        workload = self._workloads.pop(key, None)
        if workload is None:
            with span("arguments", spec.workload):
                arrays = make_arrays(spec.arguments, spec.index_ranges, seed)
                arrays = with_column_sums(with_partial_sums(arrays, spec.partial_sums), spec.column_sums)
                workload = _Workload(arrays, _tensors(arrays, spec.arguments, device))
            while self._workloads and _too_many([*self._workloads.values(), workload], device):
                self._workloads.pop(next(iter(self._workloads)))
        self._workloads[key] = workload
        return workload

    def _compare_fresh(
        self, module: tvm.runtime.Module, request: MeasureRequest, seed: int, device: tvm.runtime.Device
    ) -> str | None:
        """Return how the outputs on other values differ from the reference, if they do."""
        _, mismatch = self._run_and_compare(module, self._workload(request, seed, device), request, seed, device)
        return None if mismatch is None else f"on other inputs, {mismatch}"

    def _run_and_compare(
        self,
        module: tvm.runtime.Module,
        workload: _Workload,
        request: MeasureRequest,
        seed: int,
        device: tvm.runtime.Device,
    ) -> tuple[float, str | None]:
        """Run once; return the seconds it took and how the outputs differ from the reference, if they do."""
        for position in request.spec.outputs:
            # Random values again, so that a kernel that writes nothing is found.
            if _is_cpu(device):
                workload.tensors[position].copyfrom(workload.arrays[position])
            elif position in workload.untouched:
                workload.untouched[position].copyto(workload.tensors[position])
            else:
                # As it was made: nothing has run on it yet.
                workload.untouched[position] = _duplicate(workload.tensors[position])
        device.sync()
        began = time.perf_counter()
        with span("first run", request.spec.workload):
            module[_ENTRY](*workload.tensors)
            device.sync()
        elapsed = time.perf_counter() - began
        path = request.reference_file(seed)
        if path is None:
            return elapsed, None
        with span("check", request.spec.workload):
            return elapsed, self._compare(workload, request, path, device)

    def _compare(
        self, workload: _Workload, request: MeasureRequest, path: Path, device: tvm.runtime.Device
    ) -> str | None:
        """Return how the outputs of a run differ from the reference in a file, if they do."""
        if workload.expected is None or workload.expected_from != path:
            workload.expect(pickle.loads(path.read_bytes()), path)
        for position, expected in zip(request.spec.outputs, workload.expected or (), strict=True):
            if self._is_right_there(workload, position, expected, request, device):
                continue
            got = workload.tensors[position].numpy()
            mismatch = find_mismatch(got, expected, request.spec.tolerance_of(position))
            if mismatch is not None:
                return f"output parameter {position}: {mismatch}"
            # A reference that was overwritten on the device is put there anew.
            workload.held.pop(position, None)
        return None

    def _is_right_there(
        self,
        workload: _Workload,
        position: int,
        expected: np.ndarray,
        request: MeasureRequest,
        device: tvm.runtime.Device,
    ) -> bool:
        """Whether a large output is right as the device itself compares it; False leaves that to the host."""
        accepted = request.spec.tolerance_of(position)
        wanted = request.options.compare_on_device and not _is_cpu(device) and expected.size >= SMALLEST
        if not wanted or accepted.quantities > 1:
            return False
        if position not in workload.held:
            (there,) = _tensors([expected], [request.spec.arguments[position]], device)
            workload.held[position] = (there, absolute_bound(expected, accepted))
        self._check = self._check or DeviceCheck(device)
        there, absolute = workload.held[position]
        return self._check.is_right(workload.tensors[position], there, accepted.rtol, absolute)


def _too_many(kept: Sequence[_Workload], device: tvm.runtime.Device) -> bool:
    """Return whether arguments take more of the host's or the device's memory than they may."""
    on_host = sum(one.bytes for one in kept)
    on_device = sum(one.bytes * one.sets for one in kept)
    if _is_cpu(device):
        on_host += on_device
    elif on_device > int(device.total_global_memory) // _KEPT_SHARE:
        return True
    return on_host > min(_KEPT_HOST_MAX, int(tvm.cpu().total_global_memory) // _KEPT_SHARE)


def _is_cpu(device: tvm.runtime.Device) -> bool:
    return int(device.dlpack_device_type()) == int(tvm.cpu().dlpack_device_type())


def _load_code(path: str, request: MeasureRequest) -> tvm.runtime.Module:
    code = tvm.runtime.load_module(path)
    if request.options.threads is not None:
        set_threads(code, request.options.threads)
    return code


def _tensors(
    arrays: Sequence[np.ndarray], arguments: Sequence[ArgumentSpec], device: tvm.runtime.Device
) -> list[tvm.runtime.Tensor]:
    tensors = []
    for array, spec in zip(arrays, arguments, strict=True):
        tensor = tvm.runtime.empty(spec.shape, spec.dtype, device)
        tensor.copyfrom(array)
        tensors.append(tensor)
    return tensors


def _duplicate(tensor: tvm.runtime.Tensor) -> tvm.runtime.Tensor:
    return tensor.copyto(tvm.runtime.empty(tensor.shape, tensor.dtype, tensor.device))
