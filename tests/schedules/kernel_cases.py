"""Kernels with their NumPy results, and how the tests build and run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import pytest
import tvm
import tvm_ffi
from scipy import special
from tvm import te, tirx, topi

from relaxtune.schedules.cpu.packing import pack_weight, packed_matmul, panel_width
from relaxtune.schedules.fallback import fallback_with_rules
from relaxtune.schedules.targets import ResolvedTarget, resolve_target

_UNEVEN = [
    (1, 1, 1),
    (7, 13, 5),
    (17, 33, 65),
    (31, 48, 7),
    (64, 101, 16),
    (1, 200, 37),
    (2, 3001, 11),
    (13, 64, 3),
]
_EPILOGUES = ("none", "bias", "gelu")


def odd_shapes(test: Callable[..., None]) -> Callable[..., None]:
    """Give a test of (m, n, k, epilogue) matmuls that do not fit the tile; one epilogue a shape is quick."""
    quick = [f"{m}-{n}-{k}-{_EPILOGUES[number % 3]}" for number, (m, n, k) in enumerate(_UNEVEN)]
    marks = (
        pytest.mark.parametrize(("m", "n", "k"), _UNEVEN),
        pytest.mark.parametrize("epilogue", _EPILOGUES),
        pytest.mark.quick_cases(*quick),
    )
    return reduce(lambda marked, mark: mark(marked), marks, test)


@dataclass
class Case:
    """A PrimFunc whose parameters are the inputs followed by the outputs."""

    func: tirx.PrimFunc
    inputs: list[np.ndarray]
    expected: list[np.ndarray]
    rtol: float = 2e-5
    atol: float = 2e-5
    module: tvm.IRModule = field(init=False)

    def __post_init__(self) -> None:
        self.module = tvm.IRModule({"main": self.func.with_attr("global_symbol", "main")})


def prim_func(tensors: list[te.Tensor]) -> tirx.PrimFunc:
    """Return a PrimFunc with 64-bit indices, as Relax makes them."""
    return te.create_prim_func(tensors, index_dtype_override="int64")


def host() -> ResolvedTarget:
    return resolve_target("llvm")


def run(case: Case, target: tvm.target.Target | None = None) -> str:
    """Schedule, build, run on poisoned outputs, compare; return the name of the rule."""
    target = target or host().target
    module, rules = fallback_with_rules(case.module, target)
    check(case, module, target)
    return rules["main"]


def check(case: Case, module: tvm.IRModule, target: tvm.target.Target) -> None:
    library = tirx.build(module, target=target)
    poison = [np.full(a.shape, np.nan if a.dtype.kind == "f" else 77, a.dtype) for a in case.expected]
    outputs = [tvm.runtime.tensor(a) for a in poison]
    library["main"](*(tvm.runtime.tensor(np.asarray(a, order="C")) for a in case.inputs), *outputs)
    for got, want in zip(outputs, case.expected, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=case.rtol, atol=case.atol)


def loop_kinds(module: tvm.IRModule) -> set[str]:
    """Return the kinds of loops in `main`: serial, parallel, vectorized, unrolled."""
    names = {
        tirx.ForKind.SERIAL: "serial",
        tirx.ForKind.PARALLEL: "parallel",
        tirx.ForKind.VECTORIZED: "vectorized",
        tirx.ForKind.UNROLLED: "unrolled",
    }
    kinds: set[str] = set()
    tvm_ffi.structural_walk(module["main"].body, (tirx.For, lambda loop: kinds.add(names[tirx.ForKind(loop.kind)])))
    return kinds


def symbol(name: str, extent: int, symbolic: Sequence[str]) -> object:
    return te.var(name, "int64") if name in symbolic else extent


def matmul_case(
    m: int,
    n: int,
    k: int,
    batch: int | None = None,
    transposed: bool = False,
    epilogue: str = "none",
    symbolic: Sequence[str] = (),
    dtype: str = "float32",
) -> Case:
    lead = () if batch is None else (batch,)
    vm, vn, vk = (symbol(name, extent, symbolic) for name, extent in (("m", m), ("n", n), ("k", k)))
    a = te.placeholder((*lead, vm, vk), dtype, name="A")
    b = te.placeholder((*lead, vn, vk) if transposed else (*lead, vk, vn), dtype, name="B")
    bias = te.placeholder((vn,), dtype, name="bias")
    axis = te.reduce_axis((0, vk), "k")

    def product(*index: tirx.Var) -> tirx.Expr:
        *outer, row, column = index
        right = b[(*outer, column, axis)] if transposed else b[(*outer, axis, column)]
        return te.sum(a[(*outer, row, axis)] * right, axis=axis)

    out = te.compute((*lead, vm, vn), product, name="C")
    rng = np.random.default_rng(m * 7 + n * 5 + k)
    shape = () if batch is None else (batch,)
    x = rng.standard_normal((*shape, m, k)).astype(dtype)
    w = rng.standard_normal((*shape, n, k) if transposed else (*shape, k, n)).astype(dtype)
    v = rng.standard_normal(n).astype(dtype)
    expected = (
        x.astype("float64") @ np.swapaxes(w, -1, -2 if transposed else -1).astype("float64")
        if transposed
        else (x.astype("float64") @ w.astype("float64"))
    )
    args, inputs = [a, b], [x, w]
    if epilogue != "none":
        out, expected = _epilogue(epilogue, out, bias), expected + v
        args, inputs = [a, b, bias], [x, w, v]
        if epilogue == "gelu":
            expected = expected * special.erf(expected * 0.5**0.5)
    tolerance = 2e-5 * max(1.0, k**0.5)
    return Case(prim_func([*args, out]), inputs, [expected.astype(dtype)], tolerance, tolerance)


def packed_matmul_case(
    m: int,
    n: int,
    k: int,
    width: int | None = None,
    batch: int | None = None,
    epilogue: str = "none",
    symbolic: Sequence[str] = (),
) -> Case:
    """Return `matmul_case` with the right operand packed in panels, by default of the width that fits this CPU."""
    plain = matmul_case(m, n, k, batch=batch, epilogue=epilogue)
    x, w, *bias = plain.inputs
    if batch is not None:
        w = w[0]
    width = width or panel_width(None if "m" in symbolic else m, n, "float32", host().limits)
    lead = () if batch is None else (batch,)
    a = te.placeholder((*lead, symbol("m", m, symbolic), k), "float32", name="A")
    packed = te.placeholder((-(-n // width), k, width), "float32", name="packed")
    out = packed_matmul(n)(a, packed)
    args, expected = [a, packed], x.astype("float64") @ w.astype("float64")
    if bias:
        added_bias = te.placeholder((n,), "float32", name="bias")
        args, expected = [*args, added_bias], expected + bias[0]
        out = _epilogue(epilogue, out, added_bias)
        expected = expected * special.erf(expected * 0.5**0.5) if epilogue == "gelu" else expected
    inputs = [x, pack_weight(w, width), *bias]
    return Case(prim_func([*args, out]), inputs, [expected.astype("float32")], plain.rtol, plain.atol)


def _epilogue(kind: str, product: te.Tensor, bias: te.Tensor) -> te.Tensor:
    added = te.compute(product.shape, lambda *i: product[i] + bias[i[-1]], name="add")
    if kind == "bias":
        return added
    scale = tirx.const(0.5**0.5, str(product.dtype))
    erf = te.compute(added.shape, lambda *i: te.erf(added[i] * scale), name="erf")
    return te.compute(added.shape, lambda *i: added[i] * erf[i], name="gelu")


def rows_case(kind: str, rows: int, length: int, symbolic: Sequence[str] = ()) -> Case:
    vr, vl = symbol("r", rows, symbolic), symbol("l", length, symbolic)
    a = te.placeholder((vr, vl), "float32", name="A")
    x = np.random.default_rng(rows * 31 + length).standard_normal((rows, length)).astype("float32")
    gamma = te.placeholder((vl,), "float32", name="gamma")
    g = np.random.default_rng(length).standard_normal(length).astype("float32")
    if kind == "softmax":
        shifted = np.exp(x - x.max(-1, keepdims=True))
        return Case(prim_func([a, topi.nn.softmax(a)]), [x], [shifted / shifted.sum(-1, keepdims=True)])
    if kind == "layer_norm":
        out = topi.nn.layer_norm(a, gamma, gamma, [1], 1e-5)
        want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + g
        return Case(prim_func([a, gamma, out]), [x, g], [want], 1e-4, 1e-4)
    if kind == "rms_norm":
        out = topi.nn.rms_norm(a, gamma, [1], 1e-5)
        want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * g
        return Case(prim_func([a, gamma, out]), [x, g], [want], 1e-4, 1e-4)
    if kind == "sum":
        return Case(prim_func([a, topi.sum(a, 1)]), [x], [x.sum(1)], 1e-4, 1e-4)
    if kind == "max":
        return Case(prim_func([a, topi.max(a, 1, keepdims=True)]), [x], [x.max(1, keepdims=True)])
    if kind == "sum_columns":
        return Case(prim_func([a, topi.sum(a, 0)]), [x], [x.sum(0)], 1e-4, 1e-4)
    raise ValueError(kind)


def conv2d_case(n: int, c: int, size: int, f: int, kernel: int, stride: int, pad: int) -> Case:
    a = te.placeholder((n, c, size, size), "float32", name="A")
    w = te.placeholder((f, c, kernel, kernel), "float32", name="W")
    bias = te.placeholder((1, f, 1, 1), "float32", name="bias")
    out = topi.add(topi.nn.conv2d_nchw(a, w, stride, pad, 1), bias)
    rng = np.random.default_rng(0)
    x, k, b = (rng.standard_normal([int(d) for d in t.shape]).astype("float32") for t in (a, w, bias))
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), axis=(2, 3))[:, :, ::stride, ::stride]
    want = np.einsum("ncyxij,fcij->nfyx", windows, k, optimize=True) + b
    return Case(prim_func([a, w, bias, out]), [x, k, b], [want.astype("float32")], 1e-3, 1e-3)


def conv1d_case(n: int, c: int, size: int, f: int, kernel: int, stride: int, pad: int, groups: int = 1) -> Case:
    a = te.placeholder((n, c, size), "float32", name="A")
    w = te.placeholder((f, c // groups, kernel), "float32", name="W")
    if groups == 1:
        out = topi.nn.conv1d(a, w, stride, pad, 1, 1, "NCW", "OIW")
    else:
        out = topi.nn.group_conv1d_ncw(a, w, stride, pad, 1, groups)
    rng = np.random.default_rng(0)
    x, k = (rng.standard_normal([int(d) for d in t.shape]).astype("float32") for t in (a, w))
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, 0), (pad, pad))), kernel, axis=2)
    windows = windows[:, :, ::stride].reshape(n, groups, c // groups, -1, kernel)
    want = np.einsum("ngcxi,gfci->ngfx", windows, k.reshape(groups, f // groups, c // groups, kernel))
    return Case(prim_func([a, w, out]), [x, k], [want.reshape(n, f, -1).astype("float32")], 1e-3, 1e-3)


def conv2d_symbolic(channels: int, size: int, filters: int, kernel: int) -> tirx.PrimFunc:
    """Return a patch embedding over a symbolic batch `b`."""
    image = te.placeholder((te.var("b", "int64"), channels, size, size), "float32", name="image")
    weight = te.placeholder((filters, channels, kernel, kernel), "float32", name="weight")
    bias = te.placeholder((1, filters, 1, 1), "float32", name="bias")
    return prim_func([image, weight, bias, topi.add(topi.nn.conv2d_nchw(image, weight, kernel, 0, 1), bias)])


def conv1d_symbolic(channels: int, filters: int) -> tirx.PrimFunc:
    """Return the first layer of an audio front end over a symbolic batch `b`."""
    audio = te.placeholder((te.var("b", "int64"), channels, 64), "float32", name="audio")
    weight = te.placeholder((filters, channels, 3), "float32", name="weight")
    bias = te.placeholder((1, filters, 1), "float32", name="bias")
    return prim_func([audio, weight, bias, topi.add(topi.nn.conv1d(audio, weight, 1, 1, 1, 1, "NCW", "OIW"), bias)])
