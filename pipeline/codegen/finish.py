"""The last steps of code generation that compiled artifacts and tuning candidates share.

A candidate must be the same machine code as the kernel of an artifact made of its record; whatever is done to one
between scheduling and code generation is done to the other, here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tvm
from tvm import tirx

from relaxtune.pipeline.codegen.cuda_compile import OnLog, uses_fast_math
from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.pipeline.codegen.cuda_units import units_side_by_side
from relaxtune.pipeline.codegen.cuda_vectors import fit_vectors
from relaxtune.pipeline.errors import LoweringError
from relaxtune.schedules.cpu.partitioning import narrow_partitioned
from relaxtune.schedules.cpu.vector_math import keep_erf_in_vectors, register_vector_math
from relaxtune.schedules.gpu.binding import list_unbound_blocks
from relaxtune.schedules.marks import is_kernel
from relaxtune.schedules.targets import is_portable


def finish_kernels(scheduled: tvm.ir.IRModule, target: tvm.target.Target) -> tvm.ir.IRModule:
    """Return the scheduled module ready for code generation, in a process that generates the project's own code.

    On a CPU, functions whose loops are to be partitioned get 32-bit indices; exp, erf, tanh and sigmoid become vector
    arithmetic in this process.

    Raises
    ------
    LoweringError
        A kernel has blocks that no GPU thread runs. Only a search's candidate can: fallbacks and templates bind all.
    """
    if target.kind.name != "cuda":
        register_vector_math()
        return narrow_partitioned(keep_erf_in_vectors(scheduled))
    unbound = [
        str(var.name_hint)
        for var, func in scheduled.functions_items()
        if isinstance(func, tirx.PrimFunc) and not is_kernel(func) and list_unbound_blocks(func)
    ]
    if unbound:
        raise LoweringError(
            f"kernels {', '.join(sorted(unbound))} have blocks that no GPU thread runs: they would run on the host and "
            "end the process at device memory. Leave the record out (`--routes`), or measure the task again"
        )
    return fit_vectors(scheduled)


@contextmanager
def device_toolchain(target: tvm.target.Target, on_log: OnLog | None = None) -> Iterator[None]:
    """Make TVM compile device code with the project's compilers inside the block; nothing for a CPU.

    `on_log` is told the registers, shared memory and spills of the kernels, in ptxas' words.

    Raises
    ------
    LoweringError
        The CUDA toolchain is missing.
    """
    if target.kind.name != "cuda":
        yield
        return
    arch, fast_math, portable = str(target.attrs["arch"]), uses_fast_math(target), is_portable(target)
    with (
        cuda_compiler(arch, fast_math=fast_math, portable=portable, on_log=on_log) as asked,
        units_side_by_side(asked, on_log),
    ):
        yield


def pass_context(cuda_graph: bool) -> tvm.transform.PassContext:
    """Return the settings of TVM's passes with which modules are compiled."""
    return tvm.transform.PassContext(opt_level=3, config={"relax.backend.use_cuda_graph": cuda_graph})
