from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tvm.s_tir import Schedule

from relaxtune.schedules.cpu.contraction import choose_tile, find_matmul
from relaxtune.schedules.cpu.packing import pack_weight, panel_width
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.search.space import list_designs
from relaxtune.schedules.targets import CpuLimits
from relaxtune.schedules.tir.scheduled_blocks import list_blocks
from tests.schedules.kernel_cases import check, host, loop_kinds, odd_shapes, packed_matmul_case, run
from tests.schedules.search.test_space import candidates


@pytest.mark.parametrize(("rows", "columns", "width"), [(3, 32, 16), (5, 37, 16), (1, 1, 48)])
def test_pack_keeps_every_element_and_fills_the_last_panel_with_zeros(rows, columns, width):
    weight = np.arange(1.0, rows * columns + 1, dtype="float32").reshape(rows, columns)
    packed = pack_weight(weight, width)
    assert packed.shape == (-(-columns // width), rows, width)
    assert packed.flags.c_contiguous
    unpacked = packed.transpose(1, 0, 2).reshape(rows, -1)
    np.testing.assert_array_equal(unpacked[:, :columns], weight)
    assert not unpacked[:, columns:].any()


@odd_shapes
def test_packed_matmul_matches_numpy_when_shapes_do_not_fit_the_tile(m, n, k, epilogue):
    assert run(packed_matmul_case(m, n, k, epilogue=epilogue)) == "cpu-matmul"


@pytest.mark.quick_cases("None-101", "3-96")
@pytest.mark.parametrize("n", [96, 101])
@pytest.mark.parametrize("batch", [None, 3])
def test_packed_matmul_matches_numpy_when_rows_are_symbolic(n, batch):
    assert run(packed_matmul_case(37, n, 20, batch=batch, epilogue="gelu", symbolic="m")) == "cpu-any-size-matmul"


@pytest.mark.slow
@given(m=st.integers(1, 40), n=st.integers(1, 150), k=st.integers(1, 40), width=st.sampled_from([16, 32, 48, 64, 112]))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_packed_matmul_matches_numpy_when_shapes_and_panels_are_drawn(m, n, k, width):
    run(packed_matmul_case(m, n, k, width=width, epilogue="bias"))


@pytest.mark.parametrize(("m", "n"), [(1, 768), (8, 768), (128, 768), (197, 64), (128, 50257), (None, 768)])
@pytest.mark.parametrize(("vector_bytes", "registers"), [(64, 32), (32, 16), (16, 32)])
def test_panel_is_as_wide_as_a_tile_that_fits_the_register_file(m, n, vector_bytes, registers):
    limits = CpuLimits(vector_bytes, 2, registers)
    width = panel_width(m, n, "float32", limits)
    symbolic = "m" if m is None else ""
    con = find_matmul(list_blocks(Schedule(packed_matmul_case(m or 8, n, 4, width=width, symbolic=symbolic).module))[0])
    tile = choose_tile(con, limits)
    assert con.panel == tile.columns == width
    assert tile.rows * tile.vectors + tile.vectors + 1 <= registers


def test_schedule_uses_cores_vectors_and_registers_and_copies_no_operand():
    module = apply_fallback(packed_matmul_case(64, 768, 64, epilogue="bias").module, host().target)
    assert loop_kinds(module) >= {"parallel", "vectorized", "unrolled"}
    script = module.script(show_meta=False)
    assert 'scope="local"' in script
    assert script.count("sblock_alloc_buffer") == 1


@pytest.mark.parametrize(
    "case",
    [packed_matmul_case(32, 96, 24, epilogue="bias"), packed_matmul_case(13, 101, 8, epilogue="gelu")],
    ids=["fits", "cropped"],
)
def test_candidates_of_a_packed_matmul_are_right_when_decisions_are_drawn(case):
    for module in candidates(case, per_design=2):
        check(case, module, host().target)
        assert loop_kinds(module) >= {"vectorized", "unrolled"}


def test_designs_of_a_packed_matmul_pack_nothing_again():
    designs = list_designs(packed_matmul_case(64, 96, 24).module, host().target)
    assert len(designs) >= 3
    assert not any("packed_global" in design.mod.script(show_meta=False) for design in designs)
