"""`PolicyEntry`: what a manifest states about precision, tensor kind by tensor kind."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from relaxtune.models import OnnxModel, TensorSpec
from relaxtune.models.inputs import InputKind, describe_inputs
from relaxtune.pipeline.precision.policy import AS_GIVEN, PolicyEntry, PrecisionPolicy


def policy_entry(
    policy: PrecisionPolicy | None,
    model: OnnxModel,
    weights: Mapping[str, np.ndarray],
    quantised_nodes: tuple[str, ...],
    graph_dtype: str,
    float_nodes: tuple[str, ...] = (),
) -> PolicyEntry:
    """Return the entry of a lowered model.

    Parameters
    ----------
    policy : PrecisionPolicy or None
        What was asked for.
    weights : mapping
        The weights as they are stored, for a graph that was compiled as it is.
    graph_dtype : str
        The dtype in which the graph as given computes.
    float_nodes : tuple of str
        See `PolicyEntry`.
    """
    cache = ", ".join(sorted({spec.dtype for spec in _caches(model)})) or "none"
    # Without a matmul in integers (the pass is switched off) the graph is compiled as given.
    if policy is not None and (quantised_nodes or not policy.integer):
        return PolicyEntry(
            policy.name, policy.weights, policy.activations, policy.accumulators, policy.norms, cache,
            policy.group_size, policy.scale_dtype, quantised_nodes, float_nodes,
        )  # fmt: skip
    stored = _largest_dtype(weights) or graph_dtype
    name = "fp32" if (stored, graph_dtype) == ("float32", "float32") else AS_GIVEN
    accumulators = "float64" if graph_dtype == "float64" else "float32"
    norms = graph_dtype if graph_dtype in ("float32", "float64") else "float32"
    return PolicyEntry(name, stored, graph_dtype, accumulators, norms, cache)


def _caches(model: OnnxModel) -> list[TensorSpec]:
    kinds = {rule.name: rule.kind for rule in describe_inputs(model)}
    return [spec for spec in model.inputs if kinds[spec.name] is InputKind.CACHE]


def _largest_dtype(weights: Mapping[str, np.ndarray]) -> str | None:
    """Return the dtype of most of the bytes of matrices, None without any."""
    sizes: dict[str, int] = {}
    for array in weights.values():
        if array.ndim > 1:
            sizes[str(array.dtype)] = sizes.get(str(array.dtype), 0) + array.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None
