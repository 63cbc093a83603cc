"""What the measured candidates of a template say about those that are not: a Gaussian process over the parameters.

The logarithm of the latency is predicted, with a standard deviation, from the parameters of the decisions: numbers on a
logarithmic scale, texts one column a value. Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006,
algorithm 2.1. Among a few length scales, the one with the largest marginal likelihood is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

# Repeated measurements of one kernel differ by about so much.
_NOISE = 0.02
_SCALES = (0.5, 1.0, 2.0, 4.0)


def parameter_table(decisions: Sequence[str]) -> np.ndarray:
    """Return one row of numbers a decision, each column with mean 0 and standard deviation 1 (or 0)."""
    documents = [json.loads(decision) for decision in decisions]
    columns: list[list[float]] = []
    for name in sorted({name for document in documents for name in document}):
        values = [document.get(name) for document in documents]
        if all(isinstance(value, int | float) for value in values):
            columns.append([float(np.log2(1.0 + abs(value))) for value in values])
        else:
            texts = [str(value) for value in values]
            columns += [[float(text == choice) for text in texts] for choice in sorted(set(texts))]
    table = np.array(columns, dtype=np.float64).T.reshape(len(decisions), len(columns))
    spread = table.std(axis=0)
    varying = spread > 0
    return np.asarray((table[:, varying] - table[:, varying].mean(axis=0)) / spread[varying])


def predict(table: np.ndarray, measured_us: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of the logarithm of every row's latency.

    Parameters
    ----------
    table : (n, d) array
        From `parameter_table`.
    measured_us : mapping
        Row -> latency of those measured; at least two.
    """
    rows = np.array(sorted(measured_us))
    logs = np.log([measured_us[row] for row in rows])
    centre, variance = logs.mean(), logs.var() + _NOISE**2
    distance = ((table[:, None, :] - table[None, :, :]) ** 2).sum(axis=2)
    unit = max(float(np.median(distance[np.triu_indices(len(table), 1)])), 1e-9) if len(table) > 1 else 1.0
    best: tuple[float, np.ndarray, np.ndarray] | None = None
    for scale in _SCALES:
        kernel = variance * np.exp(-0.5 * distance / (unit * scale))
        known = kernel[np.ix_(rows, rows)] + _NOISE**2 * np.eye(len(rows))
        factor = np.linalg.cholesky(known)
        weights = np.linalg.solve(factor.T, np.linalg.solve(factor, logs - centre))
        likelihood = -0.5 * (logs - centre) @ weights - np.log(np.diag(factor)).sum()
        if best is None or likelihood > best[0]:
            cross = kernel[:, rows]
            reduced = np.linalg.solve(factor, cross.T)
            left = np.maximum(variance - (reduced**2).sum(axis=0), 0.0)
            best = (float(likelihood), centre + cross @ weights, np.sqrt(left))
    if best is None:
        raise ValueError("a prediction needs at least one length scale")
    return best[1], best[2]
