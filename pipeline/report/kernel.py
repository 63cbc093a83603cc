"""`KernelRow`: one kernel of a report, its rates against the device's ceilings, and what holds it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from relaxtune.pipeline.report.ceilings import Ceilings

# Families whose arithmetic runs on the matmul units.
CONTRACTIONS = frozenset({"matmul", "batch_matmul", "multi_matmul", "conv", "attention"})
# Below this part of both ceilings neither unit is what a kernel waits for.
_BUSY = 0.5
# Bandwidth further above memory's ceiling than a measurement can err came from a cache, and says nothing of memory.
_CACHED = 1.2
# Largest ratio of a launch by the host to a launch inside a graph: a kernel timed alone is launched by the host.
_HOST_LAUNCH = 4.0
# Up to this many times the smallest kernel's time, a kernel is mostly its own launch.
_LAUNCHES = 2.0


class Bottleneck(StrEnum):
    """The limit of a kernel's speed."""

    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    LATENCY = "latency"
    LAUNCH = "launch"


class TimeSource(StrEnum):
    """Where a kernel's time comes from: its tuning record, or a run on this machine now."""

    RECORD = "record"
    PROFILE = "profile"


@dataclass(frozen=True)
class KernelRow:
    """One kernel of a model."""

    # The PrimFunc, its operator family, and the ONNX nodes behind it.
    name: str
    family: str | None
    onnx_nodes: tuple[str, ...]
    calls: int  # How often one inference runs it.
    # How it was made, the record behind it, and what the compiler says of it.
    route: str
    record_id: int | None
    note: str = ""
    # One call; None when it was never measured.
    time_us: float | None = None
    time_source: TimeSource | None = None
    share: float | None = None  # Its part of the time of all kernels whose time is known.
    # Work and traffic of one call, and the dtype of its first float parameter; None where unknown.
    flops: float | None = None
    bytes: float | None = None
    dtype: str | None = None
    # From the record, where it has them.
    registers: int | None = None
    smem_bytes: int | None = None
    spill_bytes: int | None = None
    # Rates over the ceilings. Bandwidth above 1 means that data came from a cache.
    compute_use: float | None = None
    bandwidth_use: float | None = None
    bottleneck: Bottleneck | None = None  # None without time or ceilings.
    kernel_hash: str | None = None  # Of the scheduled kernel: equal in two builds, they hold the same one.

    @property
    def total_us(self) -> float | None:
        """Time of all its calls."""
        return None if self.time_us is None else self.time_us * self.calls

    @property
    def flops_per_s(self) -> float | None:
        """Arithmetic rate."""
        return self.flops / self.time_us * 1e6 if self.flops and self.time_us else None

    @property
    def bytes_per_s(self) -> float | None:
        """Rate of traffic."""
        return self.bytes / self.time_us * 1e6 if self.bytes and self.time_us else None

    def to_json(self) -> dict[str, object]:
        """Return plain JSON data, rates included."""
        return {
            **asdict(self),
            "total_us": self.total_us,
            "flops_per_s": self.flops_per_s,
            "bytes_per_s": self.bytes_per_s,
        }


def judged(rows: Sequence[KernelRow], ceilings: Ceilings | None) -> tuple[KernelRow, ...]:
    """Return the rows with shares, uses and bottlenecks, those that take the most time first.

    The fastest of the rows stands for a launch, unless it is far above what the ceilings say of one.
    """
    whole = sum(row.total_us or 0.0 for row in rows)
    shared = [replace(row, share=row.total_us / whole if whole and row.total_us is not None else None) for row in rows]
    smallest = min((row.time_us for row in rows if row.time_us is not None), default=None)
    if smallest is not None and ceilings is not None and ceilings.launch_us is not None:
        smallest = min(smallest, _HOST_LAUNCH * ceilings.launch_us)
    return tuple(sorted((_judge(row, ceilings, smallest) for row in shared), key=lambda row: -(row.total_us or 0.0)))


def float_dtype(dtypes: Sequence[str]) -> str | None:
    """Return the first dtype of floats, which names the ceiling of a kernel with such parameters."""
    return next((dtype for dtype in dtypes if "float" in dtype), None)


def find_bottleneck(
    time_us: float, compute_use: float | None, bandwidth_use: float | None, launch_us: float | None
) -> Bottleneck | None:
    """Return what a kernel's time is mostly spent on; None when nothing is known to compare with.

    The unit that is nearer to its ceiling, if it is at half of it at least (the roofline model, Williams et al.,
    CACM 2009); else the launch, if that is half of the time at least; else latency: too little work in flight.
    Bandwidth beyond memory's ceiling is a cache's, and not held against memory.
    """
    if compute_use is None and bandwidth_use is None:
        return None
    compute, bandwidth = compute_use or 0.0, bandwidth_use or 0.0
    if bandwidth > _CACHED:
        bandwidth = 0.0
    if max(compute, bandwidth) >= _BUSY:
        return Bottleneck.COMPUTE if compute >= bandwidth else Bottleneck.BANDWIDTH
    if launch_us is not None and time_us <= _LAUNCHES * launch_us:
        return Bottleneck.LAUNCH
    return Bottleneck.LATENCY


def _judge(row: KernelRow, ceilings: Ceilings | None, launch_us: float | None) -> KernelRow:
    if ceilings is None or row.time_us is None:
        return row
    peak = ceilings.flops_per_s.get(row.dtype or "") if row.family in CONTRACTIONS else None
    compute = row.flops_per_s / peak if peak and row.flops_per_s else None
    bandwidth = row.bytes_per_s / ceilings.bytes_per_s if ceilings.bytes_per_s and row.bytes_per_s else None
    return replace(
        row,
        compute_use=compute,
        bandwidth_use=bandwidth,
        bottleneck=find_bottleneck(row.time_us, compute, bandwidth, launch_us),
    )
