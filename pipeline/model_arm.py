"""A model with its kernels chosen, compiled and loaded as an arm to be timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from models.inputs import random_inputs
from pipeline.compile import compile_module
from pipeline.export import write_artifact
from pipeline.measure import Arm, module_arm
from pipeline.prepare import PreparedModel
from pipeline.runtime import Module
from pipeline.selection import KernelChoice
from pipeline.validate import default_dims


def compiled_arm(prepared: PreparedModel, choices: Sequence[KernelChoice], directory: Path) -> Arm:
    """Return a model as an arm on random inputs; its artifact is written to a directory that stays while it runs.

    Raises
    ------
    LoweringError, ArtifactError
        The model does not compile, or not load here.
    """
    write_artifact(compile_module(prepared.lowered, choices, prepared.target), directory)
    inputs = random_inputs(prepared.model, seed=0, dims=default_dims(prepared.model))
    return module_arm(Module.load(directory), inputs)
