"""TVM's runtime without its compiler: the library, devices, tensors and the virtual machine.

`import tvm` loads the compiler too. Processes that only run artifacts do without its time and memory. A process may
import it as well, before or after: the library is loaded once, and each takes the other's tensors.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from tvm_ffi import Device, DLDeviceType, Tensor

from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.errors import PipelineError

_RUNTIME, _EXTRA = "libtvm_runtime.so", "libtvm_runtime_extra.so"
# Of tvm/runtime/memory/memory_manager.h: memory is kept for the next call.
_POOLED = 2
# Of tvm/runtime/device_api.h.
_EXIST, _COMPUTE_VERSION, _DEVICE_NAME = 0, 4, 5


def library_folders() -> list[Path]:
    """Return the folders in which TVM looks for its libraries, in its order."""
    spec = importlib.util.find_spec("tvm")
    package = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path("tvm")
    given = os.environ.get("TVM_LIBRARY_PATH")
    built = package.parent.parent
    return [*([Path(given)] if given else []), package / "lib", built / "build" / "lib", built / "lib"]


@cache
def runtime_function(name: str) -> Callable[..., Any]:
    """Return a function of TVM's runtime by its name."""
    _load_library()
    found: Callable[..., Any] = tvm_ffi.get_global_func(name)
    return found


def has_function(name: str) -> bool:
    """Whether TVM's libraries in this process have a function of that name."""
    _load_library()
    return tvm_ffi.get_global_func(name, allow_missing=True) is not None


@cache
def _load_library() -> None:
    folders = library_folders()
    folder = next((one for one in folders if (one / _RUNTIME).is_file()), None)
    if folder is None:
        raise PipelineError(
            f"TVM's runtime is not there: expected {_RUNTIME} in {', '.join(map(str, folders))}; install apache-tvm"
        )
    # For all libraries to come: compiled code calls its functions and does not name it.
    ctypes.CDLL(str(folder / _RUNTIME), mode=ctypes.RTLD_GLOBAL)
    with suppress(OSError):  # as TVM does where it is not there or lacks what it needs
        ctypes.CDLL(str(folder / _EXTRA))


def cpu() -> Device:
    """Return the host as a device."""
    return tvm_ffi.device("cpu", 0)


def cuda(index: int) -> Device:
    """Return a GPU by its number, be it there or not."""
    return tvm_ffi.device("cuda", index)


def is_cpu(device: Device) -> bool:
    """Whether a device is the host."""
    return bool(device.dlpack_device_type() == DLDeviceType.kDLCPU)


def device_exists(device: Device) -> bool:
    """Whether a device is there, and its runtime loaded."""
    return bool(_attribute(device, _EXIST))


def compute_version(device: Device) -> str:
    """Return the compute capability of a GPU, such as 9.0."""
    return str(_attribute(device, _COMPUTE_VERSION))


def device_name(device: Device) -> str:
    """Return the product name of a GPU."""
    return str(_attribute(device, _DEVICE_NAME))


def _attribute(device: Device, number: int) -> object:
    value: object = runtime_function("runtime.GetDeviceAttr")(device.dlpack_device_type(), device.index, number)
    return value


def synchronise(device: Device, stream: int = 0) -> None:
    """Wait until a stream of a device has done all it was given."""
    runtime_function("runtime.Device_StreamSync")(device, stream)


def empty(shape: Sequence[int], dtype: object, device: Device) -> Tensor:
    """Return a new tensor, its memory as it is."""
    allocate = runtime_function("runtime.TVMTensorAllocWithScope")
    return allocate(tvm_ffi.Shape([int(size) for size in shape]), tvm_ffi.dtype(str(dtype)), device, None)


def fill(tensor: Tensor, array: np.ndarray) -> None:
    """Copy an array of the same dtype and shape into a tensor, on whichever device."""
    if array.shape != tensor.shape or str(array.dtype) != str(tensor.dtype):
        raise ValueError(f"expected {tensor.dtype}{list(tensor.shape)}, got {array.dtype}{list(array.shape)}")
    array = np.asarray(array, order="C")
    runtime_function("runtime.TVMTensorCopyFromBytes")(tensor, ctypes.c_void_p(array.ctypes.data), array.nbytes)


def tensor_of(array: np.ndarray, device: Device) -> Tensor:
    """Return a copy of an array on a device."""
    tensor = empty(array.shape, array.dtype, device)
    fill(tensor, array)
    return tensor


def array_of(tensor: Tensor) -> np.ndarray:
    """Return a copy of a tensor as an array."""
    array = np.empty(tensor.shape, numpy_dtype(str(tensor.dtype)))
    runtime_function("runtime.TVMTensorCopyToBytes")(tensor, ctypes.c_void_p(array.ctypes.data), array.nbytes)
    return array


def copy(tensor: Tensor, to: Tensor) -> None:
    """Copy a tensor to another of the same dtype and shape; on GPUs on the default stream."""
    runtime_function("runtime.TVMTensorCopyFromTo")(tensor, to)


def view(tensor: Tensor, shape: Sequence[int], offset: int = 0) -> Tensor:
    """Return the places of a tensor from a byte on as one of another shape, in the same memory."""
    return runtime_function("runtime.TVMTensorCreateView")(tensor, tvm_ffi.Shape(list(shape)), tensor.dtype, offset)


class VirtualMachine:
    """The code of a shared object, ready to run on a device; its sizes are computed on the host."""

    def __init__(self, path: Path, device: Device) -> None:
        _load_library()
        #: As it was loaded.
        self.code = tvm_ffi.load_module(str(path))
        self._module = self.code["vm_load_executable"]()
        devices = [device] if is_cpu(device) else [device, cpu()]
        kinds = [number for one in devices for number in (int(one.dlpack_device_type()), int(one.index), _POOLED)]
        self._module["vm_initialization"](*kinds)

    def __contains__(self, name: str) -> bool:
        """Whether there is a function of a name."""
        return bool(self._module.implements_function(name))

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Return a function by its name."""
        function: Callable[..., Any] = self._module[name]
        return function

    def save_function(self, name: str, saved: str, *arguments: Tensor) -> None:
        """Keep a function with its arguments, to be called without any by the name `saved`."""
        self._module["save_function"](name, saved, 1, *arguments)

    def set_instrument(self, instrument: Callable[..., int] | None) -> None:
        """Have each call go by a function from now on, or by none."""
        self._module["set_instrument"](instrument)


class _Tensor(Tensor):  # type: ignore[misc]  # TVM's classes carry no types
    """A value of the virtual machine, with the methods of TVM's own class that callers use."""

    __slots__ = ()

    def numpy(self) -> np.ndarray:
        """Return a copy as an array."""
        return array_of(self)

    def copyfrom(self, array: np.ndarray) -> _Tensor:
        """Copy an array of the same shape to here."""
        fill(self, np.asarray(array, numpy_dtype(str(self.dtype))))
        return self

    def copyto(self, to: Tensor) -> Tensor:
        """Copy this to another tensor of the same dtype and shape."""
        copy(self, to)
        return to


# `import tvm` puts a class of its own in this place.
if "tvm" not in sys.modules:
    tvm_ffi.register_object("ffi.Tensor")(_Tensor)
    tvm_ffi.core._set_class_tensor(_Tensor)
