"""Tuning tasks for kernels of symbolic sizes: each such kernel at a few sizes, a task like any static kernel.

On a GPU, a kernel with a symbolic number of rows is a table: ranges of rows, each with a decision of a template. What
wins at a size is put into the table there (`pipeline.choose.selection`). On a CPU, one decision serves all sizes: that
which takes the least time at all of them together. Records have the signature of a static kernel of that size, so a
static artifact's records count for tables, and near sizes start from each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import tvm
from tvm import tirx

from relaxtune.models import OnnxModel
from relaxtune.models.axis_profile import AxisProfile, sizes_within
from relaxtune.models.size_histogram import SizePoint, few_points
from relaxtune.pipeline.passes.module import LoweredModule
from relaxtune.pipeline.tasks.default_sizes import default_points
from relaxtune.pipeline.tasks.extract import as_workload, called_kernels, make_task, untunable_reason
from relaxtune.pipeline.tasks.packed_module import PackedModule
from relaxtune.pipeline.tasks.task import SizeOfTable, TuningTask
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.attention import AttentionSpec, spec_of
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.marks import AT_SIZES_ATTR, NAMED_ROWS_ATTR, ROWS_MAX_ATTR
from relaxtune.schedules.registry import ANY_SIZE, RANGES, table_of
from relaxtune.schedules.sizes import largest_size, variables_of
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.cut import Place
from relaxtune.schedules.templates.ranges import symbolic_rows
from relaxtune.schedules.tir.blocks import shape_of
from relaxtune.schedules.tir.symbolic_sizes import at_sizes, size_at

# Points of a histogram, and what their weights add up to.
_POINTS_MAX = 8
_SHARES = 20


@dataclass(frozen=True)
class TunedSizes:
    """The size of every axis at one point that kernels are tuned at, its weight among the points, and its name."""

    sizes: Mapping[str, int]
    weight: int
    name: str
    is_default: bool = False  # Whether the user named no sizes.


def tuned_sizes(
    model: OnnxModel, profile: Mapping[str, AxisProfile], lengths: Sequence[SizePoint], kind: str
) -> tuple[TunedSizes, ...]:
    """Return the points that kernels of symbolic sizes are tuned at on a kind of target; none without free axes.

    From counted calls, eight that stand for all, by their share. From a profile alone, the typical sizes with weight 2,
    the least and the largest of all axes with weight 1. Without either, those of `default_points`.
    """
    maxima = {axis: one.most for axis, one in profile.items()}
    points: list[SizePoint] = []
    if lengths:
        total = sum(point.count for point in lengths)
        points = [
            SizePoint(point.sizes, max(1, round(_SHARES * point.count / total)))
            for point in few_points(lengths, _POINTS_MAX)
        ]
    elif profile:
        for size, weight in (("least", 1), ("typical", 2), ("most", 1)):
            sizes = tuple((axis, max(1, getattr(one, size))) for axis, one in profile.items())
            points.append(SizePoint(sizes, weight))
    else:
        points = [*default_points(model, kind)]
    is_default = not (lengths or profile)
    merged = {point.sizes: sum(one.count for one in points if one.sizes == point.sizes) for point in points}
    return tuple(
        TunedSizes(sizes_within(model, maxima, dict(sizes)), count, str(SizePoint(sizes, count)), is_default)
        for sizes, count in merged.items()
    )


def sizes_text(points: Sequence[TunedSizes], tasks: Sequence[TuningTask]) -> str:
    """Return a line that names points, and how a user changes them; without tasks, no kernel is tuned at them."""
    what = "tuned and compared" if tasks else "compared"
    names = "; ".join(point.name for point in points)
    profile = ",".join(f"{part.partition('=')[0]}=MIN:TYPICAL:MAX" for part in points[0].name.split())
    change = f". Name your own with --lengths FILE (counts of real calls) or --profile {profile}"
    return f"{what} at {len(points)} sizes: {names}{change * points[0].is_default}"


def tasks_of_tables(
    lowered: LoweredModule, points: Sequence[TunedSizes], target: ResolvedTarget
) -> tuple[TuningTask, ...]:
    """Return the tasks of a module's kernels with a symbolic number of rows, at each point.

    Points of one place in a function's table, such as equal rows, are one task. Equal tasks of all functions are
    merged.
    """
    found: dict[str, TuningTask] = {}
    for name, func, calls in called_kernels(lowered) if points else ():
        place_of = _places_of(func, target) if untunable_reason(func) is not None else None
        if place_of is None:
            continue
        by_place: dict[Place, TuningTask] = {}
        for point in points:
            sizes = lowered.with_tokens(point.sizes)
            static = _static(func, sizes)
            if static is None or untunable_reason(static) is not None:
                continue
            place = place_of(sizes)
            nodes = [call.onnx_nodes for call in calls] * point.weight
            known = by_place.get(place)
            if known is None:
                mod = as_workload(static.with_attr(AT_SIZES_ATTR, True))
                task = make_task(f"{name}[{point.name}]", mod, model=lowered.graph.name, function=name, calls=nodes)
                of = SizeOfTable(lowered.graph.name, name, place, point.is_default, (point.name,))
                by_place[place] = replace(task, functions={}, tables=(of,))
            else:
                of = replace(known.tables[0], points=(*known.tables[0].points, point.name))
                by_place[place] = replace(known, weight=known.weight + len(nodes), tables=(of,))
        symbolic = None
        if target.kind == "cuda":
            untuned = untuned_function(lowered, name, [(task.tables[0], task) for task in by_place.values()])
            symbolic = PackedModule.of(tvm.IRModule({"main": untuned}))
        for task in by_place.values():
            other = found.get(task.workload_hash)
            task = replace(task, symbolic=symbolic)
            found[task.workload_hash] = task if other is None else other.joined(task)
    return tuple(found.values())


def _static(func: tirx.PrimFunc, sizes: Mapping[str, int]) -> tirx.PrimFunc | None:
    """Return a function at one set of sizes, None where they do not say all; attention as it is made for known ones."""
    spec, shapes = spec_of(func), [shape_of(param) for param in func.params]
    if spec is None:
        return at_sizes(func, sizes)
    if None in shapes or not variables_of(shape or () for shape in shapes).keys() <= sizes.keys():
        return None
    known = [tuple(size_at(size, sizes) for size in shape or ()) for shape in shapes]
    dtypes = [str(param.ty.dtype) for param in func.params]
    own = AttentionSpec.from_json(spec.to_json(), sizes)
    made = attention_function(own, list(zip(known, dtypes, strict=True)))
    for key, value in func.attrs.items():
        made = made if key in made.attrs else made.with_attr(key, value)
    return made


def _places_of(func: tirx.PrimFunc, target: ResolvedTarget) -> Callable[[Mapping[str, int]], Place] | None:
    """Return what gives the place of some sizes among those of a function; None where records do not make it."""
    if target.kind == "cuda":
        table = table_of(func, target)
        return None if table is None else partial(table.place, func)
    is_tuned = symbolic_rows(func) is not None and not isinstance(ANY_SIZE.own(func, target), Refusal)
    return partial(RANGES.place, func) if is_tuned else None


def untuned_function(
    lowered: LoweredModule, function: str, places: Sequence[tuple[SizeOfTable, TuningTask]] = ()
) -> tirx.PrimFunc:
    """Return a function that has no tuning task as templates are asked for it: with the rows that calls will have.

    `places` are its sizes in tables, each with the task. Sizes that the user names are likely, the likeliest first.
    """
    func = as_workload(lowered.mod[function])["main"]
    rows = symbolic_rows(func)
    most = None if rows is None else largest_size(rows, lowered.options.maxima)
    func = func if most is None else func.with_attr(ROWS_MAX_ATTR, most)
    # Of equal ones, the more rows, the more time.
    known = [(task.weight, dict(of.place).get("rows", 0)) for of, task in places if not of.is_default]
    named = [rows for _, rows in sorted(known, reverse=True) if rows]
    return func.with_attr(NAMED_ROWS_ATTR, named) if named else func
