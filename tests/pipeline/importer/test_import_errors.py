from __future__ import annotations

import re
import sys
from collections.abc import Callable

import numpy as np
import pytest
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.errors import ImportFailedError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.importer.errors import reason_of
from relaxtune.pipeline.importer.frontend import NodeByNodeImporter
from relaxtune.pipeline.importer.unsupported import find_unsupported
from tests.pipeline.importer.onnx_cases import make_model

VECTOR = ("float32", (4,))


def unknown_operators() -> OnnxModel:
    nodes = [
        helper.make_node("Det", ["m"], ["d"], name="/head/Det"),
        helper.make_node("Wobble", ["x", "", "w"], ["a"], name="/head/Wobble", domain="com.example"),
        helper.make_node("Wobble", ["a", "", "w"], ["y"], name="/head/Wobble_1", domain="com.example"),
    ]
    return make_model(
        nodes,
        {"x": VECTOR, "m": ("float32", (2, 2))},
        {"y": VECTOR, "d": ("float32", ())},
        {"w": np.zeros(3, "float32")},
        domains={"com.example": 2},
    )


@pytest.mark.parametrize(
    "part",
    [
        r"model 'case': no converter for ai\.onnx\.Det \(opset 18\), node '/head/Det', inputs \(m: float32\[2x2\]\)",
        r"Unsupported operators in this model: ai\.onnx\.Det \(opset 18\) x1, com\.example\.Wobble \(opset 2\) x2",
        r"standard ONNX operators .* or add a converter",
    ],
)
def test_import_names_the_node_and_lists_all_operators_when_some_are_unknown(part: str) -> None:
    with pytest.raises(ImportFailedError, match=part):
        import_model(unknown_operators())


def test_import_describes_constants_and_left_out_inputs_when_an_operator_is_unknown() -> None:
    nodes = [helper.make_node("Wobble", ["x", "", "w", "n"], ["y"], domain="com.example")]
    model = make_model(
        nodes,
        {"x": ("int64", ("batch", 3)), "n": VECTOR},
        {"y": VECTOR},
        {"w": np.zeros((2, 3), "float16")},
        domains={"com.example": 1},
    )
    model.proto.graph.input[1].type.tensor_type.ClearField("shape")
    described = r"x: int64\[batch x 3\], \(left out\): unknown, w: float16\[2x3\] constant, n: float32\[unknown rank\]"
    with pytest.raises(ImportFailedError, match=described):
        import_model(model)


def test_import_refuses_a_contrib_operator_in_the_standard_domain() -> None:
    model = make_model([helper.make_node("BiasGelu", ["x", "x"], ["y"])], {"x": VECTOR}, {"y": VECTOR})
    with pytest.raises(ImportFailedError, match=r"no converter for ai\.onnx\.BiasGelu"):
        import_model(model)


def test_import_accepts_the_same_operator_in_its_own_domain() -> None:
    model = make_model(
        [helper.make_node("BiasGelu", ["x", "x"], ["y"], domain="com.microsoft", name="act")],
        {"x": VECTOR},
        {"y": VECTOR},
        domains={"com.microsoft": 1},
    )
    assert ("act",) in import_model(model).source_map.values()


def test_import_refuses_a_standard_name_in_a_foreign_domain() -> None:
    model = make_model(
        [helper.make_node("Add", ["x", "x"], ["y"], domain="com.example")],
        {"x": VECTOR},
        {"y": VECTOR},
        domains={"com.example": 1},
    )
    with pytest.raises(ImportFailedError, match=r"no converter for com\.example\.Add \(opset 1\)"):
        import_model(model)


def test_import_finds_an_unknown_operator_inside_a_branch() -> None:
    branch = helper.make_graph(
        [helper.make_node("Det", ["m"], ["d"], name="inner")], "b", [], [helper.make_tensor_value_info("d", 1, [])]
    )
    model = make_model(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)],
        {"c": ("bool", ()), "m": ("float32", (2, 2))},
        {"y": ("float32", ())},
    )
    with pytest.raises(ImportFailedError, match=r"ai\.onnx\.Det \(opset 18\) x2"):
        import_model(model)


