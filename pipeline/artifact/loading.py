"""Code and weights of an artifact, read for the device, and which of a module's tensors share memory."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import safetensors
import tvm_ffi
from tvm_ffi import Device, Tensor

from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.printable import last_line
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tvm_runtime.library import VirtualMachine
from relaxtune.pipeline.tvm_runtime.threads import set_threads


def load_machine(path: Path, device: Device, threads: int) -> tuple[VirtualMachine, bool]:
    """Return the code of a shared object, as the file is now, ready to run on a device, and whether it took `threads`.

    Code of earlier versions for a CPU does not: see `pipeline.tvm_runtime.threads`.

    The loader takes a path that it has opened before for the same file, also when another artifact has been written
    there since; so it gets a name that was never used: a second one of the file, or on another file system a copy.

    Raises `ArtifactError`: the file is missing or damaged.
    """
    try:
        with temporary_folder() as directory:
            named = Path(directory) / path.name
            try:
                named.hardlink_to(path)
            except OSError:
                shutil.copyfile(path, named)
            machine = VirtualMachine(named, device)
        return machine, set_threads(machine.code, threads)
    except (RuntimeError, OSError, ValueError) as e:
        raise ArtifactError(f"{path} cannot be loaded: {last_line(e)}") from e


def read_weights(file: Path, manifest: Manifest) -> Iterator[tuple[str, np.ndarray]]:
    """Give the weights of an artifact and of its buckets, each once.

    One at a time: together they would take the model's size a second time.

    Raises `ArtifactError`: the file is missing or damaged, or lacks some.
    """
    entries = manifest.buckets.entries if manifest.buckets is not None else ()
    names = dict.fromkeys([*manifest.weights, *(name for entry in entries for name in entry.weights)])
    if not names:
        return
    try:
        with safetensors.safe_open(file, framework="numpy") as stored:
            missing = sorted(names.keys() - stored.keys())
            for name in names if not missing else ():
                of_8_bits = stored.get_slice(name).get_dtype().startswith("F8")
                yield name, _read_float8(file, name) if of_8_bits else stored.get_tensor(name)
    except (OSError, safetensors.SafetensorError, ValueError, TypeError, KeyError) as e:
        raise ArtifactError(f"{file} cannot be read: {e}; compile the model again") from e
    if missing:
        raise ArtifactError(f"{file} lacks the weights {', '.join(missing)}; compile the model again")


def _read_float8(file: Path, name: str) -> np.ndarray:
    """Return a weight of 8-bit floats, which the library of safetensors gives to torch and its like alone.

    A file is the length of its header (8 bytes), the header (JSON), then the bytes of its tensors.
    """
    with file.open("rb") as stored:
        length = int.from_bytes(stored.read(8), "little")
        entry = json.loads(stored.read(length))[name]
        begin, end = entry["data_offsets"]
        stored.seek(8 + length + begin)
        dtype = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}[entry["dtype"]]
        return np.frombuffer(stored.read(end - begin), numpy_dtype(dtype)).reshape(entry["shape"])


def with_weights(
    function: Callable[..., object], weights: Sequence[Tensor]
) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """Return a function of the virtual machine with its weights, which takes the inputs and returns the outputs.

    It knows no module, so that a module goes as soon as nothing uses it, not when Python looks for circles.
    """
    return lambda tensors: as_tuple(function(*tensors, *weights))


def as_tuple(result: object) -> tuple[Tensor, ...]:
    """Return what a function of the virtual machine gave back, one tensor or several, as a tuple."""
    if isinstance(result, Tensor):
        return (result,)
    # Five times as fast as the elements of TVM's array in Python.
    element, length = _array_functions()
    return tuple([element(result, number) for number in range(length(result))])


@cache
def _array_functions() -> tuple[Callable[..., Tensor], Callable[..., int]]:
    element, length = (tvm_ffi.get_global_func(name) for name in ("ffi.ArrayGetItem", "ffi.ArraySize"))
    return element, length


def shared_outputs(outputs: Sequence[Tensor], others: Sequence[Tensor]) -> frozenset[int]:
    """Return which outputs lie in memory of an input, a weight or an earlier output: a caller who writes one must not.

    Such an output is an input, a weight, a reshape of one, or the same tensor twice. The code
    decides it, so it is the same in each call.
    """
    taken = [_span(tensor) for tensor in others]
    found = set()
    for number, tensor in enumerate(outputs):
        start, end = _span(tensor)
        if any(start < other_end and other_start < end for other_start, other_end in taken):
            found.add(number)
        else:
            taken.append((start, end))
    return frozenset(found)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first and the last address of a tensor's memory."""
    start = int(tensor.data_ptr())
    return start, start + (math.prod(tensor.shape) * numpy_dtype(str(tensor.dtype)).itemsize if tensor.shape else 1)
