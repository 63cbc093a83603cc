"""Kernels for a symbolic number of rows: a small table of ranges, each with a template's decision of its own.

::

    rows    <= 16           gemv, 64 columns a block         the first range that has the call's number of rows
            <= 128          gemm_sm90, 64 x 64, split in 3
            above           gemm_sm90, 128 x 192             planned for the number that the table names

The table is one PrimFunc. Its host code compares the number of rows and launches one of several device kernels, so that
the choice costs a few comparisons, and Relax sees one call. Rows are all axes of the output but the last one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeAlias

import tvm_ffi
from tvm import tirx
from tvm.ir import StringImm

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import OPEN_ROWS, Parameters, Template, TemplateError, template_of
from relaxtune.schedules.tir.blocks import shape_of, static_shape, written_params

#: The most rows of each range where nothing was measured; the last one is for all above, too.
DEFAULT_RANGES = (16, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
# Candidates of a template that are compared over the calls of a range.
_LISTED = 8
# A range has a kernel of its own where the one of the range above takes longer by more than this factor and time.
# The memory-bound ones are predicted to a few tenths of a microsecond.
_GOOD_ENOUGH, _GOOD_ENOUGH_US, _GOOD_ENOUGH_MEMORY_US = 1.04, 0.05, 0.2
_INDEX_MAX = 2**31 - 1

#: What must hold, and the text of the error where it does not.
Check: TypeAlias = "tuple[tirx.Expr, str]"


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
        return _text({"template": self.template, "ranges": ranges})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the parameters that `to_json` wrote.

        Raises
        ------
        TemplateError
            The text is of another template, or no table of ranges in their order.
        """
        if template_of(text) != cls.template:
            raise TemplateError(f"decision {text!r} is not of template {cls.template!r}; measure the task again.")
        entries = json.loads(text).get("ranges")
        if not isinstance(entries, list) or not all(_is_entry(one) for one in entries):
            raise TemplateError(
                f'decision {text!r}: expected "ranges", a list of objects with "most", a number of rows, and '
                '"decision", a decision of a template; measure the task again.'
            )
        ranges = tuple(SizeRange(one["most"], _text(one["decision"])) for one in entries)
        sizes = [one.most for one in ranges]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1 or sizes[-1] < OPEN_ROWS:
            raise TemplateError(
                f"decision {text!r}: its ranges end at {sizes}, expected rising numbers of rows, the last one "
                f"{OPEN_ROWS} at least; measure the task again."
            )
        return cls(ranges)


