"""Attention with symbolic sizes: a few kernels of `template.py`, and a table that says which one a call takes.

::

    batch <= 1   sequence <= 64     one warpgroup, 64 keys          the first line whose bounds a call keeps
                 sequence <= 512    one warpgroup, 128 keys
                 any                two warpgroups, 128 keys
    any          any                ...

Every kernel takes every size; the table only says which is fast. It is one PrimFunc: its host code finds the line, and
launches that kernel. The lines are what `template.py` predicts at one point each, and the kernels are as few as serve
all points nearly as well as each point's own, because each takes time to compile.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.attention import AttentionSpec, spec_of
from relaxtune.schedules.sizes import variables_of
from relaxtune.schedules.targets import CudaLimits, Feature, ResolvedTarget
from relaxtune.schedules.templates.attention.recognise import bias_bytes, recognise_attention
from relaxtune.schedules.templates.attention.sizes import variables_in, with_values
from relaxtune.schedules.templates.attention_sm90.kernel import build_kernel
from relaxtune.schedules.templates.attention_sm90.plan import (
    AttentionParameters,
    AttentionPlan,
    make_plan,
    refuse_registers,
    registers_needed,
)
from relaxtune.schedules.templates.attention_sm90.template import predicted_cycles, propose_for
from relaxtune.schedules.templates.base import (
    Case,
    KernelTemplate,
    Parameters,
    TemplateError,
    canonical_json,
    cuda_limits,
    refuse_shared,
    template_of,
)
from relaxtune.schedules.templates.cut import Line, Place, cover, cut_lines, nearest
from relaxtune.schedules.templates.launch_table import launch_by_lines

# The points that kernels are planned for: each is the most of its line, and the last one is for all above, too.
_BATCHES = (1, 4, 16, 64)
_LENGTHS = (16, 64, 128, 256, 512, 1024, 2048)
# Positions of caches, beside lengths.
_PAST = (64, 512, 2048)
_PROPOSED_MAX = 3
# Registers of symbolic sizes where residents share them (of 96 with 4 residents, one was spilled).
_REGISTERS_OF_SIZES = 6
# A point has a kernel of its own where the others would take longer by more than this factor.
_GOOD_ENOUGH = 1.04
# Keys that a query sees of packed sequences, for the prediction.
_SPAN = 64
# The factor of a kernel that the prediction does not take for a point.
_WORST = 10.0


@dataclass(frozen=True)
class TableParameters(Parameters):
    """Kernels, and lines that name one each. A call takes the first line that it keeps to; the last has no bounds."""

    template: ClassVar[str] = "attention_sm90_table"

    kernels: tuple[AttentionParameters, ...] = ()
    lines: tuple[Line, ...] = ()

    def to_json(self) -> str:
        """Return the parameters as canonical JSON text: the decision of a tuning record."""
        document = {
            "template": self.template,
            "kernels": [json.loads(kernel.to_json()) for kernel in self.kernels],
            "lines": [{"most": dict(line.most), "kernel": line.kernel} for line in self.lines],
        }
        return canonical_json(document)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the parameters that `to_json` wrote.

        Raises `TemplateError`: the text is of another template, or no such table.
        """
        document = cls._document(text)
        try:
            kernels = tuple(AttentionParameters.from_json(json.dumps(kernel)) for kernel in document["kernels"])
            lines = tuple(Line(tuple(sorted(line["most"].items())), line["kernel"]) for line in document["lines"])
        except (AttributeError, KeyError, TypeError) as error:
            raise TemplateError(
                f'decision {text!r}: expected "kernels", decisions of attention_sm90, and "lines", objects with "most" '
                'and the number of a "kernel"; measure the task again.'
            ) from error
        if not lines or lines[-1].most or any(not 0 <= line.kernel < len(kernels) for line in lines):
            raise TemplateError(
                f"decision {text!r}: expected lines that name one of the {len(kernels)} kernels by its number, the "
                "last one without bounds; measure the task again."
            )
        return cls(kernels, lines)

    def at(self, place: Place) -> str:
        """Return the decision for some sizes: the kernel of the first line that they keep to."""
        sizes = dict(place)
        line = next(line for line in self.lines if all(sizes[name] <= most for name, most in line.most))
        return self.kernels[line.kernel].to_json()

    def with_measured(self, winners: Mapping[Place, str]) -> TableParameters:
        """Return this table with the decisions that were the fastest at some sizes, each for its line alone."""
        bounds = [line.most for line in self.lines] + list(winners)
        axes: dict[str, list[int]] = {}
        for name in dict.fromkeys(name for place in winners for name, _ in place):
            sizes = sorted({size for bound in bounds for one, size in bound if one == name})
            # The last one has no bound.
            axes[name] = [*sizes, sizes[-1] + 1]
        points = [tuple(zip(axes, sizes, strict=True)) for sizes in itertools.product(*axes.values())]
        chosen = [winners.get(point) or self.at(point) for point in points]
        used = list(dict.fromkeys(chosen))
        lines = cut_lines(axes, [dict(point) for point in points], [used.index(one) for one in chosen])
        return TableParameters(tuple(AttentionParameters.from_json(one) for one in used), lines)


