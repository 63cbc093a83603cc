"""A plan carried out while its events are iterated over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

from relaxtune.pipeline.batch.driver import run_batch
from relaxtune.pipeline.batch.events import BatchEvent, BatchResult
from relaxtune.pipeline.batch.plan import Plan
from relaxtune.pipeline.tuning.measure.stop import StopSignal


class BatchRun:
    """A plan to carry out: begun when it is iterated over, or when its result is asked for.

    A loop that is left, by `break` or by Ctrl-C, ends the run: what is finished is kept.
    """

    def __init__(self, plan: Plan, *, fail_fast: bool = False, cluster: str | None = None) -> None:
        self._plan = plan
        self._fail_fast = fail_fast
        self._cluster = cluster
        self._result: BatchResult | None = None

    def __iter__(self) -> Iterator[BatchEvent]:
        """Carry the plan out, in a thread of its own, and yield what happens."""
        stop = StopSignal()
        events: SimpleQueue[BatchEvent | None] = SimpleQueue()
        errors: list[BaseException] = []

        def carry_out() -> None:
            try:
                self._result = run_batch(
                    self._plan, fail_fast=self._fail_fast, on_event=events.put, cluster=self._cluster, stop=stop
                )
            except BaseException as e:
                errors.append(e)
            finally:
                events.put(None)

        thread = threading.Thread(target=carry_out, name="relaxtune-batch", daemon=True)
        thread.start()
        over = False
        try:
            while (event := events.get()) is not None:
                yield event
            over = True
        finally:
            if not over:
                stop.request()
            thread.join()
        if errors:
            raise errors[0]

    def result(self) -> BatchResult:
        """Return what became of the plan, which is carried out first if that was not done.

        Raises
        ------
        UsageError, ArtifactError, TuningDatabaseError, InterruptedEarlyError
            See `run_batch`.
        """
        if self._result is None:
            self._result = run_batch(self._plan, fail_fast=self._fail_fast, cluster=self._cluster)
        return self._result
