"""A process that has imported what the workers need and forks one whenever it is asked.

A worker spends two seconds of a processor on importing TVM; sixteen at the same time spend seven (16 cores of an H200's
host). `python -m relaxtune.pipeline.processes.fork_server FD PARENT MODULE...` imports the modules once, on a single
thread, so that nothing is lost by forking. A worker that needs a GPU can be forked as long as no import has initialised
CUDA here. The process answers one request at a time on the socket of each client, which here is the process that
started it (several in `pipeline.tuning.ray.node_server`):

- `Fork`, followed by two descriptors (the worker's connection, its log): the pid of a worker, which then answers
  requests as `pipeline.processes.child` does;
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
from multiprocessing.connection import Connection, wait
from pathlib import Path

from relaxtune.pipeline.processes.child import answer_requests, die_with_parent, leave_out_torch
from relaxtune.pipeline.processes.fork_requests import Fork, HasGpuOpen, Reap

_POLL_S = 0.002


def main(descriptor: int, parent_pid: int, modules: Sequence[str]) -> None:
    """Import the modules and answer until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent_pid)
    leave_out_torch()
    with socket.socket(fileno=descriptor) as control:
        do_imports(modules)
        Forking([Client(control)]).serve()


def do_imports(modules: Sequence[str]) -> None:
    """Do the imports of workers."""
    for name in modules:
        importlib.import_module(name).start()


class Client:
    """A process that asks for workers; those that live when it leaves are killed.

    Parameters
    ----------
    control : socket
        Connected to it.
    """

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.connection = Connection(os.dup(control.fileno()))
        self.forked: set[int] = set()
        # What it waits for, and until when; it asks for nothing else meanwhile.
        self.reaping: tuple[int, float] | None = None

    def close(self) -> None:
        """Close the connection in this process."""
        self.connection.close()
        self.control.close()

    def reap(self) -> None:
        """Tell the client how the worker ended that it waits for, or that it waited for too long."""
        if self.reaping is None:
            return
        pid, until = self.reaping
        ended = os.waitpid(pid, os.WNOHANG)
        if not ended[0] and time.monotonic() < until:
            return
        self.reaping = None
        if ended[0]:
            self.forked.discard(pid)
        with contextlib.suppress(OSError):
            self.connection.send(os.waitstatus_to_exitcode(ended[1]) if ended[0] else None)


class Forking:
    """Answers clients, one request at a time.

    Parameters
    ----------
    clients : list of Client
        Those that are connected.
    listener : socket or None
        Where others connect; without one, serving ends with the last client.
    """

    def __init__(self, clients: list[Client], listener: socket.socket | None = None) -> None:
        self._clients = clients
        self._listener = listener

    def serve(self) -> None:
        """Answer until all clients are gone."""
        while self._clients or self._listener is not None:
            asking = [one for one in self._clients if one.reaping is None]
            waiting = len(asking) < len(self._clients)
            sources: list[object] = [one.connection for one in asking]
            sources += [] if self._listener is None else [self._listener]
            ready = wait(sources, _POLL_S if waiting else None)  # type: ignore[arg-type]
            if self._listener is not None and self._listener in ready:
                self._clients.append(Client(self._listener.accept()[0]))
            for one in asking:
                if one.connection in ready:
                    try:
                        self._answer(one)
                    except (EOFError, OSError):
                        self._leave(one)
            for one in self._clients:
                one.reap()

    def _answer(self, client: Client) -> None:
        request = client.connection.recv()
        match request:
            case Fork():
                pid = self._fork(request, client)
                client.forked.add(pid)
                client.connection.send(pid)
            case HasGpuOpen():
                client.connection.send(has_gpu_open())
            case Reap():
                client.reaping = (request.pid, time.monotonic() + request.timeout_s)
            case _:
                raise TypeError(f"expected a request to the fork server, got {type(request).__name__}")

    def _leave(self, client: Client) -> None:
        self._clients.remove(client)
        client.close()
        for pid in client.forked:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in client.forked:
            os.waitpid(pid, 0)

    def _fork(self, request: Fork, client: Client) -> int:
        _, descriptors, _, _ = socket.recv_fds(client.control, 1, 2)
        if len(descriptors) < 2:
            raise EOFError("the client ended while it asked")
        theirs, log = descriptors
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
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._close_inherited()
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

    def _close_inherited(self) -> None:
        for one in self._clients:
            one.close()
        if self._listener is not None:
            self._listener.close()


def has_gpu_open(folder: Path = Path("/proc/self/fd")) -> bool:
    """Whether this process has opened a GPU, as CUDA does when it is initialised."""
    links = []
    for one in folder.iterdir():
        # The listing's own descriptor is gone by now.
        with contextlib.suppress(OSError):
            links.append(os.readlink(one))
    return any(link.startswith("/dev/nvidia") for link in links)


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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
