"""Whether an artifact is slower than the one whose place it is to take, the two timed alternately."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from relaxtune.pipeline.artifact.runtime import Module
from relaxtune.pipeline.bench.measure import Arm, module_arm
from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.gate.latency import LatencyLimit, Speed, compare_latency

logger = logging.getLogger(__name__)

# Of timing; it ends sooner where all is clear.
_SECONDS = 10.0


def slower_than_last(
    new: Path,
    last: Path,
    inputs: Mapping[str, np.ndarray],
    max_slowdown: float,
    turn: AbstractContextManager[object] | None = None,
) -> str | None:
    """Return by how much an artifact is surely slower than the last one; None where it is not, or there is no other.

    Parameters
    ----------
    new, last : Path
        The artifact, and the place that it is to take.
    inputs : mapping
        One call.
    max_slowdown : float
        0.02 allows 2 % more.
    turn : context manager or None
        Held while they are timed.
    """
    if not last.is_dir():
        return None
    with turn or nullcontext():
        try:
            before = Module.load(last)
            module = Module.load(new, verify=False)
        except ArtifactError as e:
            logger.info("nothing to compare with: %s", e)
            return None
        if (before.manifest.inputs, before.manifest.outputs) != (module.manifest.inputs, module.manifest.outputs):
            logger.info("nothing to compare with: %s has other inputs or outputs", last)
            return None
        del before, module

        def load() -> tuple[Arm, Arm]:
            first, second = (module_arm(Module.load(place, verify=False), inputs) for place in (last, new))
            return first, second

        found = compare_latency(load, LatencyLimit(max_slowdown, seconds=_SECONDS))
    if found.speed is not Speed.SLOWER:
        return None
    return (
        f"the model takes {found.new.median_ms:.4g} ms, the artifact in {last} {found.baseline.median_ms:.4g} ms: "
        f"{found.slowdown:.1%} more, and max_slowdown is {max_slowdown:.1%}"
    )
