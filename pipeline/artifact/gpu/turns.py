"""`Turns`: one call at a time is given to a device, and calls that work in the same memory run one after another.

A call of a module works in memory of two kinds:

- The module's own: its weights, the buffers and the memory of its CUDA graphs, what its kernels share. Calls of one
  module on one stream run in their order. A call on another stream than the last one waits for the GPU first.
- TVM's pool, one for each GPU. TVM gives memory of a call back while the GPU still works in it, and the next call may
  take it; so calls that take memory there wait in the same way for the last such call, whichever module's. Launches of
  a CUDA graph take none.

So CUDA graphs of several modules, copies of one artifact among them, run at once on streams of their own. A wait is for
the whole GPU: it holds for streams that were destroyed meanwhile, and for what reads a call's outputs. A stream that
the caller captures is refused: CUDA launches no graph there, and memory of the pool is not kept for the caller's graph.

TVM captures the graph of static sizes, in the module's first call, on a stream that the default one waits for and in
CUDA's global mode. Until that is over, CUDA refuses copies and allocations of all other threads, and spoils the graph.
All work of modules on the GPU is inside a turn of its device, also outside of calls (`alone`). Work of others is not.
"""

from __future__ import annotations

import gc
import math
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import tvm_ffi
from tvm_ffi import Device, Tensor

from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.artifact.gpu.driver import DEFAULT_STREAM, Gpu
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.tvm_runtime.forks import lock_over_forks
from relaxtune.pipeline.tvm_runtime.library import copy, empty, is_cpu, tensor_of


class SupportsCudaStream(Protocol):
    """A stream of any library with the CUDA stream protocol, such as those of PyTorch, CuPy and cuda.core."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, 0, and the handle."""


@dataclass
class _Memory:
    """Memory that calls work in, and the stream of the last of them."""

    last: int | None = None


@dataclass
class _Shared:
    """State that all modules of a device share."""

    gpu: Gpu | None
    lock: threading.RLock = field(default_factory=lock_over_forks)
    pool: _Memory = field(default_factory=_Memory)


#: Seconds that a module which goes waits for the turn at most; a graph is captured in milliseconds.
_TURN_MAX_S = 5.0
_of_gpus: dict[int, _Shared] = {}
_making = threading.Lock()


def _shared_on(device: Device) -> _Shared:
    if is_cpu(device):
        return _Shared(None)  # each call has memory of its own there
    with _making:
        index = int(device.index)
        if index not in _of_gpus:
            _of_gpus[index] = _Shared(Gpu(device))
        return _of_gpus[index]


