"""Whether a build is slower than a baseline by more than a limit: an experiment on both, loaded afresh now and then."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import Arm, ArmResult, Call, arm_of_calls, module_arm
from relaxtune.pipeline.errors import ArtifactError, UsageError
from relaxtune.pipeline.experiment.experiment import Question, Side, run_experiment

logger = logging.getLogger(__name__)

# Of timing an artifact and the last one; it ends sooner where all is clear.
_SECONDS = 10.0
BASELINE_ARM, NEW_ARM = "baseline", "new"


class Speed(StrEnum):
    """A build's latency, compared with a limit."""

    WITHIN = "within the limit"
    SLOWER = "slower"
    UNDECIDED = "undecided"


_SPEEDS = {Side.BELOW: Speed.WITHIN, Side.ABOVE: Speed.SLOWER, Side.UNSURE: Speed.UNDECIDED}


@dataclass(frozen=True)
class LatencyLimit:
    """The limit of a build's latency."""

    max_slowdown: float = 0.02  #: 0.02 allows 2 % more than the baseline.
    #: The probability with which a build at the limit may be called slower, and as much for one beyond it to be called
    #: within.
    alpha: float = 0.05
    seconds: float = 60.0  #: Seconds of the runs; they end sooner where all is clear.

    def __post_init__(self) -> None:
        """Refuse limits that mean nothing.

        Raises `UsageError`: names the limit.
        """
        if not 0 <= self.max_slowdown < 10:
            raise UsageError(f"a slowdown of {self.max_slowdown:g} is no limit; expected a share such as 0.02 (2 %)")
        if not 0 < self.alpha < 0.5:
            raise UsageError(f"alpha is {self.alpha:g}; expected a probability between 0 and 0.5, such as 0.05")
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"{self.seconds:g} seconds are no time to measure in; expected more than 0, such as 60")


@dataclass(frozen=True)
class LatencyComparison:
    """The latency of a build and its baseline's."""

    limit: LatencyLimit
    # By how much longer the build takes, as a part of the baseline's latency; negative where it is faster.
    slowdown: float
    # Its bounds. Each is wrong with a probability of at most `alpha`, all looks together; None where the runs were too
    # few for any.
    least: float | None
    most: float | None
    speed: Speed  # The verdict.
    # The smallest slowdown that as many blocks, as noisy, would call slower in 95 of 100 comparisons; None without
    # bounds.
    detectable: float | None
    runs: int  # Timed runs of each build.
    # Conditions, loads of both artifacts, and looks at the result.
    blocks: int
    loadings: int
    looks: int
    planned_looks: int
    seconds: float  # Duration of the comparison.
    # The latencies, in the order taken.
    baseline: ArmResult
    new: ArmResult


def load_arms(baseline: Path, new: Path, calls: Sequence[Call]) -> tuple[Arm, Arm]:
    """Return the arms of a baseline and of a build on some calls; their hashes were checked before."""
    first, second = (
        arm_of_calls(calls, partial(module_arm, Module.load(place, verify=False))) for place in (baseline, new)
    )
    return first, second


def compare_latency(load: Callable[[], tuple[Arm, Arm]], limit: LatencyLimit) -> LatencyComparison:
    """Return the latency of a build compared with its baseline's.

    `load` returns the arms of the baseline and of the build; it is called again for other blocks.
    """
    question = Question(limit.max_slowdown, limit.alpha, limit.seconds)
    found = run_experiment(lambda: dict(zip((BASELINE_ARM, NEW_ARM), load(), strict=True)), question, reload=True)
    contrast = found.contrasts[NEW_ARM]
    known = math.isfinite(contrast.most)
    return LatencyComparison(
        limit=limit,
        slowdown=contrast.difference,
        least=contrast.least if known else None,
        most=contrast.most if known else None,
        speed=_SPEEDS[contrast.side],
        detectable=contrast.detectable if known else None,
        runs=found.runs,
        blocks=found.blocks,
        loadings=found.loadings,
        looks=found.looks,
        planned_looks=found.planned_looks,
        seconds=found.seconds,
        baseline=found.arms[BASELINE_ARM],
        new=found.arms[NEW_ARM],
    )


def slower_than_last(
    new: Path,
    last: Path,
    calls: Sequence[Call],
    max_slowdown: float,
    lock: AbstractContextManager[object] | None = None,
) -> str | None:
    """Return by how much an artifact is surely slower than the last one; None where it is not, or there is no other.

    `last` is the place that the artifact is to take. Both are timed on `calls`, while `lock` is held; a `max_slowdown`
    of 0.02 allows 2 % more.
    """
    if not last.is_dir():
        return None
    with lock or nullcontext():
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
        found = compare_latency(partial(load_arms, last, new, calls), LatencyLimit(max_slowdown, seconds=_SECONDS))
    if found.speed is not Speed.SLOWER:
        return None
    return (
        f"the model takes {found.new.median_ms:.4g} ms, the artifact in {last} {found.baseline.median_ms:.4g} ms: "
        f"{found.slowdown:.1%} more, and max_slowdown is {max_slowdown:.1%}"
    )
