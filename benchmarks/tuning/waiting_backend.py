"""A backend without a device: it waits as long as a measurement takes and answers with a latency that the code decides.

With it, everything but the measuring is real: search, builds, the database, the scheduling of work on many devices.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from relaxtune.pipeline.tuning.measure.backend import (
    MeasureBackend,
    OnCompared,
    OnMeasured,
    Outcome,
    Unmeasured,
)
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.tuning_db.records import Environment, Status

_RUNS = 5


def latency_s(artifact: BuiltArtifact, spec: WorkloadSpec) -> float:
    """Return a latency between 10 and 100 us: the same for the same code of the same workload."""
    digest = hashlib.sha256(f"{spec.workload} {artifact.sha256}".encode()).digest()
    return (10.0 + 90.0 * int.from_bytes(digest[:4], "big") / 2**32) * 1e-6


class WaitingBackend(MeasureBackend):
    """Devices that measure nothing, side by side.

    Parameters
    ----------
    environment : Environment
        What outcomes are stamped with.
    devices : int
        Candidates that are waited for at the same time.
    measure_s : float
        Seconds that each takes its device.
    """

    undisturbed = True

    def __init__(self, environment: Environment, devices: int, measure_s: float) -> None:
        self._environment = environment
        self._measure_s = measure_s
        self._queue: SimpleQueue[tuple[BuiltArtifact, WorkloadSpec, OnMeasured] | None] = SimpleQueue()
        self._busy_s = [0.0] * devices
        self._threads = [threading.Thread(target=self._serve, args=(each,), daemon=True) for each in range(devices)]
        for thread in self._threads:
            thread.start()

    @property
    def busy_s(self) -> Mapping[str, float]:
        """Seconds in which each device waited."""
        return {f"device {number}": seconds for number, seconds in enumerate(self._busy_s)}

    @property
    def capacity(self) -> int:
        """The number of devices."""
        return len(self._threads)

    def submit(self, artifact: BuiltArtifact, spec: WorkloadSpec, on_measured: OnMeasured) -> None:
        """Wait for a candidate on the next free device."""
        self._queue.put((artifact, spec, on_measured))

    def prepare_reference(self, spec: WorkloadSpec) -> None:
        """Do nothing: no result is compared."""

    def compare(
        self, artifacts: Sequence[BuiltArtifact], spec: WorkloadSpec, rounds: int, on_compared: OnCompared
    ) -> None:
        """Tell that it does not compare."""
        on_compared(None)

    def close(self) -> None:
        """End the threads after what is handed in."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, device: int) -> None:
        while (work := self._queue.get()) is not None:
            artifact, spec, on_measured = work
            began = time.monotonic()
            time.sleep(self._measure_s)
            self._busy_s[device] += time.monotonic() - began
            if artifact.content:
                seconds = (latency_s(artifact, spec),) * _RUNS
                on_measured(Outcome(Status.OK, seconds, None, self._measure_s, environment=self._environment))
            else:
                on_measured(Outcome(Unmeasured.LOST, error="there is no code"))
