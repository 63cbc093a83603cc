"""The forms in which exporters write attention, as small ONNX graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper

from relaxtune.models import OnnxModel
from tests.pipeline.passes.pass_cases import make_onnx

BATCH, LENGTH, HEADS, SIZE = 2, 6, 4, 8
HIDDEN = HEADS * SIZE


@dataclass
class Form:
    """A graph being written; `op` adds a node and returns its output's name."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)

    def op(self, kind: str, *args: str | np.ndarray | list[int] | float, outputs: int = 1, **attrs: object) -> str:
        return self.ops(kind, *args, outputs=outputs, **attrs)[0]

    def ops(self, kind: str, *args: object, outputs: int = 1, **attrs: object) -> list[str]:
        names = [arg if isinstance(arg, str) else self.constant(arg) for arg in args]
        made = [f"{kind}_{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(kind, names, made, name=made[0], **attrs))
        return made

    def constant(self, value: object) -> str:
        array = np.asarray(value)
        array = array.astype(np.float32 if array.dtype.kind == "f" else array.dtype)
        name = f"constant_{len(self.constants)}"
        self.constants[name] = array
        return name

    def input(self, name: str, dtype: str, *shape: int) -> str:
        self.inputs[name] = (dtype, shape)
        return name

    def weight(self, *shape: int) -> np.ndarray:
        rng = np.random.default_rng(len(self.constants))
        return rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[0])

    def linear(self, x: str, n_in: int, n_out: int) -> str:
        product = self.op("MatMul", x, self.weight(n_in, n_out))
        return self.op("Add", product, 0.1 * self.weight(n_out))

    def x(self, *shape: int) -> str:
        return self.input("x", "float", *(shape or (BATCH, LENGTH, HIDDEN)))

    def heads(self, x: str, heads: int = HEADS) -> str:
        """Return [B, S, heads * D] as [B, heads, S, D]."""
        split = self.op("Reshape", x, [BATCH, LENGTH, heads, SIZE])
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def qkv(self, x: str | None = None, kv_heads: int = HEADS) -> list[str]:
        x = x or self.x()
        return [self.heads(self.linear(x, HIDDEN, n * SIZE), n) for n in (HEADS, kv_heads, kv_heads)]

    def scores(self, query: str, key: str) -> str:
        return self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))

    def finish(self, scores: str, value: str) -> OnnxModel:
        """Return the model that ends in softmax, values and an output projection."""
        weighted = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        return self.project(self.op("Transpose", weighted, perm=[0, 2, 1, 3]))

    def project(self, merged: str) -> OnnxModel:
        flat = self.op("Reshape", merged, [BATCH, LENGTH, HIDDEN])
        return self.model(self.linear(flat, HIDDEN, HIDDEN), (BATCH, LENGTH, HIDDEN))

    def model(self, result: str, shape: tuple[int, ...], **more: tuple[int, ...]) -> OnnxModel:
        outputs = {result: ("float", shape)} | {name: ("float", size) for name, size in more.items()}
        return make_onnx(self.nodes, self.inputs, outputs, self.constants)

    def divided(self, scores: str) -> str:
        return self.op("Div", scores, np.sqrt(SIZE))

    def mask(self) -> str:
        return self.input("attention_mask", "int64", BATCH, LENGTH)

    def padding(self) -> str:
        """Return whether a key counts, bool [B, 1, 1, S]."""
        return self.op("Cast", self.op("Unsqueeze", self.mask(), [1, 2]), to=TensorProto.BOOL)


def plain() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    return f.finish(f.divided(f.scores(q, k)), v)


def scale_before_the_product() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    root = SIZE**-0.25
    transposed = f.op("Mul", f.op("Transpose", k, perm=[0, 1, 3, 2]), root)
    return f.finish(f.op("MatMul", f.op("Mul", q, root), transposed), v)


def scale_of_the_projection() -> OnnxModel:
    f = Form()
    x = f.x()
    q = f.heads(f.op("Mul", f.linear(x, HIDDEN, HIDDEN), SIZE**-0.5))
    k, v = (f.heads(f.linear(x, HIDDEN, HIDDEN)) for _ in range(2))
    return f.finish(f.scores(q, k), v)


def packed_and_gathered() -> OnnxModel:
    """timm's vision transformers: one projection, [B, S, 3, H, D] to [3, B, H, S, D], Gather."""
    f = Form()
    packed = f.op("Reshape", f.linear(f.x(), HIDDEN, 3 * HIDDEN), [BATCH, LENGTH, 3, HEADS, SIZE])
    packed = f.op("Transpose", packed, perm=[2, 0, 3, 1, 4])
    q, k, v = (f.op("Gather", packed, np.int64(index), axis=0) for index in range(3))
    return f.finish(f.divided(f.scores(q, k)), v)


