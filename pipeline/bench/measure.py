"""Latency of several arms side by side: warm-up, alternating runs, raw values kept.

The arms take turns, so that a machine that slows down slows all. Before each timed run its arm runs once untimed.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from relaxtune.models import OnnxModel, unpadded_inputs
from relaxtune.models.buckets import list_symbols
from relaxtune.models.spec import shape_text
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.idle import SPIN_S, wait_until_idle
from relaxtune.pipeline.errors import PipelineError, UsageError, ValidationFailedError
from relaxtune.pipeline.tvm_runtime.threads import default_threads
from relaxtune.pipeline.validate.reference import peer_provider, peer_session

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """The inputs of a call, what its sizes are called, and how often it counts among others."""

    inputs: Mapping[str, np.ndarray] = field(repr=False)
    sizes: str = ""
    count: int = 1

    @classmethod
    def at(cls, model: OnnxModel, dims: Mapping[str, int], count: int = 1, seed: int = 0) -> Call:
        """Return a call of random inputs without padding, at sizes of all symbolic axes."""
        free = [f"{axis}={dims[axis]}" for axis in list_symbols(model.inputs)]
        shapes = dict.fromkeys(shape_text(spec.shape) for spec in model.inputs)
        return cls(unpadded_inputs(model, seed=seed, dims=dims), " ".join(free or shapes), count)


@dataclass(frozen=True)
class Mix:
    """The latencies (ms) of one run of each of several calls, by their sizes."""

    latencies_ms: Mapping[str, float]
    mean_ms: float  # Each call counts as often as it says.
    elsewhere: bool  # Whether another process computed.


#: Runs once and returns when its result is there. One in another process returns its own time (ms), one of calls of
#: several sizes their times.
Arm = Callable[[], float | Mix | None]
#: Runs all its callers for so many seconds; returns their latencies (ms) and the seconds that it took.
LoadArm = Callable[[float], tuple[list[float], float]]

DEFAULT_RUNS = 50
DEFAULT_WARMUP = 10

OWN_ARM = "relaxtune"
ORT_ARM = "ort"
UNTUNED_ARM = "untuned"

# Turns of each arm within the seconds that it runs under load.
_WINDOWS = 10
# Seconds after which an arm's threads are awake, and its weights in the caches; 30 ms were too few for runs of 2 ms.
_AWAKE_S = 0.05


@dataclass(frozen=True)
class ArmResult:
    """The latencies of one arm in milliseconds, in the order measured; `busy_s` where several callers took them."""

    name: str
    latencies_ms: tuple[float, ...]
    busy_s: float | None = None
    # Of calls of several sizes, whose means are above.
    by_sizes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, runs: Sequence[float | Mix]) -> ArmResult:
        """Return what some runs of an arm took."""
        mixes = [run for run in runs if isinstance(run, Mix)]
        sizes = mixes[0].latencies_ms if mixes else ()
        return cls(
            name,
            tuple(run.mean_ms if isinstance(run, Mix) else run for run in runs),
            by_sizes={one: tuple(mix.latencies_ms[one] for mix in mixes) for one in sizes},
        )

    def and_then(self, later: ArmResult) -> ArmResult:
        """Return these latencies and later ones of the same arm."""
        by_sizes = {sizes: (*self.by_sizes.get(sizes, ()), *taken) for sizes, taken in later.by_sizes.items()}
        return replace(self, latencies_ms=self.latencies_ms + later.latencies_ms, by_sizes=by_sizes)

    @property
    def median_ms(self) -> float:
        """The median."""
        return statistics.median(self.latencies_ms)

    @property
    def run_ms(self) -> float:
        """The usual latency of a run: all its calls."""
        return sum(map(statistics.median, self.by_sizes.values())) or self.median_ms

    @property
    def spread(self) -> float:
        """The distance from the 10th to the 90th percentile, over the median."""
        return (self.quantile(0.9) - self.quantile(0.1)) / self.median_ms

    @property
    def calls_per_s(self) -> float:
        """The throughput: calls over the time that they took, of all callers together."""
        return len(self.latencies_ms) / (sum(self.latencies_ms) / 1e3 if self.busy_s is None else self.busy_s)

    def quantile(self, share: float) -> float:
        """Return the latency that this share of the runs do not exceed."""
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class BenchmarkReport:
    """Arms measured together; the first is the one that ratios are taken of.

    Attributes
    ----------
    arms
        In the order given.
    runs, warmup
        Timed and untimed runs of each.
    conditions
        Conditions of the numbers: device, versions, thread counts.
    duration_s
        How long each arm ran, where that decided how often; `runs` are then those of the arm with fewest.
    left_out, failed, wrong
        Peers without a latency, and why: not installed, not able to run the model, a wrong result.
    sizes
        The sizes of the calls that were timed, and how often each counts in the mean.
    """

    arms: tuple[ArmResult, ...]
    runs: int
    warmup: int
    conditions: Mapping[str, str]
    duration_s: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    wrong: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def arm(self, name: str) -> ArmResult:
        """Return an arm by name."""
        return next(arm for arm in self.arms if arm.name == name)

    def ratio(self, name: str) -> float:
        """Return how many times the first arm's median the median of `name` is: above 1, the first arm is faster."""
        return self.arm(name).median_ms / self.arms[0].median_ms

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON data, raw values included."""
        arms = [
            {
                **asdict(arm),
                "median_ms": arm.median_ms,
                **{f"p{share}_ms": arm.quantile(share / 100) for share in (90, 95, 99)},
                "calls_per_s": arm.calls_per_s,
                "spread": arm.spread,
                "ratio": self.ratio(arm.name),
            }
            for arm in self.arms
        ]
        return {**asdict(self), "arms": arms}

    def raise_if_failed(self) -> None:
        """Raise for peers that were asked for, are installed, and have no latency.

        Raises
        ------
        ValidationFailedError
            An arm computes something else than ONNX Runtime on the CPU.
        PipelineError
            An arm cannot run the model.
        """
        if self.wrong:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.wrong.items())
            raise ValidationFailedError(f"not timed, since the result is wrong: {reasons}")
        if self.failed:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.failed.items())
            raise PipelineError(f"not timed, since it cannot run the model: {reasons}. Leave it out of --against")


def measure(
    arms: Mapping[str, Arm],
    *,
    runs: int = DEFAULT_RUNS,
    warmup: int = DEFAULT_WARMUP,
    conditions: Mapping[str, str] | None = None,
    mirrored: bool = False,
    settle: bool = True,
) -> BenchmarkReport:
    """Return the latencies of arms that take turns.

    Parameters
    ----------
    arms : mapping of str to callable
        Each runs once and returns when its result is there (a GPU's arm waits for the device itself).
    runs, warmup : int
        Timed runs of each arm, and untimed ones before the first.
    conditions : mapping or None
        Kept in the report.
    mirrored : bool
        Whether every second turn goes through the arms backwards: a place in the turn then favours none.
    settle : bool
        Whether an arm runs untimed before each timed run: once, or for 50 ms after another arm, where one is of another
        process and threads spun. A slow arm needs no such run.

    Raises
    ------
    UsageError
        There are no arms, or `runs` is below 1.
    """
    if not arms or runs < 1 or warmup < 0:
        raise UsageError(
            f"nothing to measure: {len(arms)} arms, runs={runs}, warmup={warmup}; expected runs of at least 1"
        )
    processors = _Processors()
    for name, arm in arms.items():
        for _ in range(warmup):
            processors.run(name, arm)
    taken: dict[str, list[float | Mix]] = {name: [] for name in arms}
    of_calls = {name: arm for name, arm in arms.items() if isinstance(arm, ArmOfCalls)}
    # Arms of calls take turns at each of them, closer in time than all calls of one.
    apart = len(of_calls) == len(arms)
    sizes_of = next(iter(of_calls.values())).arms if apart else ("",)
    steps = {sizes: {name: arm.arms[sizes] for name, arm in of_calls.items()} if apart else arms for sizes in sizes_of}
    for turn in range(runs):
        of_turn: dict[str, dict[str, tuple[float | Mix, bool]]] = {name: {} for name in arms}
        for number, (sizes, parts) in enumerate(steps.items()):
            forwards = list(parts.items())
            for name, part in reversed(forwards) if mirrored and (turn + number) % 2 else forwards:
                processors.hand_over(name, part, settle)
                of_turn[name][sizes] = processors.run(name, part)
        for name, each in of_turn.items():
            taken[name].append(of_calls[name].mix(each) if apart else each[""][0])
    results = tuple(ArmResult.of(name, values) for name, values in taken.items())
    return BenchmarkReport(results, runs, warmup, dict(conditions or {}))


class _Processors:
    """Handed over between arms of several processes: none is timed while another's threads spin."""

    def __init__(self) -> None:
        self._elsewhere: dict[str, bool] = {}
        self._last = ""
        self._spinning, self._patient = False, True

    def run(self, name: str, arm: Arm) -> tuple[float | Mix, bool]:
        """Run an arm once and return its latency in milliseconds, and whether another process computed."""
        latency, self._elsewhere[name] = _timed(arm)
        self._last = name
        return latency, self._elsewhere[name]

    def hand_over(self, name: str, arm: Arm, settle: bool) -> None:
        """Get all ready for a timed run of an arm; to `settle`, it runs untimed."""
        other = name != self._last
        if other and self._patient and any(self._elsewhere.get(one, True) for one in (name, self._last)):
            waited_s = wait_until_idle()
            self._spinning |= waited_s > 0
            # A thread that computes all the time (a compiler, say) is no pool that spins, and disturbs all arms alike.
            self._patient = waited_s < SPIN_S
        if settle:
            # As long for arms of one process: two of them share a cache, too.
            until = time.monotonic() + (_AWAKE_S if other and self._spinning else 0.0)
            self.run(name, arm)
            while time.monotonic() < until:
                self.run(name, arm)


def _timed(arm: Arm) -> tuple[float | Mix, bool]:
    """Run an arm once; return its latency (ms), and whether another process computed."""
    started = time.perf_counter_ns()
    own = arm()
    here = (time.perf_counter_ns() - started) / 1e6
    if isinstance(own, Mix):
        return own, own.elsewhere
    return here if own is None else own, own is not None


@dataclass(frozen=True)
class ArmOfCalls:
    """An arm that runs each of some calls once; arms of the same calls take turns at each of them (`measure`)."""

    arms: Mapping[str, Arm]
    counts: Mapping[str, int]

    def __call__(self) -> Mix:
        """Run all calls."""
        return self.mix({sizes: _timed(arm) for sizes, arm in self.arms.items()})

    def mix(self, runs: Mapping[str, tuple[float | Mix, bool]]) -> Mix:
        """Return what a run of each call took, and whether another process computed, as one run."""
        latencies_ms = {sizes: own for sizes, (own, _) in runs.items() if not isinstance(own, Mix)}
        mean_ms = np.average(list(latencies_ms.values()), weights=[self.counts[sizes] for sizes in latencies_ms])
        return Mix(latencies_ms, float(mean_ms), any(elsewhere for _, elsewhere in runs.values()))


def arm_of_calls(calls: Sequence[Call], arm_of: Callable[[Mapping[str, np.ndarray]], Arm]) -> Arm:
    """Return an arm that runs each of some calls once, by the arms of their inputs."""
    arms = {call.sizes: arm_of(call.inputs) for call in calls}
    if len(calls) == 1:
        return arms[calls[0].sizes]
    return ArmOfCalls(arms, {call.sizes: call.count for call in calls})


def measure_load(
    arms: Mapping[str, LoadArm],
    *,
    seconds: float,
    warmup: int = DEFAULT_WARMUP,
    conditions: Mapping[str, str] | None = None,
) -> BenchmarkReport:
    """Return latencies and throughput of arms that each run for so many seconds, in ten windows that alternate.

    Parameters
    ----------
    arms : mapping of str to callable
        Each runs all its callers for the seconds of a window.
    seconds : float
        How long each arm runs, all windows together.
    warmup : int
        Unless it is 0, a window of each arm comes first that does not count.
    conditions : mapping or None
        Kept in the report.
    """
    latencies: dict[str, list[float]] = {name: [] for name in arms}
    busy_s = dict.fromkeys(arms, 0.0)
    for window in range(0 if warmup else 1, _WINDOWS + 1):
        for name, arm in arms.items():
            wait_until_idle()
            taken, took_s = arm(seconds / _WINDOWS)
            if window:
                latencies[name] += taken
                busy_s[name] += took_s
    results = tuple(ArmResult(name, tuple(values), busy_s[name]) for name, values in latencies.items())
    fewest = min(len(values) for values in latencies.values())
    return BenchmarkReport(results, fewest, warmup, dict(conditions or {}), duration_s=seconds)


def module_arm(module: Module, inputs: Mapping[str, np.ndarray]) -> Arm:
    """Return an arm that runs a module on inputs already where it reads them, and waits for the result.

    The arm raises `UsageError`: the module refuses inputs of these sizes.
    """
    tensors = module.to_device(inputs)
    if module.input_buffers is not None:
        for tensor, buffer in zip(tensors, module.input_buffers, strict=True):
            tensor.copyto(buffer)
        tensors = module.input_buffers

    def run() -> None:
        try:
            module.run_device(tensors)
        except ValueError as e:
            sizes = ", ".join(f"{name} {shape_text(array.shape)}" for name, array in inputs.items())
            raise UsageError(f"a call of {sizes} cannot run: {e}") from e
        module.synchronise()

    return run


@dataclass(frozen=True)
class Peers:
    """Arms of other libraries, and those that cannot be timed, with why."""

    arms: Mapping[str, Arm] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def onnxruntime_peer(
    model: OnnxModel, calls: Sequence[Call], kind: str = "llvm", *, threads: int | None = None
) -> Peers:
    """Return an arm that runs a model under ONNX Runtime on a kind of device, every optimisation on.

    There is none where ONNX Runtime has no provider for it, since a ratio over another device means nothing, or where
    it does not load the model so. `threads` defaults to what TVM's pool of this thread has, which is set first if it
    was not.
    """
    provider = peer_provider(kind)
    if provider is None:
        logger.info("no peer is timed: this ONNX Runtime does not compute on a device of kind %s", kind)
        return Peers()
    try:
        session = peer_session(model, default_threads() if threads is None else threads, provider)
        if provider not in session.providers:
            logger.warning("no peer is timed: ONNX Runtime's %s does not load on this machine", provider)
            return Peers()
        outputs, places = [spec.name for spec in model.outputs], itertools.count()
        return Peers({ORT_ARM: arm_of_calls(calls, lambda inputs: session.call(outputs, inputs, next(places)))})
    except PipelineError as error:
        logger.warning("no peer is timed: %s", error)
        return Peers(left_out={ORT_ARM: str(error)})
