"""Sizes of the kernel of `template.py` for a shape and parameters, or a refusal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import CudaLimits
from relaxtune.schedules.templates.base import NOT_NEGATIVE, POSITIVE, Parameters, added, among, refuse_shared
from relaxtune.schedules.templates.emit.wgmma import ROW_BYTES, STEP_BYTES, WARPGROUP
from relaxtune.schedules.templates.output.output_shares import (
    Shares,
    residual_loads,
    residual_registers,
    share_unit,
    shared_bytes,
)
from relaxtune.schedules.templates.output.row_statistics import statistics_registers
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.row_norm import COUNT

# dtype -> (PTX's name, bytes, PTX's sums)
_KINDS = {
    "float16": ("f16", 2, "f32"),
    "bfloat16": ("bf16", 2, "f32"),
    "int8": ("s8", 1, "s32"),
    "uint8": ("u8", 1, "s32"),
    "float8_e4m3fn": ("e4m3", 1, "f32"),
    "float8_e5m2": ("e5m2", 1, "f32"),
}
DTYPES = tuple(_KINDS)
_INTEGER_COLUMNS_MAX = 224


@dataclass(frozen=True)
class Operands:
    """The dtypes of A and B, as `operands_of` takes them: their sums, depth of an instruction and columns.

    =============  =============  =====  ===========  ==============================================================
    A              B              depth  sums         B lies as
    =============  =============  =====  ===========  ==============================================================
    float16        float16        16     float32      [K, N] or [N, K]
    bfloat16       bfloat16       16     float32      [K, N] or [N, K]
    int8, uint8    int8, uint8    32     int32        [N, K] only ("K-major": there are no transposed 8-bit operands)
    float8         float8         32     float32      [N, K] only; float8_e4m3fn and float8_e5m2 in any pair
    =============  =============  =====  ===========  ==============================================================

    An instruction reads 32 bytes of each row of K, whatever the dtype, so that tiles, swizzles and descriptors, counted
    in bytes, are the same for all. Integer sums wrap around at 32 bits, as int32 arithmetic does.

    Source: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions": matrix shape (N of
    integers are multiples of 16; the instruction's own syntax stops at 224), and syntax.

    Sums of float8 are float32 in name, but the tensor cores cut each addend off at about 14 bits of the sum
    (DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.2; `python -m
    benchmarks.kernels.float8_sums`). So they only sum up a stage, 128 products, and the stages are added up in float32
    registers, as with cuBLASLt's exact sums. It takes twice the registers for sums.
    """

    a: str
    b: str

    @property
    def bytes(self) -> int:
        """Of an element of A or B."""
        return _KINDS[self.a][1]

    @property
    def block_k(self) -> int:
        """Elements of K in a row of a tile in shared memory, which has 128 bytes."""
        return ROW_BYTES // self.bytes

    @property
    def integer(self) -> bool:
        """Whether the sums are int32."""
        return _KINDS[self.a][2] == "s32"

    @property
    def exact_sums(self) -> bool:
        """Whether a stage's sums are added up in float32 outside the tensor cores, which keep too few bits of them."""
        return self.a.startswith("float8")

    @property
    def register(self) -> str:
        """The dtype of an accumulator's register: int32 sums are held as uint32, as TVM's table of wgmma has them."""
        return "uint32" if self.integer else "float32"

    @property
    def tensor_map(self) -> str:
        """The dtype that TMA is told."""
        return self.a if self.bytes > 1 else "uint8"

    def columns(self, block_n: int) -> int | None:
        """Return N of the instructions that make a tile of `block_n` columns, None where no equal ones do."""
        if not self.integer or block_n <= _INTEGER_COLUMNS_MAX:
            return block_n
        return block_n // 2 if block_n % 32 == 0 else None

    def instruction(self, columns: int) -> str:
        """Return the name of the instruction of so many columns."""
        a, _, sums = _KINDS[self.a]
        step = STEP_BYTES // self.bytes
        return f"wgmma.mma_async.sync.aligned.m64n{columns}k{step}.{sums}.{a}.{_KINDS[self.b][0]}"

    def modifiers(self, *, transposed: bool) -> tuple[int, ...]:
        """Return the operands after the predicate: signs of A and B, and which of them are not rows of K."""
        if self.integer:
            return ()
        return (1, 1, 0, int(not transposed)) if self.bytes > 1 else (1, 1)


