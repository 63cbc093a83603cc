"""Graphs that are nearly what a pass looks for: constants that broadcast, and constants a little off."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, make_onnx, run_lowered

Shape = tuple[int, ...]


def node(kind: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], name=f"{kind}_{output}", **attributes)


def full(shape: Shape, number: float) -> np.ndarray:
    return np.full(shape, number, np.float32)


def random(shape: Shape) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def gelu(half: Shape = (), one: Shape = (), root: Shape = (), *, by: float = 1.0, out: Shape = (3, 4)) -> OnnxModel:
    nodes = [node("Div", "x root", "d"), node("Erf", "d", "e"), node("Add", "e one", "a"), node("Mul", "x a", "p")]
    constants = {"root": full(root, np.sqrt(2) * by), "one": full(one, 1), "half": full(half, 0.5)}
    return make_onnx([*nodes, node("Mul", "p half", "y")], {"x": ("float", (4,))}, {"y": ("float", out)}, constants)


def gelu_tanh(cubic: Shape = (), scale: Shape = (), *, by: float = 1.0, out: Shape = (3, 4)) -> OnnxModel:
    nodes = [
        node("Mul", "x x", "s"), node("Mul", "s x", "c"), node("Mul", "c cubic", "k"), node("Add", "x k", "i"),
        node("Mul", "i scale", "j"), node("Tanh", "j", "t"), node("Add", "t one", "a"), node("Mul", "x a", "p"),
        node("Mul", "p half", "y"),
    ]  # fmt: skip
    constants = {"cubic": full(cubic, 0.044715 * by), "scale": full(scale, np.sqrt(2 / np.pi))}
    constants |= {"one": full((), 1), "half": full((), 0.5)}
    return make_onnx(nodes, {"x": ("float", (4,))}, {"y": ("float", out)}, constants)


def norm(
    epsilon: Shape = (), gamma: Shape = (8,), beta: Shape = (8,), *, out: Shape, x: Shape = (4, 8), rms: bool = False
) -> OnnxModel:
    nodes = [] if rms else [node("ReduceMean", "x axes", "m", keepdims=1), node("Sub", "x m", "c")]
    c = "x" if rms else "c"
    nodes += [
        node("Mul", f"{c} {c}", "s"), node("ReduceMean", "s axes", "v", keepdims=1), node("Add", "v epsilon", "w"),
        node("Sqrt", "w", "r"), node("Div", f"{c} r", "q"), node("Mul", "q gamma", "y" if rms else "g"),
    ]  # fmt: skip
    nodes += [] if rms else [node("Add", "g beta", "y")]
    constants = {"axes": np.array([-1]), "epsilon": full(epsilon, 1e-5), "gamma": random(gamma)}
    constants |= {} if rms else {"beta": random(beta)}
    return make_onnx(nodes, {"x": ("float", x)}, {"y": ("float", out)}, constants)


def nan_guard(zero: Shape = (3, 1, 1)) -> OnnxModel:
    nodes = [
        node("MatMul", "x w", "t"), node("Softmax", "t", "s"), node("IsNaN", "s", "n"), node("Where", "n zero s", "y"),
    ]  # fmt: skip
    constants = {"w": random((4, 4)), "zero": full(zero, 0)}
    return make_onnx(nodes, {"x": ("float", (2, 4))}, {"y": ("float", (3, 2, 4))}, constants)


def one_row_and_many() -> OnnxModel:
    """Return rows that are restored to axes, one of whose terms is a single row."""
    nodes = [
        node("MatMul", "z w", "a"), node("MatMul", "x w", "b"), node("Add", "a b", "c"), node("Reshape", "c axes", "y"),
    ]  # fmt: skip
    constants = {"w": random((4, 5)), "axes": np.array([2, 3, 5])}
    inputs = {"x": ("float", (6, 4)), "z": ("float", (1, 4))}
    return make_onnx(nodes, inputs, {"y": ("float", (2, 3, 5))}, constants)


CASES: dict[str, Callable[[], OnnxModel]] = {
    "gelu: half broadcasts": lambda: gelu(half=(3, 1)),
    "gelu: one broadcasts": lambda: gelu(one=(3, 1)),
    "gelu: root broadcasts": lambda: gelu(root=(3, 1)),
    "gelu: root off by 9e-4": lambda: gelu(by=1.0009, out=(4,)),
    "gelu: root off by 1e-4": lambda: gelu(by=1.0001, out=(4,)),
    "gelu tanh: 0.044715 broadcasts": lambda: gelu_tanh(cubic=(3, 1)),
    "gelu tanh: scale broadcasts": lambda: gelu_tanh(scale=(3, 1)),
    "gelu tanh: 0.044715 off by 9e-4": lambda: gelu_tanh(by=1.0009, out=(4,)),
    "layer norm: epsilon broadcasts": lambda: norm(epsilon=(3, 1, 1), out=(3, 4, 8)),
    "layer norm: gamma of higher rank": lambda: norm(gamma=(1, 1, 8), out=(1, 4, 8)),
    "layer norm: beta of higher rank": lambda: norm(beta=(1, 1, 8), out=(1, 4, 8)),
    "layer norm: a gamma for each row": lambda: norm(gamma=(4, 8), out=(4, 8)),
    "RMS norm: epsilon broadcasts": lambda: norm(epsilon=(3, 1, 1), out=(3, 4, 8), rms=True),
    "RMS norm: gamma of higher rank": lambda: norm(gamma=(1, 1, 8), out=(1, 4, 8), rms=True),
    "guard: zero broadcasts": nan_guard,
    "unflattened: one term is a single row": one_row_and_many,
}
FOUND = ("gelu", "layer_norm", "rms_norm")


def agrees(model: OnnxModel) -> LoweredModule:
    feeds = {spec.name: random(tuple(int(size) for size in spec.shape)) for spec in model.inputs}
    lowered = lower(import_model(model), LLVM)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 2e-6)
    return lowered


@pytest.mark.parametrize("name", CASES)
def test_a_near_miss_agrees_with_onnx_runtime(name: str) -> None:
    lowered = agrees(CASES[name]())
    whole = name.endswith("higher rank") or name.startswith("guard")
    assert whole or not any(kernel.startswith(found) for kernel in lowered.kernels for found in FOUND)


@pytest.mark.parametrize(
    ("model", "kernel"),
    [
        (lambda: gelu(out=(4,)), "gelu"),
        (lambda: gelu(half=(1,), root=(4,), out=(4,)), "gelu"),
        (lambda: gelu_tanh(out=(4,)), "gelu_tanh"),
        (lambda: norm(out=(4, 8)), "layer_norm"),
        (lambda: norm(epsilon=(1, 1), gamma=(1, 8), out=(4, 8)), "layer_norm"),
        (lambda: norm(out=(4, 8), rms=True), "rms_norm"),
    ],
)
def test_what_is_no_near_miss_is_found(model: Callable[[], OnnxModel], kernel: str) -> None:
    assert list(agrees(model()).kernels) == [kernel]


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("x", [(1, 2, 2), (3, 2, 16), (1, 1), (8,), (2, 1)])
def test_norms_of_rows_of_any_length_agree_with_onnx_runtime(x: Shape, rms: bool) -> None:
    agrees(norm(gamma=x[-1:], beta=x[-1:], out=x, x=x, rms=rms))


def norm_between_matmuls(x: Shape, axis: int) -> OnnxModel:
    nodes = [node("MatMul", "x v", "a"), node("LayerNormalization", "a gamma beta", "n", axis=axis)]
    constants = {"v": random((64, 64)), "w": random((64, 64)), "gamma": random(x[axis:]), "beta": random(x[axis:])}
    return make_onnx([*nodes, node("MatMul", "n w", "y")], {"x": ("float", x)}, {"y": ("float", x)}, constants)


@pytest.mark.parametrize(
    "model",
    [
        lambda: norm(gamma=(2,), out=(1, 2, 2), x=(1, 2, 2), rms=True),
        lambda: norm(gamma=(2,), beta=(2,), out=(1, 2, 2), x=(1, 2, 2)),
        lambda: norm_between_matmuls((3, 2, 64), -1),
        lambda: norm_between_matmuls((3, 2, 64), -2),
        lambda: norm_between_matmuls((2, 64), -1),
    ],
)
def test_norms_of_two_rows_or_columns_are_lowered_for_hopper(model: Callable[[], OnnxModel]) -> None:
    for precision in (None, "fp16"):
        graph, target = import_model(model()), resolve_target("cuda:sm_90a").target
        assert lower(graph, target, LoweringOptions(precision=precision)).kernels
