"""Keep TVM from vectorising loops of GPU kernels that its CUDA code generator has no right vectors for.

- Booleans: it loads a vector of them as `ushort`, two bytes an element where memory has one. The result is wrong
  without a word, so such loops are unrolled.
- Indices of blocks that divide the loop's variable, as those of copies by fused loops do where a vector is longer than
  a row of the tile: it writes the index of every lane, in a vector too, and of more than 4 lanes that does not compile
  (`make_longlong4` and `make_uint4` get 8 arguments). Such loops are split into vectors that stay in a row, which have
  one index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import tvm
from tvm import s_tir, tirx

from relaxtune.schedules.marks import is_kernel
from relaxtune.schedules.tir.blocks import child_statements
from relaxtune.schedules.tir.expressions import depends_on, find_all

# Lanes of the longest vector of indices that compiles.
_INDEX_LANES_MAX = 4


def fit_vectors(mod: tvm.ir.IRModule) -> tvm.ir.IRModule:
    """Return the module with vectorised loops unrolled, or split into shorter vectors, where they have to be."""
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
