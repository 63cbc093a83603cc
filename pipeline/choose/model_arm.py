"""A model with its kernels chosen, compiled and loaded as an arm to be timed, alone or with variants beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from relaxtune.models.axis_profile import sizes_within
from relaxtune.pipeline.artifact.compile import CompiledModule, compile_module, entry_of
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import Arm, Call, arm_of_calls, module_arm
from relaxtune.pipeline.prepare import PreparedModel


@dataclass(frozen=True)
class LoadedArm:
    """A compiled model, the directory of its artifact, what was loaded from there, and its run of some calls."""

    compiled: CompiledModule
    directory: Path
    module: Module
    arm: Arm


def compiled_arms(
    prepared: PreparedModel,
    choices: Sequence[KernelChoice],
    variants: Sequence[Sequence[KernelChoice]],
    directory: Path,
) -> list[Arm]:
    """Return a model as an arm, and behind it each of its variants: the model with some other choices.

    They run on random inputs. All are one compilation and one copy of the weights; their artifact is written to a
    directory that stays while they run.

    Raises `LoweringError`, `ArtifactError`: the model does not compile, or not load here.
    """
    compiled = compile_module(prepared.lowered, choices, prepared.target, variants=variants)
    calls = timed_calls(prepared)
    loaded = load_arm(compiled, calls, directory)
    others = [loaded.module.variant(entry_of(number)) for number in range(len(variants))]
    return [loaded.arm, *(arm_of_calls(calls, partial(module_arm, one)) for one in others)]


def load_arm(
    compiled: CompiledModule, calls: Sequence[Call], directory: Path, beside: LoadedArm | None = None
) -> LoadedArm:
    """Write a compiled model to a directory, and load it; `beside` is another form of the model, which stays there."""
    write_artifact(compiled, directory, beside=None if beside is None else (beside.compiled, beside.directory))
    # Writing has just verified it.
    module = Module.load(directory, verify=False, beside=None if beside is None else beside.module)
    return LoadedArm(compiled, directory, module, arm_of_calls(calls, partial(module_arm, module)))


def timed_calls(prepared: PreparedModel) -> list[Call]:
    """Return the calls that a model is timed on: random inputs without padding, one for each of its tuned sizes."""
    model = prepared.model
    if not prepared.sizes:
        return [Call.at(model, sizes_within(model, prepared.lowered.options.maxima))]
    return [Call.at(model, point.sizes, point.weight) for point in prepared.sizes]
