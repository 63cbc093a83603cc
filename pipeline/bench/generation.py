"""The speed of an artifact that generates: the time to the first token, the time for each later one, and the cost.

Prompts are random tokens. Each token is the likeliest one, so that a peer has to give the same tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np
from tvm_ffi import Device

from relaxtune.models.spec import VISIBLE, numpy_dtype
from relaxtune.pipeline.artifact.generation.generator import AHEAD
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bench.measure import OWN_ARM
from relaxtune.pipeline.bench.peers.callers import PeerError, PeerOrder
from relaxtune.pipeline.bench.peers.process import PeerProcess
from relaxtune.pipeline.bench.request import BenchRequest
from relaxtune.pipeline.bench.tables import cost_of_a_million
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.printed_tables import TableView
from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tvm_runtime.library import device_name, is_cpu

TORCH_ARM = "torch"
#: Shares of tokens whose time is reported.
PERCENTILES = (50, 90, 99)
_SECONDS, _RUNS_LEAST = 10.0, 3

# Prompts [batch, prompt] and how many tokens follow -> seconds after the start at which each came, and the tokens.
Run = Callable[[np.ndarray, int], tuple[list[float], list[list[int]]]]


@dataclass(frozen=True)
class GenerationRequest:
    """The cases to measure: each prompt with each batch."""

    prompts: tuple[int, ...] = (128,)  #: Tokens of a prompt.
    new: int = 128  #: Tokens that follow.
    batches: tuple[int, ...] = (1,)
    price: float | None = None  #: Of the machine, for an hour.
    #: How long each arm and point takes (three runs at least), the seed, and a transformers model to be measured too.
    bench: BenchRequest = field(default_factory=BenchRequest)


@dataclass(frozen=True)
class GenerationPoint:
    """How fast one arm generates with one batch and length of prompts."""

    arm: str
    batch: int
    prompt: int
    ttft_ms: Mapping[str, float]  # Percentile -> time to the first token.
    tpot_ms: Mapping[str, float]  # Percentile -> time of a later token, as the mean over some in turn.
    tokens_per_s: float  # Of all sequences, prompts included in the time.
    token_bytes: float | None  # Weights and caches that a step reads, for each token; None for a peer.
    bandwidth_use: float | None  # The share of the device's bandwidth that this takes.
    million_tokens: float | None  # Cost of a million tokens; None without a price.
    differs_at: int | None = None  # The first token that is not ours, counted from 0; None where all are.


@dataclass(frozen=True)
class GenerationReport:
    """All points, and the conditions."""

    points: tuple[GenerationPoint, ...]
    bytes_per_s: float  # Read and written by large copies.
    conditions: Mapping[str, object] = field(default_factory=dict)

    def tables(self) -> tuple[TableView, TableView]:
        """Return the times, and the rates and the cost, as tables of 80 columns."""

        def times(values: Mapping[str, float]) -> str:
            return " ".join(f"{values[str(share)]:.3g}" for share in PERCENTILES)

        def number(value: float | None, scale: float = 1.0) -> str | None:
            return None if value is None else f"{value * scale:{'.4g' if value * scale < 1e4 else ',.0f'}}"

        point = {name: attrgetter(name) for name in ("arm", "batch", "prompt")}
        latencies: dict[str, Callable[[GenerationPoint], object]] = {
            "TTFT ms": lambda one: times(one.ttft_ms),
            "TPOT ms": lambda one: times(one.tpot_ms),
            "differs": lambda one: None if one.differs_at is None else f"at token {one.differs_at}",
        }
        rates: dict[str, Callable[[GenerationPoint], object]] = {
            "tokens/s": lambda one: number(one.tokens_per_s),
            "MB/token": lambda one: number(one.token_bytes, 1e-6),
            "% of peak": lambda one: number(one.bandwidth_use, 100),
            "cost of 1M": lambda one: number(one.million_tokens),
        }
        title = ", ".join(f"{name} {value}" for name, value in self.conditions.items())
        peak = f"peak: {self.bytes_per_s / 1e9:.4g} GB/s, by large copies"
        percentiles = f"percentiles {', '.join(map(str, PERCENTILES))}"
        return (
            TableView.of(
                f"time to the first token and of a later one; {title}", self.points, point | latencies, percentiles
            ),
            TableView.of("rates", self.points, point | rates, peak),
        )


def bench_generation(
    directory: Path, request: GenerationRequest, bandwidth: Callable[[Device], float]
) -> GenerationReport:
    """Return how fast an artifact generates, and a torch model if there is one, by turns.

    `bandwidth` returns the bytes that large copies read and write on a device in a second.

    Raises `UsageError`: the artifact does not generate, takes no such batch, or prompts and tokens have no room.
    """
    module = Module.load(directory)
    generation = module.generator.generation
    if generation.names.context:
        raise UsageError("bench --generate measures decoders alone; the encoder is an artifact too: bench DIR/encoder")
    if (longest := max(request.prompts) + request.new) > generation.capacity + 1:
        raise UsageError(
            f"a prompt and its tokens are {longest} together, and the artifact's caches hold {generation.capacity}; "
            "name fewer by --prompt and --new, or compile the model with a larger --max-length"
        )
    bytes_per_s, points = bandwidth(module.device), list[GenerationPoint]()
    draw = np.random.default_rng(request.bench.seed)
    with _peers(module, request) as peers:
        for batch in request.batches:
            for prompt in request.prompts:
                ids = draw.integers(1, generation.vocabulary, (batch, prompt))
                arms: dict[str, Run] = {OWN_ARM: partial(_run, module), **peers}
                read = _step_bytes(module, batch, prompt + request.new / 2)
                points += _measure(arms, ids, request, read, bytes_per_s)
    conditions = {
        "model": module.manifest.model,
        "device": device_name(module.device) if not is_cpu(module.device) else f"CPU, {module.threads} threads",
        "precision": module.manifest.precision or "fp32",
        "new tokens": request.new,
    }
    return GenerationReport(tuple(points), bytes_per_s, conditions)


def _run(module: Module, ids: np.ndarray, new: int) -> tuple[list[float], list[list[int]]]:
    arrivals_s, tokens = [], []
    started = time.perf_counter()
    for row in module.generate_batch(ids.tolist(), max_new_tokens=new):
        arrivals_s.append(time.perf_counter() - started)
        tokens.append([token or 0 for token in row])
    return arrivals_s, tokens


def _measure(
    arms: Mapping[str, Run], ids: np.ndarray, request: GenerationRequest, step_bytes: float, bytes_per_s: float
) -> Iterator[GenerationPoint]:
    batch, prompt = ids.shape
    # An arm compiles and captures at its first call.
    tokens = {name: run(ids, request.new)[1] for name, run in arms.items()}
    runs: dict[str, list[list[float]]] = {name: [] for name in arms}
    began, seconds = time.perf_counter(), request.bench.duration_s or _SECONDS
    while len(runs[OWN_ARM]) < _RUNS_LEAST or time.perf_counter() - began < seconds * len(arms):
        for name, run in arms.items():
            runs[name].append(run(ids, request.new)[0])
    for name, times in runs.items():
        together = min(AHEAD, request.new - 1)  # A GPU gives several tokens at once.
        later = np.concatenate([np.diff(arrivals_s[::together]) / together for arrivals_s in times])
        per_s = batch * sum(map(len, times)) / sum(arrivals_s[-1] for arrivals_s in times)
        own = name == OWN_ARM
        pairs = enumerate(zip(tokens[name], tokens[OWN_ARM], strict=False))
        yield GenerationPoint(
            *(name, batch, prompt, _percentiles([arrivals_s[0] for arrivals_s in times]), _percentiles(later), per_s),
            token_bytes=step_bytes / batch if own else None,
            bandwidth_use=step_bytes / float(np.median(later)) / bytes_per_s if own else None,
            million_tokens=cost_of_a_million(request.price, per_s),
            differs_at=next((place for place, (one, other) in pairs if one != other), None),
        )


def _percentiles(seconds: Sequence[float] | np.ndarray) -> dict[str, float]:
    return {str(share): 1e3 * float(np.percentile(seconds, share)) for share in PERCENTILES}


def _step_bytes(module: Module, batch: int, tokens: float) -> float:
    """Return the bytes that a step reads: all weights, and the caches of so many tokens."""
    memory = module.manifest.memory
    weights = memory.weights_bytes if memory is not None else 0
    caches = [spec for spec in module.inputs if spec.shape[0] == VISIBLE]
    width = sum(math.prod(map(int, spec.shape[2:])) * numpy_dtype(spec.dtype).itemsize for spec in caches)
    return weights + batch * tokens * width


@contextmanager
def _peers(module: Module, request: GenerationRequest) -> Iterator[dict[str, Run]]:
    """Give a torch model with a static cache, compiled, in a process of its own."""
    bench = request.bench
    if bench.torch_module is None:
        yield {}
        return
    order = PeerOrder("torch", "", module.manifest.target.kind, module.threads, 1, (), bench.torch_module)
    with temporary_folder() as folder:
        try:
            with PeerProcess(order, Path(folder), bench.python) as peer:
                yield {TORCH_ARM: lambda ids, new: peer.generate(ids.tolist(), new)}
        except PeerError as error:
            raise UsageError(f"torch cannot generate beside the artifact: {error}; leave --torch out") from error
