"""The machine code of kernels for few rows, without a GPU: tensor-core instructions, wide loads, no spills."""

from __future__ import annotations

import struct

import pytest
import tvm

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import Parameters, Template
from relaxtune.schedules.templates.gemv.plan import GemvParameters, GemvStreamParameters
from relaxtune.schedules.templates.gemv.template import Gemv, GemvStream
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from tests.schedules.templates.cubin import LOCAL_LOAD, LOCAL_STORE, MMA_SYNC, captured_cubins, kernel_code, read_cubin
from tests.schedules.templates.gemv_cases import CASES, GemvCase

HOPPER = resolve_target("cuda:sm_90a")
# Low 12 bits of a 16-byte instruction, as nvdisasm 13.0 prints them: LDG, and griddepcontrol's wait.
LOAD, WAIT = 0x981, 0x82E
# BAR; BRA.
BARRIER, JUMP = 0xB1D, 0x947
# HADD2 and HFMA2 with a constant.
HALVES = (0x430, 0x431)
# LDGSTS; LOP3 with an immediate; SHF; PRMT.
COPY, LOGIC, SHIFT, PERMUTE = 0xFAE, 0x812, 0x819, 0x816


def cubin_of(
    case: GemvCase,
    parameters: Parameters | None = None,
    template: Template | None = None,
    target: ResolvedTarget = HOPPER,
) -> bytes:
    func, template = case.func(), template or Gemv()
    if parameters is None:
        found = template.candidates(func, target)
        assert not isinstance(found, Refusal)
        parameters = found[0]
    kernel = template.apply(func, target, parameters)
    assert not isinstance(kernel, Refusal), kernel
    with captured_cubins(target.arch) as cubins:
        module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
        tvm.tirx.build(module, target=target.target, pipeline=register_mixed_pipeline())
    (cubin,) = cubins
    return cubin


@pytest.mark.parametrize("name", ["16 rows, ragged", "one row, bfloat16", "8 bits", "4 bits, 9 rows, gated"])
def test_kernels_multiply_with_tensor_cores_and_spill_nothing(name: str) -> None:
    facts = read_cubin(cubin_of(CASES[name]))
    assert facts.count(MMA_SYNC) > 0
    assert facts.frame_bytes == 0
    assert facts.count(LOCAL_LOAD) == facts.count(LOCAL_STORE) == 0


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize(("bits", "instructions"), [(16, 2), (8, 4), (4, 8)])
def test_a_load_of_each_row_feeds_as_many_products_as_it_has_weights(
    bits: int, instructions: int, staged: bool
) -> None:
    case = GemvCase(rows=(1,), n=4096, k=128 * 8 * 2, bits=bits)
    facts = read_cubin(cubin_of(case, GemvParameters(tiles=1, warps=8, unroll=1, staged=staged, dependent=False)))
    # The first step, and the loop over the others.
    assert facts.count(MMA_SYNC) in (instructions, 2 * instructions)


def test_the_first_weights_are_read_before_the_wait_where_they_are_constant() -> None:
    """Weights do not depend on the kernel before, x does."""

    def loads_before_the_wait(func_case: GemvCase, constant: bool) -> int:
        func = func_case.func()
        if not constant:
            func = func.without_attr("relaxtune.constant_params")
        kernel = Gemv().apply(func, HOPPER, GemvParameters(tiles=1, warps=4, unroll=2, dependent=True))
        assert not isinstance(kernel, Refusal)
        with captured_cubins("sm_90a") as cubins:
            module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
            tvm.tirx.build(module, target=HOPPER.target, pipeline=register_mixed_pipeline())
        code = kernel_code(cubins[0])
        opcodes = [struct.unpack_from("<H", code, at)[0] & 0xFFF for at in range(0, len(code), 16)]
        return opcodes[: opcodes.index(WAIT)].count(LOAD)

    case = GemvCase(n=512, k=1024, bits=4)
    # Two steps of two rows: words and scales.
    assert loads_before_the_wait(case, constant=True) == 8
    assert loads_before_the_wait(case, constant=False) == 0


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_loads_of_weights_stay_in_flight_where_no_wait_holds_them(arch: str, rows: int) -> None:
    """ptxas would put each load before its product, to save registers: 5 were in flight."""
    case = GemvCase(rows=(rows,), n=4096, k=2048)
    parameters = GemvParameters(tiles=2, warps=8, unroll=8, staged=False)
    facts = read_cubin(cubin_of(case, parameters, target=resolve_target(f"cuda:{arch}")))
    # Eight steps of four rows, and some of x.
    assert facts.opcodes[: facts.opcodes.index(MMA_SYNC)].count(LOAD) > 32
    assert facts.frame_bytes == facts.count(LOCAL_LOAD) == facts.count(LOCAL_STORE) == 0


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 16])
def test_streaming_kernels_spill_nothing(bits: int, rows: int) -> None:
    facts = read_cubin(cubin_of(GemvCase(rows=(rows,), n=8192, k=2048, bits=bits), template=GemvStream()))
    assert facts.count(MMA_SYNC) > 0
    assert facts.frame_bytes == 0
    assert facts.count(LOCAL_LOAD) == facts.count(LOCAL_STORE) == 0