def operands_of(a: str, b: str, *, transposed: bool) -> Operands | Refusal:
    """Return the operands of a matmul by the dtypes of A and B, or why wgmma does not multiply them.

    B is [N, K] where `transposed`.
    """
    for dtype in (a, b):
        if dtype not in _KINDS:
            return Refusal(f"the operands are {dtype}, expected one of {', '.join(DTYPES)}")
    if a != b and (_KINDS[a][1:] != _KINDS[b][1:] or _KINDS[a][1] > 1):
        return Refusal(f"the operands are {a} and {b}, which wgmma does not multiply")
    if _KINDS[a][1] == 1 and not transposed:
        return Refusal(f"B of {b} is [K, N], expected [N, K] (8-bit operands of wgmma are rows of K); turn the weight")
    return Operands(a, b)


# Width of a chunk of 16-bit columns -> (TMA's and wgmma's swizzle mode), the widest first.
SWIZZLES = {64: 3, 32: 2, 16: 1}

_TMA_BOX_MAX = 256
# Warps of the producer's warpgroup that make the statistics of a tile's rows, and the tiles that they may be ahead.
STATISTICS_WARPS, STATISTICS_SLOTS = 2, 2
# Consumers -> registers of a thread of a consumer, and of the producer. The file's 65536 hold 168 for each thread of
# three warpgroups when the kernel starts, and no more than those 64512 are shared out again: the producer's give up
# theirs (setmaxnreg), 128 * (2 * 232 + 40) = 64512. With one consumer there is no shortage.
REGISTERS = {2: (232, 40)}
# Registers of a consumer beside its accumulators (addresses, descriptors, the epilogue's values), measured; and more
# where it reads residuals of a symbolic number of rows: 192 accumulators took 1.2 to 1.7 times as long as others then.
_REGISTERS_BESIDE, _ANY_RESIDUAL = 40, 16
# With fewer, the compiler evaluates one element after another; fewer columns at a time leave it registers.
_REGISTERS_TO_EVALUATE = 72
_BATCH, _SMALL_BATCH = 64, 16


@dataclass(frozen=True)
class GemmParameters(Parameters):
    """Tile sizes and roles of one kernel."""

    template: ClassVar[str] = "gemm_sm90"
    loads_boxes: ClassVar[bool] = True

    # Tile of C that a block (with `pingpong`, a warpgroup) makes at a time.
    block_m: int = 128
    block_n: int = among(128, range(16, 257, 16))  # Of wgmma.
    stages: int = among(4, range(2, 25))  # Depth of the ring of tiles in shared memory.
    consumers: int = among(2, (1, 2))  # Warpgroups that compute.
    blocks: int = among(0, NOT_NEGATIVE)  # Thread blocks; each makes every `blocks`-th tile. 0 for a block per tile.
    # Blocks, one cluster, that share the sum over K of a tile: as many as every sm_90 device runs (CUDA C++ Programming
    # Guide 13.0, "Thread Block Clusters").
    split_k: int = among(1, range(1, 9))
    pingpong: bool = False  # Whether two warpgroups take turns to make whole tiles, instead of each a half.
    dependent: bool = False  # Whether the kernel may start before the one before it has ended.
    # Blocks, one cluster, that make tiles one below the other; each loads a part of B for all.
    multicast: int = among(1, (1, 2, 4))
    # Rows of tiles (of clusters of tiles) that are made column by column before the next ones are begun.
    group: int = among(1, POSITIVE)
    # Whether the blocks share the sums of all tiles evenly, wherever in a sum that cuts, instead of making tiles.
    stream_k: bool = added(default=False)


