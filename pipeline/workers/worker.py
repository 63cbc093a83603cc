"""A warm child process under supervision: it answers one request at a time and may be killed at any moment.

    ask ── start or fork ── send ── deadline, memory, stop ── receive ──▶ Reply
              ▲                            │
              └──── once more where the machine ended the child

A child leads its own process group, so that everything it started dies with it, and is in no terminal's session, so
that a Ctrl-C does not reach it. The system kills it when this process ends, however that happens.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from relaxtune.pipeline.workers.child import ChildSpec
from relaxtune.pipeline.workers.fork_server import Forks
from relaxtune.pipeline.workers.limits import Limits, Watch
from relaxtune.pipeline.workers.process import Afresh, Process
from relaxtune.pipeline.workers.replies import (
    Reply,
    WorkerDiedError,
    WorkerError,
    WorkerKilledError,
    WorkerStartError,
    WorkerStoppedError,
)

logger = logging.getLogger(__name__)

# A start that fails, and a request whose child the machine ended, are tried once more.
_TRIES = 2
# Seconds for a child's imports.
_START_TIMEOUT_S = 120.0
# Seconds between two looks at limits, and at whether the user stopped the run.
_POLL_S = 0.1


class Worker:
    """Runs a module in a child process, which is replaced when it dies or goes beyond a limit.

    One thread at a time has its request answered. Any thread may make it leave.

    `start()` of the module does the slow imports and returns the function that answers a request. The child has the
    variables of `environment` over those of this process, is nicer by `niceness`, and may use a GPU with `gpu`.
    `server` forks it; without one, or where it is gone, the child is started afresh, by the interpreter `python` (None:
    this one). Once `stop` returns true, a request is given up.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str] | None = None,
        *,
        server: Forks | None = None,
        niceness: int = 0,
        gpu: bool = False,
        python: Path | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._spec = ChildSpec(module, dict(environment or {}), niceness, gpu, python)
        self._server, self._stop, self._left = server, stop, False
        self._child: Process | None = None
        self._asking, self._changing = threading.RLock(), threading.Lock()
        #: How often a child was started.
        self.starts = 0
        #: Requests that the present child has answered.
        self.answered = 0
        #: Seconds that the last request took its child.
        self.seconds = 0.0

    @property
    def pid(self) -> int:
        """Process id of the present child; 0 without one."""
        child = self._child
        return 0 if child is None else child.pid

    @property
    def restarts(self) -> int:
        """How often the child was replaced."""
        return max(0, self.starts - 1)

    def start(self) -> None:
        """Start the child and return at once: its imports go on meanwhile."""
        with self._asking:
            if self._child is None and not self._stopped:
                try:
                    self._begin(self._server)
                except OSError as e:
                    logger.debug("no process can be started now, the next request tries again: %s", e)

    def ask(self, request: object, limits: Limits | None = None, *, again: bool = True) -> Reply:
        """Return the answer to a request.

        Where the machine ended the child, another one without earlier requests gets the request, unless `again` is
        False.

        Raises `WorkerDiedError`: the child ended: by itself, or by the machine once more; `WorkerKilledError`: it went
        beyond a limit; `WorkerStoppedError`: the run was stopped; `WorkerStartError`: no child can be started.
        """
        with self._asking:
            for left in reversed(range(_TRIES)):
                child, sent = self._ready(), False
                self.seconds = 0.0
                try:
                    child.send(request)
                    sent = True
                    reply = self._receive(child, limits or Limits())
                except WorkerDiedError as e:
                    self.replace()
                    # A child that died idle, or that the machine ended, says nothing about the request.
                    if not (left and again and (e.from_outside or not sent)):
                        raise
                    logger.warning("the process of %s is started again: %s", self._spec.module, e)
                except BaseException:
                    # Where the child lives, its answer would be taken for that to the next request.
                    self.replace()
                    raise
                else:
                    self.answered += 1
                    return reply
            raise AssertionError("the last try returns or raises")

    def replace(self) -> None:
        """End the child and start another one."""
        with self._asking:
            self._end()
            self.start()

    def leave(self) -> None:
        """Give up the request in hand and all later ones, within a moment; safe between threads."""
        self._left = True
        with self._changing:
            if self._child is not None:
                self._child.signal()

    def close(self) -> None:
        """End the child and everything in its group."""
        self.leave()
        with self._asking:
            self._end()

    @property
    def _stopped(self) -> bool:
        return self._left or self._stop()

    def _ready(self) -> Process:
        """Return a child that has done its imports."""
        failure: WorkerError | OSError | None = None
        for _ in range(_TRIES):
            if self._stopped:
                raise WorkerStoppedError("the run was stopped")
            try:
                # A server whose children do not start is done without.
                child = self._child or self._begin(self._server if failure is None else None)
                if child.ready:
                    return child
                self._receive(child, Limits(timeout_s=_START_TIMEOUT_S))
                child.ready = True
            except (WorkerDiedError, WorkerKilledError, OSError) as e:
                failure = e
                self._end()
            except BaseException:
                self._end()
                raise
            else:
                return child
        reason = str(failure)
        if isinstance(failure, OSError):
            reason = f"{failure.filename or self._spec.module} does not start: {failure.strerror}"
        raise WorkerStartError(f"the process of {self._spec.module} failed to start: {reason}") from failure

    def _receive(self, child: Process, limits: Limits) -> Reply:
        # The process id of a child that is not forked yet would be waited for; its start has no other limit than time.
        watch = Watch(child.pid if child.ready else 0, limits)
        try:
            while not child.connection.poll(_POLL_S):
                if self._stopped:
                    raise WorkerStoppedError("the run was stopped")
                exceeded = watch.exceeded()
                if exceeded is not None:
                    raise WorkerKilledError(*exceeded)
            return child.receive()
        except WorkerDiedError as e:
            if self._stopped:
                raise WorkerStoppedError("the run was stopped") from e
            raise
        finally:
            self.seconds = watch.seconds

    def _begin(self, server: Forks | None) -> Process:
        child: Process | None = None
        if server is not None:
            try:
                child = server.fork(self._spec)
            except OSError as e:
                logger.debug("the fork server is gone, a process starts afresh: %s", e)
        child = child or Afresh(self._spec)
        with self._changing:
            self._child = child
        self.starts += 1
        self.answered = 0
        return child

    def _end(self) -> None:
        with self._changing:
            child, self._child = self._child, None
        if child is not None:
            child.close()