def test_a_streaming_kernel_asks_for_weights_and_scales_before_the_wait() -> None:
    case = GemvCase(n=8192, k=2048, bits=4)
    code = kernel_code(cubin_of(case, GemvStreamParameters(1, 16, 2, 132, True), GemvStream()))
    opcodes = [struct.unpack_from("<H", code, at)[0] & 0xFFF for at in range(0, len(code), 16)]
    # Two steps of two rows, and their scales.
    assert opcodes[: opcodes.index(WAIT)].count(COPY) == 6


@pytest.mark.parametrize(("steps", "levels"), [(2, True), (4, False)])
def test_unpacking_four_bits_takes_five_logic_instructions_for_eight_weights(steps: int, levels: bool) -> None:
    """One shift and four masks; what puts x into pairs is outside the loop over rows."""
    case = GemvCase(n=8192, k=128 * 16 * steps, bits=4)
    facts = read_cubin(cubin_of(case, GemvStreamParameters(1, 16, 4, 132, True), GemvStream()))
    words = steps * 8
    # The sums of x take as many as the products of a tile, once; with 4 steps there are no registers for them.
    assert facts.count(MMA_SYNC) == (2 * words if levels else words)
    # Indices and guards take some too.
    assert 4 * words <= facts.count(LOGIC) <= 4 * words + 32
    assert words <= facts.count(SHIFT) <= words + 10
    assert facts.count(PERMUTE) <= 16 * steps + 8


def test_x_is_asked_for_before_the_steps_that_are_not_early() -> None:
    case = GemvCase(n=8192, k=2048, bits=4)
    code = kernel_code(cubin_of(case, GemvStreamParameters(1, 16, 4, 132, True, early=1), GemvStream()))
    opcodes = [struct.unpack_from("<H", code, at)[0] & 0xFFF for at in range(0, len(code), 16)]
    wait = opcodes.index(WAIT)
    # A step of two rows, and their scales.
    assert opcodes[:wait].count(COPY) == 3
    assert wait < opcodes.index(LOAD) < wait + opcodes[wait:].index(COPY)


@pytest.mark.parametrize("collected", [False, True])
def test_warps_wait_for_each_other_once_where_sums_are_collected(collected: bool) -> None:
    case = GemvCase(n=8192, k=2048, bits=4)
    code = kernel_code(cubin_of(case, GemvStreamParameters(1, 16, 2, 132, True, 0, collected), GemvStream()))
    opcodes = [struct.unpack_from("<H", code, at)[0] & 0xFFF for at in range(0, len(code), 16)]
    # Where a jump leads to, relative to it, begins in its second word.
    back = [n for n, one in enumerate(opcodes) if one == JUMP and struct.unpack_from("<i", code, 16 * n + 4)[0] < 0]
    assert opcodes.count(BARRIER) == 1
    # Behind the loop over tiles, or within it.
    assert (opcodes.index(BARRIER) > back[0]) == collected


def halves_in_a_kernel(k: int) -> int:
    parameters = GemvStreamParameters(1, 16, 2, 132, True)
    facts = read_cubin(cubin_of(GemvCase(n=8192, k=k, bits=4), parameters, GemvStream()))
    return sum(facts.count(opcode) for opcode in HALVES)


def test_levels_are_multiplied_as_they_lie_where_there_are_registers() -> None:
    """Between a load of weights and its products there is no arithmetic in halves: else it takes 4 for 8 weights."""
    assert halves_in_a_kernel(k=128 * 16 * 2) == 0
    assert halves_in_a_kernel(k=128 * 16 * 4) == 4 * 8 * 4
