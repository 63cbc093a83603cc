"""The cases of `bench_memory_bound` beside this: each function as TE writes it, as torch computes it, and its sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Case:
    """One function at one shape.

    Attributes
    ----------
    kind
        Which function of `KINDS`.
    shape
        Its sizes.
    chained
        Whether it is timed as a chain; else over tensors larger than the L2 cache.
    """

    kind: str
    shape: tuple[int, ...]
    chained: bool = False


@dataclass(frozen=True)
class Kind:
    """A function: TE of the fused PrimFunc, its inputs, and torch's form; the first input is what a chain hands on."""

    build: Callable[..., Any]
    inputs: Callable[..., list[Any]]
    torch: Callable[..., Any]


def _randn(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, device="cuda").half()


def _layer_norm(te: Any, topi: Any, rows: int, columns: int, residual: bool = False) -> list[Any]:
    x = te.placeholder((rows, columns), "float16", name="x")
    gamma, beta = (te.placeholder((columns,), "float16", name=name) for name in ("gamma", "beta"))
    if not residual:
        return [x, gamma, beta, topi.nn.layer_norm(x, gamma, beta, [1], 1e-5)]
    other = te.placeholder((rows, columns), "float16", name="residual")
    total = topi.add(topi.cast(x, "float32"), topi.cast(other, "float32"))
    scale, shift = topi.cast(gamma, "float32"), topi.cast(beta, "float32")
    return [x, other, gamma, beta, topi.cast(topi.nn.layer_norm(total, scale, shift, [1], 1e-5), "float16")]


def _rms_norm(te: Any, topi: Any, rows: int, columns: int) -> list[Any]:
    x = te.placeholder((rows, columns), "float16", name="x")
    gamma = te.placeholder((columns,), "float16", name="gamma")
    return [x, gamma, topi.nn.rms_norm(x, gamma, [1], 1e-5)]


def _softmax(te: Any, topi: Any, rows: int, columns: int) -> list[Any]:
    x = te.placeholder((rows, columns), "float16", name="x")
    return [x, topi.cast(topi.nn.softmax(topi.cast(x, "float32")), "float16")]


def _gelu(te: Any, topi: Any, rows: int, columns: int) -> list[Any]:
    from tvm import tirx

    x, bias = te.placeholder((rows, columns), "float16", name="x"), te.placeholder((columns,), "float16", name="bias")
    half, root = tirx.const(0.5, "float32"), tirx.const(0.5**0.5, "float32")
    wide = topi.add(topi.cast(x, "float32"), topi.cast(bias, "float32"))
    gelu = te.compute((rows, columns), lambda i, j: wide[i, j] * (half + half * te.erf(wide[i, j] * root)), name="gelu")
    return [x, bias, topi.cast(gelu, "float16")]


