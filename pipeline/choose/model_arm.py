"""A model with its kernels chosen, compiled and loaded as an arm to be timed, alone or with variants beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relaxtune.models import OnnxModel, unpadded_inputs
from relaxtune.models.axis_profile import sizes_within
from relaxtune.pipeline.artifact.compile import CompiledModule, compile_module, entry_of
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import Arm, module_arm
from relaxtune.pipeline.prepare import PreparedModel


@dataclass(frozen=True)
class LoadedArm:
    """A compiled model, the directory of its artifact, what was loaded from there, and its run on `timed_inputs`."""

    compiled: CompiledModule
    directory: Path
    module: Module
    arm: Arm


def compiled_arm(prepared: PreparedModel, choices: Sequence[KernelChoice], directory: Path) -> Arm:
    """Return a model as an arm on random inputs; its artifact is written to a directory that stays while it runs.

    Raises
    ------
    LoweringError, ArtifactError
        The model does not compile, or not load here.
    """
    return compiled_arms(prepared, choices, (), directory)[0]


def compiled_arms(
    prepared: PreparedModel,
    choices: Sequence[KernelChoice],
    variants: Sequence[Sequence[KernelChoice]],
    directory: Path,
) -> list[Arm]:
    """Return a model as an arm, and behind it each of its variants: the model with some other choices.

    All are one compilation and one copy of the weights; otherwise as `compiled_arm`.
    """
    compiled = compile_module(prepared.lowered, choices, prepared.target, variants=variants)
    loaded = load_arm(compiled, prepared.model, directory)
    others = [loaded.module.variant(entry_of(number)) for number in range(len(variants))]
    return [loaded.arm, *(module_arm(one, timed_inputs(prepared.model, one.manifest.maxima)) for one in others)]


def load_arm(compiled: CompiledModule, model: OnnxModel, directory: Path, beside: LoadedArm | None = None) -> LoadedArm:
    """Write a compiled model to a directory, and load it; `beside` is another form of the model, which stays there."""
    write_artifact(compiled, directory, beside=None if beside is None else (beside.compiled, beside.directory))
    # Writing has just verified it.
    module = Module.load(directory, verify=False, beside=None if beside is None else beside.module)
    return LoadedArm(compiled, directory, module, module_arm(module, timed_inputs(model, module.manifest.maxima)))


def timed_inputs(model: OnnxModel, maxima: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return the inputs that models are timed on: random, without padding, symbolic axes at their default sizes."""
    return unpadded_inputs(model, seed=0, dims=sizes_within(model, maxima))
