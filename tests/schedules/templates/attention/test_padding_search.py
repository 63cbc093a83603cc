"""What kernels of attention look at to see whether there is anything in a mask."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tvm import tirx

from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.registry import apply_decision
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.attention_sm80.plan import AttentionParameters as OfSm80
from relaxtune.schedules.templates.attention_sm90.plan import AttentionParameters as OfSm90
from relaxtune.schedules.templates.attention_sm90.table import Line, TableParameters
from relaxtune.schedules.templates.base import Parameters
from tests.schedules.attention_cases import AttentionCase
from tests.schedules.templates.block_on_cpu import cuda_source

LENGTH = tirx.Var("length", "int64")
KERNELS: dict[str, tuple[str, int | tirx.Var, Parameters]] = {
    "Hopper": ("cuda:sm_90a", 256, OfSm90(1, 64, 3)),
    "Hopper, shares of keys": ("cuda:sm_90a", 256, OfSm90(1, 64, 2, split=2)),
    "Hopper, symbolic length": ("cuda:sm_90a", LENGTH, TableParameters((OfSm90(1, 64, 3),), (Line((), 0),))),
    "mma.sync": ("cuda:sm_80", 256, OfSm80(4, 1, 64, 2)),
}


@pytest.mark.parametrize(("target", "length", "parameters"), KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_signs_of_zeros_are_nothing(target: str, length: int | tirx.Var, parameters: Parameters, dtype: str) -> None:
    """Exporters write (1 - mask) times a low number: -0 for each token that counts."""
    case = AttentionCase(2, 4, length, length, 64, dtype="float16", bias=("add", dtype, (2, 1, 1, length)))
    resolved = resolve_target(target)
    kernel = apply_decision(attention_function(*case.made()), resolved, parameters.to_json())
    asked = re.findall(r"= relaxtune_any_lane\((.*)\);", cuda_source(kernel, resolved))
    assert asked
    words = [re.fullmatch(r"\((.*) & \(uint\)(\d+)\)", one) for one in asked]
    magnitudes = {np.uint32(word.group(2)) for word in words if word is not None}
    assert None not in words
    (kept,) = magnitudes
    number = np.array([0.0, -0.0, 2.0**-24, -np.inf], dtype)
    seen = [bool((np.frombuffer(np.repeat(one, 4 // one.itemsize).tobytes(), "uint32") & kept).any()) for one in number]
    assert seen == [False, False, True, True]
