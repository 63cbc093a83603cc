"""Matmuls that rotate heads, what they compute, and inputs for them."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from tvm import te, tirx

from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.matmul import recognise_matmul
from relaxtune.schedules.tir.normed_matmul import OperandNorm, normalise_operand
from relaxtune.schedules.tir.rotated_matmul import interleaved_heads, rotated_matmul
from relaxtune.schedules.tir.row_norm import COUNT

EPSILON = 1e-5
_GROUP = 16


@dataclass(frozen=True)
class RotatedCase:
    """x [batch, positions, k] by a weight [k, n], of which `columns` are rotated in heads of `head`.

    `tables` is how many rows of the batch cos and sin have; with `normed`, x's rows are divided by their root mean
    square; `turned` is a weight [n, k].
    """

    batch: int
    positions: int
    k: int
    n: int
    columns: int
    head: int
    tables: int = 1
    dtype: str = "float16"
    normed: bool = False
    turned: bool = False

    def func(self) -> tirx.PrimFunc:
        """Return the function: x, weight, cos, sin, sums of x's rows where normed, the output."""
        shapes = {"x": (self.batch, self.positions, self.k), "w": (self.n, self.k) if self.turned else (self.k, self.n)}
        shapes |= dict.fromkeys(("cos", "sin"), (self.tables, self.positions, self.head))
        inputs = [te.placeholder(shape, self.dtype, name=name) for name, shape in shapes.items()]
        result = rotated_matmul(self.columns, self.head, self.dtype, turned=self.turned)(*inputs)
        func = te.create_prim_func([*inputs, result], index_dtype_override="int64")
        norm = OperandNorm(False, EPSILON, self.k // _GROUP, False, False)
        return normalise_operand(func, known(func), norm) if self.normed else func

    def inputs(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Return random inputs, the weight in the graph's order of columns."""
        dtype = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype
        x = rng.normal(size=(self.batch, self.positions, self.k)).astype(dtype)
        weight = rng.normal(size=(self.k, self.n)).astype(dtype)
        tables = [rng.normal(size=(self.tables, self.positions, self.head)).astype(dtype) for _ in range(2)]
        if not self.normed:
            return [x, weight, *tables]
        groups = np.moveaxis(x.astype("float32").reshape(self.batch, self.positions, -1, _GROUP), 2, 0)
        sums = np.stack([groups.sum(-1), (groups**2).sum(-1)], axis=-1)
        assert sums.shape[-1] == COUNT
        return [x, weight, *tables, sums]

    def arguments(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Return what the function is called with."""
        weight = interleaved_heads(inputs[1], self.head)
        return [inputs[0], np.ascontiguousarray(weight.T) if self.turned else weight, *inputs[2:]]

    def expected(self, inputs: list[np.ndarray]) -> np.ndarray:
        """Return the output in float32."""
        x, weight, cos, sin = (array.astype("float32") for array in inputs[:4])
        if self.normed:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
        product = x @ weight
        heads = product[..., : self.columns].reshape(self.batch, self.positions, -1, self.head)
        first, second = np.split(heads, 2, axis=-1)
        turned = np.concatenate((-second, first), axis=-1)
        product[..., : self.columns] = (heads * cos[:, :, None] + turned * sin[:, :, None]).reshape(
            *product.shape[:-1], self.columns
        )
        return product


def known(func: tirx.PrimFunc) -> MatmulFunction:
    """Return the matmul that a function is."""
    matmul = recognise_matmul(func)
    assert isinstance(matmul, MatmulFunction), matmul
    return matmul
