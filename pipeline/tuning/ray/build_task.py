"""The builder's side on a node: a Ray worker that keeps one build process warm.

A candidate may crash or hang its compiler. So the worker does not compile: a child of it does, with the limits, the
time-outs and the statuses that builds have on one machine. When the Ray worker itself dies, no candidate did it.

Ray imports this file before anything else of ours, so nothing here is imported that imports TVM, and PyTorch with it.
"""

from __future__ import annotations

import atexit
import contextlib
import pickle
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.workers.child import leave_out_torch

if TYPE_CHECKING:
    from relaxtune.pipeline.tuning.local.build_pool import BuildPool
    from relaxtune.pipeline.tuning.measure.backend import Built

_pools: dict[bytes, BuildPool] = {}


def build(what: bytes, target: bytes, limits: bytes, forks: str = "") -> Built:
    """Return a finished build, whose artifact holds its bytes; `limits` are pickled too.

    `forks` names the run whose server on this host forks the build process.
    """
    leave_out_torch()
    from relaxtune.pipeline.tuning.measure.backend import Built, Unmeasured, pack

    done: SimpleQueue[Built] = SimpleQueue()
    try:
        _pool(limits, forks).submit_pickled(what, target, done.put)
        built = done.get()
        if built.artifact is None:
            return built
        path = Path(str(built.artifact.content))
        code = pack(path.read_bytes())
        path.unlink()
    except OSError as e:
        # The node's disk is full, or no process can be started.
        return Built(Unmeasured.LOST, error=str(e))
    return replace(built, artifact=replace(built.artifact, content=code))


def warm(limits: bytes, forks: str = "") -> None:
    """Start a worker's build process before there is something to build."""
    _pool(limits, forks)


def _pool(limits: bytes, forks: str) -> BuildPool:
    if limits not in _pools:
        leave_out_torch()
        from relaxtune.pipeline.tuning.local.build_pool import BuildPool
        from relaxtune.pipeline.tuning.ray.node_server import join_server

        stack = contextlib.ExitStack()
        directory = Path(stack.enter_context(temporary_folder()))
        pool = BuildPool(1, directory, pickle.loads(limits), server=join_server(forks))
        _pools[limits] = stack.enter_context(contextlib.closing(pool))
        atexit.register(stack.close)
    return _pools[limits]
