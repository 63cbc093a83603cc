"""The process on a node of a cluster for a driver: it prints the node's facts, then forks workers.

`python -m relaxtune.pipeline.tuning.ray.node_server RUN MODULE...` prints the facts as one line of JSON. Then it
imports the modules, and forks for all who connect to `fork_socket(RUN)` until its stdin is closed: a Ray worker that
builds, measures or works on cells has its child in milliseconds. Alone it would import TVM and more for it, two to five
seconds of a processor, for each core of the node at the same time.

Nodes that share a host share the first one's server. Ray workers of a node without one start their children afresh.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing import forkserver
from pathlib import Path

from relaxtune.pipeline.temporary import shared_folder, shared_path
from relaxtune.pipeline.tuning.ray.facts import read_facts
from relaxtune.pipeline.workers.child import leave_out_torch
from relaxtune.pipeline.workers.fork_server import Forks, do_imports, listening


def fork_socket(run: str) -> Path:
    """Return where the server of a run listens."""
    return shared_path(run) / "forks"


def join_server(run: str) -> Forks | None:
    """Return the server of this host; None where there is none."""
    path = fork_socket(run)
    return Forks(path) if path.exists() else None


def main(run: str, modules: Sequence[str]) -> None:
    """Print the facts, and fork workers until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    leave_out_torch()
    alive = os.dup(sys.stdin.fileno())
    with shared_folder(run), ExitStack() as stack:
        try:
            # Before the facts are printed: a process that has them may connect at once.
            listener = stack.enter_context(listening(fork_socket(run)))
        except OSError:
            # Another node's server has this host.
            _print_facts()
            return
        import tvm  # noqa: F401

        # In a process of its own: looking for GPUs opens them, and then nothing forked from here could use one.
        pid = os.fork()
        if not pid:
            # While it were open here, clients of a server that is gone would wait.
            listener.close()
            _print_facts_and_exit()
        do_imports(modules)
        os.waitpid(pid, 0)
        forkserver.main(listener.detach(), alive, [])


def _print_facts() -> None:
    sys.stdout.write(json.dumps(asdict(read_facts())) + "\n")
    sys.stdout.flush()


def _print_facts_and_exit() -> None:
    code = 1
    try:
        _print_facts()
        code = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(sys.argv[1], sys.argv[2:])
