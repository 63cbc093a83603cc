"""`DeviceArm`: a model with its inputs on the device, ready to be launched again and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


class ArmUnavailableError(Exception):
    """An arm cannot take part in a case; the message says why."""


@dataclass(frozen=True)
class DeviceArm:
    """One implementation of a case.

    Attributes
    ----------
    launch
        Starts one inference on inputs that lie on the device; may return before it is done.
    synchronise
        Waits for what was launched.
    outputs
        Returns copies of the outputs of the last inference, by name.
    stream
        The CUDA stream it launches on, 0 for the default one.
    notes
        What to keep in the results: how it was made, seconds of compiling.
    holds
        What must live as long as the arm.
    """

    launch: Callable[[], None]
    synchronise: Callable[[], None]
    outputs: Callable[[], Mapping[str, Tensor]]
    stream: int = 0
    notes: Mapping[str, object] = field(default_factory=dict)
    holds: object = None

    def run(self) -> None:
        """Run one inference and wait for its result: what the host clock times."""
        self.launch()
        self.synchronise()
