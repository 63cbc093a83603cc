"""A warm child process that answers one request at a time and may be killed at any moment.

The child runs `pipeline.tuning.local.child`, says "ready" when its imports are done, and then answers requests in order
over a socket. It leads its own process group, so that everything it started dies with it, and is in no terminal's
session, so that a Ctrl-C does not reach it; on Linux the kernel kills it when its parent dies, however that happened.
It is started afresh, or forked by a `ForkServer`, which has done the imports.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Protocol

from relaxtune.pipeline.spans import span
from relaxtune.pipeline.tuning.local.child import resident_bytes
from relaxtune.pipeline.tuning.local.fork_requests import Fork, HasGpuOpen, Reap

_STDERR_TAIL_BYTES = 2000
_END_S = 5.0
# What a full or broken disk says, in whose words ever: a fault of the machine, none of a candidate.
_DISK = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS))
# Signals that end a process from outside.
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def is_of_the_disk(error: str) -> bool:
    """Return whether an error text of a child tells of a full or broken disk."""
    return any(said in error for said in _DISK)


@dataclass(frozen=True)
class Reply:
    """What a child answered: a value, or the text of the exception it met, and its resident memory afterwards."""

    value: object | None
    error: str | None
    rss_bytes: int = 0


class ChildDiedError(Exception):
    """The child ended without an answer; the message says how, with the end of what it wrote to stderr.

    `from_outside` tells that a signal ended it which no crash sends: the user, the system or its memory killer did so.
    """

    def __init__(self, message: str, *, from_outside: bool = False) -> None:
        super().__init__(message)
        self.from_outside = from_outside


class _Process(Protocol):
    """A started process: a child of this one, or of the fork server."""

    @property
    def pid(self) -> int: ...

    def signal(self) -> None:
        """Send the signal that kills it and everything in its group."""
        ...

    def end(self) -> None:
        """Do so, and wait until it is gone."""
        ...

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit code, None when it goes on."""
        ...

    def told(self) -> str:
        """Return what its parent wrote, where the process itself may have written nothing."""
        ...


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
        self._start()

    @staticmethod
    def available() -> bool:
        """Whether processes are forked here: on Linux, where they can be told to die with their parent."""
        return sys.platform == "linux"

    def fork(self, module: str, environment: Mapping[str, str], connection: Connection, log: IO[bytes]) -> _Process:
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

    def told(self) -> str:
        """Return the end of what the server wrote."""
        return _tail(self._log)

    def close(self) -> None:
        """End the server; what it forked dies with it."""
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> None:
        self._asked: deque[_Answer] = deque()
        ours, theirs = socket.socketpair()
        self._control, self._connection = ours, Connection(os.dup(ours.fileno()))
        self._log = _new_log()
        # One thread: what other threads hold at a fork stays held in the child.
        single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        try:
            arguments = [
                "relaxtune.pipeline.tuning.local.fork_server",
                str(theirs.fileno()),
                str(os.getpid()),
                *self._modules,
            ]
            self._process = _popen(arguments, theirs.fileno(), single, self._log)
        finally:
            theirs.close()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._control.close()
        self._log.close()


@dataclass(eq=False)
class _Answer:
    """What a server answered, once it is taken."""

    value: object = None
    there: bool = False


class _Forked:
    def __init__(self, server: ForkServer, answer: _Answer, process: subprocess.Popen[bytes]) -> None:
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
            self.wait(_END_S)

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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._parent.wait(_END_S)
        return self._server.told()


class _Spawned:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.signal()
        self._process.wait()

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def told(self) -> str:
        return ""


class ChildProcess:
    """A child of this process that runs one of the worker modules.

    Parameters
    ----------
    module : str
        Name of the module to run, for example `pipeline.tuning.local.build_worker`.
    environment : Mapping
        Environment variables for the child, over this process's own.
    server : ForkServer or None
        What forks it; without one it is started afresh.
    """

    def __init__(self, module: str, environment: Mapping[str, str], server: ForkServer | None = None) -> None:
        ours, theirs = Pipe(duplex=True)
        self._connection = ours
        # Closed by `kill`; it has no name, so nothing is left behind.
        self._log = _new_log()
        self._process: _Process
        try:
            if server is not None:
                self._process = server.fork(module, environment, theirs, self._log)
            else:
                arguments = ["relaxtune.pipeline.tuning.local.child", module, str(theirs.fileno()), str(os.getpid())]
                self._process = _Spawned(_popen(arguments, theirs.fileno(), environment, self._log))
        except BaseException:
            ours.close()
            self._log.close()
            raise
        finally:
            theirs.close()
        self.ready = False
        self.answered = 0
        self._killed = False

    @property
    def connection(self) -> Connection:
        """The socket to wait on."""
        return self._connection

    @property
    def pid(self) -> int:
        """Process id of the child; one that is to be forked is waited for."""
        return self._process.pid

    def rss_bytes(self) -> int:
        """Return the resident memory of the child now; 0 when it is gone or the system does not tell."""
        return resident_bytes(self._process.pid)

    def send(self, request: object) -> None:
        """Hand a request to the child.

        Raises
        ------
        ChildDiedError
            The child is gone.
        """
        try:
            self._connection.send(request)
        except (BrokenPipeError, ConnectionResetError) as e:
            raise self._obituary() from e

    def receive(self) -> Reply:
        """Return the next message; call it when the connection is readable.

        Raises
        ------
        ChildDiedError
            The child died.
        """
        try:
            message = self._connection.recv_bytes()
        except (EOFError, ConnectionResetError) as e:
            raise self._obituary() from e
        with span("unpickle"):
            reply = Reply(*pickle.loads(message))
        if self.ready:
            self.answered += 1
        self.ready = True
        return reply

    @staticmethod
    def kill_all(children: Collection[ChildProcess]) -> None:
        """End children, all at the same time: one that uses a GPU takes a second to be gone."""
        for one in children:
            if not one._killed:
                one._process.signal()
        for one in children:
            one.kill()

    def kill(self) -> None:
        """End the child and everything in its group at once; does nothing when that was done before."""
        if self._killed:
            return
        self._killed = True
        self._process.end()
        self._connection.close()
        self._log.close()

    def close(self) -> None:
        """Let an idle child end by itself; kill it when it does not within two seconds."""
        if not self._killed and self.ready:
            with contextlib.suppress(OSError):
                self._connection.send(None)
            self._process.wait(2.0)
        self.kill()

    def _obituary(self) -> ChildDiedError:
        code = self._process.wait(_END_S)
        if code is None:
            how = "closed its connection without an answer"
        else:
            how = f"died of signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        tail = _tail(self._log) or self._process.told()
        message = f"the process {how}" + (f"; it wrote last:\n{tail}" if tail else "")
        return ChildDiedError(message, from_outside=code is not None and -code in _OUTSIDE)


def _popen(
    arguments: Sequence[str], descriptor: int, environment: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    # The child must import the same packages as this process, wherever they were found.
    search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(descriptor,),
        env={**os.environ, **environment, "PYTHONPATH": search_path},
        start_new_session=True,
    )


def _new_log() -> IO[bytes]:
    # In memory where that can be: what a child says of a full disk must not need the disk.
    memory = hasattr(os, "memfd_create")
    return os.fdopen(os.memfd_create("relaxtune-log"), "w+b") if memory else tempfile.TemporaryFile()


def _tail(log: IO[bytes]) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _STDERR_TAIL_BYTES))
    return log.read().decode(errors="replace").strip()
