"""Precision int8: which matmuls become integer, what they compute, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from relaxtune.models import OnnxModel, load_model
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.passes.precision.integer_matmuls import narrowed
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.schedules.tir.blocks import list_blocks
from tests.pipeline.passes.pass_cases import LLVM
from tests.unoptimised import UNOPTIMISED_HOST, runnable

K, N = 96, 40


def quantised_matmul(
    folder: Path, activations: str, weights: str, *, columns: bool, zero: bool, gemm: bool = False
) -> OnnxModel:
    """Return x -> QuantizeLinear -> DequantizeLinear -> MatMul (or Gemm with a transposed weight) and the bias."""
    rng = np.random.default_rng(3)
    low, high = (np.iinfo(weights).min, np.iinfo(weights).max)
    w = rng.integers(low, high, (K, N), dtype=weights, endpoint=True)
    shape = (N,) if columns else ()
    zeros = rng.integers(low, high, shape, dtype=weights) if zero else np.zeros(shape, weights)
    arrays = {
        "xs": np.array(0.03, "float32"),
        "xz": np.array(107 if activations == "uint8" else -21, activations),
        "w": np.ascontiguousarray(w.T) if gemm else w,
        "ws": np.asarray(rng.uniform(0.001, 0.02, shape), "float32"),
        "wz": np.asarray(zeros, weights),
        "bias": rng.standard_normal(N).astype("float32"),
    }
    axis = 0 if gemm else 1
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"], name="quantise"),
        helper.make_node("DequantizeLinear", ["q", "xs", "xz"], ["d"], name="dequantise"),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["f"], name="weight", axis=axis),
    ]
    if gemm:
        nodes.append(helper.make_node("Gemm", ["d", "f", "bias"], ["y"], name="product", transB=1))
    else:
        nodes.append(helper.make_node("MatMul", ["d", "f"], ["p"], name="product"))
        nodes.append(helper.make_node("Add", ["p", "bias"], ["y"], name="add"))
    rows = [5] if gemm else [2, 5]
    return saved(folder, nodes, arrays, {"x": [*rows, K]}, {"y": [*rows, N]})


def saved(
    folder: Path,
    nodes: list[onnx.NodeProto],
    arrays: Mapping[str, np.ndarray],
    inputs: Mapping[str, list[int]],
    outputs: Mapping[str, list[int]],
) -> OnnxModel:
    def values(shapes: Mapping[str, list[int]]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]

    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "quantised", values(inputs), values(outputs), constants)
    path = folder / "quantised.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return load_model(path)


def lowered(model: OnnxModel, precision: str | None = "int8", **options: object) -> LoweredModule:
    return lower(import_model(model), LLVM, LoweringOptions(precision, embed_weights=True, **options))


def assert_right(model: OnnxModel, module: LoweredModule) -> None:
    """The matmul is the last to round, so the tolerance is that of float32."""
    x = np.random.default_rng(8).normal(0.0, 2.0, [int(size) for size in model.inputs[0].shape]).astype("float32")
    machine = runnable(compile_module(module, (), UNOPTIMISED_HOST).executable)
    got = machine["main"](tvm.runtime.tensor(x)).numpy()
    want = Reference(model).run({"x": x})["y"]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6 * float(np.abs(want).max()))


def products(module: LoweredModule) -> list[str]:
    """Return the dtypes that sums of products are kept in."""
    functions = [func for _, func in module.mod.functions_items() if isinstance(func, tvm.tirx.PrimFunc)]
    blocks = [block for func in functions for block in list_blocks(func) if block.reduced]
    return [str(store.buffer.dtype) for block in blocks for store in block.stores]


@pytest.mark.parametrize(
    ("activations", "weights", "columns", "zero", "gemm"),
    [
        ("uint8", "int8", False, False, False),
        ("uint8", "int8", True, False, False),
        ("int8", "int8", True, True, False),
        ("uint8", "uint8", False, True, False),
        ("int8", "int8", True, False, True),
    ],
)
def test_a_quantised_matmul_is_integer_and_right(
    activations: str, weights: str, columns: bool, zero: bool, gemm: bool, tmp_path: Path
) -> None:
    model = quantised_matmul(tmp_path, activations, weights, columns=columns, zero=zero, gemm=gemm)
    module = lowered(model)
    assert module.quantised_nodes == ("product",)
    assert module.float_nodes == ()
    assert products(module) == ["int32"]
    assert_right(model, module)


def test_switched_off_the_matmul_is_in_floats(tmp_path: Path) -> None:
    model = quantised_matmul(tmp_path, "uint8", "int8", columns=True, zero=False)
    module = lowered(model, disabled_passes=frozenset({"integer_matmuls"}))
    assert module.quantised_nodes == ()
    assert products(module) == ["float32"]
    assert products(lowered(model, None)) == ["float32"]
    assert_right(model, module)


@pytest.mark.parametrize("weights", ["int8", "uint8"])
def test_dynamic_quantisation_keeps_its_weights_in_8_bits(weights: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    arrays = {
        "w": rng.integers(-100 if weights == "int8" else 0, 100, (K, N)).astype(weights),
        "wz": np.array(0 if weights == "int8" else 90, weights),
        "scale": np.array(0.01, "float32"),
    }
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "xs", "xz"], name="quantise"),
        helper.make_node("MatMulInteger", ["q", "w", "xz", "wz"], ["sums"], name="product"),
        helper.make_node("Cast", ["sums"], ["wide"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["xs", "scale"], ["both"], name="scales"),
        helper.make_node("Mul", ["wide", "both"], ["y"], name="scaled"),
    ]
    model = saved(tmp_path, nodes, arrays, {"x": [2, 5, K]}, {"y": [2, 5, N]})
    module = lower(import_model(model), LLVM, LoweringOptions("int8"))
    assert module.quantised_nodes == ("product",)
    (packed,) = [array for array in module.weights.values() if array.size >= K * N]
    assert packed.dtype == "int8"
    assert_right(model, lowered(model))


def test_scales_along_k_stay_in_floats(tmp_path: Path) -> None:
    model = quantised_matmul(tmp_path, "uint8", "int8", columns=True, zero=False)
    proto = model.proto
    weight = next(node for node in proto.graph.node if node.name == "weight")
    weight.attribute[0].i = 0
    for constant in proto.graph.initializer:
        if constant.name in ("ws", "wz"):
            array = numpy_helper.to_array(constant)
            constant.CopyFrom(numpy_helper.from_array(np.resize(array, K), constant.name))
    path = tmp_path / "along_k.onnx"
    onnx.save(proto, path)
    with pytest.raises(UsageError, match="none of its matmuls reads 8-bit activations"):
        lowered(load_model(path))


def test_weights_are_int8_where_they_fit() -> None:
    assert narrowed(np.array([[-128, 127]], np.int32)).dtype == np.int8
    assert narrowed(np.array([[-129, 127]], np.int32)).dtype == np.int16
    assert narrowed(np.array([[0, 128]], np.int32)).dtype == np.int16
