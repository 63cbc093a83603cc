"""Functions of CUDA's driver that TVM's runtime does not offer: graphs, names of streams, waits for a whole GPU.

TVM copies tensors on the default stream, whichever is current, and a stream of PyTorch does not wait for that one. So
copies go to a call's stream here. An error that TVM has dealt with stays the last one of CUDA's runtime, which PyTorch
reads after its next launch (`Gpu.forget_error`).
"""

from __future__ import annotations

import ctypes
from functools import cache

from tvm_ffi import Device

from relaxtune.pipeline.codegen.cuda_libraries import CUDART, DRIVER
from relaxtune.pipeline.errors import PipelineError

#: The handle of CUDA's legacy default stream, which is never destroyed.
DEFAULT_STREAM = 0
# No stream has this identity: the default one is not asked for its own.
_DEFAULT_IDENTITY = -1
# CUDA_ERROR_OUT_OF_MEMORY, and CUDA_ERROR_DEINITIALIZED: the process ends, and the driver has ended before.
_NO_MEMORY, _ENDED = 2, 4
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_ARGUMENTS = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorString": [ctypes.c_int, _POINTER],
    "cuDeviceGet": [_POINTER, ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [_POINTER, ctypes.c_int],
    "cuCtxSetCurrent": [_POINTER],
    "cuCtxSynchronize": [],
    "cuStreamGetId": [_POINTER, _POINTER],
    "cuStreamIsCapturing": [_POINTER, _POINTER],
    "cuStreamBeginCapture_v2": [_POINTER, ctypes.c_int],
    "cuStreamEndCapture": [_POINTER, _POINTER],
    "cuGraphInstantiateWithFlags": [_POINTER, _POINTER, ctypes.c_ulonglong],
    "cuGraphLaunch": [_POINTER, _POINTER],
    "cuGraphDestroy": [_POINTER],
    "cuGraphExecDestroy": [_POINTER],
    "cuMemcpyAsync": [_POINTER, _POINTER, _SIZE, _POINTER],
}


@cache
def driver() -> ctypes.CDLL:
    """Return the driver's library, its functions with the types of their arguments."""
    library = ctypes.CDLL(DRIVER)
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library


@cache
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(CUDART)


def check(status: int, what: str) -> None:
    """Refuse an answer of the driver that is an error.

    Raises `PipelineError`: it is one.
    """
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        advice = "; `nvidia-smi` says which processes hold the GPU's memory" if status == _NO_MEMORY else ""
        said = (text.value or b"an error it has no text for").decode()
        raise PipelineError(f"the CUDA driver's answer to {what} is: {said} ({status}){advice}")


class Gpu:
    """One GPU of this process."""

    def __init__(self, device: Device) -> None:
        """Take hold of the context that TVM's runtime works in."""
        number, context = ctypes.c_int(), ctypes.c_void_p()
        check(driver().cuInit(0), "cuInit")
        check(driver().cuDeviceGet(ctypes.byref(number), int(device.index)), "cuDeviceGet")
        check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), number.value), "cuDevicePrimaryCtxRetain")
        self._context = context

    def make_current(self) -> None:
        """Let this thread's calls go to this GPU: a new thread has none, and the default stream is its own."""
        check(driver().cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def wait(self) -> None:
        """Wait until the GPU has done all that any stream was given, also streams that were destroyed since."""
        self.make_current()
        status = driver().cuCtxSynchronize()
        check(0 if status == _ENDED else status, "cuCtxSynchronize")

    def identity(self, stream: int) -> int:
        """Return a number that a stream has alone: a new stream may get the handle of a destroyed one."""
        if stream == DEFAULT_STREAM:
            return _DEFAULT_IDENTITY
        found = ctypes.c_ulonglong()
        check(driver().cuStreamGetId(stream, ctypes.byref(found)), "cuStreamGetId")
        return found.value

    def is_capturing(self, stream: int) -> bool:
        """Whether the caller captures what goes to a stream into a CUDA graph."""
        status = ctypes.c_int()
        check(driver().cuStreamIsCapturing(stream, ctypes.byref(status)), "cuStreamIsCapturing")
        return status.value != 0

    def copy(self, start: int, to: int, size: int, stream: int) -> None:
        """Copy so many bytes between two addresses, after what the stream was given before."""
        if size:
            check(driver().cuMemcpyAsync(to, start, size, stream), "cuMemcpyAsync")

    def launch(self, graph: ctypes.c_void_p, stream: int) -> None:
        """Launch an executable graph."""
        check(driver().cuGraphLaunch(graph, stream), "cuGraphLaunch")

    def forget_error(self, *, no_memory_only: bool = False) -> None:
        """Clear this thread's last error of CUDA's runtime, or only that there was no memory.

        TVM then frees some and tries again. An error that ends all work of the process stays.
        """
        if not no_memory_only or _runtime().cudaPeekAtLastError() == _NO_MEMORY:
            _runtime().cudaGetLastError()
