"""What ships: tuned kernels where the whole model is surely faster with them, else the untuned ones.

Kernels timed alone may mislead: the fastest alone need not be the fastest beside others. So both forms of the model
are compiled and timed whole, alternately, in one run. The numbers are those that every reader sees: "untuned" is the
artifact that compiling without records makes, "relaxtune" is the artifact that is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from relaxtune.pipeline.artifact.compile import CompiledModule
from relaxtune.pipeline.bench.measure import (
    ORT_ARM,
    OWN_ARM,
    UNTUNED_ARM,
    Arm,
    BenchmarkReport,
    Peers,
    measure,
    onnxruntime_peer,
    run_conditions,
)
from relaxtune.pipeline.bench.paired_gain import (
    LEAST_GAIN,
    PairedGain,
    is_gain,
    is_hopeless,
    paired_gain,
    useful_turns,
)
from relaxtune.pipeline.choose.model_arm import LoadedArm, load_arm, timed_inputs
from relaxtune.pipeline.prepare import PreparedModel

logger = logging.getLogger(__name__)

_TUNED, _AFTER = "tuned, not shipped", "untuned, after"
# The probability with which a tuned model that ships may be no faster.
_DOUBT = 0.02
# Six turns are the fewest that can tell so: all of them go one way once in 64 times.
_RUNS, _LEAST_RUNS, _WARMUP = 30, 6, 5
# What the runs may take, all arms together; a slow model gets fewer of them.
_SECONDS = 8.0


@dataclass(frozen=True)
class Shipping:
    """Which of two compiled models ships.

    Attributes
    ----------
    compiled
        It.
    tuned
        Whether it is the tuned one; so where both have the same kernels, since its records say how fast they are.
    report
        The latencies of what ships, of the untuned model (the same ones where that ships), of a tuned model that does
        not ship, and of a peer on the same device.
    gain
        What the tuned model gains over the untuned one; None where both have the same kernels.
    searched
        Whether any kernel could be tuned.
    """

    compiled: CompiledModule
    tuned: bool
    report: BenchmarkReport
    gain: PairedGain | None
    searched: bool = True

    @property
    def verdict(self) -> str:
        """One sentence on what ships, and why."""
        if not self.searched:
            return "The kernels are the untuned ones: none of them can be tuned."
        if self.gain is None:
            return "The tuned kernels are the untuned ones: the search found nothing faster."
        found = f"{self.gain.median:+.1%} (at least {self.gain.least:+.1%})"
        if self.tuned:
            return f"The tuned kernels ship: they shorten the untuned model's latency by {found}."
        least, apart = self.gain.least, self.gain.bias
        why = (
            f"where two runs of the untuned ones differ by {apart:.1%}"
            if apart >= least > LEAST_GAIN
            else "no sure gain"
        )
        return f"The untuned kernels ship: in the model, the tuned ones gain {found}, {why}."

    def to_json(self) -> dict[str, object]:
        """Return the decision as plain JSON data."""
        gain = (
            None
            if self.gain is None
            else {"median": self.gain.median, "least": self.gain.least, "bias": self.gain.bias}
        )
        return {"tuned": self.tuned, "gain": gain, "verdict": self.verdict}


def decide(
    prepared: PreparedModel,
    tuned: CompiledModule,
    untuned: CompiledModule,
    folder: Path,
    turn: AbstractContextManager[object] | None = None,
    peers: Callable[[], Peers] | None = None,
) -> tuple[Shipping, LoadedArm]:
    """Return which of two compiled models ships, after timing both whole; and that one, written and loaded.

    Parameters
    ----------
    prepared : PreparedModel
        The model, for its inputs and for ONNX Runtime; it runs on this machine.
    tuned, untuned : CompiledModule
        The model with kernels from records, and as it is without any.
    folder : Path
        Where both are written as artifacts: the one that ships can be moved from there.
    turn : context manager or None
        Held while they are timed.
    peers : callable or None
        Gives what is timed beside them; by default `find_peers`.

    Raises
    ------
    ArtifactError
        One of them does not load here.
    """
    same = tuned.kernel_hashes == untuned.kernel_hashes
    loaded = load_arm(tuned, prepared.model, folder / "tuned")
    other = loaded if same else load_arm(untuned, prepared.model, folder / "untuned", beside=loaded)
    arms = {OWN_ARM: loaded.arm} if same else {UNTUNED_ARM: other.arm, OWN_ARM: loaded.arm, _AFTER: other.arm}
    beside = find_peers(prepared) if peers is None else peers()
    arms |= beside.arms
    with turn or nullcontext():
        report = _measure(arms, run_conditions(loaded.module))
    timed, gain = report.arm(OWN_ARM), None
    # A model that ships untuned is the untuned model: one measurement, not two that differ by noise.
    shipped = [timed, replace(timed, name=UNTUNED_ARM)]
    if not same:
        before, after = report.arm(UNTUNED_ARM), report.arm(_AFTER)
        gain = paired_gain(timed.latencies_ms, before.latencies_ms, after.latencies_ms, doubt=_DOUBT)
        shipped = [timed, before]
        if not is_gain(gain):
            shipped = [replace(after, name=OWN_ARM), replace(after, name=UNTUNED_ARM), replace(timed, name=_TUNED)]
    taken = gain is None or is_gain(gain)
    others = [arm for arm in report.arms if arm.name == ORT_ARM]
    report, searched = replace(report, arms=(*shipped, *others), left_out=beside.left_out), bool(prepared.tasks)
    result = Shipping(tuned if taken else untuned, taken, report, gain, searched)
    logger.info("%s", result.verdict)
    return result, loaded if taken else other


def find_peers(prepared: PreparedModel, threads: int | None = None) -> Peers:
    """Return ONNX Runtime where it runs on the same device."""
    inputs = timed_inputs(prepared.model, prepared.lowered.options.maxima)
    return onnxruntime_peer(prepared.model, inputs, prepared.target.kind, threads=threads)


def _measure(arms: Mapping[str, Arm], conditions: Mapping[str, str]) -> BenchmarkReport:
    """Return the latencies of as many runs as fit the seconds they may take; slow arms run without untimed ones.

    They end sooner where no runs to come could show the tuned form to be faster.
    """
    for arm in dict.fromkeys(arms.values()):
        arm()
    first = measure(arms, runs=1, warmup=0, conditions=conditions, settle=False)
    rounds = int(1e3 * _SECONDS / sum(arm.median_ms for arm in first.arms))
    settle = rounds >= _WARMUP + 2 * _LEAST_RUNS
    most = max(_LEAST_RUNS, min(_RUNS, (rounds - _WARMUP) // 2 if settle else rounds))
    runs = useful_turns(most, _LEAST_RUNS, doubt=_DOUBT)
    # Slow arms were timed as they are from here on: that turn is the first of their runs.
    known = {arm.name: () if settle else arm.latencies_ms for arm in first.arms}

    def decided(latencies: Mapping[str, Sequence[float]]) -> bool:
        timed = [latencies.get(name, ()) for name in (OWN_ARM, UNTUNED_ARM, _AFTER)]
        return len(timed[1]) >= _LEAST_RUNS and is_hopeless(*timed, turns=runs, doubt=_DOUBT)

    warmup = _WARMUP if settle else 0
    return measure(arms, runs=runs, warmup=warmup, conditions=conditions, settle=settle, until=decided, known=known)
