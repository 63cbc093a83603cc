"""The resources that a kernel takes of a GPU: registers, shared memory and spills, from the compiler and the launch."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Resources:
    """Resources of the kernels of one candidate; None where unknown, as on a CPU."""

    registers: int | None = None  # Of a thread, of the kernel that takes most.
    smem_bytes: int | None = None  # Shared memory of a block, static and dynamic, of the kernel that takes most.
    # Bytes that a thread stores to and loads from local memory for want of registers, over all kernels.
    spill_bytes: int | None = None
    kernel_hash: str | None = None  # Of the built kernel (`pipeline.codegen.kernel_hash`), on a CPU too.


NO_RESOURCES = Resources()


def parse_compiler_log(log: str, dynamic_bytes: int = 0) -> Resources:
    """Return the figures that ptxas printed with `-v`.

    A log without ptxas' figures gives unknowns. `dynamic_bytes` of shared memory are requested at launch, which ptxas
    does not know.
    """
    registers = [int(count) for count in _REGISTERS.findall(log)]
    if not registers:
        return NO_RESOURCES
    static = max((int(size) for size in _SHARED.findall(log)), default=0)
    spills = sum(int(stored) + int(loaded) for stored, loaded in _SPILLS.findall(log))
    return Resources(max(registers), static + dynamic_bytes, spills)
