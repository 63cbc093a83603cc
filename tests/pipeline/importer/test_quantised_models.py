"""Whole models as ONNX Runtime's quantiser writes them: imported, lowered, compiled for LLVM, and right."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm

from relaxtune.models import OnnxModel, load_model, random_inputs
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.validate.reference import Reference
from tests.unoptimised import UNOPTIMISED_HOST, runnable


class _Samples:
    """Calibration inputs, as the quantiser reads them."""

    def __init__(self, model: OnnxModel) -> None:
        self._left = iter([random_inputs(model, seed=seed) for seed in range(2)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._left, None)


def quantise(name: str, how: str, folder: Path) -> Path:
    """Write a quantised zoo model and return its path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

        model = load_model(name, shapes={"input_ids": [1, 16]})
        plain, quantised = folder / "plain.onnx", folder / "quantised.onnx"
        onnx.save(model.proto, plain)
        logging.disable(logging.WARNING)
        try:
            if how == "dynamic":
                quantize_dynamic(plain, quantised)
            else:
                every = sorted({node.op_type for node in model.proto.graph.node})
                quantize_static(
                    plain,
                    quantised,
                    _Samples(model),
                    quant_format=QuantFormat.QOperator if how == "operators" else QuantFormat.QDQ,
                    op_types_to_quantize=every if how == "every operator" else None,
                    activation_type={"16 bits": QuantType.QUInt16, "signed": QuantType.QInt8}.get(
                        how, QuantType.QUInt8
                    ),
                    weight_type=QuantType.QInt4 if how == "4-bit weights" else QuantType.QInt8,
                    per_channel=how in ("4-bit weights", "per channel"),
                )
        finally:
            logging.disable(logging.NOTSET)
    return quantised


def run_compiled(model: OnnxModel, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    target = UNOPTIMISED_HOST
    graph = import_model(model)
    lowered = lower(graph, target.target, LoweringOptions(embed_weights=True))
    machine = runnable(compile_module(lowered, (), target).executable)
    result = machine["main"](*[tvm.runtime.tensor(feeds[spec.name]) for spec in graph.inputs])
    return [item.numpy() for item in ([result] if len(graph.outputs) == 1 else result)]


def assert_right(path: Path) -> None:
    """Nearly every number is equal; where a sum in another order crossed a tie, what follows differs by a few steps."""
    model = load_model(path)
    feeds = random_inputs(model, seed=5)
    want = Reference(model).run(feeds)
    for spec, got in zip(model.outputs, run_compiled(model, feeds), strict=True):
        expected = want[spec.name]
        error = np.abs(got - expected)
        span = float(expected.max() - expected.min())
        assert np.quantile(error, 0.9) <= 1e-3 * span
        assert error.max() <= 0.05 * span


@pytest.mark.slow
def test_a_bert_with_every_operator_quantised_is_right(tmp_path: Path) -> None:
    assert_right(quantise("bert-tiny-1-layers", "every operator", tmp_path))


@pytest.mark.slow
def test_a_dynamically_quantised_gpt2_is_right(tmp_path: Path) -> None:
    assert_right(quantise("gpt2-tiny-1-layers", "dynamic", tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-tiny", "gpt2-tiny"])
@pytest.mark.parametrize("how", ["dynamic", "static", "every operator", "operators", "16 bits", "4-bit weights"])
def test_what_the_quantiser_writes_is_right(name: str, how: str, tmp_path: Path) -> None:
    assert_right(quantise(name, how, tmp_path))
