"""ONNX Runtime's fused graphs compute what the zoo's graphs compute, in float32 on the CPU."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.gpu_arms.cases import Case, checked_model, weights_of
from benchmarks.gpu_arms.ort_graphs import NoFusedGraphError, fused_graph
from relaxtune.models.zoo import Precision
from relaxtune.pipeline.validate.reference import Reference

CASES = (Case("bert-tiny", 2, 16), Case("gpt2-tiny", 2, 16), Case("vit-tiny", 2))


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["dense", "padding"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fused_graph_agrees_with_the_zoos(case: Case, masked: bool) -> None:
    proto = case.proto(Precision.FP32)
    inputs = case.inputs(real="float32")
    if masked and "attention_mask" in inputs:
        inputs["attention_mask"][1, 10:] = 0
    expected = Reference(checked_model(case, proto)).run(inputs)
    got = run(fused_graph(case, weights_of(proto), dtype="float32", masked=masked), inputs)
    assert got.keys() == expected.keys()
    real = slice(0, 10) if masked else slice(None)
    for name, array in expected.items():
        rows = real if array.ndim == 3 and case.length else slice(None)
        np.testing.assert_allclose(got[name][:, rows], array[:, rows], rtol=1e-4, atol=1e-4)


def test_half_precision_graph_is_half_all_through() -> None:
    case = CASES[0]
    model = onnx.load_from_string(fused_graph(case, weights_of(case.proto()), dtype="float16", masked=False))
    floats = {tensor.data_type for tensor in model.graph.initializer if tensor.data_type != onnx.TensorProto.INT64}
    assert floats == {onnx.TensorProto.FLOAT16}
    assert not any(node.op_type == "Cast" for node in model.graph.node)


def test_llama_has_no_fused_graph() -> None:
    with pytest.raises(NoFusedGraphError, match="no fused ONNX Runtime graph is written for llama"):
        fused_graph(Case("llama-tiny", 1, 8), {}, dtype="float16", masked=False)


def run(graph: bytes, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    feed = {}
    for value in session.get_inputs():
        array = inputs[value.name]
        feed[value.name] = array.astype(np.int32) if array.dtype.kind == "i" else array
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))