class Ranges:
    """The template of functions with a symbolic number of rows; `makers` make the kernels of the ranges."""

    name = RangesParameters.template

    def __init__(self, makers: Mapping[str, Template]) -> None:
        self._makers = makers

    def candidates(
        self, func: tirx.PrimFunc, target: ResolvedTarget, rows: int | None = None
    ) -> Sequence[RangesParameters] | Refusal:
        """Return the table of what the templates propose first for each range, or why there is none."""
        if symbolic_rows(func) is None:
            return Refusal("its output's shape is known (the other templates make such functions)")
        bounds = DEFAULT_RANGES if rows is None else (rows,)
        found: list[tuple[int, Template, Parameters]] = []
        for number, most in reversed(list(enumerate(bounds))):
            least = bounds[number - 1] + 1 if number else 1
            calls = tuple(dict.fromkeys((least, (least + most) // 2, most)))
            first = self._first(func, target, calls)
            if isinstance(first, Refusal):
                return first
            # Loads of many rows of which few exist are slow (H200: 1.1 to 1.4 times as long with 1 to 16 rows).
            apart = number == 0 and first[1].loads_boxes
            if not found or apart or not self._is_good_enough(func, target, found[-1][2], calls, first):
                found.append((most, *first))
        ranges = [SizeRange(most, own.to_json()) for most, _, own in reversed(found)]
        return [RangesParameters(tuple(ranges))]

    def apply(
        self, func: tirx.PrimFunc, target: ResolvedTarget, parameters: Parameters, rows: int | None = None
    ) -> tirx.PrimFunc | Refusal:
        """Return the PrimFunc that launches the kernel of each range, or why it cannot be made.

        Raises
        ------
        TemplateError
            The parameters are another template's, or a range's decision is of a template that is not known here.
        """
        if not isinstance(parameters, RangesParameters):
            raise TemplateError(f"template {self.name} got {parameters!r}; expected {RangesParameters.__name__}.")
        count = symbolic_rows(func)
        if count is None:
            return Refusal("its output's shape is known, expected a symbolic one")
        chosen = [(one.most, *self._parsed(one.decision)) for one in parameters.ranges]
        # Launch attributes are those of the whole PrimFunc.
        if not all(getattr(own, "dependent", False) for _, _, own in chosen):
            chosen = [(most, maker, _independent(own)) for most, maker, own in chosen]
        kernels = []
        for most, maker, own in chosen:
            made = maker.apply(func, target, own, most)
            if isinstance(made, Refusal):
                return Refusal(f"of up to {most} rows: {made.reason}")
            kernels.append(made)
        within = [count <= tirx.IntImm("int64", most) for most, _, _ in chosen[:-1]]
        most_rows = _most_rows(func)
        why = f"too many rows: a tensor has 2**31 elements or more, this kernel takes {most_rows} rows"
        return launch_first(func, within, kernels, count, [(count <= tirx.IntImm("int64", most_rows), why)])

    def predict_us(
        self, func: tirx.PrimFunc, target: ResolvedTarget, parameters: Parameters, rows: int
    ) -> float | None:
        """Return None: tables are not compared."""
        return None

    def parse(self, decision: str) -> RangesParameters:
        """Return the parameters of a decision; TemplateError when it is not one of this template's."""
        return RangesParameters.from_json(decision)

    def _first(
        self, func: tirx.PrimFunc, target: ResolvedTarget, calls: Sequence[int]
    ) -> tuple[Template, Parameters] | Refusal:
        """Return the first template to make the function, and what it takes for calls of some numbers of rows."""
        refused = []
        for name, maker in self._makers.items():
            offered = maker.candidates(func, target, calls[-1])
            if isinstance(offered, Refusal):
                refused.append(f"{name}: {offered.reason}")
                continue
            others = maker.candidates(func, target, calls[len(calls) // 2]) if len(calls) > 2 else offered
            listed = [*offered[:_LISTED], *(() if isinstance(others, Refusal) else others[:_LISTED])]
            # Parameters are values: each once, in their order.
            return maker, _least_longer(maker, func, target, list(dict.fromkeys(listed)), calls)
        return Refusal("; ".join(refused))

    def _is_good_enough(
        self,
        func: tirx.PrimFunc,
        target: ResolvedTarget,
        larger: Parameters,
        calls: Sequence[int],
        best: tuple[Template, Parameters],
    ) -> bool:
        """Whether the decision of the range above serves this range, too: each kernel takes time to compile."""
        maker, own = best
        if own == larger:
            return True
        if own.template != larger.template:
            return False
        spare = _GOOD_ENOUGH_US if own.loads_boxes else _GOOD_ENOUGH_MEMORY_US
        for rows in calls:
            other, least = (maker.predict_us(func, target, one, rows) for one in (larger, own))
            if other is None or least is None or other > _GOOD_ENOUGH * least + spare:
                return False
        return True

    def _parsed(self, decision: str) -> tuple[Template, Parameters]:
        name = template_of(decision)
        maker = self._makers.get(name)
        if maker is None:
            raise TemplateError(f"template {name!r} is not known here, expected one of {', '.join(self._makers)}.")
        return maker, maker.parse(decision)


def _least_longer(
    maker: Template, func: tirx.PrimFunc, target: ResolvedTarget, listed: Sequence[Parameters], calls: Sequence[int]
) -> Parameters:
    """Return those parameters that take the least longer than the best of each number of rows, the first if unknown."""
    times = {}
    for own in listed:
        predicted = [maker.predict_us(func, target, own, rows) for rows in calls]
        known = [time for time in predicted if time is not None]
        if len(known) == len(calls):
            times[own] = known
    if not times:
        return listed[0]
    best = [min(column) for column in zip(*times.values(), strict=True)]
    return min(times, key=lambda own: math.prod(time / least for time, least in zip(times[own], best, strict=True)))


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


def launch_first(
    func: tirx.PrimFunc,
    conditions: Sequence[tirx.Expr],
    kernels: Sequence[tirx.PrimFunc],
    work: tirx.Expr,
    checks: Sequence[Check],
) -> tirx.PrimFunc:
    """Return the function that runs the first kernel whose condition holds, the last where none does.

    Conditions, checks and `work` are expressions of the function's variables. Without `work` (0), no kernel runs. Where
    a check does not hold, its text is the error.
    """
    first = kernels[0]
    bodies = [_with_params(kernel, first.params) for kernel in kernels]
    body = bodies[-1]
    for condition, other in reversed(list(zip(conditions, bodies[:-1], strict=True))):
        body = tirx.IfThenElse(condition, other, body)
    asserts = [tirx.AssertStmt(holds, StringImm("ValueError"), [StringImm(why)]) for holds, why in checks]
    # A grid has a block at least.
    body = tirx.SeqStmt([*asserts, tirx.IfThenElse(work > tirx.IntImm("int64", 0), body, None)])
    made = tirx.PrimFunc(first.params, body, first.ret_type)
    for key, value in first.attrs.items() if first.attrs else ():
        made = made.with_attr(key, value)
    return made


def _most_rows(func: tirx.PrimFunc) -> int:
    """Return how many rows have elements that 32 bits count, of the widest tensor."""
    shapes = [shape for param in func.params if (shape := shape_of(param)) and static_shape(param) is None]
    return _INDEX_MAX // max(math.prod(size for size in shape if isinstance(size, int)) for shape in shapes)


def _with_params(kernel: tirx.PrimFunc, params: Sequence[tirx.Var]) -> tirx.Stmt:
    """Return a kernel's body with its parameters replaced."""
    renamed = dict(zip(kernel.params, params, strict=True))
    return tvm_ffi.structural_map(kernel.body, (tirx.Var, lambda var: renamed.get(var, var)))


def _independent(parameters: Parameters) -> Parameters:
    if not getattr(parameters, "dependent", False):
        return parameters
    change: dict[str, Any] = {"dependent": False}
    return replace(parameters, **change)


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"most", "decision"}:
        return False
    return isinstance(entry["most"], int) and isinstance(entry["decision"], dict)


def _text(document: Mapping[str, object]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))
