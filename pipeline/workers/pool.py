"""Workers that share a queue: each has a thread, and does one job at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from relaxtune.pipeline.workers.worker import Worker

T = TypeVar("T")


class WorkerPool:
    """Threads that give jobs to workers, in the order in which they come.

    Parameters
    ----------
    workers : sequence of Worker
        They are started at once, and closed with the pool.
    name : str
        Of the threads.
    """

    def __init__(self, workers: Sequence[Worker], name: str) -> None:
        self.workers = tuple(workers)
        self._jobs: SimpleQueue[Callable[[Worker], None] | None] = SimpleQueue()
        self._closed = False
        for worker in self.workers:
            worker.start()
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name=name, daemon=True) for worker in self.workers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that no worker has yet."""
        return self._jobs.qsize()

    def submit(self, job: Callable[[Worker], T]) -> Future[T]:
        """Have a job done by the next free worker; after `close`, a request of it is given up at once."""
        future: Future[T] = Future()

        def do(worker: Worker) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(job(worker))
            # The border of the thread: whoever waits for the future is told.
            except BaseException as e:
                future.set_exception(e)

        if self._closed:
            do(self.workers[0])
        else:
            self._jobs.put(do)
        return future

    def close(self) -> None:
        """End the workers; jobs in the queue find that they have left."""
        if self._closed:
            return
        self._closed = True
        # All at the same time: a process that uses a GPU takes a second to be gone.
        for worker in self.workers:
            worker.leave()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        for worker in self.workers:
            worker.close()

    def _serve(self, worker: Worker) -> None:
        while (job := self._jobs.get()) is not None:
            job(worker)
