"""ONNX Runtime's contrib operators, and the newest ONNX ones, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.importer.converters.matmuls import unpack_weights
from tests.pipeline.importer.onnx_cases import assert_agrees, make_model, run_relax

RNG = np.random.default_rng(7)
B, S, N, H = 2, 5, 4, 16
_START = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Let each test draw the same numbers whatever ran before it."""
    RNG.bit_generator.state = _START


def floats(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def model_of(
    op: str,
    inputs: Sequence[tuple[str, np.ndarray] | None],
    outputs: Mapping[str, tuple[str, Sequence[int | str]]],
    *,
    domain: str = "com.microsoft",
    opset: int = 18,
    constants: frozenset[str] = frozenset(),
    **attributes: object,
) -> tuple[OnnxModel, dict[str, np.ndarray]]:
    """Return a model of one node and its feeds; None is an input left out, a name in `constants` an initializer."""
    given = {name: value for name, value in (item for item in inputs if item is not None)}
    names = ["" if item is None else item[0] for item in inputs]
    node = helper.make_node(op, names, list(outputs), name="node", domain=domain, **attributes)
    model = make_model(
        [node],
        {name: (str(value.dtype), value.shape) for name, value in given.items() if name not in constants},
        {name: spec for name, spec in outputs.items() if name},
        {name: value for name, value in given.items() if name in constants},
        opset=opset,
        domains={domain: 1} if domain else {},
    )
    return model, {name: value for name, value in given.items() if name not in constants}


@pytest.mark.parametrize(
    ("op", "biased", "attributes"),
    [
        ("Gelu", False, {}),
        ("BiasGelu", True, {}),
        ("FastGelu", False, {}),
        ("FastGelu", True, {}),
        ("QuickGelu", False, {}),
        ("QuickGelu", False, {"alpha": 1.1}),
    ],
)
def test_gelus(op: str, biased: bool, attributes: dict[str, float]) -> None:
    inputs = [("x", floats(2, 3, 6)), ("bias", floats(6))][: 2 if biased else 1]
    assert_agrees(*model_of(op, inputs, {"y": ("float32", (2, 3, 6))}, **attributes), tolerance=2e-5)


@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_skip_layer_norm_with_its_sum(beta: bool, bias: bool) -> None:
    inputs = [
        ("x", floats(B, S, 16)),
        ("skip", floats(B, S, 16)),
        ("gamma", floats(16)),
        ("beta", floats(16)) if beta else None,
        ("bias", floats(16)) if bias else None,
    ]
    outputs = {"y": ("float32", (B, S, 16)), "": ("float32", ()), "sum": ("float32", (B, S, 16))}
    model, feeds = model_of("SkipLayerNormalization", inputs, outputs, epsilon=1e-5)
    model.proto.graph.node[0].output[:] = ["y", "", "", "sum"]
    assert_agrees(model, feeds)


@pytest.mark.parametrize("bias", [True, False])
def test_skip_simplified_layer_norm_with_its_sum(bias: bool) -> None:
    inputs = [("x", floats(B, S, 16)), ("skip", floats(B, S, 16)), ("gamma", floats(16))]
    inputs += [("bias", floats(16))] if bias else []
    outputs = {"y": ("float32", (B, S, 16)), "sum": ("float32", (B, S, 16))}
    model, feeds = model_of("SkipSimplifiedLayerNormalization", inputs, outputs, epsilon=1e-5)
    model.proto.graph.node[0].output[:] = ["y", "", "", "sum"]
    assert_agrees(model, feeds)


def test_simplified_layer_norm() -> None:
    inputs = [("x", floats(B, S, 16)), ("gamma", floats(16))]
    attributes = {"axis": -1, "epsilon": 1e-6, "stash_type": 1}
    assert_agrees(
        *model_of("SimplifiedLayerNormalization", inputs, {"y": ("float32", (B, S, 16))}, domain="", **attributes)
    )


def test_a_mean_that_is_read_is_refused() -> None:
    inputs = [("x", floats(B, S, 16)), ("skip", floats(B, S, 16)), ("gamma", floats(16))]
    outputs = {"y": ("float32", (B, S, 16)), "mean": ("float32", (B, S, 1))}
    model, _ = model_of("SkipLayerNormalization", inputs, outputs)
    with pytest.raises(ImportFailedError, match=r"output 1 \(mean\) is not computed"):
        import_model(model)


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("places", [True, False])
def test_embed_layer_norm(segments: bool, places: bool) -> None:
    inputs = [
        ("ids", RNG.integers(0, 30, (B, S)).astype("int32")),
        ("segments", RNG.integers(0, 2, (B, S)).astype("int32")) if segments else None,
        ("words", floats(30, 16)),
        ("positions", floats(9, 16)),
        ("kinds", floats(2, 16)) if segments else None,
        ("gamma", floats(16)),
        ("beta", floats(16)),
        ("mask", np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], "int32")),
        ("places", RNG.integers(0, 9, (B, S)).astype("int32")) if places else None,
    ]
    outputs = {"y": ("float32", (B, S, 16)), "count": ("int32", (B,)), "sum": ("float32", (B, S, 16))}
    assert_agrees(*model_of("EmbedLayerNormalization", inputs, outputs, epsilon=1e-5))


