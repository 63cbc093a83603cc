"""What runs on a node of a cluster for a driver: it tells the node's facts, then forks workers, its imports done.

`python -m relaxtune.pipeline.tuning.ray.node_server RUN MODULE... PARENT` prints the facts as one line of JSON. Then it
imports the modules and answers clients at `fork_socket(RUN)` as `pipeline.processes.fork_server` does: a Ray worker
that builds, measures or works on cells forks its child here in milliseconds. Alone it would import TVM and more for it,
two to five seconds of a processor, for each core of the node at the same time.

Nodes that share a host share the first one's server. Ray workers of a node without one start their children afresh.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from relaxtune.pipeline.processes.child import die_with_parent, leave_out_torch
from relaxtune.pipeline.processes.fork_client import JoinedServer
from relaxtune.pipeline.processes.fork_server import Forking, do_imports
from relaxtune.pipeline.temporary import shared_folder, shared_path
from relaxtune.pipeline.tuning.ray.facts import tell

_CLIENTS_WAITING = 512


def fork_socket(run: str) -> Path:
    """Return where the server of a run listens."""
    return shared_path(run) / "forks"


def join_server(run: str, *, gpus: bool = False) -> JoinedServer | None:
    """Return the server of this host; None where there is none, or none whose children can use `gpus`."""
    path = fork_socket(run)
    if not path.exists():
        return None
    server = JoinedServer(path)
    if gpus and not server.can_use_gpus():
        server.close()
        return None
    return server


def main(run: str, parent_pid: int, modules: Sequence[str]) -> None:
    """Tell the facts, and fork workers until it is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    die_with_parent(parent_pid)
    leave_out_torch()
    with shared_folder(run), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            # Before the facts are told: a process that has them may ask at once.
            listener.bind(str(fork_socket(run)))
        except OSError:
            # Another node's server has this host, or the path is too long for a socket.
            tell()
            return
        listener.listen(_CLIENTS_WAITING)
        import tvm  # noqa: F401

        # In a process of its own: looking for GPUs opens them, and then nothing forked from here could use one.
        pid = os.fork()
        if not pid:
            # While it were open here, clients of a server that is gone would wait.
            listener.close()
            _tell_and_exit()
        do_imports(modules)
        os.waitpid(pid, 0)
        Forking([], listener).serve()


def _tell_and_exit() -> None:
    code = 1
    try:
        tell()
        code = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(sys.argv[1], int(sys.argv[-1]), sys.argv[2:-1])
