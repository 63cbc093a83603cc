"""The processes of this machine that build and measure, started together and ended together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tuning.local.backend import LocalBackend
from relaxtune.pipeline.tuning.local.build_pool import BUILD_MODULE, BuilderLimits, BuildPool
from relaxtune.pipeline.tuning.local.devices import choose_devices
from relaxtune.pipeline.tuning.local.measuring_process import MEASURE_MODULE
from relaxtune.pipeline.tuning.measure.backend import Builder, MeasureBackend
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.workers.fork_server import ForkServer
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.targets.host import physical_cores
from relaxtune.tuning_db.records import Environment


@dataclass(frozen=True)
class Machine:
    """What builds and what measures."""

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
    builder: Builder | None = None,
    backend: MeasureBackend | None = None,
    turns: Path | None = None,
) -> Iterator[Machine]:
    """Start build and measuring processes, those that are not given, and end them; `turns` is as in `LocalBackend`.

    Raises
    ------
    UsageError
        `options.devices` names a device that cannot be used.
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
            own = LocalBackend(devices, environment, measure, options.run_timeout_s, stop, options.seed, forks, turns)
            backend = stack.enter_context(contextlib.closing(own))
        if builder is None:
            # Started last and so ended first: what it builds goes to the backend.
            limits = BuilderLimits(timeout_s=options.build_timeout_s)
            pool = BuildPool(options.workers or physical_cores(), directory, limits, stop, server)
            builder = stack.enter_context(contextlib.closing(pool))
        yield Machine(builder, backend)
