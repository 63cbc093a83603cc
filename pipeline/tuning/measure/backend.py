"""The protocol of measuring: plain values go in and out, on this machine, over Ray or to a board.

    module or recipe ── Builder ──▶ BuiltArtifact ── MeasureBackend ──▶ Outcome

Builders and backends answer through callbacks, from threads of their own, in the order in which things are finished.
Nothing above this file knows where a candidate is built or measured. It imports no TVM: a node of a cluster that only
hands builds to its compiling process needs none.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from relaxtune.pipeline.tuning.measure.resources import NO_RESOURCES, Resources
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.tuning_db.records import Environment, Status

if TYPE_CHECKING:
    import tvm

    from relaxtune.pipeline.tuning.measure.recipe import Buildable


class Unmeasured(StrEnum):
    """Why nothing is known of a candidate. The fault is not its own, so that no record is kept."""

    STOPPED = "stopped"  # The run ended first.
    # A fault of the machine (`pipeline.workers.machine_faults`): its process was killed from outside, the disk or the
    # memory was full, or the machine is gone. It may be tried again.
    LOST = "lost"
    BROKEN = "broken"  # Nothing can be built or measured there any more; the run has to end.


@dataclass(frozen=True)
class Outcome:
    """The outcome of one candidate."""

    status: Status | Unmeasured  # `Status.OK`, how the candidate failed, or why nothing is known of it.
    seconds: tuple[float, ...] = ()  # Raw seconds of one run each; empty unless it is ok.
    error: str | None = None  # The reason; None when it is ok.
    duration_s: float = 0.0  # Seconds that building and measuring took.
    resources: Resources = NO_RESOURCES  # Of the kernel on a GPU, as far as they are known.
    # Where it was measured, as the backend says; None for one that was never measured.
    environment: Environment | None = None
    # The workload's reference cannot be computed, so that no candidate of it can be checked.
    no_reference: bool = False


@dataclass(frozen=True)
class Built:
    """A finished build: an artifact when `status` is ok, else the reason; and the seconds it took a process."""

    status: Status | Unmeasured
    artifact: BuiltArtifact | None = None
    error: str | None = None
    seconds: float = 0.0


class BusyClock:
    """Wall seconds during which at least one of something was going on; safe between threads.

    Two builds at the same time for one second are one second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._since = 0.0
        self._seconds = 0.0

    def enter(self) -> None:
        """Note that one more is going on."""
        with self._lock:
            if self._running == 0:
                self._since = time.monotonic()
            self._running += 1

    def leave(self) -> None:
        """Note that one of those that entered is over."""
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._seconds += time.monotonic() - self._since

    def run_while(self, busy: bool) -> None:
        """Run from the first call with True to the next with False."""
        if busy and not self._running:
            self.enter()
        elif self._running and not busy:
            self.leave()

    @property
    def seconds(self) -> float:
        """Busy seconds so far."""
        with self._lock:
            return self._seconds + (time.monotonic() - self._since if self._running else 0.0)


OnBuilt = Callable[[Built], None]
OnMeasured = Callable[[Outcome], None]
# One outcome per artifact, in order; None when the artifacts could not all be run.
OnCompared = Callable[[Sequence[Outcome] | None], None]


class Builder(ABC):
    """Compiles candidates. `clock` runs while something is built."""

    def __init__(self) -> None:
        self.clock = BusyClock()

    @property
    def restarts(self) -> int:
        """How many processes were replaced."""
        return 0

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Candidates that it builds at the same time."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Candidates that no process has yet."""

    @abstractmethod
    def submit(self, what: Buildable, target: tvm.target.Target, on_built: OnBuilt) -> None:
        """Build the PrimFunc `main` of a scheduled module, or of the one that a recipe makes; returns at once."""

    def discard(self, artifact: BuiltArtifact) -> None:
        """Remove the file of an artifact that this builder made, where it has one."""
        if isinstance(artifact.content, str):
            Path(artifact.content).unlink(missing_ok=True)

    @abstractmethod
    def close(self) -> None:
        """End the processes; unfinished builds are reported as stopped."""


class MeasureBackend(ABC):
    """Measures built candidates on one or more devices of one model.

    An implementation stamps every outcome with the environment that it was measured in. A candidate's failure is its
    outcome; a failure of the machine is `Unmeasured`. Every submitted candidate is answered exactly once.
    """

    # Building at the same time does not disturb its clock: it is a GPU, or the builders are on other machines.
    undisturbed: bool

    @property
    def restarts(self) -> int:
        """Processes that were replaced."""
        return 0

    @property
    def busy_s(self) -> Mapping[str, float]:
        """Seconds in which each device had something to do, by its name; empty where that is not known."""
        return {}

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Candidates that it measures at the same time."""

    @abstractmethod
    def submit(self, artifact: BuiltArtifact, spec: WorkloadSpec, on_measured: OnMeasured) -> None:
        """Check and time a candidate on any of the devices; returns at once."""

    @abstractmethod
    def prepare_reference(self, spec: WorkloadSpec) -> None:
        """Compute what the candidates of a workload are compared with, before the first of them is there.

        It is a hint: a backend that does nothing here computes the reference with the first candidate.
        """

    @abstractmethod
    def compare(
        self, artifacts: Sequence[BuiltArtifact], spec: WorkloadSpec, rounds: int, on_compared: OnCompared
    ) -> None:
        """Check candidates of one workload again and time them alternately on one device, `rounds` latencies each."""

    @abstractmethod
    def close(self) -> None:
        """End the processes; unfinished measurements are reported as stopped."""


def pack(code: bytes) -> bytes:
    """Return the bytes of an artifact as they go to another machine: 8 to 21 KB of 30 to 78 (0.3 to 0.7 ms)."""
    return zlib.compress(code, 1)


def place(artifact: BuiltArtifact, directory: Path) -> BuiltArtifact:
    """Return an artifact whose content is a file of this machine; packed bytes are written to the directory first.

    Raises `OSError`: the bytes are not those that were built.
    """
    if isinstance(artifact.content, str):
        return artifact
    path = directory / f"{artifact.sha256}.so"
    if not path.exists():
        try:
            code = zlib.decompress(artifact.content)
        except zlib.error as e:
            raise OSError(f"a built artifact came damaged: {e}") from e
        found = hashlib.sha256(code).hexdigest()
        if found != artifact.sha256:
            raise OSError(f"a built artifact came damaged: expected sha256 {artifact.sha256}, got {found}")
        # Processes of several devices may write the same one.
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(code)
        partial.rename(path)
    return replace(artifact, content=str(path))


def build_all(builder: Builder, mods: Sequence[Buildable], target: tvm.target.Target) -> list[Built]:
    """Build some modules; return the finished builds in order."""
    done: SimpleQueue[tuple[int, Built]] = SimpleQueue()
    for index, mod in enumerate(mods):
        builder.submit(mod, target, lambda built, index=index: done.put((index, built)))  # type: ignore[misc]
    found = dict(done.get() for _ in mods)
    return [found[index] for index in range(len(mods))]
