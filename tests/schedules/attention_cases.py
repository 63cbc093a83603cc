"""Attentions to test with: specifications with their parameters, and what they compute, in numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from relaxtune.schedules.functions.attention import AttentionSpec, CacheGrowth, HeadLayout, ScoreBias, scalars_of
from relaxtune.schedules.sizes import Size, are_equal

Params = list[tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class AttentionCase:
    """An attention in a few words.

    `packed`: Q, K and V are slices of one parameter. `heads_first`: [B, H, S, D] instead of [B, S, H * D].
    `bias`: the kind, dtype and shape [B, H, Q, K], in which a 1 broadcasts; `lies`: where it lies otherwise.
    `past`: positions of caches [B, H, S, D] that grow by the keys and values of a packed product.
    Batch, queries, keys and past may be variables.
    """

    batch: int = 1
    heads: int = 2
    queries: int = 8
    keys: int = 8
    head_dim: int = 16
    value_dim: int = 0
    kv_heads: int = 0
    dtype: str = "float32"
    causal: bool = False
    window: int = 0
    packed: bool = False
    heads_first: bool = False
    bias: tuple[str, str, tuple[int, int, int, int]] | None = None
    past: int = 0
    lies: tuple[tuple[str, Size], ...] = ()
    guarded: bool = False

    @property
    def value_width(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def shared(self) -> int:
        return self.kv_heads or self.heads

    def made(self) -> tuple[AttentionSpec, Params]:
        return self._reading() if isinstance(self.past, int) and self.past == 0 else self.growing()

    def growing(self) -> tuple[AttentionSpec, Params]:
        """A packed product of the new positions, caches, perhaps a mask; then the output and the grown caches."""
        first, (product, *mask, output) = replace(self, past=0, packed=True)._reading()
        assert are_equal(self.queries, self.keys - self.past)
        widths = (self.head_dim, self.value_width)
        past, grown = (
            [((self.batch, self.shared, positions, width), self.dtype) for width in widths]
            for positions in (self.past, self.keys)
        )
        params = [product, *past, *mask, output, *grown]
        count = len(params)

        def cache(param: int) -> HeadLayout:
            (_, heads, positions, width), _ = params[param]
            return HeadLayout(param, 0, heads * positions * width, width, positions * width)

        growth = CacheGrowth(self.past, cache(1), cache(2), first.key, first.value)
        spec = replace(
            first,
            key=cache(count - 2),
            value=cache(count - 1),
            output=replace(first.output, param=count - 3),
            bias=None if first.bias is None else replace(first.bias, param=3),
            growth=growth,
        )
        return spec, params

    def _reading(self) -> tuple[AttentionSpec, Params]:
        heads, shared, d, wide = self.heads, self.shared, self.head_dim, self.value_width
        if self.packed:
            width = heads * d + shared * (d + wide)
            params: Params = [((self.batch, self.queries, width), self.dtype)]
            layouts = [
                HeadLayout(0, offset, self.queries * width, width, own)
                for offset, own in ((0, d), (heads * d, d), ((heads + shared) * d, wide))
            ]
        else:
            params, layouts = [], []
            for index, (count, positions, own) in enumerate(
                ((heads, self.queries, d), (shared, self.keys, d), (shared, self.keys, wide))
            ):
                shape, layout = self._tensor(index, count, positions, own)
                params.append((shape, self.dtype))
                layouts.append(layout)
        bias = None
        if self.bias is not None:
            kind, dtype, shape = self.bias
            ones = [isinstance(size, int) and size == 1 for size in shape]
            steps = [0 if one else math.prod(shape[axis + 1 :]) for axis, one in enumerate(ones)]
            bias = replace(ScoreBias(len(params), kind, *steps), **dict(self.lies))  # type: ignore[arg-type]
            params.append((shape, dtype))
        params += scalars_of(params, (self.batch, self.queries))
        output_shape, output = self._tensor(len(params), heads, self.queries, wide)
        params.append((output_shape, self.dtype))
        sizes = (self.batch, heads, shared, self.queries, self.keys, d, wide)
        spec = AttentionSpec(*sizes, 1 / math.sqrt(d), self.causal, self.window, *layouts, output, bias)  # type: ignore[call-arg]
        return replace(spec, guarded=self.guarded), params

    def _tensor(self, param: int, heads: int, positions: int, d: int) -> tuple[tuple[int, ...], HeadLayout]:
        if self.heads_first:
            layout = HeadLayout(param, 0, heads * positions * d, d, positions * d)
            return (self.batch, heads, positions, d), layout
        return (self.batch, positions, heads * d), HeadLayout(param, 0, positions * heads * d, heads * d, d)


PLAIN = AttentionCase()


def distances(most: int) -> tuple[tuple[str, int], ...]:
    """Return where a bias of distances lies: of key - query from -most to most, like the ends for what is further."""
    return ("query_stride", -1), ("key_stride", 1), ("offset", most), ("limit", 2 * most)


CASES = {
    "plain": PLAIN,
    "packed": replace(PLAIN, batch=2, packed=True),
    "heads first": replace(PLAIN, batch=2, queries=5, keys=7, heads_first=True),
    "grouped": replace(PLAIN, heads=4, kv_heads=2, queries=3, keys=11),
    "causal": replace(PLAIN, causal=True),
    "causal decode": replace(PLAIN, batch=3, queries=1, keys=9, causal=True),
    "values of another width": replace(PLAIN, batch=2, heads=4, kv_heads=2, value_dim=24, causal=True),
    "window": replace(PLAIN, causal=True, window=3, queries=6, keys=9),
    "window of both sides": replace(PLAIN, window=2),
    "key padding": replace(PLAIN, batch=2, bias=("add", "float32", (2, 1, 1, 8))),
    "keep": replace(PLAIN, batch=2, keys=13, bias=("keep", "bool", (2, 1, 8, 13))),
    "keep by number": replace(PLAIN, bias=("keep", "int64", (1, 1, 8, 8))),
    "relative bias": replace(PLAIN, batch=2, causal=True, bias=("add", "float32", (1, 2, 8, 8))),
    "of a slice": replace(PLAIN, bias=("add", "float32", (1, 2, 9, 9)), lies=(("offset", 9),)),
    "repeated": replace(PLAIN, batch=6, bias=("add", "float32", (3, 1, 8, 8)), lies=(("period", 3),)),
    "distances": replace(PLAIN, batch=2, bias=("add", "float32", (1, 2, 9, 1)), lies=distances(4)),
    "guarded": replace(PLAIN, batch=2, guarded=True, bias=("keep", "bool", (2, 1, 8, 8))),
    "guarded sum": replace(PLAIN, batch=2, guarded=True, causal=True, bias=("add", "float32", (2, 1, 1, 8))),
    "caches that grow": replace(PLAIN, batch=2, heads=4, kv_heads=2, queries=1, keys=6, past=5),
    "caches that grow by several": replace(
        PLAIN, queries=3, keys=9, past=6, causal=True, bias=("add", "float32", (1, 1, 1, 9))
    ),
    "caches of two widths that grow": replace(PLAIN, queries=1, keys=6, value_dim=8, past=5),
    "half": replace(PLAIN, batch=2, queries=4, keys=17, dtype="float16", bias=("add", "float16", (2, 1, 1, 17))),
}


def draw(params: Params, spec: AttentionSpec, seed: int) -> list[np.ndarray]:
    """Return random inputs; a `keep` mask leaves every row its first key, an `add` mask has some -inf.

    Of a guarded attention, they hide all keys of some rows.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for index, (shape, dtype) in enumerate(params[: -spec.outputs]):
        bias = spec.bias
        if bias is not None and index == bias.param and bias.kind == "keep":
            keep = rng.random(shape) < 0.7
            keep[..., 0] = True
            if spec.guarded:
                keep[-1, :, 1::3] = False
            drawn.append(keep.astype(dtype))
            continue
        values = rng.standard_normal(shape)
        if bias is not None and index == bias.param:
            values[..., 1:][rng.random(values[..., 1:].shape) < 0.2] = -np.inf
            if spec.guarded:
                values[-1, ..., :3] = -np.inf
        drawn.append(values.astype(dtype))
    return drawn


