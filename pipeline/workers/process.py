"""A child process and the socket to it: one that is started afresh, or one that a fork server forks."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe, forkserver, reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO

from relaxtune.pipeline.spans import span
from relaxtune.pipeline.workers.child import ChildSpec
from relaxtune.pipeline.workers.machine_faults import OUTSIDE
from relaxtune.pipeline.workers.replies import Reply, WorkerDiedError

_LOG_TAIL_BYTES = 2000
# Seconds in which a process that was killed or lost its connection is gone.
END_S = 5.0


class Process(ABC):
    """A child that answers requests on a socket, in order. It leads a group of its own.

    Raises `OSError`: it cannot be started.
    """

    def __init__(self, spec: ChildSpec) -> None:
        #: Whether its imports are done.
        self.ready = False
        self._log = new_log()
        # The pipe whose other end the child dies with.
        self._lifeline = -1
        self.connection, theirs = Pipe(duplex=True)
        try:
            self._begin(spec, theirs)
        except BaseException:
            self.connection.close()
            self._log.close()
            raise
        finally:
            theirs.close()

    @abstractmethod
    def _begin(self, spec: ChildSpec, connection: Connection) -> None:
        """Start the child with its end of the socket."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id of the child; one that is to be forked is waited for."""

    @abstractmethod
    def signal(self) -> None:
        """Send the signal that kills the child and everything in its group."""

    @abstractmethod
    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code, None while the child runs."""

    def close(self) -> None:
        """Kill the child and everything in its group; wait until it is gone."""
        self.signal()
        self._bury()
        self.connection.close()
        self._log.close()

    @abstractmethod
    def _bury(self) -> None:
        """Wait until the killed child is gone."""

    def send(self, request: object) -> None:
        """Hand a request to the child.

        Raises `WorkerDiedError`: the child is dead.
        """
        try:
            self.connection.send(request)
        except (BrokenPipeError, ConnectionResetError) as e:
            raise self._obituary() from e

    def receive(self) -> Reply:
        """Return the message that has come.

        Raises `WorkerDiedError`: the child is dead; the message says how it died.
        """
        try:
            message = self.connection.recv_bytes()
        except (EOFError, ConnectionResetError) as e:
            raise self._obituary() from e
        with span("unpickle"):
            return Reply(*pickle.loads(message))

    def _obituary(self) -> WorkerDiedError:
        code = self.wait(END_S)
        if code is None:
            how = "closed its connection without an answer"
        else:
            how = f"died of signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        tail = self._last_words()
        message = f"the process {how}" + (f"; it wrote last:\n{tail}" if tail else "")
        return WorkerDiedError(message, from_outside=code is not None and -code in OUTSIDE)

    def _last_words(self) -> str:
        return log_tail(self._log)


class Afresh(Process):
    """A child that this process starts."""

    _process: subprocess.Popen[bytes]

    def _begin(self, spec: ChildSpec, connection: Connection) -> None:
        reading, self._lifeline = os.pipe()
        descriptors = (connection.fileno(), reading)
        try:
            environment = {**os.environ, **spec.environment}
            self._process = spawn(spec.command(*descriptors), descriptors, environment, self._log)
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(reading)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def signal(self) -> None:
        """Kill the group, while its number is the child's."""
        if self._process.returncode is None:
            kill_group(self._process.pid)

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code, None while the child runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def _bury(self) -> None:
        self._process.wait()
        os.close(self._lifeline)


class Forked(Process):
    """A child of a fork server, forked when the server has done its imports.

    `path` is the server's socket. `last_words` returns what the server wrote, where it ended before it forked the
    child.
    """

    def __init__(self, spec: ChildSpec, path: Path, last_words: Callable[[], str]) -> None:
        self._path, self._server_wrote = path, last_words
        # The pipe of the child's process id and exit code.
        self._status = -1
        self._pid: int | None = None
        self._code: int | None = None
        self._reading = threading.Lock()
        super().__init__(replace(spec, environment={**os.environ, **spec.environment}))

    def _begin(self, spec: ChildSpec, connection: Connection) -> None:
        with contextlib.ExitStack() as failed, socket.socket(socket.AF_UNIX) as client:
            with short_address(self._path) as address:
                client.connect(address)
            (self._status, theirs), (reading, self._lifeline) = os.pipe(), os.pipe()
            failed.callback(os.close, self._status)
            failed.callback(os.close, self._lifeline)
            # In the order of `multiprocessing`; the log stands for two descriptors of no use here.
            log = self._log.fileno()
            try:
                reduction.sendfds(client, [reading, theirs, log, log, connection.fileno(), log])
            finally:
                os.close(theirs)
                os.close(reading)
            with open(self._lifeline, "wb", closefd=False) as stream:
                # No preparation: the main module of this process is none of the child's.
                reduction.dump({}, stream)
                reduction.dump(spec, stream)
            failed.pop_all()

    @property
    def pid(self) -> int:
        """Process id of the child, waited for; 0 where the server ended before."""
        with self._reading:
            if self._pid is None:
                self._pid = self._read(0)
            return self._pid

    def signal(self) -> None:
        """Kill the group; a child that is not forked yet ends with its lifeline."""
        forked = self._pid is not None or wait([self._status], 0)
        if forked and self.pid and self._code is None and not wait([self._status], 0):
            kill_group(self.pid)

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code, None while the child runs."""
        if self._code is None and self.pid and wait([self._status], timeout_s):
            # A server that ended does not know how its children do.
            self._code = self._read(-signal.SIGKILL)
        return self._code

    def _bury(self) -> None:
        os.close(self._lifeline)
        if self._pid:
            self.wait(END_S)
        os.close(self._status)

    def _last_words(self) -> str:
        return super()._last_words() if self.pid else self._server_wrote()

    def _read(self, missing: int) -> int:
        try:
            return int(forkserver.read_signed(self._status))
        except EOFError:
            return missing


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """Give a name of a path that a socket's address has room for: it holds 107 characters."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def spawn(
    command: list[str], descriptors: tuple[int, int], environment: dict[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that no Ctrl-C reaches it."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=descriptors,
        env=environment,
        start_new_session=True,
    )


def kill_group(pid: int) -> None:
    """Kill a process and everything in its group, which it leads from a moment after its start."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def new_log() -> IO[bytes]:
    """Return a new log without a name: nothing of it is left behind."""
    # In memory where that can be: what a child says of a full disk must not need the disk.
    memory = hasattr(os, "memfd_create")
    return os.fdopen(os.memfd_create("relaxtune-log"), "w+b") if memory else tempfile.TemporaryFile()


def log_tail(log: IO[bytes]) -> str:
    """Return the end of what was written to a log."""
    begin = max(0, os.fstat(log.fileno()).st_size - _LOG_TAIL_BYTES)
    return os.pread(log.fileno(), _LOG_TAIL_BYTES, begin).decode(errors="replace").strip()