@dataclass(frozen=True)
class GemmPlan:
    """Sizes of one kernel."""

    parameters: GemmParameters  # Parameters of the plan.
    operands: Operands  # Factors of the products.
    columns: int  # N of an instruction: the tile's, or half of them.
    threads: int  # Of a block: the consumers, and a warp or a warpgroup for the producer.
    cluster: int  # Blocks of a cluster.
    # Whether the number of rows is known only when the kernel is called. `tiles_m`, `blocks` and, with them, `tiles`
    # are then of the number that was planned for, and the kernel's own are of `GridSizes`.
    symbolic: bool
    # Rows and columns of tiles of C; with `multicast`, a row is what a cluster makes.
    tiles_m: int
    tiles_n: int
    blocks: int  # Clusters of the grid.
    k_tiles: int  # Tiles of K.
    k_share: int  # Tiles of K that one block sums at most: of a tile, or with `stream_k` of all.
    m_blocks: int  # Instructions of 64 rows a warpgroup needs for its part of a tile.
    groups: int  # Warpgroups that read a stage.
    # Rows of A that are loaded: fewer than the tile's where A has fewer. The instructions then read whatever follows in
    # shared memory as the other rows, and what they make of it is not written.
    rows_a: int
    chunk: int  # Columns of B in one swizzled row of shared memory.
    chunked: bool  # Whether such chunks divide B.
    # Rows of K of B as [K, N] that one block loads at a time: all of a tile's, or its part of the cluster's.
    rows_b: int
    early: int  # Tiles of K of a block's first tile whose B is loaded before the kernel waits for the one before it.
    # Whether warps of the producer's warpgroup make the statistics of a tile's rows, into shared memory.
    statistics_apart: bool
    # Else, whether partial sums of rows stay in registers until the tile's sum is made; they are added up before it
    # where they do not.
    hold_partials: bool
    shares: Shares  # Who writes what of a tile.
    stage_bytes: int  # Of the tiles of A and B in one stage.
    shared_bytes: int  # Of a block's dynamic shared memory.

    @property
    def tiles(self) -> int:
        """Tiles of C, or of clusters of them."""
        return self.tiles_m * self.tiles_n

    @property
    def one_each(self) -> bool:
        """Whether every block makes one tile."""
        return not self.parameters.stream_k and (
            self.parameters.blocks == 0 if self.symbolic else self.blocks == self.tiles
        )

    @property
    def refills(self) -> bool:
        """Whether stages are loaded more than once; where not, multiplications need not be waited for one by one."""
        fewer = self.parameters.blocks > 0 if self.symbolic else self.blocks < self.tiles
        return fewer or self.k_share > self.parameters.stages


