"""The measuring side on a node: an actor with one device to itself, chosen and pinned by Ray.

A candidate runs in a child of the actor, which may crash or hang; the actor kills and replaces it, as on one machine.
References are computed here, where the device is; actors of one machine share the files.

Ray imports this file before anything else of ours, so nothing here is imported that imports TVM, and PyTorch with it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.temporary import shared_folder, temporary_folder
from relaxtune.pipeline.tuning.measure.device_lock import lock_of
from relaxtune.pipeline.workers.child import leave_out_torch

if TYPE_CHECKING:
    from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
    from relaxtune.schedules.targets import ResolvedTarget
    from relaxtune.tuning_db.records import Environment


@dataclass(frozen=True)
class ActorSettings:
    """Settings of an actor."""

    run: str  # Of the tuning run; its references are shared under this name.
    # The target, and the environment of the outcomes.
    target: ResolvedTarget
    environment: Environment
    # See `MeasuringProcess`.
    options: MeasureOptions
    timeout_s: float
    seed: int
    forks: str = ""  # The run whose server on the host forks the measuring process; without, it is started afresh.


class MeasuringActor:
    """A `MeasuringProcess` on its device, for candidates that come as bytes.

    It is started with a pickled `ActorSettings`.

    Raises
    ------
    PipelineError
        The device is of another model than the run's.
    """

    def __init__(self, pickled: bytes) -> None:
        leave_out_torch()
        from relaxtune.pipeline.environment import detect_environment
        from relaxtune.pipeline.tuning.local.devices import pinned
        from relaxtune.pipeline.tuning.local.measuring_process import MeasuringProcess
        from relaxtune.pipeline.tuning.measure.stop import StopSignal
        from relaxtune.pipeline.tuning.ray.node_server import join_server

        settings: ActorSettings = pickle.loads(pickled)
        gpu = settings.target.kind == "cuda"
        with contextlib.ExitStack() as stack:
            references = stack.enter_context(shared_folder(settings.run))
            # Actors that work on cells time them on the same device.
            lock = stack.enter_context(contextlib.closing(lock_of(references, own_gpu()))) if gpu else None
            # It starts while this process looks at the device.
            self._process = stack.enter_context(
                contextlib.closing(
                    MeasuringProcess(
                        pinned("cuda:0" if gpu else "cpu:0"),
                        settings.environment,
                        settings.options,
                        settings.timeout_s,
                        StopSignal(),
                        settings.seed,
                        Path(stack.enter_context(temporary_folder())),
                        join_server(settings.forks),
                        references=references,
                        lock=lock,
                    )
                )
            )
            found = detect_environment(settings.target)
            if found != settings.environment:
                raise PipelineError(
                    f"{socket.gethostname()} measures for another environment than the run's: expected "
                    f"{settings.environment}, got {found}"
                )
            self._stack = stack.pop_all()

    def begin(self) -> str:
        """Set the device up; return the host's name."""
        self._process.ready()
        return socket.gethostname()

    def call(self, method: str, *arguments: object) -> object:
        """Return what a method of the process returns."""
        return getattr(self._process, method)(*arguments)

    def leave(self) -> None:
        """End the child and remove the files."""
        self._stack.close()


def own_gpu() -> str:
    """Return the name that all actors on this process's GPU have for it; Ray says which it is."""
    return f"cuda:{os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
