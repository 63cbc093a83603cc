"""Kernels for a symbolic number of rows: a small table of ranges, each with a template's decision of its own.

::

    rows    <= 16           gemm_sm90, 64 x 64, split in 3   the first range that has the call's number of rows
            <= 256          gemm_sm90, 64 x 64
            <= 320          gemm_sm90, 128 x 128             ranges of one decision have one kernel
            <= 384          gemm_sm90, 64 x 64
            above           gemm_sm90, 128 x 128             planned for the number that the table names

The table is one PrimFunc. Its host code compares the number of rows and launches one of several device kernels, so that
the choice costs a few comparisons, and Relax sees one call. Ranges are many and kernels few: a kernel takes time to
compile, a range none. Rows are all axes of the output but the last one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import NAMED_ROWS_ATTR, ROWS_MAX_ATTR
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import (
    OPEN_ROWS,
    Case,
    KernelTemplate,
    Parameters,
    Template,
    TemplateError,
    canonical_json,
    independent,
    is_dependent,
    template_of,
)
from relaxtune.schedules.templates.cut import Place, cover, cut_lines, nearest
from relaxtune.schedules.templates.launch_table import launch_by_lines
from relaxtune.schedules.tir.blocks import shape_of, written_params
from relaxtune.schedules.tir.symbolic_sizes import size_at

#: Numbers of rows that kernels are planned for where nothing was measured.
PLANNED_ROWS: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
#: The most rows of each range, which takes one of those kernels; the last one is for all above, too.
DEFAULT_RANGES: tuple[int, ...] = (
    *(16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048),
    *(2560, 3072, 3584, 4096, 5120, 6144, 8192, 12288, 16384),
)
# Candidates of a template that are compared, of each number of rows that kernels are planned for.
_LISTED = 4
# Times of two kernels are equal within this: the memory-bound ones are predicted to a few tenths of a microsecond.
_EQUAL_US, _EQUAL_MEMORY_US = 0.05, 0.2
# Each kernel takes half a second to compile. It is worth that where the calls of all ranges take that much less.
_WORTH = 0.015
# Numbers of rows of a profile, or of real calls, whose kernels are those of an artifact of one size.
_NAMED_MAX = 2


@dataclass(frozen=True)
class SizeRange:
    """The decision for calls of up to `most` rows, more than the range before has."""

    most: int
    decision: str


@dataclass(frozen=True)
class RangesParameters(Parameters):
    """A table of decisions, ranges of few rows first; the last one is for all calls above, too."""

    template: ClassVar[str] = "ranges"

    ranges: tuple[SizeRange, ...] = ()

    def to_json(self) -> str:
        """Return the parameters as canonical JSON text: the decision of a tuning record."""
        ranges = [{"most": one.most, "decision": json.loads(one.decision)} for one in self.ranges]
        return canonical_json({"template": self.template, "ranges": ranges})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the parameters that `to_json` wrote.

        Raises `TemplateError`: the text is of another template, or no table of ranges in their order.
        """
        entries = cls._document(text).get("ranges")
        listed: list[dict[str, Any]] = entries if isinstance(entries, list) else [{}]
        kinds = [{name: type(value) for name, value in one.items()} for one in listed if isinstance(one, dict)]
        if kinds != [{"most": int, "decision": dict}] * len(listed):
            raise TemplateError(
                f'decision {text!r}: expected "ranges", a list of objects with "most", a number of rows, and '
                '"decision", a decision of a template; measure the task again.'
            )
        ranges = tuple(SizeRange(one["most"], canonical_json(one["decision"])) for one in listed)
        sizes = [one.most for one in ranges]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1 or sizes[-1] < OPEN_ROWS:
            raise TemplateError(
                f"decision {text!r}: its ranges end at {sizes}, expected rising numbers of rows, the last one "
                f"{OPEN_ROWS} at least; measure the task again."
            )
        return cls(ranges)

    def at(self, place: Place) -> str:
        """Return the decision for a number of rows."""
        rows = _rows(place)
        return next((one.decision for one in self.ranges if rows <= one.most), self.ranges[-1].decision)

    def with_measured(self, places: Mapping[Place, str]) -> RangesParameters:
        """Return this table with the decisions that were the fastest at some numbers of rows.

        Between two numbers with one winner, that is the decision. Between others, where the winner changes, and beyond
        them, decisions stay.
        """
        winners = {_rows(place): decision for place, decision in places.items()}
        points = sorted(winners)
        sizes = sorted({*points, *DEFAULT_RANGES})
        found: list[str] = []
        for most in sizes:
            at = next((one for one in points if most <= one), None)
            before = max((one for one in points if one < most), default=None)
            wins = at is not None and (most == at or (before is not None and winners[before] == winners[at]))
            found.append(winners[at] if at is not None and wins else self.at((("rows", most),)))
        return _ranges(sizes, found)


