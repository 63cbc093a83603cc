"""Known facts of tensors, and of the sizes of a graph, while the graph is followed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx
from onnx import numpy_helper

from relaxtune.polynomials import Computed, Polynomial

Shape = tuple[Polynomial, ...]

INTEGERS = frozenset({onnx.TensorProto.INT64, onnx.TensorProto.INT32})
ZERO, ONE = Polynomial.number(0), Polynomial.number(1)


@dataclass(frozen=True)
class Known:
    """Known facts of a tensor."""

    shape: Shape | None = None  # Its sizes; None where not even the rank is known.
    data: Shape | None = None  # The elements of an integer scalar or vector.
    # The largest of its integers: one for all of them, or one for each place of the last axis.
    top: Shape | None = None


UNKNOWN = Known()


@dataclass
class AxisFacts:
    """Facts found so far about the sizes in a graph."""

    order: Mapping[str, int]  # The names in the sizes of the inputs, each with its place.
    solved: dict[str, Polynomial] = field(default_factory=dict)  # Name -> the size that it is equal to.
    # Sizes, each with one that it is at least, and the table or node that says so.
    at_least: list[tuple[Polynomial, Polynomial, str]] = field(default_factory=list)
    # Pairs of sizes that are equal, and that no name is solved by.
    equal: list[tuple[Polynomial, Polynomial]] = field(default_factory=list)
    # Such pairs of the first branches of If, which random inputs run.
    usual: list[tuple[Polynomial, Polynomial]] = field(default_factory=list)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)  # The small constants, by name.
    tables: set[str] = field(default_factory=set)  # Names of all constants.
    # Name of a tensor that says where another is negative -> the name of the other.
    below_zero: dict[str, str] = field(default_factory=dict)
    # The size of a cut that may end behind its input -> the table or node of it.
    cuts: dict[str, str] = field(default_factory=dict)
    _fresh: int = 0

    def resolve(self, size: Polynomial) -> Polynomial:
        """Return a size in the names that are not solved."""
        while (found := size.substitute(self.solved)) != size:
            size = found
        return size

    def new_symbol(self) -> Polynomial:
        """Return a new symbol, for a size that is not known."""
        self._fresh += 1
        return Polynomial.symbol(f"?{self._fresh}")

    def equate(self, left: Polynomial, right: Polynomial) -> None:
        """Note that two sizes are equal: one name is solved, an unknown first, else the last of the inputs' names."""
        self._keep_whole(left - right)
        gap = self.resolve(left - right)
        names = [name for name in gap.names if not isinstance(name, Computed)]
        answers = [(name, gap.solved_for(name)) for name in names]
        usable = [
            (name, answer)
            for name, answer in answers
            if answer is not None and answer.terms and name not in answer.axes
            and (answer.is_positive or name.startswith("?"))
        ]  # fmt: skip
        if usable:
            name, answer = max(usable, key=lambda item: (item[0].startswith("?"), self.order.get(item[0], -1)))
            self.solved[name] = answer
        elif gap.names:
            self.equal.append((left, right))

    def _keep_whole(self, gap: Polynomial) -> None:
        """Take cuts up to a computed size, in a size that has to be zero, to end inside of what they cut.

        ONNX's Slice ends at the end of its input. The result meets the size itself only if that is inside.
        """
        for name in self.resolve(gap).names:
            if not isinstance(name, Computed) or name.operator != "min":
                continue
            label = self.cuts.get(name, "the graph")
            if name.left.names:
                self.solved[name] = name.left
                self.at_least.append((name.right, name.left, label))
            elif self.resolve(gap).substitute({name: name.right}).value == 0:
                self.solved[name] = name.right
                self.at_least.append((name.left, name.right, label))

    def require(self, node: onnx.NodeProto, table: int, size: Polynomial, least: Polynomial) -> None:
        """Note that a size of a node's input, a table, is at least another one."""
        if (size - least).names:
            self.at_least.append((size, least, self.label(node, table)))

    def label(self, node: onnx.NodeProto, table: int) -> str:
        """Return what a message calls an input of a node, a table, or the node."""
        name, reader = node.input[table], f"{node.op_type} {node.name or node.output[0]!r}"
        if name not in self.tables:
            return reader
        # A name that an exporter counted, such as `val_183`, says nothing.
        return f"table of {reader}" if re.fullmatch(r"[\w:]*\d", name) else f"table {name!r}"

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


# Facts of the results of a node, from the facts of its inputs; None where the rule does not say.
Rule: TypeAlias = Callable[[AxisFacts, onnx.NodeProto, Sequence[Known]], list[Known] | None]


def known_constant(tensor: onnx.TensorProto) -> Known:
    """Return what is known of a constant."""
    shape = tuple(map(Polynomial.number, tensor.dims))
    if tensor.data_type not in INTEGERS or not np.prod(tensor.dims):
        return Known(shape)
    numbers = numpy_helper.to_array(tensor)
    small = numbers.ndim <= 1
    data = tuple(Polynomial.number(int(number)) for number in numbers.reshape(-1)) if small else None
    return Known(shape, data, (Polynomial.number(int(numbers.max())),))


def sizes_of(known: Known) -> Shape:
    """Return the sizes of a tensor.

    Raises
    ------
    ValueError
        They are not known; whoever follows the graph asks onnx then.
    """
    if known.shape is None:
        raise ValueError
    return known.shape


def elements_of(known: Known) -> Shape:
    """Return the elements of a small tensor of integers; raises as `sizes_of`."""
    if known.data is None:
        raise ValueError
    return known.data


def number_of(size: Polynomial) -> int:
    """Return the number that a size is; raises as `sizes_of`."""
    if size.value is None:
        raise ValueError
    return size.value