def _rotary(te: Any, topi: Any, batch: int, length: int, heads: int, size: int) -> list[Any]:
    packed = te.placeholder((batch, length, 3 * heads * size), "float16", name="x")
    cos, sin = (te.placeholder((1, 1, length, size), "float32", name=name) for name in ("cos", "sin"))
    query = topi.strided_slice(packed, [0, 0, 0], [batch, length, heads * size])
    query = topi.transpose(topi.reshape(query, (batch, length, heads, size)), (0, 2, 1, 3))
    query = topi.cast(query, "float32")
    low = topi.strided_slice(query, [0, 0, 0, 0], [batch, heads, length, size // 2])
    high = topi.strided_slice(query, [0, 0, 0, size // 2], [batch, heads, length, size])
    turned = topi.concatenate([topi.negative(high), low], axis=-1)
    return [packed, cos, sin, topi.cast(topi.add(topi.multiply(query, cos), topi.multiply(turned, sin)), "float16")]


def _embedding(te: Any, topi: Any, tokens: int, columns: int, vocabulary: int) -> list[Any]:
    ids = te.placeholder((tokens,), "int64", name="ids")
    table = te.placeholder((vocabulary, columns), "float16", name="table")
    position = te.placeholder((tokens, columns), "float16", name="position")
    return [ids, table, position, topi.add(topi.take(table, ids, axis=0, mode="clip"), position)]


def _embedding_layer_norm(te: Any, topi: Any, tokens: int, columns: int, vocabulary: int) -> list[Any]:
    ids = te.placeholder((tokens,), "int64", name="ids")
    table = te.placeholder((vocabulary, columns), "float16", name="table")
    position = te.placeholder((tokens, columns), "float16", name="position")
    gamma, beta = (te.placeholder((columns,), "float16", name=name) for name in ("gamma", "beta"))
    words = topi.cast(topi.take(table, ids, axis=0, mode="clip"), "float32")
    total = topi.add(words, topi.cast(position, "float32"))
    scale, shift = topi.cast(gamma, "float32"), topi.cast(beta, "float32")
    normed = topi.nn.layer_norm(total, scale, shift, [1], 1e-5)
    return [ids, table, position, gamma, beta, topi.cast(normed, "float16")]


def _dequantise(te: Any, topi: Any, columns: int, k: int, bits: int) -> list[Any]:
    from relaxtune.schedules.functions.quantised_matmul import dequantise_rows

    packed = te.placeholder((columns, k * bits // 8), "uint8", name="packed")
    scales = te.placeholder((k // 128, columns), "float16", name="scales")
    return [packed, scales, dequantise_rows(k, bits, 128, "float16")(packed, scales)]


def _torch_dequantise(packed: Any, scales: Any) -> Any:
    import torch

    k = 128 * scales.shape[0]
    bits = 8 * packed.shape[1] // k
    levels = packed if bits == 8 else torch.stack([packed & 15, packed >> 4], dim=-1).reshape(-1, k)
    return (levels.to(scales.dtype) - 2 ** (bits - 1)) * scales.repeat_interleave(128, dim=0).T


def _packed(columns: int, k: int, bits: int) -> list[Any]:
    import torch

    packed = torch.randint(0, 256, (columns, k * bits // 8), device="cuda", dtype=torch.uint8)
    return [packed, (torch.rand(k // 128, columns, device="cuda") * 0.01 + 0.001).half()]


def _torch_rotary(x: Any, cos: Any, sin: Any) -> Any:
    import torch

    batch, length, width = x.shape
    size = cos.shape[-1]
    query = x[..., : width // 3].view(batch, length, -1, size).transpose(1, 2).float()
    low, high = query.chunk(2, -1)
    return (query * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)


def _functional() -> Any:
    import torch

    return torch.nn.functional


KINDS = {
    "layer_norm": Kind(
        _layer_norm,
        lambda rows, columns: [_randn(rows, columns), _randn(columns), _randn(columns)],
        lambda x, gamma, beta: _functional().layer_norm(x, x.shape[-1:], gamma, beta),
    ),
    "residual_layer_norm": Kind(
        partial(_layer_norm, residual=True),
        lambda rows, columns: [_randn(rows, columns), _randn(rows, columns), _randn(columns), _randn(columns)],
        lambda x, other, gamma, beta: _functional().layer_norm(x + other, x.shape[-1:], gamma, beta),
    ),
    "rms_norm": Kind(
        _rms_norm,
        lambda rows, columns: [_randn(rows, columns), _randn(columns)],
        lambda x, gamma: _functional().rms_norm(x, x.shape[-1:], gamma, 1e-5),
    ),
    "softmax": Kind(
        _softmax,
        lambda rows, columns: [4 * _randn(rows, columns)],
        lambda x: _functional().softmax(x, -1),
    ),
    "bias_gelu": Kind(
        _gelu,
        lambda rows, columns: [_randn(rows, columns), _randn(columns)],
        lambda x, bias: _functional().gelu(x + bias),
    ),
    "rotary": Kind(
        _rotary,
        lambda batch, length, heads, size: [
            _randn(batch, length, 3 * heads * size),
            _randn(1, 1, length, size).float(),
            _randn(1, 1, length, size).float(),
        ],
        _torch_rotary,
    ),
    "dequantise": Kind(_dequantise, _packed, _torch_dequantise),
    "embedding_sum": Kind(
        _embedding,
        lambda tokens, columns, vocabulary: [
            _randn(tokens).float().mul(1e6).long() % vocabulary,
            _randn(vocabulary, columns),
            _randn(tokens, columns),
        ],
        lambda ids, table, position: table[ids] + position,
    ),
    "embedding_layer_norm": Kind(
        _embedding_layer_norm,
        lambda tokens, columns, vocabulary: [
            _randn(tokens).float().mul(1e6).long() % vocabulary,
            _randn(vocabulary, columns),
            _randn(tokens, columns),
            _randn(columns),
            _randn(columns),
        ],
        lambda ids, table, position, gamma, beta: _functional().layer_norm(
            table[ids] + position, position.shape[-1:], gamma, beta
        ),
    ),
}


CASES = [
    Case("residual_layer_norm", (65536, 768)),
    Case("layer_norm", (65536, 768)),
    Case("layer_norm", (65536, 1024)),
    Case("softmax", (65536, 1024)),
    Case("softmax", (262144, 128)),
    Case("softmax", (2048, 32000)),
    Case("softmax", (512, 131072)),
    Case("rms_norm", (32768, 2048)),
    Case("rms_norm", (8192, 8192)),
    Case("bias_gelu", (32768, 3072)),
    Case("rotary", (8, 2048, 32, 64)),
    Case("dequantise", (16384, 8192, 4)),
    Case("dequantise", (16384, 8192, 8)),
    Case("embedding_sum", (131072, 768, 30522)),
    Case("embedding_layer_norm", (131072, 768, 30522)),
    Case("layer_norm", (128, 768), chained=True),
    Case("residual_layer_norm", (128, 768), chained=True),
    Case("layer_norm", (1024, 768), chained=True),
    Case("layer_norm", (4096, 768), chained=True),
    Case("residual_layer_norm", (4096, 768), chained=True),
    Case("rms_norm", (128, 2048), chained=True),
    Case("rms_norm", (1, 2048), chained=True),
    Case("softmax", (1536, 128), chained=True),
    Case("softmax", (6144, 512), chained=True),
    Case("bias_gelu", (128, 3072), chained=True),
    Case("bias_gelu", (4096, 3072), chained=True),
]


def name_of(case: Case) -> str:
    return f"{case.kind}-{'x'.join(map(str, case.shape))}{'-chain' if case.chained else ''}"
