"""What is known of a tensor and of the sizes of a graph while the graph is followed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import numpy_helper

from relaxtune.models.axes.polynomials import Polynomial

Shape = tuple[Polynomial, ...]

# Vectors of sizes are as long as ranks; a longer tensor is data.
MAX_LENGTH = 64
INTEGERS = frozenset({onnx.TensorProto.INT64, onnx.TensorProto.INT32})
ZERO, ONE = Polynomial.number(0), Polynomial.number(1)


@dataclass(frozen=True)
class Known:
    """What is known of a tensor.

    Attributes
    ----------
    shape
        Its sizes; None where not even the rank is known.
    data
        The elements of an integer scalar or vector.
    top
        The largest of its integers: one for all of them, or one for each place of the last axis.
    """

    shape: Shape | None = None
    data: Shape | None = None
    top: Shape | None = None


UNKNOWN = Known()


@dataclass
class AxisFacts:
    """What was found so far of the sizes in a graph.

    Attributes
    ----------
    order
        The names in the sizes of the inputs, each with its place.
    solved
        Name -> the size that it is equal to.
    at_least
        Sizes, each with one that it is at least, and the table or node that says so.
    constants
        The small constants, by name.
    tables
        Names of all constants.
    below_zero
        Name of a tensor that says where another is negative -> the name of the other.
    """

    order: Mapping[str, int]
    solved: dict[str, Polynomial] = field(default_factory=dict)
    at_least: list[tuple[Polynomial, Polynomial, str]] = field(default_factory=list)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)
    tables: set[str] = field(default_factory=set)
    below_zero: dict[str, str] = field(default_factory=dict)
    _fresh: int = 0

    def resolve(self, size: Polynomial) -> Polynomial:
        """Return a size in the names that are not solved."""
        while any(name in self.solved for name in size.names):
            size = size.substitute(self.solved)
        return size

    def new_symbol(self) -> Polynomial:
        """Return a new symbol, for a size that is not known."""
        self._fresh += 1
        return Polynomial.symbol(f"?{self._fresh}")

    def equate(self, left: Polynomial, right: Polynomial) -> None:
        """Note that two sizes are equal: one name is solved, an unknown first, else the last of the inputs' names."""
        gap = self.resolve(left - right)
        answers = [(name, gap.solved_for(name)) for name in gap.names]
        usable = [(n, a) for n, a in answers if a is not None and a.terms and (a.is_positive or n.startswith("?"))]
        if usable:
            name, answer = max(usable, key=lambda item: (item[0].startswith("?"), self.order.get(item[0], -1)))
            self.solved[name] = answer

    def require(self, node: onnx.NodeProto, table: int, size: Polynomial, least: Polynomial) -> None:
        """Note that a size of a node's input, a table, is at least another one."""
        if (size - least).names:
            name = node.input[table]
            label = f"table {name!r}" if name in self.tables else f"{node.op_type} {node.name or node.output[0]!r}"
            self.at_least.append((size, least, label))

    def broadcast(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of tensors that are broadcast; sizes by name that meet are equal."""
        rank = max(map(len, shapes))
        result = []
        for axis in range(-rank, 0):
            sizes = [self.resolve(shape[axis]) for shape in shapes if len(shape) >= -axis]
            wide = list(dict.fromkeys(size for size in sizes if size.value != 1))
            named = [size for size in wide if size.value is None]
            for other in named[1:]:
                self.equate(named[0], other)
            result.append(next((size for size in wide if size.value is not None), named[0] if named else ONE))
        return tuple(map(self.resolve, result))


def known_constant(tensor: onnx.TensorProto) -> Known:
    """Return what is known of a constant."""
    shape = tuple(map(Polynomial.number, tensor.dims))
    if tensor.data_type not in INTEGERS or not np.prod(tensor.dims):
        return Known(shape)
    numbers = numpy_helper.to_array(tensor)
    small = numbers.ndim <= 1
    data = tuple(Polynomial.number(int(number)) for number in numbers.reshape(-1)) if small else None
    return Known(shape, data, (Polynomial.number(int(numbers.max())),))
