"""Run an artifact through the C functions, with ctypes and NumPy alone.

CRASH LIBRARY DIR INPUTS OUTPUTS [ROUNDS [default|own [graphs|fork]]]; CRASH is what tells of crashes (`crash.cc`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import numpy as np

_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Managed(ctypes.Structure):
    """DLManagedTensorVersioned."""


Managed._fields_ = [
    ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
    ("deleter", ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))), ("flags", ctypes.c_uint64), ("tensor", Tensor),
]  # fmt: skip


def given(array: np.ndarray) -> Tensor:
    """Return a view of an array, which the caller keeps."""
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    bits = 8 if array.dtype == bool else array.dtype.itemsize * 8
    return Tensor(array.ctypes.data, 1, 0, array.ndim, _CODES[array.dtype.kind], bits, 1, shape, None, 0)


def taken(pointer: ctypes._Pointer[Managed]) -> np.ndarray:
    """Return a copy of an output, and give the output back."""
    tensor = pointer.contents.tensor
    kind = {code: letter for letter, code in _CODES.items()}[tensor.code]
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    dtype = np.dtype(bool if kind == "b" else f"{kind}{tensor.bits // 8}")
    size = int(np.prod(shape)) * dtype.itemsize
    array = np.frombuffer(ctypes.string_at(tensor.data, size), dtype).reshape(shape)
    pointer.contents.deleter(pointer)
    return array


def own_stream() -> ctypes.c_void_p:
    """Return a CUDA stream that does not wait for the default one."""
    stream = ctypes.c_void_p()
    ctypes.CDLL("libcudart.so.13").cudaSetDevice(0)  # the library may not have made this thread's context yet
    if ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(stream), 1):
        sys.exit("no stream can be made")
    return stream


def main(
    crash: str,
    library: str,
    directory: str,
    inputs: str,
    outputs: str,
    rounds: str = "2",
    stream: str = "default",
    graphs: str = "",
) -> None:
    """Load, run the call of each file of a folder in each round, write the outputs of the last one.

    What it is at is written beside the outputs, since some crashes print nothing.
    """
    at = Path(outputs).with_suffix(".at")
    lib = ctypes.CDLL(library)
    ctypes.CDLL(crash).print_crashes()
    lib.relaxtune_last_error.restype = lib.relaxtune_input_name.restype = ctypes.c_char_p
    lib.relaxtune_output_name.restype = ctypes.c_char_p
    lib.relaxtune_input_count.restype = lib.relaxtune_output_count.restype = ctypes.c_size_t
    artifact = ctypes.c_void_p()

    def check(status: int) -> None:
        if status:
            sys.exit(lib.relaxtune_last_error().decode())

    def call(file: Path) -> dict[str, np.ndarray]:
        with np.load(file) as stored:
            arrays = [np.ascontiguousarray(stored[name.decode()]) for name in names]
        tensors = (Tensor * len(arrays))(*map(given, arrays))
        made = (ctypes.POINTER(Managed) * count)()
        check(lib.relaxtune_run(artifact, tensors, ctypes.c_size_t(len(arrays)), on, made))
        return {lib.relaxtune_output_name(artifact, ctypes.c_size_t(n)).decode(): taken(made[n]) for n in range(count)}

    options = (ctypes.c_int32 * 5)(1, 0, 0, 1, graphs == "graphs")
    at.write_text("loading")
    check(lib.relaxtune_load(directory.encode(), options, ctypes.byref(artifact)))
    names = [lib.relaxtune_input_name(artifact, ctypes.c_size_t(n)) for n in range(lib.relaxtune_input_count(artifact))]
    count = lib.relaxtune_output_count(artifact)
    on = own_stream() if stream == "own" else None
    results = {}
    for number in range(int(rounds)):
        for file in sorted(Path(inputs).iterdir()):
            at.write_text(f"{file.name} of round {number + 1}")
            results[file.name] = call(file)
    if graphs == "fork" and os.fork() == 0:
        # The child's results are what is written.
        signal.alarm(60)
        results = {file.name: call(file) for file in sorted(Path(inputs).iterdir())}
    elif graphs == "fork":
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
    at.write_text("freeing the artifact")
    lib.relaxtune_free(artifact)
    at.write_text("the end of the process")
    for name, found in results.items():
        np.savez(Path(outputs) / name, **found)


main(*sys.argv[1:])
