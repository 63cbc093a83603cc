"""`KernelChoice`: how a function of a lowered module gets its kernel; what compiling takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx

from relaxtune.pipeline.artifact.entries import MeasuredEntry
from relaxtune.tuning_db.records import Route


@dataclass(frozen=True)
class KernelChoice:
    """How one PrimFunc gets its schedule.

    Attributes
    ----------
    function
        Name of the PrimFunc in the lowered module.
    task
        Name of its tuning task, None when it has none.
    route
        Who makes the kernel.
    record_id, latency_us, decision
        The database record behind it, its median latency, and its decision (JSON); None for the fallback. A
        template's default has a decision alone.
    note
        Why there is no record and what stands in, or which better records could not be used.
    unusable
        Ids of the records that were passed over because their decision cannot be replayed.
    database
        The database the record is in, when several lie over each other; else None.
    measured
        The record's device and what the kernel takes there; None without a record.
    within_model
        Whether it is taken since the whole model is faster with it, though another kernel is faster alone.
    of_sizes
        Whether it is a table of kernels that were measured at some sizes, each by a record of its own.
    scheduled
        The scheduled PrimFunc, None when the fallback is to make it.
    """

    function: str
    task: str | None
    route: Route
    record_id: int | None = None
    latency_us: float | None = None
    decision: str | None = None
    note: str = ""
    unusable: tuple[int, ...] = ()
    database: str | None = None
    measured: MeasuredEntry | None = None
    within_model: bool = False
    of_sizes: bool = False
    scheduled: tirx.PrimFunc | None = field(default=None, repr=False, compare=False)

    @property
    def has_record(self) -> bool:
        """Whether a measured record stands behind the kernel."""
        return self.record_id is not None