def test_embedding_without_a_mask_counts_no_tokens() -> None:
    inputs = [
        ("ids", RNG.integers(0, 9, (B, S)).astype("int32")),
        None,
        *((name, floats(rows, 12)) for name, rows in (("words", 9), ("positions", S))),
        None,
        ("gamma", floats(12)),
        ("beta", floats(12)),
    ]
    outputs = {"y": ("float32", (B, S, 12)), "mask_index": ("int32", (B,))}
    assert_agrees(*model_of("EmbedLayerNormalization", inputs, outputs, epsilon=1e-5))


@pytest.mark.parametrize(("left", "right"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_fused_matmul(left: int, right: int) -> None:
    a = floats(2, 4, 3) if left else floats(2, 3, 4)
    b = floats(2, 5, 4) if right else floats(2, 4, 5)
    attributes = {"transA": left, "transB": right, "alpha": 0.25}
    assert_agrees(*model_of("FusedMatMul", [("a", a), ("b", b)], {"y": ("float32", (2, 3, 5))}, **attributes))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", ["none", "packed"])
def test_matmul_n_bits(bits: int, zeros: str) -> None:
    rows, columns, block = 6, 64, 32
    blocks = columns // block
    packed = RNG.integers(0, 256, (rows, blocks, block * bits // 8)).astype("uint8")
    row_bytes = -(-blocks * bits // 8)
    inputs: list[tuple[str, np.ndarray] | None] = [
        ("a", floats(3, columns)),
        ("w", packed),
        ("scales", np.abs(floats(rows * blocks)) / 16),
        ("zeros", RNG.integers(0, 256, rows * row_bytes).astype("uint8")) if zeros == "packed" else None,
    ]
    model, feeds = model_of(
        "MatMulNBits",
        inputs,
        {"y": ("float32", (3, rows))},
        constants=frozenset({"w", "scales", "zeros"}),
        N=rows,
        K=columns,
        bits=bits,
        block_size=block,
    )
    assert_agrees(model, feeds, tolerance=1e-3)


def test_packed_numbers_begin_in_the_low_bits() -> None:
    packed = np.array([[[0x21, 0x43]]], "uint8")
    got = unpack_weights(packed, np.ones(1, "float32"), None, rows=1, columns=4, bits=4, block=4)
    assert got.tolist() == [[1 - 8, 2 - 8, 3 - 8, 4 - 8]]


def test_weights_that_are_not_constant_are_refused() -> None:
    inputs = [
        ("a", floats(3, 32)),
        ("w", np.zeros((4, 1, 16), "uint8")),
        ("scales", np.ones(4, "float32")),
    ]
    model, _ = model_of("MatMulNBits", inputs, {"y": ("float32", (3, 4))}, N=4, K=32, bits=4, block_size=32)
    with pytest.raises(ImportFailedError, match="expected constants"):
        import_model(model)


def test_swish_of_opset_24() -> None:
    inputs = [("x", floats(3, 4))]
    model, feeds = model_of("Swish", inputs, {"y": ("float32", (3, 4))}, domain="", opset=24, alpha=1.3)
    x = feeds["x"]
    (got,) = run_relax(import_model(model), feeds)
    np.testing.assert_allclose(got, x / (1 + np.exp(-1.3 * x)), rtol=1e-5, atol=1e-6)


def test_an_unknown_contrib_operator_is_named() -> None:
    node = helper.make_node("BeamSearch", ["x"], ["y"], domain="com.microsoft")
    model = make_model([node], {"x": ("float32", (1,))}, {"y": ("float32", (1,))}, domains={"com.microsoft": 1})
    assert isinstance(model.proto, onnx.ModelProto)
    with pytest.raises(ImportFailedError, match=r"com\.microsoft\.BeamSearch"):
        import_model(model)
