"""Functions for rows and elements as FuseTIR leaves them, and what they compute, in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from scipy import special
from tvm import te, tirx, topi

NUMPY_TYPES = {"bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class MemoryCase:
    """A function of tensors by name, the output last; `expected` takes the inputs as wide as they are computed."""

    tensors: Callable[[], list[te.Tensor]]
    expected: Callable[..., np.ndarray]

    def func(self) -> tirx.PrimFunc:
        return te.create_prim_func(self.tensors(), index_dtype_override="int64")


def tensor(name: str, shape: tuple[int, ...], dtype: str = "float16") -> te.Tensor:
    return te.placeholder(shape, dtype, name=name)


def wide(value: te.Tensor) -> te.Tensor:
    return topi.cast(value, "float32")


def layer_norm(shape: tuple[int, ...], dtype: str = "float16", *, residual: bool = False) -> MemoryCase:
    columns = shape[-1:]

    def tensors() -> list[te.Tensor]:
        x, gamma, beta = tensor("x", shape, dtype), tensor("gamma", columns, dtype), tensor("beta", columns, dtype)
        if not residual:
            return [x, gamma, beta, topi.nn.layer_norm(x, gamma, beta, [len(shape) - 1], 1e-5)]
        other = tensor("residual", shape, dtype)
        total = topi.add(wide(x), wide(other))
        normed = topi.nn.layer_norm(total, wide(gamma), wide(beta), [len(shape) - 1], 1e-5)
        return [x, other, gamma, beta, topi.cast(normed, dtype)]

    def expected(x: np.ndarray, *others: np.ndarray) -> np.ndarray:
        gamma, beta = others[-2:]
        x = x + others[0] if residual else x
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gamma + beta

    return MemoryCase(tensors, expected)


def rms_norm(shape: tuple[int, ...], dtype: str = "float16") -> MemoryCase:
    def tensors() -> list[te.Tensor]:
        x, gamma = tensor("x", shape, dtype), tensor("gamma", shape[-1:], dtype)
        return [x, gamma, topi.nn.rms_norm(x, gamma, [len(shape) - 1], 1e-5)]

    def expected(x: np.ndarray, gamma: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gamma

    return MemoryCase(tensors, expected)


def softmax(shape: tuple[int, ...], dtype: str = "float16", *, masked: bool = False) -> MemoryCase:
    """With a mask of rows and columns that is added to all heads."""

    def tensors() -> list[te.Tensor]:
        x = tensor("x", shape, dtype)
        if not masked:
            return [x, topi.cast(topi.nn.softmax(wide(x)), dtype)]
        mask = tensor("mask", (1, *shape[1:]), "float32")
        return [x, mask, topi.cast(topi.nn.softmax(topi.add(wide(x), mask)), dtype)]

    def expected(x: np.ndarray, *mask: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return special.softmax(x + sum(mask), axis=-1)

    return MemoryCase(tensors, expected)


def mean(shape: tuple[int, ...]) -> MemoryCase:
    """The mean of each row's squares, of float16 that would overflow in float16."""

    def tensors() -> list[te.Tensor]:
        x = tensor("x", shape)
        squares = topi.multiply(x, x)
        total = topi.sum(squares, axis=len(shape) - 1)
        return [x, topi.divide(total, tirx.const(shape[-1], "float16"))]

    return MemoryCase(tensors, lambda x: (x**2).mean(-1))


def row_extremes(shape: tuple[int, ...]) -> MemoryCase:
    """Each element's place between its row's least and greatest."""

    def tensors() -> list[te.Tensor]:
        x = tensor("x", shape, "float32")
        low, high = (fold(x, axis=len(shape) - 1, keepdims=True) for fold in (topi.min, topi.max))
        return [x, topi.divide(topi.subtract(x, low), topi.subtract(high, low))]

    def expected(x: np.ndarray) -> np.ndarray:
        low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
        return (x - low) / (high - low)

    return MemoryCase(tensors, expected)


