"""Fill what kernels are about to write with NaN, so that a kernel which leaves a part unwritten shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from tvm.runtime import Tensor
from tvm.runtime.vm import VMInstrumentReturnKind

from relaxtune.pipeline.artifact.runtime import Module


@contextmanager
def poisoned_kernels(module: Module) -> Iterator[None]:
    """Have the last tensor of every kernel's arguments, which it writes, filled with NaN before each call.

    Raises
    ------
    PipelineError
        The module runs as a CUDA graph.
    """
    kernels = {kernel.function for kernel in module.manifest.kernels}

    def instrument(_function: object, name: str, before: bool, _result: object, *arguments: object) -> int:
        if before and name in kernels:
            poison([argument for argument in arguments if isinstance(argument, Tensor)][-1])
        return int(VMInstrumentReturnKind.NO_OP)

    with module.instrumented(instrument):
        yield


def poison(tensor: Tensor) -> None:
    """Fill a tensor of floats with NaN; integers stay, since a wrong one may be an index out of bounds."""
    if "float" in str(tensor.dtype):
        array = tensor.numpy()
        tensor.copyfrom(np.full(array.shape, np.nan, array.dtype))
