from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import te, tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.quantised_matmul import matmul_of_rows
from relaxtune.schedules.registry import apply_decision, list_candidates
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.base import TemplateError
from relaxtune.schedules.templates.gemv.plan import GemvParameters, GemvPlan, GemvStreamParameters, make_plan
from relaxtune.schedules.templates.gemv.template import Gemv
from relaxtune.schedules.templates.matmul_by_rows import recognise_matmul_by_rows
from relaxtune.schedules.templates.rows.kernel import RowsParameters
from relaxtune.schedules.tir.epilogue import MatmulFunction, Quantisation
from tests.schedules.templates.gemv_cases import CASES, GemvCase

HOPPER = resolve_target("cuda:sm_90a")


@pytest.mark.parametrize("name", CASES)
def test_every_form_is_recognised_with_how_its_weight_is_stored(name: str) -> None:
    case = CASES[name]
    found = recognise_matmul_by_rows(case.func())
    assert isinstance(found, MatmulFunction), found
    rows = 1
    for size in case.rows:
        rows *= size
    assert (found.m, found.n, found.k) == (rows, case.n, case.k)
    expected = None if case.bits == 16 else Quantisation(1, 2, case.bits, min(case.group, case.k))
    assert found.stored == expected


def changed(bits: int, kind: str) -> tirx.PrimFunc:
    """Return a matmul whose weight is not quite what `schedules.functions.quantised_matmul` writes."""
    x = te.placeholder((1, 256), "float16", name="x")
    packed = te.placeholder((64, 256 * bits // 8), "uint8", name="packed")
    scales = te.placeholder((2, 64), "float16", name="scales")
    offset = 7.0 if kind == "offset" else 2.0 ** (bits - 1)

    def element(n: tirx.Var, k: tirx.Var) -> tirx.Expr:
        byte = packed[n, k * bits // 8]
        if bits == 4:
            shift = (1 - k % 2) * 4 if kind == "halves" else k % 2 * 4
            byte = (byte >> shift.astype("uint8")) & tirx.const(15, "uint8")
        at = (k + 1) // 129 if kind == "groups" else k // 128
        value = (byte.astype("float32") - tirx.const(offset, "float32")) * scales[at, n].astype("float32")
        return value.astype("float16")

    weight = te.compute((64, 256), element, name="dequantise")
    over = te.reduce_axis((0, 256), name="k")
    product = te.compute(
        (1, 64), lambda i, j: te.sum(x[i, over].astype("float32") * weight[j, over].astype("float32"), axis=over)
    )
    return te.create_prim_func([x, packed, scales, product], index_dtype_override="int64")


@pytest.mark.parametrize(("bits", "kind"), [(4, "offset"), (4, "halves"), (4, "groups"), (8, "offset"), (8, "groups")])
def test_another_dequantisation_is_not_taken_for_ours(bits: int, kind: str) -> None:
    assert isinstance(recognise_matmul_by_rows(changed(bits, "same")), MatmulFunction)
    found = recognise_matmul_by_rows(changed(bits, kind))
    assert isinstance(found, Refusal)
    assert "no dequantisation" in found.reason


@pytest.mark.parametrize(
    ("case", "target", "reason"),
    [
        (GemvCase(rows=(17,)), "cuda:sm_90a", "17 rows, expected 16 at most"),
        (GemvCase(), "cuda:sm_75", "expected cuda sm_80 or later"),
        (GemvCase(k=260), "cuda:sm_90a", "K is 260, expected a multiple of 8"),
        (GemvCase(k=784, bits=4), "cuda:sm_90a", "K is 784, expected a multiple of 32"),
        (GemvCase(k=1024, bits=4, group=16), "cuda:sm_90a", "groups of 16 weights, expected a multiple of 32"),
        (GemvCase(dtype="float32"), "cuda:sm_90a", "the rows are float32"),
    ],
)
def test_what_it_cannot_make_is_refused_with_the_reason(case: GemvCase, target: str, reason: str) -> None:
    found = Gemv().candidates(case.func(), resolve_target(target))
    assert isinstance(found, Refusal)
    assert reason in found.reason


def test_a_matrix_of_columns_is_left_to_the_gemm() -> None:
    x, w = te.placeholder((1, 64), "float16", name="x"), te.placeholder((64, 32), "float16", name="w")
    over = te.reduce_axis((0, 64), name="k")
    product = te.compute(
        (1, 32), lambda i, j: te.sum(x[i, over].astype("float32") * w[over, j].astype("float32"), axis=over)
    )
    found = Gemv().candidates(te.create_prim_func([x, w, product]), HOPPER)
    assert isinstance(found, Refusal)
    assert "expected rows [N, K]" in found.reason


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_makes_a_kernel_with_the_same_parameters(name: str) -> None:
    func = CASES[name].func()
    found = Gemv().candidates(func, HOPPER)
    assert not isinstance(found, Refusal)
    assert all(one.dependent for one in found)
    for parameters in (found[0], found[-1]):
        made = apply_decision(func, HOPPER, parameters.to_json())
        assert [str(p.name) for p in made.params] == [str(p.name) for p in func.params]
        assert made.attrs["tirx.is_scheduled"]


def test_quantised_weights_are_made_by_the_templates_for_few_rows_alone() -> None:
    found, refused = list_candidates(GemvCase(n=4096, k=2048, bits=4).func(), HOPPER)
    assert {type(one) for one in found} == {GemvParameters, GemvStreamParameters}
    assert any(reason.startswith("gemm_sm90") for reason in refused)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    function = recognise_matmul_by_rows(GemvCase(rows=(16,), bits=4, n=4096, k=4096).func())
    assert isinstance(function, MatmulFunction)
    limits = HOPPER.limits
    assert isinstance(make_plan(function, GemvParameters(unroll=2), limits), GemvPlan)
    for parameters, reason in (
        (GemvParameters(warps=64), "64 warps"),
        (GemvParameters(tiles=4, warps=16, unroll=8), "registers"),
        (GemvParameters(tiles=0), "expected 1 or more"),
        (GemvParameters(unroll=4), "shared memory"),
    ):
        found = make_plan(function, parameters, limits)
        assert isinstance(found, Refusal), parameters
        assert reason in found.reason


def test_blocks_share_long_sums_of_several_rows_on_mma_sync_alone() -> None:
    func = GemvCase(rows=(16,), n=2048, k=8192).func()
    shared, hopper = (Gemv().candidates(func, target) for target in (resolve_target("cuda:sm_80@H200"), HOPPER))
    assert not isinstance(shared, Refusal)
    assert not isinstance(hopper, Refusal)
    assert shared[0].split > 1
    assert sum(one.split > 1 for one in shared) < len(shared) / 2
    assert {one.split for one in hopper} == {1}


@pytest.mark.parametrize(("k", "bits"), [(2080, 16), (4096, 4)])
def test_blocks_share_sums_of_whole_steps_of_16_bit_weights_alone(k: int, bits: int) -> None:
    found = Gemv().apply(GemvCase(n=4096, k=k, bits=bits).func(), HOPPER, GemvParameters(split=2))
    assert found == Refusal("split is 2, of 16-bit weights expected a divisor of the steps along K")


def test_sums_are_scaled_where_a_step_is_within_a_group() -> None:
    def grouped(bits: int, group: int) -> bool:
        function = recognise_matmul_by_rows(GemvCase(k=1024, bits=bits, group=group).func())
        assert isinstance(function, MatmulFunction)
        plan = make_plan(function, GemvParameters(), HOPPER.limits)
        assert isinstance(plan, GemvPlan)
        return plan.grouped

    # A step is 128 weights of 4 bits, and 64 of 8.
    assert grouped(4, 128)
    assert grouped(4, 1024)
    assert not grouped(4, 64)
    assert grouped(8, 64)
    assert not grouped(8, 32)


def test_parameters_of_another_template_or_target_are_an_error() -> None:
    func = CASES["one row"].func()
    with pytest.raises(TemplateError, match="expected GemvParameters"):
        Gemv().apply(func, HOPPER, RowsParameters())
    ampere = resolve_target("cuda:sm_80")
    refused = Gemv().apply(func, ampere, replace(GemvParameters(), dependent=True))
    assert isinstance(refused, Refusal)
    found = Gemv().candidates(func, ampere)
    assert not isinstance(found, Refusal)
    assert not any(one.dependent for one in found)


def test_the_functions_are_what_the_expression_says() -> None:
    # One scale a column is written as the index 0, which later passes would make of it.
    x = te.placeholder((1, 64), "float16", name="x")
    packed, scales = te.placeholder((8, 64), "uint8", name="p"), te.placeholder((1, 8), "float16", name="s")
    func = te.create_prim_func([x, packed, scales, matmul_of_rows(64, 8, 64, "float32")(x, packed, scales)])
    assert isinstance(recognise_matmul_by_rows(func), MatmulFunction)
