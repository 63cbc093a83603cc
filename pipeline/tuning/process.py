"""A warm child process that answers one request at a time and may be killed at any moment.

The child runs `python -m pipeline.tuning.child MODULE FD PARENT`, says "ready" when its imports are done, and then
answers requests in order over a socket. It leads its own session, so that a Ctrl-C of the terminal does not reach it
and everything it started dies with it; on Linux the kernel kills it when its parent dies, however that happened.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from pipeline.tuning.child import resident_bytes

_STDERR_TAIL_BYTES = 2000


@dataclass(frozen=True)
class Reply:
    """What a child answered: a value, or the text of the exception it met, and its resident memory afterwards."""

    value: object | None
    error: str | None
    rss_bytes: int = 0


class ChildDiedError(Exception):
    """The child ended without an answer; the message says how, with the end of what it wrote to stderr."""


class ChildProcess:
    """A child of this process that runs one of the worker modules.

    Parameters
    ----------
    module : str
        Name of the module to run, for example `pipeline.tuning.build_worker`.
    environment : Mapping
        Environment variables for the child, over this process's own.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        ours, theirs = Pipe(duplex=True)
        self._connection = ours
        # Closed by `kill`; it has no name, so nothing is left behind.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # The child must import the same packages as this process, wherever they were found.
        search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.tuning.child", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **environment, "PYTHONPATH": search_path},
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            self._log.close()
            raise
        finally:
            theirs.close()
        self.ready = False
        self.answered = 0

    @property
    def connection(self) -> Connection:
        """The socket to wait on."""
        return self._connection

    @property
    def pid(self) -> int:
        """Process id of the child."""
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
            raise ChildDiedError(self._obituary()) from e

    def receive(self) -> Reply:
        """Return the next message; call it when the connection is readable.

        Raises
        ------
        ChildDiedError
            The child died.
        """
        try:
            message = self._connection.recv()
        except (EOFError, ConnectionResetError) as e:
            raise ChildDiedError(self._obituary()) from e
        reply = Reply(*message)
        if self.ready:
            self.answered += 1
        self.ready = True
        return reply

    def kill(self) -> None:
        """End the child and everything in its session at once; does nothing when that was done before."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._connection.close()
        self._log.close()

    def close(self) -> None:
        """Let an idle child end by itself; kill it when it does not within two seconds."""
        if self._process.returncode is None and self.ready:
            with contextlib.suppress(OSError):
                self._connection.send(None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=2.0)
        self.kill()

    def _obituary(self) -> str:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            how = "closed its connection without an answer"
        else:
            how = f"died of signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _STDERR_TAIL_BYTES))
        tail = self._log.read().decode(errors="replace").strip()
        return f"the process {how}" + (f"; it wrote last:\n{tail}" if tail else "")
