"""The cases that the onnx package generates, in the two forms they are run in."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.node_tests.operators import CONSTANT_OPERANDS


class Form(StrEnum):
    """`SHIPPED` feeds every input at run time; `CONSTANT` has shapes, axes and the like as initializers."""

    SHIPPED = "shipped"
    CONSTANT = "constant"


@dataclass(frozen=True, eq=False)
class NodeCase:
    """One model of one node (or of the nodes its function expands to), its inputs and expected outputs.

    Attributes
    ----------
    operator
        The operator under test, also where `proto` holds the nodes it expands to.
    opset
        Version of the main domain that the case is written for.
    inputs
        Input name -> value; None where a value is no tensor (a sequence, an optional).
    outputs
        Expected values, in order; None where one is no tensor.
    """

    name: str
    operator: str
    opset: int
    form: Form
    proto: onnx.ModelProto
    inputs: Mapping[str, np.ndarray] | None
    outputs: tuple[np.ndarray, ...] | None
    rtol: float
    atol: float

    @property
    def key(self) -> str:
        """The name and the form: unique."""
        return f"{self.name}/{self.form.value}"


def list_cases(operators: Collection[str]) -> list[NodeCase]:
    """Return the cases of some operators of the main domain, each in its forms."""
    with warnings.catch_warnings():
        # The cases themselves divide by zero and overflow on purpose while they are generated.
        warnings.simplefilter("ignore")
        # Several modules draw their inputs without a seed of their own, when they are imported.
        np.random.seed(0)
        from onnx.backend.test.case.node import _existing_names, collect_testcases

        tests = collect_testcases(None)
    found = []
    for test in tests:
        node = _existing_names[test.name.partition("_expanded")[0]]
        if node.op_type in operators and node.domain in ("", "ai.onnx"):
            found.extend(_forms(test, node))
    return found


def _forms(test: Any, node: onnx.NodeProto) -> Iterator[NodeCase]:
    given, wanted = test.data_sets[0]
    inputs, outputs = [_array(value) for value in given], [_array(value) for value in wanted]
    names = [value.name for value in test.model.graph.input]
    tensors = all(value is not None for value in (*inputs, *outputs))
    opset = next(entry.version for entry in test.model.opset_import if entry.domain in ("", "ai.onnx"))
    feeds = {name: value for name, value in zip(names, inputs, strict=True) if value is not None} if tensors else None
    expected = tuple(value for value in outputs if value is not None) if tensors else None
    common = (test.name, node.op_type, opset)
    yield NodeCase(*common, Form.SHIPPED, test.model, feeds, expected, test.rtol, test.atol)
    constants = _constant_operands(node) & set(names)
    if feeds is not None and constants:
        proto = _with_constants(test.model, {name: feeds[name] for name in constants})
        rest = {name: value for name, value in feeds.items() if name not in constants}
        yield NodeCase(*common, Form.CONSTANT, proto, rest, expected, test.rtol, test.atol)


def _constant_operands(node: onnx.NodeProto) -> set[str]:
    places = CONSTANT_OPERANDS.get(node.op_type, ())
    return {node.input[place] for place in places if place < len(node.input)} - {""}


def _with_constants(model: onnx.ModelProto, values: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    kept = [value for value in changed.graph.input if value.name not in values]
    del changed.graph.input[:]
    changed.graph.input.extend(kept)
    changed.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    return changed


def _array(value: object) -> np.ndarray | None:
    if isinstance(value, onnx.TensorProto):
        return np.asarray(numpy_helper.to_array(value))
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    return None
