"""Pairs of our tensors and ONNX's, and the first that is wrong.

After the passes a binding may hold a tensor of the ONNX graph, the same in another layout, or something the graph does
not have. A run with right results tells them apart: a binding holds the tensor of one of its own nodes that it is equal
to there. In the run under suspicion the same binding is compared with the same tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from relaxtune.pipeline.bisect.tensors import OnnxNode, OnnxTensors
from relaxtune.pipeline.bisect.trace import TracedCall
from relaxtune.pipeline.validate.array_comparison import SampleComparison, compare_arrays
from relaxtune.pipeline.validate.tolerances import Tolerance, output_scale, tensor_tolerance

# A variable of `main` and the number of the field, for kernels that write several tensors.
Place = tuple[str, int]


@dataclass(frozen=True)
class Divergence:
    """Where a run leaves the reference."""

    tensor: str  # The first ONNX tensor, in the order of the graph, that differs.
    # The nodes between it and the tensors seen to be right: the fault is in what computes them.
    nodes: tuple[OnnxNode, ...]
    comparison: SampleComparison  # How much it differs.


class TensorMatcher:
    """Compares traces of our modules with the tensors of ONNX Runtime."""

    def __init__(self, tensors: OnnxTensors, tolerance: Tolerance) -> None:
        self._tensors = tensors
        self._tolerance = tolerance
        self._deepest = max((tensors.depth(name) for name in tensors.outputs), default=1)

    def compare(self, name: str, array: np.ndarray) -> SampleComparison | None:
        """Return how an array compares with a tensor; None where they are not of one kind and shape."""
        expected = self._tensors.values[name]
        if not isinstance(expected, np.ndarray) or _squeezed(expected) != _squeezed(array):
            return None
        if (expected.dtype.kind in "biu") != (array.dtype.kind in "biu"):
            return None
        accepted = tensor_tolerance(self._tolerance, self._tensors.depth(name), self._deepest)
        # In units of its root mean square, where that is below 1: the variance of small activations, say, is to be
        # right in its own digits, not as a share of 1.
        size = output_scale(expected)
        unit = np.asarray(size if np.finfo(np.float32).tiny < size < 1 else 1, expected.dtype)
        return compare_arrays(expected / unit, array.reshape(expected.shape) / unit, accepted)

    def learn(self, trace: Iterable[TracedCall]) -> dict[Place, str]:
        """Return which tensor each place of a healthy run holds."""
        places = {}
        for traced in trace:
            candidates = self._tensors.written_by(traced.call.onnx_nodes)
            for index, array in enumerate(traced.arrays):
                found = next((name for name in candidates if self._agrees(name, array)), None)
                if found is not None:
                    places[traced.call.binding, index] = found
        return places

    def guess(self, trace: Iterable[TracedCall]) -> dict[Place, str]:
        """Return which tensor each place of an imported graph should hold: its node's, by shape.

        Before any pass, the last binding of a node is what the node writes.
        """
        last: dict[str, Place] = {}
        for traced in trace:
            for name in self._tensors.written_by(traced.call.onnx_nodes):
                for index, array in enumerate(traced.arrays):
                    if self.compare(name, array) is not None:
                        last[name] = (traced.call.binding, index)
        return {place: name for name, place in last.items()}

    def find_divergence(
        self,
        trace: Iterable[TracedCall],
        outputs: Mapping[str, np.ndarray],
        known: Mapping[Place, str],
        outputs_only: frozenset[str],
    ) -> Divergence | None:
        """Return where a run diverges, None when no tensor that can be compared does.

        `known` (place -> tensor) is from `learn` or `guess`. The model's outputs of `outputs_only` are known to be
        wrong: they count as diverging whatever this comparison says.
        """
        trace = list(trace)
        healthy = {name for name in self._tensors.values if self._tensors.writer(name) is None}
        wrong: dict[str, SampleComparison] = {}
        for traced in trace:
            for index, array in enumerate(traced.arrays):
                expected = known.get((traced.call.binding, index))
                candidates = self._tensors.written_by(traced.call.onnx_nodes) if expected is None else (expected,)
                agreeing = next((name for name in candidates if self._agrees(name, array)), None)
                if agreeing is not None:
                    healthy.add(agreeing)
                elif expected is not None and (comparison := self.compare(expected, array)) is not None:
                    wrong[expected] = comparison
        for name, array in outputs.items():
            comparison = self.compare(name, array) if name in self._tensors.values else None
            if comparison is not None and (name in outputs_only or not comparison.passed):
                wrong[name] = comparison
                healthy.discard(name)
        suspects = [name for name in wrong if name not in healthy]
        if not suspects:
            return None
        first = min(suspects, key=self._tensors.order)
        present = {traced.call.binding for traced in trace}
        folded = frozenset(name for (binding, _), name in known.items() if binding not in present)
        return Divergence(first, self._tensors.between(first, frozenset(healthy), folded), wrong[first])

    def _agrees(self, name: str, array: np.ndarray) -> bool:
        comparison = self.compare(name, array)
        return comparison is not None and comparison.passed


def _squeezed(array: np.ndarray) -> tuple[int, ...]:
    return tuple(size for size in array.shape if size != 1)
