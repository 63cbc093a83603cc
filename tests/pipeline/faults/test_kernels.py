"""Faults planted in kernels: validation catches each, and the bisection names the kernel and its ONNX nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from relaxtune.pipeline.bisect import Culprit, bisect
from relaxtune.pipeline.validate.validation import default_tolerance, sample_inputs, validate
from relaxtune.schedules.targets import ResolvedTarget
from tests.pipeline.faults.planting import FaultyKernel, build
from tests.pipeline.faults.small_models import make_model


@dataclass(frozen=True)
class Case:
    """A fault in a kernel of a model, and an ONNX node that the kernel computes."""

    model: str
    fault: FaultyKernel
    node: str


LAYER, LLAMA = "encoder_layer_0", "model_layers_0"
PROJECTION = f"{LAYER}_attention_output_Add"
RESIDUAL = "/encoder/layer.0/attention/output/Add"
SUM = "matmul_intermediate[v_i0, v_i1] + "
PRODUCT = 'T.Cast("float32", x[v_i0, v_k]) * T.Cast("float32", param_0[v_k, v_i1])'
OUTPUT_LOOPS = 'in T.grid(T.int64(2), T.int64(12), T.int64({})):\n        with T.sblock("T_add1")'

CASES = {
    "the last tile repeats a column": Case(
        "bert",
        FaultyKernel(PROJECTION, [("v_k, v_i2 % T.int64(", "v_k, T.min(v_i2, T.int64(61)) % T.int64(")]),
        RESIDUAL,
    ),
    "a sum lacks its last product": Case(
        "bert",
        FaultyKernel(PROJECTION, [("T.int64(64), T.int64(64)):", "T.int64(64), T.int64(63)):")]),
        RESIDUAL,
    ),
    "the last column is never written": Case(
        "bert", FaultyKernel(PROJECTION, [(OUTPUT_LOOPS.format(64), OUTPUT_LOOPS.format(63))]), RESIDUAL
    ),
    "the residual is the first sequence's": Case(
        "bert",
        FaultyKernel(
            PROJECTION,
            [("+ embeddings_LayerNorm_LayerNormalization[v_ax0,", "+ embeddings_LayerNorm_LayerNormalization[0,")],
        ),
        RESIDUAL,
    ),
    "gelu has a constant of one digit": Case(
        "bert",
        FaultyKernel(f"{LAYER}_intermediate_Mul_1", [("0.70710678118654757", "0.7")]),
        "/encoder/layer.0/intermediate/Mul_1",
    ),
    "a variance is divided by one less": Case(
        "bert",
        FaultyKernel(
            "embeddings_LayerNorm_LayerNormalization",
            [("variance[v_i0, v_i1] / T.float32(64.0)", "variance[v_i0, v_i1] / T.float32(63.0)")],
        ),
        "/embeddings/LayerNorm/LayerNormalization",
    ),
    "a record of another epsilon is used": Case(
        "llama",
        FaultyKernel(
            f"{LLAMA}_input_layernorm_Mul_1", [("9.9999997473787516e-06", "9.9999999747524271e-07")], record=41
        ),
        "/model/layers.0/input_layernorm/Mul_1",
    ),
    "a mask is read one key early": Case(
        "windowed",
        FaultyKernel("Where", [("param_0[v_ax1, v_ax2]", "param_0[v_ax1, T.max(v_ax2 - T.int64(1), T.int64(0))]")]),
        "/Where",
    ),
    "sums of 16384 products are kept in half precision": Case(
        "deep-sum",
        FaultyKernel("n_gv", [(SUM + PRODUCT, f'T.Cast("float32", T.Cast("float16", {SUM}{PRODUCT}))')]),
        "/MatMul",
    ),
}


@pytest.mark.quick_cases(
    "a sum lacks its last product", "a record of another epsilon is used", "a mask is read one key early"
)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_in_a_kernel_is_caught_and_named(name: str, quick_target: ResolvedTarget, tmp_path: Path) -> None:
    case = CASES[name]
    model = make_model(case.model, tmp_path)
    module = build(model, quick_target, tmp_path, case.fault)
    report = validate(module, model, samples=2)
    assert not report.passed
    inputs = sample_inputs(model, samples=2, seed=0)[report.failed_sample or 0]
    found = bisect(module, model, inputs, default_tolerance(module, model))
    assert found is not None
    assert found.culprit is Culprit.KERNEL, found.tried
    assert found.kernel is not None
    assert found.kernel.record_id == case.fault.record
    assert case.node in found.kernel.onnx_nodes
    assert found.node in found.kernel.onnx_nodes


@pytest.mark.slow
def test_of_two_faulty_kernels_the_one_that_spoils_the_results_is_named(
    quick_target: ResolvedTarget, tmp_path: Path
) -> None:
    slightly = FaultyKernel(f"{LAYER}_intermediate_Mul_1", [("0.70710678118654757", "0.7070")])
    later = FaultyKernel(f"{LAYER}_output_Add", [(OUTPUT_LOOPS.format(64), OUTPUT_LOOPS.format(63))])
    model = make_model("bert", tmp_path)
    module = build(model, quick_target, tmp_path, slightly, later)
    (inputs,) = sample_inputs(model, samples=1, seed=0)
    found = bisect(module, model, inputs, default_tolerance(module, model))
    assert found is not None
    assert found.kernel is not None
    assert "/encoder/layer.0/output/Add" in found.kernel.onnx_nodes
    assert len(found.kernels) == 2
