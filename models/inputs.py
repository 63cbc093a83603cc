"""Random inputs that a model can take: token ids in the vocabulary, masks with padding, positions in order.

How an integer input is understood:

0. Where attention computes with it as the number of keys, it is what the sizes of the call say (`models.axes.flow`).
1. It is followed through Cast, Reshape, Slice and the like to every Gather it indexes; the smallest table is its range.
2. Failing that, its name (`*mask*`, `*position*`) or its use as a mask (1 - x, Not, Where, a cast to bool) decides.
3. Failing that, it is the number that the graph compares it with, a rate of samples for example.
4. Failing that, it is drawn from 0..1, `describe_inputs` says so, and a warning is logged.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from relaxtune.models.axes.flow import lengths_given
from relaxtune.models.dims import evaluate_dim
from relaxtune.models.errors import ModelShapeError
from relaxtune.models.input_roles import GraphUses
from relaxtune.models.onnx_model import OnnxModel
from relaxtune.models.spec import IndexLimit, TensorSpec, numpy_dtype
from relaxtune.polynomials import Polynomial

log = logging.getLogger(__name__)

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"})
# Positions without a table (rotary embeddings) have no limit of their own.
_NO_LIMIT = 2**31 - 1
# The value of an additive mask at hidden places: exp gives 0 beside any score of usual size, and
# float16 holds it.
_PADDED_SCORE = -1e4
# Of `random_inputs`; all others have padding.
_UNPADDED_SAMPLE = 1


class InputKind(StrEnum):
    """The meaning of an input to the model."""

    INDEX = "index"
    MASK = "mask"
    ADDITIVE_MASK = "additive_mask"
    POSITION = "position"
    LENGTH = "length"
    CACHE = "cache"
    REAL = "real"
    FLAG = "flag"
    UNKNOWN_INTEGER = "unknown_integer"


@dataclass(frozen=True)
class InputRule:
    """How random values of one input are drawn; integers lie in `low <= x < high`, a length is a sum of axes."""

    name: str
    kind: InputKind
    low: int
    high: int
    reason: str
    length: Polynomial | None = None


def fill_values(rules: Sequence[InputRule]) -> dict[str, float]:
    """Return what padding of each input holds: 0 for a mask (nothing is attended to there), a valid index, 0."""
    fills = {InputKind.ADDITIVE_MASK: _PADDED_SCORE}
    return {rule.name: fills.get(rule.kind, float(rule.low)) for rule in rules}


def list_masks(rules: Sequence[InputRule]) -> tuple[str, ...]:
    """Return the names of the inputs that hide places."""
    return tuple(rule.name for rule in rules if rule.kind in (InputKind.MASK, InputKind.ADDITIVE_MASK))


def describe_inputs(model: OnnxModel) -> tuple[InputRule, ...]:
    """Return how each input is drawn and why, in the model's order."""
    uses = GraphUses(model.proto)
    lengths = lengths_given(model.proto)
    return tuple(
        InputRule(
            spec.name, InputKind.LENGTH, 0, _NO_LIMIT, f"keys of attention: {lengths[spec.name]}", lengths[spec.name]
        )
        if spec.name in lengths
        else _rule(spec, uses)
        for spec in model.inputs
    )


def index_limits(model: OnnxModel) -> tuple[IndexLimit, ...]:
    """Return which integers the inputs may hold that are looked up in tables, as ONNX Runtime takes them."""
    uses = GraphUses(model.proto)
    found = [uses.index_limit(spec.name) for spec in model.inputs if spec.dtype not in _FLOATS]
    return tuple(limit for limit in found if limit is not None)


