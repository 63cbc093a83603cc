"""The child's side of a worker: the loop that answers requests.

A child started afresh enters at `main`, a forked one at `ChildSpec`. This file imports the standard library alone: a
peer of `bench` runs it under another interpreter.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

_ERROR_CHARS_MAX = 4000


@dataclass(frozen=True)
class ChildSpec:
    """The module of a child, and its surroundings."""

    # Its `start()` does the slow imports and returns the function that answers a request. The text of an exception goes
    # back to the parent.
    module: str
    # Environment variables: all of a forked child, and of another one those over its parent's.
    environment: Mapping[str, str]
    niceness: int = 0  # By how much it is nicer than its parent.
    # Whether it may use a GPU. CUDA does not work in a fork of a process that has a GPU open: such a child replaces
    # itself by a new process.
    gpu: bool = False
    python: Path | None = None  # The interpreter of a child started afresh; None is this one.

    def command(self, connection: int, lifeline: int) -> list[str]:
        """Return the command of a new process, for the descriptors of the socket and the pipe to the parent.

        It finds modules where this process does. Another interpreter has its own packages, and ours after them.
        """
        path = f"[*sys.path, {str(Path(__file__).resolve().parents[2])!r}]" if self.python else repr(import_path())
        code = f"import sys; sys.path[:] = {path}; from relaxtune.pipeline.workers.child import main; main()"
        words = [self.module, *map(str, (connection, lifeline, self.niceness))]
        return [str(self.python or sys.executable), "-c", code, *words]

    def _bootstrap(self, lifeline: int) -> int:
        """Serve in a fork of `multiprocessing`'s server, which exits with the returned code."""
        inherited = forkserver.get_inherited_fds()
        assert inherited is not None
        connection, log = inherited
        # A group of its own: whatever it starts is killed with it.
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ.clear()
        os.environ.update(self.environment)
        tempfile.tempdir = None
        try:
            if self.gpu and has_gpu_open():
                for descriptor in (connection, lifeline):
                    os.set_inheritable(descriptor, True)
                os.execv(sys.executable, self.command(connection, lifeline))
            serve(self.module, connection, lifeline, self.niceness)
        # The border of the process: its parent reads the log.
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return 0


def main() -> None:
    """Serve as the arguments of `ChildSpec.command` say."""
    serve(sys.argv[1], *map(int, sys.argv[2:]))


def serve(module: str, connection: int, lifeline: int, niceness: int) -> None:
    """Answer requests until the parent closes the connection; see `ChildSpec`, and `die_with` of the lifeline."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(lifeline)
    leave_out_torch()
    os.nice(niceness)
    answer_requests(module, Connection(connection))


def import_path() -> list[str]:
    """Return where this process finds modules, for another one."""
    return [entry or os.getcwd() for entry in sys.path]


def leave_out_torch() -> None:
    """Keep PyTorch out of this process: TVM imports it wherever it is installed, which takes three seconds."""
    # Python's mark for a module that is not there.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def answer_requests(module: str, connection: Connection) -> None:
    """Say that this process is ready once its imports are done, and answer until the connection is closed."""
    start: Callable[[], Callable[[object], object]] = importlib.import_module(module).start
    handle = start()
    connection.send((None, None, resident_bytes()))
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        reply: tuple[object, str | None, int]
        try:
            reply = (handle(request), None, resident_bytes())
        # The border of the process: whatever a candidate raises is the parent's to record.
        except Exception as e:
            reply = (None, _error_text(e), resident_bytes())
        connection.send(reply)


def die_with(lifeline: int) -> None:
    """Have the system kill this process, also inside native code, once nobody has the pipe's other end; on Linux."""
    if sys.platform != "linux":
        return
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        # It was closed before.
        os._exit(1)


def has_gpu_open(folder: Path = Path("/proc/self/fd")) -> bool:
    """Whether this process has opened a GPU, as CUDA does when it is initialised."""
    links = []
    for entry in folder.iterdir():
        # The listing's own descriptor is gone by now.
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry))
    return any(link.startswith("/dev/nvidia") for link in links)


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident memory of a process, by default this one; 0 where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{'self' if pid is None else pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGESIZE")


def _error_text(error: Exception) -> str:
    """Return the exception's own message last, where a reader looks, after a shortened traceback."""
    text = "".join(traceback.format_exception(error))
    if len(text) > _ERROR_CHARS_MAX:
        half = _ERROR_CHARS_MAX // 2
        text = text[:half] + "\n[...]\n" + text[-half:]
    return text.strip()
