"""A board that a tracker lends: a candidate is sent there, checked against the reference and timed.

A board needs TVM's RPC server alone (`python -m tvm.exec.rpc_server`, or the one in C++), and no Python of ours. Each
candidate has a session, which the server runs in a process of its own: a hang ends that process. A crash also ends the
server itself, if it is TVM 0.27's in Python: keep it under a supervisor that starts it again, such as systemd.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import tvm
from tvm import rpc

from relaxtune.pipeline.processes.machine_faults import is_of_the_machine
from relaxtune.pipeline.tuning.measure.arguments import make_arrays, with_column_sums, with_partial_sums
from relaxtune.pipeline.tuning.measure.backend import Outcome, Unmeasured
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions, is_hopeless, runs_for, time_adaptively
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.tuning.measure.wrong_result import find_mismatch
from relaxtune.tuning_db.records import Environment, Status

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ENTRY = "main"
_TRIES = 2


def boards_of(tracker: tuple[str, int], key: str) -> int:
    """Return how many boards a tracker has under a key.

    Raises
    ------
    RuntimeError, OSError
        The tracker does not answer.
    """
    found = rpc.connect_tracker(*tracker).summary()["server_info"]
    return sum(one["key"].removeprefix("server:") == key for one in found)


class RpcMeasurer:
    """One board of a tracker's key.

    Parameters
    ----------
    tracker : tuple of str and int
        Host and port.
    key : str
        Under which the boards of one model are registered.
    environment : Environment
        What outcomes are stamped with.
    options, timeout_s, stop, seed
        See `MeasuringProcess`.
    name : str
        For logs and figures.
    """

    def __init__(
        self,
        tracker: tuple[str, int],
        key: str,
        environment: Environment,
        options: MeasureOptions,
        timeout_s: float,
        stop: StopSignal,
        seed: int,
        name: str,
    ) -> None:
        self.name, self.host, self.restarts = name, name, 0
        self._tracker, self._key = tracker, key
        self._environment, self._options, self._timeout_s = environment, options, timeout_s
        self._stop, self._seed = stop, seed
        self._left = threading.Event()
        self._expected: dict[tuple[str, int], list[np.ndarray]] = {}
        self._best_s: dict[str, float] = {}

    def ready(self) -> bool:
        """Whether it was not left: the tracker tells when a board is free."""
        return not self._left.is_set()

    def prepare_reference(self, spec: WorkloadSpec) -> None:
        """Do nothing: the first candidate computes it."""

    def measure(self, artifact: BuiltArtifact, spec: WorkloadSpec) -> Outcome:
        """Check and time a candidate."""
        if self._stop.due or self._left.is_set():
            return Outcome(Unmeasured.STOPPED, error="the run was stopped")
        began = time.monotonic()
        outcome = self._measure(artifact, spec)
        return replace(outcome, duration_s=time.monotonic() - began, environment=self._environment)

    def compare(self, artifacts: Sequence[BuiltArtifact], spec: WorkloadSpec, rounds: int) -> Sequence[Outcome] | None:
        """Return None: sessions come one after another, so that candidates cannot be timed alternately."""
        return None

    def leave(self) -> None:
        """Give up everything after what is in hand."""
        self._left.set()

    def close(self) -> None:
        """Do nothing: no session is open."""

    def _measure(self, artifact: BuiltArtifact, spec: WorkloadSpec) -> Outcome:
        for seed in (self._seed, self._seed + 1):
            if spec.reference is None or (spec.workload, seed) in self._expected:
                continue
            made = self._in_session(spec.reference, partial(self._run, spec=spec, seed=seed))
            if isinstance(made, Outcome):
                if isinstance(made.status, Unmeasured):
                    return made
                told = f"the reference cannot be computed: {made.error}"
                return Outcome(Status.RUN_ERROR, error=told, no_reference=True)
            self._expected[spec.workload, seed] = made
        return self._in_session(artifact, partial(self._time, spec=spec))

    def _in_session(self, artifact: BuiltArtifact, work: Callable[[rpc.RPCSession, str], T]) -> T | Outcome:
        """Return what some work returns in a session of its own with the artifact sent there, or why there is none."""
        try:
            session = self._request()
        except (RuntimeError, OSError) as e:
            return Outcome(Unmeasured.LOST, error=f"no board {self._key} at {self._tracker[0]}:{self._tracker[1]}: {e}")
        began = time.monotonic()
        try:
            name = f"{artifact.sha256}.so"
            content = artifact.content
            session.upload(bytearray(content if isinstance(content, bytes) else Path(content).read_bytes()), name)
            return work(session, name)
        # The border to another machine: TVM gives errors of the kernel, of the server and of the wire the same types.
        except (RuntimeError, OSError, tvm.error.InternalError) as e:
            lines = str(e).strip().splitlines()
            told = lines[-1] if lines else type(e).__name__
        finally:
            # A board has one session: the next is not given before this one is closed.
            with contextlib.suppress(RuntimeError, OSError, tvm.error.InternalError):
                session.get_function("CloseRPCConnection")()
        return self._failure(told, time.monotonic() - began)

    def _failure(self, told: str, seconds: float) -> Outcome:
        """Return what a broken session means: the candidate's fault if the board answers again."""
        if seconds >= self._timeout_s:
            told = f"the session ended after {self._timeout_s:g} s (run_timeout_s): {told}"
            return Outcome(Status.TIMEOUT, error=told)
        try:
            self._request().get_function("CloseRPCConnection")()
        except (RuntimeError, OSError) as e:
            return Outcome(Unmeasured.LOST, error=f"{self.name} is gone: {told}; {e}")
        self.restarts += 1
        return Outcome(Unmeasured.LOST if is_of_the_machine(told) else Status.RUN_ERROR, error=told)

    def _request(self) -> rpc.RPCSession:
        if not boards_of(self._tracker, self._key):
            # A request would wait for ever.
            raise OSError("none is registered any more")
        session = rpc.connect_tracker(*self._tracker)
        return session.request(self._key, session_timeout=math.ceil(self._timeout_s), max_retry=_TRIES)

    def _arguments(self, session: rpc.RPCSession, spec: WorkloadSpec, seed: int) -> list[tvm.runtime.Tensor]:
        arrays = make_arrays(spec.arguments, spec.index_ranges, seed)
        arrays = with_column_sums(with_partial_sums(arrays, spec.partial_sums), spec.column_sums)
        device = self._device(session)
        tensors = []
        for array, argument in zip(arrays, spec.arguments, strict=True):
            tensor = tvm.runtime.empty(argument.shape, argument.dtype, device)
            tensor.copyfrom(array)
            tensors.append(tensor)
        return tensors

    def _device(self, session: rpc.RPCSession) -> tvm.runtime.Device:
        return session.device(self._environment.device_kind, 0)

    def _run(self, session: rpc.RPCSession, file: str, spec: WorkloadSpec, seed: int) -> list[np.ndarray]:
        tensors = self._arguments(session, spec, seed)
        session.load_module(file)[_ENTRY](*tensors)
        self._device(session).sync()
        return [tensors[position].numpy() for position in spec.outputs]

    def _time(self, session: rpc.RPCSession, file: str, spec: WorkloadSpec) -> Outcome:
        began = time.monotonic()
        mismatch = self._mismatch(self._run(session, file, spec, self._seed), spec, self._seed)
        if mismatch is not None:
            return Outcome(Status.WRONG_RESULT, error=mismatch)
        elapsed = time.monotonic() - began
        best_s = min(self._best_s.get(spec.workload, math.inf), spec.best_s or math.inf)
        tensors, module = self._arguments(session, spec, self._seed), session.load_module(file)

        def timed(number: int, repeats: int) -> list[float]:
            evaluator = module.time_evaluator(_ENTRY, self._device(session), number=number, repeat=repeats)
            return [max(float(value), 1e-9) for value in evaluator(*tensors).results]

        if is_hopeless(elapsed, best_s, self._options):
            return Outcome(Status.OK, (elapsed,))
        seconds = time_adaptively(timed, lambda one: runs_for(one, self._options.min_repeat_s), best_s, self._options)
        median = float(np.median(seconds))
        if median < self._best_s.get(spec.workload, math.inf):
            fresh = self._mismatch(self._run(session, file, spec, self._seed + 1), spec, self._seed + 1)
            if fresh is not None:
                return Outcome(Status.WRONG_RESULT, error=f"on other inputs, {fresh}")
            self._best_s[spec.workload] = median
        return Outcome(Status.OK, tuple(seconds))

    def _mismatch(self, outputs: Sequence[np.ndarray], spec: WorkloadSpec, seed: int) -> str | None:
        """Return how outputs differ from the reference, if they do."""
        expected = self._expected.get((spec.workload, seed), ())
        for position, got, wanted in zip(spec.outputs, outputs, expected, strict=False):
            found = find_mismatch(got, wanted, spec.tolerance_of(position))
            if found is not None:
                return f"output parameter {position}: {found}"
        return None
