"""How a function of a lowered module gets its kernel, which compiling takes, and what work it is, for the manifest."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import s_tir, tirx

from relaxtune.pipeline.artifact.entries import ArgumentEntry, MeasuredEntry, WorkEntry
from relaxtune.pipeline.tasks.extract import as_workload, untunable_reason
from relaxtune.schedules.functions.attention import spec_of
from relaxtune.schedules.tir.blocks import buffer_bytes, static_shape, written_params
from relaxtune.schedules.tir.dependent_arguments import column_sums_of_weights, padding_masks, partial_sums_of_rows
from relaxtune.schedules.tir.index_ranges import index_ranges
from relaxtune.schedules.tir.signature import describe_kernel
from relaxtune.tuning_db.records import Route
from relaxtune.tuning_db.winner import Trace


@dataclass(frozen=True)
class KernelChoice:
    """How one PrimFunc gets its schedule."""

    function: str  # Name of the PrimFunc in the lowered module.
    task: str | None  # Name of its tuning task, None when it has none.
    route: Route  # Who makes the kernel.
    # The database record behind it, its median latency, and its decision (JSON); None for the fallback. A template's
    # default has a decision alone.
    record_id: int | None = None
    latency_us: float | None = None
    decision: str | None = None
    note: str = ""  # Why there is no record and what stands in, or which better records could not be used.
    # Ids of the records that were passed over because their decision cannot be replayed.
    unusable: tuple[int, ...] = ()
    database: str | None = None  # The database the record is in, when several lie over each other; else None.
    measured: MeasuredEntry | None = None  # The record's device and what the kernel takes there; None without a record.
    # Whether it is taken since the whole model is faster with it, though another kernel is faster alone.
    within_model: bool = False
    # Whether it is a table of kernels that were measured at some sizes, each by a record of its own.
    of_sizes: bool = False
    # The records that were looked at, and what became of each.
    trace: Trace = field(default=(), repr=False, compare=False)
    # The scheduled PrimFunc; None when the fallback is to make it.
    scheduled: tirx.PrimFunc | None = field(default=None, repr=False, compare=False)

    @property
    def has_record(self) -> bool:
        """Whether a measured record stands behind the kernel."""
        return self.record_id is not None


def kernel_work(func: tirx.PrimFunc) -> WorkEntry | None:
    """Return the work of one run of an unscheduled PrimFunc; None where a shape is known only at run time."""
    if untunable_reason(func) is not None:
        return None
    ranges, masks = index_ranges(func), padding_masks(func)
    partials, columns = partial_sums_of_rows(func), column_sums_of_weights(func)
    arguments = tuple(
        ArgumentEntry(
            str(param.dtype),
            static_shape(param) or (),
            limit=ranges.get(position),
            hides_nothing=masks.get(str(position)),
            partial_sums_of=partials.get(str(position)),
            column_sums_of=columns.get(str(position)),
        )
        for position, param in enumerate(func.params)
    )
    family = "attention" if spec_of(func) is not None else describe_kernel(func).family
    sizes = [buffer_bytes(param) for param in func.params]
    if family == "gather":  # of the table, only what is taken
        written = sum(sizes[position] for position in written_params(func))
        sizes = [min(size, written) for size in sizes]
    return WorkEntry(
        family=family,
        flops=float(s_tir.analysis.estimate_tir_flops(as_workload(func))),
        bytes=float(sum(sizes)),
        arguments=arguments,
    )
