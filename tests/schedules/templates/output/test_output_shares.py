from __future__ import annotations

from dataclasses import replace

import pytest

from relaxtune.schedules.templates.output.output_shares import (
    Shares,
    column_loads,
    has_vectors,
    patch_dtypes,
    residual_loads,
    residual_registers,
    row_loads,
    share_unit,
    shared_bytes,
)
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.schedules.templates.matmul_cases import MatmulCase

PLAIN = MatmulCase((128,), 256, 64)
SHARES = Shares(warps=4, m_blocks=1, columns=128, prefetched=False)


def recognised(case: MatmulCase) -> MatmulFunction:
    found = recognise_matmul(case.func())
    assert isinstance(found, MatmulFunction), found
    return found


@pytest.mark.parametrize(
    ("columns", "chunks"), [(32, [(0, 32)]), (128, [(0, 64), (64, 64)]), (80, [(0, 64), (64, 16)])]
)
def test_chunks_cover_the_columns_once(columns: int, chunks: list[tuple[int, int]]) -> None:
    assert list(replace(SHARES, columns=columns).chunks) == chunks


def test_reads_of_the_epilogue_are_told_apart() -> None:
    matmul = recognised(replace(PLAIN, epilogue=("bias", "gelu", "row_scale", "residual")))
    named = [[str(load.source.name) for load in loads] for loads in (column_loads(matmul), row_loads(matmul))]
    assert named == [["bias"], ["scale"]]
    assert [str(load.source.name) for load in residual_loads(matmul)] == ["residual"]


def test_a_residual_of_the_outputs_dtype_shares_its_patch() -> None:
    assert patch_dtypes(recognised(replace(PLAIN, epilogue=("residual",)))) == ["float16"]
    assert patch_dtypes(recognised(replace(PLAIN, epilogue=("residual",), output="float32"))) == ["float32", "float16"]


def test_rows_that_do_not_start_at_vectors_have_none() -> None:
    narrow = recognised(replace(PLAIN, n=252, epilogue=("residual",)))
    assert not has_vectors(narrow, "float16")
    assert has_vectors(narrow, "float32")
    assert residual_loads(narrow) == []
    assert patch_dtypes(narrow) == ["float16"]


def test_a_warp_writes_whole_instructions_or_whole_vectors() -> None:
    assert share_unit(recognised(PLAIN)) == 8
    bytes_out = MatmulCase((128,), 256, 64, ("requantised",), "int8", "int8", accumulator="int32")
    assert share_unit(recognised(bytes_out)) == 16


def test_memory_and_registers_are_those_of_the_tile() -> None:
    plain = recognised(PLAIN)
    # Each of 4 warps has a patch of 16 rows of 64 columns and 8 more, of 2 bytes.
    assert shared_bytes(plain, SHARES) == 4 * 16 * (64 + 8) * 2 + 128
    biased = recognised(replace(PLAIN, epilogue=("bias",)))
    assert shared_bytes(biased, SHARES) == shared_bytes(plain, SHARES) + 128 * 4 + 128
    # 16 rows of 128 columns of 2 bytes, over 32 lanes of 4 bytes.
    assert residual_registers(plain, 1, 128) == 0
    assert residual_registers(recognised(replace(PLAIN, epilogue=("residual",))), 1, 128) == 32
