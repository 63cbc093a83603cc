"""The process of ONNX Runtime, seen from the outside: one for each of ours, started when it is first asked.

One is kept for the whole command. Its start takes 0.3 s, and two sessions of a model share its weights there.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from concurrent.futures import Future

from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.onnx_runtime.requests import Close, Describe, Description, Request
from relaxtune.pipeline.processes.process import ChildDiedError, ChildProcess
from relaxtune.pipeline.processes.watch import Watch

logger = logging.getLogger(__name__)

_MODULE = "relaxtune.pipeline.onnx_runtime.worker"
# It would write a file `.ses` into the temporary folder, and tell its makers of sessions.
_ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1"}
_LOOK_S = 1.0
# What imports and the largest graphs take is a tenth of this.
ANSWER_CPU_S = 1800.0


class LostError(Exception):
    """The process is gone; the message says how, as what ONNX Runtime did.

    `from_outside` tells that the user or the system ended it, and no graph.
    """

    def __init__(self, message: str, *, from_outside: bool = False) -> None:
        super().__init__(message)
        self.from_outside = from_outside


class RestartedError(Exception):
    """The process was started again since a session was opened there."""


class OnnxRuntimeProcess:
    """The process; it is started again when it is asked after it was lost. Safe between threads."""

    def __init__(self) -> None:
        #: Held while requests belong together.
        self.lock = threading.RLock()
        self._child: ChildProcess | None = None
        self._over = threading.Event()
        self._unused: list[int] = []
        self._described: Description | None = None
        self._count = 0
        self.generation = 0

    def next_number(self) -> int:
        """Return a number that no session and no weights have."""
        with self.lock:
            self._count += 1
            return self._count

    def description(self) -> Description:
        """Return ONNX Runtime's version and providers.

        Raises
        ------
        PipelineError
            It does not start.
        """
        if self._described is None:
            try:
                found = self._ask_again_where_killed(Describe())
            except LostError as error:
                raise PipelineError(f"ONNX Runtime does not start: {error}") from error
            assert isinstance(found, Description)
            self._described = found
        return self._described

    def ask(self, request: Request, generation: int | None = None) -> object:
        """Return the answer to a request.

        Parameters
        ----------
        request : Request
            One of `requests`.
        generation : int or None
            The one in which its session was opened; that session is gone in a later one.

        Raises
        ------
        LostError
            The process died, or was killed since it gave no answer.
        RestartedError
            It was started in a later generation.
        """
        with self.lock:
            try:
                return self._answer(request, generation)
            except ChildDiedError as error:
                self._end()
                raise LostError(str(error), from_outside=error.from_outside) from error
            except (LostError, RestartedError):
                raise
            except BaseException:
                # Its answer may come later, when something else is asked.
                self._end()
                raise

    def _ask_again_where_killed(self, request: Request) -> object:
        """Return the answer to a request that needs no session; asked twice where something else ended the process."""
        try:
            return self.ask(request)
        except LostError as error:
            if not error.from_outside:
                raise
            logger.warning("ONNX Runtime's process is started again: %s", error)
            return self.ask(request)

    def forget(self, session: int) -> None:
        """Let a session go with the next request; a destructor may call this at any moment."""
        self._unused.append(session)

    def close(self) -> None:
        """End the process."""
        with self.lock:
            self._end()

    def _answer(self, request: Request, generation: int | None) -> object:
        child = self._started()
        if generation is not None and generation != self.generation:
            raise RestartedError
        if self._unused:
            unused, self._unused = tuple(self._unused), []
            child.send(Close(unused))
            self._receive(child)
        child.send(request)
        return self._receive(child)

    def _started(self) -> ChildProcess:
        if self._child is None:
            self.generation += 1
            self._unused.clear()
            self._over = threading.Event()
            made: Future[ChildProcess] = Future()
            threading.Thread(target=_start, args=(made, self._over), daemon=True, name="onnxruntime-start").start()
            self._child = made.result()
            self._receive(self._child)
        return self._child

    def _receive(self, child: ChildProcess) -> object:
        watch: Watch | None = None
        while not child.connection.poll(_LOOK_S):
            watch = watch or Watch(child.pid, ANSWER_CPU_S)
            stuck = watch.stuck()
            if stuck is not None:
                self._end()
                raise LostError(stuck)
        reply = child.receive()
        if reply.error is not None:
            raise RuntimeError(f"the process of ONNX Runtime failed:\n{reply.error}")
        return reply.value

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None
            self._over.set()


def _start(made: Future[ChildProcess], over: threading.Event) -> None:
    """Start the process and stay: the system ends a process when the thread that started it does."""
    try:
        made.set_result(ChildProcess(_MODULE, _ENVIRONMENT))
    except BaseException as error:
        made.set_exception(error)
        return
    over.wait()


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
