"""A graph with symbolic axes that is being drawn, in the forms of an old or a new opset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from relaxtune.polynomials import Polynomial
from tests.guardrails.drawing import nodes_for

T = TypeVar("T")
Size = int | Polynomial
Sizes = tuple[Size, ...]
# The oldest opset of each form that the steps are written in.
OPSETS = (9, 10, 11, 12, 13, 14, 17, 18, 20, 21)
_IR_VERSIONS = {9: 4, 10: 5, 11: 6, 12: 7, 13: 7, 14: 7, 17: 8, 18: 8, 20: 9, 21: 10}
KINDS = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}


def size_of(size: Size, at: Mapping[str, int]) -> int:
    """Return a size as a number."""
    if isinstance(size, int):
        return size
    return sum(factor * int(np.prod([at[name] for name in names], dtype=int)) for names, factor in size.terms)


def _dim(size: Size, *, named: bool = True) -> int | str | None:
    """Return a size as a graph declares it: a number, a name, or nothing."""
    if isinstance(size, int):
        return size
    text = str(size)
    return text if named and text.isidentifier() else None


@dataclass
class SizedDrawing:
    """A graph with symbolic axes.

    Attributes
    ----------
    opset, dtype
        Of the nodes, and of its float tensors.
    shapes
        Of the float tensors so far, in the names of the inputs' axes; `?1` is a size that the steps do not follow.
    inputs
        Name -> dtype and sizes.
    limits
        The most that a sum of axes may be: a table of positions has no more rows.
    least
        The least size of each axis.
    ids
        Name of an input of indices -> rows of its table.
    """

    rng: np.random.Generator
    opset: int
    dtype: str
    shapes: dict[str, Sizes] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: dict[str, tuple[str, Sizes]] = field(default_factory=dict)
    limits: list[tuple[Polynomial, int]] = field(default_factory=list)
    least: dict[str, int] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    _names: int = 0

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def choice(self, *items: T) -> T:
        return items[int(self.rng.integers(len(items)))]

    def name(self, stem: str) -> str:
        self._names += 1
        return f"{stem}{self._names}"

    def unknown(self) -> Polynomial:
        """Return the size of an axis that the steps do not follow."""
        return Polynomial.symbol(self.name("?"))

    def input(self, dtype: str, shape: Sizes) -> str:
        name = self.name("x")
        self.inputs[name] = dtype, shape
        return name

    def constant(self, array: np.ndarray) -> str:
        name = self.name("c")
        self.constants[name] = array
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, "int64"))

    def scalar(self, value: int) -> str:
        return self.constant(np.array(value, "int64"))

    def number(self, value: float) -> str:
        return self.constant(np.array(value, self.dtype))

    def floats(self, *shape: int, size: float = 1.0) -> str:
        return self.constant((size * self.rng.standard_normal(shape)).astype(self.dtype))

    def node(self, operator: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        """Return the first result of a new node; the others are named `<first>_1`, `<first>_2`, ..."""
        name = self.name("t")
        names = [name, *(f"{name}_{place}" for place in range(1, outputs))]
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=f"n{name}", **attributes))
        return name

    def keep(self, name: str, shape: Sequence[Size]) -> None:
        self.shapes[name] = tuple(size if isinstance(size, int) or size.value is None else size.value for size in shape)

    def pick(self, least: int = 1, *, known_end: bool = False) -> tuple[str, Sizes]:
        """Return a tensor of at least so many axes, the newest most often; its last size may have to be a number."""
        fit = [
            (name, shape)
            for name, shape in self.shapes.items()
            if len(shape) >= least and (not known_end or isinstance(shape[-1], int))
        ]
        if not fit:
            raise LookupError
        return fit[-1] if self.chance(0.7) else self.choice(*fit)

    def axis(self, shape: Sizes, kind: type | None = None) -> int:
        """Return an axis, of known sizes or of symbolic ones only where a kind is given."""
        fit = [place for place, size in enumerate(shape) if kind is None or isinstance(size, kind)]
        if not fit:
            raise LookupError
        return self.choice(*fit)

    def require(self, size: Size, least: int) -> None:
        """Note that a size must be so large: each of its names is, where it is one that the steps follow."""
        if isinstance(size, int):
            if size < least:
                raise LookupError
            return
        gap = least - (dict(size.terms).get((), 0))
        if any(name.startswith("?") for name in size.names) or not (size - dict(size.terms).get((), 0)).is_positive:
            raise LookupError
        for name in size.names:
            self.least[name] = max(self.least.get(name, 1), gap)

    # The forms of an operator by opset: attributes became inputs.

    def with_axes(self, operator: str, x: str, axes: Sequence[int], since: int, **attributes: object) -> str:
        if self.opset < since:
            return self.node(operator, x, axes=list(axes), **attributes)
        return self.node(operator, x, self.ints(*axes), **attributes)

    def unsqueeze(self, x: str, *axes: int) -> str:
        return self.with_axes("Unsqueeze", x, axes, 13)

    def squeeze(self, x: str, *axes: int) -> str:
        return self.with_axes("Squeeze", x, axes, 13)

    def reduce(self, operator: str, x: str, axes: Sequence[int], keep: bool = True) -> str:
        return self.with_axes(operator, x, axes, 13 if operator == "ReduceSum" else 18, keepdims=int(keep))

    def slice(self, x: str, start: int, end: int, axis: int, step: int = 1) -> str:
        if self.opset < 10:
            if step != 1:
                raise LookupError
            return self.node("Slice", x, starts=[start], ends=[end], axes=[axis])
        return self.node("Slice", x, *(self.ints(number) for number in (start, end, axis, step)))

    def clip(self, x: str, low: float, high: float) -> str:
        if self.opset < 11:
            return self.node("Clip", x, min=float(low), max=float(high))
        return self.node("Clip", x, self.number(low), self.number(high))

    def length(self, x: str, axis: int) -> str:
        """Return a size of a tensor as a scalar."""
        return self.node("Gather", self.node("Shape", x), self.scalar(axis), axis=0)

    def range(self, end: str) -> str:
        """Return 0, 1, ... before a scalar; before opset 11 as exporters counted then."""
        if self.opset >= 11:
            return self.node("Range", self.scalar(0), end, self.scalar(1))
        one = helper.make_tensor("v", TensorProto.INT64, [1], [1])
        ones = self.node("ConstantOfShape", self.unsqueeze(end, 0), value=one)
        return self.squeeze(self.node("Transpose", self.node("NonZero", ones), perm=[1, 0]), 1)

    def proto(self, name: str, outputs: Sequence[str]) -> onnx.ModelProto:
        """Return the model that gives these tensors."""
        known = self.chance(0.5)
        results = {output: [_dim(size, named=known) for size in self.shapes[output]] for output in outputs}
        given = {one: (dtype, [_dim(size) for size in shape]) for one, (dtype, shape) in self.inputs.items()}
        graph = helper.make_graph(
            nodes_for(outputs, self.nodes), name,
            [helper.make_tensor_value_info(one, KINDS[dtype], dims) for one, (dtype, dims) in given.items()],
            [helper.make_tensor_value_info(one, KINDS[self.dtype], dims) for one, dims in results.items()],
            [numpy_helper.from_array(np.asarray(array), one) for one, array in self.constants.items()],
        )  # fmt: skip
        imports = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=imports, ir_version=_IR_VERSIONS[self.opset])

    def feeds(
        self, sizes: Mapping[str, int], rng: np.random.Generator, *, beyond: bool = False
    ) -> dict[str, np.ndarray]:
        """Return inputs of these sizes; with `beyond`, one index of each table lies behind its last row."""
        made: dict[str, np.ndarray] = {}
        for name, (dtype, shape) in self.inputs.items():
            at = tuple(size_of(size, sizes) for size in shape)
            if name in self.ids:
                drawn = rng.integers(-self.ids[name], self.ids[name], at)
                if drawn.size:
                    drawn.flat[int(rng.integers(drawn.size))] = self.ids[name] - (0 if beyond else 1)
                made[name] = drawn
            elif dtype == "bool":
                made[name] = rng.integers(0, 2, at).astype(bool)
            else:
                made[name] = rng.standard_normal(at).astype(dtype)
        return made