class Ranges(KernelTemplate[tirx.Expr, RangesParameters]):
    """The template of functions with a symbolic number of rows; `makers` make the kernels of the ranges."""

    parameters = RangesParameters

    def __init__(self, makers: Mapping[str, Template]) -> None:
        self._makers = makers

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> tirx.Expr | Refusal:
        count = symbolic_rows(func)
        known = Refusal("its output's shape is known (the other templates make such functions)")
        return known if count is None else count

    def refuses(self, func: tirx.PrimFunc, target: ResolvedTarget) -> Refusal | None:
        """Return why there is no table, None where there is one."""
        count = self._recognise(func, target)
        found = count if isinstance(count, Refusal) else self._offered(func, target)
        return found if isinstance(found, Refusal) else None

    def _propose(self, case: Case[tirx.Expr]) -> Sequence[RangesParameters] | Refusal:
        func, target = case.func, case.target
        planned, bounds = PLANNED_ROWS, DEFAULT_RANGES
        if func.attrs and ROWS_MAX_ATTR in func.attrs:
            # The sizes up to the first that is as large; two at least.
            most = int(func.attrs[ROWS_MAX_ATTR])
            planned, bounds = (sizes[: max(2, 1 + sum(size < most for size in sizes))] for sizes in (planned, bounds))
        offered = self._proposed(func, target, planned)
        if isinstance(offered, Refusal):
            return offered
        maker, proposed = offered

        def is_open_ended(own: Parameters) -> bool:
            return maker.predict_us(func, target, own, OPEN_ROWS) is not None

        if bounds[-1] < OPEN_ROWS:
            # The last kernel is for all rows above, too: with norms inside, these may ask for more shared memory.
            open_ended = [one for one in proposed if is_open_ended(one)]
            if not open_ended and any(maker.predict_us(func, target, one, bounds[0]) for one in proposed):
                return self._propose(replace(case, func=func.without_attr(ROWS_MAX_ATTR)))
            proposed = open_ended or proposed
        # Loads of many rows, where few exist, are slow (H200: 1.1 to 1.4 times as long with 1 to 16 rows): the kernel
        # of the first range is planned for few.
        own = 1 if proposed[0].loads_boxes else 0
        # A few of the numbers of rows that are named, those that come first; none of the first range.
        counts = map(int, func.attrs.get(NAMED_ROWS_ATTR, ())) if own and func.attrs else ()
        named = [count for count in counts if bounds[0] < count <= bounds[-1]][:_NAMED_MAX]
        bounds = tuple(sorted({*bounds, *named}))
        others = [maker.candidates(func, target, count) for count in named]
        listed = [one for few in others if not isinstance(few, Refusal) for one in few[:_LISTED]]
        proposed = list(dict.fromkeys([*listed, *proposed]))
        times = _times(maker, func, target, proposed, bounds)
        if not times:
            return [RangesParameters((SizeRange(max(bounds[-1], OPEN_ROWS), proposed[0].to_json()),))]
        # Of a named number of rows, the kernel that is the fastest for it, as a static function has it.
        fixed = {n: min(times, key=lambda own: times[own][n][-1]) for n, most in enumerate(bounds) if most in named}
        chosen = [*_kernels_of(times, range(own), {}), *_kernels_of(times, range(own, len(bounds)), fixed)]
        if bounds[-1] < OPEN_ROWS:
            # The kernel of a named number of rows may be for no more than these: take the nearest of the ranges before.
            beyond = next(filter(is_open_ended, (*reversed(chosen), *times)), chosen[-1])
            chosen, bounds = [*chosen, beyond], (*bounds, OPEN_ROWS)
        return [_ranges(bounds, [one.to_json() for one in chosen], own)]

    def place(self, func: tirx.PrimFunc, sizes: Mapping[str, int]) -> Place:
        """Return the number of rows of a function at some sizes: what tells lines of its table apart."""
        count = symbolic_rows(func)
        assert count is not None
        return (("rows", size_at(count, sizes)),)

    def lines(self, func: tirx.PrimFunc, target: ResolvedTarget, place: Place) -> Sequence[Parameters] | Refusal:
        """Return what may be at so many rows of a function's table, the most promising first, or why nothing may."""
        offered = self._offered(func, target)
        return offered if isinstance(offered, Refusal) else offered[0].candidates(func, target, _rows(place))

    def refusal(self, func: tirx.PrimFunc, target: ResolvedTarget, decision: str, place: Place) -> Refusal | None:
        """Return why a decision that was measured at so many rows cannot be in a function's table."""
        try:
            maker, own = self._parsed(decision)
        except TemplateError as error:
            return Refusal(str(error))
        # To make a kernel takes a hundred times as long as to predict it.
        if maker.predict_us(func, target, own, _rows(place)) is not None:
            return None
        made = maker.apply(func, target, own, _rows(place))
        return made if isinstance(made, Refusal) else None

    def _make(self, case: Case[tirx.Expr], p: RangesParameters) -> tirx.PrimFunc | Refusal:
        chosen = [(one.most, *self._parsed(one.decision)) for one in p.ranges]
        # Launch attributes are those of the whole PrimFunc.
        if not all(is_dependent(own) for _, _, own in chosen):
            chosen = [(most, maker, independent(own)) for most, maker, own in chosen]
        # Ranges of one kernel share that of the last of them, which is planned for its most rows. The first range has
        # its own where boxes are loaded: it is planned for few rows.
        apart, last = chosen[0][2].loads_boxes, {own: number for number, (_, _, own) in enumerate(chosen)}
        places = [0 if apart and number == 0 else last[own] for number, (_, _, own) in enumerate(chosen)]
        kernels = []
        for most, maker, own in (chosen[place] for place in sorted(set(places))):
            made = maker.apply(case.func, case.target, own, most)
            if isinstance(made, Refusal):
                return Refusal(f"of up to {most} rows: {made.reason}")
            kernels.append(made)
        lines = [
            ([case.found <= tirx.IntImm("int64", most)], sorted(set(places)).index(place))
            for (most, _, _), place in zip(chosen, places, strict=True)
        ]
        return launch_by_lines(case.func, lines, kernels, case.found)

    def _proposed(
        self, func: tirx.PrimFunc, target: ResolvedTarget, planned: Sequence[int]
    ) -> tuple[Template, list[Parameters]] | Refusal:
        """Return the first template to make the function for many rows, and what it proposes for those planned."""
        found = self._offered(func, target)
        if isinstance(found, Refusal):
            return found
        maker, offered = found
        proposed = list(offered[:_LISTED]) if planned[-1] == PLANNED_ROWS[-1] else []
        for least, most in zip((0, *planned), planned, strict=False):
            for rows in ((least + most) // 2, most):
                others = maker.candidates(func, target, rows)
                proposed += [] if isinstance(others, Refusal) else others[:_LISTED]
        # Parameters are values: each once, in their order.
        return maker, list(dict.fromkeys(proposed))

    def _offered(self, func: tirx.PrimFunc, target: ResolvedTarget) -> tuple[Template, Sequence[Parameters]] | Refusal:
        """Return the first template to make the function for the most rows that are planned for, and its proposals."""
        refused = []
        for name, maker in self._makers.items():
            offered = maker.candidates(func, target, PLANNED_ROWS[-1])
            if not isinstance(offered, Refusal):
                return maker, offered
            refused.append(f"{name}: {offered.reason}")
        return Refusal("; ".join(refused))

    def _parsed(self, decision: str) -> tuple[Template, Parameters]:
        name = template_of(decision)
        maker = self._makers.get(name)
        if maker is None:
            raise TemplateError(f"template {name!r} is not known here, expected one of {', '.join(self._makers)}.")
        return maker, maker.parse(decision)


def _times(
    maker: Template, func: tirx.PrimFunc, target: ResolvedTarget, proposed: Sequence[Parameters], bounds: Sequence[int]
) -> dict[Parameters, list[list[float]]]:
    """Return how much longer than the best each takes for the least and the most rows of each range.

    Kernels that cannot serve all are left out.
    """
    calls = [(bounds[number - 1] + 1 if number else 1, most) for number, most in enumerate(bounds)]
    times: dict[Parameters, list[list[float]]] = {}
    for own in proposed:
        predicted = [[maker.predict_us(func, target, own, rows) for rows in few] for few in calls]
        known = [[time for time in few if time is not None] for few in predicted]
        if all(len(few) == len(found) for few, found in zip(calls, known, strict=True)):
            times[own] = known
    best = [[min(column) for column in zip(*few, strict=True)] for few in zip(*times.values(), strict=True)]
    equal = _EQUAL_US if proposed[0].loads_boxes else _EQUAL_MEMORY_US
    return {
        own: [
            [max(time - equal, least) / least for time, least in zip(few, fewest, strict=True)]
            for few, fewest in zip(known, best, strict=True)
        ]
        for own, known in times.items()
    }


def _kernels_of(
    times: Mapping[Parameters, Sequence[Sequence[float]]], ranges: Sequence[int], fixed: Mapping[int, Parameters]
) -> list[Parameters]:
    """Return the kernel of each range: of as few as serve all calls nearly as well as each range's own.

    `fixed` are ranges whose kernel is known.
    """
    losses = {own: [math.log(math.prod(known[n])) for n in ranges] for own, known in times.items()}
    calls = sum(len(next(iter(times.values()))[n]) for n in ranges)
    kernels = cover(losses, lambda before, after: sum(before) - sum(after) <= _WORTH * calls, fixed.values())
    return [fixed.get(n, own) for n, own in zip(ranges, nearest(losses, kernels), strict=True)]


def _ranges(bounds: Sequence[int], decisions: Sequence[str], apart: int = 0) -> RangesParameters:
    """Return a table of ranges; neighbours of one decision are one, but for the first `apart`."""
    points = [{"rows": most} for most in bounds]
    numbers = [(n < apart, decision) for n, decision in enumerate(decisions)]
    lines = cut_lines({"rows": bounds}, points, [numbers.index(one) for one in numbers])
    return RangesParameters(
        tuple(SizeRange(dict(one.most).get("rows", bounds[-1]), decisions[one.kernel]) for one in lines)
    )


def _rows(place: Place) -> int:
    ((_, rows),) = place
    return rows


def symbolic_rows(func: tirx.PrimFunc) -> tirx.Expr | None:
    """Return the expression of a function's number of rows, None where its output's shape is known.

    Rows are all axes but the last of the output with the longest last axis; where they are known, all its elements.
    """
    shapes = [shape for position in written_params(func) if (shape := shape_of(func.params[position]))]
    if not shapes:
        return None
    widest = max(shapes, key=lambda shape: shape[-1] if isinstance(shape[-1], int) else 0)
    rows, elements = math.prod(widest[:-1]), math.prod(widest)
    return next((count for count in (rows, elements) if not isinstance(count, int)), None)
