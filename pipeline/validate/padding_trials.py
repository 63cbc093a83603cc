"""Try whether padding leaves an artifact's results alone, axis by axis, and draw the inputs that validate its routes.

This is a test, no proof. An axis is padded only where padded calls give ONNX Runtime's answer to the same call without
padding, over several lengths, masks, buckets and ranges of numbers, and where that answer stays the same whatever the
padding holds. An axis that fails, or is not tried, runs with symbolic shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relaxtune.models import OnnxModel, TensorSpec, axis_sizes, random_inputs
from relaxtune.models.buckets import Side, cut_outputs, list_sides, list_symbols, pad_inputs, side_of, unknown_axes
from relaxtune.models.inputs import InputKind, describe_inputs
from relaxtune.pipeline.artifact.directory import record_padding
from relaxtune.pipeline.artifact.entries import BucketEntry, BucketsEntry, PaddingEntry
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.validate.array_comparison import compare_arrays
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.validate.tolerances import Tolerance
from relaxtune.pipeline.validate.validation import default_tolerance

logger = logging.getLogger(__name__)

# Samples of each length, as (number of the sample, which numbers): sample 0 has padded masks, 1 masks of ones only. A
# maximum over an axis that is padded with zeros is right for what is positive, a minimum for what is negative.
_DRAWS = ((0, "any"), (1, "any"), (1, "positive"), (1, "negative"))
# The values of padding in the second run of a call: larger than what is drawn, small against the score of a hidden key.
_NOISE = 8.0
_NUMBERS = frozenset({InputKind.REAL, InputKind.CACHE})


@dataclass(frozen=True)
class _Trial:
    """The result of some padded calls: how many, the tolerance that they need, and the first that failed."""

    cases: int = 0
    required_atol: float = 0.0
    reason: str = ""


def try_padding(module: Module, model: OnnxModel) -> tuple[PaddingEntry, ...]:
    """Return for each bucketed axis whether calls may be padded along it.

    The model has its symbolic axes, the module buckets.
    """
    buckets = module.manifest.buckets
    if buckets is None:
        return ()
    lost = unknown_axes(module.outputs, list_symbols(module.inputs))
    if lost:
        reason = f"no axis of the inputs says how long {', '.join(lost)} is without padding"
        return tuple(PaddingEntry(axis, None, reason=reason) for axis in buckets.axes)
    reference = Reference(model, policy=module.manifest.policy)
    tolerance = default_tolerance(module, model)
    tried = [_try_axis(axis, buckets, module, model, reference, tolerance) for axis in buckets.axes]
    sides = {entry.axis: entry.side for entry in tried if entry.side is not None}
    if len(sides) > 1:
        together = _try(buckets, sides, module, model, reference, tolerance)
        if together.reason:
            reason = f"padded together with {', '.join(sides)}: {together.reason}"
            tried = [PaddingEntry(entry.axis, None, together.cases, reason=reason) for entry in tried]
    for entry in tried:
        logger.info(
            "padding along %s: %s", entry.axis, entry.side.value if entry.side else f"not allowed, {entry.reason}"
        )
    return tuple(tried)


def try_and_record(directory: Path, module: Module, model: OnnxModel) -> Module:
    """Find out along which axes calls may be padded, note it in the artifact's manifest, and return it loaded anew.

    Raises `ArtifactError`: the artifact has no buckets, or cannot be written.
    """
    record_padding(directory, try_padding(module, model))
    return Module.load(directory)


def route_sizes(module: Module, model: OnnxModel) -> dict[str, dict[str, int]]:
    """Return the sizes of each bucket by its name, and `symbolic`: such that no bucket takes; empty without buckets.

    There are none of the last where the model is not made for more than the largest bucket's.
    """
    buckets = module.manifest.buckets
    if buckets is None:
        return {}
    sizes = {entry.bucket.name: dict(entry.sizes) for entry in buckets.entries}
    beyond = {axis: size + 1 for axis, size in buckets.entries[-1].sizes.items()}
    tried = random_inputs(model, seed=0, dims=axis_sizes(model, beyond))
    if Reference(model, policy=module.manifest.policy).accepts(tried):
        sizes["symbolic"] = beyond
    return sizes


def route_inputs(module: Module, model: OnnxModel, *, samples: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Return validation inputs over every route: each bucket's sizes, sizes between, and sizes no bucket takes."""
    inputs = []
    for sizes in route_sizes(module, model).values():
        between = {axis: max(1, size - max(1, size // 5)) for axis, size in sizes.items()}
        for chosen in (sizes, between):
            dims = axis_sizes(model, chosen)
            inputs += [random_inputs(model, seed=seed, sample=sample, dims=dims) for sample in range(samples)]
    return inputs


def _try_axis(
    axis: str, buckets: BucketsEntry, module: Module, model: OnnxModel, reference: Reference, tolerance: Tolerance
) -> PaddingEntry:
    reasons = []
    cases = 0
    for side in list_sides(axis, module.inputs):
        tried = _try(buckets, {axis: side}, module, model, reference, tolerance)
        cases += tried.cases
        if not tried.cases:
            return PaddingEntry(axis, None, reason="no call is smaller than its buckets")
        if not tried.reason:
            return PaddingEntry(axis, side, tried.cases, tried.required_atol)
        reasons.append(f"on the {side.value}: {tried.reason}")
    return PaddingEntry(axis, None, cases, reason="; ".join(reasons))


def _try(
    buckets: BucketsEntry,
    sides: Mapping[str, Side],
    module: Module,
    model: OnnxModel,
    reference: Reference,
    tolerance: Tolerance,
) -> _Trial:
    cases, worst = 0, 0.0
    rules = {rule.name: rule.kind for rule in describe_inputs(model)}
    # The smallest and the largest bucket; the others lie between.
    ends = dict.fromkeys((0, len(buckets.entries) - 1))
    for place in ends:
        entry, target = buckets.entries[place], module.bucket_module(place)
        for sizes in _smaller(entry, list(sides)):
            dims = axis_sizes(model, sizes)
            wider = {**dims, **entry.sizes}
            for sample, numbers in _DRAWS:
                inputs = _within(random_inputs(model, seed=0, sample=sample, dims=dims), rules, numbers)
                padded = pad_inputs(inputs, module.inputs, wider, sides, buckets.fills)
                other = random_inputs(model, seed=1, sample=sample, dims=wider)
                noisy = _with_noise(padded, inputs, other, module.inputs, sides, rules)
                cases += 1
                wanted = reference.run(inputs)
                where = f"sizes {sizes} in {entry.bucket.name}"
                for called, what in ((padded, ""), (noisy, "with other values in the padding, ")):
                    got = cut_outputs(target.run(called), module.outputs, dims, sides)
                    reason, needed = _compared(wanted, got, tolerance)
                    if reason:
                        return _Trial(cases, worst, f"{what}{where}, {reason}")
                    worst = max(worst, needed)
    return _Trial(cases, worst)


def _compared(
    wanted: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray], tolerance: Tolerance
) -> tuple[str, float]:
    """Return the first difference, "" where there is none, and the tolerance that the outputs need."""
    worst = 0.0
    for name, array in wanted.items():
        compared = compare_arrays(array, got[name], tolerance)
        if not compared.passed:
            return f"output {name!r}: {compared.reason}", worst
        worst = max(worst, compared.required_atol)
    return "", worst


def _within(inputs: Mapping[str, np.ndarray], rules: Mapping[str, InputKind], numbers: str) -> dict[str, np.ndarray]:
    """Return inputs with the numbers of one sign, or as they are; integers and masks stay."""
    if numbers == "any":
        return dict(inputs)
    sign = 1 if numbers == "positive" else -1
    return {
        name: (sign * np.abs(array)).astype(array.dtype) if rules[name] in _NUMBERS else array
        for name, array in inputs.items()
    }


def _with_noise(
    padded: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    other: Mapping[str, np.ndarray],
    specs: Sequence[TensorSpec],
    sides: Mapping[str, Side],
    rules: Mapping[str, InputKind],
) -> dict[str, np.ndarray]:
    """Return padded inputs with other indices and larger numbers where the padding is; masks hide it still."""
    noisy = dict(padded)
    for spec in specs:
        kind, array = rules[spec.name], padded[spec.name]
        if kind is not InputKind.INDEX and kind not in _NUMBERS:
            continue
        kept = tuple(
            slice(size - own, None) if side_of(axis, sides) is Side.LEFT else slice(0, own)
            for axis, size, own in zip(spec.shape, array.shape, inputs[spec.name].shape, strict=True)
        )
        drawn = other[spec.name] * _NOISE if kind in _NUMBERS else other[spec.name]
        noisy[spec.name] = drawn.astype(array.dtype)
        noisy[spec.name][kept] = inputs[spec.name]
    return noisy


def _smaller(entry: BucketEntry, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield sizes below a bucket's along some axes: one less, half and one, and one."""
    seen = set()
    for shrink in (lambda size: size - 1, lambda size: size // 2 + 1, lambda size: 1):
        sizes = {axis: max(1, shrink(size)) if axis in axes else size for axis, size in entry.sizes.items()}
        key = tuple(sizes.items())
        if key not in seen and sizes != dict(entry.sizes):
            seen.add(key)
            yield sizes
