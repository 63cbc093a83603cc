"""Processes that try graphs: one that dies, or takes too long, loses its graph and no other."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Protocol

import psutil

from tests.guardrails.graph_judge import Outcome, Status

_CONTEXT = multiprocessing.get_context("spawn")
# Graphs of a process before a new one takes its place: compiled code is not given back.
_GRAPHS_MAX = 400
# The first graph of a process waits for the imports.
_START_S = 120.0
# A graph may take so many seconds for each one of a processor that it may use: a busy machine is no fault of a graph.
_BUSY = 20.0
_LOOK_S = 1.0


class Attempts(Protocol):
    """How graphs are drawn and tried."""

    def attempt(self, seed: int) -> Outcome:
        """Return what becomes of the graph of a seed."""


def _serve(pipe: Connection, plan: Attempts) -> None:
    while (seed := pipe.recv()) is not None:
        pipe.send(plan.attempt(seed))


@dataclass
class _Worker:
    plan: Attempts
    pipe: Connection = field(init=False)
    process: SpawnProcess = field(init=False)
    seed: int | None = None
    limit_s: float = 0.0
    began_s: float = 0.0
    used_s: float = 0.0
    tried: int = 0

    def __post_init__(self) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(theirs, self.plan), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, seed: int, limit_s: float) -> None:
        self.seed, self.limit_s = seed, limit_s + (0 if self.tried else _START_S)
        self.began_s, self.used_s = time.monotonic(), self._processor_s()
        self.tried += 1
        self.pipe.send(seed)

    @property
    def takes_too_long(self) -> bool:
        """Whether its graph took more of a processor than it may, or stands still."""
        used, passed = self._processor_s() - self.used_s, time.monotonic() - self.began_s
        return used > self.limit_s or passed > _BUSY * self.limit_s

    def _processor_s(self) -> float:
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def try_graphs(seeds: Iterable[int], plan: Attempts, *, workers: int = 1, limit_s: float = 60.0) -> Iterator[Outcome]:
    """Yield what becomes of graphs, in the order in which they are done.

    Parameters
    ----------
    seeds, plan
        Which graphs, and how they are tried.
    workers
        Processes at a time.
    limit_s
        Seconds of a processor for a graph; one that takes more is `crashed`.
    """
    left = iter(seeds)
    running: list[_Worker] = []
    try:
        while True:
            while len(running) < workers and (seed := next(left, None)) is not None:
                running.append(_Worker(plan))
                running[-1].give(seed, limit_s)
            if not running:
                return
            wait([worker.pipe for worker in running], _LOOK_S)
            for worker in list(running):
                outcome = _outcome(worker)
                if outcome is None:
                    continue
                yield outcome
                seed = next(left, None) if worker.process.is_alive() and worker.tried < _GRAPHS_MAX else None
                if seed is None:
                    running.remove(worker)
                    worker.end()
                else:
                    worker.give(seed, limit_s)
    finally:
        for worker in running:
            worker.end()


def _outcome(worker: _Worker) -> Outcome | None:
    """Return what became of a worker's graph, None while it is not known; a lost worker is killed."""
    assert worker.seed is not None
    if worker.pipe.poll():
        try:
            found: Outcome = worker.pipe.recv()
        except EOFError:
            worker.process.join()
            return Outcome(worker.seed, Status.CRASHED, f"its process died with {worker.process.exitcode}")
        return found
    if worker.takes_too_long:
        worker.process.kill()
        worker.process.join()
        return Outcome(worker.seed, Status.CRASHED, "it took too long and was killed")
    return None
