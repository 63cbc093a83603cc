"""relaxtune's arm: an artifact directory, run as `pipeline.artifact.module.Module` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_arms.arm import ArmUnavailableError, DeviceArm
from benchmarks.gpu_arms.artifact_facts import describe
from benchmarks.gpu_arms.cases import Case
from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import ArtifactError


def own_arm(case: Case, inputs: Mapping[str, np.ndarray], directory: Path) -> DeviceArm:
    """Return the arm of an artifact, its inputs where it reads them.

    Raises
    ------
    ArmUnavailableError
        There is no such artifact, it does not run here, or it was compiled for other shapes.
    """
    try:
        module = Module.load(directory)
    except ArtifactError as error:
        raise ArmUnavailableError(
            f"{error}; make it with `python -m benchmarks.whole_models.tune_gpu_cases`"
        ) from error
    got = {spec.name: tuple(spec.shape) for spec in module.inputs}
    if got != case.shapes:
        raise ArmUnavailableError(f"artifact {directory} takes {got}, case {case.name} has {case.shapes}")
    # An artifact of a float32 graph, computed in float16, takes its real inputs in float32.
    arrays = {spec.name: inputs[spec.name].astype(numpy_dtype(spec.dtype)) for spec in module.inputs}
    tensors = module.to_device(arrays)
    if module.input_buffers is not None:
        for tensor, buffer in zip(tensors, module.input_buffers, strict=True):
            tensor.copyto(buffer)
        tensors = module.input_buffers
    last: list[object] = []

    def launch() -> None:
        last[:] = module.run_device(tensors)

    def outputs() -> dict[str, Tensor]:
        return {spec.name: torch.from_numpy(tensor.numpy()) for spec, tensor in zip(module.outputs, last, strict=True)}

    return DeviceArm(launch, module.synchronise, outputs, notes=describe(module.manifest))