def bias_gelu(shape: tuple[int, ...], dtype: str = "float16") -> MemoryCase:
    def tensors() -> list[te.Tensor]:
        x, bias = tensor("x", shape, dtype), tensor("bias", shape[-1:], dtype)
        total = topi.add(wide(x), wide(bias))
        half, root = tirx.const(0.5, "float32"), tirx.const(0.5**0.5, "float32")
        gelu = te.compute(shape, lambda *i: total(*i) * (half + half * te.erf(total(*i) * root)), name="gelu")
        return [x, bias, topi.cast(gelu, dtype)]

    def expected(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
        return (x + bias) * (0.5 + 0.5 * special.erf((x + bias) * 0.5**0.5))

    return MemoryCase(tensors, expected)


def silu(shape: tuple[int, ...], dtype: str = "float16") -> MemoryCase:
    def tensors() -> list[te.Tensor]:
        gate, up = tensor("gate", shape, dtype), tensor("up", shape, dtype)
        return [gate, up, topi.multiply(topi.multiply(gate, topi.sigmoid(gate)), up)]

    return MemoryCase(tensors, lambda gate, up: gate / (1 + np.exp(-gate)) * up)


def embedding(tokens: int, columns: int, rows: int, dtype: str = "float16") -> MemoryCase:
    def tensors() -> list[te.Tensor]:
        ids, table = tensor("ids", (tokens,), "int64"), tensor("table", (rows, columns), dtype)
        position = tensor("position", (tokens, columns), dtype)
        return [ids, table, position, topi.add(topi.take(table, ids, axis=0, mode="clip"), position)]

    return MemoryCase(tensors, lambda ids, table, position: table[np.clip(ids, 0, rows - 1)] + position)


def rotary(batch: int, length: int, heads: int, size: int) -> MemoryCase:
    """Of the first third of a packed matrix, in the layout of attention."""

    def tensors() -> list[te.Tensor]:
        packed = tensor("packed", (batch, length, 3 * heads * size))
        cos, sin = (tensor(name, (1, 1, length, size), "float32") for name in ("cos", "sin"))
        query = topi.strided_slice(packed, [0, 0, 0], [batch, length, heads * size])
        query = wide(topi.transpose(topi.reshape(query, (batch, length, heads, size)), (0, 2, 1, 3)))
        low = topi.strided_slice(query, [0, 0, 0, 0], [batch, heads, length, size // 2])
        high = topi.strided_slice(query, [0, 0, 0, size // 2], [batch, heads, length, size])
        turned = topi.concatenate([topi.negative(high), low], axis=-1)
        return [packed, cos, sin, topi.cast(topi.add(topi.multiply(query, cos), topi.multiply(turned, sin)), "float16")]

    def expected(packed: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        query = packed[..., : heads * size].reshape(batch, length, heads, size).transpose(0, 2, 1, 3)
        low, high = query[..., : size // 2], query[..., size // 2 :]
        return query * cos + np.concatenate([-high, low], -1) * sin

    return MemoryCase(tensors, expected)


def transpose(shape: tuple[int, ...], axes: tuple[int, ...], dtype: str = "float16") -> MemoryCase:
    def tensors() -> list[te.Tensor]:
        x = tensor("x", shape, dtype)
        return [x, topi.transpose(x, axes)]

    return MemoryCase(tensors, lambda x: x.transpose(axes))


def append(shape: tuple[int, ...], axis: int) -> MemoryCase:
    """One row, or with the last axis one column, put before others."""

    def tensors() -> list[te.Tensor]:
        one = tensor("one", tuple(1 if i == axis else size for i, size in enumerate(shape)))
        return [one, others := tensor("others", shape), topi.concatenate([one, others], axis=axis)]

    return MemoryCase(tensors, lambda one, others: np.concatenate([one, others], axis))


def masked_bias(batch: int, heads: int, length: int) -> MemoryCase:
    """A bias of positions, and where a mark is not 1 a large number, for all rows of a batch."""

    def tensors() -> list[te.Tensor]:
        marks, bias = tensor("marks", (batch, length), "int64"), tensor("bias", (1, heads, length, length))
        hidden = topi.subtract(tirx.const(1, "float32"), wide(topi.expand_dims(marks, 1, 2)))
        total = topi.add(wide(bias), topi.multiply(hidden, tirx.const(-100.0, "float32")))
        return [marks, bias, topi.cast(total, "float16")]

    return MemoryCase(tensors, lambda marks, bias: bias + (1 - marks[:, None, None]) * -100.0)


def causal_mask(length: int) -> MemoryCase:
    """Of a mask of columns: what a query sees, as numbers to add."""

    def tensors() -> list[te.Tensor]:
        keep = tensor("keep", (1, length), "int64")
        zero, low = tirx.const(0.0, "float32"), tirx.const(-1e9, "float32")
        mask = te.compute(
            (length, length),
            lambda i, j: tirx.Select(tirx.all(j <= i, keep[0, j] != 0), zero, low),
            name="mask",
        )
        return [keep, mask]

    def expected(keep: np.ndarray) -> np.ndarray:
        return np.where(np.tril(np.ones((length, length), bool)) & (keep != 0), 0.0, -1e9)

    return MemoryCase(tensors, expected)


def chosen(shape: tuple[int, ...]) -> MemoryCase:
    """An exported Where: a boolean, by way of an integer, chooses between a tensor and a scalar."""

    def tensors() -> list[te.Tensor]:
        mark, x, other = tensor("mark", shape[-1:], "bool"), tensor("x", shape), tensor("other", ())
        zero = tirx.const(0, "int64")
        pick = te.compute(
            shape, lambda *i: tirx.Select(zero < mark(i[-1]).astype("int64"), x(*i), other()), name="chosen"
        )
        return [mark, x, other, pick]

    return MemoryCase(tensors, lambda mark, x, other: np.where(mark, x, other))


def both_marks(shape: tuple[int, ...]) -> MemoryCase:
    """Booleans from booleans and integers."""

    def tensors() -> list[te.Tensor]:
        mark, count = tensor("mark", shape, "bool"), tensor("count", shape, "int64")
        return [mark, count, topi.logical_and(mark, topi.cast(count, "bool"))]

    return MemoryCase(tensors, lambda mark, count: mark & (count != 0))


def random_inputs(func: tirx.PrimFunc, rng: np.random.Generator) -> list[np.ndarray]:
    """Return an array for every parameter but the output."""
    return [random_array(param, rng) for param in func.params[:-1]]


def random_array(param: tirx.Var, rng: np.random.Generator) -> np.ndarray:
    shape, dtype = [int(size) for size in param.ty.shape], str(param.ty.dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == "int64":
        # Some of the ids are outside of a table.
        return rng.integers(-2, 40, shape) * rng.integers(0, 2, shape)
    return rng.normal(size=shape).astype(NUMPY_TYPES.get(dtype, dtype))


def widened(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "ib" else array.astype("float64")