def packed_by_head() -> OnnxModel:
    """GPT-NeoX and BLOOM: the three parts of each head lie together."""
    f = Form()
    packed = f.op("Reshape", f.linear(f.x(), HIDDEN, 3 * HIDDEN), [BATCH, LENGTH, HEADS, 3 * SIZE])
    parts = f.ops("Split", f.op("Transpose", packed, perm=[0, 2, 1, 3]), [SIZE] * 3, outputs=3, axis=3)
    return f.finish(f.divided(f.scores(parts[0], parts[1])), parts[2])


def batch_and_heads_as_one_axis() -> OnnxModel:
    """torch.bmm over [B * H, S, D]; the mask is added in four axes."""
    f = Form()
    bias = f.op("Mul", f.op("Cast", f.op("Not", f.padding()), to=TensorProto.FLOAT), -1e9)
    q, k, v = (f.op("Reshape", part, [BATCH * HEADS, LENGTH, SIZE]) for part in f.qkv())
    scores = f.divided(f.op("MatMul", q, f.op("Transpose", k, perm=[0, 2, 1])))
    scores = f.op("Add", f.op("Reshape", scores, [BATCH, HEADS, LENGTH, LENGTH]), bias)
    weights = f.op("Softmax", f.op("Reshape", scores, [BATCH * HEADS, LENGTH, LENGTH]), axis=-1)
    product = f.op("Reshape", f.op("MatMul", weights, v), [BATCH, HEADS, LENGTH, SIZE])
    return f.project(f.op("Transpose", product, perm=[0, 2, 1, 3]))


def biases_of_two_groupings() -> OnnxModel:
    """DeBERTa: a bias over [B * H, S, S], then a mask over [B, H, S, S]."""
    f = Form()
    padding = f.padding()
    q, k, v = (f.op("Reshape", part, [BATCH * HEADS, LENGTH, SIZE]) for part in f.qkv())
    scores = f.divided(f.op("MatMul", q, f.op("Transpose", k, perm=[0, 2, 1])))
    bias = f.op("MatMul", q, f.weight(SIZE, LENGTH))
    scores = f.op("Reshape", f.op("Add", scores, bias), [BATCH, HEADS, LENGTH, LENGTH])
    weights = f.op("Softmax", f.op("Where", padding, scores, float(np.finfo(np.float32).min)), axis=-1)
    weights = f.op("Reshape", weights, [BATCH * HEADS, LENGTH, LENGTH])
    product = f.op("Reshape", f.op("MatMul", weights, v), [BATCH, HEADS, LENGTH, SIZE])
    return f.project(f.op("Transpose", product, perm=[0, 2, 1, 3]))


def sequence_first() -> OnnxModel:
    """torch.nn.MultiheadAttention: [S, B, E], heads as [B * H, S, D]."""
    f = Form()
    x = f.x(LENGTH, BATCH, HIDDEN)
    q, k, v = (
        f.op("Transpose", f.op("Reshape", f.linear(x, HIDDEN, HIDDEN), [LENGTH, BATCH * HEADS, SIZE]), perm=[1, 0, 2])
        for _ in range(3)
    )
    scores = f.divided(f.op("MatMul", q, f.op("Transpose", k, perm=[0, 2, 1])))
    product = f.op("MatMul", f.op("Softmax", scores, axis=-1), v)
    merged = f.op("Reshape", f.op("Transpose", product, perm=[1, 0, 2]), [LENGTH, BATCH, HIDDEN])
    return f.model(f.linear(merged, HIDDEN, HIDDEN), (LENGTH, BATCH, HIDDEN))


def grouped_by_expand() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv(kv_heads=2)
    k, v = (
        f.op(
            "Reshape",
            f.op("Expand", f.op("Unsqueeze", part, [2]), [BATCH, 2, 2, LENGTH, SIZE]),
            [BATCH, HEADS, LENGTH, SIZE],
        )
        for part in (k, v)
    )
    return f.finish(f.divided(f.scores(q, k)), v)


def grouped_by_tile() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv(kv_heads=2)
    k, v = (
        f.op("Reshape", f.op("Tile", f.op("Unsqueeze", part, [2]), [1, 1, 2, 1, 1]), [BATCH, HEADS, LENGTH, SIZE])
        for part in (k, v)
    )
    return f.finish(f.divided(f.scores(q, k)), v)


