"""The process of ONNX Runtime, seen from the outside: one for each of ours, started by its first request.

It is kept for the whole command. Its start takes 0.3 s, and two sessions of a model share its weights there.
"""

from __future__ import annotations

import atexit
import os
import threading

from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.onnx_runtime.requests import Close, Describe, Description, Request
from relaxtune.pipeline.workers.limits import Limits
from relaxtune.pipeline.workers.replies import WorkerError
from relaxtune.pipeline.workers.worker import Worker

_MODULE = "relaxtune.pipeline.onnx_runtime.worker"
# It would write a file `.ses` into the temporary folder, and tell its makers of sessions.
_ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1"}
# Imports and the largest graphs take a tenth of this.
ANSWER_CPU_S = 1800.0


class RestartedError(Exception):
    """The process was started again since a session was opened there."""


class OnnxRuntimeProcess:
    """The process; a request after its loss starts it again. Safe between threads."""

    def __init__(self) -> None:
        #: Held while requests belong together.
        self.lock = threading.RLock()
        self._worker = Worker(_MODULE, _ENVIRONMENT)
        self._unused: list[int] = []
        self._described: Description | None = None
        self._count = 0

    @property
    def generation(self) -> int:
        """The number of the present process."""
        return self._worker.starts

    def next_number(self) -> int:
        """Return a number that no session and no weights have."""
        with self.lock:
            self._count += 1
            return self._count

    def description(self) -> Description:
        """Return ONNX Runtime's version and providers; raise `PipelineError` if it does not start."""
        if self._described is None:
            try:
                found = self.ask(Describe())
            except WorkerError as error:
                raise PipelineError(f"ONNX Runtime does not start: {error}") from error
            assert isinstance(found, Description)
            self._described = found
        return self._described

    def ask(self, request: Request, generation: int | None = None) -> object:
        """Return the answer to a request.

        `generation` is the one in which its session was opened; that session is gone in a later one.

        Raises `WorkerError`: the process died, or was killed since it gave no answer; `RestartedError`: it was started
        in a later generation.
        """
        with self.lock:
            if generation is not None and generation != self.generation:
                raise RestartedError
            if self._unused:
                unused, self._unused = tuple(self._unused), []
                self._answer(Close(unused))
            return self._answer(request)

    def forget(self, session: int) -> None:
        """Let a session go with the next request; a destructor may call this at any moment."""
        self._unused.append(session)

    def close(self) -> None:
        """End the process."""
        self._worker.close()

    def _answer(self, request: Request) -> object:
        # A session is opened again by its owner.
        reply = self._worker.ask(request, Limits(cpu_s=ANSWER_CPU_S), again=isinstance(request, Describe))
        if reply.error is not None:
            raise RuntimeError(f"the process of ONNX Runtime failed:\n{reply.error}")
        return reply.value


_lock = threading.Lock()
_processes: dict[int, OnnxRuntimeProcess] = {}


def onnx_runtime() -> OnnxRuntimeProcess:
    """Return the process of ONNX Runtime that belongs to this one."""
    with _lock:
        found = _processes.get(os.getpid())
        if found is None:
            found = _processes[os.getpid()] = OnnxRuntimeProcess()
            atexit.register(found.close)
        return found