def random_inputs(
    model: OnnxModel, *, seed: int, sample: int = 0, dims: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Return one random input for every input of the model; the same for the same seed and sample.

    Raises `ModelShapeError`: a symbolic axis has no number in `dims`.

    Parameters
    ----------
    model
        The model; its integer inputs are understood as the module's docstring says.
    seed, sample
        Sample 1 has masks of ones only, every other sample has right padding.
    dims
        A number for every symbolic axis, such as `{"batch": 1, "sequence": 128}`; expressions over them are computed.
    """
    shapes = {spec.name: _concrete_shape(spec, dims or {}) for spec in model.inputs}
    rules = describe_inputs(model)
    unknown = [rule.name for rule in rules if rule.kind is InputKind.UNKNOWN_INTEGER]
    if unknown:
        log.warning("the range of integer inputs %s of %r is unknown; drawn from 0..1", ", ".join(unknown), model.name)
    rngs = {spec.name: np.random.default_rng([seed, sample, zlib.crc32(spec.name.encode())]) for spec in model.inputs}
    drawn: dict[str, np.ndarray] = {}
    new_tokens, past = _lengths(rules, shapes)
    valid_past: np.ndarray | None = None
    # Masks first: positions of a decode step continue after the tokens its mask keeps.
    for rule in sorted(rules, key=lambda rule: rule.kind not in {InputKind.MASK, InputKind.ADDITIVE_MASK}):
        shape, rng = shapes[rule.name], rngs[rule.name]
        if rule.kind in {InputKind.MASK, InputKind.ADDITIVE_MASK}:
            kept = _mask(shape, rng, new_tokens if past else 0, padded=sample != _UNPADDED_SAMPLE)
            if past and kept.ndim == 2 and kept.shape[1] > new_tokens:
                valid_past = kept.sum(axis=1) - new_tokens
            drawn[rule.name] = kept if rule.kind is InputKind.MASK else np.where(kept, 0.0, _PADDED_SCORE)
        elif rule.kind is InputKind.POSITION:
            drawn[rule.name] = _positions(shape, rule.high, past, valid_past)
        elif rule.length is not None:
            drawn[rule.name] = np.full(shape, rule.length.at(dims or {}) or 0)
        elif rule.kind in {InputKind.CACHE, InputKind.REAL}:
            drawn[rule.name] = rng.standard_normal(shape) * (0.5 if rule.kind is InputKind.CACHE else 1.0)
        else:
            drawn[rule.name] = rng.integers(rule.low, rule.high, shape)
    return {spec.name: np.asarray(drawn[spec.name], numpy_dtype(spec.dtype)) for spec in model.inputs}


def unpadded_inputs(model: OnnxModel, *, seed: int, dims: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
    """Return random inputs whose masks hide nothing: what a model is timed on, as its kernels are alone.

    Parameters and errors are those of `random_inputs`.
    """
    return random_inputs(model, seed=seed, sample=_UNPADDED_SAMPLE, dims=dims)


def _rule(spec: TensorSpec, uses: GraphUses) -> InputRule:
    name = spec.name.lower()
    if spec.dtype in _FLOATS:
        if "mask" in name:
            kind = InputKind.ADDITIVE_MASK if uses.is_added(spec.name) else InputKind.MASK
            return InputRule(spec.name, kind, 0, 2, f"a float named {spec.name!r}")
        kind = InputKind.CACHE if "past" in name or "cache" in name else InputKind.REAL
        return InputRule(spec.name, kind, 0, 0, "a float input")
    found = uses.index_range(spec.name)
    if "mask" in name:
        return InputRule(spec.name, InputKind.MASK, 0, 2, f"named {spec.name!r}")
    if "position" in name:
        high = found.high if found else _NO_LIMIT
        return InputRule(spec.name, InputKind.POSITION, 0, high, found.reason if found else f"named {spec.name!r}")
    if found:
        return InputRule(spec.name, InputKind.INDEX, found.low, found.high, found.reason)
    mask_use = uses.mask_use(spec.name)
    if mask_use:
        return InputRule(spec.name, InputKind.MASK, 0, 2, mask_use)
    if spec.dtype == "bool":
        return InputRule(spec.name, InputKind.FLAG, 0, 2, "a bool input")
    number = uses.chosen_by(spec.name)
    if number is not None:
        return InputRule(spec.name, InputKind.FLAG, number, number + 1, "compared with this number")
    return InputRule(spec.name, InputKind.UNKNOWN_INTEGER, 0, 2, "no table is indexed by it; 0..1 is a guess")


def _concrete_shape(spec: TensorSpec, dims: Mapping[str, int]) -> tuple[int, ...]:
    shape: list[int] = []
    for axis in spec.shape:
        value = evaluate_dim(axis, dims)
        if not isinstance(value, int) or value < 0:
            raise ModelShapeError(
                f"axis {axis!r} of input {spec} has no number: pass dims={{{str(axis)!r}: ...}}; "
                f"got dims for {', '.join(dims) or 'no axis'}"
            )
        shape.append(value)
    return tuple(shape)


def _lengths(rules: tuple[InputRule, ...], shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return how many tokens are new in this call, and how many the caches hold (0 without a cache)."""
    caches = [shapes[rule.name] for rule in rules if rule.kind is InputKind.CACHE]
    past = max((shape[-2] for shape in caches if len(shape) >= 2), default=0)
    tokens = [shapes[rule.name] for rule in rules if rule.kind is InputKind.INDEX]
    new_tokens = max((shape[-1] for shape in tokens if len(shape) >= 2), default=1)
    return new_tokens, past


def _mask(shape: tuple[int, ...], rng: np.random.Generator, keep_last: int, *, padded: bool) -> np.ndarray:
    """Return a bool mask with right padding before the last `keep_last` places; every row keeps at least one place."""
    if not shape:
        return np.ones((), dtype=np.bool_)
    rows, total = shape[0] if len(shape) > 1 else 1, shape[-1]
    free = total - keep_last if total > keep_last else total
    shortest = max(free // 2, 0 if keep_last and total > keep_last else 1)
    lengths = rng.integers(shortest, free + 1, rows) if padded and free > shortest else np.full(rows, free)
    if padded and free > shortest:
        # One row at least is padded, whatever was drawn.
        lengths[0] = min(int(lengths[0]), free - 1)
    places = np.arange(total)
    kept = (places[None] < lengths[:, None]) | (places[None] >= free)
    kept = kept[0] if len(shape) == 1 else kept.reshape(rows, *[1] * (len(shape) - 2), total)
    return np.asarray(np.broadcast_to(kept, shape).copy())


def _positions(shape: tuple[int, ...], high: int, past: int, valid_past: np.ndarray | None) -> np.ndarray:
    """Return positions that go up by one along the last axis, after the tokens already in the cache."""
    if not shape:
        return np.asarray(min(past, high - 1))
    steps = np.arange(shape[-1])
    start = np.full(shape[:-1], past)
    if valid_past is not None and len(shape) == 2 and shape[0] == len(valid_past):
        start = valid_past
    return np.minimum(start[..., None] + steps, high - 1)
