"""What a kernel is, whoever makes it: family, work, traffic and parameters, for the manifest."""

from __future__ import annotations

from tvm import s_tir, tirx

from relaxtune.pipeline.artifact.entries import ArgumentEntry, WorkEntry
from relaxtune.pipeline.tasks.extract import as_workload, untunable_reason
from relaxtune.schedules.functions.attention import spec_of
from relaxtune.schedules.tir.blocks import buffer_bytes, static_shape, written_params
from relaxtune.schedules.tir.dependent_arguments import column_sums_of_weights, padding_masks, partial_sums_of_rows
from relaxtune.schedules.tir.index_ranges import index_ranges
from relaxtune.schedules.tir.signature import describe_kernel


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
    return WorkEntry(
        family=family,
        flops=float(s_tir.analysis.estimate_tir_flops(as_workload(func))),
        bytes=float(_traffic(func, family)),
        arguments=arguments,
    )


def _traffic(func: tirx.PrimFunc, family: str) -> int:
    """Return the bytes read plus written; of a table that is gathered from, only what is taken."""
    sizes = [buffer_bytes(param) for param in func.params]
    written = sum(sizes[position] for position in written_params(func))
    return sum(min(size, written) for size in sizes) if family == "gather" else sum(sizes)