def _heads(spec: AttentionSpec, inputs: Sequence[np.ndarray], role: str) -> np.ndarray:
    layout = spec.layouts()[role]
    shape = (spec.batch, spec.heads_of(role), spec.positions(role), spec.width(role))
    steps = (layout.batch_stride, layout.head_stride, layout.position_stride, 1)
    return _strided(inputs[layout.param], layout.offset, shape, steps)


def keys_and_values(spec: AttentionSpec, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return K and V [B, H, S, D], grown where they grow."""
    if spec.growth is None:
        return [_heads(spec, inputs, role) for role in ("key", "value")]
    return [
        np.concatenate([_heads(spec, inputs, f"{age} {role}") for age in ("past", "new")], axis=2)
        for role in ("key", "value")
    ]


def reference(spec: AttentionSpec, params: Params, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the output in float64, of the output's shape."""
    query = _heads(spec, inputs, "query").astype(np.float64)
    key, value = (part.astype(np.float64).repeat(spec.group, axis=1) for part in keys_and_values(spec, inputs))
    scores = query @ key.swapaxes(2, 3) * spec.scale
    ahead = np.arange(spec.keys) - np.arange(spec.queries)[:, None] - (spec.keys - spec.queries)
    seen = np.ones_like(ahead, bool)
    if spec.causal:
        seen &= ahead <= 0
    if spec.window:
        seen &= np.abs(ahead) < spec.window
    if spec.bias is not None:
        bias = spec.bias
        b, h, i, j = np.indices(scores.shape, sparse=True)
        place = bias.offset + i * bias.query_stride + j * bias.key_stride
        place = np.clip(place, 0, bias.limit) if bias.limit else place
        row = b % (bias.period or spec.batch) * bias.batch_stride + h * bias.head_stride
        mask = inputs[bias.param].reshape(-1)[row + place]
        if bias.kind == "add":
            scores = scores + mask
        else:
            seen = seen & (mask != 0)
    scores = np.where(seen, scores, -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    values = weights @ value / weights.sum(axis=-1, keepdims=True)
    values = np.where(np.isnan(values), 0.0, values) if spec.guarded else values
    shape = params[-spec.outputs][0]
    output = np.full(math.prod(shape), np.nan)
    layout = spec.output
    steps = (layout.batch_stride, layout.head_stride, layout.position_stride, 1)
    _strided(output, layout.offset, values.shape, steps)[...] = values
    return output.reshape(shape)


def _strided(array: np.ndarray, offset: int, shape: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    flat = array.reshape(-1)[offset:]
    return np.lib.stride_tricks.as_strided(flat, shape, [step * array.itemsize for step in steps])


def masked_cases(case: AttentionCase) -> dict[str, AttentionCase]:
    """Return a case of three heads with masks that lie otherwise than as a tensor of their own, and with guards."""
    small = replace(case, batch=6, queries=49, keys=49)
    keys, queries = case.keys, case.queries
    return {
        "of a slice": replace(
            case, keys=130, bias=("add", "float32", (1, 3, queries + 2, 130)), lies=(("offset", 2 * 130),)
        ),
        "of an odd slice": replace(
            case, keys=keys - 1, bias=("add", "float16", (1, 3, queries, keys)), lies=(("offset", 1),)
        ),
        "repeated": replace(small, bias=("add", "float32", (3, 1, 49, 49)), lies=(("period", 3),)),
        "distances": replace(case, causal=True, bias=("add", "float32", (1, 3, 99, 1)), lies=distances(49)),
        "distances of halves": replace(case, bias=("add", "float16", (1, 3, 399, 1)), lies=distances(199)),
        "guarded": replace(case, guarded=True, bias=("keep", "bool", (case.batch, 1, queries, keys))),
        "guarded sum": replace(case, guarded=True, causal=True, bias=("add", "float32", (case.batch, 1, 1, keys))),
    }
