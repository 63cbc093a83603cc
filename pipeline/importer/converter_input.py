"""The input and result of a converter, and helpers that several families use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np
import onnx
import tvm
import tvm_ffi
from onnx import numpy_helper
from tvm import relax

from relaxtune.models.onnx_model import ALIGNMENT_BYTES
from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.importer.sizes import KnownSizes, size_text

Attribute: TypeAlias = int | float | str | bytes | list[int] | list[float] | onnx.TensorProto | onnx.GraphProto


@dataclass(frozen=True, eq=False)
class ConverterInput:
    """One ONNX node about to be converted."""

    builder: relax.BlockBuilder  # The block builder of `main`; a converter may emit into it.
    inputs: tuple[tvm.ir.Expr | None, ...]  # An expression for each ONNX input; `None` for an input left out.
    attributes: Mapping[str, Attribute]  # Decoded attributes (strings as `str`).
    opset: int  # Version of the operator set of the node's domain.
    outputs: tuple[str, ...] = ()  # Name of each output, empty for one that nothing reads.
    # ONNX element type of each input, 0 where it is not known. It tells integers of 4 bits from the integers of 8 that
    # hold them here.
    element_types: tuple[int, ...] = ()
    sizes: KnownSizes = field(default_factory=KnownSizes)

    def input(self, index: int) -> tvm.ir.Expr:
        """Return a required input.

        Raises
        ------
        ValueError
            The node does not have it.
        """
        found = self.optional(index)
        if found is None:
            raise ValueError(f"input {index} is required but missing")
        return found

    def optional(self, index: int) -> tvm.ir.Expr | None:
        """Return an input, or None where the node leaves it out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def element_type(self, index: int) -> int:
        """Return the ONNX element type of an input, 0 where it is not known."""
        return self.element_types[index] if index < len(self.element_types) else 0

    def wants(self, index: int) -> bool:
        """Return whether something reads an output."""
        return index < len(self.outputs) and bool(self.outputs[index])

    def integer(self, name: str, default: int) -> int:
        """Return an integer attribute, `default` where the node leaves it out.

        Raises
        ------
        TypeError
            The attribute has another type.
        """
        value = self.attributes.get(name, default)
        if not isinstance(value, int):
            raise TypeError(f"attribute {name!r}: expected an integer, got {type(value).__name__}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a number attribute, `default` where the node leaves it out.

        Raises
        ------
        TypeError
            The attribute has another type.
        """
        value = self.attributes.get(name, default)
        if not isinstance(value, int | float):
            raise TypeError(f"attribute {name!r}: expected a number, got {type(value).__name__}")
        return float(value)

    def integers(self, name: str, default: list[int]) -> list[int]:
        """Return an attribute of several integers, `default` where the node leaves it out or it has none."""
        value = self.attributes.get(name)
        return [int(one) for one in value] if isinstance(value, list) and value else default

    def parts(self, data: tvm.ir.Expr, sections: int | list[int], axis: int) -> Iterator[tvm.ir.Expr]:
        """Return the parts of a tensor that is split into so many, or at some places, along an axis."""
        split = self.builder.emit(relax.op.split(data, sections, axis))
        return (self.builder.emit(relax.TupleGetItem(split, index)) for index in range(len(split.ty.fields)))

    def unused(self, index: int, what: str) -> tvm.ir.Expr:
        """Return a value for an output that is not computed.

        Raises
        ------
        ValueError
            Something reads the output.
        """
        if self.wants(index):
            raise ValueError(
                f"output {index} ({what}) is not computed, expected that nothing reads it, got {self.outputs[index]!r}"
            )
        return relax.const(0.0, "float32")


# None: this node is not the converter's; TVM's own converts it. A ValueError or TypeError names a form of the operator
# that is not converted, and what was expected.
Converter = Callable[[ConverterInput], tvm.ir.Expr | None]
_Converter = TypeVar("_Converter", bound=Converter)

# Kinds of dtypes that NumPy itself has.
_PLAIN = "biuf"

#: (domain, operator) -> our own converter, filled by the modules of `converters`; the main ONNX domain is "".
CONVERTERS: dict[tuple[str, str], Converter] = {}


def converts(*operators: str) -> Callable[[_Converter], _Converter]:
    """Return a decorator that makes a function the converter of operators: `Gather`, `com.microsoft.Gelu`."""

    def register(function: _Converter) -> _Converter:
        for operator in operators:
            domain, _, name = operator.rpartition(".")
            CONVERTERS[domain, name] = function
        return function

    return register


def constant_value(expr: tvm.ir.Expr | None) -> np.ndarray | None:
    """Return the value of a constant expression, None for any other."""
    return array_in_place(expr.value) if isinstance(expr, tvm.ir.GenericConst) else None


def constant(value: np.ndarray) -> tvm.ir.Expr:
    """Return a constant of exactly this dtype; `relax.const` alone makes an int64 scalar int32."""
    return relax.const(value, str(value.dtype))


def array_in_place(tensor: tvm.runtime.Tensor) -> np.ndarray:
    """Return the elements of a tensor, to read; a copy of them for dtypes that NumPy does not have."""
    if numpy_dtype(str(tensor.dtype)).kind not in _PLAIN:
        return np.asarray(tensor.numpy())
    array = np.from_dlpack(tensor)
    array.flags.writeable = False
    return array


def tensor_in_place(array: np.ndarray) -> tvm.runtime.Tensor:
    """Return an array as a tensor; nobody writes to the array any more. Kernels expect the alignment, else a copy."""
    array = np.asarray(array, order="C")
    aligned = array.ctypes.data % ALIGNMENT_BYTES == 0 and array.flags.writeable and array.size > 0
    return tvm_ffi.from_dlpack(array) if aligned and array.dtype.kind in _PLAIN else tvm.runtime.tensor(array)


def tensor_attribute(value: Attribute) -> np.ndarray:
    """Return the array of a tensor attribute.

    Raises
    ------
    TypeError
        The attribute has another type.
    """
    if not isinstance(value, onnx.TensorProto):
        raise TypeError(f"expected a tensor attribute, got {type(value).__name__}")
    return np.asarray(numpy_helper.to_array(value))


def dtype_of(expr: tvm.ir.Expr) -> str:
    """Return a tensor's dtype."""
    return str(expr.ty.dtype.dtype)


def scalar_like(value: float, data: tvm.ir.Expr) -> tvm.ir.Expr:
    """Return a number as a constant of a tensor's dtype."""
    return relax.const(value, dtype_of(data))


def sizes_of(expr: tvm.ir.Expr) -> list[tvm.tirx.Expr]:
    """Return a tensor's sizes, numbers or expressions of symbolic ones.

    Raises
    ------
    ValueError
        The shape is not known.
    """
    shape = expr.ty.shape
    if not isinstance(shape, relax.ShapeExpr):
        msg = f"expected a tensor of known sizes, got one of {int(expr.ty.ndim)} axes whose sizes a call computes"
        raise ValueError(msg)  # noqa: TRY004
    return list(shape.values)


def has_known_sizes(expr: tvm.ir.Expr | None) -> bool:
    """Return whether a value is no tensor, or one whose sizes are numbers or symbols."""
    kind = getattr(expr, "ty", None)
    return not isinstance(kind, relax.TensorType) or isinstance(kind.shape, relax.ShapeExpr)


def static_size(expr: tvm.ir.Expr, axis: int) -> int:
    """Return one size of a tensor.

    Raises
    ------
    ValueError
        The size is symbolic or not known.
    """
    size = sizes_of(expr)[axis]
    if not isinstance(size, tvm.tirx.IntImm):
        raise ValueError(f"expected axis {axis} to have a fixed size, got {size_text(size)}")  # noqa: TRY004
    return int(size)
