"""Pass: a CPU kernel adds a long row up in parts, and then the parts.

A float32 sum of one term after another loses what the terms are smaller than the sum by: over 16,384 terms of one sign
a part in 10,000. Sums of parts lose what the longer of the two sums does, in whatever order a schedule adds them up.
GPU kernels give the row to many threads, and so have parts already.
"""

from __future__ import annotations

import math

import tvm
from tvm import tirx
from tvm.s_tir import Schedule

from relaxtune.pipeline.passes.kit.ir import with_functions
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.cpu.any_size.windows import is_convolution
from relaxtune.schedules.tir.blocks import Block, list_blocks
from relaxtune.schedules.tir.contraction import find_operands
from relaxtune.schedules.tir.scheduled_blocks import block_facts, is_canonical, list_blocks as list_scheduled

# Terms that may be added up one after another. Of terms of one sign, 1,024 cost 5e-6 of the sum.
_TERMS_MAX = 1024
# Terms of a part over several axes, which schedules add up one by one. Vectors share those of one axis.
_SEVERAL_MAX = 256
# Elements of the widest vector: a part of one axis is a whole number of them.
_VECTOR = 16


def sum_in_blocks(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with sums of more than `_TERMS_MAX` terms as sums of partial sums, on a CPU.

    Unchanged are matmuls and convolutions, whose terms are of either sign; sums of symbolic length, and those of
    a length without a fitting divisor, to which the rules for rows give one partial sum a vector lane.
    """
    if state.target.kind.name != "llvm":
        return mod
    found = {
        var: in_blocks(func)
        for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and any(map(_is_long_sum, list_blocks(func)))
    }
    if not found:
        return mod
    state.note(f"{len(found)} kernels add long rows up in parts")
    return with_functions(mod, found)


def in_blocks(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function with its long sums as sums of partial sums."""
    sch = Schedule(func)
    for one in list_scheduled(sch):
        if not sch.get_loops(one.rv):
            # TVM finds no place for partial sums beside a block without a loop.
            sch.add_unit_loop(one.rv)
    for name in [block.name for block in list_blocks(func) if _is_long_sum(block)]:
        block = block_facts(sch, sch.get_sblock(name))
        steps = _steps_of_a_part(block)
        if steps is None or not is_canonical(sch, block):
            continue
        loops = sch.get_loops(block.rv)
        kept = [loop for loop, kind in zip(loops, block.kinds, strict=True) if kind == "S"]
        added = [loop for loop, kind in zip(loops, block.kinds, strict=True) if kind == "R"]
        sch.reorder(*kept, *added)
        # One loop over the parts, the loops inside a part below it.
        split = [sch.split(loop, [None, count]) for loop, count in zip(added, steps, strict=True)]
        outer, inner = zip(*split, strict=True)
        sch.reorder(*outer, *inner)
        partial = sch.rfactor(sch.fuse(*outer), len(kept))
        for made in (partial, block.rv) if kept else ():
            # The parts stand behind the kept axes, as in the loops around the block.
            axes = len(block_facts(sch, made).axes)
            sch.reorder_block_iter_var(made, [*range(1, len(kept) + 1), 0, *range(len(kept) + 1, axes)])
    return sch.mod["main"].with_attrs(func.attrs) if func.attrs else sch.mod["main"]


def _is_long_sum(block: Block) -> bool:
    """Whether a block adds up many terms of floating point in one number, and is no matmul."""
    if (
        not block.is_reduction
        or len(block.stores) != 1
        or any(size is None for size, kind in zip(block.extents, block.kinds, strict=True) if kind == "R")
    ):
        return False
    store = block.stores[0]
    return (
        math.prod(block.reduced_sizes) > _TERMS_MAX
        and str(store.buffer.dtype).startswith(("float", "bfloat"))
        and isinstance(store.value, tirx.Add)
        and find_operands(store, rounded=True) is None
        and not is_convolution(block)
    )


def _steps_of_a_part(block: Block) -> list[int] | None:
    """Return how many steps of each loop that adds up belong to one part, None where nothing divides them.

    The inner loops are in a part whole.
    """
    sizes = list(block.reduced_sizes)
    terms, step = (_TERMS_MAX, _VECTOR) if len(sizes) == 1 else (_SEVERAL_MAX, 1)
    place, length = len(sizes), 1
    while length * sizes[place - 1] <= terms:
        place -= 1
        length *= sizes[place]
    size, most = sizes[place - 1], terms // length
    inner = next((n for n in range(most - most % step, 0, -step) if size % n == 0), None)
    return None if inner is None or inner * length * 16 < terms else [1] * (place - 1) + [inner, *sizes[place:]]
