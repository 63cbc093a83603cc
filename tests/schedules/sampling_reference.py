"""Sampling in NumPy, by sorting: what `schedules.functions.sampling` says, without its shortcuts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from relaxtune.schedules.functions import sampling as rules

Array = np.ndarray


@dataclass(frozen=True)
class Row:
    """One sequence: its logits in float32, what it is drawn by, and its optional inputs."""

    logits: Array
    seed: int = 0
    position: int = 0
    counts: Array | None = None
    bias: Array | None = None
    allowed: Array | None = None
    parameters: dict[str, float] = field(default_factory=dict)

    def parameter(self, name: str) -> np.float32:
        return np.float32(self.parameters.get(name, rules.NEUTRAL[rules.PARAMETERS.index(name)]))


def fused(a: Array, b: Array | float, c: Array | float) -> Array:
    """Return a multiply-add of float32 that is rounded once: the product is exact in float64."""
    wide = [np.asarray(value, "float32").astype("float64") for value in (a, b, c)]
    return (wide[0] * wide[1] + wide[2]).astype("float32")


def mass(d: Array) -> Array:
    d = np.maximum(d, np.float32(rules.LOWEST))
    n = fused(d, rules.LOG2_E, rules.ROUNDER) - np.float32(rules.ROUNDER)
    r = fused(n, -rules.LN2_LOW, fused(n, -rules.LN2_HIGH, d))
    polynomial = np.full_like(d, rules.EXP_COEFFICIENTS[-1])
    for coefficient in reversed(rules.EXP_COEFFICIENTS[:-1]):
        polynomial = fused(polynomial, r, coefficient)
    exponential = fused(polynomial, r * r, r) + np.float32(1)
    return np.floor(np.ldexp(exponential, n.astype(int) + rules.MASS_BITS) + np.float32(0.5)).astype("int64")


def processed(row: Row) -> Array:
    """Return x before the filters, with penalties, bias, mask and temperature."""
    x = np.where(np.isnan(row.logits), -np.inf, row.logits).astype("float32")
    temperature = row.parameter("temperature")
    with np.errstate(invalid="ignore"):
        if row.counts is not None:
            generated = (row.counts & 0x7FFFFFFF).astype("float32")
            repetition = row.parameter("repetition")
            x = np.where(row.counts != 0, np.where(x < 0, x * repetition, x / repetition), x)
            x = fused(-row.parameter("frequency"), generated, x)
            x = x - np.where(generated > 0, row.parameter("presence"), np.float32(0))
        if row.bias is not None:
            x = x + row.bias
        if row.allowed is not None:
            x = np.where(row.allowed, x, np.float32(-np.inf))
        if temperature >= np.float32(rules.GREEDY_BELOW):
            x = x / temperature
    return np.where(np.isnan(x), np.float32(-np.inf), x).astype("float32") + np.float32(0)


def kept(row: Row) -> Array:
    """Return the tokens that the filters keep, ascending, and their masses."""
    x = processed(row)
    with np.errstate(invalid="ignore"):
        d = np.where(x == x.max(), np.float32(0), x - x.max())
    masses = mass(d)
    tokens = np.arange(len(x))
    top_k, top_p, min_p, typical_p = (row.parameter(name) for name in ("top_k", "top_p", "min_p", "typical_p"))
    if 1 <= top_k < len(x):
        tokens = tokens[x >= np.sort(x)[-int(top_k)]]
    if top_p < 1:
        descending = tokens[np.argsort(-x[tokens], kind="stable")]
        sums = np.cumsum(masses[descending])
        needed = max(1, int(np.ceil(np.float64(top_p) * np.float64(sums[-1]))))
        tokens = np.sort(descending[: int(np.searchsorted(sums, needed)) + 1])
    if min_p > 0:
        tokens = tokens[masses[tokens] >= np.float64(min_p) * 2.0**rules.MASS_BITS]
    if 0 < typical_p < 1:
        own = masses[tokens]
        weighted = np.trunc(own * np.where(own > 0, d[tokens], 0).astype("float64") * 1024).astype("int64").sum()
        distances = np.abs(d[tokens] - np.float32(np.float64(weighted) / 1024 / np.float64(own.sum())))
        order = np.argsort(distances, kind="stable")
        needed = max(1, int(np.ceil(np.float64(typical_p) * np.float64(own.sum()))))
        border = distances[order[np.searchsorted(np.cumsum(own[order]), needed)]]
        tokens = tokens[distances <= border]
    return np.stack([tokens, masses[tokens]])


def philox(seed: int, position: int) -> list[int]:
    low = 0xFFFFFFFF
    words = [position & low, position >> 32 & low, 0, 0]
    key = [seed & low, seed >> 32 & low]
    for _ in range(10):
        one, other = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [other >> 32 ^ words[1] ^ key[0], other & low, one >> 32 ^ words[3] ^ key[1], one & low]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    return words


def sample(row: Row) -> tuple[int, float]:
    """Return the token and its log-probability."""
    x, logits = processed(row), np.where(np.isnan(row.logits), -np.inf, row.logits).astype("float64")
    if x.max() == -np.inf:
        return 0, -np.inf
    if row.parameter("temperature") < np.float32(rules.GREEDY_BELOW):
        token = int(np.argmax(x))
    else:
        tokens, masses = kept(row)
        one, other, _, _ = philox(row.seed, row.position)
        drawn = int(((one >> 5) * 2**26 + (other >> 6)) / 2**53 * float(masses.sum()))
        token = int(tokens[np.searchsorted(np.cumsum(masses), drawn, side="right")])
    with np.errstate(invalid="ignore"):
        d = np.where(logits == logits.max(), 0, logits - logits.max())
    return token, float(d[token] - np.log(np.exp(d).sum()))
