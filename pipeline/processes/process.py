"""A warm child process that answers one request at a time and may be killed at any moment.

The child runs `pipeline.processes.child`, says "ready" when its imports are done, and then answers requests in order
over a socket. It leads its own process group, so that everything it started dies with it, and is in no terminal's
session, so that a Ctrl-C does not reach it; on Linux the kernel kills it when its parent dies, however that happened.
It is started afresh, or forked by a `ForkServer`, which has done the imports.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from relaxtune.pipeline.processes.child import resident_bytes
from relaxtune.pipeline.processes.fork_client import ForkServer
from relaxtune.pipeline.processes.spawning import END_S, StartedProcess, log_tail, new_log, spawn_worker
from relaxtune.pipeline.spans import span
from relaxtune.pipeline.workers.machine_faults import OUTSIDE


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

    @property
    def short(self) -> str:
        """How it ended, and the last line that it wrote."""
        lines = str(self).strip().splitlines() or [type(self).__name__]
        return " ".join(dict.fromkeys([lines[0], lines[-1].strip()]))


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
        self._log = new_log()
        self._process: StartedProcess
        try:
            if server is not None:
                self._process = server.fork(module, environment, theirs, self._log)
            else:
                self._process = spawn_worker(module, theirs.fileno(), environment, self._log)
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
        code = self._process.wait(END_S)
        if code is None:
            how = "closed its connection without an answer"
        else:
            how = f"died of signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        tail = log_tail(self._log) or self._process.told()
        message = f"the process {how}" + (f"; it wrote last:\n{tail}" if tail else "")
        return ChildDiedError(message, from_outside=code is not None and -code in OUTSIDE)
