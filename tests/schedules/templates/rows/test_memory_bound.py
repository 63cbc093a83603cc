"""Which functions the templates for rows and elements take, and with which parameters."""

from __future__ import annotations

import functools

import pytest
from tvm import te, tirx, topi

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.base import Template, TemplateError
from relaxtune.schedules.templates.launch_table import list_kernels
from relaxtune.schedules.templates.rows.elementwise import Elementwise, ElementwiseParameters
from relaxtune.schedules.templates.rows.kernel import RowsParameters
from relaxtune.schedules.templates.rows.template import Rows, Shape, predicted_us
from tests.schedules.templates import memory_cases as cases
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.memory_cases import MemoryCase, tensor

HOPPER = resolve_target("cuda:sm_90a")


@pytest.mark.parametrize(
    ("case", "lanes", "threads", "rows"),
    [
        # As many threads as vectors where there are few rows, a warp a row and few blocks where there are many.
        (cases.layer_norm((128, 768)), 8, 96, 1),
        (cases.layer_norm((65536, 768)), 8, 32, 4),
        (cases.rms_norm((1, 2048)), 8, 256, 1),
        (cases.softmax((12, 128, 128)), 8, 16, 8),
    ],
)
def test_first_candidate_for_rows(case: MemoryCase, lanes: int, threads: int, rows: int) -> None:
    found = Rows().candidates(case.func(), HOPPER)
    assert not isinstance(found, Refusal)
    first = found[0]
    assert first.held
    assert (first.lanes, first.threads) == (lanes, threads)
    assert rows / 2 <= first.rows <= rows * 2
    assert all(parameters.dependent for parameters in found)


def test_row_that_fits_no_registers_is_read_again() -> None:
    found = Rows().candidates(cases.softmax((4, 50257), "float32").func(), HOPPER)
    assert not isinstance(found, Refusal)
    assert not any(parameters.held for parameters in found)


@pytest.mark.parametrize(
    ("case", "parameters"),
    [
        (cases.bias_gelu((32768, 3072)), ElementwiseParameters(8, 2, 256, True)),
        (cases.bias_gelu((128, 3072)), ElementwiseParameters(8, 1, 128, True)),
        (cases.causal_mask(1), ElementwiseParameters(1, 1, 64, True)),
    ],
)
def test_first_candidate_for_elements(case: MemoryCase, parameters: ElementwiseParameters) -> None:
    found = Elementwise().candidates(case.func(), HOPPER)
    assert not isinstance(found, Refusal)
    assert found[0] == parameters


@pytest.mark.parametrize(
    ("template", "case"),
    [(Rows(), cases.softmax((64, 1000), masked=False)), (Elementwise(), cases.rotary(1, 16, 4, 64))],
)
def test_every_candidate_can_be_applied(template: Template, case: MemoryCase) -> None:
    found = template.candidates(case.func(), HOPPER)
    assert not isinstance(found, Refusal)
    assert len(set(found)) == len(found)
    for parameters in found:
        assert template.parse(parameters.to_json()) == parameters
        assert isinstance(template.apply(case.func(), HOPPER, parameters), tirx.PrimFunc)


def open_columns() -> tirx.PrimFunc:
    batch, length = tirx.Var("batch", "int64"), tirx.Var("length", "int64")
    return cases.masked_bias(batch, 8, length).func()


def test_symbolic_columns_have_vectors_where_a_call_allows_them() -> None:
    made = Elementwise().apply(open_columns(), HOPPER, ElementwiseParameters(4, 2, 256, dependent=True), 8192)
    assert isinstance(made, tirx.PrimFunc)
    (divides, vectors), (none, single) = list_kernels(made)
    assert "length % T.int64(4) == T.int64(0)" in str(divides)
    assert none is None
    # Two float16 at least a store, and marks of 8 bytes by pairs.
    text = vectors.script()
    assert "relaxtune_store_8" in text
    assert "relaxtune_load_16" in text
    assert "relaxtune_load_2(" not in text
    text = single.script()
    assert "relaxtune_store_2" in text
    assert "relaxtune_store_8" not in text


@pytest.mark.parametrize(("rows", "lanes"), [(32, 1), (8192, 4)])
def test_first_candidate_of_symbolic_columns_has_vectors_where_there_are_many(rows: int, lanes: int) -> None:
    found = Elementwise().candidates(open_columns(), HOPPER, rows)
    assert not isinstance(found, Refusal)
    assert found[0].lanes == lanes


def test_columns_of_which_a_part_is_known_have_as_many_lanes_as_surely_divide_them() -> None:
    rows = tirx.Var("rows", "int64")
    found = Elementwise().candidates(cases.silu((rows, 20)).func(), HOPPER, 32)
    assert not isinstance(found, Refusal)
    assert found[0].lanes == 4
    made = Elementwise().apply(cases.silu((rows, 20)).func(), HOPPER, found[0], 32)
    assert isinstance(made, tirx.PrimFunc)
    assert len(list_kernels(made)) == 1


