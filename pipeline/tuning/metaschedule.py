"""MetaSchedule's builders and runners behind our protocol, and results as its search takes them.

Only here do its types of building and measuring meet ours. Its interfaces carry a module and the shapes of arguments:
such a runner checks no result and tells failures by a text.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tvm
from tvm.s_tir import meta_schedule as ms

from relaxtune.pipeline.tuning.measure.backend import (
    Builder,
    Built,
    Capabilities,
    MeasureBackend,
    OnBuilt,
    OnCompared,
    OnMeasured,
    Outcome,
    Unmeasured,
)
from relaxtune.pipeline.tuning.measure.recipe import Buildable, scheduled
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.schedules.templates.base import TemplateError
from relaxtune.tuning_db.metaschedule import REPLAY_ERRORS
from relaxtune.tuning_db.records import Environment, Status


def runner_results(seconds: Sequence[Sequence[float] | None]) -> list[ms.runner.RunnerResult]:
    """Return raw seconds as MetaSchedule's search and cost model take them; None is a failure."""
    return [
        ms.runner.RunnerResult(list(values), None) if values else ms.runner.RunnerResult(None, "failed")
        for values in seconds
    ]


class MetaScheduleBuilder(Builder):
    """A builder of MetaSchedule's interface; it gets what has gathered, in batches.

    Parameters
    ----------
    builder : ms.builder.Builder
        It is not closed here.
    batch : int
        Candidates that it gets at a time.
    """

    def __init__(self, builder: ms.builder.Builder, batch: int) -> None:
        super().__init__()
        self._builder = builder
        self._batch = batch
        self._jobs: queue.SimpleQueue[tuple[ms.builder.BuilderInput, OnBuilt] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="relaxtune-build", daemon=True)
        self._thread.start()

    @property
    def capacity(self) -> int:
        """Candidates that the builder gets at a time."""
        return self._batch

    @property
    def waiting(self) -> int:
        """Candidates that the builder was not given yet."""
        return self._jobs.qsize()

    def submit(self, what: Buildable, target: tvm.target.Target, on_built: OnBuilt) -> None:
        """Build a candidate; `on_built` is called in another thread."""
        try:
            self._jobs.put((ms.builder.BuilderInput(scheduled(what), target), on_built))
        except (TemplateError, *REPLAY_ERRORS) as e:
            on_built(Built(Status.BUILD_ERROR, error=f"{type(e).__name__}: {e}"))

    def discard(self, artifact: BuiltArtifact) -> None:
        """Remove an artifact's file, if it is on this machine."""
        with contextlib.suppress(OSError):
            Path(str(artifact.content)).unlink()

    def close(self) -> None:
        """End the thread after the present batch."""
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
                results = [_built(result) for result in self._builder.build([item for item, _ in batch])]
            except Exception as e:
                results = [Built(Unmeasured.BROKEN, error=f"the builder failed: {e}")] * len(batch)
            self.clock.leave()
            share_s = (time.monotonic() - began) / len(batch)
            for (_, on_built), built in zip(batch, results, strict=True):
                on_built(Built(built.status, built.artifact, built.error, share_s))


class MetaScheduleBackend(MeasureBackend):
    """A runner of MetaSchedule's interface, such as `RPCRunner`.

    Parameters
    ----------
    runner : ms.runner.Runner
        It is not closed here.
    environment : Environment
        The device that it measures on.
    target_kind : str
        Kind of the target.
    capacity : int
        Candidates that it is given at a time.
    """

    def __init__(self, runner: ms.runner.Runner, environment: Environment, target_kind: str, capacity: int = 1) -> None:
        self._runner = runner
        self._environment = environment
        self._kind = target_kind
        self._capacity = capacity
        self._threads = ThreadPoolExecutor(capacity, thread_name_prefix="relaxtune-runner")

    @property
    def capabilities(self) -> Capabilities:
        """What it measures on."""
        environment = self._environment
        return Capabilities(
            environment.device_kind,
            environment.device_name,
            checks_results=False,
            compares=False,
            undisturbed=environment.device_kind != "cpu",
        )

    @property
    def capacity(self) -> int:
        """Candidates that it measures at the same time."""
        return self._capacity

    def submit(self, artifact: BuiltArtifact, spec: WorkloadSpec, on_measured: OnMeasured) -> None:
        """Let the runner time a candidate."""
        self._threads.submit(lambda: on_measured(self._measure(artifact, spec)))

    def prepare_reference(self, spec: WorkloadSpec) -> None:
        """Do nothing: such a runner compares nothing with a reference."""

    def compare(
        self, artifacts: Sequence[BuiltArtifact], spec: WorkloadSpec, rounds: int, on_compared: OnCompared
    ) -> None:
        """Tell that such a runner cannot time candidates alternately."""
        on_compared(None)

    def close(self) -> None:
        """Wait for the measurements in hand."""
        self._threads.shutdown()

    def _measure(self, artifact: BuiltArtifact, spec: WorkloadSpec) -> Outcome:
        info = [ms.arg_info.TensorInfo(one.dtype, one.shape) for one in spec.arguments]
        began = time.monotonic()
        # The border of the thread: an error of a foreign runner must reach the run.
        try:
            (future,) = self._runner.run([ms.runner.RunnerInput(str(artifact.content), self._kind, info)])
            result = future.result()
        except Exception as e:
            return Outcome(Unmeasured.BROKEN, error=f"the runner failed: {e}")
        error = None if result.error_msg is None else str(result.error_msg)
        return Outcome(
            Status.OK if error is None else Status.RUN_ERROR,
            tuple(float(value) for value in result.run_secs) if error is None else (),
            error,
            time.monotonic() - began,
            environment=self._environment,
        )


def _built(result: ms.builder.BuilderResult) -> Built:
    if result.error_msg is not None:
        return Built(Status.BUILD_ERROR, error=str(result.error_msg))
    path = str(result.artifact_path)
    # The file of a builder on another machine cannot be read here: its name tells artifacts apart.
    content = Path(path).read_bytes() if Path(path).exists() else path.encode()
    return Built(Status.OK, BuiltArtifact(path, hashlib.sha256(content).hexdigest()))
