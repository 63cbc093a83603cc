"""Tables of kernels for layers of real widths: what fits a tiny model may ask for more shared memory than there is."""

from __future__ import annotations

import pytest

from relaxtune.models.axis_profile import AxisProfile
from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.passes import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest, prepare_model
from relaxtune.schedules.targets import portable_host

PROFILE = {
    "batch": AxisProfile(1, 8, 32),
    "sequence": AxisProfile(1, 128, 512),
    "past_sequence": AxisProfile(1, 512, 2048),
}
MODELS = ("llama-1b-decode", "llama-1b", "bert-base", "t5-small", "vit-base", "gpt2-small", "gpt2-small-decode")


@pytest.mark.slow
@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_each_kernel_of_symbolic_sizes_is_a_templates(model: str, profiled: bool) -> None:
    inputs = {spec.name: spec.shape for spec in get_preset(f"{model}-1-layers").inputs}
    axes = {axis for shape in inputs.values() for axis in shape if axis in PROFILE}
    request = ModelRequest(
        f"{model}-1-layers:fp16",
        inputs,
        "cuda:sm_90a",
        LoweringOptions(),
        profile={axis: PROFILE[str(axis)] for axis in axes} if profiled else {},
    )
    prepared = prepare_model(request)
    target = portable_host(prepared.target)
    choices = select_kernels(
        prepared.lowered, prepared.tasks, database=None, target=target, environment=prepared.environment
    )
    # What makes a shape is no kernel.
    assert {choice.function for choice in choices if choice.scheduled is None} <= {"shape_to_tensor"}
