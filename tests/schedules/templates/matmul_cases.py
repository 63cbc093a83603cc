"""Matmuls with elementwise epilogues as FuseTIR leaves them, and what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import te, tirx

from relaxtune.schedules.tir.epilogue import gate_column, value_column


@dataclass(frozen=True)
class MatmulCase:
    """Shape, dtypes and epilogue of a fused matmul; `rows` are the leading axes of A and C."""

    rows: tuple[int | tirx.Var, ...]
    n: int
    k: int
    epilogue: Sequence[str] = ()
    dtype: str = "float16"
    output: str = "float16"
    transposed: bool = False
    accumulator: str = "float32"
    dtype_b: str | None = None

    def func(self) -> tirx.PrimFunc:
        """Return the function: parameters A, B, those of the epilogue in its order, and the output."""
        a = te.placeholder((*self.rows, self.k), self.dtype, name="A")
        b = te.placeholder(
            (self.n, self.k) if self.transposed else (self.k, self.n), self.dtype_b or self.dtype, name="B"
        )
        over = te.reduce_axis((0, self.k), name="k")

        def product(*axes: tirx.Var) -> tirx.Expr:
            right = b[axes[-1], over] if self.transposed else b[over, axes[-1]]
            return te.sum(a[(*axes[:-1], over)].astype(self.accumulator) * right.astype(self.accumulator), axis=over)

        value = te.compute((*self.rows, self.n), product, name="matmul")
        params = [a, b]
        for step in self.epilogue:
            value, more = _STEPS[step](self, value)
            params += more
        if self.output != str(value.dtype):
            value = _map(lambda x: x.astype(self.output), value, "cast")
        return te.create_prim_func([*params, value], index_dtype_override="int64")


def _map(function, value: te.Tensor, name: str) -> te.Tensor:
    return te.compute(value.shape, lambda *axes: function(value(*axes)), name=name)


def _bias(_case: MatmulCase, value: te.Tensor):
    bias = te.placeholder((int(value.shape[-1]),), "float32", name="bias")
    return te.compute(value.shape, lambda *axes: value(*axes) + bias[axes[-1]], name="add_bias"), [bias]


def _half_bias(case: MatmulCase, value: te.Tensor):
    """Round to the operands' dtype, then add a bias of it, as a graph in half precision does."""
    bias = te.placeholder((int(value.shape[-1]),), case.dtype, name="bias")
    narrow = _map(lambda x: x.astype(case.dtype), value, "narrow")
    return te.compute(value.shape, lambda *axes: narrow(*axes) + bias[axes[-1]], name="add_bias"), [bias]


def _gelu(_case: MatmulCase, value: te.Tensor):
    half = tirx.const(0.5, "float32")

    def gelu(x):
        return x * (half + te.erf(x * tirx.const(0.5**0.5, "float32")) * half)

    return _map(gelu, value, "gelu"), []


def _gelu_tanh(_case: MatmulCase, value: te.Tensor):
    half, one = tirx.const(0.5, "float32"), tirx.const(1, "float32")

    def gelu(x):
        u = tirx.const(0.7978845608, "float32") * x * (one + tirx.const(0.044715, "float32") * x * x)
        return half * x * (one + te.tanh(u))

    return _map(gelu, value, "gelu_tanh"), []


def _tanh(_case: MatmulCase, value: te.Tensor):
    return _map(te.tanh, value, "tanh"), []


def _residual(case: MatmulCase, value: te.Tensor):
    residual = te.placeholder((*case.rows, int(value.shape[-1])), case.dtype, name="residual")
    wide = te.compute(value.shape, lambda *axes: residual(*axes).astype("float32"), name="widen")
    return te.compute(value.shape, lambda *axes: value(*axes) + wide(*axes), name="add_residual"), [residual]


def _row_scale(case: MatmulCase, value: te.Tensor):
    scale = te.placeholder((*case.rows, 1), "float32", name="scale")
    return te.compute(value.shape, lambda *axes: value(*axes) * scale[(*axes[:-1], 0)], name="rescale"), [scale]


