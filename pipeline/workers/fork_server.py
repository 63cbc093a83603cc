"""A process that has done the imports of workers and forks them in milliseconds: `multiprocessing`'s fork server.

A worker spends two seconds of a processor on importing TVM; sixteen at the same time spend seven (16 cores of an H200's
host). The server does the imports once, on a single thread, so that nothing is lost by forking.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import forkserver
from pathlib import Path

from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.workers.child import ChildSpec, die_with, import_path, leave_out_torch
from relaxtune.pipeline.workers.process import END_S, Forked, log_tail, new_log, short_address, spawn

# Workers of a node that ask at the same time.
_CLIENTS_WAITING = 512
#: Environment of a server. One thread: a lock that another thread holds at a fork stays locked in the child.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Forks:
    """A fork server that listens at a path; another process may have started it. Safe between threads.

    `path` is its socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @staticmethod
    def available() -> bool:
        """Whether processes are forked here: on Linux, where they die with their parent."""
        return sys.platform == "linux"

    def fork(self, spec: ChildSpec) -> Forked:
        """Return a child; it is forked when the server has done its imports.

        Raises `OSError`: the server is gone.
        """
        return Forked(spec, self._path, self.last_words)

    def last_words(self) -> str:
        """Return what the server wrote, where this process started it."""
        return ""


class ForkServer(Forks):
    """A fork server of this process. It imports while others go on.

    The `start()` of each module does the imports.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        code = "import sys; sys.path[:] = {!r}; from relaxtune.pipeline.workers.fork_server import main; main()"
        with ExitStack() as stack:
            super().__init__(stack.enter_context(temporary_folder()) / "forks")
            self._log = stack.enter_context(new_log())
            reading, alive = os.pipe()
            stack.callback(os.close, alive)
            with contextlib.closing(open(reading, "rb")), listening(self._path) as listener:
                descriptors = (listener.fileno(), reading)
                words = [sys.executable, "-c", code.format(import_path()), *map(str, descriptors), *modules]
                self._process = spawn(words, descriptors, {**os.environ, **ONE_THREAD}, self._log)
            self._stack = stack.pop_all()

    def last_words(self) -> str:
        """Return the end of what the server wrote; waits for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        return log_tail(self._log)

    def close(self) -> None:
        """End the server. Its children go on: their workers end them."""
        self._process.kill()
        self._process.wait()
        self._stack.close()


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Give a socket on which a fork server listens.

    Raises `OSError`: another server listens there.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        with short_address(path) as address:
            listener.bind(address)
        listener.listen(_CLIENTS_WAITING)
        yield listener


def main() -> None:
    """Do the imports, and fork until nobody has the other end of a pipe; see `ForkServer` for the arguments."""
    listener, alive, *modules = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(int(alive))
    leave_out_torch()
    do_imports(modules)
    forkserver.main(int(listener), int(alive), [])


def do_imports(modules: Sequence[str]) -> None:
    """Do the imports of workers."""
    for name in modules:
        importlib.import_module(name).start()
