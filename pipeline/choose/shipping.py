"""The kernels that ship: tuned ones where the whole model is surely faster with them, else the untuned ones.

Kernels timed alone may mislead: the fastest alone need not be the fastest beside others. So both forms of the model
are compiled and timed whole, in one experiment. The numbers are those that every reader sees: "untuned" is the
artifact that compiling without records makes, "relaxtune" is the artifact that is written.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from relaxtune.pipeline.artifact.compile import CompiledModule
from relaxtune.pipeline.bench.measure import (
    OWN_ARM,
    UNTUNED_ARM,
    Arm,
    ArmResult,
    BenchmarkReport,
    Peers,
    measure,
    onnxruntime_peer,
)
from relaxtune.pipeline.bench.tables import run_conditions
from relaxtune.pipeline.choose.model_arm import LoadedArm, load_arm, timed_calls
from relaxtune.pipeline.experiment.experiment import LEAST_GAIN, Contrast, Question, Side, run_experiment, slower_sizes
from relaxtune.pipeline.prepare import PreparedModel

logger = logging.getLogger(__name__)

_TUNED = "tuned, not shipped"
_LONGER = 8
#: Seconds that the comparison may take, of all arms together.
COMPARE_S = 8.0
# The part of it that is for peers, which nothing is decided by, and the most runs of each.
_PEERS_SHARE, _PEER_RUNS = 0.25, 50
# Seconds that it takes at least, however late it is.
_LEAST_S = 2.0
# A tuned model that ships may be no faster with a probability of 2 %.
_QUESTION = Question(border=-LEAST_GAIN, doubt=0.02, seconds=COMPARE_S)


@dataclass(frozen=True)
class Shipping:
    """The decision between two compiled models: one ships."""

    compiled: CompiledModule  # The one that ships.
    # Whether it is the tuned one; so where both have the same kernels, since its records say how fast they are.
    tuned: bool
    # The latencies of what ships, of the untuned model (the same ones where that ships), of a tuned model that does not
    # ship, and of a peer on the same device.
    report: BenchmarkReport
    contrast: Contrast | None  # The tuned model beside the untuned one; None where both have the same kernels.
    unfound: str = "the search found nothing faster"  # Why no kernel is another one, where all are the same.
    seconds: float = COMPARE_S  # The time that the comparison was given.
    slower: tuple[str, ...] = ()  # The tuned sizes at which the tuned model surely takes longer.

    @property
    def verdict(self) -> str:
        """The decision and its reason in a sentence."""
        if self.contrast is None:
            return f"Ships with the untuned kernels: {self.unfound}."
        gain, least = self.contrast.gain, self.contrast.least_gain
        runs = f"{self.report.runs} paired runs"
        if len(self.report.sizes) > 1:
            runs += f" of {len(self.report.sizes)} sizes"
        if self.tuned:
            return f"Ships tuned: {gain:.1%} faster than untuned (at least {least:.1%}, {runs})."
        if self.contrast.side is Side.BELOW:
            where = ", ".join(self.slower)
            return (
                f"Ships untuned: the tuned kernels are {gain:.1%} faster in the mean, and slower at {where} ({runs})."
            )
        if self.contrast.side is Side.ABOVE:
            found = f"{gain:.1%} faster" if gain > 0 else f"{-gain:.1%} slower"
            return f"Ships untuned: in the model, the tuned kernels are {found} ({runs})."
        noise = (self.contrast.most - self.contrast.least) / 2
        known = f"the noise of this machine is {noise:.1%}" if math.isfinite(noise) else "the runs were too few to know"
        return (
            f"Ships untuned: the search found {gain:+.1%}, and {known} ({runs}); "
            f"--compare-seconds {_LONGER * self.seconds:.0f} looks longer."
        )

    def to_json(self) -> dict[str, object]:
        """Return the decision as plain JSON data."""
        found = self.contrast
        gain = (
            None
            if found is None
            else {"median": found.gain, "least": found.least_gain if math.isfinite(found.least_gain) else None}
        )
        return {"tuned": self.tuned, "gain": gain, "verdict": self.verdict}


def decide(
    prepared: PreparedModel,
    tuned: CompiledModule,
    untuned: CompiledModule,
    folder: Path,
    lock: AbstractContextManager[object] | None = None,
    peers: Callable[[], Peers] | None = None,
    seconds: float = COMPARE_S,
    until: float | None = None,
) -> tuple[Shipping, LoadedArm]:
    """Return which of two compiled models ships, after an experiment on both; and that one, written and loaded.

    `tuned` has kernels from records, `untuned` none. Both are written to `folder` as artifacts: the one that ships can
    be moved from there. `lock` is held while they are timed. `peers` gives what is timed beside them, by default
    `find_peers`. The comparison takes `seconds`, unless it is sure before, and is over at `until`,
    on the clock of `time.monotonic`; it takes two seconds at least. The tuned one ships if it is surely faster in the
    mean, and surely slower at none of the sizes.

    Raises `ArtifactError`: one of them does not load here.
    """
    same = untuned.is_code_of(tuned.lowered, tuned.kernel_hashes)
    calls = timed_calls(prepared)
    loaded = load_arm(tuned, calls, folder / "tuned")
    other = loaded if same else load_arm(untuned, calls, folder / "untuned", beside=loaded)
    arms = {OWN_ARM: loaded.arm} if same else {UNTUNED_ARM: other.arm, OWN_ARM: loaded.arm}
    beside = find_peers(prepared) if peers is None else peers()
    if until is not None:
        seconds = max(_LEAST_S, min(seconds, until - time.monotonic()))
    of_peers_s = _PEERS_SHARE * seconds if beside.arms else 0.0
    with lock or nullcontext():
        found = run_experiment(lambda: arms, replace(_QUESTION, seconds=seconds - of_peers_s))
        # Handing the processors over to another process takes longer than many models.
        others = _timed_peers(beside.arms, of_peers_s)
    timed, contrast = found.arms[OWN_ARM], found.contrasts.get(OWN_ARM)
    slower = () if same else slower_sizes(timed, found.arms[UNTUNED_ARM], _QUESTION.doubt)
    taken = contrast is None or (contrast.side is Side.BELOW and not slower)
    # A model that ships untuned is the untuned model: one measurement, not two that differ by noise.
    if contrast is None:
        shipped = [timed, replace(timed, name=UNTUNED_ARM)]
    elif taken:
        shipped = [timed, found.arms[UNTUNED_ARM]]
    else:
        before = found.arms[UNTUNED_ARM]
        shipped = [replace(before, name=OWN_ARM), before, replace(timed, name=_TUNED)]
    report = BenchmarkReport(
        (*shipped, *others),
        found.runs,
        0,
        run_conditions(loaded.module),
        left_out=beside.left_out,
        sizes={call.sizes: call.count for call in calls},
    )
    points = tuple(point.name for call, point in zip(calls, prepared.sizes, strict=False) if call.sizes in slower)
    result = Shipping(tuned if taken else untuned, taken, report, contrast, seconds=seconds, slower=points)
    if not prepared.tasks:
        result = replace(result, unfound="none of them can be tuned")
    logger.debug("%s: %s", prepared.model.name, result.verdict)
    return result, loaded if taken else other


def _timed_peers(arms: Mapping[str, Arm], seconds: float) -> tuple[ArmResult, ...]:
    """Return the latencies of peers that take turns for so many seconds, after the model's own."""
    if not arms:
        return ()
    began = time.monotonic()
    first = measure(arms, runs=1, warmup=1, settle=False).arms
    left_s = seconds - (time.monotonic() - began)
    # A timed run has an untimed one before it.
    runs = min(_PEER_RUNS, int(left_s / sum(2 * arm.run_ms / 1e3 for arm in first)))
    return measure(arms, runs=runs, warmup=0).arms if runs > 1 else first


def find_peers(prepared: PreparedModel, threads: int | None = None) -> Peers:
    """Return ONNX Runtime where it runs on the same device."""
    return onnxruntime_peer(prepared.model, timed_calls(prepared), prepared.target.kind, threads=threads)
