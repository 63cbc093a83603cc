"""Cells with a limit of their latency: they are finished as soon as their kernels promise to keep it."""

from __future__ import annotations

from collections.abc import Container, Mapping

# A model takes longer than its kernels together. This part of a limit is theirs until a cell has shown its own.
_KERNELS_PART = 0.8


class EarlyCells:
    """The cells of a run that have a limit of their latency, and how near they are to it."""

    def __init__(self) -> None:
        self._best_us: dict[str, float] = {}
        self._limits_ms: dict[str, float] = {}
        self._weights: dict[str, Mapping[str, int]] = {}
        self._cells_of: dict[str, set[str]] = {}
        self._parts: dict[str, float] = {}
        self._tried_ms: dict[str, float] = {}
        self._changed: set[str] = set()

    def add(self, name: str, limit_ms: float, weights: Mapping[str, int]) -> None:
        """Watch a cell.

        Parameters
        ----------
        weights : mapping
            Workload hash -> calls of the kernel in one inference.
        """
        self._limits_ms[name], self._weights[name] = limit_ms, weights
        for key in weights:
            self._cells_of.setdefault(key, set()).add(name)
        self._changed.add(name)

    def improved(self, workload_hash: str, best_us: float) -> None:
        """Note the best latency of a task."""
        if self._best_us.get(workload_hash) != best_us:
            self._best_us[workload_hash] = best_us
            self._changed |= self._cells_of.get(workload_hash, set())

    def take_promising(self, among: Container[str]) -> list[str]:
        """Return those of some cells whose kernels got fast enough since the last call: they are tried now."""
        changed, self._changed = self._changed, set()
        found = []
        for name in sorted(name for name in changed if name in among):
            kernels_ms = self._kernels_ms(name)
            part = self._parts.get(name, _KERNELS_PART)
            if kernels_ms is not None and kernels_ms <= part * self._limits_ms[name]:
                self._tried_ms[name] = kernels_ms
                found.append(name)
        return found

    def missed(self, name: str, latency_ms: float | None) -> None:
        """Note that a cell took longer than its limit after all: its kernels must be faster for the next try."""
        tried_ms = self._tried_ms[name]
        self._parts[name] = 0.99 * tried_ms / max(latency_ms or 0.0, self._limits_ms[name])
        self._changed.add(name)

    def faster(self, name: str) -> bool:
        """Whether a cell's kernels got faster since it was tried."""
        kernels_ms = self._kernels_ms(name)
        return kernels_ms is not None and kernels_ms < self._tried_ms[name]

    def _kernels_ms(self, name: str) -> float | None:
        if not self._weights[name].keys() <= self._best_us.keys():
            return None
        return sum(weight * self._best_us[key] for key, weight in self._weights[name].items()) / 1e3
