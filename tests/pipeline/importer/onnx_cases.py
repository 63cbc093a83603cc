"""Small ONNX models for the importer's tests, and running them on both sides: Relax on LLVM, and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import tvm
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models import OnnxModel, TensorSpec
from relaxtune.pipeline.importer import ImportedGraph, import_model
from relaxtune.pipeline.validate.exact_integers import with_unsigned_weights
from tests.unoptimised import UNOPTIMISED, runnable

ASSETS = Path(__file__).parent / "assets"
Spec = tuple[str, Sequence[int | str]]


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Spec],
    outputs: Mapping[str, Spec],
    constants: Mapping[str, np.ndarray] | None = None,
    *,
    opset: int = 18,
    domains: Mapping[str, int] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
) -> OnnxModel:
    graph = helper.make_graph(
        list(nodes),
        "case",
        [_value(name, spec) for name, spec in inputs.items()],
        [_value(name, spec) for name, spec in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, v) for d, v in (domains or {}).items())]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=list(functions))
    return OnnxModel("case", proto, None, "0" * 64, _specs(inputs), _specs(outputs))


def run_relax(graph: ImportedGraph, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    machine = runnable(tvm.compile(graph.mod, target=UNOPTIMISED))
    result = machine["main"](*[tvm.runtime.tensor(feeds[spec.name]) for spec in graph.inputs])
    return [item.numpy() for item in ([result] if len(graph.outputs) == 1 else result)]


def run_reference(model: OnnxModel, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    exact = with_unsigned_weights(model.inline_proto())
    return list(ort.InferenceSession(exact.SerializeToString(), options).run(None, dict(feeds)))


def assert_agrees(model: OnnxModel, feeds: Mapping[str, np.ndarray], tolerance: float = 1e-5) -> ImportedGraph:
    graph = import_model(model)
    for got, want in zip(run_relax(graph, feeds), run_reference(model, feeds), strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    return graph


def random_feeds(model: OnnxModel, sizes: Mapping[str, int] | None = None, tokens: int = 100) -> dict[str, np.ndarray]:
    """Random floats; token ids in range; masks with padding at the end."""
    rng = np.random.default_rng(0)
    feeds = {}
    for spec in model.inputs:
        shape = [(sizes or {})[axis] if isinstance(axis, str) else axis for axis in spec.shape]
        if spec.dtype.startswith("float"):
            feeds[spec.name] = rng.standard_normal(shape).astype(spec.dtype)
        elif "mask" in spec.name:
            feeds[spec.name] = np.ones(shape, spec.dtype)
            feeds[spec.name][..., -2:] = 0
        else:
            feeds[spec.name] = rng.integers(0, tokens if spec.name == "input_ids" else 2, shape).astype(spec.dtype)
    return feeds


def binding_names(graph: ImportedGraph) -> list[str]:
    return [binding.var.name for block in graph.mod["main"].body.blocks for binding in block.bindings]


def _value(name: str, spec: Spec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(spec[0])), list(spec[1]))


def _specs(values: Mapping[str, Spec]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, dtype, tuple(shape)) for name, (dtype, shape) in values.items())


def float_tensor(values: Sequence[float]) -> onnx.TensorProto:
    return helper.make_tensor("value", TensorProto.FLOAT, [len(values)], list(values))
