"""The states of a cell of a batch, the transitions between them, and the values that come out of the tables.

::

    queued ─▶ importing ─▶ tuning ─▶ compiling ─▶ validating ─▶ done | rejected
       │          └──────────┴───────────┴────────────┴─▶ failed, cancelled
       └─▶ done (nothing changed since it was accepted), cancelled

A cell whose driver died goes back to `queued`. A cell that is over may be queued again, but for `done`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import psutil

from relaxtune.tuning_db.errors import TuningDatabaseError
from relaxtune.tuning_db.records import utc_now

#: Seconds without a heartbeat after which a driver counts as dead.
DEAD_AFTER_S = 30.0


class CellState(StrEnum):
    """How far a cell is."""

    QUEUED = "queued"
    IMPORTING = "importing"
    TUNING = "tuning"
    COMPILING = "compiling"
    VALIDATING = "validating"
    DONE = "done"
    REJECTED = "rejected"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        """Whether nothing more is done with the cell."""
        return self in _OVER

    @property
    def working(self) -> bool:
        """Whether a driver is at it."""
        return not self.over and self is not CellState.QUEUED


_OVER = frozenset({CellState.DONE, CellState.REJECTED, CellState.FAILED, CellState.CANCELLED})
_STOPPED = frozenset({CellState.FAILED, CellState.CANCELLED, CellState.QUEUED})
#: State -> the states that may follow: the only place that says so.
TRANSITIONS: Mapping[CellState, frozenset[CellState]] = {
    CellState.QUEUED: frozenset({CellState.IMPORTING, CellState.DONE, CellState.FAILED, CellState.CANCELLED}),
    CellState.IMPORTING: _STOPPED | {CellState.TUNING},
    CellState.TUNING: _STOPPED | {CellState.COMPILING},
    CellState.COMPILING: _STOPPED | {CellState.VALIDATING, CellState.REJECTED},
    CellState.VALIDATING: _STOPPED | {CellState.DONE, CellState.REJECTED},
    CellState.DONE: frozenset(),
    CellState.REJECTED: frozenset({CellState.QUEUED}),
    CellState.FAILED: frozenset({CellState.QUEUED}),
    CellState.CANCELLED: frozenset({CellState.QUEUED}),
}


class TransitionError(TuningDatabaseError):
    """A transition that is not allowed; `state` is the cell's present one."""

    def __init__(self, cell: str, state: CellState, wanted: CellState) -> None:
        allowed = ", ".join(sorted(TRANSITIONS[state])) or "nothing else"
        super().__init__(f"The cell {cell} is {state} and cannot become {wanted}; it may become {allowed}.")
        self.state = state


class BatchHeldError(TuningDatabaseError):
    """Another driver works on the batch; the message says where."""


@dataclass(frozen=True)
class Driver:
    """The process that carries out a batch."""

    host: str
    pid: int

    @classmethod
    def here(cls) -> Driver:
        """Return this process."""
        return cls(socket.gethostname(), os.getpid())

    def alive(self, heartbeat_at: datetime) -> bool:
        """Whether it still works: its heartbeat is fresh and, on this host, its process is there."""
        fresh = (utc_now() - heartbeat_at).total_seconds() < DEAD_AFTER_S
        return fresh and (self.host != socket.gethostname() or psutil.pid_exists(self.pid))


@dataclass(frozen=True)
class CellSpec:
    """One cell of a plan, one column each."""

    name: str  # Unique in its batch.
    source: str
    shape: str
    buckets: str
    precision: str
    effort: str
    target: str
    importance: int
    tags: str
    key: str  # Content key of all that decides what the cell's artifact is, records aside: source, options, code.
    max_latency_ms: float | None = None
    rtol: float | None = None
    atol: float | None = None


@dataclass(frozen=True)
class CellFacts:
    """The results of a cell; None where one is not known."""

    error: str | None = None  # Why the cell is not accepted.
    model: str | None = None
    # The artifact's directory, what it is (`Artifact.key`), and its size on disk.
    artifact: str | None = None
    artifact_key: str | None = None
    size_bytes: int | None = None
    validated: bool | None = None  # Whether its outputs agree with the reference.
    # Median latencies of the model without records, of the artifact, and of `peer` on the same device.
    untuned_ms: float | None = None
    shipped_ms: float | None = None
    peer: str | None = None
    peer_ms: float | None = None
    seconds: float | None = None
    job_id: str | None = None  # The job of the database that made the artifact.


NO_FACTS = CellFacts()


@dataclass(frozen=True)
class BatchCell:
    """A cell of a batch: its part of the plan, its state and its results.

    `heartbeat_at` and `driver` are of the attempt that is on the way, None without one.
    """

    batch_id: str
    position: int
    spec: CellSpec
    state: CellState
    facts: CellFacts
    updated_at: datetime
    attempts: int = 0
    driver: Driver | None = None
    heartbeat_at: datetime | None = None

    @property
    def dead(self) -> bool:
        """Whether a driver began the cell and works no more."""
        if not self.state.working:
            return False
        return self.driver is None or self.heartbeat_at is None or not self.driver.alive(self.heartbeat_at)


@dataclass(frozen=True)
class Attempt:
    """One attempt at a cell; `finished_at` is None while it goes on, or where its driver died."""

    cell: str
    number: int
    driver: Driver
    started_at: datetime
    heartbeat_at: datetime
    finished_at: datetime | None
    state: CellState
    error: str | None


@dataclass(frozen=True)
class Batch:
    """A plan that was begun."""

    id: str
    key: str  # Two batches of one plan have the same: its name and the folder of its artifacts.
    name: str
    # The plan's file and its text, so that `resume` carries out what was begun.
    path: str
    plan: str
    # Who works on it, or did last.
    driver: Driver
    heartbeat_at: datetime
    started_at: datetime
    # None while it goes on, or where its driver died.
    finished_at: datetime | None = None
    outcome: str | None = None

    @property
    def held(self) -> bool:
        """Whether a driver works on it."""
        return self.finished_at is None and self.driver.alive(self.heartbeat_at)