class AttentionTable(KernelTemplate[AttentionSpec, TableParameters]):
    """The template; see `schedules.templates.base.KernelTemplate`."""

    parameters = TableParameters

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> AttentionSpec | Refusal:
        spec = recognise_attention(func, target, Feature.WGMMA, Feature.TMA)
        if not isinstance(spec, Refusal) and spec.is_static:
            return Refusal("its sizes are known (attention_sm90 makes such functions)")
        return spec

    def _propose(self, case: Case[AttentionSpec]) -> Sequence[TableParameters] | Refusal:
        names = tuple(sorted(variables_in(case.func)))
        table = _table(case.found.to_json(), names, case.limits, bias_bytes(case.func, case.found))
        return [table] if table is not None else Refusal("no tile fits these shapes")

    def place(self, func: tirx.PrimFunc, sizes: Mapping[str, int]) -> Place:
        """Return the sizes that tell lines of a function's table apart."""
        spec = spec_of(func)
        assert spec is not None
        return tuple((name, sizes[name]) for name in sorted(_axes(spec)))

    def lines(self, func: tirx.PrimFunc, target: ResolvedTarget, place: Place) -> Sequence[Parameters] | Refusal:
        """Return what may be at some sizes of a function's table, the most promising first, or why nothing may."""
        spec = self._recognise(func, target)
        if isinstance(spec, Refusal):
            return spec
        limits, mask_bytes = cuda_limits(target), bias_bytes(func, spec)
        return list(_proposed(spec, _at(spec, dict(place)), limits, mask_bytes))

    def refusal(self, func: tirx.PrimFunc, target: ResolvedTarget, decision: str, _place: Place) -> Refusal | None:
        """Return why a decision that was measured at some sizes cannot be in a function's table."""
        spec = self._recognise(func, target)
        if isinstance(spec, Refusal):
            return spec
        if template_of(decision) != AttentionParameters.template:
            return Refusal(f"template {template_of(decision)} makes no attention of symbolic sizes")
        p = AttentionParameters.from_json(decision)
        if not _suits(spec, p):
            return Refusal("packed sequences share no keys and no blocks")
        plan = symbolic_plan(spec, p, cuda_limits(target), bias_bytes(func, spec))
        return plan if isinstance(plan, Refusal) else None

    def _make(self, case: Case[AttentionSpec], p: TableParameters) -> tirx.PrimFunc | Refusal:
        func, found = case.func, case.found
        variables = variables_in(func)
        unknown = {name for line in p.lines for name, _ in line.most} - set(variables)
        if unknown:
            raise TemplateError(f"the table bounds {sorted(unknown)}, the function has {sorted(variables)}.")
        kernels = []
        for kernel in p.kernels:
            plan = symbolic_plan(found, kernel, case.limits, bias_bytes(func, found))
            if isinstance(plan, Refusal):
                return plan
            kernels.append(build_kernel(func, plan))
        lines = [
            ([variables[name] <= tirx.IntImm("int64", most) for name, most in line.most], line.kernel)
            for line in p.lines
        ]
        return launch_by_lines(func, lines, kernels, found.batch * found.queries * found.keys)


def symbolic_plan(
    spec: AttentionSpec, p: AttentionParameters, limits: CudaLimits, mask_bytes: int
) -> AttentionPlan | Refusal:
    """Return the plan of a kernel for an attention of symbolic sizes, or why there is none with these parameters."""
    if spec.growth is not None and p.blocks:
        return Refusal("caches that grow take a block for each tile")
    # Registers and shared memory are those of long sequences; only tiles of one batch element are made together.
    batch = variables_of([[spec.batch]])
    found = make_plan(
        with_values(spec, {name: 1 if name in batch else _LENGTHS[-1] for name in spec.variables}), p, limits
    )
    if isinstance(found, Refusal):
        return found
    plan = replace(found, spec=spec)
    needed = registers_needed(spec, p, mask_bytes) + (_REGISTERS_OF_SIZES if p.residents > 1 else 0)
    return refuse_registers(needed, p, limits) or refuse_shared(plan.shared_bytes, limits) or plan


