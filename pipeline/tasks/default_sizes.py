"""Sizes that kernels are tuned at where the user names none: from the graph's limits, and what its inputs are.

::

    batch          1, 8, 32
    length         1/8, 1/4 and all of its limit
    cache          one new token after 1/4 and all of the limit; as many new tokens after a cache of 1
    image, signal  the smallest that the graph has room for

A limit above 2,048 counts as 2,048, none as 512. Calls that take long are left out: about half a second on two cores of
a CPU, a tenth on a GPU.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping

from relaxtune.models import OnnxModel
from relaxtune.models.axes.relations import axis_sizes
from relaxtune.models.axis_profile import sizes_within
from relaxtune.models.buckets import list_symbols
from relaxtune.models.dims import evaluate_dim
from relaxtune.models.errors import ModelShapeError
from relaxtune.models.size_histogram import SizePoint
from relaxtune.models.spec import TensorSpec

_BATCHES = 1, 8, 32
# Parts of a limit, as quotients.
_LENGTHS, _STEPS = (8, 4, 1), (4, 1)
_WITHOUT_LIMIT, _LIMIT_MAX = 512, 2048
_TOKENS_MAX = 16_384
# Operations of a call, two a token and weight. No property of the machine: compiling elsewhere finds the same sizes.
_WORK_MAX = {"cuda": 2e13, "llvm": 4e10}
# A patch of 16 x 16 pixels has so many numbers, and is a token.
_NUMBERS_OF_TOKEN = 768
_CACHED_MAX = 2**26
# Elements of a tensor that kernels can count (`schedules`' 32-bit positions).
_ELEMENTS_MAX = 2**31 - 1
# A call counts by this power of the tokens of the largest over its own, so that no size is most of the time of them
# all: a CPU takes twice as long for twice the tokens, a GPU less.
_COUNTS = {"cuda": 0.5, "llvm": 1.0}


def default_points(model: OnnxModel, kind: str) -> tuple[SizePoint, ...]:
    """Return the sizes of calls that a model with free axes is tuned at on a kind of target, few tokens first.

    A call counts the more, the fewer tokens it has.
    """
    if not list_symbols(model.inputs):
        return ()
    # The axes of an encoder are the lengths of its mask and of the decoder's caches.
    batches, caches, encoder, new = _kinds(model)
    limits = {axis: _limit(model, axis) for axis in (*caches, *encoder, *new)}
    weights = sum(math.prod(tensor.dims) for tensor in model.proto.graph.initializer if len(tensor.dims) > 1)
    tokens_max = min(_TOKENS_MAX, _WORK_MAX[kind] / (2 * max(1, weights)))

    def parts(axes: Iterable[str], part: int) -> dict[str, int]:
        return {axis: -(-limits[axis] // part) for axis in axes}

    calls = [parts(limits, part) for part in _LENGTHS]
    if caches:
        calls = [{**parts(limits, part), **dict.fromkeys(new, 1)} for part in _STEPS]
        calls += [{**parts(limits, part), **dict.fromkeys(caches, 1)} for part in _STEPS if new]
    found: dict[tuple[tuple[str, int], ...], int] = {}
    for batch in _BATCHES if batches else (1,):
        for call in calls:
            sizes = {**dict.fromkeys(batches, batch), **call}
            tokens = _tokens(model, sizes)
            if tokens is not None and (tokens <= tokens_max or not found):
                found.setdefault(tuple(sizes.items()), tokens)
    if not found:
        found[tuple(axis_sizes(model).items())] = 1
    most = max(found.values())
    ordered = sorted(found.items(), key=lambda one: one[1])
    return tuple(SizePoint(sizes, round((most / tokens) ** _COUNTS[kind])) for sizes, tokens in ordered)


def _kinds(model: OnnxModel) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return the batch axes of a model's inputs, lengths of caches alone, of caches and others, and of others alone."""
    symbols = list_symbols(model.inputs)
    later = {axis for spec in model.inputs for axis in spec.shape[1:]}
    batches = [axis for axis in symbols if "batch" in axis.lower() or axis not in later]
    in_caches, in_others = set[int | str](), set[int | str]()
    for spec in model.inputs:
        if _is_cache(spec):
            in_caches.update(spec.shape)
        elif "float" not in spec.dtype:
            in_others.update(spec.shape)
        elif len(spec.shape) == 3 and isinstance(spec.shape[2], int):
            in_others.add(spec.shape[1])  # embeddings, with their features behind
    lengths = [axis for axis in symbols if axis not in batches]
    return (
        batches,
        [axis for axis in lengths if axis in in_caches - in_others],
        [axis for axis in lengths if axis in in_caches & in_others],
        [axis for axis in lengths if axis in in_others - in_caches],
    )


def _limit(model: OnnxModel, axis: str) -> int:
    """Return the most that an axis may be where the others are 1; what counts as that where the graph has no limit."""
    bounds = [one for one in model.relations if one.sign == "<="]

    def is_broken(size: int) -> bool:
        sizes = {**dict.fromkeys(list_symbols(model.inputs), 1), axis: size}
        return any(one.problem(sizes) for one in bounds)

    most = bisect.bisect(range(1, _LIMIT_MAX + 1), False, key=is_broken)
    bounded = most < _LIMIT_MAX or any(axis in one.axis.split() for one in bounds)
    return max(1, most) if bounded else _WITHOUT_LIMIT


def _tokens(model: OnnxModel, sizes: Mapping[str, int]) -> int | None:
    """Return the tokens of a call, at least one; None where the graph does not take its sizes, or tensors are huge.

    Axes without a size are as large as they have to be.
    """
    try:
        whole = sizes_within(model, {}, sizes)
    except ModelShapeError:
        return None
    if any(one.problem(whole) for one in model.relations):
        return None

    def sizes_of(spec: TensorSpec) -> list[int]:
        return [size for axis in spec.shape if isinstance(size := evaluate_dim(axis, whole), int)]

    tokens, cached = 1, 0
    for spec in model.inputs:
        elements = math.prod(sizes_of(spec))
        if _is_cache(spec):
            cached += elements
        elif "mask" not in spec.name.lower():
            tokens = max(tokens, elements // _NUMBERS_OF_TOKEN if "float" in spec.dtype else elements)
    for spec in model.outputs:
        known = sizes_of(spec)
        # Exporters give axes of results names of their own: those are the tokens.
        if math.prod(known) * (tokens if len(known) < len(spec.shape) else 1) > _ELEMENTS_MAX:
            return None
    return None if cached > _CACHED_MAX else tokens


def _is_cache(spec: TensorSpec) -> bool:
    return "float" in spec.dtype and ("past" in spec.name.lower() or "cache" in spec.name.lower())