@pytest.mark.parametrize("name", ["main", "fused_layer_norm"])
def test_kernel_keeps_name_and_parameters(name: str) -> None:
    func = cases.layer_norm((128, 768)).func().with_attr("global_symbol", name)
    made = Rows().apply(func, HOPPER, RowsParameters(8, 96, 1, dependent=True))
    assert isinstance(made, tirx.PrimFunc)
    assert made.attrs["global_symbol"] == name
    assert [str(param.name) for param in made.params] == [str(param.name) for param in func.params]
    assert [list(param.ty.shape) for param in made.params] == [list(param.ty.shape) for param in func.params]


def refusal(template: Template, func: tirx.PrimFunc, target: str = "cuda:sm_90a") -> str:
    found = template.candidates(func, resolve_target(target))
    assert isinstance(found, Refusal)
    return found.reason


def test_refusals_of_functions_say_why() -> None:
    norm, gelu, matmul = cases.layer_norm((8, 64)), cases.bias_gelu((8, 64)), MatmulCase((8,), 16, 64)
    assert refusal(Rows(), norm.func(), "llvm").startswith("the target is llvm")
    assert refusal(Elementwise(), gelu.func(), "llvm").startswith("the target is llvm")
    assert "no reductions" in refusal(Rows(), gelu.func())
    assert "has reductions" in refusal(Elementwise(), norm.func())
    assert "sums products of two tensors" in refusal(Rows(), matmul.func())
    many = [tensor(f"x{index}", (2, 10**5), "float32") for index in range(30)]
    crowded = te.create_prim_func([*many, topi.sum(functools.reduce(topi.add, many), axis=1)])
    assert refusal(Rows(), crowded) == "rows of 100000 do not fit the registers of a block"
    x = tensor("x", (64, 8), "float32")
    across = te.create_prim_func([x, topi.sum(x, axis=0)], index_dtype_override="int64")
    assert refusal(Rows(), across) == "x is not contiguous along the rows"
    small = tensor("x", (8, 8), "float8_e5m2")
    widened = te.create_prim_func([small, topi.cast(small, "float32")], index_dtype_override="int64")
    assert refusal(Elementwise(), widened).startswith("a tensor is of float8_e5m2, expected one of float16")


@pytest.mark.parametrize(
    ("template", "case", "parameters", "reason"),
    [
        (Rows(), cases.softmax((8, 64)), RowsParameters(3, 32, 4), "lanes is 3"),
        (Rows(), cases.softmax((8, 64)), RowsParameters(8, 48, 2), "threads is 48"),
        (Rows(), cases.softmax((8, 64)), RowsParameters(8, 8, 2), "2 rows of 8 threads"),
        (Rows(), cases.softmax((8, 64000)), RowsParameters(8, 32, 4), "2000 elements a thread, expected 128 at most"),
        (Rows(), cases.rms_norm((8, 2**16)), RowsParameters(8, 1024, 1), "registers a thread, a block of 1024 has 64"),
        (Elementwise(), cases.silu((8, 60)), ElementwiseParameters(7), "lanes is 7"),
        (Elementwise(), cases.silu((8, 64)), ElementwiseParameters(16, 8), "vectors is 8"),
        (Elementwise(), cases.silu((8, 64)), ElementwiseParameters(8, 1, 100), "threads is 100"),
    ],
)
def test_refusals_of_parameters_say_why(
    template: Template, case: MemoryCase, parameters: RowsParameters | ElementwiseParameters, reason: str
) -> None:
    made = template.apply(case.func(), HOPPER, parameters)
    assert isinstance(made, Refusal)
    assert reason in made.reason


def test_parameters_of_another_template_are_an_error() -> None:
    with pytest.raises(TemplateError, match="expected RowsParameters"):
        Rows().apply(cases.softmax((8, 64)).func(), HOPPER, ElementwiseParameters())
    with pytest.raises(TemplateError, match="is not of template 'elementwise'"):
        Elementwise().parse(RowsParameters().to_json())


def test_predicted_time_has_its_two_limits() -> None:
    """Past the cache, bytes over bandwidth; with tiny blocks, their number over the rate at which they start."""
    large = Shape(moved_bytes=400e6, blocks=10000, threads=256, registers=32, accesses=16)
    assert predicted_us(large, 132) == pytest.approx(400e6 / 4.1e6, rel=0.05)
    many = Shape(moved_bytes=400e6, blocks=500_000, threads=32, registers=32, accesses=16)
    assert predicted_us(many, 132) == pytest.approx(500_000 * 1.23e-3, rel=0.05)
