"""The highest rates of a device, with which a kernel's are compared, and where they were measured.

Ceilings come from a file (`relaxtune report --ceilings FILE`, written by `benchmarks/kernels/measure_ceilings.py` on a
GPU), from a measurement on this CPU, or from the few devices known here. A kernel without a ceiling has its rates and
no bottleneck; nothing is guessed.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from relaxtune.pipeline.environment import cpu_name
from relaxtune.pipeline.errors import UsageError

if TYPE_CHECKING:
    from tvm_ffi import Device

_MATMUL_SIZE = 1536
_COPY_BYTES = 1 << 28
_COPIES = 20  # On a GPU, between two waits.
# Long enough to see past another program's moment.
_SECONDS = 0.7


@dataclass(frozen=True)
class Ceilings:
    """The highest rates seen on a device."""

    device: str  # Product name.
    # Dtype of a matmul's operands -> FLOP/s of a large matmul.
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    bytes_per_s: float | None = None  # Bytes read plus written each second by a large copy; None if unknown.
    launch_us: float | None = None  # Time of the smallest kernel inside a CUDA graph; None if unknown.
    source: str = ""  # How they were measured, for people.

    def to_json(self) -> dict[str, object]:
        """Return plain JSON data, as `read_ceilings` takes it."""
        return asdict(self)


# Devices measured by this project; the raw files are in benchmarks/results.
KNOWN_CEILINGS: Mapping[str, Ceilings] = {
    "NVIDIA H200": Ceilings(
        "NVIDIA H200",
        {"float16": 771e12, "bfloat16": 798e12, "float32": 51e12},
        4.30e12,
        0.96,
        "another H200, 2026-11-20: benchmarks/results/h200-ceilings.json",
    )
}


def read_ceilings(path: Path) -> Ceilings:
    """Return the ceilings of a JSON file.

    Raises `UsageError`: it cannot be read, or lacks what ceilings have.
    """
    form = '{"device": NAME, "flops_per_s": {"float16": N}, "bytes_per_s": N, "launch_us": N, "source": TEXT}'
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        flops = {str(name): float(value) for name, value in data["flops_per_s"].items()}
        numbers = {name: None if data.get(name) is None else float(data[name]) for name in ("bytes_per_s", "launch_us")}
        ceilings = Ceilings(str(data["device"]), flops, source=str(data.get("source", path)), **numbers)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UsageError(f"--ceilings {path} cannot be used ({type(e).__name__}: {e}); expected {form}") from e
    if any(value <= 0 for value in (*flops.values(), *(n for n in numbers.values() if n is not None))):
        raise UsageError(f"--ceilings {path} holds a rate that is not above 0; expected {form}")
    return ceilings


def known_ceilings(device: str | None) -> Ceilings | None:
    """Return the ceilings of a device that is known here."""
    return KNOWN_CEILINGS.get(device or "")


def measure_cpu_ceilings() -> Ceilings:
    """Return this CPU's ceilings, in about a second: NumPy's float32 matmul, and a copy by one thread a core."""
    from relaxtune.schedules.targets.host import physical_cores

    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal((_MATMUL_SIZE, _MATMUL_SIZE), dtype=np.float32) for _ in range(2))
    out = np.empty_like(a)
    matmul_s = _fastest(lambda: np.matmul(a, b, out=out))
    cores = max(1, physical_cores() or 1)
    source = np.ones(_COPY_BYTES // 8)
    destination = np.zeros_like(source)
    bounds = [source.size * part // cores for part in range(cores + 1)]
    slices = [slice(low, high) for low, high in itertools.pairwise(bounds)]
    with ThreadPoolExecutor(cores) as pool:

        def copy() -> None:
            # NumPy lets other threads run while it copies.
            list(pool.map(lambda part: np.copyto(destination[part], source[part]), slices))

        copy_s = _fastest(copy)
    return Ceilings(
        cpu_name(),
        {"float32": 2 * _MATMUL_SIZE**3 / matmul_s},
        2 * source.nbytes / copy_s,
        source=(
            f"measured on this machine now: NumPy float32 matmul {_MATMUL_SIZE}^3, copy of {_COPY_BYTES >> 20} MiB by "
            f"{cores} threads; the fastest within {_SECONDS} s"
        ),
    )


def measure_bandwidth(device: Device) -> float:
    """Return the bytes that large copies read and write on a device in a second."""
    from relaxtune.pipeline.tvm_runtime.library import copy, empty, is_cpu, synchronise

    if is_cpu(device):
        return measure_cpu_ceilings().bytes_per_s or math.nan
    first, second = (empty((_COPY_BYTES,), "uint8", device) for _ in range(2))

    def copies() -> None:
        for _ in range(_COPIES):
            copy(first, second)
        synchronise(device)

    return 2 * _COPY_BYTES * _COPIES / _fastest(copies)


def _fastest(run: Callable[[], object]) -> float:
    run()
    began = time.perf_counter()
    seconds: list[float] = []
    while not seconds or time.perf_counter() - began < _SECONDS:
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
