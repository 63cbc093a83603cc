"""The last steps of code generation that compiled artifacts and tuning candidates share.

A candidate must be the same machine code as the kernel of an artifact made of its record; whatever is done to one
between scheduling and code generation is done to the other, here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import tvm
from tvm import s_tir, tirx

from relaxtune.pipeline.codegen.cubins import OnLog, uses_fast_math
from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.pipeline.codegen.cuda_units import units_side_by_side
from relaxtune.pipeline.errors import LoweringError
from relaxtune.schedules.cpu.base import narrow_partitioned
from relaxtune.schedules.cpu.vector_math import keep_erf_in_vectors, register_vector_math
from relaxtune.schedules.gpu.binding import list_unbound_blocks
from relaxtune.schedules.marks import is_kernel
from relaxtune.schedules.targets import is_portable
from relaxtune.schedules.tir.blocks import child_statements
from relaxtune.schedules.tir.expressions import depends_on, find_all

# Lanes of the longest vector of indices that compiles.
_INDEX_LANES_MAX = 4


def finish_kernels(scheduled: tvm.ir.IRModule, target: tvm.target.Target) -> tvm.ir.IRModule:
    """Return the scheduled module ready for code generation, in a process that generates the project's own code.

    On a CPU, functions whose loops are to be partitioned get 32-bit indices; exp, erf, tanh and sigmoid become vector
    arithmetic in this process.

    Raises `LoweringError`: a kernel has blocks that no GPU thread runs. Only a search's candidate can: fallbacks and
    templates bind all.
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

    Raises `LoweringError`: the CUDA toolchain is missing.
    """
    if target.kind.name != "cuda":
        yield
        return
    arch, fast_math, portable = str(target.attrs["arch"]), uses_fast_math(target), is_portable(target)
    with (
        cuda_compiler(arch, fast_math=fast_math, portable=portable, on_log=on_log) as request,
        units_side_by_side(request, on_log),
    ):
        yield


def pass_context(cuda_graph: bool) -> tvm.transform.PassContext:
    """Return the settings of TVM's passes with which modules are compiled."""
    return tvm.transform.PassContext(opt_level=3, config={"relax.backend.use_cuda_graph": cuda_graph})


def fit_vectors(mod: tvm.ir.IRModule) -> tvm.ir.IRModule:
    """Return the module with vectorised loops unrolled, or split, where TVM's CUDA code generator has no right vectors.

    - Booleans: it loads a vector of them as `ushort`, two bytes an element where memory has one. The result is wrong
      without a word, so such loops are unrolled.
    - Indices of blocks that divide the loop's variable, as those of copies by fused loops do where a vector is longer
      than a row of the tile: it writes the index of every lane, in a vector too, and of more than 4 lanes that does not
      compile (`make_longlong4` and `make_uint4` get 8 arguments). Such loops are split into vectors that stay in a row,
      which have one index.
    """
    result = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    for var, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc) or is_kernel(func):
            continue
        lanes = {
            str(leaf.block.name_hint): fit
            for leaf, loop in _vectorised(func.body, None)
            if (fit := _lanes_that_fit(leaf, loop)) < int(loop.extent)
        }
        if not lanes:
            continue
        schedule = s_tir.Schedule(tvm.IRModule({"main": func}))
        for name, fit in lanes.items():
            for loop in schedule.get_loops(schedule.get_sblock(name, func_name="main")):
                if int(schedule.get(loop).kind) == int(tirx.ForKind.VECTORIZED):
                    _shorten(schedule, loop, fit)
        result[var] = schedule.mod["main"]
    return result


def _shorten(schedule: s_tir.Schedule, loop: s_tir.schedule.LoopRV, lanes: int) -> None:
    """Make vectors of so many lanes, or of a divisor where another block of the loop has shortened it already."""
    extent = int(schedule.get(loop).extent)
    lanes = math.gcd(extent, lanes)
    if lanes == extent:
        return
    schedule.unroll(loop)
    if lanes > 1:
        outer, inner = schedule.split(loop, [extent // lanes, lanes])
        schedule.unroll(outer)
        schedule.vectorize(inner)


def _lanes_that_fit(leaf: s_tir.SBlockRealize, loop: tirx.For) -> int:
    """Return how many lanes vectors of a block may have, a divisor of its vectorised loop's extent."""
    extent = int(loop.extent)
    if any(str(region.source.dtype) == "bool" for region in (*leaf.block.reads, *leaf.block.writes)):
        return 1
    if extent <= _INDEX_LANES_MAX:
        return extent
    kinds, indices = (tirx.FloorDiv, tirx.FloorMod), leaf.iter_values
    divisions = [node for index in indices for kind in kinds for node in find_all(index, kind)]
    divided = [node for node in divisions if isinstance(node.b, tirx.IntImm) and depends_on(node.a, [loop.loop_var])]
    return math.gcd(extent, *(int(node.b) for node in divided))


def _vectorised(stmt: tirx.Stmt, loop: tirx.For | None) -> Iterator[tuple[s_tir.SBlockRealize, tirx.For]]:
    """Yield the innermost blocks under a statement that are in a vectorised loop, and the loop; `loop` is around it."""
    if isinstance(stmt, tirx.For) and int(stmt.kind) == int(tirx.ForKind.VECTORIZED):
        loop = stmt
    inside = [found for part in child_statements(stmt) for found in _vectorised(part, loop)]
    yield from inside
    if not inside and loop is not None and isinstance(stmt, s_tir.SBlockRealize):
        yield stmt, loop
