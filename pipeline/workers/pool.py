"""Workers that share a queue: each does one job at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from relaxtune.pipeline.workers.replies import WorkerStoppedError
from relaxtune.pipeline.workers.worker import Worker

T = TypeVar("T")


class WorkerPool:
    """Threads that give jobs to workers, in the order in which they come.

    The workers are started at once, and closed with the pool.
    """

    def __init__(self, workers: Sequence[Worker], name: str) -> None:
        self.workers = tuple(workers)
        self._closed = False
        self._executor = ThreadPoolExecutor(len(self.workers), thread_name_prefix=name)
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self.workers:
            worker.start()
            self._free.put(worker)

    @property
    def waiting(self) -> int:
        """Jobs that no worker has yet."""
        return self._executor._work_queue.qsize()

    def submit(self, job: Callable[[Worker], T]) -> Future[T]:
        """Have a job done by the next free worker; the future of one that comes after `close` holds an error."""
        if self._closed:
            future: Future[T] = Future()
            future.set_exception(WorkerStoppedError("the run was stopped"))
            return future
        return self._executor.submit(self._do, job)

    def _do(self, job: Callable[[Worker], T]) -> T:
        worker = self._free.get()
        try:
            return job(worker)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End the workers; jobs in the queue find that they have left."""
        self._closed = True
        # All at the same time: a process that uses a GPU takes a second to be gone.
        for worker in self.workers:
            worker.leave()
        self._executor.shutdown()
        for worker in self.workers:
            worker.close()
