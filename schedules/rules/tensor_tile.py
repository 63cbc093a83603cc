"""The search space of a half-precision matmul on tensor cores of any generation from Ampere on: `mma.sync` m16n8k16.

    blockIdx.x      batch..., row blocks, column blocks
      threadIdx.y     warps, rows x columns of them
        acc[fm, fn] = 0                   tiles of 16 x 16 in registers
        k0            the operands' tiles to shared memory, by all threads, some elements at once
          k1            fm and fn tiles of the operands to registers (ldmatrix)
            fm, fn        acc += a * b
        acc to shared memory
      epilogue, by all threads

TVM's own rule hardly builds for float16 x float16 -> float32 with an epilogue: the element type of the buffer that its
intrinsics address is not the source buffer's. Here tiles are in static shared memory. Sampled are the warps, each
warp's tiles, the part of the reduction in shared memory at a time, the elements of a copy, and unrolling; the choices
divide the matmul and keep to a block's limits together (about one of six is refused still: a single row of tiles, two
deep).
Copies are not asynchronous.

Hopper's own matmuls (wgmma) are a template's, `schedules.templates.gemm_sm90`, and faster: nothing is offered there.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target
from tvm.tirx import PrimFunc

from schedules.cpu.analysis import BlockFacts, static_extent
from schedules.cpu.contraction import find_operands
from schedules.rules.tensor_intrinsics import INPUTS, TILE, intrinsic_name, register_intrinsics
from schedules.rules.thread_tile import UNROLL_STEPS, copy_lanes, isolate_contraction, sample

# Warps and tiles of a warp: at most 64 x 128 of the output in a block, whose float32 sums fill 32 of 48 KiB.
_ROWS_MAX, _COLUMNS_MAX, _DEPTH_MAX = 4, 8, 2
_PADDING = 8


def takes_tensor_tiles(target: Target) -> bool:
    """Whether a target has `mma.sync` m16n8k16 and no template of its own for matmuls."""
    arch = str(target.attrs.get("arch", "")) if target.kind.name == "cuda" else ""
    return arch.removeprefix("sm_").isdigit() and int(arch.removeprefix("sm_")) >= 80


def tensor_tile_designs(func: PrimFunc, target: Target) -> list[Schedule]:
    """Return the sampled schedule of a function with one matmul that divides into tiles, or nothing."""
    if not takes_tensor_tiles(target):
        return []
    sch = Schedule(func)
    isolated = isolate_contraction(sch)
    if isolated is None or not _divides(sch, isolated[0]):
        return []
    register_intrinsics()
    _tile(sch, *isolated)
    return [sch]


def _divides(sch: Schedule, contraction: BlockFacts) -> bool:
    """Whether `C[.., i, j] += A[.., i, k] * B[.., k, j]` as it stands, in half precision and whole tiles."""
    operands = find_operands(contraction)
    *_, row, column, reduce = [one.var for one in contraction.stmt.iter_vars]
    extents = [static_extent(one.dom.extent) for one in contraction.stmt.iter_vars]
    if operands is None or len(extents) < 3 or any(extent is None or extent % TILE for extent in extents[-3:]):
        return False
    left, right = operands
    dtypes = {str(left.source.dtype), str(right.source.dtype)}
    sums = str(contraction.stmt.writes[0].source.dtype)
    plain = _ends_with(left, row, reduce) and _ends_with(right, reduce, column)
    return plain and len(dtypes) == 1 and dtypes <= set(INPUTS) and sums == "float32"


def _ends_with(load: TensorLoad, *variables: tirx.Var) -> bool:
    indices = list(load.indices)
    return len(indices) >= 2 and all(a.same_as(b) for a, b in zip(indices[-2:], variables, strict=True))


def _tile(sch: Schedule, contraction: BlockFacts, epilogue: SBlockRV) -> None:
    block = contraction.rv
    operands = find_operands(contraction)
    if operands is None:
        return
    dtype = str(operands[0].source.dtype)
    *_, rows, columns, depth = [static_extent(one.dom.extent) or TILE for one in contraction.stmt.iter_vars]
    sums = sch.cache_write(block, 0, "wmma.accumulator")
    sch.set_scope(sums, 0, "shared")

    down, high = _choices(rows // TILE, _ROWS_MAX)
    across, wide = _choices(columns // TILE, _COLUMNS_MAX)
    warps_down, tiles_down = sample(sch, down), sample(sch, high)
    warps_across, tiles_across = sample(sch, across), sample(sch, wide)
    steps = sample(sch, [n for n in (1, 2) if n <= _DEPTH_MAX and depth // TILE % n == 0])

    *batch, i, j = sch.get_loops(epilogue)
    i_block, i_warp, i_tile, i_lane = sch.split(i, [None, warps_down, tiles_down, TILE])
    j_block, j_warp, j_tile, j_lane = sch.split(j, [None, warps_across, tiles_across, TILE])
    sch.reorder(*batch, i_block, j_block, i_warp, j_warp, i_tile, i_lane, j_tile, j_lane)
    grid = sch.fuse(*batch, i_block, j_block)
    sch.bind(grid, "blockIdx.x")
    sch.bind(sch.fuse(i_warp, j_warp), "threadIdx.y")
    _, lanes, pair = sch.split(sch.fuse(i_tile, i_lane, j_tile, j_lane), [None, 32, 2])
    sch.bind(lanes, "threadIdx.x")
    sch.vectorize(pair)

    sch.compute_at(sums, grid, preserve_unit_loops=True)
    sch.compute_at(block, grid, preserve_unit_loops=True)
    *unit, m, n, k = sch.get_loops(block)[1:]
    m_warp, m_tile, m_lane = sch.split(m, [warps_down, tiles_down, TILE])
    n_warp, n_tile, n_lane = sch.split(n, [warps_across, tiles_across, TILE])
    chunk, step, k_lane = sch.split(k, [None, steps, TILE])
    sch.reorder(m_warp, n_warp, chunk, step, m_tile, n_tile, *unit, m_lane, n_lane, k_lane)
    sch.bind(sch.fuse(m_warp, n_warp), "threadIdx.y")
    for position, (kind, scope) in enumerate((("load_a", "wmma.matrix_a"), ("load_b", "wmma.matrix_b"))):
        tiles = sch.cache_read(block, position, scope)
        sch.compute_at(tiles, step, preserve_unit_loops=True)
        copy = sch.cache_read(tiles, 0, "shared")
        sch.compute_at(copy, chunk, preserve_unit_loops=True)
        own = len(sch.get(copy).iter_vars)
        sch.fuse(*sch.get_loops(copy)[-own:])
        sch.annotate(copy, "meta_schedule.cooperative_fetch", sample(sch, copy_lanes(dtype)))
        # Rows of ldmatrix in different banks.
        sch.storage_align(copy, 0, -2, 32, _PADDING)
        *_, x, y = sch.get_loops(tiles)
        x_tile, x_lane = sch.split(x, [None, TILE])
        y_tile, y_lane = sch.split(y, [None, TILE])
        sch.reorder(x_tile, y_tile, x_lane, y_lane)
        sch.tensorize(x_lane, intrinsic_name(kind, dtype))
    start = sch.decompose_reduction(block, chunk)
    sch.tensorize(sch.get_loops(start)[-2], intrinsic_name("fill", "float32"))
    sch.tensorize(m_lane, intrinsic_name("multiply", dtype))

    *_, x, y = sch.get_loops(sums)
    x_warp, x_tile, x_lane = sch.split(x, [warps_down, tiles_down, TILE])
    y_warp, y_tile, y_lane = sch.split(y, [warps_across, tiles_across, TILE])
    sch.reorder(x_warp, y_warp, x_tile, y_tile, x_lane, y_lane)
    sch.bind(sch.fuse(x_warp, y_warp), "threadIdx.y")
    sch.tensorize(x_lane, intrinsic_name("store", "float32"))
    sch.annotate(sch.get_sblock("root"), "meta_schedule.unroll_explicit", sample(sch, UNROLL_STEPS))


def _choices(tiles: int, most: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the warps along an axis, and the tiles of each: any two of them divide the axis."""
    divisor = min(most, tiles & -tiles)
    inner = [n for n in (1, 2) if 2 * n <= divisor or n == 1]
    return [n for n in (1, 2, 4) if n * inner[-1] <= divisor], inner
