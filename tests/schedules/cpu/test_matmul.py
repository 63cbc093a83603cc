from __future__ import annotations

import math

import numpy as np
import pytest
import tvm_ffi
from hypothesis import given, settings, strategies as st
from tvm import te, tirx
from tvm.s_tir import SBlock, Schedule, transform

from relaxtune.schedules.cpu.contraction import choose_tile, find_matmul
from relaxtune.schedules.cpu.tiling import contraction_rule, find_tiled_matmul
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.scheduled_blocks import list_blocks
from tests.schedules.kernel_cases import Case, host, loop_kinds, matmul_case, odd_shapes, prim_func, rows_case, run


@odd_shapes
def test_matmul_matches_numpy_when_shapes_do_not_fit_the_tile(m, n, k, epilogue):
    assert run(matmul_case(m, n, k, epilogue=epilogue)) == "cpu-matmul"


@pytest.mark.parametrize(("m", "n", "k"), [(5, 48, 7), (16, 19, 33), (1, 64, 16)])
@pytest.mark.parametrize("batch", [None, 3])
def test_matmul_matches_numpy_when_right_operand_is_transposed(m, n, k, batch):
    assert run(matmul_case(m, n, k, batch=batch, transposed=True, epilogue="bias")) == "cpu-matmul"


def test_row_times_a_matrix_of_any_columns_along_the_sum_is_not_packed():
    assert run(matmul_case(1, 53, 64, batch=3, transposed=True, epilogue="bias", symbolic="n")) != "cpu-matmul"


@pytest.mark.quick_cases("m-None-False", "k-3-False", "mnk-3-True")
@pytest.mark.parametrize(
    ("symbolic", "batch", "transposed"),
    [
        ("m", None, False),
        ("n", None, True),
        ("k", 3, False),
        ("mk", None, True),
        ("mn", 3, False),
        ("mnk", 3, True),
    ],
)
def test_matmul_matches_numpy_when_axes_are_symbolic(symbolic, batch, transposed):
    case = matmul_case(37, 53, 20, batch=batch, transposed=transposed, epilogue="gelu", symbolic=symbolic)
    # A right operand that is not contiguous along the columns is packed first.
    assert run(case) == ("cpu-matmul" if transposed else "cpu-any-size-matmul")


@pytest.mark.parametrize("shape", [(10, 24), (70, 24), (8, 31), (5, 24), (8, 20)])
@pytest.mark.parametrize("symbolic", ["", "m"])
def test_matmul_matches_numpy_when_its_reader_pads_or_cuts_it(shape, symbolic):
    case = matmul_case(8, 24, 32, symbolic=symbolic)
    *inputs, product = case.func.params
    m, n = product.shape
    rows, columns = shape if not symbolic else (m + (shape[0] - 8), shape[1])
    a, b = (te.placeholder(p.shape, "float32", name=p.name) for p in inputs)
    k = te.reduce_axis((0, 32), "k")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    whole = shape[0] <= 8 and shape[1] <= 24
    out = te.compute(
        (rows, columns),
        lambda i, j: c[i, j] if whole else tirx.if_then_else(tirx.all(i < m, j < n), c[i, j], tirx.const(0.0)),
        name="reader",
    )
    (product,) = case.expected
    want = np.zeros(shape, "float32")
    want[:8, :24] = product[: shape[0], : shape[1]]
    run(Case(prim_func([a, b, out]), case.inputs, [want], case.rtol, case.atol))


@given(m=st.integers(1, 40), n=st.integers(1, 70), k=st.integers(1, 40), epilogue=st.sampled_from(["none", "gelu"]))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_matmul_matches_numpy_when_shapes_are_drawn(m, n, k, epilogue):
    run(matmul_case(m, n, k, epilogue=epilogue))


def test_matmul_matches_numpy_when_elements_are_float16():
    case = matmul_case(9, 40, 16, dtype="float16")
    case.rtol = case.atol = 2e-2
    assert run(case) == "cpu-matmul"


def test_matmul_keeps_accumulators_in_registers_and_uses_cores_and_vectors_when_shapes_fit():
    module = apply_fallback(matmul_case(128, 768, 64, epilogue="bias").module, host().target)
    assert loop_kinds(module) >= {"parallel", "vectorized", "unrolled"}
    assert 'scope="local"' in module.script(show_meta=False)


def test_matmul_runs_serially_when_work_is_small():
    module = apply_fallback(matmul_case(4, 16, 4).module, host().target)
    assert "parallel" not in loop_kinds(module)


@pytest.mark.parametrize(("m", "n"), [(1, 768), (8, 768), (128, 768), (197, 64), (128, 128), (50, 50257)])
@pytest.mark.parametrize(("vector_bytes", "registers"), [(64, 32), (32, 16), (16, 32)])
def test_tile_fits_the_register_file_when_chosen(m, n, vector_bytes, registers):
    schedule = Schedule(matmul_case(m, n, 8).module)
    con = find_matmul(list_blocks(schedule)[0])
    tile = choose_tile(con, CpuLimits(vector_bytes, 2, registers))
    assert tile.rows * tile.vectors + tile.vectors + 1 <= registers
    assert tile.lanes == vector_bytes // 4
    assert tile.rows <= m


def test_scratch_memory_stays_within_the_second_cache_when_the_operand_is_packed():
    case = matmul_case(64, 768, 768, transposed=True)
    limits = host().limits
    con = find_matmul(list_blocks(Schedule(case.module))[0])
    panel_bytes = choose_tile(con, limits).columns * 768 * 4
    lowered = transform.PlanAndUpdateBufferAllocationLocation()(apply_fallback(case.module, host().target))
    lowered = transform.CompactBufferAllocation()(
        transform.ConvertBlocksToOpaque()(transform.LowerInitBlock()(lowered))
    )
    scratch = sum(_bytes(buffer) for buffer in _allocated(lowered["main"]))
    assert panel_bytes <= scratch <= panel_bytes + 16 * 1024
    assert scratch <= (limits.l2_bytes or 1 << 20)


def _allocated(func):
    buffers = []
    tvm_ffi.structural_walk(func.body, (SBlock, lambda block: buffers.extend(block.alloc_buffers)))
    return buffers


def _bytes(buffer):
    return math.prod(int(axis) for axis in buffer.shape) * 4


def test_matmul_rule_passes_when_there_is_no_single_product():
    rule = contraction_rule(find_tiled_matmul)
    assert rule(rows_case("softmax", 4, 8).module["main"], host().target) is None
    assert rule(rows_case("sum", 4, 8).module["main"], host().target) is None
