"""Measuring on this machine: one process for each device, side by side, started and ended together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tuning.local.build_pool import BUILD_MODULE, BuilderLimits, BuildPool
from relaxtune.pipeline.tuning.local.devices import choose_devices, pinned
from relaxtune.pipeline.tuning.local.measuring_process import MEASURE_MODULE, MeasuringProcess
from relaxtune.pipeline.tuning.measure.backend import Builder, MeasureBackend
from relaxtune.pipeline.tuning.measure.device_lock import lock_of
from relaxtune.pipeline.tuning.measure.side_by_side import SideBySide
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.workers.fork_server import Forks, ForkServer
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.targets.host import physical_cores
from relaxtune.tuning_db.records import Environment


class LocalBackend(SideBySide):
    """Measures on devices of this machine; the next candidate goes to whichever device is free.

    A device whose process cannot be started is left alone; the others go on.

    `devices` are TVM's names, such as `cpu:0` or `cuda:1`, all of one model; each gets a process of its own, pinned to
    it. `locks` is the folder of their `DeviceLock`s, where other processes time something on them too.
    """

    def __init__(
        self,
        devices: Sequence[str],
        environment: Environment,
        options: MeasureOptions | None = None,
        timeout_s: float = 30.0,
        stop: StopSignal | None = None,
        seed: int = 0,
        server: Forks | None = None,
        locks: Path | None = None,
    ) -> None:
        options, stop = options or MeasureOptions(), stop or StopSignal()
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(temporary_folder()))
            self.processes = []
            for one in devices:
                lock = None if locks is None else stack.enter_context(contextlib.closing(lock_of(locks, one)))
                process = MeasuringProcess(
                    pinned(one), environment, options, timeout_s, stop, seed, directory, server, name=one, lock=lock
                )
                self.processes.append(stack.enter_context(contextlib.closing(process)))
            super().__init__(self.processes, undisturbed=environment.device_kind != "cpu")
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End the processes and the threads that feed them."""
        super().close()
        self._stack.close()


@dataclass(frozen=True)
class Machine:
    """A builder and a backend."""

    builder: Builder
    backend: MeasureBackend


def timing_options(target: ResolvedTarget, options: TuningOptions) -> MeasureOptions:
    """Return how candidates are timed: on as many threads as the target has cores, unless the options say another."""
    if options.measure.threads is not None:
        return options.measure
    return replace(options.measure, threads=getattr(target.limits, "cores", None))


@contextlib.contextmanager
def this_machine(
    target: ResolvedTarget,
    environment: Environment,
    options: TuningOptions,
    stop: StopSignal,
    backend: MeasureBackend | None = None,
    locks: Path | None = None,
) -> Iterator[Machine]:
    """Start build and measuring processes and end them; `locks` is as in `LocalBackend`.

    A `backend` that is given is not closed here.

    Raises `UsageError`: `options.devices` names a device that cannot be used.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(temporary_folder()))
        server = None
        if options.fork and ForkServer.available():
            server = stack.enter_context(contextlib.closing(ForkServer([BUILD_MODULE, MEASURE_MODULE])))
        if backend is None:
            measure = timing_options(target, options)
            # CUDA, which TVM initialises in the server, works in no process forked from it.
            forks = server if target.kind != "cuda" else None
            devices = choose_devices(target, options.devices)
            own = LocalBackend(devices, environment, measure, options.run_timeout_s, stop, options.seed, forks, locks)
            backend = stack.enter_context(contextlib.closing(own))
        # Started last and so ended first: what it builds goes to the backend.
        limits = BuilderLimits(timeout_s=options.build_timeout_s)
        pool = BuildPool(options.workers or physical_cores(), directory, limits, stop, server)
        builder = stack.enter_context(contextlib.closing(pool))
        yield Machine(builder, backend)
