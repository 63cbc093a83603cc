"""Callers of a model: what a library offers for timing, one call after another or several at once.

It imports NumPy and nothing else that is not Python's own: processes of peers load it without TVM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Call = Callable[[], object]


class PeerError(Exception):
    """A peer cannot run the model; the message is for the user."""


@dataclass(frozen=True)
class Caller:
    """One caller of a model, with inputs of its own where the library reads them."""

    run: Call  # Computes once and returns when the outputs are there.
    outputs: Callable[[], Mapping[str, np.ndarray]]  # Returns those of the last run, by name.


class Peer(Protocol):
    """A model loaded by another library."""

    @property
    def version(self) -> str:
        """The library's version."""

    def callers(self, inputs: Mapping[str, np.ndarray], count: int) -> list[Caller]:
        """Return so many callers, which may run at the same time; raise `PeerError` where it cannot be."""


@dataclass(frozen=True)
class PeerOrder:
    """The first request to a peer's process."""

    peer: str  # Its name, as `--against` has it.
    model: str  # The ONNX file.
    kind: str  # The kind of device: `llvm` is the CPU.
    threads: int  # CPU threads of one caller.
    streams: int  # Callers at once.
    outputs: tuple[str, ...]  # Their names, in the model's order.
    factory: str | None = None  # `MODULE:FACTORY` or `FILE.py:FACTORY`, which returns the `torch.nn.Module`.
    tf32: bool = False  # Whether float32 matmuls may be computed in TF32.


def timed_ms(run: Call) -> float:
    """Return what one call took, in milliseconds."""
    started = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - started) / 1e6


def run_together(runs: Sequence[Call], seconds: float) -> tuple[list[float], float]:
    """Return the latencies (ms) of all callers while each calls again and again, and how long they did (s).

    Each runs in a thread of its own and begins no call after so many seconds, but one at least. What a caller raises is
    raised.
    """
    latencies: list[list[float]] = [[] for _ in runs]
    failures: list[BaseException] = []
    gate = threading.Barrier(len(runs) + 1)

    def work(run: Call, taken: list[float]) -> None:
        gate.wait()
        end = time.perf_counter_ns() + int(seconds * 1e9)
        try:
            while not taken or time.perf_counter_ns() < end:
                taken.append(timed_ms(run))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in zip(runs, latencies, strict=True)]
    for thread in threads:
        thread.start()
    gate.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [value for taken in latencies for value in taken], time.perf_counter() - began
