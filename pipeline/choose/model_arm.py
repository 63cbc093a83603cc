"""A model with its kernels chosen, compiled and loaded as an arm to be timed, alone or with variants beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relaxtune.models import axis_sizes, unpadded_inputs
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.artifact.runtime import Module
from relaxtune.pipeline.artifact.variants import entry_of
from relaxtune.pipeline.bench.measure import Arm, module_arm
from relaxtune.pipeline.prepare import PreparedModel


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
    write_artifact(compiled, directory)
    inputs = unpadded_inputs(prepared.model, seed=0, dims=axis_sizes(prepared.model))
    module = Module.load(directory)
    modules = [module, *(module.variant(entry_of(number)) for number in range(len(variants)))]
    return [module_arm(one, inputs) for one in modules]