def grouped_by_broadcast() -> OnnxModel:
    """Five axes: the product itself broadcasts the heads of keys and values."""
    f = Form()
    q, k, v = f.qkv(kv_heads=2)
    q = f.op("Reshape", q, [BATCH, 2, 2, LENGTH, SIZE])
    k, v = (f.op("Unsqueeze", part, [2]) for part in (k, v))
    scores = f.divided(f.op("MatMul", q, f.op("Transpose", k, perm=[0, 1, 2, 4, 3])))
    product = f.op("MatMul", f.op("Softmax", scores, axis=-1), v)
    merged = f.op("Reshape", product, [BATCH, HEADS, LENGTH, SIZE])
    return f.project(f.op("Transpose", merged, perm=[0, 2, 1, 3]))


def one_head_of_keys() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv(kv_heads=1)
    return f.finish(f.divided(f.scores(q, k)), v)


def _causal() -> np.ndarray:
    return np.tril(np.ones((LENGTH, LENGTH), bool))[None, None]


def causal_condition_and_padding() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    seen = f.op("And", _causal(), f.padding())
    return f.finish(f.op("Where", seen, f.divided(f.scores(q, k)), -1e9), v)


def causal_sum_and_padding() -> OnnxModel:
    """What transformers' SDPA masks become: where(causal and padding, 0, the least number)."""
    f = Form()
    q, k, v = f.qkv()
    least = float(np.finfo(np.float32).min)
    bias = f.op("Where", f.op("And", _causal(), f.padding()), 0.0, least)
    return f.finish(f.op("Add", f.divided(f.scores(q, k)), bias), v)


def causal_sum_with_infinity_and_guard() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    bias = f.op("Where", f.op("And", f.padding(), _causal()), 0.0, -np.inf)
    weights = f.op("Softmax", f.op("Add", f.divided(f.scores(q, k)), bias), axis=-1)
    weights = f.op("Where", f.op("IsNaN", weights), 0.0, weights)
    return f.project(f.op("Transpose", f.op("MatMul", weights, v), perm=[0, 2, 1, 3]))


def causal_constant_of_infinities() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    bias = np.where(_causal(), 0.0, -np.inf)
    return f.finish(f.op("Add", f.divided(f.scores(q, k)), bias), v)


def causal_then_padding_by_turns() -> OnnxModel:
    """Old GPT-2: where(causal, scores, -1e4), then (1 - mask) * -1e4 added."""
    f = Form()
    q, k, v = f.qkv()
    scores = f.op("Where", _causal(), f.divided(f.scores(q, k)), -1e4)
    kept = f.op("Cast", f.op("Unsqueeze", f.mask(), [1, 2]), to=TensorProto.FLOAT)
    return f.finish(f.op("Add", scores, f.op("Mul", f.op("Sub", 1.0, kept), -1e4)), v)


def sliding_window() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    seen = _causal() & ~np.tril(np.ones((LENGTH, LENGTH), bool), -3)
    return f.finish(f.op("Where", seen, f.divided(f.scores(q, k)), -1e9), v)


def alibi() -> OnnxModel:
    """A slope for each head and the causal mask in one constant."""
    f = Form()
    q, k, v = f.qkv()
    slopes = 2.0 ** -np.arange(1, HEADS + 1)
    bias = slopes[:, None, None] * (np.arange(LENGTH) - LENGTH + 1.0)
    bias = np.where(_causal(), bias[None], np.finfo(np.float32).min)
    return f.finish(f.op("Add", f.divided(f.scores(q, k)), bias), v)


def relative_bias_and_padding() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    kept = f.op("Cast", f.op("Unsqueeze", f.mask(), [1, 2]), to=TensorProto.FLOAT)
    padding = f.op("Mul", f.op("Sub", 1.0, kept), -1e9)
    bias = f.op("Add", f.weight(1, HEADS, LENGTH, LENGTH), padding)
    return f.finish(f.op("Add", f.scores(q, k), bias), v)


def bias_of_an_input() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    bias = f.input("bias", "float", BATCH, 1, LENGTH, LENGTH)
    return f.finish(f.op("Add", f.divided(f.scores(q, k)), bias), v)


def masked_with_infinity() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    return f.finish(f.op("Where", f.padding(), f.divided(f.scores(q, k)), -np.inf), v)