def make_plan(
    matmul: MatmulFunction, p: GemmParameters, limits: CudaLimits, *, constant_b: bool = False
) -> GemmPlan | Refusal:
    """Return the sizes of the kernel for a matmul, or why there is none with these parameters.

    `constant_b` tells that no kernel writes B.
    """
    refusal = p.refuse_values() or _refuse_parameters(p)
    if refusal is not None:
        return refusal
    operands = operands_of(matmul.input_dtype, matmul.b_dtype, transposed=matmul.b_transposed)
    if isinstance(operands, Refusal):
        return operands
    instruction_columns = operands.columns(p.block_n)
    if instruction_columns is None:
        return Refusal(f"block_n is {p.block_n}, but neither all nor half of it is an N of wgmma for {operands.a}")
    if p.stream_k and matmul.rows is not None:
        return Refusal("stream_k shares the sums of a known number of tiles, the rows are symbolic")
    block_k = operands.block_k
    k_tiles = math.ceil(matmul.k / block_k)
    tiles_n = math.ceil(matmul.n / p.block_n)
    tiles_m = math.ceil(matmul.m / (p.block_m * p.multicast))
    tiles = tiles_m * tiles_n
    blocks = min(p.blocks or tiles, tiles * k_tiles if p.stream_k else tiles)
    k_share = math.ceil(tiles * k_tiles / blocks) if p.stream_k else math.ceil(k_tiles / p.split_k)
    if k_share * (p.split_k - 1) >= k_tiles:
        return Refusal(f"split_k is {p.split_k}, K has {k_tiles} tiles of {block_k}: a block would have none")
    groups = 1 if p.pingpong else p.consumers
    m_blocks = p.block_m // 64 // groups
    threads = p.consumers * WARPGROUP + (WARPGROUP if p.consumers > 1 else 32)
    # Sums of a stage, and of all stages where those are added up apart.
    accumulators = m_blocks * p.block_n // 2 * (2 if operands.exact_sums else 1)
    registers = REGISTERS[p.consumers][0] if p.consumers in REGISTERS else limits.registers_per_thread
    # A single consumer has one warp beside it, of which one thread loads.
    apart = matmul.norm is not None and p.consumers > 1 and not p.stream_k
    partials = 0 if matmul.norm is None or apart else statistics_registers(matmul.norm, m_blocks)
    any_residual = matmul.rows is not None and bool(residual_loads(matmul))
    beside = _REGISTERS_BESIDE + (_ANY_RESIDUAL if any_residual else 0)
    hold_partials = accumulators + beside + partials <= registers
    beside += partials if hold_partials else 0
    if accumulators + beside > registers:
        return Refusal(f"{accumulators} accumulators a thread beside {beside} registers, {registers} exist")
    each = matmul.epilogue.accumulators
    unit = share_unit(matmul)
    if p.block_n % (unit * each):
        return Refusal(f"block_n is {p.block_n}, expected whole groups of {unit * each} columns")
    columns = unit * math.ceil(p.block_n // (unit * each) / p.split_k)
    held = residual_registers(matmul, m_blocks, columns)
    shares = Shares(
        warps=4 * p.consumers,
        m_blocks=m_blocks,
        columns=columns,
        prefetched=accumulators + held + beside <= registers,
        accumulators=each,
        batch=_BATCH if m_blocks * p.block_n // 2 + _REGISTERS_TO_EVALUATE <= registers else _SMALL_BATCH,
    )
    rows_a = loaded_rows(matmul.m, p)
    stage_bytes = (rows_a + p.block_n) * ROW_BYTES
    partial_bytes = p.block_m * p.block_n * 4 if p.split_k > 1 else 0
    total = max(p.stages * stage_bytes, partial_bytes) + shared_bytes(matmul, shares) + 8 * (2 * p.stages + 2)
    total += STATISTICS_SLOTS * (4 * COUNT * p.block_m + 2 * 8) if apart else 0
    # The widest that divides the tile.
    chunk = next(width for width in SWIZZLES if p.block_n % width == 0)
    least = min(k_tiles, k_share) if p.stream_k else k_tiles - k_share * (p.split_k - 1)
    return refuse_shared(total, limits) or GemmPlan(
        parameters=p,
        operands=operands,
        columns=instruction_columns,
        threads=threads,
        cluster=p.split_k * p.multicast,
        symbolic=matmul.rows is not None,
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        blocks=blocks,
        k_tiles=k_tiles,
        k_share=k_share,
        m_blocks=m_blocks,
        groups=groups,
        rows_a=rows_a,
        chunk=chunk,
        chunked=matmul.n % chunk == 0,
        rows_b=block_k // p.multicast,
        early=min(p.stages, least) if p.dependent and constant_b else 0,
        statistics_apart=apart,
        hold_partials=hold_partials,
        shares=shares,
        stage_bytes=stage_bytes,
        shared_bytes=total,
    )


def loaded_rows(rows: int, p: GemmParameters) -> int:
    """Return how many rows of A a stage holds: whole swizzle atoms of 8 rows.

    With symbolic rows, the planned number is an upper bound, or at least one tile.
    """
    rows = 8 * math.ceil(rows / 8)
    # Reads beyond the last stage of A end in the stages of B.
    return rows if rows < p.block_m <= rows + p.stages * p.block_n else p.block_m


def _refuse_parameters(p: GemmParameters) -> Refusal | None:
    rows = 64 if p.pingpong else 64 * p.consumers
    if p.block_m < 64 or p.block_m % rows or p.block_m > _TMA_BOX_MAX:
        return Refusal(f"block_m is {p.block_m}, expected a multiple of {rows} up to {_TMA_BOX_MAX}")
    if p.pingpong and p.consumers != 2:
        return Refusal(f"pingpong has {p.consumers} consumers, expected 2")
    if p.split_k > 1 and (p.pingpong or p.blocks):
        return Refusal("split_k does not go with pingpong or a fixed number of blocks")
    if p.multicast > 1 and (p.split_k > 1 or p.block_n // p.multicast % 8):
        return Refusal(f"multicast does not go with split_k, nor with parts of {p.block_n} columns that are no eights")
    if p.stream_k and not p.blocks:
        return Refusal("stream_k has no number of blocks to share the sums")
    if p.stream_k and (p.pingpong or p.split_k > 1 or p.multicast > 1):
        return Refusal("stream_k does not go with pingpong, split_k or multicast")
    return None
