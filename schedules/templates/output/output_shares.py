"""How a tile of a matmul's output is written: the share of each warp, and the kinds of tensors that the epilogue reads.

The code is `schedules.templates.output.output_tile`'s, whose docstring says how each kind is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tvm.ir.expr import TensorLoad

from relaxtune.schedules.tir.blocks import element_bytes
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.expressions import dtype_of
from relaxtune.schedules.tir.rotated_matmul import HEAD_UNIT

PATCH_WIDTH_MAX = 64
# Elements after each row of a patch: rows then start in different banks (2-byte pairs and 4-byte pairs alike), and of
# 1-byte elements at multiples of 16 bytes.
_PATCH_PAD, _BYTE_PATCH_PAD = 8, 16
VECTOR_BYTES = 16
# Elements of the output and of what the epilogue reads that are moved in pairs and vectors; more of integer sums.
_PAIRED = ("float16", "bfloat16", "float32")
_PAIRED_INTEGERS = ("int32", "int8", "uint8")


@dataclass(frozen=True)
class Shares:
    """How much of a tile is written by whom."""

    warps: int  # Warps that write.
    m_blocks: int  # Times 16 rows, `row_step` apart, which a warp writes.
    columns: int  # Columns that a warp writes of each row: a multiple of `share_unit`.
    prefetched: bool  # Whether residuals are read before the sum is made.
    accumulators: int = 1  # Columns of the product that a column is made of: 1, or 2 that are 8 apart.
    # Columns that are evaluated side by side: a multiple of 8. Many hide latencies, and take registers.
    batch: int = PATCH_WIDTH_MAX
    row_step: int = 64  # From the first row of a warp's 16 rows to the first of its next ones.
    group_warps: int = 4  # Warps, one after another, that write the same columns; they share copies of row vectors.

    @property
    def width(self) -> int:
        """Columns of a patch."""
        return min(self.columns, PATCH_WIDTH_MAX)

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Start and width of the parts that go through a patch at a time."""
        return tuple((s, min(self.width, self.columns - s)) for s in range(0, self.columns, self.width))


def share_unit(matmul: MatmulFunction) -> int:
    """Return the unit of columns: a warp writes a multiple of it.

    They are a group of partial sums; else an instruction's 8, or where heads are rotated both 8 that are rotated
    together, or a vector of 16 single bytes.
    """
    if matmul.partials is not None:
        return int(matmul.partials.group)
    least = HEAD_UNIT if matmul.epilogue.head else 8
    return max(least, *(VECTOR_BYTES // size for size, _ in _moved(matmul)[0]))


def shared_bytes(matmul: MatmulFunction, shares: Shares) -> int:
    """Return the shared memory that `OutputTile` allocates, at most."""
    patches, columns, _ = _moved(matmul)
    patch_bytes = 16 * sum((shares.width + pad) * size for size, pad in patches)
    column_bytes = shares.columns * sum(columns)
    copies = shares.warps // shares.group_warps * column_bytes
    return shares.warps * patch_bytes + copies + 128 * (len(patches) + len(columns))


def residual_registers(matmul: MatmulFunction, m_blocks: int, columns: int) -> int:
    """Return the registers a thread needs to hold its part of every residual, and of the tables of heads."""
    return m_blocks * 16 * columns * _moved(matmul)[2] // (32 * 4)


# Plans of a matmul, of which there are hundreds, ask the same.
@lru_cache(maxsize=64)
def _moved(matmul: MatmulFunction) -> tuple[list[tuple[int, int]], list[int], int]:
    """Return bytes of an element of each patch, with elements after its rows; of each copied column; of all else."""
    held = (*residual_loads(matmul), *head_tables(matmul))
    return (
        [(element_bytes(dtype), patch_pad(dtype)) for dtype in patch_dtypes(matmul)],
        [element_bytes(dtype_of(load)) for load in column_loads(matmul)],
        sum(element_bytes(dtype_of(load)) for load in held),
    )


def residual_loads(matmul: MatmulFunction) -> list[TensorLoad]:
    """Return the loads at the output's own position that are made 16 bytes at a time."""
    paired = _paired(matmul)
    return [
        load
        for load in matmul.epilogue.aligned_loads
        if dtype_of(load) in paired and has_vectors(matmul, dtype_of(load))
    ]


def has_vectors(matmul: MatmulFunction, dtype: str) -> bool:
    """Whether the rows of a matrix like the output start at multiples of 16 bytes."""
    return matmul.columns * element_bytes(dtype) % VECTOR_BYTES == 0


def column_loads(matmul: MatmulFunction) -> list[TensorLoad]:
    """Return the loads of one element a column that are made from a copy."""
    paired = _paired(matmul)
    return [load for load in matmul.epilogue.column_loads if dtype_of(load) in paired]


def _paired(matmul: MatmulFunction) -> tuple[str, ...]:
    return (*_PAIRED, *_PAIRED_INTEGERS) if matmul.sums == "int32" else _PAIRED


def patch_pad(dtype: str) -> int:
    """Return the elements after each row of a patch."""
    return _BYTE_PATCH_PAD if element_bytes(dtype) == 1 else _PATCH_PAD


def row_loads(matmul: MatmulFunction) -> list[TensorLoad]:
    """Return the loads of one element a row that are made once, before the sum."""
    return [
        load
        for load in matmul.epilogue.loads()
        if matmul.epilogue.is_per_row(load) and not (matmul.norm and load.source.same_as(matmul.norm.buffer))
    ]


def head_tables(matmul: MatmulFunction) -> list[TensorLoad]:
    """Return the loads of tables of a head's columns."""
    if not matmul.epilogue.head:
        return []
    return [load for load in matmul.epilogue.loads() if not (matmul.norm and load.source.same_as(matmul.norm.buffer))]


def patch_dtypes(matmul: MatmulFunction) -> list[str]:
    """Return the dtypes of the patches, the output's first.

    The first residual of the output's dtype shares its patch: each lane reads a pair, then writes the same place.
    """
    dtypes = [dtype_of(load) for load in residual_loads(matmul)]
    if matmul.output_dtype in dtypes:
        dtypes.remove(matmul.output_dtype)
    return [matmul.output_dtype, *dtypes]
