"""Measuring on this machine: one process for each device, side by side."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tuning.local.devices import pinned
from relaxtune.pipeline.tuning.local.measuring_process import MeasuringProcess
from relaxtune.pipeline.tuning.local.process import ForkServer
from relaxtune.pipeline.tuning.measure.backend import (
    Capabilities,
    MeasureBackend,
    OnCompared,
    OnMeasured,
    Outcome,
    Unmeasured,
)
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.tuning_db.records import Environment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Work:
    """Something for a measuring process to do; `fail` tells that no process is left to do it."""

    workload: str
    do: Callable[[MeasuringProcess], None]
    fail: Callable[[Outcome], None]


class LocalBackend(MeasureBackend):
    """Measures on devices of this machine; the next candidate goes to whichever device is free.

    A device whose process cannot be started is left alone; the others go on.

    Parameters
    ----------
    devices : sequence of str
        TVM's names, such as `cpu:0` or `cuda:1`; each gets a process of its own, pinned to it.
    environment : Environment
        What outcomes are stamped with; all devices are of its model.
    options, timeout_s, stop, seed, server
        See `MeasuringProcess`.
    """

    def __init__(
        self,
        devices: Sequence[str],
        environment: Environment,
        options: MeasureOptions | None = None,
        timeout_s: float = 30.0,
        stop: StopSignal | None = None,
        seed: int = 0,
        server: ForkServer | None = None,
    ) -> None:
        self._environment = environment
        self._changed = threading.Condition()
        self._waiting: deque[_Work] = deque()
        # A workload's first work computes its reference; the other devices do other work meanwhile.
        self._preparing: set[str] = set()
        self._prepared: set[str] = set()
        self._closed = False
        self._broken: Outcome | None = None
        options, stop = options or MeasureOptions(), stop or StopSignal()
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(temporary_folder()))
            self.processes = [
                stack.enter_context(
                    contextlib.closing(
                        MeasuringProcess(pinned(one), environment, options, timeout_s, stop, seed, directory, server)
                    )
                )
                for one in devices
            ]
            self._stack = stack.pop_all()
        self._alive = len(self.processes)
        self._threads = [
            threading.Thread(target=self._serve, args=(process,), name=f"relaxtune-measure-{number}", daemon=True)
            for number, process in enumerate(self.processes)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def capabilities(self) -> Capabilities:
        """What it measures on."""
        return Capabilities(self._environment.device_kind, self._environment.device_name)

    @property
    def capacity(self) -> int:
        """The number of devices."""
        return len(self.processes)

    @property
    def restarts(self) -> int:
        """Processes that were replaced."""
        return sum(process.restarts for process in self.processes)

    def prepare_reference(self, spec: WorkloadSpec) -> None:
        """Compute a workload's reference after what was handed in before."""
        self._put(_Work(spec.workload, lambda process: process.prepare_reference(spec), lambda _: None))

    def submit(self, artifact: BuiltArtifact, spec: WorkloadSpec, on_measured: OnMeasured) -> None:
        """Measure a candidate on the next free device."""
        self._put(_Work(spec.workload, lambda process: on_measured(process.measure(artifact, spec)), on_measured))

    def compare(
        self, artifacts: Sequence[BuiltArtifact], spec: WorkloadSpec, rounds: int, on_compared: OnCompared
    ) -> None:
        """Time candidates of one workload alternately on the next free device."""
        self._put(
            _Work(
                spec.workload,
                lambda process: on_compared(process.compare(artifacts, spec, rounds)),
                lambda _: on_compared(None),
            )
        )

    def close(self) -> None:
        """End the processes and the threads that feed them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for process in self.processes:
            process.leave()
        for thread in self._threads:
            thread.join()
        self._stack.close()

    def _put(self, work: _Work) -> None:
        with self._changed:
            refused = Outcome(Unmeasured.STOPPED, error="the backend is closed") if self._closed else self._broken
            if refused is None:
                self._waiting.append(work)
                self._changed.notify()
        if refused is not None:
            work.fail(refused)

    def _serve(self, process: MeasuringProcess) -> None:
        work = None
        # The border of a thread: a device that is gone must not take its work along.
        try:
            process.warm()
            while (work := self._next()) is not None:
                work.do(process)
                self._done(work)
        except Exception as e:
            logger.exception("%s is left alone: it cannot be measured on", process.device)
            self._leave(work, Outcome(Unmeasured.BROKEN, error=str(e)))

    def _next(self) -> _Work | None:
        """Wait for work that no other device stands in the way of; None at the end."""
        with self._changed:
            while True:
                work = next((one for one in self._waiting if one.workload not in self._preparing), None)
                if work is not None:
                    self._waiting.remove(work)
                    if work.workload not in self._prepared:
                        self._preparing.add(work.workload)
                    return work
                if self._closed and not self._waiting:
                    return None
                self._changed.wait()

    def _done(self, work: _Work) -> None:
        with self._changed:
            if work.workload in self._preparing:
                self._preparing.discard(work.workload)
                self._changed.notify_all()
            self._prepared.add(work.workload)

    def _leave(self, work: _Work | None, broken: Outcome) -> None:
        """Give back the work of a device that is gone; without any device, all work fails."""
        given_up: list[_Work] = []
        with self._changed:
            self._alive -= 1
            if work is not None:
                self._preparing.discard(work.workload)
                self._waiting.appendleft(work)
            if not self._alive:
                self._broken = broken
                given_up, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        for one in given_up:
            one.fail(broken)
