"""Whether two arms computed the same: the product's own tolerance, applied on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from relaxtune.pipeline.validate.tolerances import Tolerance


@dataclass(frozen=True)
class Agreement:
    """How an arm's outputs compare with the reference's.

    Attributes
    ----------
    passed
        Every element of every output is within ``atol * max(1, RMS) + rtol * |expected|``.
    max_abs
        The largest error of each output.
    required_atol
        The smallest `atol` with which each output would have passed.
    """

    passed: bool
    max_abs: Mapping[str, float]
    required_atol: Mapping[str, float]

    def reason(self, tolerance: Tolerance) -> str:
        """Return why it did not pass, empty when it did."""
        if self.passed:
            return ""
        worst = max(self.required_atol, key=lambda name: self.required_atol[name])
        return (
            f"output {worst!r} is off by {self.max_abs[worst]:.3g}; it would pass with atol "
            f"{self.required_atol[worst]:.3g} (is {tolerance.atol:g})"
        )


def compare(expected: Mapping[str, Tensor], got: Mapping[str, Tensor], tolerance: Tolerance) -> Agreement:
    """Return how `got` compares with `expected`, output by output.

    An output that is missing, has another shape, or holds NaN where the reference is finite does not pass.
    """
    max_abs: dict[str, float] = {}
    required: dict[str, float] = {}
    for name, reference in expected.items():
        value = got.get(name)
        if value is None or value.shape != reference.shape:
            max_abs[name] = required[name] = float("inf")
            continue
        wanted = reference.float()
        error = (value.to(wanted.device).float() - wanted).abs()
        scale = max(1.0, float(wanted.square().mean().sqrt()))
        # A NaN error must not pass; `amax` hands it on, and no comparison with NaN is true.
        max_abs[name] = float(error.amax())
        required[name] = float((error - tolerance.rtol * wanted.abs()).amax()) / scale
    passed = bool(required) and all(value <= tolerance.atol for value in required.values())
    return Agreement(passed, max_abs, {name: max(0.0, value) for name, value in required.items()})


def as_tensors(arrays: Mapping[str, object]) -> dict[str, Tensor]:
    """Return NumPy arrays as tensors on the CPU."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
