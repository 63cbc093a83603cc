"""Pieces that several architectures share: linear layers, norms, softmax, heads, shapes, masks, activations.

Notation: B batch, S query length, T key length, H heads, D head size, N hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx import TensorProto

from relaxtune.models.zoo.graph import Dim, GraphBuilder, Precision


def linear(b: GraphBuilder, name: str, x: str, n_in: int, n_out: int, *, bias: bool = True) -> str:
    """Return x @ W (+ bias) with W (n_in, n_out), as MatMul and Add."""
    with b.scope(name):
        y = b.op("MatMul", x, b.matrix("weight", n_in, n_out))
        return b.op("Add", y, b.bias("bias", n_out)) if bias else y


def to_fp32(b: GraphBuilder, x: str) -> str:
    """Return x in fp32; nothing is added to an fp32 graph."""
    return x if b.precision is Precision.FP32 else b.op("Cast", x, to=TensorProto.FLOAT)


def from_fp32(b: GraphBuilder, x: str) -> str:
    """Return an fp32 x in the graph's precision; nothing is added to an fp32 graph."""
    return x if b.precision is Precision.FP32 else b.op("Cast", x, to=b.precision.element_type)


def layer_norm(b: GraphBuilder, name: str, x: str, size: int, epsilon: float) -> str:
    """Return LayerNormalization over the last axis, computed in fp32 with fp32 parameters."""
    with b.scope(name):
        gain = b.gain("weight", size, element_type=TensorProto.FLOAT)
        bias = b.bias("bias", size, element_type=TensorProto.FLOAT)
        return from_fp32(b, b.op("LayerNormalization", to_fp32(b, x), gain, bias, axis=-1, epsilon=epsilon))


def rms_norm(b: GraphBuilder, name: str, x: str, size: int, epsilon: float) -> str:
    """Return gain * x / sqrt(mean(x^2) + epsilon); the mean in fp32, the gain in the graph's precision."""
    with b.scope(name):
        wide = to_fp32(b, x)
        square = b.op("Pow", wide, b.const(2.0, TensorProto.FLOAT))
        mean = b.op("ReduceMean", square, b.int64([-1]), keepdims=1)
        root = b.op("Sqrt", b.op("Add", mean, b.const(epsilon, TensorProto.FLOAT)))
        normed = b.op("Mul", wide, b.op("Div", b.const(1.0, TensorProto.FLOAT), root))
        return b.op("Mul", b.gain("weight", size), from_fp32(b, normed))


def softmax(b: GraphBuilder, scores: str) -> str:
    """Return the softmax over the last axis, computed in fp32."""
    return from_fp32(b, b.op("Softmax", to_fp32(b, scores), axis=-1))


def gelu(b: GraphBuilder, x: str) -> str:
    """Return 0.5 * x * (1 + erf(x / sqrt(2)))."""
    erf = b.op("Erf", b.op("Div", x, b.real(math.sqrt(2.0))))
    return b.op("Mul", b.op("Mul", x, b.op("Add", erf, b.real(1.0))), b.real(0.5))


def gelu_tanh(b: GraphBuilder, x: str) -> str:
    """Return 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))."""
    cubic = b.op("Mul", b.op("Pow", x, b.real(3.0)), b.real(0.044715))
    inner = b.op("Mul", b.op("Add", x, cubic), b.real(math.sqrt(2.0 / math.pi)))
    return b.op("Mul", b.op("Mul", x, b.real(0.5)), b.op("Add", b.op("Tanh", inner), b.real(1.0)))


def silu(b: GraphBuilder, x: str) -> str:
    """Return x * sigmoid(x)."""
    return b.op("Mul", x, b.op("Sigmoid", x))


def scalar_dim(b: GraphBuilder, tensor: str, axis: int, dim: Dim) -> str:
    """Return one dimension as an int64 scalar: a constant when it is static, else read from the tensor's shape."""
    if isinstance(dim, int):
        return b.int64(dim)
    return b.op("Gather", b.op("Shape", tensor), b.int64(axis), axis=0)


def vector_dim(b: GraphBuilder, tensor: str, axis: int, dim: Dim) -> str:
    """Return one dimension as an int64 vector of one element, for Slice and Concat."""
    if isinstance(dim, int):
        return b.int64([dim])
    return b.op("Unsqueeze", scalar_dim(b, tensor, axis, dim), b.int64([0]))


def arange(b: GraphBuilder, limit: str) -> str:
    """Return the int64 vector 0 .. limit - 1."""
    return b.op("Range", b.int64(0), limit, b.int64(1))


def split_heads(b: GraphBuilder, x: str, batch: Dim, length: Dim, heads: int, head_size: int) -> str:
    """Return (B, S, H*D) as (B, H, S, D)."""
    # Zero copies the axis of the input, so one constant serves a symbolic batch and length.
    shape = [_axis_or_copy(batch), _axis_or_copy(length), heads, head_size]
    return b.op("Transpose", b.op("Reshape", x, b.int64(shape)), perm=[0, 2, 1, 3])


def project_heads(
    b: GraphBuilder, names: Sequence[str], x: str, n_in: int, shape: tuple[Dim, Dim, int, int], *, bias: bool = True
) -> tuple[str, ...]:
    """Return a linear layer of x by each name, as heads; `shape` is (B, S, H, D)."""
    _, _, heads, size = shape
    return tuple(split_heads(b, linear(b, name, x, n_in, heads * size, bias=bias), *shape) for name in names)


def merge_heads(b: GraphBuilder, x: str, batch: Dim, length: Dim, hidden: int) -> str:
    """Return (B, H, S, D) as (B, S, H*D)."""
    merged = b.op("Transpose", x, perm=[0, 2, 1, 3])
    return b.op("Reshape", merged, b.int64([_axis_or_copy(batch), _axis_or_copy(length), hidden]))


def attend(b: GraphBuilder, scores: str, value: str) -> str:
    """Return softmax(scores) @ value for scores (B, H, S, T) and value (B, H, T, D)."""
    return b.op("MatMul", softmax(b, scores), value)


def padding_bias(b: GraphBuilder, attention_mask: str) -> str:
    """Return (1 - mask) * fill of shape (B, 1, 1, T) from an int64 mask (B, T), to be added to the scores."""
    wide = b.op("Unsqueeze", b.op("Unsqueeze", attention_mask, b.int64([1])), b.int64([2]))
    kept = b.op("Cast", wide, to=b.precision.element_type)
    return b.op("Mul", b.op("Sub", b.real(1.0), kept), b.real(b.precision.mask_fill))


def causal_and_padding(b: GraphBuilder, query_positions: str, attention_mask: str, key_length: str) -> str:
    """Return a bool mask (B or 1, 1, S, T), true where a query may look at a key.

    `query_positions` is int64 (S,): the place of every query among the keys.
    """
    keys = b.op("Unsqueeze", arange(b, key_length), b.int64([0]))
    causal = b.op("LessOrEqual", keys, b.op("Unsqueeze", query_positions, b.int64([1])))
    causal = b.op("Unsqueeze", causal, b.int64([0, 1]))
    kept = b.op("Cast", b.op("Unsqueeze", attention_mask, b.int64([1, 2])), to=TensorProto.BOOL)
    return b.op("And", causal, kept)


def _axis_or_copy(dim: Dim) -> int:
    return dim if isinstance(dim, int) else 0
