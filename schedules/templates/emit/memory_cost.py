"""A time to order the candidates of memory-bound kernels by, before anything is measured.

The figures are fits to 350 kernels (norms, softmax, elementwise chains; 12 kB to 450 MB moved) that were timed in CUDA
graphs on an H200. By them the first candidates of the 23 cases took 2 % longer than the best ones (geometric mean),
9 % at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# A GPU starts one block after another.
_LAUNCH_US = 1.23e-3
# Bytes a microsecond: from memory, and of tensors that stay in the L2 cache from the kernel before.
_MEMORY, _CACHE = 4.1e6, 5.1e6
_CACHE_BYTES = 50e6
_THREADS_PER_SM, _BLOCKS_PER_SM, _REGISTERS_PER_SM = 2048, 32, 65536
# Of a kernel that does nothing, and of one access to an element more in a thread, alone and for each warp beside it.
_BASE_US, _ACCESS_US, _BESIDE = 1.0, 1.5e-3, 0.133
_SHARPNESS = 4
_EARLY_PER_SM = 2


@dataclass(frozen=True)
class Shape:
    """The sizes that a kernel's time depends on."""

    moved_bytes: float  # Read and written.
    # Of the grid, of a block, of a thread.
    blocks: int
    threads: int
    registers: int
    accesses: float  # Elements of tensors that a thread reads.
    waste: float = 1.0  # 1 plus what is lost to idle threads and to threads that wait for each other.


def predicted_us(shape: Shape, sm_count: int) -> float:
    """Return a time to compare kernels of one function by.

    Starting the blocks and moving the bytes go on at the same time; the latency of one thread's work comes on top.
    """
    fitting = (_BLOCKS_PER_SM, _THREADS_PER_SM // shape.threads, _REGISTERS_PER_SM // (shape.registers * shape.threads))
    resident = max(1, min(*fitting, math.ceil(shape.blocks / sm_count)))
    # One block alone cannot read while it writes.
    overlap = resident**2 / (resident**2 + 0.27)
    rate = _MEMORY if shape.moved_bytes > _CACHE_BYTES else _CACHE
    moving = shape.moved_bytes / rate / overlap * shape.waste
    work = shape.accesses * _ACCESS_US * (1 + _BESIDE * resident * shape.threads / 32)
    latency = (_BASE_US + work) * shape.waste
    # Two blocks a multiprocessor start while the kernel before ends.
    starting = _LAUNCH_US * max(0, shape.blocks - _EARLY_PER_SM * sm_count)
    return float((starting**_SHARPNESS + (moving + latency) ** _SHARPNESS) ** (1 / _SHARPNESS))
