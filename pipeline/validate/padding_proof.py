"""Prove that padding leaves an artifact's results alone, axis by axis, and draw the inputs that validate its routes.

Nothing is assumed of a graph: an axis is padded only where padded calls were compared with ONNX Runtime's answer to the
same call without padding, over several lengths, masks and buckets. What is not proved runs with symbolic shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relaxtune.models import OnnxModel, axis_sizes, random_inputs
from relaxtune.models.buckets import Side, cut_outputs, list_sides, list_symbols, pad_inputs, unknown_axes
from relaxtune.pipeline.artifact.directory import record_padding
from relaxtune.pipeline.artifact.entries import BucketEntry, BucketsEntry, PaddingEntry
from relaxtune.pipeline.artifact.runtime import Module
from relaxtune.pipeline.validate.array_comparison import compare_arrays
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.validate.tolerances import Tolerance
from relaxtune.pipeline.validate.validation import default_tolerance

logger = logging.getLogger(__name__)

# Two samples of each length: padded masks, and masks of ones only.
_SAMPLES = 2


@dataclass(frozen=True)
class _Trial:
    """What a set of padded calls gave: how many, the tolerance that they need, and the first that failed."""

    cases: int = 0
    required_atol: float = 0.0
    reason: str = ""


def prove_padding(module: Module, model: OnnxModel, *, seed: int = 0) -> tuple[PaddingEntry, ...]:
    """Return for each bucketed axis whether calls may be padded along it.

    Parameters
    ----------
    module : Module
        The artifact, with buckets.
    model : OnnxModel
        The model as it was given, with its symbolic axes.
    seed : int
        Of the random inputs.
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
    proved = [_prove_axis(axis, buckets, module, model, reference, tolerance, seed) for axis in buckets.axes]
    sides = {entry.axis: entry.side for entry in proved if entry.side is not None}
    if len(sides) > 1:
        together = _try(buckets, sides, module, model, reference, tolerance, seed)
        if together.reason:
            reason = f"padded together with {', '.join(sides)}: {together.reason}"
            proved = [PaddingEntry(entry.axis, None, together.cases, reason=reason) for entry in proved]
    for entry in proved:
        logger.info(
            "padding along %s: %s", entry.axis, entry.side.value if entry.side else f"not allowed, {entry.reason}"
        )
    return tuple(proved)


def prove_and_record(directory: Path, module: Module, model: OnnxModel) -> Module:
    """Find out along which axes calls may be padded, note it in the artifact's manifest, and return it loaded anew.

    Raises
    ------
    ArtifactError
        The artifact has no buckets, or cannot be written.
    """
    record_padding(directory, prove_padding(module, model))
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


def _prove_axis(
    axis: str,
    buckets: BucketsEntry,
    module: Module,
    model: OnnxModel,
    reference: Reference,
    tolerance: Tolerance,
    seed: int,
) -> PaddingEntry:
    reasons = []
    cases = 0
    for side in list_sides(axis, module.inputs):
        tried = _try(buckets, {axis: side}, module, model, reference, tolerance, seed)
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
    seed: int,
) -> _Trial:
    cases, worst = 0, 0.0
    # The smallest and the largest bucket; the others lie between.
    ends = dict.fromkeys((0, len(buckets.entries) - 1))
    for place in ends:
        entry, target = buckets.entries[place], module.bucket_module(place)
        for sizes in _smaller(entry, list(sides)):
            dims = axis_sizes(model, sizes)
            for sample in range(_SAMPLES):
                inputs = random_inputs(model, seed=seed, sample=sample, dims=dims)
                wider = {**dims, **entry.sizes}
                padded = pad_inputs(inputs, module.inputs, wider, sides, buckets.fills)
                got = cut_outputs(target.run(padded), module.outputs, dims, sides)
                cases += 1
                for name, wanted in reference.run(inputs).items():
                    shape = f"sizes {sizes} in {entry.bucket.name}, output {name!r}"
                    if wanted.shape != got[name].shape:
                        return _Trial(cases, worst, f"{shape}: expected shape {wanted.shape}, got {got[name].shape}")
                    compared = compare_arrays(wanted, got[name], tolerance)
                    if not compared.passed:
                        return _Trial(cases, worst, f"{shape}: {compared.reason}")
                    worst = max(worst, compared.required_atol)
    return _Trial(cases, worst)


def _smaller(entry: BucketEntry, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield sizes below a bucket's along some axes: one less, half and one, and one."""
    seen = set()
    for shrink in (lambda size: size - 1, lambda size: size // 2 + 1, lambda size: 1):
        sizes = {axis: max(1, shrink(size)) if axis in axes else size for axis, size in entry.sizes.items()}
        key = tuple(sizes.items())
        if key not in seen and sizes != dict(entry.sizes):
            seen.add(key)
            yield sizes