def _masked(case: MatmulCase, value: te.Tensor):
    """Keep the elements that a mask of one byte an element marks."""
    mask = te.placeholder((*case.rows, case.n), "int8", name="mask")
    zero = tirx.const(0, "float32")

    def keep(*axes):
        return tirx.Select(mask(*axes) > tirx.const(0, "int8"), value(*axes), zero)

    return te.compute(value.shape, keep, name="keep"), [mask]


def _corrected(_case: MatmulCase, value: te.Tensor):
    """Add what the zero point of the activations takes away, as `pipeline.passes.precision.integer_matmuls` does."""
    correction = te.placeholder((int(value.shape[-1]),), "int32", name="correction")
    return te.compute(value.shape, lambda *axes: value(*axes) + correction[axes[-1]], name="correct"), [correction]


def _dequantised(_case: MatmulCase, value: te.Tensor):
    scale = te.placeholder((int(value.shape[-1]),), "float32", name="scale")
    numbers = _map(lambda x: x.astype("float32"), value, "numbers")
    return te.compute(value.shape, lambda *axes: numbers(*axes) * scale[axes[-1]], name="dequantise"), [scale]


def _scaled(_case: MatmulCase, value: te.Tensor):
    """Multiply by a number that is computed, as dynamic quantisation does."""
    scale = te.placeholder((), "float32", name="scale")
    numbers = _map(lambda x: x.astype("float32"), value, "numbers")
    return te.compute(value.shape, lambda *axes: numbers(*axes) * scale(), name="dequantise"), [scale]


def _byte_residual(_case: MatmulCase, value: te.Tensor):
    """Add a quantised residual."""
    residual = te.placeholder(value.shape, "int8", name="residual")
    wide = te.compute(value.shape, lambda *axes: residual(*axes).astype("float32"), name="widen")
    return te.compute(value.shape, lambda *axes: value(*axes) + wide(*axes), name="add_residual"), [residual]


def _requantised(case: MatmulCase, value: te.Tensor):
    """Round to 8 bits, with a scale of 1 / 64 and a zero point of 3."""
    low, high = (0, 255) if case.output == "uint8" else (-128, 127)

    def rounded(x):
        moved = te.nearbyint(x * tirx.const(64.0, "float32")) + tirx.const(3.0, "float32")
        return tirx.max(tirx.min(moved, tirx.const(float(high), "float32")), tirx.const(float(low), "float32"))

    return _map(rounded, value, "requantise"), []


def _squared(_case: MatmulCase, value: te.Tensor):
    return _map(lambda x: x * x, value, "square"), []


def _shifted(_case: MatmulCase, value: te.Tensor):
    """Read the result at another position than is written."""
    last = value.shape[-1] - 1
    return te.compute(value.shape, lambda *axes: value(*axes[:-1], last - axes[-1]), name="flip"), []


def _gated(_case: MatmulCase, value: te.Tensor):
    """Multiply the silu of 8 columns by the next 8, by turns."""

    def gated(*axes):
        rows, column = axes[:-1], axes[-1]
        gate = value(*rows, gate_column(column))
        return gate * tirx.sigmoid(gate) * value(*rows, value_column(column))

    return te.compute((*value.shape[:-1], value.shape[-1] // 2), gated, name="gated"), []


def _summed(_case: MatmulCase, value: te.Tensor):
    """Sum the result over its last axis."""
    over = te.reduce_axis((0, value.shape[-1]), name="r")
    return te.compute(value.shape[:-1], lambda *axes: te.sum(value(*axes, over), axis=over), name="total"), []


_STEPS = {
    "bias": _bias,
    "half_bias": _half_bias,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "tanh": _tanh,
    "residual": _residual,
    "row_scale": _row_scale,
    "masked": _masked,
    "squared": _squared,
    "shifted": _shifted,
    "summed": _summed,
    "gated": _gated,
    "corrected": _corrected,
    "dequantised": _dequantised,
    "scaled": _scaled,
    "byte_residual": _byte_residual,
    "requantised": _requantised,
}
