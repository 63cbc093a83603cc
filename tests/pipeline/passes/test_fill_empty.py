"""What is computed of no elements is known: TVM's kernels leave what was in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from tests.pipeline.importer.onnx_cases import make_model, run_reference
from tests.pipeline.passes.pass_cases import UNOPTIMISED, run_lowered

NONE = {"x": np.zeros((2, 0, 3), "float32"), "i": np.zeros((2, 0, 3), "int32"), "m": np.zeros((3, 0), "float32")}
EMPTY, FULL = (2, 0, 3), (2, 3)


def of_none() -> OnnxModel:
    """Return a graph of reductions of no elements, and of tensors of none."""
    nodes: list[onnx.NodeProto] = []
    outputs: dict[str, tuple[str, Sequence[int]]] = {}

    def add(operator: str, inputs: str, shape: Sequence[int], dtype: str = "float32", **attributes: object) -> None:
        name = f"y{len(nodes)}"
        nodes.append(helper.make_node(operator, inputs.split(), [name], **attributes))
        outputs[name] = (dtype, shape)

    for name in ("Mean", "Max", "Min", "Sum", "Prod", "L2", "LogSum", "LogSumExp"):
        add(f"Reduce{name}", "x axis", FULL, keepdims=0)
    for name in ("Max", "Min", "Prod"):
        add(f"Reduce{name}", "i axis", FULL, "int32", keepdims=0)
    add("MatMul", "m w", (3, 4))
    add("Gemm", "m w bias", (3, 4))
    add("Softmax", "x", EMPTY, axis=1)
    add("LayerNormalization", "x gamma", EMPTY)
    add("Expand", "x sizes", (5, 2, 0, 3))
    add("Concat", "x row", (2, 1, 3), axis=1)
    constants = {
        "axis": np.array([1]), "w": np.zeros((0, 4), "float32"), "bias": np.ones(4, "float32"),
        "gamma": np.ones(3, "float32"), "sizes": np.array([5, 2, 0, 3]), "row": np.ones((2, 1, 3), "float32"),
    }  # fmt: skip
    inputs = {name: (str(array.dtype), array.shape) for name, array in NONE.items()}
    return make_model(nodes, inputs, outputs, constants, opset=18)


def test_reductions_of_no_elements_are_those_of_onnx_runtime() -> None:
    model = of_none()
    lowered = lower(import_model(model), UNOPTIMISED)
    assert not [report.failure for report in lowered.reports if report.failure]
    for got, want in zip(run_lowered(lowered, NONE), run_reference(model, NONE), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("sizes", [(2, 3, 0), (2, 3, 2)])
def test_result_that_depends_on_no_input_is_a_weight(sizes: tuple[int, ...]) -> None:
    """An executable holds no constant without elements, and gives out the one it holds, not a copy."""
    node = helper.make_node("ConstantOfShape", ["sizes"], ["y"])
    model = make_model([node], {"x": ("float32", (1,))}, {"y": ("float32", sizes)}, {"sizes": np.array(sizes)})
    lowered = lower(import_model(model), UNOPTIMISED)
    assert [array.shape for array in lowered.weights.values()] == [sizes]
    (got,) = run_lowered(lowered, {"x": np.zeros(1, "float32")})
    np.testing.assert_array_equal(got, np.zeros(sizes))


@pytest.mark.parametrize("rows", ["rows", 3])
def test_what_is_joined_to_none_stays_as_it_is(rows: int | str) -> None:
    """As rotary embeddings of whole heads are written: the rest of each head, which is nothing, is joined again."""
    nodes = [
        helper.make_node("Slice", ["x", "size", "end", "axis"], ["rest"]),
        helper.make_node("Neg", ["x"], ["turned"]),
        helper.make_node("Concat", ["turned", "rest"], ["y"], axis=1),
        helper.make_node("Concat", ["rest", "turned", "rest", "x"], ["z"], axis=1),
    ]
    constants = {"size": np.array([8]), "end": np.array([2**63 - 1]), "axis": np.array([1])}
    outputs = {"y": ("float32", (rows, 8)), "z": ("float32", (rows, 16))}
    model = make_model(nodes, {"x": ("float32", (rows, 8))}, outputs, constants)
    lowered = lower(import_model(model), UNOPTIMISED)
    assert "zeros" not in str(lowered.mod)
    feeds = {"x": np.arange(24, dtype="float32").reshape(3, 8)}
    for got, want in zip(run_lowered(lowered, feeds), run_reference(model, feeds), strict=True):
        np.testing.assert_array_equal(got, want)
