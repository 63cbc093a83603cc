"""Energy that a GPU takes while something runs, from the counter of its driver (NVML)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm_ffi import Device

from relaxtune.pipeline.errors import PipelineError


@dataclass
class Energy:
    """Joules of a GPU over some seconds, all its other work included; or why there is no figure."""

    seconds: float = 0.0
    joules: float | None = None
    missing: str = ""

    @property
    def watts(self) -> float | None:
        """Mean power."""
        return None if self.joules is None or not self.seconds else self.joules / self.seconds

    def text(self, calls: int) -> str:
        """Return the figures of so many calls, or why there are none."""
        if self.joules is None or self.watts is None:
            return f"not measured: {self.missing}"
        return f"{self.watts:.1f} W, {self.joules / calls:.4g} J a call"

    def to_json(self, calls: int) -> dict[str, object]:
        """Return the figures of so many calls as plain JSON data."""
        joules_a_call = None if self.joules is None else self.joules / calls
        return {"watts": self.watts, "joules_a_call": joules_a_call, "seconds": self.seconds, "missing": self.missing}


@contextmanager
def energy_of(device: Device) -> Iterator[Energy]:
    """Give what is filled with the energy of the block when it ends."""
    energy, before, read = Energy(), 0.0, None
    if device.type != "cuda":
        energy.missing = "only GPUs have a counter"
    else:
        try:
            read = _counter(device.index)
            before = read()
        except ImportError:
            energy.missing = "nvidia-ml-py is not installed; pip install 'relaxtune[energy]'"
        except PipelineError as error:
            energy.missing, read = str(error), None
    started = time.perf_counter()
    yield energy
    energy.seconds = time.perf_counter() - started
    if read is not None:
        energy.joules = read() - before


def _counter(number: int) -> Callable[[], float]:
    """Return a function that reads the joules of a CUDA device since its driver was loaded.

    NVML knows all GPUs, CUDA only those of `$CUDA_VISIBLE_DEVICES`.

    Raises `ImportError`: there is no binding of NVML; `PipelineError`, also from the function: NVML fails.
    """
    import pynvml

    def read() -> float:
        try:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except pynvml.NVMLError as error:
            raise PipelineError(f"the driver has no counter of energy ({error})") from error

    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[number] if number < len(visible) else str(number)
    try:
        pynvml.nvmlInit()
        by_number = name.isdigit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(name)
    except pynvml.NVMLError as error:
        raise PipelineError(f"NVML does not work here ({error})") from error
    return read
