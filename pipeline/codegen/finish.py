"""The last steps of code generation that compiled artifacts and tuning candidates share.

A candidate must be the same machine code as the kernel of an artifact made of its record; whatever is done to one
between scheduling and code generation is done to the other, here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tvm

from pipeline.codegen.cuda_compile import uses_fast_math
from pipeline.codegen.cuda_compiler import cuda_compiler
from pipeline.codegen.gpu_check import bind_all_kernels, unbound_kernels, unroll_bool_vectors
from pipeline.errors import LoweringError
from schedules.vector_math import register_vector_math


def finish_kernels(
    scheduled: tvm.ir.IRModule, target: tvm.target.Target, unscheduled: tvm.ir.IRModule | None = None
) -> tvm.ir.IRModule:
    """Return the scheduled module ready for code generation, in a process that generates the project's own code.

    On a CPU the module stays as it is; exp, erf, tanh and sigmoid become vector arithmetic in this process.

    Parameters
    ----------
    scheduled : tvm.ir.IRModule
        All PrimFuncs are scheduled.
    target : tvm.target.Target
        What code is generated for.
    unscheduled : tvm.ir.IRModule or None
        The same before scheduling: a kernel with blocks outside every GPU thread is scheduled anew from it. None
        refuses such a kernel; so is a search's candidate treated, whose record would not be what was measured.

    Raises
    ------
    LoweringError
        A kernel has blocks that no GPU thread runs, and nothing to schedule it anew from or no rule that can.
    """
    if target.kind.name != "cuda":
        register_vector_math()
        return scheduled
    if unscheduled is not None:
        return unroll_bool_vectors(bind_all_kernels(unscheduled, scheduled, target))
    unbound = unbound_kernels(scheduled)
    if unbound:
        raise LoweringError(f"kernels {', '.join(unbound)} have blocks that no GPU thread runs")
    return unroll_bool_vectors(scheduled)


@contextmanager
def device_toolchain(target: tvm.target.Target) -> Iterator[None]:
    """Make TVM compile device code with the project's compilers inside the block; nothing for a CPU.

    Raises
    ------
    LoweringError
        The CUDA toolchain is missing.
    """
    if target.kind.name != "cuda":
        yield
        return
    with cuda_compiler(str(target.attrs["arch"]), fast_math=uses_fast_math(target)):
        yield
