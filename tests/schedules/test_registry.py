from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import tirx

from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.registry import TEMPLATES, apply_decision, list_candidates
from relaxtune.schedules.targets import Feature, capabilities, resolve_target
from relaxtune.schedules.targets.capabilities import capabilities_of
from relaxtune.schedules.templates.base import TemplateError
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters
from tests.schedules.attention_cases import AttentionCase
from tests.schedules.templates import memory_cases
from tests.schedules.templates.gemv_cases import GemvCase
from tests.schedules.templates.matmul_cases import MatmulCase

CASE = MatmulCase((128,), 256, 128, ("bias",))


def test_every_candidate_can_be_applied_from_its_decision() -> None:
    target, func = resolve_target("cuda:sm_90a"), CASE.func()
    found, refused = list_candidates(func, target)
    assert found
    assert {
        "gemv_stream: the right operand is [K, N], expected rows [N, K]",
        "gemv: the right operand is [K, N], expected rows [N, K]",
        "attention_sm90: the function is not marked as an attention",
        "rows: it sums products of two tensors (the templates for matmuls make those)",
        "elementwise: it has reductions (the template for rows makes those)",
    } <= set(refused)
    for parameters in found[:3]:
        assert isinstance(apply_decision(func, target, parameters.to_json()), tirx.PrimFunc)


def test_equal_function_gets_the_kernel_that_was_made_and_lists_of_its_own() -> None:
    target, (func, equal, other) = (
        resolve_target("cuda:sm_90a"),
        (CASE.func(), CASE.func(), replace(CASE, n=512).func()),
    )
    found, _ = list_candidates(func, target)
    decision = found[0].to_json()
    made = apply_decision(func, target, decision)
    assert apply_decision(equal, target, decision).same_as(made)
    assert not apply_decision(other, target, decision).same_as(made)
    found.clear()
    assert list_candidates(equal, target)[0]


def test_quantised_weights_of_few_rows_stream_where_nothing_was_measured() -> None:
    case = GemvCase(rows=(1,), n=4096, k=4096, bits=4, group=128)
    found, _ = list_candidates(case.func(), resolve_target("cuda:sm_90a"))
    assert found[0].template == "gemv_stream"
    assert {"gemv_stream", "gemv"} <= {one.template for one in found}


@pytest.mark.parametrize(
    ("case", "name"), [(memory_cases.softmax((64, 40)), "rows"), (memory_cases.silu((64, 40)), "elementwise")]
)
def test_every_kind_of_function_has_a_template_and_each_other_one_says_why_not(
    case: memory_cases.MemoryCase, name: str
) -> None:
    target, func = resolve_target("cuda:sm_90a"), case.func()
    found, refused = list_candidates(func, target)
    offering = {parameters.template for parameters in found}
    assert found[0].template == name
    assert offering.isdisjoint({"gemm_sm90", "gemv", "gemv_stream", "attention_sm90"})
    assert offering | {reason.partition(":")[0] for reason in refused} == set(TEMPLATES)
    assert isinstance(apply_decision(func, target, found[0].to_json()), tirx.PrimFunc)


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (CASE.func(), "gemm_sm90"),
        (GemvCase(rows=(1,), n=4096, k=4096, bits=4, group=128).func(), "gemv_stream"),
        (GemvCase(rows=(1,), n=4096, k=4096, bits=4, group=128).func(), "gemv"),
        (memory_cases.softmax((64, 40)).func(), "rows"),
        (memory_cases.silu((64, 40)).func(), "elementwise"),
        (
            attention_function(*AttentionCase(queries=64, keys=64, head_dim=64, dtype="float16").made()),
            "attention_sm90",
        ),
    ],
    ids=["gemm", "gemv_stream", "gemv", "rows", "elementwise", "attention"],
)
def test_no_template_starts_kernels_early_where_the_gpu_cannot(
    func: tirx.PrimFunc, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An architecture of tomorrow: Hopper's instructions, other limits, no dependent launch."""
    offers = capabilities_of("sm_90a")
    row = capabilities.Capabilities(131, 132, offers.features - {Feature.DEPENDENT_LAUNCH})
    monkeypatch.setitem(capabilities._ROWS, 140, row)
    target = resolve_target("cuda:sm_140a")
    ours = [one for one in list_candidates(func, target)[0] if one.template == name]
    assert ours
    assert not any(one.dependent for one in ours)
    assert isinstance(apply_decision(func, target, ours[0].to_json()), tirx.PrimFunc)
    with pytest.raises(TemplateError, match=r"expected cuda sm_90 or later \(dependent launch\)"):
        apply_decision(func, target, replace(ours[0], dependent=True).to_json())  # type: ignore[call-arg]


def test_refusals_are_named() -> None:
    found, refused = list_candidates(CASE.func(), resolve_target("llvm"))
    assert found == []
    assert len(refused) == len(TEMPLATES)
    assert refused[0].startswith("gemm_sm90: the target is llvm")


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        ('{"template":"gemm_sm999"}', "template 'gemm_sm999' is not known here"),
        (
            GemmParameters(consumers=9).to_json(),
            "does not make this function: consumers is 9",
        ),
    ],
)
def test_apply_decision_says_what_is_wrong(decision: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        apply_decision(CASE.func(), resolve_target("cuda:sm_90a"), decision)
