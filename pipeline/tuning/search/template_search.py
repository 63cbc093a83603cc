"""The order in which the candidates of kernel templates are measured, and when the rest is left alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from relaxtune.pipeline.tuning.candidates import Candidate

# A prediction of unmeasured candidates from the measured ones: a Gaussian process over the parameters.
#
# The logarithm of the latency is predicted, with a standard deviation, from the parameters of the decisions: numbers on
# a logarithmic scale, texts one column a value. Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006,
# algorithm 2.1. Among a few length scales, the one with the largest marginal likelihood is taken.

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

    `table` is a `parameter_table`; `measured_us` has the latencies of at least two of its rows.
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


# Measured in the template's own order before there is a prediction.
_FIRST = 8
_BATCH = 8
# A candidate is left out when its prediction less so many standard deviations is still slower than the best.
_DOUBT = 2.0


class TemplateSearch:
    """The candidates of one task: the most promising first, the hopeless not at all.

    `candidates` come in the template's order, the most promising first. `known_us` has the median latencies of earlier
    runs by decision, None for a failure. If `thorough`, all are measured, whatever is predicted of them.
    """

    def __init__(
        self, candidates: Sequence[Candidate], known_us: Mapping[str, float | None], *, thorough: bool = False
    ) -> None:
        self._candidates = list(candidates)
        self._preferred: list[int] = []
        #: Whether near shapes were tuned with it.
        self.informed = False
        # The rows to measure next; None when something changed since they were found.
        self._next: list[int] | None = None
        self._row = {one.decision: row for row, one in enumerate(self._candidates)}
        self._table = parameter_table([one.decision for one in self._candidates])
        self._measured: dict[int, float] = {}
        self._proposed: set[int] = set()
        self._thorough = thorough
        for decision, latency_us in known_us.items():
            self.learn(decision, latency_us)

    def prefer(self, decisions: Sequence[str]) -> None:
        """Begin with these, which were best for near shapes, as far as they are candidates here."""
        self.informed = bool(decisions)
        self._next = None
        self._preferred = [self._row[decision] for decision in decisions if decision in self._row]

    def learn(self, decision: str, latency_us: float | None) -> None:
        """Take in the median latency of a candidate, None for a failure; other decisions are ignored."""
        row = self._row.get(decision)
        if row is None:
            return
        self._proposed.add(row)
        self._next = None
        if latency_us is not None:
            self._measured[row] = latency_us

    def propose(self, limit: int) -> list[Candidate]:
        """Return the next candidates to measure, at most `limit`; none when the rest cannot win."""
        rows = self._next_rows()[: min(limit, _BATCH)]
        self._proposed |= set(rows)
        self._next = None
        return [self._candidates[row] for row in rows]

    @property
    def done(self) -> bool:
        """Whether nothing more is worth measuring, by what is known now."""
        return not self._next_rows()

    def _next_rows(self) -> list[int]:
        if self._next is not None:
            return self._next
        rows = [row for row in range(len(self._candidates)) if row not in self._proposed]
        if self._thorough or len(self._proposed) < _FIRST or len(self._measured) < 2:
            first = [row for row in self._preferred if row in rows]
            self._next = first + [row for row in rows if row not in first]
            return self._next
        mean, deviation = predict(self._table, self._measured)
        best = np.log(min(self._measured.values()))
        hopeful = [row for row in rows if mean[row] - _DOUBT * deviation[row] < best]
        self._next = sorted(hopeful, key=lambda row: float(mean[row] - deviation[row]))
        return self._next
