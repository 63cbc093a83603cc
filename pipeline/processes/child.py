"""The child's side of `pipeline.processes.process`: the loop that answers requests.

`python -m relaxtune.pipeline.processes.child MODULE FD PARENT` serves with the function that `MODULE.start()`
returns; a child that was forked (`pipeline.processes.fork_server`) enters at `answer_requests`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_ERROR_CHARS_MAX = 4000
#: Environment variable of a child: by how much nicer it is than its parent.
NICENESS = "RELAXTUNE_CHILD_NICENESS"


def serve(module: str, descriptor: int, parent_pid: int) -> None:
    """Answer requests until the parent closes the connection.

    Parameters
    ----------
    module : str
        Its `start()` does the slow imports and returns the function that answers a request; what that raises goes
        back as text.
    descriptor : int
        The socket to the parent.
    parent_pid : int
        The process to die with.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_out_torch()
    connection = Connection(descriptor)
    die_with_parent(parent_pid)
    answer_requests(module, connection)


def leave_out_torch() -> None:
    """Keep PyTorch out of this process: TVM imports it wherever it is installed, which takes three seconds."""
    # What Python takes for a module that is not there.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def answer_requests(module: str, connection: Connection) -> None:
    """Say that this process is ready once its imports are done, and answer until the connection is closed."""
    os.nice(int(os.environ.get(NICENESS, "0")))
    start: Callable[[], Callable[[object], object]] = importlib.import_module(module).start
    handle = start()
    connection.send((None, None, resident_bytes()))
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request is None:
            return
        reply: tuple[object, str | None, int]
        try:
            reply = (handle(request), None, resident_bytes())
        # The border of the process: whatever a candidate raises is the parent's to record.
        except Exception as e:
            reply = (None, _error_text(e), resident_bytes())
        connection.send(reply)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent is gone; only Linux offers that."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        # It died before the request above.
        os._exit(1)


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


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
