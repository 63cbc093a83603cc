"""Builders as MetaSchedule knows them, and as this engine asks them: candidate by candidate, answered when built."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import Protocol

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.tuning.local.build_pool import BuilderLimits, BuildPool, Built, OnBuilt
from relaxtune.pipeline.tuning.measure.clock import BusyClock
from relaxtune.pipeline.tuning.measure.failure import StopSignal


class AsyncBuilder(Protocol):
    """What builds candidates, each answered as soon as it is built."""

    clock: BusyClock
    restarts: int

    @property
    def waiting(self) -> int:
        """Candidates that nobody builds yet."""
        ...

    def submit(self, item: ms.builder.BuilderInput, on_built: OnBuilt) -> None:
        """Build a candidate and tell `on_built`, in another thread."""
        ...

    def close(self) -> None:
        """End what was started here."""
        ...


@derived_object
class PoolBuilder(ms.builder.PyBuilder):  # type: ignore[misc]
    """MetaSchedule's builder interface over a `BuildPool`.

    `close` ends the processes; `contextlib.closing` sees to it.

    Candidates may carry a `pipeline.tuning.measure.notes.CandidateNote`, which is written beside the artifact.
    """

    def __init__(
        self,
        workers: int,
        directory: Path,
        limits: BuilderLimits | None = None,
        stop: StopSignal | None = None,
    ) -> None:
        super().__init__()
        self.pool = BuildPool(workers, directory, limits or BuilderLimits(), StopSignal() if stop is None else stop)

    def build(self, build_inputs: list[ms.builder.BuilderInput]) -> list[ms.builder.BuilderResult]:
        """Return one result per input, in order."""
        return [built.result for built in build_all(self.pool, build_inputs)]

    def close(self) -> None:
        """End the pool's processes."""
        self.pool.close()


class BatchingBuilder:
    """A builder of MetaSchedule's interface, such as a cluster's, asked from a thread for what has gathered.

    Parameters
    ----------
    builder : ms.builder.Builder
        It is not closed here.
    batch : int
        Candidates it is given at a time.
    """

    def __init__(self, builder: ms.builder.Builder, batch: int) -> None:
        self.clock = BusyClock()
        self.restarts = 0
        self._builder = builder
        self._batch = batch
        self._jobs: queue.SimpleQueue[tuple[ms.builder.BuilderInput, OnBuilt] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="relaxtune-build", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Candidates that the builder was not given yet."""
        return self._jobs.qsize()

    def submit(self, item: ms.builder.BuilderInput, on_built: OnBuilt) -> None:
        """Build a candidate and tell `on_built`, in another thread."""
        self._jobs.put((item, on_built))

    def close(self) -> None:
        """End the thread after the batch it is at."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self._jobs.get()) is not None:
            batch = [first]
            while len(batch) < self._batch and not self._jobs.empty():
                more = self._jobs.get()
                if more is None:
                    self._jobs.put(None)
                    break
                batch.append(more)
            began = time.monotonic()
            self.clock.enter()
            # The border of the thread: an error of a foreign builder must reach the run.
            try:
                built = [Built(result) for result in self._builder.build([item for item, _ in batch])]
            except Exception as e:
                failed = ms.builder.BuilderResult(None, f"the builder failed: {e}")
                built = [Built(failed, broken=e)] * len(batch)
            self.clock.leave()
            share = (time.monotonic() - began) / len(batch)
            for (_, on_built), one in zip(batch, built, strict=True):
                on_built(Built(one.result, share, one.broken))


def build_all(builder: AsyncBuilder, items: list[ms.builder.BuilderInput]) -> list[Built]:
    """Return what came of building some candidates, in order.

    Raises
    ------
    Exception
        What broke the builder.
    """
    done: queue.SimpleQueue[tuple[int, Built]] = queue.SimpleQueue()
    for index, item in enumerate(items):
        builder.submit(item, lambda built, index=index: done.put((index, built)))  # type: ignore[misc]
    found = dict(done.get() for _ in items)
    for built in found.values():
        if built.broken is not None:
            raise built.broken
    return [found[index] for index in range(len(items))]
