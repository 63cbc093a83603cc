"""The machine code of kernels for rows and elements, without a GPU: wide accesses, no spills, loads after the wait."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import tvm

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.base import Parameters, Template
from relaxtune.schedules.templates.lowering import register_mixed_pipeline
from relaxtune.schedules.templates.rows.elementwise import Elementwise, ElementwiseParameters
from relaxtune.schedules.templates.rows.kernel import RowsParameters
from relaxtune.schedules.templates.rows.template import Rows
from tests.schedules.templates import memory_cases as cases
from tests.schedules.templates.cubin import LOCAL_LOAD, LOCAL_STORE, captured_cubins, kernel_code, read_cubin
from tests.schedules.templates.memory_cases import MemoryCase

# Low 12 bits of a 16-byte instruction, as nvdisasm 13.0 prints them for sm_80 and sm_90.
LOAD, STORE = 0x981, 0x986
# griddepcontrol's launch_dependents and wait.
LAUNCH_DEPENDENTS, WAIT = 0x82D, 0x82E
# Bits 73 to 75: 6 is 128 bits.
BITS_128 = 6

CASES = {
    "layer norm": (
        Rows(),
        cases.layer_norm((4096, 768), residual=True),
        RowsParameters(8, 32, 4, dependent=True),
        96,
        (12, 3),
    ),
    "small layer norm": (Rows(), cases.layer_norm((128, 768)), RowsParameters(8, 96, 1, dependent=True), 48, (3, 1)),
    "softmax": (Rows(), cases.softmax((4096, 1024)), RowsParameters(8, 32, 4, dependent=True), 96, (4, 4)),
    "long softmax": (Rows(), cases.softmax((64, 32000)), RowsParameters(8, 1024, 1, dependent=True), 64, (4, 4)),
    "rms norm": (
        Rows(),
        cases.rms_norm((128, 2048), "bfloat16"),
        RowsParameters(8, 128, 1, dependent=True),
        72,
        (4, 2),
    ),
    "gelu": (Elementwise(), cases.bias_gelu((4096, 3072)), ElementwiseParameters(8, 2, 256, True), 64, (4, 2)),
    "gather": (Elementwise(), cases.embedding(4096, 768, 30522), ElementwiseParameters(8, 2, 256, True), 64, (4, 2)),
    "rotary": (Elementwise(), cases.rotary(1, 128, 12, 64), ElementwiseParameters(8, 1, 256, True), 64, (7, 1)),
}
every_case = pytest.mark.parametrize(
    ("template", "case", "parameters", "registers_max", "wide"), CASES.values(), ids=CASES.keys()
)


def compiled(template: Template, case: MemoryCase, parameters: Parameters, arch: str) -> bytes:
    target, func = resolve_target(f"cuda:{arch}"), case.func()
    # The last input is a weight.
    kernel = template.apply(func.with_attr(CONSTANT_PARAMS_ATTR, [len(func.params) - 2]), target, parameters)
    assert not isinstance(kernel, Refusal)
    mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    with captured_cubins(arch) as cubins:
        tvm.tirx.build(mod, target=target.target, pipeline=register_mixed_pipeline())
    (data,) = cubins
    return data


def instructions(cubin: bytes) -> list[tuple[int, int]]:
    """Return opcode and width of access of every instruction."""
    words = struct.iter_unpack("<QQ", kernel_code(cubin))
    return [(low & 0xFFF, high >> 9 & 7) for low, high in words]


@every_case
def test_accesses_are_of_16_bytes_and_nothing_spills(
    template: Template, case: MemoryCase, parameters: Parameters, registers_max: int, wide: tuple[int, int]
) -> None:
    data = compiled(template, case, parameters, "sm_90a")
    found = instructions(data)
    assert (found.count((LOAD, BITS_128)), found.count((STORE, BITS_128))) == wide
    # Nothing but ids is read otherwise.
    assert sum(opcode == LOAD for opcode, _ in found) - wide[0] == (2 if "ids" in str(case.func()) else 0)
    assert sum(opcode == STORE for opcode, _ in found) == wide[1]
    cubin = read_cubin(data)
    assert cubin.count(LOCAL_LOAD) == cubin.count(LOCAL_STORE) == cubin.frame_bytes == 0
    assert cubin.registers <= registers_max


@every_case
def test_only_constants_are_read_before_the_wait(
    template: Template, case: MemoryCase, parameters: Parameters, registers_max: int, wide: tuple[int, int]
) -> None:
    opcodes = [opcode for opcode, _ in instructions(compiled(template, case, parameters, "sm_90a"))]
    assert opcodes.count(LAUNCH_DEPENDENTS) == opcodes.count(WAIT) == 1
    wait = opcodes.index(WAIT)
    assert opcodes.index(LAUNCH_DEPENDENTS) < wait < opcodes.index(STORE)
    only_one_input = len(case.func().params) == 2
    before, after = opcodes[:wait].count(LOAD), opcodes[wait:].count(LOAD)
    assert (before > 0, after > 0) == ((True, False) if only_one_input else (True, True))


def test_row_that_is_not_held_is_read_for_each_pass() -> None:
    parameters = RowsParameters(8, 512, 1, held=False, dependent=True)
    data = compiled(Rows(), cases.softmax((64, 2**18)), parameters, "sm_90a")
    found = instructions(data)
    # Three passes, four vectors in flight together.
    assert found.count((LOAD, BITS_128)) >= 12
    assert [opcode for opcode, _ in found].index(WAIT) < [opcode for opcode, _ in found].index(LOAD)
    assert read_cubin(data).registers <= 64
    assert read_cubin(data).frame_bytes == 0


@pytest.mark.parametrize("name", ["layer norm", "softmax", "gelu"])
def test_kernels_compile_for_ampere_without_dependent_launch(name: str) -> None:
    template, case, parameters, registers_max, wide = CASES[name]
    data = compiled(template, case, replace(parameters, dependent=False), "sm_80")  # type: ignore[call-arg]
    found = instructions(data)
    assert (found.count((LOAD, BITS_128)), found.count((STORE, BITS_128))) == wide
    assert read_cubin(data).registers <= registers_max + 16
    assert read_cubin(data).frame_bytes == 0
