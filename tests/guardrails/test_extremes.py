"""Norms, softmax and activations on values at the ends of the range, infinite and NaN: as ONNX Runtime has it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.validate.array_comparison import compare_arrays
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.validate.tolerances import Tolerance
from tests.pipeline.importer.onnx_cases import make_model
from tests.pipeline.passes.pass_cases import LLVM, run_lowered

WIDTH = 24
NODE = helper.make_node
# A value near the largest, and one whose square is beyond the range. Rows of float32 are kept so small that their sum
# is finite: norms add up in float32, where ONNX Runtime has double.
EDGES = {"float16": (65504.0, 300.0), "float32": (1e37, 1e20)}


def rows(dtype: str) -> np.ndarray:
    """One row for each thing that goes wrong: overflow of squares and sums, cancellation, infinities, NaN."""
    rng = np.random.default_rng(0)
    usual = rng.standard_normal(WIDTH)
    largest, square = EDGES[dtype]
    made = [
        usual,
        usual * square,
        np.full(WIDTH, largest / 4),
        np.where(np.arange(WIDTH) == 3, largest / 2, usual),
        usual * 1e-6,
        np.zeros(WIDTH),
        30 + usual * 1e-1,
        np.where(np.arange(WIDTH) == 5, np.inf, usual),
        np.where(np.arange(WIDTH) == 5, -np.inf, usual),
        np.full(WIDTH, -np.inf),
        np.where(np.arange(WIDTH) == 7, np.nan, usual),
    ]
    return np.stack(made).astype(dtype)


def graph_of(kind: str, dtype: str) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    scale = np.linspace(0.5, 1.5, WIDTH).astype(dtype)
    bias = np.linspace(-0.5, 0.5, WIDTH).astype(dtype)
    match kind:
        case "layer norm":
            return [NODE("LayerNormalization", ["x", "scale", "bias"], ["y"])], {"scale": scale, "bias": bias}
        case "rms norm":
            # As exporters write it for Llama: in float32, from whatever the graph computes in.
            nodes = [
                NODE("Cast", ["x"], ["wide"], to=onnx.TensorProto.FLOAT),
                NODE("Pow", ["wide", "two"], ["square"]),
                NODE("ReduceMean", ["square", "axes"], ["mean"], keepdims=1),
                NODE("Add", ["mean", "eps"], ["shifted"]),
                NODE("Sqrt", ["shifted"], ["root"]),
                NODE("Div", ["wide", "root"], ["normed"]),
                NODE("Cast", ["normed"], ["narrow"], to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype))),
                NODE("Mul", ["narrow", "scale"], ["y"]),
            ]
            constants = {"two": np.float32(2), "axes": np.array([-1]), "eps": np.float32(1e-6), "scale": scale}
            return nodes, {name: np.asarray(value) for name, value in constants.items()}
        case "softmax":
            return [NODE("Softmax", ["x"], ["y"], axis=-1)], {}
        case "scaled and masked softmax":
            mask = np.where(np.arange(WIDTH) < 20, 0, np.finfo(dtype).min).astype(dtype)
            nodes = [
                NODE("Mul", ["x", "scale"], ["scaled"]),
                NODE("Add", ["scaled", "mask"], ["masked"]),
                NODE("Softmax", ["masked"], ["y"]),
            ]
            return nodes, {"scale": np.asarray(0.125, dtype), "mask": mask}
        case _:
            return [NODE(kind, ["x"], ["y"])], {}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "kind",
    ["layer norm", "rms norm", "softmax", "scaled and masked softmax", "Gelu", "Erf", "Tanh", "Sigmoid", "Exp"],
)
def test_extreme_values_give_what_onnx_runtime_gives(kind: str, dtype: str) -> None:
    nodes, constants = graph_of(kind, dtype)
    x = rows(dtype)
    shape = ("rows", WIDTH)
    model = make_model(nodes, {"x": (dtype, shape)}, {"y": (dtype, shape)}, constants, opset=20)
    with np.errstate(all="ignore"):
        want = Reference(model).run({"x": x})["y"]
        # The reference computes in float32; what is beyond float16 is infinite in the output.
        want = want.astype(dtype).astype("float32")
    (got,) = run_lowered(lower(import_model(model), LLVM), {"x": x}, LLVM)
    tolerance = Tolerance(1e-2, 1e-2) if dtype == "float16" else Tolerance(1e-4, 1e-4)
    for number, (wanted, found) in enumerate(zip(want, got, strict=True)):
        compared = compare_arrays(wanted, found, tolerance)
        assert compared.passed, f"row {number} {x[number][:8]}: {compared.reason}"
