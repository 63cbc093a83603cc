"""Matmuls of few rows as FuseTIR leaves them, and how their kernels are made."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import te, tirx

from relaxtune.schedules.functions.quantised_matmul import matmul_of_rows
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
from relaxtune.schedules.tir.epilogue import gate_column, value_column


@dataclass(frozen=True)
class GemvCase:
    """Sizes, bits of a weight (16: as x), and the epilogue: "", "bias", "residual" or "gated"."""

    rows: tuple[int, ...] = (1,)
    n: int = 512
    k: int = 256
    bits: int = 16
    group: int = 128
    epilogue: str = ""
    dtype: str = "float16"
    output: str = "float16"

    def func(self) -> tirx.PrimFunc:
        """Return the function: x, the weight (bytes and scales), those of the epilogue, the output."""
        x = te.placeholder((*self.rows, self.k), self.dtype, name="x")
        if self.bits == 16:
            params = [x, te.placeholder((self.n, self.k), self.dtype, name="w")]
            over = te.reduce_axis((0, self.k), name="k")

            def element(*at: tirx.Var) -> tirx.Expr:
                left, right = x[(*at[:-1], over)], params[1][at[-1], over]
                return te.sum(left.astype("float32") * right.astype("float32"), axis=over)

            value = te.compute((*self.rows, self.n), element, name="matmul")
        else:
            packed = te.placeholder((self.n, self.k * self.bits // 8), "uint8", name="packed")
            groups = -(-self.k // min(self.group, self.k))
            scales = te.placeholder((groups, self.n), "float16", name="scales")
            params = [x, packed, scales]
            value = matmul_of_rows(self.k, self.bits, min(self.group, self.k), "float32")(*params)
        constants = list(range(1, len(params)))
        if self.epilogue in ("bias", "residual"):
            bias = te.placeholder((self.n,), "float32", name="bias")
            constants.append(len(params))
            params.append(bias)
            product = value
            value = te.compute(product.shape, lambda *at: product(*at) + bias[at[-1]], name="add_bias")
        if self.epilogue == "residual":
            other = te.placeholder((*self.rows, self.n), "float32", name="other")
            params.append(other)
            biased = value
            value = te.compute(biased.shape, lambda *at: biased(*at) + other(*at), name="add")
        if self.epilogue == "gated":
            both = value

            def gated(*at: tirx.Var) -> tirx.Expr:
                gate = both(*at[:-1], gate_column(at[-1]))
                return gate * tirx.sigmoid(gate) * both(*at[:-1], value_column(at[-1]))

            value = te.compute((*self.rows, self.n // 2), gated, name="gated")
        if self.output != "float32":
            wide = value
            value = te.compute(wide.shape, lambda *at: wide(*at).astype(self.output), name="cast")
        func = te.create_prim_func([*params, value], index_dtype_override="int64")
        return func.with_attr(CONSTANT_PARAMS_ATTR, constants)


CASES = {
    "one row": GemvCase(),
    "one row, bfloat16": GemvCase(dtype="bfloat16", output="bfloat16"),
    "16 rows, ragged": GemvCase(rows=(4, 4), n=1000, k=776),
    "5 rows, residual": GemvCase(rows=(5,), n=50, k=264, epilogue="residual"),
    "gated": GemvCase(rows=(2, 3), n=256, epilogue="gated"),
    "8 bits": GemvCase(bits=8),
    "8 bits, 16 rows, groups shorter than a step": GemvCase(rows=(16,), n=1000, k=784, bits=8, group=32),
    "8 bits, a scale a column, bias": GemvCase(rows=(3,), k=784, bits=8, group=784, epilogue="bias"),
    "4 bits": GemvCase(bits=4),
    "4 bits, 9 rows, gated": GemvCase(rows=(9,), n=256, bits=4, epilogue="gated"),
    "4 bits, 9 rows, more tiles than blocks, ragged": GemvCase(rows=(9,), n=4344, k=2080, bits=4),
    "4 bits, groups of 32, ragged": GemvCase(rows=(1, 2), n=1000, k=800, bits=4, group=32),
    "4 bits, groups of 96": GemvCase(k=800, bits=4, group=96, output="float32"),
    "4 bits, a scale a column": GemvCase(rows=(1,), n=40, k=800, bits=4, group=800),
}
