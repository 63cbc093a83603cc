"""A process that has imported what the workers need and forks one whenever it is asked.

A worker spends two seconds of a processor on importing TVM; sixteen at the same time spend seven (16 cores of an H200's
host). `python -m relaxtune.pipeline.tuning.local.fork_server FD PARENT MODULE...` imports the modules once, on a single
thread, so that nothing is lost by forking. A worker that needs a GPU can be forked as long as no import has initialised
CUDA here. The process answers one request at a time on its socket:

- `Fork`, followed by two descriptors (the worker's connection, its log): the pid of a worker, which then answers
  requests as `pipeline.tuning.local.child` does;
- `HasGpuOpen`: whether this process has a device file of a GPU open;
- `Reap`: the exit code of a worker that has ended, as `subprocess` tells it, or None when it goes on.

Workers lead process groups of their own and die with this process, which dies with the one that started it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from relaxtune.pipeline.tuning.local.child import answer_requests, die_with_parent, leave_out_torch
from relaxtune.pipeline.tuning.local.fork_requests import Fork, HasGpuOpen, Reap

_POLL_S = 0.002


def main(descriptor: int, parent_pid: int, modules: Sequence[str]) -> None:
    """Import the modules and answer until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent_pid)
    leave_out_torch()
    with socket.socket(fileno=descriptor) as control, Connection(os.dup(descriptor)) as connection:
        for name in modules:
            importlib.import_module(name).start()
        while True:
            try:
                request = connection.recv()
            except EOFError:
                return
            match request:
                case Fork():
                    connection.send(_fork(request, control, connection))
                case HasGpuOpen():
                    connection.send(has_gpu_open())
                case Reap():
                    connection.send(_reap(request))
                case _:
                    raise TypeError(f"expected a request to the fork server, got {type(request).__name__}")


def has_gpu_open(folder: Path = Path("/proc/self/fd"), devices: str = "/dev/nvidia") -> bool:
    """Whether this process has opened a GPU, as CUDA does when it is initialised."""
    links = []
    for one in folder.iterdir():
        # The listing's own descriptor is gone by now.
        with contextlib.suppress(OSError):
            links.append(os.readlink(one))
    return any(link.startswith(devices) for link in links)


def _fork(request: Fork, control: socket.socket, connection: Connection) -> int:
    _, (theirs, log), _, _ = socket.recv_fds(control, 1, 2)
    server = os.getpid()
    pid = os.fork()
    if pid:
        # The child does the same; the first of both makes the group.
        _lead_group(pid)
        os.close(theirs)
        os.close(log)
        return pid
    try:
        _lead_group(0)
        die_with_parent(server)
        connection.close()
        control.close()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(request.environment)
        answer_requests(request.module, Connection(theirs))
    finally:
        # Neither this function's callers nor what Python does at exit are the worker's.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if sys.exc_info()[0] is None else _told_exit())


def _told_exit() -> int:
    sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    return 1


def _lead_group(pid: int) -> None:
    try:
        os.setpgid(pid, 0)
    except (PermissionError, ProcessLookupError):
        # The child is its leader already, or has ended.
        return


def _reap(request: Reap) -> int | None:
    until = time.monotonic() + request.timeout_s
    while True:
        pid, status = os.waitpid(request.pid, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
