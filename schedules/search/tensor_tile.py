"""The search space of a matmul on tensor cores of any generation from Ampere on: `mma.sync` fed by `cp.async`.

    blockIdx.x      batch..., row blocks, column blocks
      threadIdx.y     warps, rows x columns of them
        acc[fm, fn] = 0                   tiles of 16 x 16 in registers
        k0            the operands' tiles to shared memory by all threads, some turns ahead (cp.async)
          k1            fm and fn tiles of the operands to registers (ldmatrix)
            fm, fn        acc += a * b
        acc to shared memory, over the operands
      epilogue, by all threads

float16 and bfloat16 multiply by m16n8k16, float32 by m16n8k8 in tf32: that drops bits of the operands, so functions say
that they may (`TF32_ATTR`). Axes that no tile divides are padded: copies to shared memory put zeros there, and the
epilogue does not write it. The right operand is stored [k, n] or [n, k].

TVM's own rule hardly builds for float16 x float16 -> float32 with an epilogue: the element type of the buffer that its
intrinsics address is not the source buffer's.

A design has a depth of the reduction in shared memory, so many turns in flight, and a way to share a block among warps;
sampled are its warps and each warp's tiles. Any choices together keep to a block's limits, by construction: nothing
drawn is refused, and nothing needs to be checked (`make_space`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import ASYNC_COPIES, TF32_ATTR
from relaxtune.schedules.search.tensor_intrinsics import (
    HALVES,
    SHARED,
    TILE,
    fragment_scope,
    intrinsic_name,
    register_intrinsics,
)
from relaxtune.schedules.search.thread_tile import LOAD_BYTES, isolate_contraction, sample
from relaxtune.schedules.targets import CudaLimits, Feature, target_features, target_limits
from relaxtune.schedules.tir.blocks import element_bytes, static_extent
from relaxtune.schedules.tir.contraction import find_operands
from relaxtune.schedules.tir.matmul import recognise_matmul
from relaxtune.schedules.tir.scheduled_blocks import ScheduledBlock

# Tiles along an axis of a block at most, and how much longer padding may make an axis.
_BLOCK_TILES = (8, 4, 2, 1)
_PADDED_MAX = 4 / 3
# Tiles of halves along the reduction that are in shared memory at a time, and such turns in flight at most: the deeper,
# the fewer barriers. A matmul with few tiles for each multiprocessor has small blocks, so that there are more of them,
# which have room for more; one with many has large ones, which read less.
_DEPTHS = ((2, 4), (4, 3))
_DEPTHS_OF_FEW = ((4, 4), (8, 3))
_STEPS_MAX = max(depth * most for depth, most in _DEPTHS + _DEPTHS_OF_FEW)
_TILES, _TILES_OF_FEW, _TILES_OF_MANY = (1, 2, 4), (1, 2), (2, 4)
_FEW, _MANY = 8, 64
_EPILOGUE_LANES = 4
# Rows in shared memory are some elements longer than a multiple of 32: those that are read together lie in other banks.
# ldmatrix reads 16 bytes of 8 rows; float32 of rows of B, and of sums, goes by element (see `mma_fragments`).
_BANKS, _PADDING = 32, 8


@dataclass(frozen=True)
class _Matmul:
    """C[.., rows, columns] += A[.., rows, depth] * B[.., depth, columns], or B[.., columns, depth] when `turned`.

    `left_lanes` and `right_lanes` are the elements that a thread copies at once.
    """

    axes: int
    batches: int
    rows: int
    columns: int
    depth: int
    dtype: str
    turned: bool
    left_lanes: int
    right_lanes: int


@dataclass(frozen=True)
class _Axis:
    """Choices of warps along an axis of a block and of tiles of each; any two of them divide its `padding` tiles."""

    warps: Sequence[int]
    tiles: Sequence[int]
    padding: int

    @property
    def length(self) -> int:
        return self.padding * TILE


@dataclass(frozen=True)
class _Design:
    rows: _Axis
    columns: _Axis
    depth: int
    stages: int


def has_tensor_tiles(target: Target) -> bool:
    """Whether a target has `mma.sync` of these shapes, and `cp.async`."""
    return target_features(target) >= {Feature.MMA, Feature.CP_ASYNC, Feature.LDMATRIX}


def takes_tensor_tiles(func: PrimFunc, target: Target) -> bool:
    """Whether a function is searched on tensor cores: it has one matmul that they take, and no template of its own."""
    return _prepare(func, target) is not None


def multiplies_float32(func: PrimFunc) -> bool:
    """Whether a function has one float32 matmul that tensor cores would take in tf32."""
    matmul = _recognise(func, tf32=True)
    return matmul is not None and matmul.dtype == "float32"


def tensor_tile_designs(func: PrimFunc, target: Target) -> list[Schedule]:
    """Return the sampled schedules of a function with one matmul that tensor cores take, or nothing."""
    matmul, limits = _prepare(func, target), target_limits(target)
    if matmul is None or not isinstance(limits, CudaLimits):
        return []
    register_intrinsics()
    found = []
    for design in _list_designs(matmul, limits):
        sch = Schedule(func)
        if isolated := isolate_contraction(sch):
            _tile(sch, isolated[0].rv, isolated[1], matmul, design)
            found.append(sch)
    return found


def form_of(func: PrimFunc) -> str | None:
    """Return what a schedule of this space took for granted of its function, None for one of another space.

    A trace fits another function of this space only where its designs have the same form: it says how many elements
    are aligned together, and, of a short reduction, how many steps it has.
    """
    root = getattr(func.body, "block", None)
    form = root.annotations.get(ASYNC_COPIES) if root is not None else None
    return None if form is None else str(form)


def _prepare(func: PrimFunc, target: Target) -> _Matmul | None:
    if not has_tensor_tiles(target):
        return None
    matmul = _recognise(func, tf32=bool(func.attrs and func.attrs.get(TF32_ATTR, False)))
    if matmul is None or Feature.WGMMA not in target_features(target):
        return matmul
    # With wgmma, halves in rows of multiples of 16 bytes have a template, `gemm_sm90`, which is faster.
    aligned = matmul.left_lanes == matmul.right_lanes == LOAD_BYTES // element_bytes(matmul.dtype)
    has_template = matmul.dtype in HALVES and aligned and not isinstance(recognise_matmul(func), Refusal)
    return None if has_template else matmul


def _recognise(func: PrimFunc, *, tf32: bool) -> _Matmul | None:
    isolated = isolate_contraction(Schedule(func))
    return None if isolated is None else _find_matmul(isolated[0], tf32=tf32)


def _find_matmul(contraction: ScheduledBlock, *, tf32: bool) -> _Matmul | None:
    operands = find_operands(contraction.store)
    extents = [static_extent(one.dom.extent) for one in contraction.stmt.iter_vars]
    sums = str(contraction.stmt.writes[0].source.dtype)
    if operands is None or len(extents) < 3 or sums != "float32":
        return None
    left, right = operands
    dtype = str(left.source.dtype)
    *batch, row, column, reduce = [one.var for one in contraction.stmt.iter_vars]
    turned = _is_read_by(right, batch, column, reduce)
    plain = _is_read_by(left, batch, row, reduce) and (turned or _is_read_by(right, batch, reduce, column))
    if not plain or dtype != str(right.source.dtype) or not (dtype in HALVES or (tf32 and dtype == "float32")):
        return None
    # Elements of each row's start on that are aligned together; 0 where rows have no static length.
    lengths = [static_extent(load.source.shape[-1]) for load in operands]
    lanes = [0 if length is None else math.gcd(length, LOAD_BYTES // element_bytes(dtype)) for length in lengths]
    known = [extent for extent in extents if extent is not None]
    if len(known) < len(extents) or 0 in lanes:
        return None
    *batches, rows, columns, depth = known
    return _Matmul(len(extents), math.prod(batches), rows, columns, depth, dtype, turned, *lanes)


def _is_read_by(load: TensorLoad, batch: Sequence[tirx.Var], row: tirx.Var, column: tirx.Var) -> bool:
    """Whether a tensor is indexed by some of the batch's variables, in their order, and then two others."""
    if len(load.indices) < 2:
        return False
    *leading, before, last = list(load.indices)
    rest = iter(batch)
    in_order = all(any(index.same_as(var) for var in rest) for index in leading)
    return bool(in_order and before.same_as(row) and last.same_as(column))