@lru_cache(maxsize=64)
def _table(text: str, names: tuple[str, ...], limits: CudaLimits, mask_bytes: int) -> TableParameters | None:
    """Return the table of as few kernels as serve each point nearly as well as its own; None where nothing fits.

    The attention comes as text: passes and the choice of kernels ask for the same one several times.
    """
    spec = AttentionSpec.from_json(text, {name: tirx.Var(name, "int64") for name in names})
    axes = _axes(spec)
    points = [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*axes.values())]
    plain = [_at(spec, point) for point in points]
    pool: dict[AttentionParameters, list[float]] = {}
    for point, one in zip(points, plain, strict=True):
        # To propose takes a hundred times as long as to predict: at every other point.
        if any(sizes.index(point[name]) % 2 for name, sizes in axes.items()):
            continue
        for p in _proposed(spec, one, limits, mask_bytes, _PROPOSED_MAX):
            if p not in pool:
                pool[p] = [_cycles(each, p, limits, mask_bytes) for each in plain]
    if not pool or any(math.isinf(min(costs)) for costs in zip(*pool.values(), strict=True)):
        return None
    best = [min(costs) for costs in zip(*pool.values(), strict=True)]
    losses = {
        p: [min(cost / least, _WORST) for cost, least in zip(costs, best, strict=True)] for p, costs in pool.items()
    }
    kernels = cover(losses, lambda reached, _: max(reached) <= _GOOD_ENOUGH)
    chosen = nearest(pool, kernels)
    used = [kernel for kernel in kernels if kernel in chosen]
    return TableParameters(tuple(used), cut_lines(axes, points, [used.index(kernel) for kernel in chosen]))


def _at(spec: AttentionSpec, point: Mapping[str, int]) -> AttentionSpec:
    """Return an attention at the sizes of a point; lengths that are no axis of points are long ones."""
    rest = {name: _LENGTHS[-1] for name in spec.variables if name not in point}
    # Kernels for spans are predicted for a window as wide as these.
    of_window = spec if spec.spans is None else replace(spec, spans=None, window=_SPAN)
    return with_values(of_window, {**rest, **point})


def _proposed(
    spec: AttentionSpec, one: AttentionSpec, limits: CudaLimits, mask_bytes: int, most: int | None = None
) -> Iterator[AttentionParameters]:
    """Yield parameters for an attention at a point, of at most so many proposals, that fit symbolic sizes."""
    for proposed in propose_for(one, limits, mask_bytes, symbolic=True)[:most]:
        # Symbolic sizes take more registers: with fewer residents where they must.
        for residents in range(proposed.residents, 0, -1) if _suits(spec, proposed) else ():
            p = replace(proposed, residents=residents, blocks=proposed.blocks // proposed.residents * residents)
            if isinstance(symbolic_plan(spec, p, limits, mask_bytes), AttentionPlan):
                yield p
                break


def _suits(spec: AttentionSpec, p: AttentionParameters) -> bool:
    """Whether parameters are for what an attention's sequences are: packed ones share no keys and no blocks."""
    return spec.spans is None or not (p.split > 1 or p.blocks)


def _axes(spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """Return the sizes of points along each variable: of the batch, of lengths, of what is before the queries."""
    batch, queries, keys = (variables_of([[size]]) for size in (spec.batch, spec.queries, spec.keys))
    past = [name for name in keys if name not in queries]
    before = _PAST if queries else _LENGTHS
    axes: dict[str, tuple[int, ...]] = dict.fromkeys(batch, _BATCHES)
    axes.update(dict.fromkeys(queries, _LENGTHS))
    axes.update({name: before for name in past if name not in batch})
    return axes


def _cycles(spec: AttentionSpec, p: AttentionParameters, limits: CudaLimits, mask_bytes: int) -> float:
    """Return the time of a kernel at known sizes; infinite where it would not be taken for them."""
    if isinstance(spec.keys, int) and spec.keys <= p.block_k:
        # Nothing runs beside the only block of keys.
        p = replace(p, overlap=False)
    plan = make_plan(spec, p, limits, bias_bytes=mask_bytes)
    if p.blocks and isinstance(plan, AttentionPlan) and plan.query_stages == 1:
        # A block that makes one tile takes as long as one that was made for that.
        plan = make_plan(spec, replace(p, blocks=0), limits, bias_bytes=mask_bytes)
    return math.inf if isinstance(plan, Refusal) else predicted_cycles(plan, limits)
