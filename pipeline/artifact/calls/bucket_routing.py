"""Route the calls of an artifact with shape buckets: to the best bucket, padded where allowed, or the slow path.

`Module` asks its `Router` for every call; what was done is counted (`Module.statistics`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from tvm_ffi import Tensor

from relaxtune.models.buckets import choose_bucket, cut_outputs, hides_a_row, pad_inputs, read_sizes
from relaxtune.models.spec import TensorSpec
from relaxtune.pipeline.artifact.entries import BucketsEntry
from relaxtune.pipeline.tvm_runtime.forks import lock_over_forks

# The alarm of the sizes: of at least so many calls, more than this share ran in no bucket.
_ALARM_CALLS, _ALARM_SHARE = 100, 0.1


class Runnable(Protocol):
    """A loaded module of one shape."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs by name."""

    def run_device(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs as tensors on the device."""


@dataclass(frozen=True)
class BucketCount:
    """How often a bucket was used: by calls of its very sizes, and by smaller ones that were padded."""

    name: str
    exact: int
    padded: int


@dataclass(frozen=True)
class RouteStatistics:
    """Counts of the calls of a module since it was loaded."""

    buckets: tuple[BucketCount, ...] = ()  # Counts of each bucket.
    slow_path: int = 0  # Calls that no bucket took; they ran with symbolic shapes.
    # Elements (products of the bucketed axes' sizes) that calls to buckets had, and that were computed for them.
    given: int = 0
    computed: int = 0

    @property
    def hits(self) -> int:
        """Calls that a bucket took."""
        return sum(bucket.exact + bucket.padded for bucket in self.buckets)

    @property
    def padding_waste(self) -> float:
        """Share of the elements computed in buckets that were padding."""
        return 1 - self.given / self.computed if self.computed else 0.0

    def to_prometheus(self, model: str) -> str:
        """Return the counts in the text format of Prometheus, with an alarm where calls leave the buckets."""
        calls = self.hits + self.slow_path
        alarm = bool(self.buckets) and calls >= _ALARM_CALLS and self.slow_path > _ALARM_SHARE * calls
        of = f"model={json.dumps(model)}"
        counts = [
            (f'bucket={json.dumps(bucket.name)},how="{how}"', count)
            for bucket in self.buckets
            for how, count in (("exact", bucket.exact), ("padded", bucket.padded))
        ]
        counts.append(('bucket="",how="symbolic"', self.slow_path))
        return "\n".join(
            [
                "# HELP relaxtune_calls_total Calls, by the shape bucket that they ran in; symbolic: in none.",
                "# TYPE relaxtune_calls_total counter",
                *(f"relaxtune_calls_total{{{of},{labels}}} {count}" for labels, count in counts),
                "# HELP relaxtune_padding_ratio Share of the elements computed in buckets that were padding.",
                "# TYPE relaxtune_padding_ratio gauge",
                f"relaxtune_padding_ratio{{{of}}} {self.padding_waste:.6f}",
                "# HELP relaxtune_sizes_alarm 1: over a tenth of the calls fit no bucket; compile buckets for them.",
                "# TYPE relaxtune_sizes_alarm gauge",
                f"relaxtune_sizes_alarm{{{of}}} {int(alarm)}",
                "",
            ]
        )

    def to_json(self) -> dict[str, object]:
        """Return the counts as plain JSON data."""
        buckets = [{"name": one.name, "exact": one.exact, "padded": one.padded} for one in self.buckets]
        return {"buckets": buckets, "hits": self.hits, "slow_path": self.slow_path, "padding_waste": self.padding_waste}


class Router:
    """Sends calls to the modules of an artifact's buckets, one for each entry; its signature has symbolic axes."""

    def __init__(
        self,
        buckets: BucketsEntry,
        modules: Sequence[Runnable],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
    ) -> None:
        self.modules = tuple(modules)
        self._buckets = [entry.bucket for entry in buckets.entries]
        self._sides = buckets.sides
        self._fills, self._masks = buckets.fills, buckets.masks
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._lock = lock_over_forks()
        self._exact = [0] * len(self._buckets)
        self._padded = [0] * len(self._buckets)
        self._slow = self._given = self._computed = 0

    @property
    def statistics(self) -> RouteStatistics:
        """Counts of the calls so far."""
        with self._lock:
            counts = tuple(
                BucketCount(bucket.name, exact, padded)
                for bucket, exact, padded in zip(self._buckets, self._exact, self._padded, strict=True)
            )
            return RouteStatistics(counts, self._slow, self._given, self._computed)

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """Return the outputs of a call that a bucket takes, padded and cut back where needed; else None."""
        sizes = read_sizes({name: array.shape for name, array in inputs.items()}, self._inputs)
        chosen = choose_bucket(self._buckets, sizes, self._sides)
        if chosen is not None and chosen[1] and hides_a_row(inputs, self._masks, self._fills):
            chosen = choose_bucket(self._buckets, sizes, {})
        self._count(chosen, sizes)
        if chosen is None:
            return None
        place, padded = chosen
        if not padded:
            return self.modules[place].run(inputs)
        wider = {**sizes, **dict(self._buckets[place].sizes)}
        outputs = self.modules[place].run(pad_inputs(inputs, self._inputs, wider, self._sides, self._fills))
        return cut_outputs(outputs, self._outputs, sizes, self._sides)

    def run_device(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """Return the outputs of a call with exactly a bucket's sizes; else None, since nothing is copied here."""
        shapes = {spec.name: tensor.shape for spec, tensor in zip(self._inputs, tensors, strict=True)}
        sizes = read_sizes(shapes, self._inputs)
        chosen = choose_bucket(self._buckets, sizes, {})
        self._count(chosen, sizes)
        return None if chosen is None else self.modules[chosen[0]].run_device(tensors)

    def _count(self, chosen: tuple[int, bool] | None, sizes: Mapping[str, int]) -> None:
        with self._lock:
            if chosen is None:
                self._slow += 1
                return
            place, padded = chosen
            (self._padded if padded else self._exact)[place] += 1
            self._given += math.prod(sizes[axis] for axis, _ in self._buckets[place].sizes)
            self._computed += self._buckets[place].elements
