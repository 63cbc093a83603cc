"""Building and measuring a batch of candidates through MetaSchedule's builder and runner interfaces."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm.s_tir import meta_schedule as ms

from pipeline.tuning.failure import CANCELLED, read_failure
from pipeline.tuning.note import CandidateNote, attach_note
from tuning_db.records import Status

# Workload and sha256 of the binary.
_CodeKey = tuple[str, str]


@dataclass(frozen=True)
class Job:
    """A scheduled module to build and measure, and what its arguments are."""

    mod: tvm.ir.IRModule
    args_info: Sequence[ms.arg_info.ArgInfo]
    note: CandidateNote


@dataclass(frozen=True)
class Outcome:
    """What came of one job: its raw seconds when `status` is ok, else the error text."""

    status: Status
    seconds: tuple[float, ...] = ()
    error: str | None = None
    duration_s: float = 0.0


@dataclass(frozen=True)
class _Started:
    """A built job: its artifact, its code's key, and the result to come; None when equal code is measured already."""

    index: int
    artifact: str
    key: _CodeKey | None
    future: ms.runner.RunnerFuture | None


class Evaluator:
    """Builds and measures batches; candidates of a workload that compiled to the same binary are measured once.

    Parameters
    ----------
    builder, runner : ms.builder.Builder, ms.runner.Runner
        MetaSchedule's interfaces: processes of this machine, or a cluster.
    target : Target
        What is compiled for.
    chunk : int or None
        Build so many at a time and measure those while the next are built; None measures after all are built.
    seconds : dict
        Where the time of the phases `build` and `measure` is added.
    """

    def __init__(
        self,
        builder: ms.builder.Builder,
        runner: ms.runner.Runner,
        target: tvm.target.Target,
        chunk: int | None,
        seconds: dict[str, float],
    ) -> None:
        self._builder = builder
        self._runner = runner
        self._target = target
        self._chunk = chunk
        self._seconds = seconds
        # Valid measurements by workload and sha256 of the binary.
        self._known: dict[_CodeKey | None, Outcome | None] = {}

    def build(self, mods: Sequence[tvm.ir.IRModule], target: tvm.target.Target) -> list[ms.builder.BuilderResult]:
        """Return the artifacts of modules that are not measured, such as references."""
        began = time.monotonic()
        results = self._builder.build([ms.builder.BuilderInput(mod, target) for mod in mods])
        self._seconds["build"] += time.monotonic() - began
        return list(results)

    def evaluate(
        self, jobs: Sequence[Job], on_outcome: Callable[[int, Outcome], None] = lambda index, outcome: None
    ) -> list[Outcome | None]:
        """Return the outcome of every job, in order; None for those that were given up because the run is stopped.

        Parameters
        ----------
        jobs : sequence of Job
            The candidates.
        on_outcome : callable
            Told index and outcome of each as soon as it is known.
        """
        outcomes: list[Outcome | None] = [None] * len(jobs)
        began = time.monotonic()
        started: list[_Started] = []
        found = dict(self._known)
        step = self._chunk or max(1, len(jobs))
        for first in range(0, len(jobs), step):
            started += self._start(jobs, range(first, min(first + step, len(jobs))), outcomes, on_outcome, found)
        built = time.monotonic()
        self._seconds["build"] += built - began
        share = (built - began) / max(1, len(jobs))
        for one in started:
            waited = time.monotonic()
            if one.future is not None:
                found[one.key] = _measured(one.future.result(), share + time.monotonic() - waited)
            outcome = found[one.key]
            outcomes[one.index] = outcome
            _remove(one.artifact)
            if outcome is None:
                continue
            if outcome.status is Status.OK and one.key is not None:
                self._known[one.key] = outcome
            on_outcome(one.index, outcome)
        self._seconds["measure"] += time.monotonic() - built
        return outcomes

    def _start(
        self,
        jobs: Sequence[Job],
        indices: range,
        outcomes: list[Outcome | None],
        on_outcome: Callable[[int, Outcome], None],
        found: dict[_CodeKey | None, Outcome | None],
    ) -> list[_Started]:
        """Build some jobs and hand those that built to the runner, but for those whose code is in `found`."""
        began = time.monotonic()
        inputs = [ms.builder.BuilderInput(attach_note(jobs[i].mod, jobs[i].note), self._target) for i in indices]
        results = self._builder.build(inputs)
        share = (time.monotonic() - began) / len(inputs)
        started: list[_Started] = []
        for index, result in zip(indices, results, strict=True):
            if result.error_msg is None:
                path = str(result.artifact_path)
                key = _code_key(jobs[index], path)
                future = None
                if key is None or key not in found:
                    run = ms.runner.RunnerInput(path, self._target.kind.name, jobs[index].args_info)
                    (future,) = self._runner.run([run])
                    found[key] = None
                started.append(_Started(index, path, key, future))
            elif not str(result.error_msg).startswith(CANCELLED):
                status, error = read_failure(str(result.error_msg), Status.BUILD_ERROR)
                outcome = Outcome(status, (), error, share)
                outcomes[index] = outcome
                on_outcome(index, outcome)
        return started


def _code_key(job: Job, artifact: str) -> _CodeKey | None:
    """Return workload and sha256 of a built job; None when its file is on another machine."""
    try:
        return job.note.workload, hashlib.sha256(Path(artifact).read_bytes()).hexdigest()
    except OSError:
        return None


def _measured(result: ms.runner.RunnerResult, duration_s: float) -> Outcome | None:
    if result.error_msg is None:
        return Outcome(Status.OK, tuple(float(value) for value in result.run_secs), None, duration_s)
    text = str(result.error_msg)
    if text.startswith(CANCELLED):
        return None
    status, error = read_failure(text, Status.RUN_ERROR)
    return Outcome(status, (), error, duration_s)


def _remove(artifact: str) -> None:
    for suffix in (".so", ".json"):
        with contextlib.suppress(OSError):
            Path(artifact).with_suffix(suffix).unlink()
