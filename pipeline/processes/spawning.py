"""Starts processes of this Python and keeps what they write: each leads its own group and session."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

_STDERR_TAIL_BYTES = 2000
# Seconds in which a process that was killed or lost its connection is gone.
END_S = 5.0


class StartedProcess(Protocol):
    """A started process: a child of this one, or of the fork server."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

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


class Spawned:
    """A process that this one started afresh."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def signal(self) -> None:
        """Send the signal that kills it and its group."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        self.signal()
        self._process.wait()

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit code, None when it goes on."""
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def told(self) -> str:
        """Return nothing: it writes to its own log."""
        return ""


def spawn(
    arguments: Sequence[str], descriptor: int, environment: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a module of this Python with its arguments; it inherits a descriptor and writes to a log."""
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


def spawn_worker(module: str, descriptor: int, environment: Mapping[str, str], log: IO[bytes]) -> Spawned:
    """Start a process afresh that runs a worker module on a connection (`pipeline.processes.child`)."""
    arguments = ["relaxtune.pipeline.processes.child", module, str(descriptor), str(os.getpid())]
    return Spawned(spawn(arguments, descriptor, environment, log))


def new_log() -> IO[bytes]:
    """Return a new log without a name: nothing of it is left behind."""
    # In memory where that can be: what a child says of a full disk must not need the disk.
    memory = hasattr(os, "memfd_create")
    return os.fdopen(os.memfd_create("relaxtune-log"), "w+b") if memory else tempfile.TemporaryFile()


def log_tail(log: IO[bytes]) -> str:
    """Return the end of what was written to a log."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _STDERR_TAIL_BYTES))
    return log.read().decode(errors="replace").strip()
