"""The parent's side of `fork_server`: asks a process that has imported its modules to fork children."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Protocol

from relaxtune.pipeline.processes.fork_requests import Fork, HasGpuOpen, Reap
from relaxtune.pipeline.processes.spawning import END_S, StartedProcess, log_tail, new_log, spawn, spawn_worker


class ForkServer:
    """Starts children in milliseconds: a process that has imported their modules forks them. Safe between threads.

    It is started at once and imports while others go on; a child asked for meanwhile is forked when that is done.

    Parameters
    ----------
    modules : sequence of str
        What it imports.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = list(modules)
        self._lock = threading.RLock()
        self._closed = False
        self._process: _Server
        self._start()

    @staticmethod
    def available() -> bool:
        """Whether processes are forked here: on Linux, where they can be told to die with their parent."""
        return sys.platform == "linux"

    def fork(
        self, module: str, environment: Mapping[str, str], connection: Connection, log: IO[bytes]
    ) -> StartedProcess:
        """Return a child that answers on a connection; it may not have begun yet."""
        with self._lock:
            if self._process.poll() is not None and not self._closed:
                self._end()
                self._start()
            answer = _Answer()
            # A server that is gone leaves the connection closed, by which the child counts as dead.
            with contextlib.suppress(OSError):
                self._connection.send(Fork(module, {**os.environ, **environment}))
                socket.send_fds(self._control, [b"f"], [connection.fileno(), log.fileno()])
                self._asked.append(answer)
            return _Forked(self, answer, self._process)

    def can_use_gpus(self) -> bool:
        """Whether what it forks can use a GPU: its imports left them alone. Waits for these."""
        return self.ask(HasGpuOpen()) is False

    def ask(self, request: object) -> object:
        """Return the answer to a request; None when the server is gone."""
        with self._lock:
            try:
                self._connection.send(request)
            except OSError:
                return None
            answer = _Answer()
            self._asked.append(answer)
            return self.take(answer)

    def take(self, answer: _Answer, *, wait: bool = True) -> object:
        """Return the answer to an earlier request; None from a server that is gone, or late unless `wait`."""
        with self._lock:
            while not answer.there and answer in self._asked:
                try:
                    if not wait and not self._connection.poll():
                        break
                    value = self._connection.recv()
                except (EOFError, OSError):
                    self._asked.clear()
                    break
                first = self._asked.popleft()
                first.there, first.value = True, value
            return answer.value

    def wait_for_end(self) -> None:
        """Wait until a server that is at its end is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)

    def told(self) -> str:
        """Return the end of what the server wrote."""
        return log_tail(self._log)

    def close(self) -> None:
        """End the server; what it forked dies with it."""
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> None:
        self._asked: deque[_Answer] = deque()
        ours, theirs = socket.socketpair()
        self._control, self._connection = ours, Connection(os.dup(ours.fileno()))
        self._log = new_log()
        # One thread: what other threads hold at a fork stays held in the child.
        single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        try:
            arguments = [
                "relaxtune.pipeline.processes.fork_server",
                str(theirs.fileno()),
                str(os.getpid()),
                *self._modules,
            ]
            self._own = spawn(arguments, theirs.fileno(), single, self._log)
            self._process = self._own
        finally:
            theirs.close()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._own.pid, signal.SIGKILL)
        self._own.wait()
        self._connection.close()
        self._control.close()
        self._log.close()


class JoinedServer(ForkServer):
    """A fork server that another process started, where it listens; without it, children are started afresh.

    Parameters
    ----------
    path : Path
        Its socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(())

    def fork(
        self, module: str, environment: Mapping[str, str], connection: Connection, log: IO[bytes]
    ) -> StartedProcess:
        """Return a child that answers on a connection."""
        with self._lock:
            if self._process.poll() is None:
                return super().fork(module, environment, connection, log)
        return spawn_worker(module, connection.fileno(), environment, log)

    def told(self) -> str:
        """Return nothing: what it wrote is with the one that started it."""
        return ""

    def _start(self) -> None:
        self._asked = deque()
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # One that is not there looks like one that is gone.
        with contextlib.suppress(OSError):
            self._control.connect(str(self._path))
        self._connection = Connection(os.dup(self._control.fileno()))
        self._process = _Peer(self._control)

    def _end(self) -> None:
        self._connection.close()
        self._control.close()


class _Server(Protocol):
    """The server's process, as far as its clients see it."""

    def poll(self) -> int | None:
        """Return None while it lives."""

    def wait(self, timeout: float) -> int | None:
        """Wait for its end."""


class _Peer:
    """A server that this process did not start: alive as long as it is connected."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def poll(self) -> int | None:
        try:
            return None if self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) else -signal.SIGKILL
        except BlockingIOError:
            return None
        except OSError:
            return -signal.SIGKILL

    def wait(self, timeout: float) -> int | None:
        return self.poll()


@dataclass(eq=False)
class _Answer:
    """What a server answered, once it is taken."""

    value: object = None
    there: bool = False


class _Forked:
    def __init__(self, server: ForkServer, answer: _Answer, process: _Server) -> None:
        self._server = server
        self._answer = answer
        self._parent = process
        self._code: int | None = None

    @property
    def pid(self) -> int:
        value = self._server.take(self._answer)
        return value if isinstance(value, int) else 0

    def signal(self) -> None:
        if self._forked_and_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        self.signal()
        if self._forked_and_alive():
            self.wait(END_S)

    def _forked_and_alive(self) -> bool:
        # One that is not forked yet will find its connection closed, and end.
        pid = self._server.take(self._answer, wait=False)
        return isinstance(pid, int) and self._code is None and self._parent.poll() is None

    def wait(self, timeout_s: float) -> int | None:
        pid = self.pid
        if self._code is None and pid:
            code = self._server.ask(Reap(pid, timeout_s)) if self._parent.poll() is None else None
            if code is None and self._parent.poll() is not None:
                # The system kills the children of a server that died.
                code = -signal.SIGKILL
            self._code = code if isinstance(code, int) else None
        return self._code

    def told(self) -> str:
        if self.pid:
            return ""
        # It was never forked: the server is at its end.
        self._server.wait_for_end()
        return self._server.told()
