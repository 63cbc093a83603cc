"""Faults planted in passes: validation catches each, and the bisection names the pass and the ONNX node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from relaxtune.pipeline.bisect import Culprit, bisect
from relaxtune.pipeline.validate.validation import default_tolerance, sample_inputs, validate
from relaxtune.schedules.targets import ResolvedTarget
from tests.pipeline.faults.planting import FaultyPass, build, edited_constant, with_argument
from tests.pipeline.faults.small_models import make_model

pytestmark = pytest.mark.slow

Expr = tvm.ir.Expr


@dataclass(frozen=True)
class Case:
    """A fault in a pass of a model's lowering, and the ONNX node that is to be named."""

    model: str
    fault: FaultyPass
    node: str


def scaled(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: (array * factor).astype(array.dtype)


def later_by_one(kept: np.ndarray) -> np.ndarray:
    """Return a causal mask in which a position sees the next one too."""
    return np.tril(np.ones_like(kept), k=1)


def wider_by_one(window: np.ndarray) -> np.ndarray:
    i, j = np.indices(window.shape)
    return (j <= i) & (j > i - 4)


def heads_not_swapped(value: Expr) -> Expr:
    """Cut [B, S, H, D] into heads without moving the axis of positions behind that of heads."""
    return relax.op.reshape(value.args[0], value.ty.shape)


def first_row_for_all(argument: Expr) -> Expr:
    sliced = relax.op.strided_slice(argument, [1], [0], [1])
    return relax.op.broadcast_to(sliced, argument.ty.shape)


def halves_swapped(value: Expr) -> Expr:
    first, second = value.args[0].fields
    return relax.op.concat([second, first], axis=-1)


def new_before_old(value: Expr) -> Expr:
    past, new = value.args[0].fields
    return relax.op.concat([new, past], axis=2)


def groups_interleaved(value: Expr) -> Expr:
    return relax.op.reshape(relax.op.permute_dims(value.args[0], [0, 2, 1, 3, 4]), value.args[1])


LAYER, LLAMA = "encoder_layer_0", "model_layers_0"
CASES = {
    "a bias is dropped": Case(
        "bert",
        FaultyPass("merge_common_subexpressions", f"{LAYER}_attention_output_dense_Add", lambda v: v.args[0]),
        "/encoder/layer.0/attention/output/dense/Add",
    ),
    "the scale of the scores is off": Case(
        "bert",
        FaultyPass("recognise_activations", f"{LAYER}_attention_Div", edited_constant(1, scaled(1.002))),
        "/encoder/layer.0/attention/Div",
    ),
    "the axis of heads is not moved": Case(
        "bert",
        FaultyPass("recognise_norms", f"{LAYER}_attention_Transpose_1", heads_not_swapped),
        "/encoder/layer.0/attention/Transpose_1",
    ),
    "a weight is transposed": Case(
        "bert",
        FaultyPass(
            "combine_matmuls",
            f"{LAYER}_attention_output_dense_MatMul",
            edited_constant(1, lambda weight: weight.T),
        ),
        "/encoder/layer.0/attention/output/dense/MatMul",
    ),
    "the softmax runs over queries": Case(
        "bert",
        FaultyPass(
            "remove_nan_guards", f"{LAYER}_attention_Softmax", lambda v: relax.op.nn.softmax(v.args[0], axis=-2)
        ),
        "/encoder/layer.0/attention/Softmax",
    ),
    "gelu by tanh where erf is meant": Case(
        "bert",
        FaultyPass("recognise_activations", f"{LAYER}_intermediate_Mul_1", lambda v: relax.op.nn.gelu_tanh(v.args[0])),
        "/encoder/layer.0/intermediate/Div",
    ),
    "a folded constant is off by a row": Case(
        "bert",
        FaultyPass("fold_constants", "embeddings_Add_1", edited_constant(1, lambda array: np.roll(array, 1, axis=1))),
        "/embeddings/Add_1",
    ),
    "a residual is broadcast from its first row": Case(
        "bert",
        FaultyPass(
            "unflatten_matmuls",
            f"{LAYER}_output_Add",
            lambda value: with_argument(value, 1, first_row_for_all),
        ),
        "/encoder/layer.0/output/Add",
    ),
    "the causal mask is off by one": Case(
        "gpt2", FaultyPass("remove_dead_code", "And", edited_constant(0, later_by_one)), "/And"
    ),
    "a norm has lost its epsilon": Case(
        "llama",
        FaultyPass("canonicalise_bindings", f"{LLAMA}_input_layernorm_Add", lambda value: value.args[0]),
        "/model/layers.0/input_layernorm/Add",
    ),
    "the halves of the rotation are swapped": Case(
        "llama",
        FaultyPass("simplify_views", f"{LLAMA}_self_attn_Concat", halves_swapped),
        "/model/layers.0/self_attn/Concat",
    ),
    "query heads take the wrong group": Case(
        "llama",
        FaultyPass("merge_common_subexpressions", f"{LLAMA}_self_attn_Reshape_3", groups_interleaved),
        "/model/layers.0/self_attn/Reshape_3",
    ),
    "the cache grows at its front": Case(
        "llama-decode",
        FaultyPass("remove_dead_code", f"{LLAMA}_self_attn_Concat_3", new_before_old),
        "/model/layers.0/self_attn/Concat_3",
    ),
    "the window is one too wide": Case(
        "windowed", FaultyPass("fold_constants", "Where", edited_constant(0, wider_by_one)), "/Where"
    ),
    "a cast truncates instead of rounding": Case(
        "rounded", FaultyPass("simplify_views", "Round", lambda value: value.args[0]), "/Round"
    ),
}


# What another case has the like of; left to the longer run.
_SLOW = {
    "the softmax runs over queries",
    "a weight is transposed",
    "a residual is broadcast from its first row",
    "the halves of the rotation are swapped",
    "query heads take the wrong group",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in CASES])
def test_a_fault_in_a_pass_is_caught_and_named(
    name: str, quick_target: ResolvedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    case.fault.plant(monkeypatch)
    model = make_model(case.model, tmp_path)
    module = build(model, quick_target, tmp_path)
    report = validate(module, model, samples=2)
    assert not report.passed
    inputs = sample_inputs(model, samples=2, seed=0)[report.failed_sample or 0]
    found = bisect(module, model, inputs, default_tolerance(module, model))
    assert found is not None
    assert found.culprit is Culprit.PASS, found.tried
    assert found.lowering_pass is not None
    assert found.lowering_pass.name == case.fault.name
    assert found.lowering_pass.healed_without is True
    assert found.node == case.node, found