class Turns:
    """A context in which one call of a module is given to its device.

    `device`: where the module runs.
    `apart`: whether the module's CUDA graphs work in memory of its own alone; a vendor's libraries share theirs.
    `forks`: whether the module runs in processes that are forked later; on a GPU none does.
    """

    def __init__(self, device: Device, *, apart: bool = True, forks: bool = True) -> None:
        self._device, self._shared = device, _shared_on(device)
        self._own = _Memory() if apart else self._shared.pool
        self._process = None if forks and is_cpu(device) else os.getpid()

    def __enter__(self) -> None:
        """Wait for the turn, and for the module's last call where that went to another stream.

        Raises `PipelineError`: the process was forked after the module was loaded.
        """
        self._check_process()
        self._shared.lock.acquire()
        try:
            if self._shared.gpu is not None:
                self._shared.gpu.make_current()
                self._follow(self._shared.gpu, self._own)
        except BaseException:
            self._shared.lock.release()
            raise

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        """Let the next one. Of a call that failed, nothing stays behind for what the thread does next on the GPU."""
        if raised is not None and self._shared.gpu is not None:
            self._shared.gpu.forget_error()
        self._shared.lock.release()

    @property
    def alone(self) -> AbstractContextManager[object]:
        """A context in which no call of a module is given to the device; nothing is waited for but its end."""
        self._check_process()
        return self._shared.lock

    def refuse_capture(self) -> None:
        """Refuse the current stream where the caller captures it; nothing has been given to it, so the capture goes on.

        Raises `PipelineError`: the caller captures it.
        """
        gpu = self._shared.gpu
        if gpu is None or self.stream == DEFAULT_STREAM:
            return
        gpu.make_current()
        if gpu.is_capturing(self.stream):
            raise PipelineError(
                "the stream of this call is being captured into a CUDA graph, which cannot hold a module's call: "
                "modules launch graphs of their own; call the module outside the capture"
            )

    @contextmanager
    def pool(self) -> Iterator[None]:
        """Wait, inside a turn, for the last call that took memory of the pool where that went to another stream."""
        if self._shared.gpu is not None:
            self._follow(self._shared.gpu, self._shared.pool)
        yield
        if self._shared.gpu is not None:
            self._shared.gpu.forget_error(no_memory_only=True)

    def wait(self) -> None:
        """Wait until all work of the device is done."""
        if self._shared.gpu is not None:
            self._shared.gpu.wait()

    def end_with(self, module: object) -> None:
        """Wait when a module goes, before its memory goes back to the pool."""

        def wait_in_turn() -> None:
            if self._is_forked:
                return  # the memory is the parent's
            # Garbage is collected anywhere, also where this thread holds what the one whose turn it is waits for.
            owned = self._shared.lock.acquire(timeout=_TURN_MAX_S)
            try:
                self.wait()
            finally:
                if owned:
                    self._shared.lock.release()

        if self._shared.gpu is not None:
            weakref.finalize(module, wait_in_turn).atexit = False

    def copy(self, tensor: Tensor, to: Tensor) -> None:
        """Copy a tensor, on a GPU after what the current stream was given before."""
        if self._shared.gpu is None:
            copy(tensor, to)
            return
        size = math.prod(to.shape) * numpy_dtype(str(to.dtype)).itemsize
        self._shared.gpu.copy(int(tensor.data_ptr()), int(to.data_ptr()), size, self.stream)

    def placed(self, array: np.ndarray) -> Tensor:
        """Copy an array to the device."""
        with self.alone:
            return tensor_of(array, self._device)

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy on the same device."""
        made = empty(tensor.shape, tensor.dtype, tensor.device)
        self.copy(tensor, made)
        return made

    @property
    def stream(self) -> int:
        """The handle of the current stream."""
        return int(tvm_ffi.get_raw_stream(self._device) or DEFAULT_STREAM)

    @property
    def gpu(self) -> Gpu:
        """The GPU.

        Raises `PipelineError`: the device is a CPU.
        """
        if self._shared.gpu is None:
            raise PipelineError(f"{self._device} is no GPU")
        return self._shared.gpu

    @property
    def _is_forked(self) -> bool:
        return self._process is not None and self._process != os.getpid()

    def _check_process(self) -> None:
        if not self._is_forked:
            return
        if is_cpu(self._device):
            raise PipelineError(
                "the artifact was loaded before this process was forked; one of an earlier version does not run in a "
                "forked process: load it after the fork, or compile the model again"
            )
        raise PipelineError(
            "the artifact was loaded before this process was forked, and CUDA does not work in a process forked from "
            "one that used it: load artifacts after the fork only (gunicorn: without --preload), or start processes "
            "by `spawn` (multiprocessing)"
        )

    def _follow(self, gpu: Gpu, memory: _Memory) -> None:
        stream = gpu.identity(self.stream)
        if memory.last is None or memory.last == stream:
            memory.last = stream
        else:
            gpu.wait()
            memory.last = stream


@contextmanager
def uncollected() -> Iterator[None]:
    """Let Python collect no garbage inside the block: a module among it would wait for a GPU that captures."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def on_stream(device: Device, stream: int | SupportsCudaStream | None) -> AbstractContextManager[object]:
    """Return a context in which calls go to a stream: by its handle, or an object of its library; None changes nothing.

    Raises `PipelineError`: the device is a CPU.
    """
    if stream is None:
        return nullcontext()
    if is_cpu(device):
        raise PipelineError(f"{device} has no streams: the artifact is for a CPU; leave `stream` out")
    handle = stream if isinstance(stream, int) else stream.__cuda_stream__()[1]
    context: AbstractContextManager[object] = tvm_ffi.use_raw_stream(device, handle)
    return context


def on_default_stream(device: Device) -> AbstractContextManager[object]:
    """Return a context in which calls go to the default stream, where TVM copies from and to the host."""
    return nullcontext() if is_cpu(device) else on_stream(device, DEFAULT_STREAM)
