"""Precision int8 on whole models as ONNX Runtime's quantiser writes them: computed in integers, stated, and right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import tirx

from relaxtune.models import load_model, random_inputs
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.manifest import parse_manifest
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.passes.kit.ir import bindings_of, is_op, main_of
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.pipeline.importer.test_quantised_models import quantise
from tests.unoptimised import UNOPTIMISED_TEXT, runnable

# Six matrices a layer of two, and the pooler's; the scores and the sums of values are products of activations.
MATRICES, PRODUCTS_OF_ACTIVATIONS = 13, 4


def test_a_dynamically_quantised_bert_computes_in_integers(tmp_path: Path) -> None:
    source = quantise("bert-tiny", "dynamic", tmp_path)
    request = ModelRequest(source, target=UNOPTIMISED_TEXT, lowering=LoweringOptions("int8"))
    result = compile_model(request, tmp_path / "out", samples=2)
    assert result.validation is not None
    assert result.validation.passed, result.validation.outputs
    text = (result.directory / "manifest.json").read_text()
    policy = parse_manifest(text, "here").policy
    assert policy is not None
    assert (policy.name, policy.weights, policy.activations, policy.accumulators) == (
        "int8",
        "int8",
        "int8 or uint8",
        "int32",
    )
    assert len(policy.quantised_nodes) == MATRICES
    assert len(policy.float_nodes) == PRODUCTS_OF_ACTIVATIONS
    assert "/encoder/layer.0/intermediate/dense/MatMul_quant" in policy.quantised_nodes
    # The reference is the graph as given: its weights are quantised already.
    validation = json.loads(text)["validation"]
    assert "quantised as" not in validation["reference"]
    assert validation["tolerance"]["rtol"] == 0.1


@pytest.mark.slow
def test_a_statically_quantised_bert_keeps_8_bit_weights(tmp_path: Path) -> None:
    graph = import_model(load_model(quantise("bert-tiny", "static", tmp_path)))
    module = lower(graph, resolve_target("llvm").target, LoweringOptions("int8"))
    assert len(module.quantised_nodes) == MATRICES
    assert len(module.float_nodes) == PRODUCTS_OF_ACTIVATIONS
    matrices = sum(array.nbytes for array in module.weights.values() if array.dtype == "int8")
    assert matrices == 2 * (4 * 128 * 128 + 2 * 128 * 512) + 128 * 128


@pytest.mark.slow
@pytest.mark.parametrize("how", ["static", "dynamic"])
def test_the_gemm_template_makes_every_integer_matmul_on_hopper(how: str, tmp_path: Path) -> None:
    target = resolve_target("cuda:sm_90a")
    module = lower(
        import_model(load_model(quantise("bert-tiny", how, tmp_path))), target.target, LoweringOptions("int8")
    )
    integer = {}
    for name, func in module.mod.functions.items():
        matmul = recognise_matmul(func) if isinstance(func, tirx.PrimFunc) else None
        if isinstance(matmul, MatmulFunction) and matmul.b_dtype == "int8":
            integer[name.name_hint] = GemmSm90().candidates(func, target)
    assert not {name: found.reason for name, found in integer.items() if isinstance(found, Refusal)}
    calls = [
        binding.value.args[0].name_hint
        for binding in bindings_of(main_of(module.mod))
        if is_op(binding.value, "call_tir")
    ]
    assert sum(name in integer for name in calls) == MATRICES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("bert-tiny", how) for how in ("static", "per channel", "signed", "dynamic", "operators")),
        ("gpt2-tiny", "dynamic"),
    ],
)
def test_what_the_quantiser_writes_is_right_in_integers(name: str, how: str, tmp_path: Path) -> None:
    """Where a value lies beside a tie, what follows differs by a few steps; elsewhere nothing does."""
    model = load_model(quantise(name, how, tmp_path))
    graph, target = import_model(model), resolve_target("llvm")
    module = lower(graph, target.target, LoweringOptions("int8", embed_weights=True))
    assert module.quantised_nodes
    machine = runnable(compile_module(module, (), target).executable)
    reference = Reference(model)
    for seed in (5, 6):
        feeds = random_inputs(model, seed=seed)
        result = machine["main"](*[tvm.runtime.tensor(feeds[spec.name]) for spec in graph.inputs])
        want = reference.run(feeds)
        outputs = [result] if len(graph.outputs) == 1 else list(result)
        for spec, got in zip(model.outputs, outputs, strict=True):
            expected = want[spec.name]
            error, span = np.abs(got.numpy() - expected), float(expected.max() - expected.min())
            assert np.quantile(error, 0.8) <= 1e-3 * span
            assert error.max() <= 0.05 * span
