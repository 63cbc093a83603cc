"""Copies of tiles of A, B and its scales to stages of shared memory, by all threads of a block; see `template.py`.

`TileChunks` says which thread copies what. Rows and columns outside a matrix are clamped: what they make is not
written. Along K, zeros stand for what does not exist; an address has to exist even where nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.async_copy import COPY_BYTES, TileChunks, copy_async
from relaxtune.schedules.templates.emit.kernel_frame import flat_view
from relaxtune.schedules.templates.emit.registers import in_register, when
from relaxtune.schedules.templates.gemm_sm80.plan import STORED_DEPTH, GemmPlan, chunks_together
from relaxtune.schedules.tir.blocks import Size, element_bytes
from relaxtune.schedules.tir.epilogue import MatmulFunction

#: Emits the copies of a tile to a stage: of the tile by its number along K.
Load: TypeAlias = "Callable[[tirx.Expr | int, tirx.Expr | int], None]"


def tile_copies(
    matmul: MatmulFunction,
    plan: GemmPlan,
    params: Sequence[tirx.Var],
    tiles: Sequence[tirx.Var],
    first: tuple[tirx.Expr, tirx.Expr],
    thread: tirx.Expr,
) -> tuple[Load, Load]:
    """Emit what stays the same along K; return what emits the copies of A, and of B with its scales.

    `tiles` are the stages in shared memory, `first` are the first row and column of the block's tile of the output.
    """
    p, stored, n, k = plan.parameters, matmul.stored, matmul.n, matmul.k
    read = [matmul.a, matmul.b] if stored is None else [matmul.a, stored.packed, stored.scales]
    sources = [flat_view(params[number]) for number in read]

    def chunks(operand: int, rows: int, columns: int, together: int = 1) -> TileChunks:
        each = COPY_BYTES // element_bytes(str(tiles[operand].ty.dtype))
        return TileChunks(plan.threads, thread, rows, columns // each, each, together)

    of_a = chunks(0, p.block_m, p.block_k, 1 if stored is None else chunks_together(16))
    load_a = _by_rows(sources[0], tiles[0], of_a, first[0], k, matmul.extent)
    if stored is None and not matmul.b_transposed:
        return load_a, _by_depths(sources[1], tiles[1], chunks(1, p.block_k, p.block_n), first[1], k, n)
    if stored is None:
        return load_a, _by_rows(sources[1], tiles[1], chunks(1, p.block_n, p.block_k), first[1], k, n)
    of_b = chunks(1, p.block_n, p.block_k * stored.bits // 8, chunks_together(stored.bits))
    load_packed = _by_rows(sources[1], tiles[1], of_b, first[1], k * stored.bits // 8, n)
    load_scales = _scales(sources[2], tiles[2], matmul, plan, first[1], thread)

    def load_b(stage: tirx.Expr | int, k_tile: tirx.Expr | int) -> None:
        load_packed(stage, k_tile)
        load_scales(stage, k_tile)

    return load_a, load_b


def _by_rows(source: tirx.Var, tile: tirx.Var, chunks: TileChunks, first: tirx.Expr, depth: int, limit: Size) -> Load:
    """Return the copies of a matrix whose rows run along K: of A, and of B as [N, K]."""
    height, width = chunks.shape
    starts, inside = T.alloc_local([chunks.count], "int32"), chunks.chunk * chunks.elements
    for number in range(chunks.count):
        row = first + chunks.row + number * chunks.step
        row = row if isinstance(limit, int) and limit % height == 0 else tirx.min(row, limit - 1)
        T.buffer_store(starts, row * depth + inside, [number])

    def load(stage: tirx.Expr | int, k_tile: tirx.Expr | int) -> None:
        def find(number: int) -> tuple[tirx.Expr, list[tirx.Expr]]:
            k = k_tile * width
            if depth % width == 0:
                return starts[number] + k, []
            exists = k + inside < depth
            return tirx.Select(exists, starts[number] + k, starts[number] - inside), [exists]

        chunks.copy(lambda place: tile.ptr_to([stage, place]), source, find)

    return load


def _by_depths(source: tirx.Var, tile: tirx.Var, chunks: TileChunks, first: tirx.Expr, depth: int, limit: int) -> Load:
    """Return the copies of B as [K, N], whose rows run along N."""
    height, width = chunks.shape
    column = first + chunks.chunk * chunks.elements
    start = in_register(tirx.min(column, limit - chunks.elements) if limit % width else column)

    def load(stage: tirx.Expr | int, k_tile: tirx.Expr | int) -> None:
        def find(number: int) -> tuple[tirx.Expr, list[tirx.Expr]]:
            k = k_tile * height + chunks.row + number * chunks.step
            exists = [k < depth] if depth % height else []
            row = tirx.Select(exists[0], k, tirx.IntImm("int32", 0)) if exists else k
            return row * limit + start, exists

        chunks.copy(lambda place: tile.ptr_to([stage, place]), source, find)

    return load


def _scales(
    source: tirx.Var, tile: tirx.Var, matmul: MatmulFunction, plan: GemmPlan, first: tirx.Expr, thread: tirx.Expr
) -> Load:
    """Return the copies of rows of scales [groups, N]: one for a stage, or one for each step; a thread copies 8."""
    assert matmul.stored is not None
    p, group, columns = plan.parameters, matmul.stored.group, matmul.n
    each = COPY_BYTES // element_bytes(str(tile.ty.dtype))
    across, last = p.block_n // each, -(-matmul.k // group) - 1
    column = first + thread % across * each
    start = in_register(tirx.min(column, columns - each) if columns % p.block_n else column)

    def load(stage: tirx.Expr | int, k_tile: tirx.Expr | int) -> None:
        at = tirx.min((k_tile * p.block_k + thread // across * STORED_DEPTH) // group, last) * columns + start
        with when([thread < plan.scale_rows * p.block_n // each]):
            copy_async(tile.ptr_to([stage, thread * each]), source.ptr_to([at]))

    return load
