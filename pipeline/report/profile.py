"""Time every kernel of an artifact by itself, and the whole module, on the device that is here."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm

from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.entries import ArgumentEntry, KernelEntry
from relaxtune.pipeline.artifact.manifest import MODULE_FILE, Manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import OWN_ARM, measure, module_arm
from relaxtune.pipeline.codegen.cuda_libraries import load_cuda_runtime
from relaxtune.pipeline.environment import cpu_name
from relaxtune.pipeline.tuning.measure.arguments import (
    ArgumentSpec,
    hiding_nothing,
    make_arrays,
    with_column_sums,
    with_partial_sums,
)

logger = logging.getLogger(__name__)

_REPEATS = 5
_MIN_REPEAT_MS = 2
_MODEL_RUNS = 30
_SEED = 0


@dataclass(frozen=True)
class Profile:
    """Times and memory of an artifact on the device that is here."""

    device: str  # Its name.
    # Microseconds of one call of each kernel, alone and with warm caches, and of the whole module; medians.
    kernels_us: Mapping[str, float]
    model_us: float | None
    # Memory of the GPU that loading and running the module took, by the device's own
    # count: weights, planned storage, code, what a captured graph keeps, and the rounding of it all. Nothing is given
    # back meanwhile, so that it is the peak; other processes on the device count too. None on a CPU, and where the
    # module was not run.
    observed_bytes: int | None


def profile_artifact(directory: Path) -> Profile:
    """Return how long an artifact's kernels take here.

    Each runs again and again on random arguments of its own, so that a kernel whose data fit into a cache is faster
    than inside the model. Kernels of symbolic shapes are left out, and so is the module if it has any.

    Raises `ArtifactError`: the artifact is damaged, or for a target that this machine does not have.
    """
    free_before = _free_bytes(load_manifest(directory))
    module = Module.load(directory)
    model_us = _model_us(module)
    free_after = _free_bytes(module.manifest) if model_us is not None else None
    observed = None if free_before is None or free_after is None else free_before - free_after
    library = tvm.runtime.load_module(str(directory / MODULE_FILE))
    times: dict[str, float] = {}
    for kernel in module.manifest.kernels:
        seconds = _kernel_seconds(library, kernel, module.device)
        if seconds is not None:
            times[kernel.function] = seconds * 1e6
    device = str(module.device.device_name) if module.manifest.target.kind == "cuda" else cpu_name()
    return Profile(device, times, model_us, observed)


def _free_bytes(manifest: Manifest) -> int | None:
    """Return the free memory of the GPU that `Module.load` takes; None where the artifact is not for a GPU."""
    if manifest.target.kind != "cuda":
        return None
    load_cuda_runtime()
    device = tvm.cuda(0)
    return int(device.available_global_memory) if device.exist else None


def _kernel_seconds(library: tvm.runtime.Module, kernel: KernelEntry, device: tvm.runtime.Device) -> float | None:
    if kernel.work is None:
        logger.info("kernel %s has symbolic shapes and is not profiled", kernel.function)
        return None
    tensors = [tvm.runtime.tensor(array, device=device) for array in profile_arrays(kernel.work.arguments)]
    timer = _owner(library, kernel.function).time_evaluator(
        kernel.function, device, number=1, repeat=_REPEATS, min_repeat_ms=_MIN_REPEAT_MS
    )
    return float(statistics.median(timer(*tensors).results))


def profile_arrays(arguments: Sequence[ArgumentEntry]) -> list[np.ndarray]:
    """Return what a kernel is called with: random numbers as the tuner times with, masks of padding hide nothing."""
    limits = {position: one.limit for position, one in enumerate(arguments) if one.limit is not None}
    arrays = make_arrays([ArgumentSpec(one.shape, one.dtype) for one in arguments], limits, _SEED)
    numbered = [(str(position), one) for position, one in enumerate(arguments)]
    rows = {position: one.partial_sums_of for position, one in numbered if one.partial_sums_of is not None}
    columns = {position: one.column_sums_of for position, one in numbered if one.column_sums_of is not None}
    masks = {position: one.hides_nothing for position, one in numbered if one.hides_nothing is not None}
    return hiding_nothing(with_column_sums(with_partial_sums(arrays, rows), columns), masks)


def _owner(library: tvm.runtime.Module, function: str) -> tvm.runtime.Module:
    """Return the module that holds a function: the library itself, or one that it imports."""
    if library.implements_function(function):
        return library
    holders = (imported for imported in library.imports if imported.implements_function(function, True))
    return _owner(next(holders), function)


def _model_us(module: Module) -> float | None:
    if not all(spec.is_static for spec in module.inputs):
        return None
    inputs = {}
    for spec in module.inputs:
        dtype, shape = numpy_dtype(spec.dtype), tuple(map(int, spec.shape))
        # Integers of 0, which every table has, and small floats.
        drawn = np.random.default_rng(_SEED).standard_normal(shape)
        inputs[spec.name] = np.zeros(shape, dtype) if dtype.kind in "iub" else drawn.astype(dtype)
    report = measure({OWN_ARM: module_arm(module, inputs)}, runs=_MODEL_RUNS)
    return report.arm(OWN_ARM).median_ms * 1e3