def _list_designs(matmul: _Matmul, limits: CudaLimits) -> list[_Design]:
    rows, columns = _padding(matmul.rows), _padding(matmul.columns)
    size, steps = element_bytes(matmul.dtype), math.ceil(matmul.depth / TILE)
    blocks = matmul.batches * math.ceil(matmul.rows / TILE) * math.ceil(matmul.columns / TILE)
    each = blocks / limits.likely_sm_count
    tiles = _TILES_OF_FEW if each < _FEW else _TILES_OF_MANY if each >= _MANY else _TILES
    designs: list[_Design] = []
    for wanted, most in _DEPTHS_OF_FEW if each < _FEW else _DEPTHS:
        for share in (_few_warps, _many_warps):
            row, column = _few_warps(rows, tiles), share(columns, tiles)
            depth = max(1, wanted * 2 // size)
            while depth > 1 and (
                _padded(steps, depth) > _PADDED_MAX * steps
                or depth >= steps
                or 2 * _turn_bytes(row, column, depth, size) > limits.shared_bytes_optin
            ):
                depth //= 2
            fitting = limits.shared_bytes_optin // _turn_bytes(row, column, depth, size)
            design = _Design(row, column, depth, min(most, fitting, math.ceil(steps / depth)))
            if design not in designs:
                designs.append(design)
    return designs


def _padding(extent: int) -> int:
    """Return the most tiles of a block along an axis, to whose multiple the axis is padded."""
    tiles = math.ceil(extent / TILE)
    return next(most for most in _BLOCK_TILES if _padded(tiles, most) <= _PADDED_MAX * tiles)


def _padded(tiles: int, multiple: int) -> int:
    return math.ceil(tiles / multiple) * multiple


def _few_warps(padding: int, tiles: Sequence[int]) -> _Axis:
    """Return choices for warps with many tiles: the least traffic between registers and shared memory."""
    taken = [count for count in tiles if count * count <= 2 * padding] or [1]
    return _Axis([count for count in (1, 2) if count * taken[-1] <= padding], taken, padding)


def _many_warps(padding: int, tiles: Sequence[int]) -> _Axis:
    """Return choices for many warps with few tiles each: they hide each other's waits."""
    taken = [count for count in tiles if count * count * 2 <= padding] or [1]
    return _Axis([count for count in (1, 2, 4) if count * taken[-1] <= padding][-2:], taken, padding)


def _turn_bytes(rows: _Axis, columns: _Axis, depth: int, size: int) -> int:
    """Return the most bytes of shared memory that both operands take for one turn, however the right one is stored."""
    deep = depth * TILE
    right = max(columns.length * _row_length(deep), deep * _row_length(columns.length))
    return (rows.length * _row_length(deep) + right) * size


def _row_length(elements: int) -> int:
    return math.ceil(elements / _BANKS) * _BANKS + _PADDING


def _tile(sch: Schedule, block: SBlockRV, epilogue: SBlockRV, matmul: _Matmul, design: _Design) -> None:
    epilogue = _pad(sch, block, epilogue, matmul, design)
    sums = sch.cache_write(block, 0, "wmma.accumulator")
    sch.set_scope(sums, 0, SHARED)
    warps_down, tiles_down = sample(sch, design.rows.warps), sample(sch, design.rows.tiles)
    warps_across, tiles_across = sample(sch, design.columns.warps), sample(sch, design.columns.tiles)
    warps = (warps_down, warps_across)

    *batch, m, n, k = sch.get_loops(block)
    m_block, m_warp, m_tile, m_lane = sch.split(m, [None, warps_down, tiles_down, TILE])
    n_block, n_warp, n_tile, n_lane = sch.split(n, [None, warps_across, tiles_across, TILE])
    turn, step, k_lane = sch.split(k, [None, design.depth, TILE])
    sch.reorder(*batch, m_block, n_block, m_warp, n_warp, turn, step, m_tile, n_tile, m_lane, n_lane, k_lane)
    grid = sch.fuse(*batch, m_block, n_block)
    sch.bind(grid, "blockIdx.x")
    sch.bind(sch.fuse(m_warp, n_warp), "threadIdx.y")
    # Loops over fragments must be unrolled, or fragments are not in registers.
    sch.unroll(m_tile)
    sch.unroll(n_tile)

    sch.reverse_compute_at(sums, grid, preserve_unit_loops=True)
    sch.reverse_compute_at(epilogue, grid, preserve_unit_loops=True)
    epilogue_lanes = math.gcd(matmul.columns, _EPILOGUE_LANES)
    _spread(sch, epilogue, sch.get_loops(epilogue)[1:], epilogue_lanes, warps)

    load_right, multiply = ("load_b_turned", "multiply_turned") if matmul.turned else ("load_b", "multiply")
    for position, (kind, lanes) in enumerate((("load_a", matmul.left_lanes), (load_right, matmul.right_lanes))):
        fragments = sch.cache_read(block, position, fragment_scope(kind, matmul.dtype))
        sch.compute_at(fragments, step, preserve_unit_loops=True)
        copy = sch.cache_read(fragments, 0, SHARED)
        sch.compute_at(copy, turn, preserve_unit_loops=True)
        for padded in sch.get_producers(copy):
            sch.compute_inline(padded)
        own = len(sch.get(copy).iter_vars)
        _spread(sch, copy, sch.get_loops(copy)[-own:], lanes, warps)
        padding = _PADDING if kind == "load_b" else LOAD_BYTES // element_bytes(matmul.dtype)
        sch.storage_align(copy, 0, -2, _BANKS, padding)
        *_, x, y = sch.get_loops(fragments)
        x_tile, x_lane = sch.split(x, [None, TILE])
        y_tile, y_lane = sch.split(y, [None, TILE])
        sch.reorder(x_tile, y_tile, x_lane, y_lane)
        sch.unroll(x_tile)
        sch.unroll(y_tile)
        sch.tensorize(x_lane, intrinsic_name(kind, matmul.dtype))
    _pipeline(sch, turn, step, matmul, design)
    start = sch.decompose_reduction(block, turn)
    sch.tensorize(sch.get_loops(start)[-2], intrinsic_name("fill", "float32"))
    sch.tensorize(m_lane, intrinsic_name(multiply, matmul.dtype))

    *_, x, y = sch.get_loops(sums)
    x_warp, x_tile, x_lane = sch.split(x, [warps_down, tiles_down, TILE])
    y_warp, y_tile, y_lane = sch.split(y, [warps_across, tiles_across, TILE])
    sch.reorder(x_warp, y_warp, x_tile, y_tile, x_lane, y_lane)
    sch.bind(sch.fuse(x_warp, y_warp), "threadIdx.y")
    sch.unroll(x_tile)
    sch.unroll(y_tile)
    stored = sch.blockize(x_lane)
    sch.storage_align(stored, 0, -2, _BANKS, _PADDING)
    sch.tensorize(stored, intrinsic_name("store", "float32"))
    steps = min(math.ceil(matmul.depth / TILE), _STEPS_MAX)
    form = f"lanes {matmul.left_lanes} {matmul.right_lanes} {epilogue_lanes}, steps {steps}"
    sch.annotate(sch.get_sblock("root"), ASYNC_COPIES, form)


def _pad(sch: Schedule, block: SBlockRV, epilogue: SBlockRV, matmul: _Matmul, design: _Design) -> SBlockRV:
    """Make tiles divide the axes, and return the epilogue, which goes over what there was before."""
    multiples = (design.rows.length, design.columns.length, design.depth * TILE)
    if not any(e % m for e, m in zip((matmul.rows, matmul.columns, matmul.depth), multiples, strict=True)):
        return epilogue
    sch.pad_einsum(block, [1] * (matmul.axes - 3) + list(multiples))
    (reader,) = sch.get_consumers(block)
    if sch.get_consumers(reader):
        sch.compute_inline(reader)
        (reader,) = sch.get_consumers(block)
    return reader


def _spread(sch: Schedule, block: SBlockRV, loops: Sequence[LoopRV], lanes: int, warps: tuple[ExprRV, ExprRV]) -> None:
    """Share a block's elements, some neighbours at a time, among all threads."""
    *others, last = loops
    last, together = sch.split(last, [None, lanes])
    _, down, across, thread = sch.split(sch.fuse(*others, last), [None, *warps, 32])
    sch.bind(sch.fuse(down, across), "threadIdx.y")
    sch.bind(thread, "threadIdx.x")
    sch.vectorize(together)


def _pipeline(sch: Schedule, turn: LoopRV, step: LoopRV, matmul: _Matmul, design: _Design) -> None:
    """Let copies run some turns before what multiplies them, and loads of fragments a step before.

    The steps of a turn are a pipeline of their own: its first loads, its loop, its last products. With three turns in
    flight, the first loads are done before the last products of the turn before, which then hide the next copies. In
    float32 there are not enough registers for two steps.
    """
    last = design.stages - 1
    stages, order = [last], [2]
    if design.depth > 1 and matmul.dtype in HALVES:
        sch.unroll(step)
        sch.annotate(step, "software_pipeline_stage", [0, 0, 1])
        sch.annotate(step, "software_pipeline_order", [0, 1, 2])
        stages, order = ([last - 1, last, last], [3, 2, 4]) if design.stages > 2 else ([last] * 3, [2, 3, 4])
    if design.stages > 1:
        sch.annotate(turn, "software_pipeline_stage", [0, 0, *stages])
        sch.annotate(turn, "software_pipeline_order", [0, 1, *order])
        sch.annotate(turn, "software_pipeline_async_stages", [0])
