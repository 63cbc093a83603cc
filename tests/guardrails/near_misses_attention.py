"""Near misses of attention, rotary embeddings and caches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.guardrails.drawing import Drawing, Shape

_LOW = (-np.inf, -1e9, -1e4, float(np.finfo("float32").min))


def _project(d: Drawing, x: str, inner: int, outer: int) -> str:
    return d.node("MatMul", x, d.constant((d.rng.standard_normal((inner, outer)) / inner**0.5).astype("float32")))


def _heads(d: Drawing, x: str, shape: Shape) -> str:
    """Return [batch, positions, heads * size] as [batch, heads, positions, size]."""
    batch, heads, positions, size = shape
    return d.node("Transpose", d.node("Reshape", x, d.ints(batch, positions, heads, size)), perm=[0, 2, 1, 3])


def _mask(d: Drawing, shape: Shape) -> str:
    """Return a constant mask that is broadcast to the scores; each query sees a key."""
    batch, heads, queries, keys = shape
    ahead = np.arange(keys)[None, :] - np.arange(queries)[:, None] - (keys - queries)
    seen = d.choice(
        ahead <= 0, ahead <= 0, ahead <= 1, ahead >= 0, (ahead <= 0) & (ahead > -7), abs(ahead) < 5, (ahead <= 0).T
        if keys == queries else ahead <= 0, np.ones_like(ahead, bool), np.arange(keys)[None] < keys // 2 + 1,
    )  # fmt: skip
    held = np.where(seen, 0, d.choice(*_LOW)).astype("float32")  # type: ignore[arg-type]
    lead = d.choice((), (1,), (1, 1), (heads,), (batch, 1), (batch, heads), (heads, 1) if heads == batch else ())
    wide = np.broadcast_to(held, (*lead, *held.shape)).copy()  # type: ignore[misc]
    if lead and d.chance(0.6):
        wide += d.rng.standard_normal(wide.shape[:-2]).astype("float32")[..., None, None]
        wide += 0.1 * d.rng.standard_normal(wide.shape[-1]).astype("float32")
    return d.constant(wide)


def _masked(d: Drawing, scores: str, shape: Shape, *, scaled_later: bool = False) -> str:
    batch, _, queries, keys = shape
    kind = d.choice("none", "constant", "constant", "input", "bool", "twice", "times")
    if kind == "constant":
        return d.node("Add", *((scores, _mask(d, shape)) if d.chance(0.7) else (_mask(d, shape), scores)))
    if kind == "twice":
        return d.node("Add", d.node("Add", scores, _mask(d, shape)), _mask(d, shape))
    if kind == "times":
        # NVIDIA's ptxas makes x * 1.5 * 0.125 one product: what overflows between the two stays finite.
        factor = 0.75 if scaled_later else 1.5
        return d.node("Mul", d.node("Add", scores, _mask(d, shape)), d.number(factor))
    kept = (d.rng.random((batch, keys)) < 0.7).astype("float32")
    kept[:, 0] = 1
    if kind == "input":
        mask = d.node("Reshape", d.input(kept), d.ints(batch, 1, 1, keys))
        low = d.number(float(d.choice(-1e9, -1e4, -1.0)))  # type: ignore[arg-type]
        return d.node("Add", scores, d.node("Mul", d.node("Sub", d.number(1.0), mask), low))
    if kind == "bool":
        held = d.choice((batch, 1, 1, keys), (1, 1, queries, keys), (queries, 1))
        test = d.rng.random(held) < 0.8  # type: ignore[call-overload]
        test[..., 0] = True
        condition, low = d.constant(test), d.number(float(d.choice(*_LOW[1:])))  # type: ignore[arg-type]
        pair = (scores, low) if d.chance(0.8) else (low, scores)
        return d.node("Where", condition, *pair)
    return scores


def _scaled(d: Drawing, x: str, value: float, shape: Shape) -> str:
    """Return a tensor times a scale: a number, or what is broadcast, or computed."""
    kind = d.choice("number", "number", "number", "one", "wide", "heads", "computed")
    if kind == "computed":
        return d.node("Div", x, d.node("Sqrt", d.number(1 / value**2)))
    held = {"number": (), "one": (1,), "wide": (shape[-1],), "heads": (shape[1], 1, 1)}[str(kind)]
    varied = value * np.exp(0.3 * d.rng.standard_normal(held))
    scale = d.constant(np.asarray(varied if held else value, "float32"))
    return d.node("Mul", x, scale) if d.chance(0.7) else d.node("Div", x, d.node("Reciprocal", scale))


def attention(d: Drawing) -> tuple[str, Shape]:
    """Attention: V of another width, other masks, scales, softmax axes, head orders, guards, extra readers."""
    batch, heads = int(d.choice(1, 2)), int(d.choice(1, 2, 2, 4))  # type: ignore[call-overload]
    keys, size = int(d.choice(16, 64)), int(d.choice(32, 64, 64))  # type: ignore[call-overload]
    queries = keys if d.chance(0.7) else int(d.choice(1, 16, 64))  # type: ignore[call-overload]
    wide = size if d.chance(0.6) else int(d.choice(16, 32, 64, 96, 128))  # type: ignore[call-overload]
    groups = 1 if d.chance(0.7) else heads
    few = heads // groups
    x, y = d.fed(batch, queries, 64), d.fed(batch, keys, 64)
    if queries == keys and d.chance(0.6):
        y = x
    q = _heads(d, _project(d, x, 64, heads * size), (batch, heads, queries, size))
    k = _heads(d, _project(d, y, 64, few * size), (batch, few, keys, size))
    v = _heads(d, _project(d, y, 64, few * wide), (batch, few, keys, wide))
    if groups > 1:
        k, v = (_repeated(d, one, (batch, few, groups, keys, w)) for one, w in ((k, size), (v, wide)))
    where = d.choice("scores", "scores", "query", "both", "late")
    if where in ("query", "both"):
        q = _scaled(d, q, size ** (-0.5 if where == "query" else -0.25), (batch, heads, queries, size))
    if where == "both":
        k = _scaled(d, k, size**-0.25, (batch, heads, keys, size))
    shape = (batch, heads, queries, keys)
    scores = d.node("MatMul", q, d.node("Transpose", k, perm=[0, 1, 3, 2]))
    if where == "scores":
        scores = _scaled(d, scores, size**-0.5, shape)
    scores = _masked(d, scores, shape, scaled_later=where == "late")
    if where == "late":
        scores = d.node("Mul", scores, d.number(size**-0.5))
    weights = d.node("Softmax", scores, axis=int(d.choice(-1, -1, -1, -1, -1, 3, -2, 1)))  # type: ignore[call-overload]
    if d.chance(0.15):
        filled = d.number(float(d.choice(0.0, 0.0, 1.0)))  # type: ignore[arg-type]
        weights = d.node("Where", d.node("IsNaN", weights), filled, weights)
    if d.chance(0.1):
        weights = d.node("Mul", weights, d.number(1.1))
    result = d.node("MatMul", weights, v)
    if d.chance(0.75):
        order = [0, 2, 1, 3] if d.chance(0.85) else [0, 1, 3, 2]
        result = d.node("Reshape", d.node("Transpose", result, perm=order), d.ints(batch, queries, heads * wide))
        return _ended(d, result, weights, (batch, queries, heads * wide), shape)
    return _ended(d, result, weights, (batch, heads, queries, wide), shape)


def _repeated(d: Drawing, x: str, shape: Shape) -> str:
    """Return grouped heads repeated: each beside itself as in grouped queries, or the whole row of heads again."""
    batch, few, groups, keys, wide = shape
    if d.chance(0.7):
        spread = d.node("Expand", d.node("Unsqueeze", x, d.ints(2)), d.ints(*shape))
    else:
        spread = d.node("Expand", d.node("Unsqueeze", x, d.ints(1)), d.ints(batch, groups, few, keys, wide))
    return d.node("Reshape", spread, d.ints(batch, few * groups, keys, wide))


def _ended(d: Drawing, result: str, weights: str, shape: Shape, of_weights: Shape) -> tuple[str, Shape]:
    if d.chance(0.85):
        return result, shape
    # The weights have a second reader.
    total = d.node("ReduceSum", weights, d.ints(*range(len(of_weights))), keepdims=0)
    return d.node("Add", result, total), shape


def _turned(d: Drawing, x: str, size: int) -> str:
    """Return the halves of the last axis exchanged, one negative: as rotary embeddings do, or otherwise."""
    kind = d.choice("halves", "halves", "halves", "plain", "low", "pairs", "quarter")
    ends = d.ints(2**62)
    half = size // 4 if kind == "quarter" else size // 2

    def part(start: int, end: str, step: int = 1) -> str:
        return d.node("Slice", x, d.ints(start), end, d.ints(-1), d.ints(step))

    if kind == "pairs":
        odd, even = part(1, ends, 2), part(0, ends, 2)
        both = [d.node("Unsqueeze", one, d.ints(-1)) for one in (d.node("Neg", odd), even)]
        stacked = d.node("Concat", *both, axis=-1)
        return d.node("Reshape", stacked, d.ints(0, 0, 0, size))
    low, high = part(0, d.ints(half)), part(half, ends)
    if kind == "plain":
        return d.node("Concat", high, low, axis=-1)
    if kind == "low":
        return d.node("Concat", high, d.node("Neg", low), axis=-1)
    return d.node("Concat", d.node("Neg", high), low, axis=-1)


def rotary(d: Drawing) -> tuple[str, Shape]:
    """Rotary embeddings of queries and keys of one projection: other halves, pairs, tables, parts of a head."""
    batch, heads, rows, size = int(d.choice(1, 2)), 2, int(d.choice(8, 64)), 64  # type: ignore[call-overload]
    x = d.fed(batch, rows, 64)
    held = d.choice(
        (1, 1, rows, size), (1, 1, rows, size), (rows, size), (batch, 1, rows, size), (1, heads, rows, size)
    )
    angles = d.rng.uniform(-3, 3, held)  # type: ignore[arg-type]
    cos, sin = (d.constant(f(angles).astype("float32")) for f in (np.cos, np.sin))
    joint = d.chance(0.7)
    both = _project(d, x, 64, 2 * heads * size) if joint else ""
    turned = []
    for place in range(2):
        if joint:
            ends = [d.ints(n * heads * size) for n in (place, place + 1)]
            own = d.node("Slice", both, *ends, d.ints(-1))
        else:
            own = _project(d, x, 64, heads * size)
        own = _heads(d, own, (batch, heads, rows, size))
        tables = (cos, sin) if d.chance(0.9) else (sin, cos)
        sums = [d.node("Mul", own, tables[0]), d.node("Mul", _turned(d, own, size), tables[1])]
        turned.append(d.node("Add", *(sums if d.chance(0.7) else sums[::-1])))
    scores = d.node("MatMul", turned[0], d.node("Transpose", turned[1], perm=[0, 1, 3, 2]))
    scores = d.node("Mul", scores, d.number(size**-0.5))
    if d.chance(0.5):
        return scores, (batch, heads, rows, rows)
    value = _heads(d, _project(d, x, 64, heads * size), (batch, heads, rows, size))
    return d.node("MatMul", d.node("Softmax", scores, axis=-1), value), (batch, heads, rows, size)


def cache(d: Drawing) -> tuple[str, Shape]:
    """Attention over caches that a step appends to: on another axis, in front, read or not, of other lengths."""
    batch, heads, past, size = int(d.choice(1, 2)), 2, int(d.choice(16, 63)), 64  # type: ignore[call-overload]
    new = int(d.choice(1, 1, 2))  # type: ignore[call-overload]
    x = d.fed(batch, new, 64)
    q = _heads(d, _project(d, x, 64, heads * size), (batch, heads, new, size))
    whole = []
    for _ in range(2):
        own = _heads(d, _project(d, x, 64, heads * size), (batch, heads, new, size))
        pair = [d.fed(batch, heads, past, size), own]
        whole.append(d.node("Concat", *(pair if d.chance(0.85) else pair[::-1]), axis=int(d.choice(2, -2))))  # type: ignore[call-overload]
    scores = d.node("MatMul", q, d.node("Transpose", whole[0], perm=[0, 1, 3, 2]))
    scores = d.node("Mul", scores, d.number(size**-0.5))
    scores = _masked(d, scores, (batch, heads, new, past + new))
    weights = d.node("Softmax", scores, axis=-1)
    result = d.node("MatMul", weights, whole[1])
    flat = d.node("Reshape", d.node("Transpose", result, perm=[0, 2, 1, 3]), d.ints(batch, -1))
    caches = [d.node("Reshape", one, d.ints(batch, -1)) for one in whole]
    held = heads * (past + new) * size
    return d.node("Concat", flat, *caches, axis=-1), (batch, new * heads * size + 2 * held)


ATTENTION: tuple[Callable[[Drawing], tuple[str, Shape]], ...] = (attention, attention, attention, rotary, cache)
