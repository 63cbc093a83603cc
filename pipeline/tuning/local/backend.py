"""Measuring on this machine: one process for each device, side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from relaxtune.pipeline.temporary import temporary_folder
from relaxtune.pipeline.tuning.local.devices import pinned
from relaxtune.pipeline.tuning.local.measuring_process import MeasuringProcess
from relaxtune.pipeline.tuning.measure.backend import Capabilities
from relaxtune.pipeline.tuning.measure.device_turn import turn_of
from relaxtune.pipeline.tuning.measure.side_by_side import SideBySide
from relaxtune.pipeline.tuning.measure.stop import StopSignal
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.workers.fork_server import Forks
from relaxtune.tuning_db.records import Environment


class LocalBackend(SideBySide):
    """Measures on devices of this machine; the next candidate goes to whichever device is free.

    A device whose process cannot be started is left alone; the others go on.

    Parameters
    ----------
    devices : sequence of str
        TVM's names, such as `cpu:0` or `cuda:1`; each gets a process of its own, pinned to it.
    environment : Environment
        What outcomes are stamped with; all devices are of its model.
    options, timeout_s, stop, seed, server
        See `MeasuringProcess`.
    turns : Path or None
        The folder of the devices' turns (`DeviceTurn`), where other processes time something on them too.
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
        turns: Path | None = None,
    ) -> None:
        options, stop = options or MeasureOptions(), stop or StopSignal()
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(temporary_folder()))
            turns_held = [
                None if turns is None else stack.enter_context(contextlib.closing(turn_of(turns, one)))
                for one in devices
            ]
            self.processes = [
                stack.enter_context(
                    contextlib.closing(
                        MeasuringProcess(
                            pinned(one),
                            environment,
                            options,
                            timeout_s,
                            stop,
                            seed,
                            directory,
                            server,
                            name=one,
                            turn=held,
                        )
                    )
                )
                for one, held in zip(devices, turns_held, strict=True)
            ]
            capabilities = Capabilities(
                environment.device_kind, environment.device_name, undisturbed=environment.device_kind != "cpu"
            )
            super().__init__(self.processes, capabilities)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End the processes and the threads that feed them."""
        super().close()
        self._stack.close()