@pytest.mark.parametrize(
    ("operator", "second", "said"),
    [("Add", ("float32", ("m", 2)), "TopK .*node 'inner'.*Cause: the sizes of r are not known"),
     ("Reshape", ("int64", (2,)), r"Reshape .*'outer'.*Cause: input 1 \(shape\): expected a constant")],
)  # fmt: skip
def test_import_says_what_is_known_in_a_call_only_inside_a_branch(
    operator: str, second: tuple[str, tuple[int | str, ...]], said: str
) -> None:
    nodes = [
        helper.make_node(operator, ["x", "s"], ["r"], name="outer"),
        helper.make_node("TopK", ["r", "k"], ["d", "e"], name="inner"),
    ]
    branch = helper.make_graph(nodes, "b", [], [helper.make_tensor_value_info("d", 1, [None, None])])
    model = make_model(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)],
        {"c": ("bool", ()), "s": second, "x": ("float32", ("n", 2))},
        {"y": ("float32", ("a", "b"))},
        {"k": np.array([1])},
    )
    with pytest.raises(ImportFailedError, match="(?s)" + said):
        import_model(model)


def conversion_failure() -> OnnxModel:
    """Return a model on which TVM's converter raises: it wants the sizes of a split known."""
    return make_model(
        [helper.make_node("Split", ["x", "n"], ["y", "z"], name="/cut")],
        {"x": VECTOR, "n": ("int64", (2,))},
        {"y": ("float32", ("a",)), "z": ("float32", ("b",))},
    )


def test_import_names_the_node_and_keeps_the_cause_when_a_conversion_fails(capfd: pytest.CaptureFixture[str]) -> None:
    expected = (
        r"(?s)cannot convert ai\.onnx\.Split \(opset 18\), node '/cut', inputs \(x: float32\[4\], n: int64\[2\]\)\.\n"
    )
    expected += r"Cause: Dynamic Split not yet supported\n.*another opset"
    with pytest.raises(ImportFailedError, match=expected) as caught:
        import_model(conversion_failure())
    assert caught.value.__cause__ is not None
    del caught
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("read", [import_model, find_unsupported])
@pytest.mark.parametrize("where", ["step", "node"])
def test_memory_that_is_full_is_no_fault_of_a_node_or_a_step(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[OnnxModel], object], where: str
) -> None:
    def allocate(*_: object) -> None:
        raise MemoryError("no room")

    if where == "step":
        monkeypatch.setitem(sys.modules["relaxtune.pipeline.importer.normalise"]._SIMPLIFY, "infer shapes", allocate)
    else:
        monkeypatch.setattr(NodeByNodeImporter, "_construct", allocate)
    model = make_model([helper.make_node("Neg", ["x"], ["y"])], {"x": VECTOR}, {"y": VECTOR})
    with pytest.raises(MemoryError):
        read(model)


def test_slip_of_a_converter_is_said_in_words_of_the_model() -> None:
    slip = AttributeError("'ShapeType' object has no attribute 'shape'")
    assert reason_of(slip) == "the converter has no case for inputs of these types and sizes"


def test_trees_are_refused_in_a_line_that_says_what_to_do() -> None:
    node = helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[0.0], scale=[1.0])
    model = make_model(
        [node], {"x": ("float32", ["n", 4])}, {"y": ("float32", ["n", 4])}, domains={"ai.onnx.ml": 3}
    )  # fmt: skip
    with pytest.raises(
        ImportFailedError, match=r"computes with Scaler of ai.onnx.ml .*run it in ONNX Runtime"
    ) as found:
        import_model(model)
    assert "\n" not in str(found.value)


def test_sizes_of_a_message_are_in_the_words_of_the_model() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["half"], strides=[2], pads=[1, 1]),
        helper.make_node("DFT", ["half"], ["y"], axis=2, onesided=1),
    ]
    model = make_model(
        nodes, {"x": ("float32", ["n", 1, "samples"])}, {"y": ("float32", ["n", 1, "k"])},
        {"w": np.ones((1, 1, 3), "float32")},
    )  # fmt: skip
    with pytest.raises(ImportFailedError) as found:
        import_model(model)
    assert not re.search(r"T\.|floor\(|unk__|Error:", str(found.value))
    assert "fixed size, got ((samples + 1) // 2)" in str(found.value)