def zeros_where_no_key_is_seen() -> OnnxModel:
    """Keys are moved with batch and heads as one axis, and a count of the keys that a query sees guards its result.

    transformers' own exporter writes it.
    """
    f = Form()
    query, key, value = f.qkv()
    flat = f.op("Transpose", f.op("Reshape", key, [BATCH * HEADS, LENGTH, SIZE]), perm=[0, 2, 1])
    factors = [f.op("Mul", one, SIZE**-0.25) for one in (query, f.op("Reshape", flat, [BATCH, HEADS, SIZE, LENGTH]))]
    seen = f.op("Expand", f.padding(), [BATCH, 1, LENGTH, LENGTH])
    hidden = f.op("Mul", f.op("Cast", f.op("Not", seen), to=TensorProto.FLOAT), np.finfo("float32").min)
    count = f.op("ReduceSum", f.op("Cast", seen, to=TensorProto.FLOAT), [-1], keepdims=1)
    weights = f.op("Softmax", f.op("Add", f.op("MatMul", *factors), hidden), axis=-1)
    kept = f.op("Where", f.op("Less", count, 1.0), 0.0, f.op("MatMul", weights, value))
    return f.project(f.op("Transpose", kept, perm=[0, 2, 1, 3]))


def masked_where_blocked() -> OnnxModel:
    f = Form()
    q, k, v = f.qkv()
    blocked = f.op("Or", f.op("Not", f.padding()), ~_causal())
    return f.finish(f.op("Where", blocked, -1e9, f.divided(f.scores(q, k))), v)


def cached() -> OnnxModel:
    """A decode step: one query, keys and values behind those of a cache, which is a result too."""
    f = Form()
    x = f.x(BATCH, 1, HIDDEN)
    q, k, v = (
        f.op("Transpose", f.op("Reshape", f.linear(x, HIDDEN, HIDDEN), [BATCH, 1, HEADS, SIZE]), perm=[0, 2, 1, 3])
        for _ in range(3)
    )
    shape = (BATCH, HEADS, LENGTH, SIZE)
    grown = [
        f.op("Concat", f.input(f"past_{which}", "float", *shape), new, axis=2)
        for which, new in (("key", k), ("value", v))
    ]
    weights = f.op("Softmax", f.divided(f.scores(q, grown[0])), axis=-1)
    product = f.op("Transpose", f.op("MatMul", weights, grown[1]), perm=[0, 2, 1, 3])
    result = f.linear(f.op("Reshape", product, [BATCH, 1, HIDDEN]), HIDDEN, HIDDEN)
    total = (BATCH, HEADS, LENGTH + 1, SIZE)
    return f.model(result, (BATCH, 1, HIDDEN), **{grown[0]: total, grown[1]: total})


@dataclass(frozen=True)
class Expected:
    """What recognition makes of a form: fields of its AttentionSpec, and the kernels beside the input's rounding."""

    kernels: int
    causal: bool = False
    window: int = 0
    kv_heads: int = HEADS
    bias: str | None = None


FORMS: Mapping[Callable[[], OnnxModel], Expected] = {
    plain: Expected(3),
    scale_before_the_product: Expected(3),
    scale_of_the_projection: Expected(3),
    packed_and_gathered: Expected(3),
    packed_by_head: Expected(3),
    batch_and_heads_as_one_axis: Expected(4, bias="add"),
    # A copy of the queries and a matmul make the bias.
    biases_of_two_groupings: Expected(6, bias="add"),
    sequence_first: Expected(3),
    grouped_by_expand: Expected(3, kv_heads=2),
    # The importer makes Tile a kernel.
    grouped_by_tile: Expected(6),
    grouped_by_broadcast: Expected(3, kv_heads=2),
    one_head_of_keys: Expected(3, kv_heads=1),
    causal_condition_and_padding: Expected(4, causal=True, bias="add"),
    causal_sum_and_padding: Expected(4, causal=True, bias="add"),
    causal_sum_with_infinity_and_guard: Expected(4, causal=True, bias="keep"),
    causal_constant_of_infinities: Expected(3, causal=True),
    causal_then_padding_by_turns: Expected(4, causal=True, bias="add"),
    sliding_window: Expected(3, causal=True, window=3),
    alibi: Expected(3, causal=True, bias="add"),
    relative_bias_and_padding: Expected(4, bias="add"),
    bias_of_an_input: Expected(3, bias="add"),
    masked_with_infinity: Expected(4, bias="keep"),
    masked_where_blocked: Expected(4, causal=True, bias="add"),
    # The mask in two forms, its sum, and zeros in the result.
    zeros_where_no_key_is_seen: Expected(7, bias="add"),
    # The caches are results in float32: written, and rounded for the kernel.
    cached: Expected(8),
}
