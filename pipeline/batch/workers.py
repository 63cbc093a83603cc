"""Where cells are imported and finished while others are tuned: processes of this machine, each pinned to a device."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from relaxtune.pipeline.batch.worker import WORKER_MODULE, FinishWork, Work
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.tuning.local.devices import pinned
from relaxtune.pipeline.tuning.local.process import ChildDiedError, ChildProcess
from relaxtune.schedules.targets.host import physical_cores

# Cores for each process that imports and compiles beside the build processes, and processes for each device.
_CORES_EACH = 4
_EACH_DEVICE_MAX = 3


class CellWorkers(ABC):
    """Does work on cells beside the tuning; nothing it does disturbs a measurement."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Cells that it works on at the same time."""

    @abstractmethod
    def submit(self, work: Work) -> Future[object]:
        """Hand in work (`worker.answer`); the future holds the answer, or an error if its process died."""

    @abstractmethod
    def close(self) -> None:
        """End what was started here; what is not done is given up."""


class LocalWorkers(CellWorkers):
    """Processes of this machine.

    Parameters
    ----------
    devices : sequence of str
        Devices that candidates are measured on; the processes are pinned to them, one after another.
    turns : Path
        The folder of the devices' turns: a process times something only while its device measures nothing else.
    """

    def __init__(self, devices: Sequence[str], turns: Path) -> None:
        most = len(devices) * _EACH_DEVICE_MAX
        self._count = max(1, min(most, (physical_cores() or 1) // _CORES_EACH))
        self._turns = turns
        self._idle: SimpleQueue[tuple[str, ChildProcess | None]] = SimpleQueue()
        for number in range(self._count):
            self._idle.put((devices[number % len(devices)], None))
        self._lock = threading.Lock()
        self._started: list[ChildProcess] = []
        self._closed = False
        self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="relaxtune-cells")

    @property
    def count(self) -> int:
        """The number of processes."""
        return self._count

    def submit(self, work: Work) -> Future[object]:
        """Hand in work for the next free process."""
        return self._threads.submit(self._do, work)

    def close(self) -> None:
        """Kill the processes."""
        with self._lock:
            self._closed = True
            started, self._started = self._started, []
        for process in started:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _do(self, work: Work) -> object:
        device, process = self._idle.get()
        try:
            if process is None:
                process = self._start(device)
            process.send(replace(work, turns=self._turns, device=device) if isinstance(work, FinishWork) else work)
            reply = process.receive()
        except (ChildDiedError, OSError) as e:
            if process is not None:
                process.kill()
            process = None
            lines = str(e).strip().splitlines() or [type(e).__name__]
            told = " ".join(dict.fromkeys([lines[0], lines[-1].strip()]))
            raise PipelineError(f"the process that worked on the cell is gone: {told}") from e
        finally:
            self._idle.put((device, process))
        if reply.error is not None:
            raise PipelineError(reply.error.strip().splitlines()[-1])
        return reply.value

    def _start(self, device: str) -> ChildProcess:
        with self._lock:
            if self._closed:
                raise OSError("the run has ended")
            process = ChildProcess(WORKER_MODULE, {**pinned(device).environment, "OMP_NUM_THREADS": str(_CORES_EACH)})
            self._started.append(process)
        process.receive()
        return process
