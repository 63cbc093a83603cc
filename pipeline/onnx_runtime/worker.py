"""The side of ONNX Runtime's process: it holds sessions, runs them, and tells what ONNX Runtime says."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

from relaxtune.pipeline.onnx_runtime.calls import device_call, host_call
from relaxtune.pipeline.onnx_runtime.requests import (
    CPU,
    Close,
    Describe,
    Description,
    Open,
    Prepare,
    Refused,
    Run,
    Time,
)
from relaxtune.pipeline.onnx_runtime.shared_arrays import SharedArrays, read_arrays

# ONNX Runtime's errors have no base class below Exception.
_ERRORS = (
    state.EPFail,
    state.Fail,
    state.InvalidArgument,
    state.InvalidGraph,
    state.InvalidProtobuf,
    state.NoModel,
    state.NotImplemented,
    state.RuntimeException,
)
# Where 8-bit products would saturate (x86 without VNNI), matmuls that do not; elsewhere it changes nothing.
_EXACT_INTEGERS = ("session.x64quantprecision", "1")
_KINDS = {CPU: "llvm", "CUDAExecutionProvider": "cuda"}


def start() -> Callable[[object], object]:
    """Return what answers a request."""
    return _Worker().answer


class _Worker:
    def __init__(self) -> None:
        self._sessions: dict[int, _Session] = {}
        self._answer: SharedArrays | None = None

    def answer(self, request: object) -> object:
        """Return the answer to a request; what ONNX Runtime refuses is `Refused`."""
        if self._answer is not None:
            # Who asks again has read it.
            self._answer.close()
            self._answer = None
        match request:
            case Describe():
                return Description(str(onnxruntime.__version__), tuple(onnxruntime.get_available_providers()))
            case Open():
                return self._open(request)
            case Close():
                for number in request.sessions:
                    self._sessions.pop(number, None)
                return None
            case Run():
                session, names = self._sessions[request.session], list(request.names)
                try:
                    outputs = session.native.run(names, read_arrays(request.feeds))
                except _ERRORS as error:
                    return Refused(_last_line(error))
                self._answer = SharedArrays(zip(names, outputs, strict=True))
                return self._answer.where
            case Prepare():
                return self._sessions[request.session].prepare(request, read_arrays(request.feeds))
            case Time():
                return self._sessions[request.session].time(request.place)
        raise TypeError(f"expected a request to ONNX Runtime, got {type(request).__name__}")

    def _open(self, request: Open) -> tuple[str, ...] | Refused:
        shared = (one.weights for one in self._sessions.values() if one.weights_key == request.weights_key)
        weights = next(shared, None)
        if weights is None:
            arrays = read_arrays(request.weights).items()
            weights = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays}
        try:
            session = _Session(request, weights)
        except (*_ERRORS, RuntimeError, ValueError) as error:
            return Refused(_last_line(error))
        self._sessions[request.session] = session
        return tuple(session.native.get_providers())


class _Session:
    """A session, which reads large weights where they lie."""

    def __init__(self, request: Open, weights: Mapping[str, onnxruntime.OrtValue]) -> None:
        options = onnxruntime.SessionOptions()
        settings = request.settings
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, settings.level)
        if settings.threads is not None:
            options.intra_op_num_threads = settings.threads
        options.log_severity_level = 3
        for key, value in (_EXACT_INTEGERS, *settings.entries):
            options.add_session_config_entry(key, value)
        options.add_external_initializers(list(weights), list(weights.values()))
        self.weights_key, self.weights = request.weights_key, weights
        self.native = onnxruntime.InferenceSession(request.graph, options, providers=[settings.provider])
        self._kind = _KINDS[settings.provider]
        self._calls: dict[int, Callable[[], None]] = {}

    def prepare(self, request: Prepare, feeds: Mapping[str, np.ndarray]) -> Refused | None:
        """Make a call ready, and run it once."""
        self._calls.pop(request.place, None)
        try:
            if self._kind == "llvm":
                call, _ = host_call(self.native, request.names, feeds)
            else:
                call, _ = device_call(self.native, request.names, feeds, self._kind)
            call()
        except _ERRORS as error:
            return Refused(_last_line(error))
        self._calls[request.place] = call
        return None

    def time(self, place: int) -> float:
        """Return what a call took, in milliseconds."""
        call = self._calls.get(place)
        if call is None:
            raise RuntimeError("a session is timed on inputs that it was given before")
        began = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - began) / 1e6


def _last_line(error: Exception) -> str:
    """Return what ONNX Runtime says last, as a sentence and without its codes."""
    line = str(error).strip().splitlines()[-1]
    return line.rpartition("Status Message: ")[2].rpartition(" : ")[2].rstrip(".") + "."
